//! The four rings that an AF_XDP socket shares with the kernel.
#![allow(unsafe_code, reason = "memory shared with the kernel")]

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// A mapped ring of `T`, a power of two long. One side produces, the other consumes.
pub(super) struct Ring<T> {
    base: NonNull<u8>,
    bytes: usize,
    offsets: libc::xdp_ring_offset,
    mask: u32,
    /// Our own index: what we have produced or consumed so far.
    own: u32,
    /// The other side's index as last seen.
    other: u32,
    entry: PhantomData<T>,
}

// SAFETY: the mapping belongs to this value alone in this process; the kernel's side is synchronised by the indices.
unsafe impl<T: Send> Send for Ring<T> {}

impl<T: Copy> Ring<T> {
    /// Sets the size of one of the socket's rings.
    pub(super) fn set_entries(socket: &OwnedFd, option: libc::c_int, entries: u32) -> io::Result<()> {
        assert!(entries.is_power_of_two());
        let bytes = libc::socklen_t::try_from(size_of::<u32>()).expect("four");
        // SAFETY: the kernel reads a u32 that lives until the call returns.
        let result = unsafe {
            libc::setsockopt(socket.as_raw_fd(), libc::SOL_XDP, option, (&raw const entries).cast(), bytes)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Maps a ring whose size was set.
    pub(super) fn map(
        socket: &OwnedFd,
        page_offset: libc::off_t,
        offsets: libc::xdp_ring_offset,
        entries: u32,
    ) -> io::Result<Self> {
        let entries_bytes = entries as usize * size_of::<T>();
        let bytes = usize::try_from(offsets.desc).map_err(io::Error::other)? + entries_bytes;
        // SAFETY: a fresh mapping, which overlaps nothing of ours.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                socket.as_raw_fd(),
                page_offset,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at zero"))?;
        Ok(Self { base, bytes, offsets, mask: entries - 1, own: 0, other: 0, entry: PhantomData })
    }

    fn word(&self, offset: u64) -> &AtomicU32 {
        let offset = usize::try_from(offset).expect("within the mapping");
        // SAFETY: the kernel told that an aligned u32 lies at this offset of the mapping; it is only accessed
        // atomically by both sides, and lives as long as `self`.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    fn slot(&self, index: u32) -> NonNull<T> {
        let first = usize::try_from(self.offsets.desc).expect("within the mapping");
        // SAFETY: the masked index is below the number of entries that were mapped.
        unsafe { self.base.add(first).cast::<T>().add((index & self.mask) as usize) }
    }

    /// As a producer: how many entries can be put now.
    pub(super) fn room(&mut self) -> u32 {
        let room = self.mask + 1 - self.own.wrapping_sub(self.other);
        if room > 0 {
            return room;
        }
        self.other = self.word(self.offsets.consumer).load(Ordering::Acquire);
        self.mask + 1 - self.own.wrapping_sub(self.other)
    }

    /// As a producer: puts an entry; there must be room.
    pub(super) fn put(&mut self, entry: T) {
        debug_assert!(self.own.wrapping_sub(self.other) <= self.mask);
        // SAFETY: the consumer has not been told of this slot, so only we access it.
        unsafe { self.slot(self.own).write(entry) };
        self.own = self.own.wrapping_add(1);
    }

    /// As a producer: tells the kernel of what was put.
    pub(super) fn publish(&self) {
        self.word(self.offsets.producer).store(self.own, Ordering::Release);
    }

    /// As a producer: how many entries the kernel has been told of and has not taken yet.
    pub(super) fn outstanding(&mut self) -> u32 {
        self.other = self.word(self.offsets.consumer).load(Ordering::Acquire);
        self.word(self.offsets.producer).load(Ordering::Relaxed).wrapping_sub(self.other)
    }

    /// As a consumer: takes the next entry.
    pub(super) fn take(&mut self) -> Option<T> {
        if self.own == self.other {
            self.other = self.word(self.offsets.producer).load(Ordering::Acquire);
            if self.own == self.other {
                return None;
            }
        }
        // SAFETY: the producer has published this slot and does not touch it before we give it back.
        let entry = unsafe { self.slot(self.own).read() };
        self.own = self.own.wrapping_add(1);
        Some(entry)
    }

    /// As a consumer: gives the taken slots back.
    pub(super) fn give_back(&self) {
        self.word(self.offsets.consumer).store(self.own, Ordering::Release);
    }

    /// Whether the kernel wants a system call to go on.
    pub(super) fn needs_wakeup(&self) -> bool {
        self.word(self.offsets.flags).load(Ordering::Acquire) & libc::XDP_RING_NEED_WAKEUP != 0
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length; nothing refers to it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
