//! A virtual machine that has nothing but its guest.

use std::path::Path;

use guest_images::Guest;
use vmm::{Accelerator, DirectKernel, Firmware, VmSpec};

/// What a machine consists of that translates the guest's instructions and has no devices of a pod: one vCPU and 192 MiB. For those
/// who want something more to begin with.
pub fn bare_vm(name: &str, guest: &Guest, directory: &Path) -> VmSpec {
    VmSpec {
        name: name.to_owned(),
        qemu: vmm::QEMU.into(),
        memory_mib: 192,
        pool_ram: None,
        memory_max_mib: None,
        cpus: 1,
        cpus_max: None,
        accelerator: Accelerator::Tcg,
        firmware: Firmware::Bios,
        boot: Vec::new(),
        kernel: Some(DirectKernel {
            kernel: guest.kernel.clone(),
            initrd: Some(guest.initrd.clone()),
            command_line: guest.command_line.clone(),
        }),
        networks: Vec::new(),
        disks: Vec::new(),
        ports: None,
        listens: false,
        directory: directory.to_owned(),
        incoming: None,
        vcpu_shim: None,
    }
}
