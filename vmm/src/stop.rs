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
    // Another machine that has taken the monitor's place is not ended for it.
    let listens = || machine.vcpus().is_ok();
    // A guest that does not hear the button is ended without.
    let pressed = !grace.is_zero() && listens() && monitor.press_power_button().is_ok();
    if pressed && process.wait_until_gone(grace) {
        return Ok(Stopped::ByGuest);
    }
    if listens() && monitor.quit().is_ok() && process.wait_until_gone(MONITOR_DEADLINE) {
        return Ok(Stopped::ByQemu);
    }
    let failed = |reason: String| VmmError::Monitor { reason };
    process.kill().map_err(|error| failed(format!("process {} cannot be killed: {error}", process.pid)))?;
    if !process.wait_until_gone(MONITOR_DEADLINE) {
        return Err(failed(format!("process {} was killed and does not end", process.pid)));
    }
    Ok(Stopped::Killed)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::monitor::fake::Qemu;
    use crate::{MonitorAddress, Origin, Process};

    /// A machine whose process is this one, with its monitor there.
    fn machine(process: Process, qemu: &Qemu) -> RunningVm {
        RunningVm {
            name: "a".to_owned(),
            process,
            origin: Origin::Attached,
            monitor: MonitorAddress::Socket { path: qemu.path.clone() },
            vcpu_control: None,
            files: Vec::new(),
        }
    }

    /// What a QEMU says of its one vCPU.
    fn vcpu(thread: u32) -> String {
        format!(
            r#"{{"return": [{{"thread-id": {thread}, "qom-path": "/a", "cpu-index": 0, "target": "x86_64"}}]}}"#
        )
    }

    #[test]
    fn a_machine_is_asked_to_end_as_was_wished() {
        for (grace, asked, stopped) in [
            (Duration::ZERO, "quit", Stopped::ByQemu),
            (MONITOR_DEADLINE, "system_powerdown", Stopped::ByGuest),
        ] {
            let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
            let process = Process::with_id(child.id()).unwrap();
            let qemu = Qemu::start(move |name, _| {
                if name == "query-cpus-fast" {
                    return Some(vcpu(process.pid));
                }
                assert_eq!(name, asked);
                process.kill().unwrap();
                Some(r#"{"return": {}}"#.to_owned())
            });
            let directory = tempfile::tempdir().unwrap();
            let registry = Registry::new(directory.path());
            let machine = machine(process, &qemu);
            registry.add(&machine).unwrap();
            assert_eq!(stop(&registry, &machine, grace).unwrap(), stopped);
            assert!(registry.running().unwrap().machines.is_empty());
            child.wait().unwrap();
        }
    }

    #[test]
    fn another_machine_at_its_monitor_is_not_ended_for_it() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::with_id(child.id()).unwrap();
        // It took the socket away: its vCPU is a thread of another process, this one.
        let own = std::process::id();
        let qemu = Qemu::start(move |name, _| {
            Some(match name {
                "query-cpus-fast" => vcpu(own),
                _ => r#"{"return": {}}"#.to_owned(),
            })
        });
        let directory = tempfile::tempdir().unwrap();
        let machine = machine(process, &qemu);
        let error = machine.vcpus().unwrap_err().to_string();
        assert!(error.contains("is not that of process"), "{error}");
        let registry = Registry::new(directory.path());
        registry.add(&machine).unwrap();
        assert_eq!(stop(&registry, &machine, Duration::from_secs(20)).unwrap(), Stopped::Killed);
        assert!(qemu.asked().iter().all(|name| name == "query-cpus-fast"));
        child.wait().unwrap();
    }
}
