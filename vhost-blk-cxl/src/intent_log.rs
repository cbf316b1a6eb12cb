//! The write-intent log of a mirrored volume: where its replicas may differ after whoever wrote to them is gone.
//!
//! Each replica's SSD has one for the volume, of 4 KiB. A frontend marks the part of the volume that it is about to write
//! there, on all replicas that count, and writes when the mark is on the medium. Much later, when the part was flushed
//! everywhere and nobody wrote to it for a while, the mark is taken away. So what the replicas that it *covers* may hold
//! differently lies in what is marked, in the log of each replica in sync.
//!
//! ```text
//! byte  0       8          12        16       20       24                   40        48              56      64
//!       | magic | checksum | version | sector | volume | covered, 4 numbers | version | volume's size | zeros | bitmap ...
//!                            of log                      of replicas          of content    bytes
//! ```
//!
//! A write of 4 KiB may be torn, so each of the eight sectors stands for itself, with a checksum (CRC-32) of what follows that
//! and its share of the bitmap. Marks that a write adds are relied on after it has ended only, and marks that it takes away
//! are not needed: a log whose sectors come from two writes is as good as either.
//!
//! Each sector names the volume. Where a slot has become another volume's, a write of the one that had it before may arrive late:
//! a log any part of which names another volume is none, and so is one of another version. Version 1 named no volume.

use pod_protocol::ids::VolumeId;

/// Its length in bytes.
pub const LENGTH: usize = 4096;
/// The same, as a part of a device.
pub const BYTES: u64 = LENGTH as u64;
/// Replicas that it may cover.
pub const COVERED_MAX: usize = 4;

const SECTOR_BYTES: usize = 512;
const SECTORS: usize = LENGTH / SECTOR_BYTES;
const HEADER_BYTES: usize = 64;
const WORDS_PER_SECTOR: usize = (SECTOR_BYTES - HEADER_BYTES) / 8;
const WORDS: usize = SECTORS * WORDS_PER_SECTOR;
const UNITS_MAX: u64 = WORDS as u64 * 64;
const UNIT_BYTES_MIN: u64 = 256 << 10;
const MAGIC: &[u8; 8] = b"WADIWILG";
const FORMAT: u32 = 2;
/// In place of a replica's number.
const NOBODY: u32 = u32::MAX;

/// A set of parts of a volume: one bit for each unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Units(Box<[u64; WORDS]>);

impl Units {
    /// None.
    pub fn none() -> Self {
        Self(Box::new([0; WORDS]))
    }

    /// Whether it is in the set.
    pub fn contains(&self, unit: u64) -> bool {
        self.0.get(word(unit)).is_some_and(|word| word & bit(unit) != 0)
    }

    /// Puts it into the set.
    pub fn insert(&mut self, unit: u64) {
        if let Some(word) = self.0.get_mut(word(unit)) {
            *word |= bit(unit);
        }
    }

    /// Takes it out of the set.
    pub fn remove(&mut self, unit: u64) {
        if let Some(word) = self.0.get_mut(word(unit)) {
            *word &= !bit(unit);
        }
    }

    /// Takes everything out.
    pub fn clear(&mut self) {
        self.0.fill(0);
    }

    /// Takes what is in another set out of this one.
    pub fn subtract(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0.iter()).for_each(|(word, other)| *word &= !other);
    }

    /// Becomes a copy of what is in both others.
    pub fn set_to_common(&mut self, one: &Self, other: &Self) {
        let both = one.0.iter().zip(other.0.iter());
        self.0.iter_mut().zip(both).for_each(|(word, (one, other))| *word = one & other);
    }

    /// Becomes a copy of another one.
    pub fn copy_from(&mut self, other: &Self) {
        self.0.copy_from_slice(other.0.as_slice());
    }

    /// Those in the set, in order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        (0_u64..).zip(self.0.iter()).flat_map(|(index, &word)| {
            let mut rest = word;
            std::iter::from_fn(move || {
                let next = (rest != 0).then(|| index * 64 + u64::from(rest.trailing_zeros()))?;
                rest &= rest - 1;
                Some(next)
            })
        })
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }
}

fn word(unit: u64) -> usize {
    usize::try_from(unit / 64).unwrap_or(usize::MAX)
}

fn bit(unit: u64) -> u64 {
    1 << (unit % 64)
}

/// What a log says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IntentLog {
    volume: VolumeId,
    size_bytes: u64,
    unit_bytes: u64,
    /// The numbers of the replicas for which it holds.
    pub covered: Vec<u32>,
    /// Where they may differ.
    pub marked: Units,
}

impl IntentLog {
    /// Of a volume of this size of which nothing is known: all of it is marked.
    pub fn of_unknown(volume: VolumeId, size_bytes: u64, covered: Vec<u32>) -> Self {
        let unit_bytes = unit_bytes(size_bytes);
        let mut marked = Units::none();
        (0..size_bytes.div_ceil(unit_bytes)).for_each(|unit| marked.insert(unit));
        Self { volume, size_bytes, unit_bytes, covered, marked }
    }

    /// The size of the volume.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// How much of the volume one bit stands for: 256 KiB, or more where the log would not hold all of them.
    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// The units that a range touches.
    pub fn units(&self, offset_bytes: u64, length_bytes: u64) -> std::ops::Range<u64> {
        let end = offset_bytes.saturating_add(length_bytes);
        offset_bytes / self.unit_bytes..end.div_ceil(self.unit_bytes)
    }

    /// The volume became larger: what is new is marked. True if units are not what they were.
    pub fn grow(&mut self, size_bytes: u64) -> bool {
        if size_bytes <= self.size_bytes {
            return false;
        }
        let before = std::mem::replace(self, Self::of_unknown(self.volume, size_bytes, self.covered.clone()));
        // The last unit may have been shorter.
        let known = before.size_bytes / self.unit_bytes;
        (0..known).for_each(|unit| self.marked.remove(unit));
        for unit in before.marked.iter() {
            // The one that was last may have reached beyond the volume.
            let bytes = before.unit_bytes.min(before.size_bytes - unit * before.unit_bytes);
            let range = self.units(unit * before.unit_bytes, bytes);
            range.for_each(|unit| self.marked.insert(unit));
        }
        self.unit_bytes != before.unit_bytes
    }

    /// As it lies on the SSD, as content number `version`.
    pub fn encode(&self, version: u64) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        let words = self.marked.0.chunks_exact(WORDS_PER_SECTOR);
        for ((number, sector), words) in (0_u32..).zip(bytes.chunks_exact_mut(SECTOR_BYTES)).zip(words) {
            sector[..8].copy_from_slice(MAGIC);
            sector[12..16].copy_from_slice(&FORMAT.to_le_bytes());
            sector[16..20].copy_from_slice(&number.to_le_bytes());
            sector[20..24].copy_from_slice(&self.volume.get().to_le_bytes());
            for index in 0..COVERED_MAX {
                let replica = self.covered.get(index).copied().unwrap_or(NOBODY);
                sector[24 + index * 4..][..4].copy_from_slice(&replica.to_le_bytes());
            }
            sector[40..48].copy_from_slice(&version.to_le_bytes());
            sector[48..56].copy_from_slice(&self.size_bytes.to_le_bytes());
            for (place, word) in sector[HEADER_BYTES..].chunks_exact_mut(8).zip(words) {
                place.copy_from_slice(&word.to_le_bytes());
            }
            let checksum = crc32fast::hash(&sector[12..]);
            sector[8..12].copy_from_slice(&checksum.to_le_bytes());
        }
        bytes
    }

    /// Reads the log of a volume, and the highest version that a part of it has. None if it is none, none that is whole or makes
    /// sense, or another volume's.
    pub fn decode(bytes: &[u8; LENGTH], volume: VolumeId) -> Option<(Self, u64)> {
        let mut found: Option<Self> = None;
        let mut version = 0;
        for (number, sector) in bytes.chunks_exact(SECTOR_BYTES).enumerate() {
            let narrow = |at: usize| word_at::<4>(sector, at).map(u32::from_le_bytes);
            let wide = |at: usize| word_at::<8>(sector, at).map(u64::from_le_bytes);
            let is_whole = sector.starts_with(MAGIC)
                && narrow(8)? == crc32fast::hash(&sector[12..])
                && narrow(12)? == FORMAT
                && narrow(16)? as usize == number
                && narrow(20)? == volume.get();
            if !is_whole {
                return None;
            }
            version = version.max(wide(40)?);
            let size_bytes = wide(48)?;
            let covered = (0..COVERED_MAX).filter_map(|index| narrow(24 + index * 4));
            let covered: Vec<u32> = covered.filter(|&replica| replica != NOBODY).collect();
            let log = found.get_or_insert_with(|| Self {
                volume,
                size_bytes,
                unit_bytes: unit_bytes(size_bytes),
                covered: covered.clone(),
                marked: Units::none(),
            });
            if log.size_bytes != size_bytes {
                return None;
            }
            log.covered.retain(|replica| covered.contains(replica));
            let words = &mut log.marked.0[number * WORDS_PER_SECTOR..][..WORDS_PER_SECTOR];
            for (index, word) in words.iter_mut().enumerate() {
                *word = wide(HEADER_BYTES + index * 8)?;
            }
        }
        // What lies outside is nothing that anybody marked.
        let log = found.filter(|log| {
            let units = log.size_bytes.div_ceil(log.unit_bytes);
            log.marked.iter().all(|unit| unit < units)
        })?;
        Some((log, version))
    }
}

fn word_at<const N: usize>(sector: &[u8], at: usize) -> Option<[u8; N]> {
    sector.get(at..at + N)?.try_into().ok()
}

fn unit_bytes(size_bytes: u64) -> u64 {
    let mut unit = UNIT_BYTES_MIN;
    while size_bytes.div_ceil(unit) > UNITS_MAX {
        unit *= 2;
    }
    unit
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const VOLUME: VolumeId = VolumeId::new(5);

    fn a_log(size_bytes: u64, marks: &[u64]) -> IntentLog {
        a_log_of(VOLUME, size_bytes, marks)
    }

    fn a_log_of(volume: VolumeId, size_bytes: u64, marks: &[u64]) -> IntentLog {
        let mut log = IntentLog::of_unknown(volume, size_bytes, vec![0, 3]);
        let units = log.units(0, size_bytes).end;
        log.marked.clear();
        for mark in marks {
            log.marked.insert(mark % units);
        }
        log
    }

    #[test]
    fn a_bit_stands_for_more_where_there_would_be_too_many() {
        assert_eq!(unit_bytes(1), 256 << 10);
        assert_eq!(unit_bytes(7 << 30), 256 << 10);
        assert_eq!(unit_bytes((7 << 30) + 1), 512 << 10);
        let unit = unit_bytes(1 << 60);
        assert!((1_u64 << 60).div_ceil(unit) <= UNITS_MAX && unit.is_power_of_two(), "{unit}");
        assert_eq!(IntentLog::decode(&[0; LENGTH], VOLUME), None);
    }

    #[test]
    fn a_log_that_marks_what_is_not_there_is_none() {
        let mut log = a_log(1 << 30, &[]);
        log.marked.insert((1 << 30) / (256 << 10));
        assert_eq!(IntentLog::decode(&log.encode(1), VOLUME), None);
    }

    #[test]
    fn a_log_of_another_format_is_none() {
        let mut bytes = a_log(1 << 30, &[1]).encode(1);
        for sector in bytes.chunks_exact_mut(SECTOR_BYTES) {
            sector[12..16].copy_from_slice(&1_u32.to_le_bytes());
            let checksum = crc32fast::hash(&sector[12..]);
            sector[8..12].copy_from_slice(&checksum.to_le_bytes());
        }
        assert_eq!(IntentLog::decode(&bytes, VOLUME), None);
    }

    proptest! {
        /// A write of a volume that had the slot before arrives late, as a whole or in parts.
        #[test]
        fn a_log_that_another_volume_wrote_into_is_none(marks: Vec<u64>, arrived in 1_u8..) {
            let mut bytes = a_log(1 << 30, &marks).encode(7);
            let late = a_log_of(VolumeId::new(6), 1 << 30, &[]).encode(9);
            for sector in (0..SECTORS).filter(|sector| arrived & 1 << sector != 0) {
                let range = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
                bytes[range.clone()].copy_from_slice(&late[range]);
            }
            prop_assert_eq!(IntentLog::decode(&bytes, VOLUME), None);
            prop_assert_eq!(IntentLog::decode(&bytes, VolumeId::new(6)).is_some(), arrived == u8::MAX);
        }

        #[test]
        fn what_was_written_is_read(size in 1_u64..1 << 44, marks: Vec<u64>, version: u64) {
            let log = a_log(size, &marks);
            let bytes = log.encode(version);
            prop_assert_eq!(IntentLog::decode(&bytes, VOLUME), Some((log, version)));
        }

        /// A changed bit is noticed, wherever it is.
        #[test]
        fn what_is_damaged_is_not_believed(marks: Vec<u64>, at in 0..LENGTH, bit in 0_u8..8) {
            let mut bytes = a_log(1 << 40, &marks).encode(1);
            bytes[at] ^= 1 << bit;
            // Of the bytes that nobody looks at the checksum is.
            prop_assert_eq!(IntentLog::decode(&bytes, VOLUME), None);
        }

        /// Whatever part of a write arrives: what was marked before it and after it, is.
        #[test]
        fn a_torn_write_loses_no_mark(
            old in prop::collection::vec(0_u64..UNITS_MAX, 0..200), new in prop::collection::vec(0_u64..UNITS_MAX, 0..200),
            arrived: u8,
        ) {
            let size = UNITS_MAX * UNIT_BYTES_MIN;
            let (old, mut new) = (a_log(size, &old), a_log(size, &new));
            new.covered = vec![0, 3, 7];
            let (before, after) = (old.encode(4), new.encode(5));
            let mut torn = before;
            for sector in (0..SECTORS).filter(|sector| arrived & 1 << sector != 0) {
                let range = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
                torn[range.clone()].copy_from_slice(&after[range]);
            }
            let (found, version) = IntentLog::decode(&torn, VOLUME).unwrap();
            let both = |unit: &u64| old.marked.contains(*unit) && new.marked.contains(*unit);
            let either = |unit: &u64| old.marked.contains(*unit) || new.marked.contains(*unit);
            prop_assert!((0..UNITS_MAX).filter(both).all(|unit| found.marked.contains(unit)));
            prop_assert!(found.marked.iter().all(|unit| either(&unit)));
            prop_assert_eq!(version, if arrived == 0 { 4 } else { 5 });
            prop_assert_eq!(&found.covered, if arrived == u8::MAX { &new.covered } else { &old.covered });
        }

        #[test]
        fn what_a_volume_grows_by_is_marked_and_the_rest_stays(
            size in 1_u64..1 << 35, more in 0_u64..1 << 36, marks in prop::collection::vec(any::<u64>(), 0..20),
        ) {
            let before = a_log(size, &marks);
            let mut log = before.clone();
            let rescaled = log.grow(size + more);
            prop_assert_eq!(rescaled, log.unit_bytes() != before.unit_bytes());
            let unit = log.unit_bytes();
            let expected: BTreeSet<u64> = (0..(size + more).div_ceil(unit))
                .filter(|&it| {
                    let old = before.units(it * unit, unit);
                    more > 0 && (it + 1) * unit > size || old.into_iter().any(|old| before.marked.contains(old))
                })
                .collect();
            prop_assert_eq!(log.marked.iter().collect::<BTreeSet<u64>>(), expected);
        }
    }
}
