//! Whole lines at a time, with AVX-512.
//!
//! The architecture promises only that the eight bytes of a word are never torn (Intel SDM vol. 3, "Guaranteed Atomic
//! Operations"; AMD APM vol. 2, "Access Atomicity"): what one instruction stores or loads of a line may become visible in any
//! order. But stores of different instructions become visible in their order, and loads are made in theirs (SDM, "Memory
//! Ordering"; APM, "Multiprocessor Memory Access Ordering"). So a line is stored twice, first with the opposite of the mark:
//! who sees any word of the second store sees all of the first one, which differs in nothing else. And it is loaded twice:
//! once for the words with marks, and once they are found to be new, for the others. The second store and load meet the
//! line in the first-level cache.

use std::arch::asm;
use std::arch::x86_64::{
    __m512i, _mm512_and_si512, _mm512_andnot_si512, _mm512_loadu_si512, _mm512_mask_blend_epi64,
    _mm512_mask_cmpeq_epi64_mask, _mm512_or_si512, _mm512_setzero_si512, _mm512_storeu_si512,
    _mm512_stream_si512, _mm512_test_epi64_mask, _mm512_xor_si512,
};

use crate::{LINE_BYTES, LINE_WORDS, LineMark};

/// Whether this CPU, and the kernel, know how to do it.
pub(crate) fn is_available() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
}

/// Stores lines; see [`Memory::store_lines`](crate::Memory::store_lines).
///
/// # Safety
///
/// [`is_available`], and `into` is aligned to a line and valid for writing so many.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn store_lines(into: *mut u8, lines: &[[u64; LINE_WORDS]], mark: &LineMark) {
    // SAFETY: reads an array of 64 bytes.
    let bits = unsafe { _mm512_loadu_si512(mark.bits.as_ptr().cast()) };
    let new = if mark.set { bits } else { _mm512_setzero_si512() };
    for (number, line) in lines.iter().enumerate() {
        // SAFETY: reads an array of 64 bytes.
        let words = unsafe { _mm512_loadu_si512(line.as_ptr().cast()) };
        let marked = _mm512_or_si512(_mm512_andnot_si512(bits, words), new);
        let unmarked = _mm512_xor_si512(marked, bits);
        // SAFETY: one of the lines that the caller vouches for. Not intrinsics: the compiler would merge or move those.
        unsafe {
            let into = into.add(number * LINE_BYTES);
            asm!("vmovdqa64 [{}], {}", in(reg) into, in(zmm_reg) unmarked, options(nostack, preserves_flags));
            asm!("vmovdqa64 [{}], {}", in(reg) into, in(zmm_reg) marked, options(nostack, preserves_flags));
        }
    }
}

/// Loads lines; see [`Memory::load_lines`](crate::Memory::load_lines).
///
/// # Safety
///
/// [`is_available`], and `from` is aligned to a line and valid for reading so many.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn load_lines(from: *const u8, into: &mut [[u64; LINE_WORDS]], mark: &LineMark) -> usize {
    // SAFETY: reads an array of 64 bytes.
    let bits = unsafe { _mm512_loadu_si512(mark.bits.as_ptr().cast()) };
    let zero = _mm512_setzero_si512();
    let new = if mark.set { bits } else { zero };
    let marked = _mm512_test_epi64_mask(bits, bits);
    for (number, line) in into.iter_mut().enumerate() {
        // SAFETY: one of the lines that the caller vouches for.
        let first = unsafe { load(from.add(number * LINE_BYTES)) };
        let are_new = _mm512_mask_cmpeq_epi64_mask(marked, _mm512_and_si512(first, bits), new);
        if are_new & _mm512_test_epi64_mask(first, first) != marked {
            return number;
        }
        // SAFETY: as above.
        let second = unsafe { load(from.add(number * LINE_BYTES)) };
        // What was found to be new counts: by now it may have been emptied.
        let words = _mm512_mask_blend_epi64(marked, second, first);
        // SAFETY: writes an array of 64 bytes.
        unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), _mm512_andnot_si512(bits, words)) }
    }
    into.len()
}

/// Writes whole lines past the cache.
///
/// # Safety
///
/// [`is_available`], both sides are valid for so many bytes, and `into` is aligned to a line.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn stream(into: *mut u8, from: *const u8, bytes: usize) {
    debug_assert!(into.addr().is_multiple_of(LINE_BYTES) && bytes.is_multiple_of(LINE_BYTES));
    for offset in (0..bytes).step_by(LINE_BYTES) {
        // SAFETY: `offset` is a multiple of a line below the length.
        unsafe {
            let line = _mm512_loadu_si512(from.add(offset).cast());
            _mm512_stream_si512(into.add(offset).cast(), line);
        }
    }
}

/// Loads a line, in the order of the program.
///
/// # Safety
///
/// As for [`load_lines`].
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn load(from: *const u8) -> __m512i {
    let words;
    // SAFETY: the caller's. Neither `nomem` nor `pure`: loads stay in order.
    unsafe { asm!("vmovdqa64 {}, [{}]", out(zmm_reg) words, in(reg) from, options(nostack, preserves_flags)) }
    words
}
