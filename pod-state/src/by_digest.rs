//! What is found by a digest: of a name, say.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher};

/// What something is found by. Others may have the same: whoever looks one up reads in the row whether it is the one.
pub(super) type Digest = u64;

/// What has these digests. A tree would be read in one place of memory more for each level, and digests that were noted one after
/// the other lie nowhere near each other: where there is much, that takes more time than all else of a command.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ByDigest<T: Ord>(HashMap<Digest, Those<T>, BuildHasherDefault<Spread>>);

/// What has one digest. Several only if there are.
#[derive(Debug, PartialEq, Eq)]
enum Those<T: Ord> {
    One(T),
    Several(BTreeSet<T>),
}

impl<T: Ord> Default for ByDigest<T> {
    fn default() -> Self {
        Self(HashMap::default())
    }
}

impl<T: Ord + Copy> ByDigest<T> {
    /// Whether something has a digest from now on.
    pub(super) fn set(&mut self, digest: Digest, one: T, there: bool) {
        match self.0.entry(digest) {
            Entry::Vacant(place) => {
                if there {
                    place.insert(Those::One(one));
                }
            }
            Entry::Occupied(mut place) => {
                let mut all = place.get().all();
                if there {
                    all.insert(one);
                } else {
                    all.remove(&one);
                }
                match (all.len(), all.first()) {
                    (0, _) | (_, None) => {
                        place.remove();
                    }
                    (1, Some(last)) => {
                        place.insert(Those::One(*last));
                    }
                    _ => {
                        place.insert(Those::Several(all));
                    }
                }
            }
        }
    }

    /// All that have it, the least one first.
    pub(super) fn get(&self, digest: Digest) -> impl Iterator<Item = T> {
        let (one, several) = match self.0.get(&digest) {
            Some(Those::One(one)) => (Some(*one), None),
            Some(Those::Several(all)) => (None, Some(all)),
            None => (None, None),
        };
        one.into_iter().chain(several.into_iter().flatten().copied())
    }
}

impl<T: Ord + Copy> Those<T> {
    fn all(&self) -> BTreeSet<T> {
        match self {
            Self::One(one) => BTreeSet::from([*one]),
            Self::Several(all) => all.clone(),
        }
    }
}

/// Digests are spread already, but for those that are numbers given in turn.
#[derive(Default)]
pub(super) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // An odd number with bits everywhere: what is next to each other goes far apart, in the upper bits too.
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// The digest of a name.
pub(super) fn digest(name: &str) -> Digest {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_the_same_digest_is_found_beside_each_other() {
        let mut all = ByDigest::<u32>::default();
        let got = |all: &ByDigest<u32>, digest| all.get(digest).collect::<Vec<u32>>();
        for (digest, one) in [(7, 3), (7, 1), (9, 2), (7, 3)] {
            all.set(digest, one, true);
        }
        assert_eq!((got(&all, 7), got(&all, 9), got(&all, 8)), (vec![1, 3], vec![2], vec![]));
        all.set(7, 1, false);
        all.set(7, 2, false);
        all.set(8, 2, false);
        let mut alike = ByDigest::<u32>::default();
        alike.set(9, 2, true);
        alike.set(7, 3, true);
        assert_eq!(all, alike, "whatever there was before");
        all.set(7, 3, false);
        assert!(got(&all, 7).is_empty());
        assert_ne!(all, alike);
    }
}
