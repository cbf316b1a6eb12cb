//! The two processes: this one asks, a second one answers.

use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use cxl_channel::RingPlacement;
use cxl_pool::{CreateOptions, Generation, LineCount, Memory, Pool};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Signal, set_parent_process_death_signal};
use wadi_tests::runner::memory_tempdir;

use super::load::{self, Measured};
use super::ours::Ours;
use super::sockets::Socket;
use super::{Case, Transport, Waiting};
use crate::cores::{self, Cores};

/// As control rings have.
const SLOTS: u32 = 256;

/// What the serving process is told. Its end of a pair of sockets is its standard input.
#[derive(Args)]
pub(crate) struct ServerOptions {
    #[arg(long)]
    directory: PathBuf,
    #[arg(long)]
    transport: Transport,
    #[arg(long)]
    waiting: Waiting,
    #[arg(long)]
    generation: u32,
    #[arg(long)]
    core: usize,
}

/// The pool and the doorbells, in a directory that goes with this.
pub(crate) struct Bench {
    directory: tempfile::TempDir,
    pool: Pool,
    cores: Cores,
    generation: Generation,
}

fn placements(pool: &Pool) -> Result<[RingPlacement; 2]> {
    let start = pool.layout().data().start;
    let second = start.checked_add(LineCount::new(RingPlacement::lines(SLOTS, 8).get()));
    let second = second.context("the pool holds two rings")?;
    Ok([start, second].map(|start| RingPlacement { start, slots: SLOTS }))
}

fn bells(directory: &Path) -> [PathBuf; 2] {
    ["client", "server"].map(|side| directory.join(side))
}

impl Bench {
    pub(crate) fn new(cores: Cores) -> Result<Self> {
        let directory = memory_tempdir().context("cannot make a directory in /dev/shm")?;
        let options = CreateOptions {
            size_bytes: Some(16 << 20),
            host_slots: 2,
            replica_slots: 1,
            ..CreateOptions::default()
        };
        let pool = Pool::create(&directory.path().join("pool"), &options)?;
        for placement in placements(&pool)? {
            placement.clear(&pool.software());
        }
        Ok(Self { directory, pool, cores, generation: Generation::default() })
    }

    pub(super) fn run(&mut self, case: Case, run_ms: u64) -> Result<Measured> {
        cores::unpin(self.cores)?;
        self.generation = self.generation.next();
        let (own, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .context("cannot make a pair of sockets")?;
        let mut server = Process(self.spawn(case, theirs.into())?);
        cores::pin(self.cores.receiver)?;
        let duration = Duration::from_millis(run_ms);
        let measured = match case.transport {
            Transport::Hardware => self.call(&self.pool.hardware(), case, duration),
            Transport::Software => self.call(&self.pool.software(), case, duration),
            Transport::Seqpacket => {
                let mut end = Socket { socket: own, waiting: case.waiting };
                load::call(&mut end, case.depth, duration)
            }
        }?;
        let status = server.0.wait().context("cannot wait for the serving process")?;
        ensure!(status.success(), "the serving process failed: {status}");
        Ok(measured)
    }

    fn call<M: Memory>(&self, memory: &M, case: Case, duration: Duration) -> Result<Measured> {
        let [client, server] = bells(self.directory.path());
        let rings = placements(&self.pool)?;
        let mut end = Ours::open(memory, rings, self.generation, [&client, &server], case.waiting)?;
        load::call(&mut end, case.depth, duration)
    }

    fn spawn(&self, case: Case, socket: Stdio) -> Result<Child> {
        let name = |value: Option<clap::builder::PossibleValue>| {
            value.map(|value| value.get_name().to_owned()).context("every case has a name")
        };
        let program = std::env::current_exe().context("cannot find this program")?;
        Command::new(program)
            .arg("exchange-server")
            .arg("--directory")
            .arg(self.directory.path())
            .args(["--transport", &name(case.transport.to_possible_value())?])
            .args(["--waiting", &name(case.waiting.to_possible_value())?])
            .args(["--generation", &self.generation.to_string()])
            .args(["--core", &self.cores.sender.to_string()])
            .stdin(socket)
            .spawn()
            .context("cannot start the serving process")
    }
}

/// A child that does not outlive its run.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It has ended already, unless the run failed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The serving process.
pub(crate) fn serve(options: &ServerOptions) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot tie this process to its parent")?;
    cores::pin(options.core)?;
    if options.transport == Transport::Seqpacket {
        let socket = std::io::stdin().as_fd().try_clone_to_owned().context("cannot use the socket")?;
        ensure!(socket.as_raw_fd() > 0, "the socket is the standard input");
        return load::serve(&mut Socket { socket, waiting: options.waiting });
    }
    let pool = Pool::open(&options.directory.join("pool"))?;
    match options.transport {
        Transport::Hardware => serve_through(&pool, &pool.hardware(), options),
        _ => serve_through(&pool, &pool.software(), options),
    }
}

fn serve_through<M: Memory>(pool: &Pool, memory: &M, options: &ServerOptions) -> Result<()> {
    let [client, server] = bells(&options.directory);
    let [there, back] = placements(pool)?;
    let generation = Generation::new(options.generation);
    load::serve(&mut Ours::open(memory, [back, there], generation, [&server, &client], options.waiting)?)
}
