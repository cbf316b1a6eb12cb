//! Which actuator a machine gets.

use std::fmt;
use std::time::Duration;

use super::{Actuator, CgroupActuator, PacingActuator, Share, ShimActuator, VcpuThreads, failed};
use crate::{RunningVm, VmmError};

/// The kinds of actuators.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// A library inside QEMU.
    Shim,
    /// The kernel's processor quota.
    Cgroup,
    /// None of the vCPUs' time: with `--share fair`, the machine's queues get what its vCPUs leave of its share.
    Pacing,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shim => "shim",
            Self::Cgroup => "cgroup",
            Self::Pacing => "pacing",
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

/// The shim where QEMU has it, for it takes shorter windows; else the kernel's quota; and where neither is possible, what the machine's queues
/// move is held alone, if `share` is one of the fabric. `asked` takes the choice away.
pub fn choose(machine: &RunningVm, asked: Option<Kind>, share: Share) -> Result<Choice, VmmError> {
    let reason = match asked {
        Some(_) => "it was asked for".to_owned(),
        None => "QEMU was started with the shim".to_owned(),
    };
    let with = |actuator: Box<dyn Actuator>, reason| Ok(Choice { actuator, reason });
    match asked {
        Some(Kind::Shim) => with(shim(machine)?, reason),
        Some(Kind::Cgroup) => with(cgroup(machine)?, reason),
        Some(Kind::Pacing) if share == Share::Fair => with(pacing(machine)?, reason),
        Some(Kind::Pacing) => Err(failed(
            "pacing holds what the machine's queues move to its share of the fabric, and not its vCPUs: say --share fair".to_owned(),
        )),
        None => {
            let no_shim = match shim(machine) {
                Ok(actuator) => return with(actuator, reason),
                Err(no_shim) => no_shim,
            };
            let no_cgroup = match cgroup(machine) {
                Ok(actuator) => return with(actuator, format!("no shim: {no_shim}")),
                Err(no_cgroup) => no_cgroup,
            };
            let neither = format!("Shim: {no_shim}. cgroup: {no_cgroup}");
            if share == Share::Fair {
                return with(pacing(machine)?, format!("its vCPUs cannot be sliced, and run freely. {neither}"));
            }
            Err(failed(format!("the vCPUs of {} cannot be sliced. {neither}", machine.name)))
        }
    }
}

fn shim(machine: &RunningVm) -> Result<Box<dyn Actuator>, VmmError> {
    Ok(Box::new(ShimActuator::new(machine)?))
}

fn cgroup(machine: &RunningVm) -> Result<Box<dyn Actuator>, VmmError> {
    let mut actuator = CgroupActuator::new(machine)?;
    // It is there if it takes an order.
    actuator.set(super::duty(1.0, Duration::from_millis(10)))?;
    Ok(Box::new(actuator))
}

fn pacing(machine: &RunningVm) -> Result<Box<dyn Actuator>, VmmError> {
    Ok(Box::new(PacingActuator::new(&VcpuThreads::look(machine)?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::fake::Qemu;

    #[test]
    fn vcpus_that_neither_can_hold_run_freely_and_queues_are_held() {
        // Its monitor is silent each time the groups' actuator asks for threads.
        let (own, mut speaks) = (std::process::id(), true);
        let qemu = Qemu::start(move |_, _| {
            speaks = !speaks;
            speaks.then(|| {
                let vcpu =
                    format!(r#""thread-id": {own}, "qom-path": "/a", "cpu-index": 0, "target": "x86_64""#);
                format!(r#"{{"return": [{{{vcpu}}}]}}"#)
            })
        });
        let machine = RunningVm::of_this_process(qemu.path.clone());
        let choice = choose(&machine, None, Share::Fair).unwrap();
        assert!(!choice.actuator.holds() && choice.actuator.name() == "pacing");
        for why in ["run freely", "Shim: ", "without the shim", "cgroup: "] {
            assert!(choice.reason.contains(why), "{why}: {}", choice.reason);
        }
        let Err(error) = choose(&machine, None, Share::Percent(50.0)) else { panic!("nothing holds it") };
        let error = error.to_string();
        assert!(error.contains("cannot be sliced") && error.contains("without the shim"), "{error}");
        let Err(error) = choose(&machine, Some(Kind::Pacing), Share::Percent(50.0)) else {
            panic!("pacing holds no vCPUs")
        };
        assert!(error.to_string().contains("--share fair"), "{error}");
    }
}
