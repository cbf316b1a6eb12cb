//! Shared lines of a mapped pool, with the cache control that the pool's hardware needs.

use std::arch::asm;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use crate::mapping::Mapping;
use crate::{ByteOffset, LINE_BYTES, LINE_WORDS, LineMark, Memory, pairs, wide};

/// Memory of a pool whose hosts are not coherent: CXL 2.0.
pub type SoftwareMemory = MappedMemory<NonCoherent>;
/// Memory of a pool that the hardware keeps coherent: CXL 3.0 back-invalidate, or one machine.
pub type HardwareMemory = MappedMemory<Coherent>;

/// Memory of a mapped pool. Its two forms are [`SoftwareMemory`] and [`HardwareMemory`].
pub struct MappedMemory<C> {
    // Copied out of the mapping, so that the fast path follows no pointer to it.
    base: NonNull<u8>,
    bytes: u64,
    instructions: Instructions,
    mapping: Arc<Mapping>,
    control: PhantomData<C>,
}

// SAFETY: `base` points into `mapping`, which is Send and Sync and kept alive by it.
unsafe impl<C: Control> Send for MappedMemory<C> {}
// SAFETY: as above.
unsafe impl<C: Control> Sync for MappedMemory<C> {}

impl<C> MappedMemory<C> {
    /// The addresses of the mapping: the first one, and how many.
    pub(crate) fn range(&self) -> (usize, usize) {
        // Mapped, so it fits.
        (self.base.as_ptr() as usize, self.bytes as usize)
    }
}

impl<C> Clone for MappedMemory<C> {
    fn clone(&self) -> Self {
        Self { mapping: Arc::clone(&self.mapping), control: PhantomData, ..*self }
    }
}

/// Marks [`SoftwareMemory`].
pub enum NonCoherent {}
/// Marks [`HardwareMemory`].
pub enum Coherent {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::NonCoherent {}
    impl Sealed for super::Coherent {}
}

/// Which cache control a [`MappedMemory`] uses.
pub trait Control: sealed::Sealed + 'static {
    /// Whether none is needed.
    const COHERENT: bool;
}

impl Control for NonCoherent {
    const COHERENT: bool = false;
}

impl Control for Coherent {
    const COHERENT: bool = true;
}

impl<C: Control> MappedMemory<C> {
    pub(crate) fn new(mapping: Arc<Mapping>) -> Self {
        Self {
            base: mapping.base(),
            bytes: mapping.bytes(),
            instructions: Instructions::detect(),
            mapping,
            control: PhantomData,
        }
    }

    /// A pointer to bytes that lie in the pool.
    #[inline]
    fn pointer(&self, at: ByteOffset, bytes: u64) -> *mut u8 {
        let at = at.get();
        if at > self.bytes || bytes > self.bytes - at {
            outside(at, bytes, self.bytes);
        }
        // SAFETY: just checked; the mapping lives as long as `self`.
        unsafe { self.base.as_ptr().add(at as usize) }
    }

    /// A pointer to whole lines in the pool.
    #[inline]
    fn whole_lines(&self, at: ByteOffset, lines: usize) -> *mut u8 {
        if !at.get().is_multiple_of(LINE_BYTES as u64) {
            misaligned(at.get());
        }
        self.pointer(at, (lines * LINE_BYTES) as u64)
    }

    #[inline]
    fn word(&self, at: ByteOffset) -> &AtomicU64 {
        if !at.get().is_multiple_of(8) {
            misaligned(at.get());
        }
        let pointer = self.pointer(at, 8).cast();
        // SAFETY: inside the mapping, aligned, and valid for as long as `self`.
        unsafe { AtomicU64::from_ptr(pointer) }
    }

    /// A pointer to `N` words of one line, in the pool and aligned to their size.
    #[inline]
    fn words<const N: usize>(&self, at: ByteOffset) -> *mut u8 {
        if !at.get().is_multiple_of(N as u64 * 8) {
            misaligned(at.get());
        }
        self.pointer(at, N as u64 * 8)
    }

    /// Throws the lines out of this host's caches that the bytes touch, also where hosts are coherent.
    #[inline]
    fn throw_out(&self, at: ByteOffset, bytes: u64) {
        if self.instructions.clflushopt {
            self.lines(at, bytes, clflushopt);
        } else {
            self.lines(at, bytes, clflush);
        }
    }

    /// Calls `each` with the address of every line that the bytes touch.
    #[inline]
    fn lines(&self, at: ByteOffset, bytes: u64, each: impl Fn(*mut u8)) {
        if bytes == 0 {
            return;
        }
        let first = at.line().bytes();
        let span = at.get() - first.get() + bytes;
        let pointer = self.pointer(first, span);
        for offset in (0..span as usize).step_by(LINE_BYTES) {
            // SAFETY: `offset` is below `span`, which was checked.
            each(unsafe { pointer.add(offset) });
        }
    }
}

/// What the CPU has for cache control.
#[derive(Clone, Copy)]
#[allow(clippy::struct_excessive_bools, reason = "each is there or not, whatever the others are")]
struct Instructions {
    /// Writes a line back and may keep it. Without it lines are flushed, at the price of fetching them again.
    clwb: bool,
    /// Flushes lines without waiting for one another. Without it CLFLUSH does, one line after the other.
    clflushopt: bool,
    /// Whole lines at a time.
    wide: bool,
    /// Two words at a time, untorn.
    whole_pairs: bool,
}

impl Instructions {
    /// Asks CPUID, since the standard library's feature detection knows neither.
    fn detect() -> Self {
        let has_leaf_7 = core::arch::x86_64::__cpuid(0).eax >= 7;
        let ebx = if has_leaf_7 { core::arch::x86_64::__cpuid_count(7, 0).ebx } else { 0 };
        Self {
            clwb: ebx & (1 << 24) != 0,
            clflushopt: ebx & (1 << 23) != 0,
            wide: wide::is_available(),
            whole_pairs: pairs::are_whole(),
        }
    }
}

#[cold]
#[inline(never)]
fn outside(at: u64, bytes: u64, size_bytes: u64) -> ! {
    panic!(
        "{bytes} bytes at {at:#x} lie outside the pool of {size_bytes} bytes: the caller did not check them"
    );
}

#[cold]
#[inline(never)]
fn misaligned(at: u64) -> ! {
    panic!("a word at {at:#x} is not aligned to 8 bytes");
}

#[inline]
fn clwb(line: *mut u8) {
    // SAFETY: changes no data, and `line` is mapped. Not `nomem`: the compiler must not move stores past it.
    unsafe { asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)) }
}

#[inline]
fn clflushopt(line: *mut u8) {
    // SAFETY: as in `clwb`.
    unsafe { asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags)) }
}

#[inline]
fn clflush(line: *mut u8) {
    // SAFETY: as in `clwb`.
    unsafe { asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags)) }
}

impl<C: Control> MappedMemory<C> {
    /// Copies into the pool, past the cache.
    ///
    /// # Safety
    ///
    /// `from` is valid for so many bytes. It may itself lie in the pool.
    unsafe fn stream_bytes(&self, at: ByteOffset, from: *const u8, bytes: usize) {
        let into = self.pointer(at, bytes as u64);
        // Non-temporal stores write whole lines well and parts of lines badly: those go through the cache.
        let head = at.get().next_multiple_of(LINE_BYTES as u64) - at.get();
        let head = usize::try_from(head).map_or(bytes, |head| head.min(bytes));
        let tail = (bytes - head) % LINE_BYTES;
        let body = bytes - head - tail;
        for (start, part) in [(0, head), (head + body, tail)] {
            // SAFETY: a part of what is valid on both sides.
            unsafe { ptr::copy(from.add(start), into.add(start), part) }
            self.write_back(at.saturating_add(start as u64), part as u64);
        }
        if body > 0 {
            let (into, from) = (into.wrapping_add(head), from.wrapping_add(head));
            // SAFETY: as above; after the head it goes on with a line, and is whole lines long. The CPU was asked.
            unsafe {
                if self.instructions.wide { wide::stream(into, from, body) } else { stream(into, from, body) }
            }
        }
        if C::COHERENT {
            // The caller's store fence is no instruction then, and what went past the cache is in no order by itself.
            // SAFETY: as in `store_fence`.
            unsafe { asm!("sfence", options(nostack, preserves_flags)) }
        }
    }
}

impl<C: Control> Memory for MappedMemory<C> {
    const COHERENT: bool = C::COHERENT;

    fn size_bytes(&self) -> u64 {
        self.bytes
    }

    #[inline]
    fn load(&self, at: ByteOffset) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    #[inline]
    fn store(&self, at: ByteOffset, value: u64) {
        self.word(at).store(value, Ordering::Release);
    }

    #[inline]
    fn load_words<const N: usize>(&self, at: ByteOffset) -> [u64; N] {
        let from = self.words::<N>(at);
        // SAFETY: just checked.
        unsafe { pairs::load(from, self.instructions.whole_pairs) }
    }

    #[inline]
    fn store_words<const N: usize>(&self, at: ByteOffset, words: [u64; N]) {
        let into = self.words::<N>(at);
        // SAFETY: just checked.
        unsafe { pairs::store(into, &words, self.instructions.whole_pairs) }
    }

    #[inline]
    fn store_lines(&self, at: ByteOffset, lines: &[[u64; LINE_WORDS]], mark: &LineMark) {
        let into = self.whole_lines(at, lines.len());
        if self.instructions.wide {
            // SAFETY: just checked, all of it.
            return unsafe { wide::store_lines(into, lines, mark) };
        }
        for (number, line) in lines.iter().enumerate() {
            let marked: [u64; LINE_WORDS] = std::array::from_fn(|word| mark.apply(word, line[word]));
            // SAFETY: one of the lines that were just checked.
            unsafe { pairs::store(into.add(number * LINE_BYTES), &marked, self.instructions.whole_pairs) }
        }
    }

    #[inline]
    fn load_lines(&self, at: ByteOffset, into: &mut [[u64; LINE_WORDS]], mark: &LineMark) -> usize {
        let from = self.whole_lines(at, into.len());
        if self.instructions.wide {
            // SAFETY: just checked, all of it.
            return unsafe { wide::load_lines(from, into, mark) };
        }
        for (number, line) in into.iter_mut().enumerate() {
            // SAFETY: one of the lines that were just checked.
            let words: [u64; LINE_WORDS] =
                unsafe { pairs::load(from.add(number * LINE_BYTES), self.instructions.whole_pairs) };
            if !(0..LINE_WORDS).all(|word| mark.holds(word, words[word])) {
                return number;
            }
            *line = std::array::from_fn(|word| words[word] & !mark.bits[word]);
        }
        into.len()
    }

    #[inline]
    fn read(&self, at: ByteOffset, into: &mut [u8]) {
        let from = self.pointer(at, into.len() as u64);
        // SAFETY: both sides are valid for the length; nobody has a reference into the pool, and `into` is
        // exclusive, so they do not overlap. Another host may write meanwhile: then the bytes are of
        // no use, which the caller finds out from the message protocol, but they are still bytes.
        unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) }
    }

    #[inline]
    fn write(&self, at: ByteOffset, from: &[u8]) {
        let into = self.pointer(at, from.len() as u64);
        // SAFETY: as in `read`.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) }
    }

    #[inline]
    fn zero(&self, at: ByteOffset, bytes: u64) {
        let into = self.pointer(at, bytes);
        // SAFETY: checked to lie in the mapping.
        unsafe { ptr::write_bytes(into, 0, bytes as usize) }
    }

    #[inline]
    fn copy_to<B: BitmapSlice>(&self, at: ByteOffset, into: &VolatileSlice<'_, B>) {
        let from = self.pointer(at, into.len() as u64);
        let guard = into.ptr_guard_mut();
        // SAFETY: the slice vouches for its memory while the guard lives. `copy` and not
        // `copy_nonoverlapping`: guest memory may itself lie in the pool.
        unsafe { ptr::copy(from, guard.as_ptr(), guard.len()) }
        into.bitmap().mark_dirty(0, guard.len());
    }

    #[inline]
    fn copy_from<B: BitmapSlice>(&self, at: ByteOffset, from: &VolatileSlice<'_, B>) {
        let into = self.pointer(at, from.len() as u64);
        let guard = from.ptr_guard();
        // SAFETY: as in `copy_to`.
        unsafe { ptr::copy(guard.as_ptr(), into, guard.len()) }
    }

    fn stream_from<B: BitmapSlice>(&self, at: ByteOffset, from: &VolatileSlice<'_, B>) {
        let guard = from.ptr_guard();
        // SAFETY: the slice vouches for its memory while the guard lives.
        unsafe { self.stream_bytes(at, guard.as_ptr(), guard.len()) }
    }

    fn write_streaming(&self, at: ByteOffset, from: &[u8]) {
        if C::COHERENT {
            // Then lines do not have to leave the cache.
            return self.write(at, from);
        }
        // SAFETY: the slice is valid for its length.
        unsafe { self.stream_bytes(at, from.as_ptr(), from.len()) }
    }

    #[inline]
    fn write_back(&self, at: ByteOffset, bytes: u64) {
        if C::COHERENT {
            return;
        }
        if self.instructions.clwb {
            self.lines(at, bytes, clwb);
        } else {
            self.flush(at, bytes);
        }
    }

    #[inline]
    fn invalidate(&self, at: ByteOffset, bytes: u64) {
        self.flush(at, bytes);
    }

    #[inline]
    fn flush(&self, at: ByteOffset, bytes: u64) {
        if C::COHERENT {
            return;
        }
        self.throw_out(at, bytes);
    }

    fn time_load(&self, at: ByteOffset) -> Option<Duration> {
        let word = self.word(at);
        self.throw_out(at, size_of::<u64>() as u64);
        // SAFETY: as in `full_fence`, which need not wait for lines that were thrown out where hosts are coherent.
        unsafe { asm!("mfence", options(nostack, preserves_flags)) }
        let began = Instant::now();
        std::hint::black_box(word.load(Ordering::Acquire));
        // The clock is read by an instruction that waits for earlier loads.
        Some(began.elapsed())
    }

    #[inline]
    fn prefetch(&self, at: ByteOffset) {
        if !C::COHERENT {
            let pointer = self.pointer(at, 1).cast_const().cast();
            // SAFETY: a hint that reads nothing.
            unsafe { core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(pointer) }
        }
    }

    #[inline]
    fn let_go(&self, at: ByteOffset, bytes: u64) {
        // CLFLUSH would wait for each line.
        if C::COHERENT && self.instructions.clflushopt {
            self.lines(at, bytes, clflushopt);
        }
    }

    #[inline]
    fn pass_on(&self, at: ByteOffset, bytes: u64) {
        if C::COHERENT && self.instructions.clwb {
            self.lines(at, bytes, clwb);
        }
    }

    #[inline]
    fn prefetch_to_write(&self, at: ByteOffset, bytes: u64) {
        // SAFETY: a hint that changes no data; where the CPU does not know it, it does nothing.
        self.lines(at, bytes, |line| unsafe {
            asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags));
        });
    }

    #[inline]
    fn store_fence(&self) {
        if C::COHERENT {
            // x86 keeps stores in order: this stops the compiler only.
            fence(Ordering::Release);
        } else {
            // SAFETY: changes no data. Not `nomem`: the compiler must not move stores past it.
            unsafe { asm!("sfence", options(nostack, preserves_flags)) }
        }
    }

    #[inline]
    fn full_fence(&self) {
        if C::COHERENT {
            fence(Ordering::SeqCst);
        } else {
            // SAFETY: as in `store_fence`. An atomic fence may become a locked instruction, which CLFLUSHOPT
            // is ordered by as well, but only MFENCE is what the architecture manual promises it for.
            unsafe { asm!("mfence", options(nostack, preserves_flags)) }
        }
    }
}

/// Asks for the first lines of a piece of guest memory, which another core has written most likely.
#[inline]
pub fn prefetch_front<B: BitmapSlice>(slice: &VolatileSlice<'_, B>) {
    const FRONT_LINES: usize = 2;
    let guard = slice.ptr_guard();
    for line in 0..FRONT_LINES.min(guard.len().div_ceil(LINE_BYTES)) {
        let pointer = guard.as_ptr().wrapping_add(line * LINE_BYTES).cast();
        // SAFETY: a hint that reads nothing.
        unsafe { core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(pointer) }
    }
}

/// Asks for the first lines of a piece of guest memory that is about to be written.
#[inline]
pub fn prefetch_front_to_write<B: BitmapSlice>(slice: &VolatileSlice<'_, B>) {
    const FRONT_LINES: usize = 2;
    let guard = slice.ptr_guard();
    for line in 0..FRONT_LINES.min(guard.len().div_ceil(LINE_BYTES)) {
        let pointer = guard.as_ptr().wrapping_add(line * LINE_BYTES);
        // SAFETY: a hint that changes no data; where the CPU does not know it, it does nothing.
        unsafe { asm!("prefetchw [{}]", in(reg) pointer, options(nostack, preserves_flags)) }
    }
}

/// Writes whole lines past the cache.
///
/// # Safety
///
/// Both sides are valid for so many bytes, and `into` is aligned to a line.
unsafe fn stream(into: *mut u8, from: *const u8, bytes: usize) {
    use core::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    debug_assert!(into.addr().is_multiple_of(LINE_BYTES) && bytes.is_multiple_of(LINE_BYTES));
    for offset in (0..bytes).step_by(size_of::<__m128i>()) {
        // SAFETY: `offset` is a multiple of 16 below the length, and SSE2 is part of x86-64.
        unsafe {
            let value = _mm_loadu_si128(from.add(offset).cast());
            _mm_stream_si128(into.add(offset).cast(), value);
        }
    }
}

#[cfg(test)]
mod tests;
