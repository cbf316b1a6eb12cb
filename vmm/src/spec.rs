//! What a virtual machine consists of, and QEMU's command line for it.

use std::path::{Path, PathBuf};

use crate::device::{Host, Parts, port_name};
use crate::words::{Words, escape, socket_path};
use crate::{Accelerator, Firmware, PoolRam, QemuVersion, VmmError, console_log};

/// What an emulated machine has more than it was given, in KiB; QEMU takes multiples of this.
const ODD_KIB: u64 = 8;
/// What the chardev of the serial console is called.
pub(crate) const CONSOLE: &str = "console";
/// The virtio-serial port that the test guest's agent listens on.
const EXEC_PORT: &str = "wadi.exec";
/// A machine has so many PCIe ports for devices of the pod, or a multiple.
const PORTS_STEP: u8 = 8;

/// A kernel that QEMU loads itself, instead of booting from a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectKernel {
    /// The kernel image.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    pub command_line: String,
}

/// A virtio-net device on a vhost-user socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// Its name in the instance, such as `net0`.
    pub device: String,
    /// The frontend's socket.
    pub socket: PathBuf,
    /// Its PCIe slot.
    pub slot: u8,
    /// Its MAC address: the one that is leased.
    pub mac: String,
    /// Its MTU.
    pub mtu: u16,
    /// How many pairs of queues it has.
    pub queue_pairs: u16,
    /// Its driver may announce its own address after a live migration. Otherwise QEMU asks the frontend to.
    pub guest_announces: bool,
}

/// A virtio-blk device on a vhost-user socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Its name in the instance.
    pub device: String,
    /// The frontend's socket.
    pub socket: PathBuf,
    /// Its PCIe slot.
    pub slot: u8,
    /// How many queues it has.
    pub queues: u16,
}

/// A virtual machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmSpec {
    /// The instance's name.
    pub name: String,
    /// The program that runs it: a path, or a name to be looked for ([`crate::QEMU`]).
    pub qemu: PathBuf,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Where in the pool all of that lies; otherwise it is QEMU's own.
    pub pool_ram: Option<PoolRam>,
    /// To how many MiB its memory may grow while it runs.
    pub memory_max_mib: Option<u32>,
    /// How many vCPUs.
    pub cpus: u32,
    /// To how many vCPUs it may grow while it runs.
    pub cpus_max: Option<u32>,
    /// What executes it.
    pub accelerator: Accelerator,
    /// The firmware it starts with.
    pub firmware: Firmware,
    /// The kernel to load; without one the firmware finds something to boot.
    pub kernel: Option<DirectKernel>,
    /// The devices from which the firmware tries to boot, in this order; its disks, if none is named. It tries no others.
    pub boot: Vec<String>,
    /// Network devices.
    pub networks: Vec<Network>,
    /// Disks.
    pub disks: Vec<Disk>,
    /// How many PCIe ports it has for NICs and disks, those that are plugged in later included. Unless given, as many as the
    /// highest slot needs, rounded up to 8, 16 or 24: two machines that a guest moves between need the same number.
    pub ports: Option<u8>,
    /// It listens on the sockets of its devices, and the frontends connect to it.
    pub listens: bool,
    /// Where its monitor, console and agent sockets are.
    pub directory: PathBuf,
    /// Where it listens for the guest of another QEMU, such as `tcp:0.0.0.0:4444`, instead of booting one.
    pub incoming: Option<String>,
    /// The library that slices its vCPUs' time when asked to ([`crate::slicing::find_shim`]), if it is to be loaded.
    pub vcpu_shim: Option<PathBuf>,
}

impl VmSpec {
    /// The socket of QEMU's monitor.
    pub fn monitor_socket(&self) -> PathBuf {
        self.directory.join(format!("{}-qmp.sock", self.name))
    }

    /// The socket of the serial console.
    pub fn console_socket(&self) -> PathBuf {
        self.directory.join(format!("{}-console.sock", self.name))
    }

    /// What the serial console has shown last, if the machine was started by [`crate::Vm`]; no longer than
    /// [`crate::CONSOLE_LOG_BYTES`]. What came before that stands in [`Self::old_console_log`].
    pub fn console_log(&self) -> PathBuf {
        self.directory.join(format!("{}-console.log", self.name))
    }

    /// What the serial console showed before what is in [`Self::console_log`].
    pub fn old_console_log(&self) -> PathBuf {
        console_log::old(&self.console_log())
    }

    /// The socket of the test guest's agent.
    pub fn exec_socket(&self) -> PathBuf {
        self.directory.join(format!("{}-exec.sock", self.name))
    }

    /// The file through which its shim is commanded.
    pub fn vcpu_control(&self) -> PathBuf {
        self.directory.join(Self::vcpu_control_of(&self.name))
    }

    /// What that file of a machine is called.
    pub(crate) fn vcpu_control_of(name: &str) -> String {
        format!("{name}-vcpus")
    }

    /// The names of its devices.
    fn devices(&self) -> impl Iterator<Item = &str> {
        let networks = self.networks.iter().map(|network| network.device.as_str());
        networks.chain(self.disks.iter().map(|disk| disk.device.as_str()))
    }

    /// Which of the devices that the firmware tries to boot from this one is, from 0.
    pub(crate) fn boot_index(&self, device: &str) -> Option<usize> {
        if self.kernel.is_some() {
            return None;
        }
        if self.boot.is_empty() {
            return self.disks.iter().position(|disk| disk.device == device);
        }
        self.boot.iter().position(|it| it == device)
    }

    /// Everything in the directory that is of no use without QEMU.
    pub(crate) fn files(&self) -> [PathBuf; 4] {
        [self.monitor_socket(), self.console_socket(), self.exec_socket(), self.vcpu_control()]
    }

    /// Whether the machine can be described to QEMU at all, and started here and now.
    pub fn check(&self) -> Result<(), VmmError> {
        self.check_shape()?;
        self.check_sockets()
    }

    /// Whether what it consists of fits together, wherever and whenever it is to be started.
    pub(crate) fn check_shape(&self) -> Result<(), VmmError> {
        let refuse = |reason: String| Err(VmmError::Spec { reason });
        if self.kernel.is_none() && self.disks.is_empty() {
            return refuse("it has neither a kernel nor a disk to boot from: give --kernel".to_owned());
        }
        if let Some(unknown) = self.boot.iter().find(|device| !self.devices().any(|it| it == **device)) {
            let known = self.devices().collect::<Vec<_>>().join(", ");
            return refuse(format!("it cannot boot from {unknown}: its devices are {known}"));
        }
        if self.cpus == 0 || self.memory_mib < 64 {
            return refuse("it needs at least one vCPU and 64 MiB".to_owned());
        }
        if self.cpus_max.is_some_and(|most| most <= self.cpus) {
            return refuse(format!("its vCPUs cannot grow from {} to fewer", self.cpus));
        }
        if self.memory_max_mib.is_some_and(|most| most <= self.memory_mib) {
            return refuse(format!("its memory cannot grow from {} MiB to less", self.memory_mib));
        }
        let (ports, needed) = (self.port_count(), self.ports_needed());
        if ports < needed {
            return refuse(format!(
                "its devices need {needed} PCIe ports, not {ports}: give --ports {needed} or more"
            ));
        }
        Ok(())
    }

    /// Whether the frontends, or it, can serve its devices.
    fn check_sockets(&self) -> Result<(), VmmError> {
        let refuse = |reason: String| Err(VmmError::Spec { reason });
        let sockets = self.networks.iter().map(|network| &network.socket);
        for path in sockets.chain(self.disks.iter().map(|disk| &disk.socket)) {
            if self.listens {
                if !path.parent().is_some_and(Path::is_dir) {
                    return refuse(format!("there is no directory for the socket {}", path.display()));
                }
            } else if !path.exists() {
                return refuse(format!(
                    "nothing is at {}: is the frontend on this host running?",
                    path.display()
                ));
            }
        }
        Ok(())
    }

    /// Its memory, in KiB. An emulated machine has a little more than it was given, so that it can be moved while it runs
    /// ([`crate::migrate`]); under every version of QEMU, since the one there may be another.
    pub(crate) fn memory_kib(&self) -> u64 {
        let given = u64::from(self.memory_mib) << 10;
        // The pool leases no memory by the KiB.
        let odd = self.accelerator == Accelerator::Tcg && self.pool_ram.is_none();
        if odd { given + ODD_KIB } else { given }
    }

    /// The words after `qemu-system-x86_64`.
    pub fn arguments(&self, version: QemuVersion) -> Vec<String> {
        let mut words = Words::default();
        words.option("-name", &format!("{},debug-threads=on", escape(&self.name)));
        words.option("-machine", "q35,memory-backend=ram");
        words.option("-accel", self.accelerator.accel());
        words.option("-cpu", self.accelerator.cpu());
        let most = self.cpus_max.map_or_else(String::new, |most| format!(",maxcpus={most}"));
        words.option("-smp", &format!("{}{most}", self.cpus));
        words.option(
            "-m",
            &match self.memory_max_mib {
                Some(most) => {
                    // What it has beyond what it was given leaves it as much room.
                    let beyond = self.memory_kib() - (u64::from(self.memory_mib) << 10);
                    let most = (u64::from(most) << 10) + beyond;
                    format!("{}k,slots={},maxmem={most}k", self.memory_kib(), crate::memory::SLOTS)
                }
                None => format!("{}k", self.memory_kib()),
            },
        );
        // The frontends read and write the guest's memory, so it is shared.
        words.option(
            "-object",
            &match &self.pool_ram {
                Some(ram) => ram.object(socket_path),
                None => format!("memory-backend-memfd,id=ram,size={}k,share=on", self.memory_kib()),
            },
        );
        words.flag("-nodefaults");
        words.flag("-no-user-config");
        words.option("-display", "none");
        let monitor = socket_path(&self.monitor_socket());
        words.option("-chardev", &format!("socket,id=monitor,path={monitor},server=on,wait=off"));
        words.option("-mon", "chardev=monitor,mode=control");
        let console = socket_path(&self.console_socket());
        words.option("-chardev", &format!("socket,id={CONSOLE},path={console},server=on,wait=off"));
        words.option("-serial", &format!("chardev:{CONSOLE}"));
        words.option("-device", "virtio-serial-pci");
        let exec = socket_path(&self.exec_socket());
        words.option("-chardev", &format!("socket,id=exec,path={exec},server=on,wait=off"));
        words.option("-device", &format!("virtserialport,chardev=exec,name={EXEC_PORT}"));
        if let Firmware::Uefi(uefi) = &self.firmware {
            let flash = |path: &Path, rest: &str| {
                format!("if=pflash,format=raw,{rest},file={}", escape(&path.display().to_string()))
            };
            words.option("-drive", &flash(&uefi.code, "unit=0,readonly=on"));
            words.option("-drive", &flash(&uefi.variables, "unit=1"));
        }
        if let Some(kernel) = &self.kernel {
            words.option("-kernel", &kernel.kernel.display().to_string());
            if let Some(initrd) = &kernel.initrd {
                words.option("-initrd", &initrd.display().to_string());
            }
            words.option("-append", &kernel.command_line);
        }
        for slot in 0..self.port_count() {
            // A chassis number of its own, from 1.
            let chassis = u16::from(slot) + 1;
            words.option("-device", &format!("pcie-root-port,id={},chassis={chassis}", port_name(slot)));
        }
        for part in self.parts(version) {
            words.0.extend(part.words());
        }
        if let Some(uri) = &self.incoming {
            words.option("-incoming", uri);
        }
        words.0
    }

    /// How many PCIe ports it has.
    pub fn port_count(&self) -> u8 {
        self.ports.unwrap_or_else(|| self.ports_needed().max(1).next_multiple_of(PORTS_STEP))
    }

    fn ports_needed(&self) -> u8 {
        let slots = self.networks.iter().map(|it| it.slot).chain(self.disks.iter().map(|it| it.slot));
        slots.max().map_or(0, |highest| highest + 1)
    }

    /// Its devices, each behind a port of its own, so that it can be unplugged.
    fn parts(&self, version: QemuVersion) -> Vec<Parts> {
        let host = Host { version, accelerator: self.accelerator, listens: self.listens };
        let networks = self.networks.iter();
        let networks = networks.map(|it| Parts::network(it, host, self.boot_index(&it.device)));
        let disks = self.disks.iter();
        networks.chain(disks.map(|it| Parts::disk(it, host, self.boot_index(&it.device)))).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests;
