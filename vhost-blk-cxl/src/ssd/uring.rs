//! A thin layer over io_uring, the only place of this crate that points the kernel at memory.
#![allow(unsafe_code)] // submissions carry raw pointers: the kernel cannot check Rust's lifetimes

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use cxl_pool::{Area, ByteOffset, LineCount, Pool};
use io_uring::{IoUring, opcode, squeue, types};

/// What a block of zeros is written from.
const ZEROS_BYTES: u32 = 64 << 10;

#[repr(align(4096))]
struct Zeros([u8; ZEROS_BYTES as usize]);

static ZEROS: Zeros = Zeros([0; ZEROS_BYTES as usize]);

/// One step of the kernel on the device's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Fill a part of the pool.
    Read { at: u64, bytes: u32, data: ByteOffset },
    /// Store a part of the pool.
    Write { at: u64, bytes: u32, data: ByteOffset, force_unit_access: bool },
    /// Store zeros: at most [`Engine::ZEROS_MAX`].
    WriteZeros { at: u64, bytes: u32, force_unit_access: bool },
    /// Bring everything to the medium.
    Sync,
    /// `fallocate` with a mode.
    Allocate { at: u64, bytes: u64, mode: i32 },
}

/// An io_uring on one file.
///
/// Dropping it waits for nothing: the kernel holds the file and the pages of the pool until it is done with them, and
/// the mapping of the pool is kept here.
pub(super) struct Engine {
    ring: IoUring,
    file: File,
    pool: Pool,
    queued: bool,
}

impl Engine {
    /// The longest write of zeros.
    pub(super) const ZEROS_MAX: u32 = ZEROS_BYTES;

    /// An engine with room for `depth` steps at a time.
    pub(super) fn new(file: File, pool: Pool, depth: u32) -> io::Result<Self> {
        Ok(Self { ring: IoUring::new(depth)?, file, pool, queued: false })
    }

    /// Queues a step. No more than `depth` of them may be in flight.
    pub(super) fn push(&mut self, id: u32, step: Step) {
        let fd = types::Fd(self.file.as_raw_fd());
        let entry = match step {
            Step::Read { at, bytes, data } => {
                opcode::Read::new(fd, self.pointer(data, bytes), bytes).offset(at).build()
            }
            Step::Write { at, bytes, data, force_unit_access } => {
                opcode::Write::new(fd, self.pointer(data, bytes).cast_const(), bytes)
                    .offset(at)
                    .rw_flags(write_flags(force_unit_access))
                    .build()
            }
            Step::WriteZeros { at, bytes, force_unit_access } => {
                assert!(bytes <= Self::ZEROS_MAX, "zeros are written in pieces");
                opcode::Write::new(fd, ZEROS.0.as_ptr(), bytes)
                    .offset(at)
                    .rw_flags(write_flags(force_unit_access))
                    .build()
            }
            Step::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            Step::Allocate { at, bytes, mode } => {
                opcode::Fallocate::new(fd, bytes).offset(at).mode(mode).build()
            }
        };
        self.push_entry(&entry.user_data(u64::from(id)));
    }

    /// Hands what was queued to the kernel.
    pub(super) fn submit(&mut self) {
        if self.queued {
            // Busy or interrupted: the entries stay queued, and so does our wish to submit them.
            self.queued = self.ring.submit().is_err() || !self.ring.submission().is_empty();
        }
    }

    /// The next step that ended, with its result as system calls return it.
    pub(super) fn completed(&mut self) -> Option<(u32, i32)> {
        let entry = self.ring.completion().next()?;
        // Every entry was queued with a u32.
        #[allow(clippy::cast_possible_truncation)]
        let id = entry.user_data() as u32;
        Some((id, entry.result()))
    }

    /// Whether the kernel has everything that was queued.
    pub(super) fn has_submitted(&self) -> bool {
        !self.queued
    }

    /// Readable when a step has ended.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to `ring` and stays open as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    fn pointer(&self, data: ByteOffset, bytes: u32) -> *mut u8 {
        // The pool checks that the area is inside; buffers begin at a line.
        assert!(data.get().is_multiple_of(cxl_pool::LINE_BYTES as u64), "buffers are whole lines");
        self.pool.pointer(Area::new(data.line(), LineCount::covering(u64::from(bytes))))
    }

    fn push_entry(&mut self, entry: &squeue::Entry) {
        self.queued = true;
        loop {
            // SAFETY: the memory of a read or write is a part of the pool, whose mapping lives as long as `self.pool`,
            // or a static of zeros that is only read; the file lives as long as `self`, and the kernel takes its own
            // references to both when the entry is submitted. What it does to the pool's bytes is a data race only with
            // accesses that go through the pool's volatile interface.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            // The submission queue is full. The kernel takes entries unless it is out of memory for a moment.
            if self.ring.submit().is_err() {
                std::thread::yield_now();
            }
        }
    }
}

fn write_flags(force_unit_access: bool) -> i32 {
    if force_unit_access { libc::RWF_DSYNC } else { 0 }
}
