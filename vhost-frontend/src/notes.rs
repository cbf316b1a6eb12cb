//! Room behind the records of requests in flight, in which an engine leaves notes for its successor.
//!
//! The VMM keeps the region as long as it was made, and hands it to whoever serves the device next. What makes a region for a VMM makes
//! it longer than the records are; one that is no longer than these, as earlier versions made them, has no room.
//!
//! ```text
//!  byte  0       8       16      24      32
//!        +-------+-------+-------+-------+------
//!        | magic | key   | value | key   | ...    16 notes, those with the key 0 are free
//!        +-------+-------+-------+-------+------
//! ```
//!
//! Whoever dies leaves each note as it was or as it was to be. One thread writes them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_memory::{MmapRegion, VolatileMemory};

const MAGIC: u64 = u64::from_le_bytes(*b"WADINOTE");
const NOTES_MAX: usize = 16;
const WORD: usize = 8;
const NOTE_BYTES: usize = 2 * WORD;

/// How many bytes they take.
pub(crate) const NOTES_BYTES: usize = WORD + NOTES_MAX * NOTE_BYTES;

/// Numbers by key, which outlive us.
#[derive(Debug, Clone)]
pub struct Notes {
    region: Arc<MmapRegion<()>>,
    start: usize,
}

impl Notes {
    /// Those behind `start`, if there is room for them that is nobody else's.
    pub(crate) fn open(region: Arc<MmapRegion<()>>, start: usize) -> Option<Self> {
        if region.size() < start.checked_add(NOTES_BYTES)? || !start.is_multiple_of(WORD) {
            return None;
        }
        let notes = Self { region, start };
        match notes.word(0).load(Ordering::Acquire) {
            0 => notes.word(0).store(MAGIC, Ordering::Release),
            MAGIC => {}
            _ => return None,
        }
        Some(notes)
    }

    /// What was noted last for a key.
    pub fn get(&self, key: u64) -> Option<u64> {
        let place = self.place_of(key)?;
        Some(self.word(place + WORD).load(Ordering::Acquire))
    }

    /// Notes a number for a key, which is not 0. False if there is no room.
    pub fn set(&self, key: u64, value: u64) -> bool {
        debug_assert_ne!(key, 0);
        let Some(place) = self.place_of(key).or_else(|| self.place_of(0)) else { return false };
        self.word(place + WORD).store(value, Ordering::Release);
        // Of a new one the number is there before the key is.
        self.word(place).store(key, Ordering::Release);
        true
    }

    /// Makes room where keys are not wanted any more.
    pub fn retain(&self, wanted: impl Fn(u64) -> bool) {
        for key in places().map(|place| self.word(place)) {
            if !wanted(key.load(Ordering::Acquire)) {
                key.store(0, Ordering::Release);
            }
        }
    }

    fn place_of(&self, key: u64) -> Option<usize> {
        places().find(|&place| self.word(place).load(Ordering::Acquire) == key)
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        self.region
            .get_atomic_ref(self.start + at)
            .expect("open() compared the region's size with the notes'")
    }
}

/// Where each begins.
fn places() -> impl Iterator<Item = usize> {
    (0..NOTES_MAX).map(|note| WORD + note * NOTE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(bytes: usize) -> Arc<MmapRegion<()>> {
        Arc::new(MmapRegion::new(bytes).unwrap())
    }

    #[test]
    fn a_successor_finds_what_was_noted() {
        let region = region(128 + NOTES_BYTES);
        let notes = Notes::open(Arc::clone(&region), 128).unwrap();
        assert_eq!(notes.get(7), None);
        assert!(notes.set(7, 70) && notes.set(8, 0) && notes.set(7, 71));
        drop(notes);
        let notes = Notes::open(region, 128).unwrap();
        assert_eq!((notes.get(7), notes.get(8), notes.get(9)), (Some(71), Some(0), None));
        let all = 1..=NOTES_MAX as u64;
        assert!(all.clone().all(|key| notes.set(key, key)));
        assert!(!notes.set(17, 17) && notes.get(17).is_none(), "there is no room");
        assert!(all.clone().all(|key| notes.get(key) == Some(key)));
        notes.retain(|key| key != 3);
        assert!(notes.set(17, 17) && notes.get(17) == Some(17) && notes.get(3).is_none());
    }

    #[test]
    fn what_is_too_short_or_somebody_elses_is_left_alone() {
        assert!(Notes::open(region(128 + NOTES_BYTES - 1), 128).is_none());
        assert!(Notes::open(region(128), usize::MAX - 7).is_none());
        let other = region(NOTES_BYTES);
        other.get_atomic_ref::<AtomicU64>(0).unwrap().store(1, Ordering::Relaxed);
        assert!(Notes::open(Arc::clone(&other), 0).is_none());
        assert_eq!(other.get_atomic_ref::<AtomicU64>(0).unwrap().load(Ordering::Relaxed), 1);
    }
}
