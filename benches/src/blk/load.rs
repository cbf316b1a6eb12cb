//! A virtio-blk driver without a VM, which keeps a number of random requests in flight.
#![allow(unsafe_code)] // the driver wants pointers into memory that the device writes meanwhile

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use virtio_driver::{QueueNotifier, VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags};
use vm_memory::{FileOffset, MmapRegion};

use super::Job;

/// Three descriptors each for 128 requests, and some to spare.
const QUEUE_SIZE: u16 = 512;
/// VIRTIO_BLK_F_FLUSH, without which every write would have to reach the medium at once, and _MQ.
const BLOCK_FEATURES: u64 = 1 << 9 | 1 << 12;
/// Room for the longest request.
pub(super) const BUFFER_BYTES: usize = 128 << 10;
/// As many as are ever in flight.
pub(super) const BUFFERS: usize = 128;
/// What the buffers take in all.
pub(super) const RAM_BYTES: usize = BUFFERS * BUFFER_BYTES;
/// A device that answers nothing for so long has failed.
const PATIENCE: Duration = Duration::from_secs(10);
/// What comes first is not counted: caches and sleepers wake up.
const WARM_UP: Duration = Duration::from_millis(20);

/// What the driver does when it finds no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiting {
    /// It looks again: it has a core of its own.
    Spinning,
    /// It lets others of its core run first.
    Yielding,
}

impl Waiting {
    fn wait(self) {
        match self {
            Self::Spinning => std::hint::spin_loop(),
            Self::Yielding => rustix::thread::sched_yield(),
        }
    }
}

/// The outcome of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Measured {
    /// All of them, also those that are too early or too late to count for the rate.
    pub(super) requests: u32,
    pub(super) per_second: f64,
    pub(super) p50: Duration,
    pub(super) p99: Duration,
    /// Of who serves the guest, and of who serves the device if that is somebody else.
    pub(super) cpu_per_request: [Duration; 2],
}

/// What is known of a run so far.
pub(super) struct Run {
    job: Job,
    latencies: Histogram<u64>,
    begun_at: [Instant; BUFFERS],
    duration: Duration,
    counted_from: Instant,
    until: Instant,
    counted: u32,
    requests: u32,
    in_flight: u32,
    last: Instant,
    random: u64,
}

impl Run {
    pub(super) fn new(job: Job, duration: Duration) -> Result<Self> {
        let now = Instant::now();
        Ok(Self {
            job,
            latencies: Histogram::new_with_bounds(1, 60_000_000_000, 3)?,
            begun_at: [now; BUFFERS],
            duration,
            counted_from: now + WARM_UP,
            until: now + WARM_UP + duration,
            counted: 0,
            requests: 0,
            in_flight: 0,
            last: now,
            random: 0x9e37_79b9_7f4a_7c15,
        })
    }

    /// Where the next request goes, on a disk of this size.
    pub(super) fn begin(&mut self, buffer: usize, now: Instant, disk_bytes: u64) -> u64 {
        self.begun_at[buffer] = now;
        self.in_flight += 1;
        // xorshift: as random as an access pattern needs to be.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let bytes = u64::from(self.job.bytes);
        self.random % (disk_bytes / bytes) * bytes
    }

    /// A request ended. True if its buffer shall be used again.
    pub(super) fn end(&mut self, buffer: usize, now: Instant) -> bool {
        self.last = now;
        self.in_flight -= 1;
        self.requests += 1;
        if now >= self.counted_from && now < self.until {
            self.counted += 1;
            let took = now.duration_since(self.begun_at[buffer]).as_nanos();
            self.latencies.saturating_record(u64::try_from(took).unwrap_or(u64::MAX));
        }
        now < self.until
    }

    /// Whether anything is in flight; an error if it has been for too long.
    pub(super) fn goes_on(&self, now: Instant) -> Result<bool> {
        if self.in_flight > 0 && now.duration_since(self.last) > PATIENCE {
            bail!("no answer for {PATIENCE:?}, {} requests in flight", self.in_flight);
        }
        Ok(self.in_flight > 0)
    }

    pub(super) fn measured(&self) -> Measured {
        Measured {
            requests: self.requests,
            per_second: f64::from(self.counted) / self.duration.as_secs_f64(),
            p50: Duration::from_nanos(self.latencies.value_at_quantile(0.5)),
            p99: Duration::from_nanos(self.latencies.value_at_quantile(0.99)),
            cpu_per_request: [Duration::ZERO; 2],
        }
    }
}

struct Queue {
    requests: VirtioBlkQueue<'static, usize>,
    notifier: Box<dyn QueueNotifier>,
}

/// A disk with its driver.
pub(super) struct Load {
    queues: Vec<Queue>,
    // After the queues, whose memory it holds.
    _transport: Box<VirtioBlkTransport>,
    buffers: MmapRegion<()>,
    disk_bytes: u64,
    ended: Vec<usize>,
}

impl Load {
    /// Connects with so many queues. The data of requests lies in `ram`, which has room for [`RAM_BYTES`] from its offset.
    pub(super) fn connect(socket: &Path, disk_bytes: u64, queues: u16, ram: &FileOffset) -> Result<Self> {
        let features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
        let shown = socket.to_str().context("a path that is text")?;
        let transport = VhostUser::new(shown, features.bits() | BLOCK_FEATURES);
        let mut transport: Box<VirtioBlkTransport> =
            Box::new(transport.with_context(|| format!("cannot connect to {shown}"))?);
        let rings = VirtioBlkQueue::setup_queues(transport.as_mut(), queues.into(), QUEUE_SIZE)?;
        let (fd, offset) = (ram.file().as_raw_fd(), i64::try_from(ram.start())?);
        let buffers = MmapRegion::from_file(ram.clone(), RAM_BYTES)?;
        transport.map_mem_region(buffers.as_ptr() as usize, RAM_BYTES, fd, offset)?;
        let queues = rings.into_iter().enumerate().map(|(index, mut requests)| {
            requests.set_used_notif_enabled(false);
            Queue { requests, notifier: transport.get_submission_notifier(index) }
        });
        let queues = queues.collect();
        let ended = Vec::with_capacity(BUFFERS);
        let mut load = Self { queues, _transport: transport, buffers, disk_bytes, ended };
        // Every page is there before anything is measured.
        let all = Job { writes: true, bytes: 128 << 10, depth: 128, queues: 1 };
        load.run(all, Duration::from_millis(20), Waiting::Yielding)?;
        Ok(load)
    }

    pub(super) fn run(&mut self, job: Job, duration: Duration, waiting: Waiting) -> Result<Measured> {
        let mut run = self.begin(job, duration)?;
        while run.goes_on(Instant::now())? {
            if !self.turn(&mut run)? {
                waiting.wait();
            }
        }
        Ok(run.measured())
    }

    /// Runs a job while another disk is used, too; what becomes of that does not count.
    pub(super) fn run_beside(
        &mut self,
        job: Job,
        (neighbour, neighbours_job): (&mut Self, Job),
        duration: Duration,
        waiting: Waiting,
    ) -> Result<Measured> {
        // It begins earlier and ends later.
        let mut theirs = neighbour.begin(neighbours_job, duration + WARM_UP)?;
        let mut run = self.begin(job, duration)?;
        loop {
            let now = Instant::now();
            if !run.goes_on(now)? && !theirs.goes_on(now)? {
                return Ok(run.measured());
            }
            let moved = self.turn(&mut run)?;
            if !neighbour.turn(&mut theirs)? && !moved {
                waiting.wait();
            }
        }
    }

    fn begin(&mut self, job: Job, duration: Duration) -> Result<Run> {
        ensure!(usize::from(job.queues) <= self.queues.len(), "the disk was connected with fewer queues");
        let mut run = Run::new(job, duration)?;
        for buffer in 0..job.depth as usize {
            self.submit(&mut run, buffer, Instant::now())?;
        }
        self.kick(job)?;
        Ok(run)
    }

    /// Takes answers and makes new requests of them. True if there were any.
    fn turn(&mut self, run: &mut Run) -> Result<bool> {
        for queue in &mut self.queues[..run.job.queues.into()] {
            for completion in queue.requests.completions() {
                ensure!(completion.ret == 0, "a request failed: error {}", -completion.ret);
                self.ended.push(completion.context);
            }
        }
        if self.ended.is_empty() {
            return Ok(false);
        }
        let now = Instant::now();
        while let Some(buffer) = self.ended.pop() {
            if run.end(buffer, now) {
                self.submit(run, buffer, now)?;
            }
        }
        self.kick(run.job)?;
        Ok(true)
    }

    fn submit(&mut self, run: &mut Run, buffer: usize, now: Instant) -> Result<()> {
        let bytes = run.job.bytes as usize;
        assert!(buffer < BUFFERS && bytes <= BUFFER_BYTES);
        let offset = run.begin(buffer, now, self.disk_bytes);
        let requests = &mut self.queues[buffer % usize::from(run.job.queues)].requests;
        // SAFETY: the buffer lies inside the mapping, which lives as long as `self`; nobody here looks into it.
        let data = unsafe { self.buffers.as_ptr().add(buffer * BUFFER_BYTES) };
        if run.job.writes {
            // SAFETY: as above.
            unsafe { requests.write_raw(offset, data, bytes, buffer) }?;
        } else {
            // SAFETY: as above.
            unsafe { requests.read_raw(offset, data, bytes, buffer) }?;
        }
        Ok(())
    }

    fn kick(&mut self, job: Job) -> Result<()> {
        for queue in &mut self.queues[..job.queues.into()] {
            if queue.requests.avail_notif_needed() {
                queue.notifier.notify()?;
            }
        }
        Ok(())
    }
}

/// Memory for a guest of a server on this host.
pub(super) fn anonymous_ram() -> Result<FileOffset> {
    let file: File = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?.into();
    file.set_len(RAM_BYTES as u64)?;
    Ok(FileOffset::new(file, 0))
}
