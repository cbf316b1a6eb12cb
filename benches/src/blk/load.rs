//! A virtio-blk driver without a VM, which keeps a number of random requests in flight.
#![allow(unsafe_code)] // the driver wants pointers into memory that the device writes meanwhile

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use rustix::fs::MemfdFlags;
use virtio_driver::{QueueNotifier, VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags};
use vm_memory::{FileOffset, MmapRegion};

use super::Job;

/// Three descriptors each for 128 requests, and some to spare.
const QUEUE_SIZE: u16 = 512;
const BUFFER_BYTES: usize = 128 << 10;
const BUFFERS: usize = 128;
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

/// The outcome of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Measured {
    /// All of them, also those that are too early or too late to count for the rate.
    pub(super) requests: u32,
    pub(super) per_second: f64,
    pub(super) p50: Duration,
    pub(super) p99: Duration,
    /// Of the server, by all its threads.
    pub(super) cpu_per_request: Duration,
}

/// A disk with its driver.
pub(super) struct Load {
    queue: VirtioBlkQueue<'static, usize>,
    notifier: Box<dyn QueueNotifier>,
    // After the queue, whose memory it holds.
    _transport: Box<VirtioBlkTransport>,
    buffers: MmapRegion<()>,
    disk_bytes: u64,
    random: u64,
}

impl Load {
    pub(super) fn connect(socket: &Path, disk_bytes: u64) -> Result<Self> {
        let features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
        let shown = socket.to_str().context("a path that is text")?;
        let transport = VhostUser::new(shown, features.bits());
        let mut transport: Box<VirtioBlkTransport> =
            Box::new(transport.with_context(|| format!("cannot connect to {shown}"))?);
        let mut queues = VirtioBlkQueue::setup_queues(transport.as_mut(), 1, QUEUE_SIZE)?;
        let queue = queues.pop().context("one queue")?;
        let bytes = BUFFERS * BUFFER_BYTES;
        let file: File = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC)?.into();
        file.set_len(bytes as u64)?;
        let mapped = file.try_clone()?;
        let buffers = MmapRegion::from_file(FileOffset::new(mapped, 0), bytes)?;
        transport.map_mem_region(
            buffers.as_ptr() as usize,
            bytes,
            std::os::fd::AsRawFd::as_raw_fd(&file),
            0,
        )?;
        let notifier = transport.get_submission_notifier(0);
        let mut load = Self {
            queue,
            notifier,
            _transport: transport,
            buffers,
            disk_bytes,
            random: 0x9e37_79b9_7f4a_7c15,
        };
        load.queue.set_used_notif_enabled(false);
        // Every page is there before anything is measured.
        let all = Job { writes: true, bytes: 128 << 10, depth: 128 };
        load.run(all, Duration::from_millis(20), Waiting::Yielding)?;
        Ok(load)
    }

    pub(super) fn run(&mut self, job: Job, duration: Duration, waiting: Waiting) -> Result<Measured> {
        let mut latencies: Histogram<u64> = Histogram::new_with_bounds(1, 60_000_000_000, 3)?;
        let mut begun_at = [Instant::now(); BUFFERS];
        let began = Instant::now();
        let (counted_from, until) = (began + WARM_UP, began + WARM_UP + duration);
        for (buffer, begun) in begun_at.iter_mut().enumerate().take(job.depth as usize) {
            self.submit(job, buffer)?;
            *begun = began;
        }
        self.kick()?;
        let (mut in_flight, mut counted, mut requests) = (job.depth, 0u32, 0u32);
        let mut ended = Vec::with_capacity(BUFFERS);
        let mut last = began;
        while in_flight > 0 {
            for completion in self.queue.completions() {
                ensure!(completion.ret == 0, "a request failed: error {}", -completion.ret);
                ended.push(completion.context);
            }
            let now = Instant::now();
            if ended.is_empty() {
                if now.duration_since(last) > PATIENCE {
                    bail!("no answer for {PATIENCE:?}, {in_flight} requests in flight");
                }
                match waiting {
                    Waiting::Spinning => std::hint::spin_loop(),
                    Waiting::Yielding => rustix::thread::sched_yield(),
                }
                continue;
            }
            last = now;
            for &buffer in &ended {
                in_flight -= 1;
                requests += 1;
                if now >= counted_from && now < until {
                    counted += 1;
                    latencies.saturating_record(
                        u64::try_from(now.duration_since(begun_at[buffer]).as_nanos()).unwrap_or(u64::MAX),
                    );
                }
                if now < until {
                    self.submit(job, buffer)?;
                    begun_at[buffer] = now;
                    in_flight += 1;
                }
            }
            ended.clear();
            self.kick()?;
        }
        Ok(Measured {
            requests,
            per_second: f64::from(counted) / duration.as_secs_f64(),
            p50: Duration::from_nanos(latencies.value_at_quantile(0.5)),
            p99: Duration::from_nanos(latencies.value_at_quantile(0.99)),
            cpu_per_request: Duration::ZERO,
        })
    }

    fn submit(&mut self, job: Job, buffer: usize) -> Result<()> {
        // xorshift: as random as an access pattern needs to be.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let bytes = job.bytes as usize;
        let offset = self.random % (self.disk_bytes / u64::from(job.bytes)) * u64::from(job.bytes);
        assert!(buffer < BUFFERS && bytes <= BUFFER_BYTES);
        // SAFETY: the buffer lies inside the mapping, which lives as long as `self`; nobody here looks into it.
        let data = unsafe { self.buffers.as_ptr().add(buffer * BUFFER_BYTES) };
        if job.writes {
            // SAFETY: as above.
            unsafe { self.queue.write_raw(offset, data, bytes, buffer) }?;
        } else {
            // SAFETY: as above.
            unsafe { self.queue.read_raw(offset, data, bytes, buffer) }?;
        }
        Ok(())
    }

    fn kick(&mut self) -> Result<()> {
        if self.queue.avail_notif_needed() {
            self.notifier.notify()?;
        }
        Ok(())
    }
}

/// Makes a file whose every page is there.
pub(super) fn fill(path: &Path, bytes: u64) -> Result<()> {
    let mut file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    let piece = vec![0x5a; 1 << 20];
    for _ in 0..bytes >> 20 {
        file.write_all(&piece).context("cannot fill the disk: is /dev/shm full?")?;
    }
    Ok(())
}

/// What threads, named by their directories in /proc, have run so far.
pub(super) fn cpu_time(threads: &[PathBuf]) -> Result<Duration> {
    let mut sum = Duration::ZERO;
    for thread in threads {
        // One that ended meanwhile counts for nothing.
        let Ok(text) = fs::read_to_string(thread.join("schedstat")) else { continue };
        let ran_ns = text.split_whitespace().next().context("schedstat says nothing")?;
        sum += Duration::from_nanos(ran_ns.parse()?);
    }
    Ok(sum)
}

/// The directories in /proc of a process's threads.
pub(super) fn threads_of(process: &str) -> Result<Vec<PathBuf>> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).context("the process ended")?;
    tasks.map(|task| Ok(task?.path())).collect()
}
