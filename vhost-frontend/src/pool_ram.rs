//! Guest memory that lies in the pool, so that a device on another host may reach it without a copy.

use std::fs::File;

use cxl_pool::{Area, ByteOffset, FileIdentity};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::chain::Segment;
use crate::memory::GuestMemory;

/// What a guest may have of the pool as its own memory.
///
/// Its VMM maps the pool's file, so nothing but the VMM keeps the guest from the rest of it. Whoever maps something else
/// than what was leased, the superblock above all, is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolRam {
    /// The pool's file or device, known under any name.
    pub file: FileIdentity,
    /// What is leased to the guest; nothing if its memory has to lie elsewhere.
    pub leased: Option<Area>,
}

impl PoolRam {
    fn is_in(&self, file: &File) -> bool {
        FileIdentity::of(file).is_ok_and(|identity| identity == self.file)
    }

    /// Whether the VMM may share this part of this file.
    pub(crate) fn allows(&self, file: &File, offset: u64, bytes: u64) -> bool {
        !self.is_in(file) || self.leased.is_some_and(|leased| leased.contains(ByteOffset::new(offset), bytes))
    }
}

/// Where in the pool a guest's memory lies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PoolMap {
    ranges: Vec<Range>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    guest: u64,
    bytes: u64,
    pool: u64,
}

impl PoolMap {
    /// Finds the regions of `memory` that lie in the pool.
    pub fn new(memory: &GuestMemory, pool: &PoolRam) -> Self {
        let ranges =
            memory.iter().filter_map(|region| {
                let file = region.file_offset()?;
                // It was checked when the VMM shared it, but this is what counts for what is told to the backend.
                (pool.is_in(file.file()) && pool.allows(file.file(), file.start(), region.len()))
                    .then(|| Range { guest: region.start_addr().0, bytes: region.len(), pool: file.start() })
            });
        Self { ranges: ranges.collect() }
    }

    /// Whether nothing of it does.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether all that this map has is in another one, at the same place.
    pub fn is_within(&self, other: &Self) -> bool {
        let is_there = |range: &Range| other.find(GuestAddress(range.guest), range.bytes) == Some(range.pool);
        self.ranges.iter().all(is_there)
    }

    /// Whether these bytes of the pool are all in it, wherever the guest has them.
    pub fn has(&self, start: ByteOffset, bytes: u64) -> bool {
        let (mut at, end) = (start.get(), start.get().saturating_add(bytes));
        while at < end {
            let there = self.ranges.iter().filter(|range| range.pool <= at);
            let Some(next) = there.map(|range| range.pool + range.bytes).max().filter(|&next| next > at)
            else {
                return false;
            };
            at = next;
        }
        true
    }

    /// Where `bytes` bytes of these segments lie, after the first `skip`, if they lie in the pool in one piece.
    pub fn contiguous(&self, segments: &[Segment], skip: u64, bytes: u64) -> Option<ByteOffset> {
        if self.ranges.is_empty() {
            return None;
        }
        let (mut skip, mut left) = (skip, bytes);
        let mut start = None;
        for segment in segments {
            let length = u64::from(segment.bytes);
            if skip >= length {
                skip -= length;
                continue;
            }
            let piece = (length - skip).min(left);
            let at = self.find(GuestAddress(segment.address.0 + skip), piece)?;
            let first = *start.get_or_insert(at);
            if at != first + (bytes - left) {
                return None;
            }
            skip = 0;
            left -= piece;
            if left == 0 {
                return Some(ByteOffset::new(first));
            }
        }
        None
    }

    /// Where `bytes` bytes of these segments lie, after the first `skip`, as ranges of the pool. Those that follow each
    /// other are joined. Returns how many there are; nothing if they do not fit `into`, or if not all of it lies in the pool.
    pub fn ranges(
        &self,
        segments: &[Segment],
        skip: u64,
        bytes: u64,
        into: &mut [(ByteOffset, u32)],
    ) -> Option<usize> {
        let (mut skip, mut left, mut count) = (skip, bytes, 0);
        for segment in segments {
            let length = u64::from(segment.bytes);
            if skip >= length {
                skip -= length;
                continue;
            }
            if left == 0 {
                break;
            }
            let piece = (length - skip).min(left);
            let at = self.find(GuestAddress(segment.address.0 + skip), piece)?;
            let length = u32::try_from(piece).ok()?;
            match into[..count].last_mut() {
                Some((start, before)) if start.get() + u64::from(*before) == at => {
                    *before = before.checked_add(length)?;
                }
                _ => {
                    *into.get_mut(count)? = (ByteOffset::new(at), length);
                    count += 1;
                }
            }
            skip = 0;
            left -= piece;
        }
        (left == 0).then_some(count)
    }

    fn find(&self, at: GuestAddress, bytes: u64) -> Option<u64> {
        self.ranges.iter().find_map(|range| {
            let offset = at.0.checked_sub(range.guest)?;
            (offset < range.bytes && bytes <= range.bytes - offset).then_some(range.pool + offset)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cxl_pool::{LineCount, LineOffset};
    use vm_memory::{FileOffset, GuestMemoryMmap};

    fn segment(address: u64, bytes: u32) -> Segment {
        Segment { address: GuestAddress(address), bytes }
    }

    fn file() -> (File, FileIdentity) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let identity = FileIdentity::of(&file).unwrap();
        (file, identity)
    }

    fn area(start: u64, bytes: u64) -> Area {
        Area::new(LineOffset::new(start / 64), LineCount::new(bytes / 64))
    }

    #[test]
    fn only_what_is_leased_may_be_mapped() {
        let (pool, identity) = file();
        let (other, _) = file();
        let ram = PoolRam { file: identity, leased: Some(area(0x1_0000, 0x1_0000)) };
        assert!(ram.allows(&pool, 0x1_0000, 0x1_0000));
        for (offset, bytes) in
            [(0, 0x1000), (0, 0x2_0000), (0xf000, 0x2000), (0x1_f000, 0x2000), (0x1_0000, u64::MAX)]
        {
            assert!(!ram.allows(&pool, offset, bytes), "{offset:#x} {bytes:#x}");
        }
        assert!(ram.allows(&other, 0, 0x1000), "another file is none of our business");
        let nothing = PoolRam { leased: None, ..ram };
        assert!(!nothing.allows(&pool, 0x1_0000, 0x1000));
    }

    #[test]
    fn another_node_of_the_pools_device_is_the_pool() {
        use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
        // Any device will do, and everybody has this one.
        let directory = tempfile::tempdir().unwrap();
        let node = directory.path().join("null");
        let made = mknodat(CWD, &node, FileType::CharacterDevice, Mode::RUSR | Mode::WUSR, makedev(1, 3));
        let (Ok(()), Ok(node)) = (made, File::open(&node)) else {
            return eprintln!("skipped: it takes root, and a file system that is not mounted with nodev");
        };
        let file = FileIdentity::of(&File::open("/dev/null").unwrap()).unwrap();
        let ram = PoolRam { file, leased: Some(area(0x1_0000, 0x1_0000)) };
        assert!(ram.allows(&node, 0x1_0000, 0x1_0000));
        assert!(!ram.allows(&node, 0, 0x1000), "the superblock");
    }

    #[test]
    fn pieces_are_found_if_they_follow_each_other_in_the_pool() {
        let (pool, identity) = file();
        let (other, _) = file();
        let part = |file: &File, start| Some(FileOffset::new(file.try_clone().unwrap(), start));
        let memory = GuestMemoryMmap::from_ranges_with_files([
            (GuestAddress(0), 0x4000, part(&other, 0)),
            (GuestAddress(0x10_0000), 0x4000, part(&pool, 0x1_0000)),
            (GuestAddress(0x20_0000), 0x4000, part(&pool, 0x1_4000)),
            (GuestAddress(0x30_0000), 0x4000, part(&pool, 0x4_0000)),
        ]);
        let leased = Some(area(0x1_0000, 0x1_0000));
        let map = PoolMap::new(&memory.unwrap().into(), &PoolRam { file: identity, leased });
        for (start, bytes, has) in [
            (0x1_0000, 0x4000, true),
            (0x1_3000, 0x2000, true),
            (0x1_0000, 0x8000, true),
            (0x1_7000, 0x1001, false),
            (0xf000, 0x2000, false),
            (0x4_0000, 1, false),
            (0x1_7000, u64::MAX, false),
            (0, 0, true),
        ] {
            assert_eq!(map.has(ByteOffset::new(start), bytes), has, "{start:#x} {bytes:#x}");
        }
        let find = |segments: &[Segment], skip, bytes| map.contiguous(segments, skip, bytes);
        let at = |offset| Some(ByteOffset::new(offset));
        assert_eq!(find(&[segment(0x10_0000, 0x1000)], 0, 0x1000), at(0x1_0000));
        assert_eq!(find(&[segment(0x10_0000, 0x1000)], 16, 512), at(0x1_0010));
        assert_eq!(find(&[segment(0x5000, 16), segment(0x10_2000, 0x1000)], 16, 0x1000), at(0x1_2000));
        // One after the other, also over the border of two regions that are neighbours in the pool only.
        assert_eq!(find(&[segment(0x10_2000, 0x800), segment(0x10_2800, 0x801)], 0, 0x1000), at(0x1_2000));
        assert_eq!(find(&[segment(0x10_3000, 0x1000), segment(0x20_0000, 0x1000)], 0, 0x2000), at(0x1_3000));
        assert_eq!(find(&[segment(0x10_2000, 0x800), segment(0x10_3000, 0x800)], 0, 0x1000), None);
        assert_eq!(find(&[segment(0x10_2800, 0x800), segment(0x10_2000, 0x800)], 0, 0x1000), None);
        assert_eq!(find(&[segment(0x10_3800, 0x1000)], 0, 0x1000), None, "beyond a region");
        assert_eq!(find(&[segment(0x0, 0x1000)], 0, 0x1000), None, "not in the pool");
        assert_eq!(find(&[segment(0x30_0000, 0x1000)], 0, 0x1000), None, "not leased");
        assert_eq!(find(&[segment(0x10_0000, 0x1000)], 0, 0x1001), None, "too short");
        assert_eq!(find(&[segment(u64::MAX - 10, 0x1000)], 0, 0x1000), None);

        let ranges = |segments: &[Segment], skip, bytes, room: usize| {
            let mut into = [(ByteOffset::new(0), 0); 4];
            let count = map.ranges(segments, skip, bytes, &mut into[..room])?;
            Some(into[..count].iter().map(|(at, bytes)| (at.get(), *bytes)).collect::<Vec<_>>())
        };
        let scattered = [segment(0x10_0000, 0x100), segment(0x10_0100, 0x100), segment(0x20_0000, 0x1000)];
        assert_eq!(ranges(&scattered, 0, 0x1200, 4), Some(vec![(0x1_0000, 0x200), (0x1_4000, 0x1000)]));
        assert_eq!(ranges(&scattered, 0x80, 0x200, 4), Some(vec![(0x1_0080, 0x180), (0x1_4000, 0x80)]));
        assert_eq!(ranges(&scattered, 0x200, 0x10, 4), Some(vec![(0x1_4000, 0x10)]));
        assert_eq!(ranges(&scattered, 0x80, 0x180, 1), Some(vec![(0x1_0080, 0x180)]), "what is not needed");
        assert_eq!(ranges(&scattered, 0, 0x1200, 1), None, "more ranges than fit");
        assert_eq!(ranges(&scattered, 0, 0x1201, 4), None, "too short");
        assert_eq!(ranges(&[segment(0x0, 0x1000)], 0, 0x1000, 4), None, "not in the pool");
        assert_eq!(ranges(&[segment(0x10_3800, 0x1000)], 0, 0x1000, 4), None, "beyond a region");
        // What is skipped need not lie in the pool.
        assert_eq!(
            ranges(&[segment(0x0, 12), segment(0x10_0000, 64)], 12, 64, 4),
            Some(vec![(0x1_0000, 64)])
        );
    }
}
