//! A virtual machine with one vCPU that always wants to run.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use guest_images::Silent;
use guest_images::agent::{Agent, Job};
use tempfile::TempDir;
use vmm::slicing::{ControlFile, find_shim};
use vmm::{RunningVm, Vm, VmSpec};
use wadi_tests::bare_vm::bare_vm;
use wadi_tests::counting_vm::CountingVm;

const BOOT_DEADLINE: Duration = Duration::from_mins(1);
/// Between looks at the clock.
const STEP: Duration = Duration::from_millis(50);

/// The machine; dropping it ends it.
pub(super) struct BusyMachine {
    running: RunningVm,
    thread: u32,
    _guest: Guest,
    _directory: TempDir,
}

/// What its vCPU is busy with.
enum Guest {
    /// A loop in a shell.
    Emulated { _job: Job, _agent: Agent, _vm: Box<Vm> },
    /// A few instructions.
    Kvm { _vm: CountingVm },
}

impl BusyMachine {
    /// Boots it. Emulated: what is measured is how exactly a thread is held.
    pub(super) fn boot() -> Result<Self> {
        let guest = guest_images::Guest::ensure(&mut Silent)?;
        let directory = tempfile::tempdir()?;
        let spec = VmSpec { vcpu_shim: Some(shim()?), ..bare_vm("busy", &guest, directory.path()) };
        let vm = Box::new(Vm::start(spec)?);
        let agent = Agent::connect(&vm.spec().exec_socket(), BOOT_DEADLINE)?;
        let job = agent.start("while :; do :; done", &[])?;
        let running = vm.running().context("QEMU has ended")?.clone();
        Self::of(running, Guest::Emulated { _job: job, _agent: agent, _vm: vm }, directory)
    }

    /// One that KVM runs.
    pub(super) fn count_in_kvm() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let vm = CountingVm::start(directory.path(), Some(&shim()?))?;
        let vm = vm.context("nothing can be measured under KVM: leave out --kvm")?;
        Self::of(vm.running().clone(), Guest::Kvm { _vm: vm }, directory)
    }

    fn of(running: RunningVm, guest: Guest, directory: TempDir) -> Result<Self> {
        let thread = running.monitor.vcpus()?.first().context("it has no vCPU")?.thread_id;
        Ok(Self { running, thread, _guest: guest, _directory: directory })
    }

    pub(super) fn running(&self) -> &RunningVm {
        &self.running
    }

    /// Its vCPU's.
    pub(super) fn thread(&self) -> u32 {
        self.thread
    }

    /// How often the shim has looked at its vCPU.
    pub(super) fn looks(&self) -> Result<u64> {
        let control = self.running.vcpu_control.as_ref().context("QEMU was started without the shim")?;
        let usage = ControlFile::open(control)?.usage()?;
        Ok(usage.iter().map(|vcpu| vcpu.looks).sum())
    }

    /// The processor time of its vCPU over so long a time, in percent; `meanwhile` is called often.
    pub(super) fn share(&self, length: Duration, mut meanwhile: impl FnMut() -> Result<()>) -> Result<f64> {
        let (began, before) = (Instant::now(), self.processor_time()?);
        while began.elapsed() < length {
            std::thread::sleep(STEP.min(length.saturating_sub(began.elapsed())));
            meanwhile()?;
        }
        let ran = self.processor_time()?.saturating_sub(before);
        Ok(100.0 * ran.as_secs_f64() / began.elapsed().as_secs_f64())
    }

    fn processor_time(&self) -> Result<Duration> {
        let path = format!("/proc/{}/schedstat", self.thread);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let ns = text.split_whitespace().next().and_then(|ns| ns.parse().ok());
        Ok(Duration::from_nanos(ns.with_context(|| format!("{path} says {text}"))?))
    }
}

fn shim() -> Result<PathBuf> {
    find_shim().context("the shim is not built: build vmm with cargo")
}
