//! One run: a receiver in this process, a sender in another one, each on its core.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use cxl_channel::{Receiver, RingPlacement, Sender};
use cxl_pool::{ByteOffset, CreateOptions, Generation, Memory, Pool};
use rustix::process::{Signal, set_parent_process_death_signal};
use wadi_tests::runner::memory_tempdir;

use super::ends::{Inlet, Outlet};
use super::rivals;
use super::traffic::{self, Measured, Traffic};
use super::variant::Variant;
use crate::cores::{self, Cores};
use crate::shared_window::{Forked, Window};

/// As in the paper.
pub(super) const SLOTS: u32 = 8192;

/// What the sending process is told.
#[derive(Args)]
pub(crate) struct SenderOptions {
    #[arg(long)]
    pool: PathBuf,
    #[arg(long)]
    words: usize,
    #[arg(long)]
    variant: Variant,
    #[arg(long)]
    generation: u32,
    #[arg(long)]
    core: usize,
    #[arg(long)]
    rate: Option<f64>,
    #[arg(long)]
    duration_ms: u64,
}

/// Where the rival's ring lies in the pool, beyond ours.
const RIVAL_OFFSET: u64 = 12 << 20;
const RIVAL_BYTES: usize = 2 << 20;

/// The pool that all runs go through. It has no name any more, so that nothing can be left behind.
pub(crate) struct Bench {
    pool: Pool,
    /// The pages of the pool that the rival works in.
    rival: Window,
    cores: Cores,
    generation: Generation,
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
        placement(&pool).clear(&pool.software());
        let rival = Window::new(pool.fd(), RIVAL_OFFSET, RIVAL_BYTES)?;
        Ok(Self { pool, rival, cores, generation: Generation::default() })
    }

    /// Measures a variant with messages of this many words.
    pub(crate) fn run<const WORDS: usize>(&mut self, variant: Variant, traffic: Traffic) -> Result<Measured> {
        cores::unpin(self.cores)?;
        self.generation = self.generation.next();
        match variant {
            Variant::Rtrb => self.rival(traffic, rivals::rtrb::<WORDS>),
            Variant::Gil => self.rival(traffic, rivals::gil::<WORDS>),
            Variant::Coherent => self.between_processes::<_, WORDS>(&self.pool.hardware(), variant, traffic),
            _ => self.between_processes::<_, WORDS>(&self.pool.software(), variant, traffic),
        }
    }

    /// Both ends of a channel in this thread.
    pub(super) fn both_ends<M: Memory, const WORDS: usize>(
        &mut self,
        memory: &M,
    ) -> Result<(Sender<M, WORDS>, Receiver<M, WORDS>)> {
        self.generation = self.generation.next();
        let (placement, generation) = (placement(&self.pool), self.generation);
        let mut sender = Sender::begin(memory.clone(), placement, generation);
        sender.set_wakeups(false);
        let mut receiver = Receiver::open(memory.clone(), placement, generation);
        ensure!(receiver.ready() && sender.ready(), "the two ends do not find each other");
        Ok((sender, receiver))
    }

    /// Both ends of two channels.
    pub(super) fn two_channels<M: Memory, const WORDS: usize>(
        &mut self,
        memory: &M,
        variant: Variant,
    ) -> Result<[(Sender<M, WORDS>, Receiver<M, WORDS>); 2]> {
        self.generation = self.generation.next();
        let first = placement(&self.pool);
        let second = RingPlacement { start: first.area(8).end(), slots: SLOTS };
        second.clear(&self.pool.software());
        let ends = [first, second].map(|placement| {
            let mut sender = Sender::begin(memory.clone(), placement, self.generation);
            sender.set_wakeups(false);
            let mut receiver = Receiver::open(memory.clone(), placement, self.generation);
            if let Some(policy) = variant.policy() {
                receiver = receiver.with_policy(policy);
            }
            let ready = receiver.ready() && sender.ready();
            (ready, (sender, receiver))
        });
        ensure!(ends.iter().all(|end| end.0), "the two ends do not find each other");
        Ok(ends.map(|end| end.1))
    }

    /// Two lines that no channel uses, and no prefetcher brings in together.
    pub(super) fn spare_lines(&self) -> [ByteOffset; 2] {
        let last = self.pool.layout().data().end().bytes().get();
        [8192, 4096 - 256].map(|from_end| ByteOffset::new(last - from_end))
    }

    /// Runs this, with what it allocates in the pages that the rival works in. What was allocated there before must be gone.
    pub(super) fn in_rivals_pages<T>(&mut self, run: impl FnOnce() -> T) -> T {
        self.rival.allocate(run)
    }

    /// From now on it runs on these.
    pub(super) fn set_cores(&mut self, cores: Cores) {
        self.cores = cores;
    }

    pub(super) fn cores(&self) -> Cores {
        self.cores
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    fn between_processes<M: Memory, const WORDS: usize>(
        &self,
        memory: &M,
        variant: Variant,
        traffic: Traffic,
    ) -> Result<Measured> {
        let mut sender = Process(self.spawn_sender(WORDS, variant, traffic)?);
        cores::pin(self.cores.receiver)?;
        let mut receiver = Receiver::<M, WORDS>::open(memory.clone(), placement(&self.pool), self.generation);
        if let Some(policy) = variant.policy() {
            receiver = receiver.with_policy(policy);
        }
        let measured = traffic::receive(&mut receiver, traffic)?;
        let status = sender.0.wait().context("cannot wait for the sending process")?;
        ensure!(status.success(), "the sending process failed: {status}");
        Ok(measured)
    }

    fn spawn_sender(&self, words: usize, variant: Variant, traffic: Traffic) -> Result<Child> {
        use clap::ValueEnum;
        let pool = format!("/proc/{}/fd/{}", std::process::id(), self.pool.fd().as_raw_fd());
        let variant = variant.to_possible_value().context("every variant has a name")?;
        let program = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(program);
        command.args(["channel-sender", "--pool", &pool, "--variant", variant.get_name()]);
        for (option, value) in [
            ("--words", words.to_string()),
            ("--generation", self.generation.to_string()),
            ("--core", self.cores.sender.to_string()),
            ("--duration-ms", traffic.duration.as_millis().to_string()),
        ] {
            command.args([option, &value]);
        }
        if let Some(rate) = traffic.rate {
            command.args(["--rate", &rate.to_string()]);
        }
        command.stdin(Stdio::null()).spawn().context("cannot start the sending process")
    }

    /// A receiver in this process, a sender in another one, through the rival's ring in the pool's pages.
    fn rival<const WORDS: usize, O: Outlet<WORDS>, I: Inlet<WORDS>>(
        &mut self,
        traffic: Traffic,
        ring: impl FnOnce() -> (O, I),
    ) -> Result<Measured> {
        let (mut producer, mut consumer) = self.rival.allocate(ring);
        let core = self.cores.sender;
        let sender = Forked::run(|| {
            cores::pin(core)?;
            traffic::send(&mut producer, traffic)
        })?;
        cores::pin(self.cores.receiver)?;
        let measured = traffic::receive(&mut consumer, traffic)?;
        sender.wait()?;
        Ok(measured)
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

fn placement(pool: &Pool) -> RingPlacement {
    RingPlacement { start: pool.layout().data().start, slots: SLOTS }
}

/// The sending process.
pub(crate) fn send(options: &SenderOptions) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot tie this process to its parent")?;
    cores::pin(options.core)?;
    let pool = Pool::open(&options.pool)?;
    match options.variant {
        Variant::Coherent => send_through(&pool, pool.hardware(), options),
        _ => send_through(&pool, pool.software(), options),
    }
}

fn send_through<M: Memory>(pool: &Pool, memory: M, options: &SenderOptions) -> Result<()> {
    match options.words {
        2 => send_words::<M, 2>(pool, memory, options),
        _ => send_words::<M, 8>(pool, memory, options),
    }
}

fn send_words<M: Memory, const WORDS: usize>(pool: &Pool, memory: M, options: &SenderOptions) -> Result<()> {
    let generation = Generation::new(options.generation);
    let mut sender = Sender::<M, WORDS>::begin(memory, placement(pool), generation);
    sender.set_wakeups(false);
    let duration = Duration::from_millis(options.duration_ms);
    traffic::send(&mut sender, Traffic { rate: options.rate, duration })
}
