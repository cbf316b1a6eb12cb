//! Which actuator a machine gets.

use std::fmt;
use std::time::Duration;

use super::{Actuator, CgroupActuator, ShimActuator, failed};
use crate::{RunningVm, VmmError};

/// The kinds of actuators.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// A library inside QEMU.
    Shim,
    /// The kernel's processor quota.
    Cgroup,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shim => "shim",
            Self::Cgroup => "cgroup",
        })
    }
}

/// An actuator, and why it is this one.
pub struct Choice {
    /// The actuator.
    pub actuator: Box<dyn Actuator>,
    /// Why.
    pub reason: String,
}

/// The shim where QEMU has it, for it takes shorter windows; else the kernel's quota. `asked` takes the choice away.
pub fn choose(machine: &RunningVm, asked: Option<Kind>) -> Result<Choice, VmmError> {
    let shim = || -> Result<Box<dyn Actuator>, VmmError> { Ok(Box::new(ShimActuator::new(machine)?)) };
    let cgroup = || -> Result<Box<dyn Actuator>, VmmError> {
        let mut actuator = CgroupActuator::new(machine)?;
        // It is there if it takes an order.
        actuator.set(super::duty(1.0, Duration::from_millis(10)))?;
        Ok(Box::new(actuator))
    };
    match asked {
        Some(Kind::Shim) => Ok(Choice { actuator: shim()?, reason: "it was asked for".to_owned() }),
        Some(Kind::Cgroup) => Ok(Choice { actuator: cgroup()?, reason: "it was asked for".to_owned() }),
        None => match shim() {
            Ok(actuator) => Ok(Choice { actuator, reason: "QEMU was started with the shim".to_owned() }),
            Err(no_shim) => match cgroup() {
                Ok(actuator) => Ok(Choice { actuator, reason: format!("no shim: {no_shim}") }),
                Err(no_cgroup) => Err(failed(format!(
                    "the vCPUs of {} cannot be sliced. Shim: {no_shim}. cgroup: {no_cgroup}",
                    machine.name
                ))),
            },
        },
    }
}
