//! A thin layer over io_uring, the only place of this crate that points the kernel at memory.
#![allow(unsafe_code)] // submissions carry raw pointers: the kernel cannot check Rust's lifetimes

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use cxl_pool::{Area, ByteOffset, CoherenceMode, LineCount, LineOffset, Pool, SoftwareMemory};
use io_uring::{IoUring, opcode, squeue, types};

use super::bounce::Bounce;
use super::discards::{Discards, Way};
use super::fixed_buffers::FixedBuffers;
use super::medium::Direction;
use crate::segments::Segment;

/// What a block of zeros is written from.
const ZEROS_BYTES: u32 = 64 << 10;

/// The longest move that is made by a system call: longer ones would keep the worker from everything else.
const INLINE_BYTES_MAX: u32 = 256 << 10;
/// Bytes moved by system calls before the worker gets to send the answers, so that frontends work on them meanwhile.
const INLINE_BUDGET_BYTES: u32 = 64 << 10;

/// Comes back when the thread of discards has something to tell. Steps have shorter names.
const DISCARDS_TELL: u64 = 1 << 32;

/// How much of a write is asked for while the one before is made. What is longer, the processor brings by itself.
const PREFETCH_BYTES: u32 = 4096;

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
    /// Have a block device forget a range that [forgets](Way::Forgets).
    Discard { at: u64, bytes: u64 },
}

/// A part of a step's data, as the kernel takes it: a `struct iovec`, whose pointer is a number so that it may go to another thread.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Vector {
    base: usize,
    bytes: usize,
}

const _: () = assert!(size_of::<Vector>() == size_of::<libc::iovec>());

/// What is to be done by a system call.
#[derive(Debug, Clone, Copy)]
enum Inline {
    Step(Step),
    /// What is in the step's vector.
    List {
        at: u64,
        bytes: u32,
        direction: Direction,
    },
}

/// An io_uring on one file.
///
/// A file that lies in memory has no device that would work while we do something else, and its file system cannot tell
/// whether a request would have to wait, so io_uring hands every single one to a thread of the kernel. Moving the bytes
/// by a system call costs a fraction of that: [`Engine::completed`] does it, a bounded number at a time.
///
/// Dropping it waits for nothing: the kernel holds the file and the pages of the pool until it is done with them, and
/// the mapping of the pool is kept here.
pub(super) struct Engine {
    ring: IoUring,
    file: File,
    pool: Pool,
    /// For direct I/O only: whatever goes through the page cache is copied anyway.
    fixed: Option<FixedBuffers>,
    queued: bool,
    /// The file lies in memory.
    in_memory: bool,
    /// If it does, and the pool's hosts are not coherent: what is read goes through this.
    bounce: Option<Bounce<SoftwareMemory>>,
    /// To be done by system calls.
    inline: VecDeque<(u32, Inline)>,
    /// By the numbers of steps: where the data of one lies that has it in several places.
    vectors: Vec<Vec<Vector>>,
    inline_left_bytes: u32,
    way: Way,
    /// If it is one that forgets.
    discards: Option<Discards>,
}

impl Engine {
    /// The longest write of zeros.
    pub(super) const ZEROS_MAX: u32 = ZEROS_BYTES;

    /// An engine with room for `depth` steps at a time, on a file that is read and written past the page cache, or not.
    pub(super) fn new(ssd: &str, file: File, direct: bool, pool: Pool, depth: u32) -> io::Result<Self> {
        let in_memory = in_memory(&file);
        let flushes = pool.superblock().mode == CoherenceMode::Software;
        let way = Way::of(&file);
        let discards = match way {
            Way::Forgets { .. } => Some(Discards::begin(&file, depth)?),
            Way::Holes { .. } | Way::Nothing => None,
        };
        Ok(Self {
            way,
            discards,
            bounce: (in_memory && flushes).then(|| Bounce::new(pool.software())),
            ring: make_ring(depth)?,
            file,
            pool,
            fixed: (direct && !in_memory).then(|| FixedBuffers::new(ssd)),
            queued: false,
            in_memory,
            inline: VecDeque::with_capacity(if in_memory { depth as usize } else { 0 }),
            vectors: Vec::new(),
            inline_left_bytes: INLINE_BUDGET_BYTES,
        })
    }

    /// Whether the file lies in memory, so that bytes are moved by system calls.
    pub(super) fn is_in_memory(&self) -> bool {
        self.in_memory
    }

    /// How discards are to be carried out.
    pub(super) fn way_of_discards(&self) -> Way {
        self.way
    }

    /// Whether none of what a read of this length brings is in this host's cache.
    pub(super) fn reads_past_cache(&self, bytes: u64) -> bool {
        self.bounce.is_some() && bytes <= u64::from(INLINE_BYTES_MAX)
    }

    /// Queues a step. No more than `depth` of them may be in flight.
    pub(super) fn push(&mut self, id: u32, step: Step) {
        if self.in_memory && inline_bytes(step).is_some() {
            self.inline.push_back((id, Inline::Step(step)));
            return;
        }
        let fd = types::Fd(self.file.as_raw_fd());
        let entry = match step {
            Step::Read { at, bytes, data } => {
                let into = self.pointer(data, bytes);
                match self.fixed(data, bytes) {
                    Some(number) => opcode::ReadFixed::new(fd, into, bytes, number).offset(at).build(),
                    None => opcode::Read::new(fd, into, bytes).offset(at).build(),
                }
            }
            Step::Write { at, bytes, data, force_unit_access } => {
                let from = self.pointer(data, bytes).cast_const();
                let flags = write_flags(force_unit_access);
                match self.fixed(data, bytes) {
                    Some(number) => {
                        opcode::WriteFixed::new(fd, from, bytes, number).offset(at).rw_flags(flags).build()
                    }
                    None => opcode::Write::new(fd, from, bytes).offset(at).rw_flags(flags).build(),
                }
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
            Step::Discard { at, bytes } => {
                // Of other devices nobody asks for that.
                return self.discards.iter_mut().for_each(|discards| discards.ask(id, at, bytes));
            }
        };
        self.push_entry(&entry.user_data(u64::from(id)));
    }

    /// The same, with data in several places. It may end when a part of it is done.
    pub(super) fn push_list(
        &mut self,
        id: u32,
        at: u64,
        direction: Direction,
        segments: impl Iterator<Item = Segment>,
    ) {
        let index = id as usize;
        if index >= self.vectors.len() {
            self.vectors.resize_with(index + 1, Vec::new);
        }
        let mut vector = std::mem::take(&mut self.vectors[index]);
        vector.clear();
        vector.extend(segments.map(|Segment { start, bytes }| Vector {
            base: self.pointer(start, bytes).expose_provenance(),
            bytes: bytes as usize,
        }));
        let bytes: u64 = vector.iter().map(|part| part.bytes as u64).sum();
        let fd = types::Fd(self.file.as_raw_fd());
        let (parts, count) = parts(&vector);
        self.vectors[index] = vector;
        if self.in_memory && bytes <= u64::from(INLINE_BYTES_MAX) {
            #[expect(clippy::cast_possible_truncation, reason = "just compared")]
            let bytes = bytes as u32;
            self.inline.push_back((id, Inline::List { at, bytes, direction }));
            return;
        }
        // Its vector stays where it is until it has ended.
        let entry = match direction {
            Direction::In => opcode::Readv::new(fd, parts, count).offset(at).build(),
            Direction::Out { force_unit_access } => {
                let flags = write_flags(force_unit_access);
                opcode::Writev::new(fd, parts, count).offset(at).rw_flags(flags).build()
            }
        };
        self.push_entry(&entry.user_data(u64::from(id)));
    }

    /// From now on steps have their data in these areas only.
    pub(super) fn set_areas(&mut self, areas: &[Area]) {
        if let Some(fixed) = &mut self.fixed {
            fixed.set_areas(&self.ring, areas);
        }
    }

    fn fixed(&mut self, data: ByteOffset, bytes: u32) -> Option<u16> {
        self.fixed.as_mut()?.find(&self.ring, &self.pool, data, bytes)
    }

    /// Hands what was queued to the kernel.
    pub(super) fn submit(&mut self) {
        self.inline_left_bytes = INLINE_BUDGET_BYTES;
        self.listen_to_discards();
        if self.queued {
            self.enter();
        }
    }

    /// Has the ring tell when the next discard has ended, which another thread knows.
    fn listen_to_discards(&mut self) {
        if let Some(event) = self.discards.as_mut().and_then(Discards::listen) {
            let entry = opcode::PollAdd::new(types::Fd(event), libc::POLLIN as u32).build();
            self.push_entry(&entry.user_data(DISCARDS_TELL));
        }
    }

    /// Hands over what is queued, and lets the kernel tell what has ended: it waits until we come for that.
    fn enter(&mut self) {
        // Busy or interrupted: the entries stay queued, and so does our wish to submit them.
        self.queued = self.ring.submit().is_err() || !self.ring.submission().is_empty();
    }

    /// The next step that ended, with its result as system calls return it.
    pub(super) fn completed(&mut self) -> Option<(u32, i32)> {
        if let Some(ended) = self.next_entry() {
            return Some(ended);
        }
        if self.ring.submission().taskrun() {
            self.enter();
            if let Some(ended) = self.next_entry() {
                return Some(ended);
            }
        }
        if self.inline_left_bytes == 0 {
            return None;
        }
        let (id, inline) = self.inline.pop_front()?;
        let bytes = match inline {
            Inline::Step(step) => inline_bytes(step).unwrap_or(0),
            Inline::List { bytes, .. } => bytes,
        };
        self.inline_left_bytes = self.inline_left_bytes.saturating_sub(bytes.max(1));
        if let Some(&(_, Inline::Step(Step::Write { bytes, data, .. }))) = self.inline.front() {
            // It is in another host's cache, or in none: it arrives while this step is carried out.
            prefetch(self.pointer(data, bytes), bytes);
        }
        let result = match inline {
            Inline::Step(step) => self.carry_out(step),
            Inline::List { at, direction, .. } => self.carry_out_list(id, at, direction),
        };
        Some((id, result))
    }

    fn next_entry(&mut self) -> Option<(u32, i32)> {
        let mut entry = self.ring.completion().next();
        if let Some(discards) = &mut self.discards {
            if entry.as_ref().is_some_and(|entry| entry.user_data() == DISCARDS_TELL) {
                discards.heard();
                entry = self.ring.completion().next();
            }
            if entry.is_none() {
                return discards.ended();
            }
        }
        let entry = entry?;
        // Every other entry was queued with a u32.
        #[allow(clippy::cast_possible_truncation)]
        let id = entry.user_data() as u32;
        Some((id, entry.result()))
    }

    /// Whether the kernel has everything that was queued.
    pub(super) fn has_submitted(&self) -> bool {
        !self.queued && self.inline.is_empty()
    }

    /// Readable when a step has ended.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to `ring` and stays open as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    /// Takes a step by a system call; the result is as io_uring gives it.
    fn carry_out(&mut self, step: Step) -> i32 {
        if let (Step::Read { at, bytes, data }, Some(bounce)) = (step, &mut self.bounce) {
            let segment = Segment { start: data, bytes };
            let read_at = |into: &mut [u8], at| self.file.read_at(into, at);
            return bounced(bounce.read(at, std::iter::once(segment), read_at));
        }
        let fd = self.file.as_raw_fd();
        let offset = |at: u64| libc::off_t::try_from(at).unwrap_or(libc::off_t::MAX);
        let vector =
            |base: *mut u8, bytes: u32| libc::iovec { iov_base: base.cast(), iov_len: bytes as usize };
        let moved = match step {
            Step::Read { at, bytes, data } => {
                let into = vector(self.pointer(data, bytes), bytes);
                // SAFETY: the bytes are a part of the pool, whose mapping lives as long as `self.pool` and is accessed
                // through the pool's volatile interface only.
                unsafe { libc::preadv2(fd, &raw const into, 1, offset(at), 0) }
            }
            Step::Write { at, bytes, data, force_unit_access } => {
                let from = vector(self.pointer(data, bytes), bytes);
                let flags = write_flags(force_unit_access);
                // SAFETY: as above.
                unsafe { libc::pwritev2(fd, &raw const from, 1, offset(at), flags) }
            }
            Step::WriteZeros { at, bytes, force_unit_access } => {
                assert!(bytes <= Self::ZEROS_MAX, "zeros are written in pieces");
                let from = vector(ZEROS.0.as_ptr().cast_mut(), bytes);
                let flags = write_flags(force_unit_access);
                // SAFETY: a static, which is only read.
                unsafe { libc::pwritev2(fd, &raw const from, 1, offset(at), flags) }
            }
            Step::Sync => {
                let synced = rustix::fs::fdatasync(&self.file);
                return synced.err().map_or(0, |errno| -errno.raw_os_error());
            }
            Step::Allocate { .. } | Step::Discard { .. } => {
                unreachable!("it has no bytes to move, so it is not queued here")
            }
        };
        result(moved)
    }

    /// The same for one that has its data in several places.
    fn carry_out_list(&mut self, id: u32, at: u64, direction: Direction) -> i32 {
        if let (Direction::In, Some(bounce)) = (direction, &mut self.bounce) {
            let pool = self.pool.pointer(Area::new(LineOffset::new(0), LineCount::new(0))).addr();
            let segments = self.vectors[id as usize].iter().map(|part| Segment {
                start: ByteOffset::new((part.base - pool) as u64),
                // It was made of one.
                bytes: u32::try_from(part.bytes).unwrap_or(u32::MAX),
            });
            return bounced(bounce.read(at, segments, |into, at| self.file.read_at(into, at)));
        }
        let fd = self.file.as_raw_fd();
        let at = libc::off_t::try_from(at).unwrap_or(libc::off_t::MAX);
        let (parts, count) = parts(&self.vectors[id as usize]);
        // No more than the longest list.
        let count = libc::c_int::try_from(count).unwrap_or(libc::c_int::MAX);
        let moved = match direction {
            // SAFETY: each part is a part of the pool, whose mapping lives as long as `self.pool` and is accessed through the
            // pool's volatile interface only.
            Direction::In => unsafe { libc::preadv2(fd, parts, count, at, 0) },
            Direction::Out { force_unit_access } => {
                let flags = write_flags(force_unit_access);
                // SAFETY: as above.
                unsafe { libc::pwritev2(fd, parts, count, at, flags) }
            }
        };
        result(moved)
    }

    fn pointer(&self, data: ByteOffset, bytes: u32) -> *mut u8 {
        // The pool checks that the area is inside; buffers begin at a line.
        assert!(data.get().is_multiple_of(cxl_pool::LINE_BYTES as u64), "buffers are whole lines");
        self.pool.pointer(Area::new(data.line(), LineCount::covering(u64::from(bytes))))
    }

    fn push_entry(&mut self, entry: &squeue::Entry) {
        self.queued = true;
        loop {
            // SAFETY: the memory of a read or write is parts of the pool, whose mapping lives as long as `self.pool`,
            // or a static of zeros that is only read; the vector that names them stays in `self.vectors` until it has ended; the file lives as long as `self`, and the kernel takes its own
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

/// What a system call that moves bytes returned, as io_uring gives it.
fn result(moved: isize) -> i32 {
    if moved < 0 {
        return -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    }
    // No more than was asked for, which is far below.
    i32::try_from(moved).unwrap_or(i32::MAX)
}

/// The same for what went through the buffer.
fn bounced(moved: io::Result<usize>) -> i32 {
    match moved {
        Ok(moved) => i32::try_from(moved).unwrap_or(i32::MAX),
        Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
    }
}

/// A vector as the kernel takes it.
fn parts(vector: &[Vector]) -> (*const libc::iovec, u32) {
    // Lists are short.
    (vector.as_ptr().cast(), u32::try_from(vector.len()).unwrap_or(u32::MAX))
}

/// A ring that interrupts nobody: what ended is handled when the thread that submitted it enters the kernel, and a flag tells
/// that it shall. Kernels before 5.19 have no such rings.
fn make_ring(depth: u32) -> io::Result<IoUring> {
    match IoUring::builder().setup_coop_taskrun().setup_taskrun_flag().build(depth) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(depth),
        made => made,
    }
}

/// How many bytes a step moves that may be taken by a system call.
fn inline_bytes(step: Step) -> Option<u32> {
    match step {
        Step::Read { bytes, .. } | Step::Write { bytes, .. } | Step::WriteZeros { bytes, .. } => {
            (bytes <= INLINE_BYTES_MAX).then_some(bytes)
        }
        Step::Sync => Some(0),
        // Giving back gigabytes takes long.
        Step::Allocate { .. } | Step::Discard { .. } => None,
    }
}

/// Asks for what is read soon.
fn prefetch(data: *const u8, bytes: u32) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    for offset in (0..bytes.min(PREFETCH_BYTES) as usize).step_by(cxl_pool::LINE_BYTES) {
        // SAFETY: a hint that reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(data.wrapping_add(offset).cast()) }
    }
}

/// Whether a file's bytes lie in memory and nowhere else, swap space aside.
fn in_memory(file: &File) -> bool {
    const MAGICS: [libc::c_long; 2] = [libc::TMPFS_MAGIC, 0x8584_58f6 /* RAMFS_MAGIC */];
    // The nodes of block devices lie in memory, too.
    file.metadata().is_ok_and(|metadata| metadata.is_file())
        && rustix::fs::fstatfs(file.as_fd()).is_ok_and(|status| MAGICS.contains(&status.f_type))
}

fn write_flags(force_unit_access: bool) -> i32 {
    if force_unit_access { libc::RWF_DSYNC } else { 0 }
}
