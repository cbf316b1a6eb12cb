//! A virtual machine that KVM runs and that does nothing but count.
//!
//! KVM on a virtual machine may boot no kernel and still run a few instructions. How vCPUs are held under KVM can be seen with that: QEMU is
//! unmodified, and its vCPU threads are in `KVM_RUN` all the time.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use vmm::slicing::ControlFile;
use vmm::{RunningVm, attach_process};

use crate::process::Daemon;

/// How long KVM has to show that it runs the guest.
const DEADLINE: Duration = Duration::from_secs(10);
/// Where the guest counts, in bytes of its memory.
const COUNTER: u64 = 0x2000;
const MEMORY_BYTES: u64 = 16 << 20;
/// The firmware ends where the first MiB does, which the processor starts 16 bytes before.
const FIRMWARE_BYTES: usize = 64 << 10;
const RESET: usize = FIRMWARE_BYTES - 16;

/// A guest that counts on its only vCPU; dropping it ends it.
#[derive(Debug)]
pub struct CountingVm {
    memory: File,
    running: RunningVm,
    _qemu: Daemon,
}

impl CountingVm {
    /// Starts it, with its files in a directory, and with the shim in QEMU, if there is one. Nothing if KVM does not run it here; it
    /// is said why. That is KVM's fault only where it does not run it without the shim either.
    pub fn start(directory: &Path, shim: Option<&Path>) -> Result<Option<Self>> {
        if File::options().read(true).write(true).open("/dev/kvm").is_err() {
            eprintln!("there is no KVM here");
            return Ok(None);
        }
        let started = Self::begin(directory, shim)?;
        if started.is_none() && shim.is_some() {
            let without = tempfile::tempdir()?;
            if Self::begin(without.path(), None)?.is_some() {
                bail!("KVM runs a guest here, and does not with the shim");
            }
        }
        Ok(started)
    }

    fn begin(directory: &Path, shim: Option<&Path>) -> Result<Option<Self>> {
        let [firmware, memory, monitor, control, log] =
            ["firmware", "memory", "monitor", "vcpus", "log"].map(|name| directory.join(name));
        fs::write(&firmware, self::firmware())?;
        let ram = File::options().read(true).write(true).create_new(true).open(&memory)?;
        ram.set_len(MEMORY_BYTES)?;
        let mut command = Command::new(vmm::QEMU);
        command.args(["-accel", "kvm", "-machine", "pc,memory-backend=ram", "-cpu", "qemu64", "-m"]);
        command.arg(format!("{}M,slots=8,maxmem=4G", MEMORY_BYTES >> 20)).arg("-object");
        let file = memory.display();
        command.arg(format!("memory-backend-file,id=ram,size={MEMORY_BYTES},share=on,mem-path={file}"));
        command.arg("-bios").arg(&firmware).args(["-name", "counting,debug-threads=on", "-qmp"]);
        command.arg(format!("unix:{},server=on,wait=off", monitor.display()));
        command.args(["-nodefaults", "-no-user-config", "-display", "none"]);
        if let Some(shim) = shim {
            ControlFile::create(&control)?;
            command.env("LD_PRELOAD", shim).env("WADI_VCPU_CONTROL", &control);
        }
        let mut qemu = Daemon::start("counting", command, &log)?;
        let began = Instant::now();
        while count_in(&ram)? < 1000 {
            if !qemu.running() || began.elapsed() > DEADLINE {
                let said = fs::read_to_string(&log).unwrap_or_default();
                eprintln!("KVM does not run a guest here: {}", said.trim());
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let pid = qemu.pid().context("QEMU has ended")?;
        let (running, _) = attach_process(pid, None)?;
        Ok(Some(Self { memory: ram, running, _qemu: qemu }))
    }

    /// As `vmm` knows it.
    pub fn running(&self) -> &RunningVm {
        &self.running
    }

    /// The file through which its shim is commanded, if it has one.
    pub fn vcpu_control(&self) -> Option<&PathBuf> {
        self.running.vcpu_control.as_ref()
    }

    /// How far the guest has counted.
    pub fn count(&self) -> Result<u64> {
        count_in(&self.memory)
    }
}

fn count_in(memory: &File) -> Result<u64> {
    let mut count = [0; 8];
    memory.read_exact_at(&mut count, COUNTER).context("the guest's memory cannot be read")?;
    Ok(u64::from_le_bytes(count))
}

/// What the processor starts with, in real mode.
fn firmware() -> Vec<u8> {
    #[rustfmt::skip]
    let counts = [
        0x31, 0xc0,                         // xor ax, ax
        0x8e, 0xd8,                         // mov ds, ax
        0x66, 0x83, 0x06, 0x00, 0x20, 0x01, // count: add dword [0x2000], 1
        0x66, 0x83, 0x16, 0x04, 0x20, 0x00, // adc dword [0x2004], 0
        0xeb, 0xf2,                         // jmp count
    ];
    let jumps = [0xea, 0x00, 0x00, 0x00, 0xf0]; // jmp 0xf000:0
    let mut firmware = vec![0; FIRMWARE_BYTES];
    firmware[..counts.len()].copy_from_slice(&counts);
    firmware[RESET..RESET + jumps.len()].copy_from_slice(&jumps);
    firmware
}
