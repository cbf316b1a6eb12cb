//! Ending a running machine.

use std::time::Duration;

use crate::monitor::MONITOR_DEADLINE;
use crate::{Registry, RunningVm, VmmError};

/// How a machine came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// The guest shut down.
    ByGuest,
    /// QEMU ended when it was told to.
    ByQemu,
    /// QEMU did not listen and was killed.
    Killed,
}

/// Ends a machine: presses its power button, after `grace` tells QEMU to end, and kills it if it does not. Returns when it is
/// gone and forgotten.
pub fn stop(registry: &Registry, machine: &RunningVm, grace: Duration) -> Result<Stopped, VmmError> {
    let stopped = end(machine, grace)?;
    registry.remove(machine)?;
    Ok(stopped)
}

fn end(machine: &RunningVm, grace: Duration) -> Result<Stopped, VmmError> {
    let RunningVm { process, monitor, .. } = machine;
    // A guest that does not hear the button is ended without.
    if !grace.is_zero() && monitor.press_power_button().is_ok() && process.wait_until_gone(grace) {
        return Ok(Stopped::ByGuest);
    }
    if monitor.quit().is_ok() && process.wait_until_gone(MONITOR_DEADLINE) {
        return Ok(Stopped::ByQemu);
    }
    let failed = |reason: String| VmmError::Monitor { reason };
    process.kill().map_err(|error| failed(format!("process {} cannot be killed: {error}", process.pid)))?;
    if !process.wait_until_gone(MONITOR_DEADLINE) {
        return Err(failed(format!("process {} was killed and does not end", process.pid)));
    }
    Ok(Stopped::Killed)
}
