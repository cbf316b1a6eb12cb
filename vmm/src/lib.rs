//! Starts QEMU virtual machines with devices from the pod.
//!
//! [`VmSpec`] says what a machine consists of and turns it into a QEMU command line; [`libvirt`] turns it into
//! domain XML, [`cloud_hypervisor`] into the command line of another VMM; [`Vm`] runs it with QEMU. The guest is unmodified: it sees standard virtio devices.

#![forbid(unsafe_code)]

mod attach;
pub mod cloud_hypervisor;
pub mod console;
mod console_log;
mod device;
#[cfg(test)]
mod fake_controller;
mod firmware;
mod follow;
pub mod hook;
mod instance;
pub mod libvirt;
mod links;
mod machine;
mod memory;
mod migration;
mod monitor;
mod monitor_address;
mod plug;
mod pool_ram;
mod process;
mod qemu;
mod registry;
pub mod slicing;
mod spec;
mod stop;
mod virsh;
mod words;
mod xml;

use std::io;
use std::path::PathBuf;

use thiserror::Error;

pub use attach::{attach_domain, attach_process};
pub use console_log::CONSOLE_LOG_BYTES;
pub use firmware::{Firmware, Uefi};
pub use follow::Follower;
pub use instance::{confirm_ram, refuse_a_second_vmm};
pub use machine::Vm;
pub use memory::{plug_memory, unplug_memory};
pub use migration::{Migrated, MigrationSpeed, migrate, move_away, quit};
pub use monitor_address::{MonitorAddress, VcpuThread, ask_human_monitor};
pub use pool_ram::PoolRam;
pub use process::Process;
pub use qemu::{Accelerator, QEMU, QemuVersion};
pub use registry::{Origin, Registry, Running, RunningVm};
pub use spec::{DirectKernel, Disk, Network, VmSpec};
pub use stop::{Stopped, stop};

/// Why a virtual machine cannot be run.
#[derive(Debug, Error)]
pub enum VmmError {
    /// QEMU is not installed.
    #[error("{QEMU} is not installed, or not where --qemu says: apt-get install qemu-system-x86")]
    NoQemu,
    /// QEMU did not say its version.
    #[error("cannot read QEMU's version from `{answer}`")]
    UnknownVersion {
        /// What it said instead.
        answer: String,
    },
    /// The machine cannot be described to QEMU.
    #[error("cannot run this machine: {reason}")]
    Spec {
        /// Why not, and what to do.
        reason: String,
    },
    /// A machine that runs, or is to, is not what was asked for.
    #[error("{reason}")]
    Machine {
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// The directory for its sockets.
    #[error("cannot make or use {}", path.display())]
    Directory {
        /// Where.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A program did not start.
    #[error("cannot start {program}")]
    Start {
        /// Which.
        program: String,
        /// What the system says.
        source: io::Error,
    },
    /// The guest did not get to another QEMU.
    #[error("the guest goes on here, for it did not get to {uri}: {reason}")]
    Migration {
        /// Where it was to go.
        uri: String,
        /// Why it did not.
        reason: String,
    },
    /// The guest may have got to another QEMU.
    #[error("nobody knows whether the guest got to {uri}: {reason}")]
    Undecided {
        /// Where it was to go.
        uri: String,
        /// Why that is not known.
        reason: String,
    },
    /// The hook of libvirt cannot lease what a domain asks for.
    #[error("the devices of the domain {domain}: {reason}")]
    Domain {
        /// The domain's name.
        domain: String,
        /// Why not, and what to do.
        reason: String,
    },
    /// The controller refused something, or does not answer.
    #[error("the controller: {0}")]
    Controller(#[from] pod_api::client::ClientError),
    /// vCPUs cannot be held to a part of their time.
    #[error("{reason}")]
    Slicing {
        /// Why not.
        reason: String,
    },
    /// QEMU's monitor did not answer: what it was asked to do, it may have done, or do yet.
    #[error("QEMU's monitor does not answer: {reason}")]
    Silent {
        /// What happened.
        reason: String,
    },
    /// QEMU's monitor does not answer as it should.
    #[error("QEMU's monitor: {reason}")]
    Monitor {
        /// What happened.
        reason: String,
    },
}
