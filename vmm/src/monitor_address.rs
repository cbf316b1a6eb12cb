//! Where the monitor of a running machine is, and what is asked there.

use std::fmt;
use std::path::{Path, PathBuf};

use qapi::qmp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::VmmError;
use crate::monitor::{connect, failed};
use crate::virsh::{ask, odd, virsh};

/// The monitor of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MonitorAddress {
    /// A socket of QEMU's.
    Socket {
        /// Where it is.
        path: PathBuf,
    },
    /// libvirt has the only session with the monitor, and passes on what it is asked.
    Domain {
        /// The domain's name.
        domain: String,
        /// libvirt's URI; none for its default.
        uri: Option<String>,
    },
}

/// A thread of QEMU's that runs a vCPU of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct VcpuThread {
    /// The vCPU's number.
    pub cpu_index: u32,
    /// The thread's id. Several vCPUs have the same where QEMU translates them in turns (`-accel tcg,thread=single`).
    pub thread_id: u32,
}

impl MonitorAddress {
    /// The threads of the machine's vCPUs, by number.
    pub fn vcpus(&self) -> Result<Vec<VcpuThread>, VmmError> {
        let answer = match self {
            Self::Socket { path } => {
                let vcpus = session(path)?.execute(&qmp::query_cpus_fast {}).map_err(failed)?;
                serde_json::to_value(vcpus).map_err(|error| odd(&error))?
            }
            Self::Domain { domain, uri } => ask(domain, uri.as_deref(), "query-cpus-fast", None)?,
        };
        let mut vcpus: Vec<VcpuThread> = serde_json::from_value(answer).map_err(|error| odd(&error))?;
        vcpus.sort_unstable();
        Ok(vcpus)
    }

    /// What the machine does, in QEMU's words: `running`, `paused`, …
    pub fn status(&self) -> Result<String, VmmError> {
        let answer = match self {
            Self::Socket { path } => {
                let status = session(path)?.execute(&qmp::query_status {}).map_err(failed)?;
                serde_json::to_value(status).map_err(|error| odd(&error))?
            }
            Self::Domain { domain, uri } => ask(domain, uri.as_deref(), "query-status", None)?,
        };
        Ok(answer.get("status").and_then(Value::as_str).unwrap_or("unknown").to_owned())
    }

    /// How much memory the guest has, in bytes: what it was started with and what was plugged in.
    pub(crate) fn memory_bytes(&self) -> Result<u64, VmmError> {
        let answer = match self {
            Self::Socket { path } => {
                let size = session(path)?.execute(&qmp::query_memory_size_summary {}).map_err(failed)?;
                serde_json::to_value(size).map_err(|error| odd(&error))?
            }
            Self::Domain { domain, uri } => ask(domain, uri.as_deref(), "query-memory-size-summary", None)?,
        };
        let bytes = |name| answer.get(name).and_then(Value::as_u64).unwrap_or(0);
        Ok(bytes("base-memory").saturating_add(bytes("plugged-memory")))
    }

    /// What the machine is called, by QEMU.
    pub(crate) fn machine_name(&self) -> Result<String, VmmError> {
        let answer = match self {
            Self::Socket { path } => {
                let name = session(path)?.execute(&qmp::query_name {}).map_err(failed)?;
                serde_json::to_value(name).map_err(|error| odd(&error))?
            }
            Self::Domain { domain, uri } => ask(domain, uri.as_deref(), "query-name", None)?,
        };
        Ok(answer.get("name").and_then(Value::as_str).unwrap_or_default().to_owned())
    }

    /// Presses the power button: the guest shuts down, if it listens.
    pub(crate) fn press_power_button(&self) -> Result<(), VmmError> {
        match self {
            Self::Socket { path } => {
                session(path)?.execute(&qmp::system_powerdown {}).map(drop).map_err(failed)
            }
            Self::Domain { domain, uri } => virsh(uri.as_deref(), &["shutdown", domain], "").map(drop),
        }
    }

    /// Ends QEMU at once.
    pub(crate) fn quit(&self) -> Result<(), VmmError> {
        match self {
            Self::Socket { path } => {
                // The answer may be cut off: it is leaving.
                let _ = session(path)?.execute(&qmp::quit {});
                Ok(())
            }
            Self::Domain { domain, uri } => virsh(uri.as_deref(), &["destroy", domain], "").map(drop),
        }
    }
}

impl fmt::Display for MonitorAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket { path } => write!(f, "{}", path.display()),
            Self::Domain { domain, .. } => write!(f, "libvirt's domain {domain}"),
        }
    }
}

/// What QEMU's monitor for people prints, such as for `info registers -a`: to find out where a guest hangs.
pub fn ask_human_monitor(path: &Path, command_line: &str) -> Result<String, VmmError> {
    let command = qmp::human_monitor_command { cpu_index: None, command_line: command_line.to_owned() };
    session(path)?.execute(&command).map_err(failed)
}

/// A session with a QEMU that has been up for a while.
fn session(path: &Path) -> Result<crate::monitor::Monitor, VmmError> {
    connect(path, || true)
}
