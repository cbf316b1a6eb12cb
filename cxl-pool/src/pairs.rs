//! Words of one line in an order that the other side may rely on, two at a time where the CPU never tears those.
//!
//! The architecture promises that eight bytes are never torn, and sixteen by MOVDQA on a CPU that has AVX (Intel SDM vol. 3,
//! "Guaranteed Atomic Operations"; AMD APM vol. 2, "Access Atomicity"). Every CPU with CXL has it. On another one, as in a virtual
//! machine of a plain model, each word is loaded and stored by itself: the halves of a pair could become visible in any order.

use std::arch::asm;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::LINE_BYTES;

/// Whether pairs are never torn on this CPU.
pub(crate) fn are_whole() -> bool {
    std::arch::is_x86_feature_detected!("avx")
}

/// Loads words, the last one first; in pairs if `whole`.
///
/// # Safety
///
/// `from` is aligned to the size of the words and valid for reading them.
#[inline]
pub(crate) unsafe fn load<const N: usize>(from: *const u8, whole: bool) -> [u64; N] {
    const { assert!(N.is_power_of_two() && N >= 2 && N * 8 <= LINE_BYTES, "whole pairs of words of one line") };
    let mut words = [0; N];
    if !whole {
        for (number, word) in words.iter_mut().enumerate().rev() {
            // SAFETY: one of the words that the caller vouches for. Nothing is stored through it.
            *word = unsafe { AtomicU64::from_ptr(from.add(number * 8).cast_mut().cast()) }
                .load(Ordering::Acquire);
        }
        return words;
    }
    for (pair, values) in words.as_chunks_mut::<2>().0.iter_mut().enumerate().rev() {
        *values = load_pair(from.wrapping_add(pair * 16));
    }
    words
}

/// Stores words, the first one first; in pairs if `whole`.
///
/// # Safety
///
/// `into` is aligned to the size of the words and valid for writing them.
#[inline]
pub(crate) unsafe fn store<const N: usize>(into: *mut u8, words: &[u64; N], whole: bool) {
    const { assert!(N.is_power_of_two() && N >= 2 && N * 8 <= LINE_BYTES, "whole pairs of words of one line") };
    if !whole {
        for (number, word) in words.iter().enumerate() {
            // SAFETY: one of the words that the caller vouches for.
            unsafe { AtomicU64::from_ptr(into.add(number * 8).cast()) }.store(*word, Ordering::Release);
        }
        return;
    }
    for (pair, values) in words.as_chunks::<2>().0.iter().enumerate() {
        store_pair(into.wrapping_add(pair * 16), *values);
    }
}

/// Loads two words at a multiple of 16.
///
/// Not an intrinsic: the compiler would take that for a plain load, which it may move.
#[inline]
fn load_pair(from: *const u8) -> [u64; 2] {
    let pair: core::arch::x86_64::__m128i;
    // SAFETY: the pointer of `load`. Not `nomem` nor `pure`: loads stay in order.
    unsafe { asm!("movdqa {}, [{}]", out(xmm_reg) pair, in(reg) from, options(nostack, preserves_flags)) }
    // SAFETY: both are 16 bytes of which any value is valid.
    unsafe { core::mem::transmute(pair) }
}

/// Stores two words at a multiple of 16; see `load_pair`.
#[inline]
fn store_pair(into: *mut u8, words: [u64; 2]) {
    // SAFETY: as in `load_pair`.
    let pair: core::arch::x86_64::__m128i = unsafe { core::mem::transmute(words) };
    // SAFETY: the pointer of `store`.
    unsafe { asm!("movdqa [{}], {}", in(reg) into, in(xmm_reg) pair, options(nostack, preserves_flags)) }
}
