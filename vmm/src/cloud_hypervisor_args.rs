//! `vmm cloud-hypervisor-args`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use vmm::{Accelerator, DirectKernel, Firmware, VmSpec, cloud_hypervisor};

use crate::{Of, absolute, print};

#[derive(Args)]
pub(crate) struct CloudHypervisorArgs {
    #[command(flatten)]
    of: Of,
    /// Memory in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    memory: u32,
    /// To how many MiB `ch-remote resize` may let it grow.
    #[arg(long, value_name = "MIB")]
    memory_max: Option<u32>,
    /// vCPUs. No device gets more queues than that.
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// To how many vCPUs `ch-remote resize` may let it grow.
    #[arg(long, value_name = "COUNT")]
    cpus_max: Option<u32>,
    /// The firmware by which it boots from its first disk: one of Cloud Hypervisor's own, such as CLOUDHV.fd or hypervisor-fw.
    #[arg(long, value_name = "FILE", value_parser = absolute, conflicts_with = "kernel", required_unless_present = "kernel")]
    firmware: Option<PathBuf>,
    /// A kernel to load, instead of booting from a disk.
    #[arg(long, value_parser = absolute)]
    kernel: Option<PathBuf>,
    /// The kernel's initramfs.
    #[arg(long, requires = "kernel", value_parser = absolute)]
    initrd: Option<PathBuf>,
    /// The kernel's command line.
    #[arg(long, requires = "kernel", default_value = "console=ttyS0")]
    append: String,
    /// The Cloud Hypervisor that is to run it.
    #[arg(long, value_name = "PROGRAM", default_value = cloud_hypervisor::CLOUD_HYPERVISOR)]
    program: PathBuf,
    /// Where to put the socket of its API.
    #[arg(long, default_value = "/run/wadi/vm", value_parser = absolute)]
    directory: PathBuf,
}

/// Prints the command line.
pub(crate) fn cloud_hypervisor_args(asked: &CloudHypervisorArgs) -> Result<()> {
    let instance = asked.of.client()?.instance(&asked.of.instance)?;
    if !instance.ready {
        bail!("{} is not ready: it waits for {}", instance.name, instance.waiting_for.join(", "));
    }
    let mut spec = VmSpec {
        name: String::new(),
        qemu: asked.program.clone(),
        memory_mib: asked.memory,
        pool_ram: None,
        memory_max_mib: asked.memory_max,
        cpus: asked.cpus,
        cpus_max: asked.cpus_max,
        accelerator: Accelerator::Kvm,
        firmware: Firmware::Bios,
        boot: Vec::new(),
        kernel: asked.kernel.as_ref().map(|kernel| DirectKernel {
            kernel: kernel.clone(),
            initrd: asked.initrd.clone(),
            command_line: asked.append.clone(),
        }),
        networks: Vec::new(),
        disks: Vec::new(),
        ports: None,
        listens: false,
        directory: asked.directory.clone(),
        incoming: None,
        vcpu_shim: None,
    };
    spec.take_devices(&instance);
    print(&format!("{}\n", cloud_hypervisor::command_line(&spec, asked.firmware.as_deref())?))
}
