//! Which parts of a replica differ, or may differ, from the replica that others are brought in line with.

use crate::message::Request;

/// The unit of what is remembered, and copied at once.
pub(super) const REGION_BYTES: u64 = 256 << 10;

/// One bit for each region of the volume.
#[derive(Debug, Clone)]
pub(super) struct Regions {
    words: Vec<u64>,
    total: u64,
    set: u64,
    /// Where the search for the next one goes on.
    cursor: u64,
}

impl Regions {
    /// None of a volume of this size.
    pub(super) fn none_of(size_bytes: u64) -> Self {
        let mut none = Self { words: Vec::new(), total: 0, set: 0, cursor: 0 };
        none.grow(size_bytes);
        none
    }

    /// The volume became larger. Nothing of what is new is in the set.
    pub(super) fn grow(&mut self, size_bytes: u64) {
        self.total = self.total.max(size_bytes.div_ceil(REGION_BYTES));
        // A bitmap of what does not fit the address space cannot be asked for: the volume's devices could not either.
        self.words.resize(usize::try_from(self.total.div_ceil(64)).unwrap_or(usize::MAX), 0);
    }

    /// How many there are in the volume.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    pub(super) fn is_empty(&self) -> bool {
        self.set == 0
    }

    /// How many are in the set.
    pub(super) fn len(&self) -> u64 {
        self.set
    }

    fn bit(&self, region: u64) -> (usize, u64) {
        debug_assert!(region < self.total);
        // It is below the length of the bitmap.
        (usize::try_from(region / 64).unwrap_or(usize::MAX), 1 << (region % 64))
    }

    pub(super) fn contains(&self, region: u64) -> bool {
        let (word, bit) = self.bit(region);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    pub(super) fn insert(&mut self, region: u64) {
        let (word, bit) = self.bit(region);
        if let Some(word) = self.words.get_mut(word)
            && *word & bit == 0
        {
            *word |= bit;
            self.set += 1;
        }
    }

    pub(super) fn remove(&mut self, region: u64) {
        let (word, bit) = self.bit(region);
        if let Some(word) = self.words.get_mut(word)
            && *word & bit != 0
        {
            *word &= !bit;
            self.set -= 1;
        }
    }

    pub(super) fn insert_all(&mut self) {
        self.insert_range(0..self.total);
    }

    pub(super) fn insert_range(&mut self, regions: std::ops::Range<u64>) {
        for region in regions {
            self.insert(region);
        }
    }

    pub(super) fn clear(&mut self) {
        self.words.fill(0);
        self.set = 0;
    }

    pub(super) fn union(&mut self, other: &Self) {
        self.set = 0;
        for (word, other) in self.words.iter_mut().zip(&other.words) {
            *word |= other;
            self.set += u64::from(word.count_ones());
        }
    }

    /// The next one for which `taken` is false, going round.
    pub(super) fn next(&mut self, taken: impl Fn(u64) -> bool) -> Option<u64> {
        if self.set == 0 {
            return None;
        }
        let mut left = self.set;
        let mut at = self.cursor;
        for _ in 0..=self.words.len() {
            if at >= self.total {
                at = 0;
            }
            let (index, _) = self.bit(at);
            let mut rest = self.words[index] & (u64::MAX << (at % 64));
            while rest != 0 {
                let region = index as u64 * 64 + u64::from(rest.trailing_zeros());
                if !taken(region) {
                    self.cursor = region + 1;
                    return Some(region);
                }
                rest &= rest - 1;
                left = left.saturating_sub(1);
                if left == 0 {
                    return None;
                }
            }
            at = (index as u64 + 1) * 64;
        }
        None
    }
}

/// The regions that a request touches.
pub(super) fn regions_of(request: &Request) -> std::ops::Range<u64> {
    if request.intent_log {
        return 0..0;
    }
    let end = request.offset_bytes.saturating_add(request.length_bytes);
    request.offset_bytes / REGION_BYTES..end.div_ceil(REGION_BYTES)
}

/// Whether two requests meet, and it matters which one is carried out first.
pub(super) fn conflict(one: &Request, other: &Request) -> bool {
    (one.operation.writes() || other.operation.writes()) && overlap(one, other)
}

/// Whether two requests meet.
pub(super) fn overlap(one: &Request, other: &Request) -> bool {
    let end = |request: &Request| request.offset_bytes.saturating_add(request.length_bytes);
    one.offset_bytes < end(other) && other.offset_bytes < end(one)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set(
            regions in 1_u64..300, steps in prop::collection::vec((any::<bool>(), any::<u64>()), 0..200),
        ) {
            let mut set = Regions::none_of(regions * REGION_BYTES - 4096);
            prop_assert_eq!(set.total(), regions);
            let mut model = BTreeSet::new();
            for (insert, region) in steps {
                let region = region % regions;
                if insert {
                    set.insert(region);
                    model.insert(region);
                } else {
                    set.remove(region);
                    model.remove(&region);
                }
                prop_assert_eq!(set.len(), model.len() as u64);
            }
            let mut other = Regions::none_of(regions * REGION_BYTES);
            other.insert(regions - 1);
            set.union(&other);
            model.insert(regions - 1);
            // Going round finds each of them once, whatever is left out.
            let odd: Vec<u64> = model.iter().copied().filter(|region| region % 2 == 1).collect();
            let found: BTreeSet<u64> =
                odd.iter().filter_map(|_| set.next(|region| region % 2 == 0)).collect();
            prop_assert_eq!(found, odd.iter().copied().collect::<BTreeSet<u64>>());
            for &region in &odd {
                set.remove(region);
            }
            prop_assert_eq!(set.next(|region| region % 2 == 0), None);
            set.insert_all();
            prop_assert_eq!(set.len(), regions);
            set.clear();
            prop_assert!(set.is_empty());
        }
    }
}
