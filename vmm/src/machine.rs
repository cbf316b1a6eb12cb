//! A running virtual machine.

use std::fs;
use std::io;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cxl_pool::GuestLock;
use qapi::qmp;

use crate::console_log::ConsoleLog;
use crate::monitor::{MONITOR_DEADLINE, Monitor, connect};
use crate::pool_ram::check_offset;
use crate::slicing::ControlFile;
use crate::spec::CONSOLE;
use crate::{MonitorAddress, Origin, Process, QemuVersion, Registry, RunningVm, VmSpec, VmmError};

/// Tells the shim in a QEMU where it is commanded.
pub(crate) const CONTROL_VARIABLE: &str = "WADI_VCPU_CONTROL";

/// A virtual machine that QEMU runs; dropping it ends it.
#[derive(Debug)]
pub struct Vm {
    spec: VmSpec,
    child: Child,
    console: ConsoleLog,
    running: Option<RunningVm>,
}

impl Vm {
    /// The command that [`Vm::start`] would start; that has the console logged, too.
    pub fn command(spec: &VmSpec) -> Result<Command, VmmError> {
        spec.check()?;
        let mut command = Command::new(&spec.qemu);
        command.args(spec.arguments(QemuVersion::detect(&spec.qemu)?));
        if spec.pool_ram.is_some() {
            check_offset(&spec.qemu)?;
        }
        if let Some(shim) = &spec.vcpu_shim {
            command.env("LD_PRELOAD", shim).env(CONTROL_VARIABLE, spec.vcpu_control());
        }
        Ok(command)
    }

    /// Starts a virtual machine as a child of this process. One whose memory lies in the pool is refused: see [`Vm::start_with`].
    pub fn start(spec: VmSpec) -> Result<Self, VmmError> {
        let nobody = || {
            Err(VmmError::Spec {
                reason: "nobody says whether its memory in the pool is still its own".to_owned(),
            })
        };
        Self::start_with(spec, nobody, |command, input| command.stdin(input).spawn())
    }

    /// Starts a virtual machine.
    ///
    /// `confirm` is asked where the guest's memory lies in the pool, when that is locked and before it is wiped: whether it is still
    /// what the machine's instance has leased, such as by [`crate::confirm_ram`]. An error leaves it as it is.
    ///
    /// `spawn` decides how the process is started (in which namespace, with whose rights). It gives the process the standard input
    /// that it is handed: where the guest's memory lies in the pool, that keeps the memory from others until QEMU has ended.
    pub fn start_with(
        spec: VmSpec,
        confirm: impl FnOnce() -> Result<(), VmmError>,
        spawn: impl FnOnce(&mut Command, Stdio) -> io::Result<Child>,
    ) -> Result<Self, VmmError> {
        let command = Self::command(&spec)?;
        let claim = |spec: &VmSpec| spec.pool_ram.as_ref().map(|ram| ram.claim(confirm)).transpose();
        Self::begin(spec, command, claim, spawn)
    }

    fn begin(
        spec: VmSpec,
        mut command: Command,
        claim: impl FnOnce(&VmSpec) -> Result<Option<GuestLock>, VmmError>,
        spawn: impl FnOnce(&mut Command, Stdio) -> io::Result<Child>,
    ) -> Result<Self, VmmError> {
        let registry = Registry::new(&spec.directory);
        registry.refuse_another(&registry.lock()?, &spec.name, None)?;
        // Wiping much memory takes long, and other machines need not wait for that.
        let claimed = claim(&spec)?;
        let locked = registry.lock()?;
        registry.refuse_another(&locked, &spec.name, None)?;
        spec.firmware.prepare()?;
        // Whoever writes the log is started before there is anything for QEMU to inherit: it would keep that for longer.
        let (console, pipe) = ConsoleLog::start(&spec.console_log())?;
        // One that waits for a guest gets its variables with it, and where hosts share directories the other one has them still.
        let reserved = if spec.incoming.is_none() { spec.firmware.reserve()? } else { None };
        // An older run of this instance may have been killed.
        for file in spec.files() {
            let _ = fs::remove_file(file);
        }
        let vcpu_control = spec.vcpu_shim.as_ref().map(|_| spec.vcpu_control());
        if let Some(path) = &vcpu_control {
            ControlFile::create(path)
                .map_err(|source| VmmError::Directory { path: spec.directory.clone(), source })?;
        }
        let failed = |source| VmmError::Start { program: spec.qemu.display().to_string(), source };
        let input =
            claimed.as_ref().map_or_else(|| Ok(Stdio::null()), GuestLock::to_stdio).map_err(failed)?;
        command.args(pipe.words(CONSOLE));
        let child = spawn(&mut command, input).map_err(failed)?;
        // QEMU has them now.
        drop((claimed, reserved, pipe));
        let mut vm = Self { spec, child, console, running: None };
        // One that has ended at once runs nowhere.
        if let Some(process) = Process::with_id(vm.child.id()) {
            let running = RunningVm {
                name: vm.spec.name.clone(),
                process,
                origin: Origin::Run,
                monitor: MonitorAddress::Socket { path: vm.spec.monitor_socket() },
                vcpu_control,
                files: vm.spec.files().into(),
            };
            registry.write(&locked, &running)?;
            vm.running = Some(running);
        }
        Ok(vm)
    }

    /// What it consists of.
    pub fn spec(&self) -> &VmSpec {
        &self.spec
    }

    /// How it is noted among the machines that run; none if it has ended.
    pub fn running(&self) -> Option<&RunningVm> {
        self.running.as_ref()
    }

    /// QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How QEMU ended, if it has.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Waits until QEMU ends.
    pub fn wait(&mut self) -> Result<ExitStatus, VmmError> {
        let program = || self.spec.qemu.display().to_string();
        self.child.wait().map_err(|source| VmmError::Start { program: program(), source })
    }

    /// Waits until QEMU answers. One that is to receive a guest listens for it by then.
    pub fn wait_until_listening(&mut self) -> Result<(), VmmError> {
        self.monitor().map(drop)
    }

    /// Asks the guest to power off, by the button.
    pub fn press_power_button(&mut self) -> Result<(), VmmError> {
        let mut monitor = self.monitor()?;
        monitor
            .execute(&qmp::system_powerdown {})
            .map(drop)
            .map_err(|e| VmmError::Monitor { reason: e.to_string() })
    }

    /// Ends QEMU, in good order if it listens, and waits until it is gone.
    pub fn stop(&mut self) -> Result<ExitStatus, VmmError> {
        if let Some(status) = self.exited() {
            self.forget();
            return Ok(status);
        }
        if let Ok(mut monitor) = self.monitor() {
            // The answer may be cut off: it is leaving.
            let _ = monitor.execute(&qmp::quit {});
        }
        let started = Instant::now();
        while started.elapsed() < MONITOR_DEADLINE {
            if let Some(status) = self.exited() {
                self.forget();
                return Ok(status);
            }
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let status = self.wait();
        self.forget();
        status
    }

    /// A new session with QEMU's monitor.
    fn monitor(&mut self) -> Result<Monitor, VmmError> {
        let path = self.spec.monitor_socket();
        connect(&path, || self.exited().is_some())
    }

    /// After its end.
    fn forget(&mut self) {
        self.console.finish();
        if let Some(running) = self.running.take() {
            // What is left behind is seen to be of a machine that has ended.
            let _ = Registry::new(&self.spec.directory).remove(&running);
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if self.exited().is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        self.forget();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{FlockOperation, flock};

    use super::*;
    use crate::spec::tests::spec;

    #[test]
    fn other_machines_need_not_wait_while_memory_is_wiped() {
        let directory = tempfile::tempdir().unwrap();
        let spec = VmSpec { directory: directory.path().to_owned(), ..spec() };
        let mut claimed = false;
        let claim = |spec: &VmSpec| {
            let lock = File::open(spec.directory.join(".lock")).unwrap();
            flock(&lock, FlockOperation::NonBlockingLockExclusive).expect("others may come and go");
            claimed = true;
            Ok(None)
        };
        let spawn = |command: &mut Command, input| command.stdin(input).spawn();
        let mut vm = Vm::begin(spec, Command::new("true"), claim, spawn).unwrap();
        assert!(vm.wait().unwrap().success());
        drop(vm);
        assert!(claimed);
    }
}
