//! The same requests by io_uring on the file itself, without any virtual machine, server or second process.
#![allow(unsafe_code)] // submissions carry raw pointers: the kernel cannot check Rust's lifetimes

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use io_uring::{IoUring, opcode, types};
use vm_memory::MmapRegion;

use super::Job;
use super::cpu::{Threads, is_of_io_uring, threads_of};
use super::load::{BUFFER_BYTES, BUFFERS, Measured, RAM_BYTES, Run};

/// `IORING_ENTER_GETEVENTS`: tell what has ended.
const GET_EVENTS: u32 = 1;

/// A file with a ring on it. Registered file and buffers, one thread, completions taken where it waits: what is quickest. With
/// one request at a time it does not sleep until that is done, but asks again and again.
pub(super) struct Plain {
    ring: IoUring,
    buffers: MmapRegion<()>,
    disk_bytes: u64,
    _file: File,
}

impl Plain {
    pub(super) fn open(path: &Path, disk_bytes: u64) -> Result<Self> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
        let file = file.with_context(|| format!("cannot open {} past the page cache", path.display()))?;
        let buffers = MmapRegion::new(RAM_BYTES)?;
        let mut builder = IoUring::builder();
        builder.setup_single_issuer().setup_defer_taskrun();
        let ring: IoUring = builder.build(u32::try_from(BUFFERS)?).context("cannot make an io_uring")?;
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        let vector = libc::iovec { iov_base: buffers.as_ptr().cast(), iov_len: RAM_BYTES };
        // SAFETY: the mapping lives as long as `self`, and so does the ring.
        unsafe { ring.submitter().register_buffers(&[vector]) }?;
        Ok(Self { ring, buffers, disk_bytes, _file: file })
    }

    pub(super) fn run(&mut self, job: Job, duration: Duration) -> Result<Measured> {
        let mut run = Run::new(job, duration)?;
        for buffer in 0..job.depth as usize {
            self.push(&mut run, job, buffer, Instant::now())?;
        }
        while run.goes_on(Instant::now())? {
            if job.depth > 1 {
                self.ring.submit_and_wait(1)?;
            } else {
                let queued = u32::try_from(self.ring.submission().len())?;
                // SAFETY: no argument goes with it.
                unsafe { self.ring.submitter().enter::<libc::sigset_t>(queued, 0, GET_EVENTS, None) }?;
            }
            let now = Instant::now();
            loop {
                let Some(entry) = self.ring.completion().next() else { break };
                ensure!(
                    u32::try_from(entry.result()) == Ok(job.bytes),
                    "a request ended with {}",
                    entry.result()
                );
                let buffer = usize::try_from(entry.user_data())?;
                if run.end(buffer, now) {
                    self.push(&mut run, job, buffer, now)?;
                }
            }
        }
        Ok(run.measured())
    }

    /// The calling thread, and those of the kernel.
    #[allow(clippy::unused_self, reason = "there is one at a time")]
    pub(super) fn threads(&self) -> Result<Threads> {
        let own = format!("/proc/self/task/{}", rustix::thread::gettid().as_raw_pid());
        let mut threads = threads_of("self", is_of_io_uring)?;
        threads.push(own.into());
        Ok([threads, Vec::new()])
    }

    fn push(&mut self, run: &mut Run, job: Job, buffer: usize, now: Instant) -> Result<()> {
        assert!(buffer < BUFFERS && job.bytes as usize <= BUFFER_BYTES);
        let offset = run.begin(buffer, now, self.disk_bytes);
        let data = self.buffers.as_ptr().wrapping_add(buffer * BUFFER_BYTES);
        let file = types::Fixed(0);
        let entry = if job.writes {
            opcode::WriteFixed::new(file, data, job.bytes, 0).offset(offset).build()
        } else {
            opcode::ReadFixed::new(file, data, job.bytes, 0).offset(offset).build()
        };
        // SAFETY: the data lies inside the mapping, which lives as long as the ring; nobody here looks into it.
        unsafe { self.ring.submission().push(&entry.user_data(buffer as u64)) }
            .context("there is room for all buffers")
    }
}
