//! `vmm`: runs the virtual machine of an instance, or says how to.

#![forbid(unsafe_code)]

mod cloud_hypervisor_args;
mod fair;
mod following;
mod frontends;
mod libvirt_hook;
mod memory_args;
mod running;
mod slice;
mod uncounted;

use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use pod_api::Instance;
use pod_api::client::{CONTROLLER, Client, Credentials, Server};
use tokio::signal::unix::{SignalKind, signal};
use vmm::hook::Metadata;
use vmm::{
    Accelerator, DirectKernel, Firmware, MigrationSpeed, QemuVersion, Registry, Uefi, Vm, VmSpec, console,
    libvirt, slicing,
};

/// Runs unmodified virtual machines whose devices come from the pod.
#[derive(Parser)]
#[command(name = "vmm", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the instance's virtual machine until it powers off. Ctrl-C ends it.
    Run(Machine),
    /// Moves the instance's virtual machine, which runs on this host, to another one, while it runs.
    ///
    /// On the other host, `vmm run --incoming` has to wait for it, started with what this one was started with, after
    /// `podctl instances migrate`.
    Migrate(Move),
    /// Plugs memory into the instance's virtual machine, which runs on this host with `--memory-max`.
    PlugMemory(memory_args::Plug),
    /// Unplugs the memory that was plugged in last, which the guest has to let go of.
    UnplugMemory(memory_args::Unplug),
    /// Prints the QEMU command line that `run` would use.
    QemuArgs(Machine),
    /// Prints the command line that has Cloud Hypervisor run the instance's virtual machine.
    CloudHypervisorArgs(cloud_hypervisor_args::CloudHypervisorArgs),
    /// Prints libvirt's domain XML.
    Xml(Machine),
    /// Lists the machines that run on this host, and tidies up after those that have ended.
    List(running::List),
    /// Ends a machine that runs on this host.
    Stop(running::Stop),
    /// Plugs devices into a machine that runs on this host, and unplugs them, as `podctl instances attach` and `detach` say, until
    /// it ends. `vmm run` does that for its own.
    Follow(following::Follow),
    /// Finds a machine that somebody else has started, by its QEMU or its libvirt domain, and notes it for `list` and `stop`.
    Attach(running::Attach),
    /// Holds the vCPUs of a machine that runs on this host to a part of their time, or to its share of the fabric, until Ctrl-C.
    Slice(slice::Slice),
    /// Leases the devices of a libvirt domain when it starts, and gives them back when it has ended. libvirt runs this, with the
    /// domain's XML at the standard input: /etc/libvirt/hooks/qemu.d/wadi.
    LibvirtHook(libvirt_hook::LibvirtHook),
    /// Puts this terminal on a machine's serial console; Ctrl-] leaves it.
    Console {
        /// The console's socket; `run` says where it is.
        socket: PathBuf,
    },
}

// Whose virtual machine, and who knows it. No doc comment: clap would take it for what the command does.
#[derive(Args)]
struct Of {
    /// The instance, as the controller knows it.
    #[arg(long)]
    instance: String,
    /// Where the controller listens.
    #[arg(long, env = "WADI_CONTROLLER", help_heading = CONTROLLER, default_value = "unix:/run/wadi/controller.sock")]
    server: Server,
    #[command(flatten)]
    credentials: Credentials,
}

impl Of {
    fn client(&self) -> Result<Client> {
        Ok(self.credentials.client(&self.server)?)
    }
}

#[derive(Args)]
struct Move {
    #[command(flatten)]
    of: Of,
    /// Where the other host's machine waits, such as tcp:h3:4444.
    #[arg(long, value_name = "URI")]
    to: String,
    /// Where this host's machine has its monitor.
    #[arg(long, default_value = "/run/wadi/vm")]
    directory: PathBuf,
    /// For how many milliseconds QEMU may plan to stop the guest.
    #[arg(long, value_name = "MS", default_value_t = MigrationSpeed::default().downtime_ms)]
    downtime: u64,
}

/// Where the variables of machines are that are not told otherwise.
const NVRAM: &str = "/var/lib/wadi/nvram";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FirmwareKind {
    /// SeaBIOS.
    Bios,
    /// UEFI.
    Uefi,
}

#[derive(Args)]
struct Machine {
    #[command(flatten)]
    of: Of,
    /// Memory in MiB; of an instance whose memory is leased from the pool (`podctl instances create --ram`), all of that
    /// [default: 1024].
    #[arg(long, value_name = "MIB")]
    memory: Option<u32>,
    /// To how many MiB `vmm plug-memory` may let it grow.
    #[arg(long, value_name = "MIB")]
    memory_max: Option<u32>,
    /// vCPUs.
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// To how many vCPUs `device_add` of its monitor may let it grow.
    #[arg(long, value_name = "COUNT")]
    cpus_max: Option<u32>,
    /// The firmware it starts with; UEFI is what is installed, such as Debian's ovmf.
    #[arg(long, value_enum, default_value_t = FirmwareKind::Bios)]
    firmware: FirmwareKind,
    /// Where UEFI keeps the machine's variables; made if it is not there, and kept when the machine ends. Without it,
    /// /var/lib/wadi/nvram/INSTANCE.fd.
    #[arg(long, value_name = "FILE", value_parser = absolute)]
    nvram: Option<PathBuf>,
    /// From which devices to try to boot, such as vol0,net0; without it, from the disks.
    #[arg(long, value_name = "DEVICES", value_delimiter = ',', conflicts_with = "kernel")]
    boot: Vec<String>,
    /// How many NICs and volumes it can have, those that are plugged in while it runs included; unless given, 8, 16 or 24: as many as
    /// its highest slot needs. The same on both sides of a live migration.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=24))]
    ports: Option<u8>,
    /// A kernel to load, instead of booting from a device.
    #[arg(long, value_parser = absolute)]
    kernel: Option<PathBuf>,
    /// The kernel's initramfs.
    #[arg(long, requires = "kernel", value_parser = absolute)]
    initrd: Option<PathBuf>,
    /// The kernel's command line.
    #[arg(long, requires = "kernel", default_value = "console=ttyS0")]
    append: String,
    /// The QEMU that runs it, where it is not the one that is installed. One that finds its guest's memory in the pool must know
    /// the offset of a memory-backend-file: 8.1 or later.
    #[arg(long, value_name = "PROGRAM", default_value = vmm::QEMU)]
    qemu: PathBuf,
    /// Where the pool is on this host, for an instance that has its memory there [default: where the controller has it]
    #[arg(long, value_name = "PATH", value_parser = absolute)]
    pool: Option<PathBuf>,
    /// What executes the guest; without it, KVM where a kernel really boots with it, else TCG.
    #[arg(long, value_enum)]
    accelerator: Option<Accelerator>,
    /// Where to put the machine's monitor and console sockets.
    #[arg(long, default_value = "/run/wadi/vm", value_parser = absolute)]
    directory: PathBuf,
    /// Wait here for the instance's guest, which runs on another host, instead of booting one: such as tcp:0.0.0.0:4444.
    #[arg(long, value_name = "URI")]
    incoming: Option<String>,
    /// Do not load the library into QEMU with which `vmm slice` slices the vCPUs' time best.
    #[arg(long)]
    no_shim: bool,
}

impl Machine {
    /// What it consists of, the instance, and the host that it runs on.
    fn spec(&self) -> Result<(VmSpec, Instance, String)> {
        let client = self.of.client()?;
        let instance = client.instance(&self.of.instance)?;
        let mut host = instance.host.clone();
        if self.incoming.is_some() {
            let Some(migration) = &instance.migration else {
                bail!(
                    "{0} is not moving anywhere: say where with `podctl instances migrate {0}`",
                    self.of.instance
                );
            };
            host.clone_from(&migration.to);
            if !migration.ready {
                bail!("{} is not ready: it waits for {}", migration.to, migration.waiting_for.join(", "));
            }
        } else if !instance.ready {
            bail!("{} is not ready: it waits for {}", instance.name, instance.waiting_for.join(", "));
        }
        let accelerator = match (self.accelerator, &self.kernel) {
            (Some(accelerator), _) => accelerator,
            (None, Some(kernel)) => Accelerator::probe(&self.qemu, kernel),
            (None, None) => match host_kernel() {
                Some(kernel) => Accelerator::probe(&self.qemu, &kernel),
                None => Accelerator::default(),
            },
        };
        let mut spec = VmSpec {
            name: String::new(),
            qemu: self.qemu.clone(),
            memory_mib: self.memory.unwrap_or(1024),
            pool_ram: None,
            memory_max_mib: self.memory_max,
            cpus: self.cpus,
            cpus_max: self.cpus_max,
            accelerator,
            firmware: self.firmware()?,
            boot: self.boot.clone(),
            kernel: self.kernel.as_ref().map(|kernel| DirectKernel {
                kernel: kernel.clone(),
                initrd: self.initrd.clone(),
                command_line: self.append.clone(),
            }),
            networks: Vec::new(),
            disks: Vec::new(),
            ports: self.ports,
            listens: false,
            directory: self.directory.clone(),
            incoming: self.incoming.clone(),
            vcpu_shim: if self.no_shim { None } else { slicing::find_shim() },
        };
        spec.take_devices(&instance);
        if let Some(ram) = &mut spec.pool_ram {
            if self.memory.is_some_and(|memory| memory != spec.memory_mib) {
                bail!(
                    "{} has {} MiB of the pool as its memory: leave --memory out, or create it with another --ram",
                    instance.name,
                    spec.memory_mib
                );
            }
            if let Some(pool) = &self.pool {
                ram.pool.clone_from(pool);
            }
        }
        Ok((spec, instance, host))
    }

    fn firmware(&self) -> Result<Firmware> {
        match (self.firmware, &self.nvram) {
            (FirmwareKind::Bios, None) => Ok(Firmware::Bios),
            (FirmwareKind::Bios, Some(_)) => {
                bail!("a BIOS keeps no variables: --nvram is for --firmware uefi")
            }
            (FirmwareKind::Uefi, nvram) => {
                let variables = nvram.clone();
                let variables =
                    variables.unwrap_or_else(|| Path::new(NVRAM).join(format!("{}.fd", self.of.instance)));
                Ok(Firmware::Uefi(Uefi::find(variables)?))
            }
        }
    }

    /// As [`Machine::spec`], for somebody else to start: what starting makes is made now.
    fn prepared(&self) -> Result<(VmSpec, Instance)> {
        let (spec, instance, _) = self.spec()?;
        spec.firmware.prepare()?;
        Ok((spec, instance))
    }
}

/// Who looks for it later, or libvirt, is in another directory.
fn absolute(path: &str) -> std::io::Result<PathBuf> {
    std::path::absolute(path)
}

/// Any kernel does to try whether KVM works: the host's own is at hand.
fn host_kernel() -> Option<PathBuf> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    let path = PathBuf::from(format!("/boot/vmlinuz-{}", release.trim()));
    path.exists().then_some(path)
}

fn run(machine: &Machine) -> Result<()> {
    let (spec, instance, host) = machine.spec()?;
    let client = machine.of.client()?;
    // What is noted on this host says more, and files of a machine that runs stay until it is sure that there is none.
    Registry::new(&spec.directory).refuse_a_second(&spec.name)?;
    vmm::refuse_a_second_vmm(&client, &spec.name, spec.incoming.is_some())?;
    eprintln!("{} runs with {}; console: {}", spec.name, spec.accelerator, spec.console_socket().display());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _guard = runtime.enter();
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let incoming = spec.incoming.clone();
    let confirm = || vmm::confirm_ram(&client, &instance, incoming.is_some());
    let mut vm = Vm::start_with(spec, confirm, |command, input| command.stdin(input).spawn())?;
    if let Some(running) = vm.running() {
        following::begin(client, &machine.directory, running.clone(), host)?;
    }
    if let Some(uri) = incoming {
        vm.wait_until_listening()?;
        eprintln!("it waits for its guest at {uri}");
    }
    let told = runtime.block_on(async {
        loop {
            tokio::select! {
                _ = interrupt.recv() => return true,
                _ = terminate.recv() => return true,
                () = tokio::time::sleep(Duration::from_millis(50)) => if vm.exited().is_some() { return false },
            }
        }
    });
    let status = vm.stop()?;
    if !told && !status.success() {
        bail!("QEMU ended with {status}: what it said is above");
    }
    Ok(())
}

fn move_away(asked: &Move) -> Result<()> {
    let client = asked.of.client()?;
    let name = &asked.of.instance;
    let monitor = asked.directory.join(format!("{name}-qmp.sock"));
    let speed = MigrationSpeed { downtime_ms: asked.downtime, ..MigrationSpeed::default() };
    let moved = vmm::move_away(&client, name, &monitor, &asked.to, speed)?;
    // The guest is there in any case.
    if let Err(error) = vmm::quit(&monitor) {
        eprintln!("warning: the QEMU that it has left does not end: {error}; vmm stop {name}");
    }
    print(&format!(
        "{name} runs on {}: moved in {} ms, of which it stood still for {} ms; {} MiB copied\n",
        client.instance(name)?.host,
        moved.total_ms,
        moved.downtime_ms,
        moved.bytes >> 20
    ))
}

/// Writes to the standard output. Whoever reads it may stop at any time.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot write the output"),
        _ => Ok(()),
    }
}

fn execute(command: Command) -> Result<()> {
    match command {
        Command::Run(machine) => run(&machine),
        Command::Migrate(asked) => move_away(&asked),
        Command::PlugMemory(asked) => memory_args::plug(&asked),
        Command::UnplugMemory(asked) => memory_args::unplug(&asked),
        Command::QemuArgs(machine) => {
            let (spec, _) = machine.prepared()?;
            print(&format!("{}\n", libvirt::command_line(&spec, QemuVersion::detect(&spec.qemu)?)?))
        }
        Command::CloudHypervisorArgs(asked) => cloud_hypervisor_args::cloud_hypervisor_args(&asked),
        Command::List(asked) => running::list(&asked),
        Command::Stop(asked) => running::stop(&asked),
        Command::Follow(asked) => following::follow(&asked),
        Command::Attach(asked) => running::attach(&asked),
        Command::Slice(asked) => slice::slice(&asked),
        Command::LibvirtHook(asked) => libvirt_hook::libvirt_hook(&asked),
        Command::Console { socket } => {
            console::attach(&socket).with_context(|| format!("the console at {}", socket.display()))
        }
        Command::Xml(machine) => {
            let (spec, instance) = machine.prepared()?;
            let metadata = Metadata::ask(&machine.of.client()?, &instance)?;
            print(&libvirt::domain_xml(&spec, &metadata, QemuVersion::detect(&spec.qemu)?)?)
        }
    }
}

fn main() -> ExitCode {
    match execute(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use clap::error::ErrorKind;

    use super::{Arguments, Command, FirmwareKind, MigrationSpeed, Parser as _, PathBuf};

    fn parsed(line: &str) -> Result<Command, ErrorKind> {
        let words = ["vmm"].into_iter().chain(line.split_whitespace());
        Arguments::try_parse_from(words).map(|arguments| arguments.command).map_err(|error| error.kind())
    }

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_move_names_its_instance_and_where_to() {
        let line = "migrate --instance vm1 --to tcp:h3:4444 --directory /tmp/vm --downtime 20";
        let Ok(Command::Migrate(asked)) = parsed(line) else { panic!("it is understood") };
        assert_eq!(
            (asked.of.instance.as_str(), asked.to.as_str(), asked.downtime),
            ("vm1", "tcp:h3:4444", 20)
        );
        assert_eq!(asked.directory, PathBuf::from("/tmp/vm"));
        let Ok(Command::Migrate(asked)) = parsed("migrate --instance vm1 --to unix:/run/vm1") else {
            panic!("it is understood")
        };
        assert_eq!(asked.downtime, MigrationSpeed::default().downtime_ms);
        assert_eq!(parsed("migrate --instance vm1").err(), Some(ErrorKind::MissingRequiredArgument));
        assert_eq!(parsed("migrate --to tcp:h3:4444").err(), Some(ErrorKind::MissingRequiredArgument));
        let negative = "migrate --instance vm1 --to tcp:h3:4444 --downtime=-1";
        assert_eq!(parsed(negative).err(), Some(ErrorKind::ValueValidation));
    }

    #[test]
    fn what_is_attached_is_named_in_one_way() {
        assert!(parsed("attach --pid 4").is_ok());
        assert!(parsed("attach --domain d --connect qemu:///system --name a").is_ok());
        assert_eq!(parsed("attach").err(), Some(ErrorKind::MissingRequiredArgument));
        assert_eq!(parsed("attach --pid 4 --domain d").err(), Some(ErrorKind::ArgumentConflict));
        assert_eq!(
            parsed("attach --pid 4 --connect qemu:///system").err(),
            Some(ErrorKind::ArgumentConflict)
        );
    }

    #[test]
    fn a_machine_boots_from_a_kernel_or_from_devices() {
        let Ok(Command::Run(machine)) = parsed("run --instance vm1 --firmware uefi --boot vol0,net0") else {
            panic!("it is understood")
        };
        assert_eq!(
            (machine.firmware, machine.boot),
            (FirmwareKind::Uefi, vec!["vol0".into(), "net0".into()])
        );
        let both = "run --instance vm1 --boot vol0 --kernel /k";
        assert_eq!(parsed(both).err(), Some(ErrorKind::ArgumentConflict));
        let Ok(Command::Run(machine)) = parsed("run --instance vm1 --nvram /v.fd") else {
            panic!("it is understood")
        };
        assert!(machine.firmware().unwrap_err().to_string().contains("--firmware uefi"));
    }

    #[test]
    fn what_a_machine_keeps_is_found_from_everywhere() {
        let line = "run --instance vm1 --directory vm --kernel k --initrd ./i --pool p --nvram n.fd";
        let Ok(Command::Run(machine)) = parsed(line) else { panic!("it is understood") };
        let here = std::env::current_dir().unwrap();
        assert_eq!(machine.directory, here.join("vm"));
        let rest = [machine.kernel, machine.initrd, machine.pool, machine.nvram].map(Option::unwrap);
        assert_eq!(rest, ["k", "i", "p", "n.fd"].map(|name| here.join(name)));
    }

    #[test]
    fn a_machine_can_wait_for_a_guest() {
        let Ok(Command::Run(machine)) = parsed("run --instance vm1 --incoming tcp:0.0.0.0:4444") else {
            panic!("it is understood")
        };
        assert_eq!(machine.incoming.as_deref(), Some("tcp:0.0.0.0:4444"));
        let Ok(Command::Run(machine)) = parsed("run --instance vm1") else { panic!("it is understood") };
        assert_eq!(machine.incoming, None);
        assert_eq!(
            parsed("run --instance vm1 --initrd /i").err(),
            Some(ErrorKind::MissingRequiredArgument),
            "an initramfs alone boots nothing"
        );
    }
}
