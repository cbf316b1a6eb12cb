//! A virtual machine of a pod.

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use guest_images::Guest;
use guest_images::agent::{Agent, Job, Outcome};
use pod_api::Instance;
use vmm::{Accelerator, Migrated, MigrationSpeed, Vm, VmSpec};

use super::{GUEST_ADDRESS, Pod};
use crate::bare_vm::bare_vm;
use crate::newer_qemu;
use crate::process::last_lines;
use crate::runner;

/// How long a guest may take to boot: a few seconds even when translated, more on a busy machine.
const BOOT_DEADLINE: Duration = Duration::from_mins(1);

/// The memory of guests that have it in the pool.
pub const RAM_BYTES: u64 = 256 << 20;

/// What a virtual machine is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VmShape {
    /// Memory in MiB.
    pub memory_mib: u32,
    /// vCPUs.
    pub cpus: u32,
}

impl Default for VmShape {
    fn default() -> Self {
        Self { memory_mib: 512, cpus: 2 }
    }
}

/// A virtual machine that has booted the test guest; dropping it ends it.
#[derive(Debug)]
pub struct PodVm {
    // The agent's connection goes first.
    agent: Agent,
    vm: Vm,
}

/// What executes guests on this machine: tried once.
pub(crate) fn accelerator(guest: &Guest) -> Accelerator {
    static FOUND: OnceLock<Accelerator> = OnceLock::new();
    *FOUND.get_or_init(|| Accelerator::probe(vmm::QEMU.as_ref(), &guest.kernel))
}

impl Pod {
    /// Boots the test guest with the devices of `instance`, in the namespace of its host, and gives its first NIC
    /// [`GUEST_ADDRESS`].
    pub fn boot(&self, instance: &Instance, guest: &Guest, shape: VmShape) -> Result<PodVm> {
        self.boot_at(GUEST_ADDRESS, instance, guest, shape)
    }

    /// As [`Pod::boot`], with another address for its first NIC.
    pub fn boot_at(
        &self,
        address: &str,
        instance: &Instance,
        guest: &Guest,
        shape: VmShape,
    ) -> Result<PodVm> {
        let booted = self.begin_to_boot(instance, guest, shape)?.arrived()?;
        if !instance.nics.is_empty() {
            booted.exec(&format!("ip address add {address}/24 dev eth0 && ip link set eth0 up"))?;
        }
        Ok(booted)
    }

    /// Starts the machine of `instance`, and waits for nothing.
    pub fn begin_to_boot(&self, instance: &Instance, guest: &Guest, shape: VmShape) -> Result<WaitingVm> {
        let mut spec = self.machine(instance, guest, shape);
        choose_qemu(&mut spec)?;
        self.begin_machine(instance, spec)
    }

    /// Starts a machine of `instance` that was made for it, and waits for nothing.
    pub fn begin_machine(&self, instance: &Instance, spec: VmSpec) -> Result<WaitingVm> {
        self.start_machine(instance, &instance.host, spec)
    }

    /// Starts a machine that waits at `uri` for the guest of `instance`, on the host to which that is moving.
    pub fn await_guest(
        &self,
        instance: &Instance,
        guest: &Guest,
        shape: VmShape,
        uri: &str,
    ) -> Result<WaitingVm> {
        let Some(migration) = &instance.migration else { bail!("{} is not moving", instance.name) };
        let mut spec = self.machine(instance, guest, shape);
        spec.incoming = Some(uri.to_owned());
        self.give_devices(&mut spec, instance);
        choose_qemu(&mut spec)?;
        // Two machines of one name, and hosts that share their directories.
        spec.directory = self.directory().join(format!("vm-{}", migration.to));
        let mut waiting = self.start_machine(instance, &migration.to, spec)?;
        waiting.vm.wait_until_listening()?;
        Ok(waiting)
    }

    /// Moves the guest of an instance to `host` while it runs, and ends the machine that it left.
    pub fn move_to(
        &self,
        mut vm: PodVm,
        guest: &Guest,
        shape: VmShape,
        host: &str,
    ) -> Result<(PodVm, Migrated)> {
        let name = vm.vm.spec().name.clone();
        let moving = self.api().migrate_instance(&name, host)?;
        if !moving.migration.as_ref().is_some_and(|migration| migration.ready) {
            bail!("{name} cannot move to {host}: {:?}", moving.migration);
        }
        let uri = format!("unix:{}", self.directory().join(format!("to-{host}.sock")).display());
        let waiting = self.await_guest(&moving, guest, shape, &uri)?;
        let monitor = vm.vm.spec().monitor_socket();
        let moved = vmm::move_away(self.api(), &name, &monitor, &uri, MigrationSpeed::default())?;
        vmm::quit(&monitor)?;
        let status = vm.vm.wait()?;
        if !status.success() {
            bail!("the machine that {name} left ended with {status}");
        }
        Ok((waiting.arrived()?, moved))
    }

    /// What a machine for `instance` consists of. Its QEMU is the installed one.
    pub fn machine(&self, instance: &Instance, guest: &Guest, shape: VmShape) -> VmSpec {
        let mut spec = VmSpec {
            memory_mib: shape.memory_mib,
            cpus: shape.cpus,
            accelerator: accelerator(guest),
            ..bare_vm(&instance.name, guest, &self.directory().join("vm"))
        };
        self.give_devices(&mut spec, instance);
        spec
    }

    fn give_devices(&self, spec: &mut VmSpec, instance: &Instance) {
        spec.take_devices(instance);
        for network in &mut spec.networks {
            network.guest_announces = self.plan.guests_announce;
        }
    }

    fn start_machine(&self, instance: &Instance, host: &str, spec: VmSpec) -> Result<WaitingVm> {
        let namespace = self.host(host)?;
        let keep = self.plan.keep;
        let suffix = if spec.incoming.is_some() { format!("-{host}") } else { String::new() };
        let log = self.log(&format!("{}-qemu{suffix}", instance.name));
        let output = fs::File::create(&log)?;
        let incoming = spec.incoming.is_some();
        let confirm = || vmm::confirm_ram(self.api(), instance, incoming);
        let vm = Vm::start_with(spec, confirm, |command, input| {
            let program = command.get_program().to_owned();
            let mut inside = if keep {
                namespace.untethered_command(program.as_ref())
            } else {
                namespace.command(program.as_ref())
            };
            inside.args(command.get_args()).stdin(input);
            inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
            inside.stdout(output.try_clone()?).stderr(output);
            runner::spawn(inside)
        })?;
        Ok(WaitingVm { vm, log })
    }
}

/// One whose memory lies in the pool needs a QEMU that can find it there.
fn choose_qemu(spec: &mut VmSpec) -> Result<()> {
    if spec.pool_ram.is_some() {
        spec.qemu = newer_qemu::with_offset()?;
    }
    Ok(())
}

/// A machine whose guest has yet to boot, or to arrive; dropping it ends it.
#[derive(Debug)]
pub struct WaitingVm {
    vm: Vm,
    log: PathBuf,
}

impl WaitingVm {
    /// Waits until its guest answers.
    pub fn arrived(mut self) -> Result<PodVm> {
        let console = self.vm.spec().console_log();
        match Agent::connect(&self.vm.spec().exec_socket(), BOOT_DEADLINE) {
            Ok(agent) => Ok(PodVm { agent, vm: self.vm }),
            Err(error) => {
                // It may be on its way out.
                thread::sleep(Duration::from_millis(100));
                let ended =
                    self.vm.exited().map_or_else(String::new, |status| format!("; QEMU ended ({status})"));
                let error = anyhow::Error::from(error);
                let (log, console) = (last_lines(&self.log), last_lines(&console));
                bail!("{error:#}{ended}\n{log}\n{console}\n{}", self.whereabouts());
            }
        }
    }

    /// Where a guest is that does not boot: QEMU's threads and the guest's vCPUs, twice, and what the daemons logged last.
    fn whereabouts(&self) -> String {
        let mut lines = Vec::new();
        for _ in 0..2 {
            for command in ["info status", "info registers -a"] {
                let answer = vmm::ask_human_monitor(&self.vm.spec().monitor_socket(), command);
                let answer = answer.unwrap_or_else(|error| format!("{command}: {error}"));
                let telling = |line: &&str| {
                    ["VM status", "CPU#", "RIP", "EIP", "info"].iter().any(|word| line.contains(word))
                };
                lines.extend(answer.lines().filter(telling).map(str::to_owned));
            }
            thread::sleep(Duration::from_millis(100));
        }
        for thread in fs::read_dir(format!("/proc/{}/task", self.vm.pid())).into_iter().flatten().flatten() {
            let read = |file: &str| fs::read_to_string(thread.path().join(file)).unwrap_or_default();
            lines.push(format!("{}: {} in {}", read("comm").trim(), read("syscall").trim(), read("wchan")));
        }
        for log in self.log.parent().and_then(|logs| fs::read_dir(logs).ok()).into_iter().flatten().flatten()
        {
            lines.push(format!("--- {}\n{}", log.path().display(), last_lines(&log.path())));
        }
        lines.join("\n")
    }
}

impl PodVm {
    /// Runs a command line with the guest's shell and returns its standard output; fails if it fails.
    pub fn exec(&self, command: &str) -> Result<String> {
        self.exec_within(command, Duration::from_mins(1))
    }

    /// As [`PodVm::exec`], for commands that take longer.
    pub fn exec_within(&self, command: &str, deadline: Duration) -> Result<String> {
        succeeded(command, &self.agent.run(command, deadline)?)
    }

    /// As [`PodVm::exec`], for a command line that reads `input`.
    pub fn exec_with_input(&self, command: &str, input: &[u8]) -> Result<String> {
        succeeded(command, &self.agent.start(command, input)?.wait(Duration::from_mins(1))?)
    }

    /// Resets the guest, and waits until it has booted again.
    pub fn reboot(&mut self, deadline: Duration) -> Result<()> {
        const BOOT: &str = "cat /proc/sys/kernel/random/boot_id";
        let before = self.exec(BOOT)?;
        let started = Instant::now();
        // It is gone before it could answer.
        let _ = self.agent.start("reboot -f", &[])?;
        loop {
            // What was asked of the guest before is answered by nobody.
            self.agent.disconnect();
            self.agent = Agent::connect(&self.vm.spec().exec_socket(), deadline)?;
            // This may still be the guest that is about to go.
            if self.run(BOOT, Duration::from_secs(2)).is_ok_and(|now| now.text() != before) {
                return Ok(());
            }
            if started.elapsed() > deadline {
                bail!("the guest does not reboot");
            }
        }
    }

    /// Runs a command line whatever its exit status.
    pub fn run(&self, command: &str, deadline: Duration) -> Result<Outcome> {
        Ok(self.agent.run(command, deadline)?)
    }

    /// Starts a command line in the background.
    pub fn start(&self, command: &str) -> Result<GuestJob<'_>> {
        let job = self.agent.start(command, &[])?;
        Ok(GuestJob { agent: &self.agent, command: command.to_owned(), job })
    }

    /// QEMU.
    pub fn qemu(&mut self) -> &mut Vm {
        &mut self.vm
    }

    /// Ends it in good order.
    pub fn stop(&mut self) -> Result<()> {
        self.vm.stop().context("cannot stop the VM")?;
        Ok(())
    }
}

/// A command that runs in the guest.
#[derive(Debug)]
pub struct GuestJob<'a> {
    agent: &'a Agent,
    command: String,
    job: Job,
}

impl GuestJob<'_> {
    /// Waits until it ends and returns its standard output; fails if it fails.
    pub fn finish(self, deadline: Duration) -> Result<String> {
        succeeded(&self.command, &self.job.wait(deadline)?)
    }

    /// How it ended, if it has.
    pub fn outcome(&self) -> Option<Outcome> {
        self.job.outcome()
    }

    /// Sends it a signal, such as `TERM`.
    pub fn signal(&self, signal: &str) -> Result<()> {
        Ok(self.agent.signal(&self.job, signal)?)
    }
}

fn succeeded(command: &str, outcome: &Outcome) -> Result<String> {
    if outcome.success() {
        return Ok(outcome.text());
    }
    bail!(
        "in the guest, `{command}` ended with {}:\n{}{}",
        outcome.status,
        outcome.text(),
        String::from_utf8_lossy(&outcome.stderr)
    )
}
