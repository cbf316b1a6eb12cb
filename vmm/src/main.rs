//! `vmm`: runs the virtual machine of an instance, or says how to.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{Args, Parser, Subcommand};
use pod_controller::client::{Client, Server};
use tokio::signal::unix::{SignalKind, signal};
use vmm::{Accelerator, DirectKernel, QemuVersion, Vm, VmSpec, console, libvirt};

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
    /// Prints the QEMU command line that `run` would use.
    QemuArgs(Machine),
    /// Prints libvirt's domain XML.
    Xml(Machine),
    /// Puts this terminal on a machine's serial console; Ctrl-] leaves it.
    Console {
        /// The console's socket; `run` says where it is.
        socket: PathBuf,
    },
}

#[derive(Args)]
struct Machine {
    /// The instance, as the controller knows it.
    #[arg(long)]
    instance: String,
    /// Where the controller listens.
    #[arg(long, env = "WADI_CONTROLLER", default_value = "unix:/run/wadi/controller.sock")]
    server: Server,
    /// Memory in MiB.
    #[arg(long, default_value_t = 1024)]
    memory: u32,
    /// vCPUs.
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// A kernel to load; without one, the machine boots from its first disk.
    #[arg(long)]
    kernel: Option<PathBuf>,
    /// The kernel's initramfs.
    #[arg(long, requires = "kernel")]
    initrd: Option<PathBuf>,
    /// The kernel's command line.
    #[arg(long, requires = "kernel", default_value = "console=ttyS0")]
    append: String,
    /// What executes the guest; without it, KVM where a kernel really boots with it, else TCG.
    #[arg(long, value_enum)]
    accelerator: Option<Accelerator>,
    /// Where to put the machine's monitor and console sockets.
    #[arg(long, default_value = "/run/wadi/vm")]
    directory: PathBuf,
}

impl Machine {
    fn spec(&self) -> Result<VmSpec> {
        let client = Client::new(self.server.clone())?;
        let instance = client.instance(&self.instance)?;
        if !instance.ready {
            bail!("{} is not ready: it waits for {}", instance.name, instance.waiting_for.join(", "));
        }
        let accelerator = match (self.accelerator, &self.kernel) {
            (Some(accelerator), _) => accelerator,
            (None, Some(kernel)) => Accelerator::probe(kernel),
            (None, None) => match host_kernel() {
                Some(kernel) => Accelerator::probe(&kernel),
                None => Accelerator::default(),
            },
        };
        let mut spec = VmSpec {
            name: String::new(),
            memory_mib: self.memory,
            cpus: self.cpus,
            accelerator,
            kernel: self.kernel.as_ref().map(|kernel| DirectKernel {
                kernel: kernel.clone(),
                initrd: self.initrd.clone(),
                command_line: self.append.clone(),
            }),
            networks: Vec::new(),
            disks: Vec::new(),
            directory: self.directory.clone(),
        };
        spec.take_devices(&instance);
        Ok(spec)
    }
}

/// Any kernel does to try whether KVM works: the host's own is at hand.
fn host_kernel() -> Option<PathBuf> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    let path = PathBuf::from(format!("/boot/vmlinuz-{}", release.trim()));
    path.exists().then_some(path)
}

fn run(machine: &Machine) -> Result<()> {
    let spec = machine.spec()?;
    eprintln!("{} runs with {}; console: {}", spec.name, spec.accelerator, spec.console_socket().display());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _guard = runtime.enter();
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut vm = Vm::start(spec)?;
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

fn execute(command: Command) -> Result<()> {
    match command {
        Command::Run(machine) => run(&machine),
        Command::QemuArgs(machine) => {
            println!("{}", libvirt::command_line(&machine.spec()?, QemuVersion::detect()?));
            Ok(())
        }
        Command::Console { socket } => {
            console::attach(&socket).with_context(|| format!("the console at {}", socket.display()))
        }
        Command::Xml(machine) => {
            print!("{}", libvirt::domain_xml(&machine.spec()?, QemuVersion::detect()?));
            Ok(())
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
