use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};

/// A set of a few, or one to which what comes last is mostly the largest: in order, next to each other.
///
/// A tree takes a node of eleven for one, and is read in as many places of memory as it is high. There are as many of these as there
/// are regions and NICs, and each placement reads and changes several.
#[derive(Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Sorted<T>(Vec<T>);

impl<T: Ord> Sorted<T> {
    /// Whether it is among them.
    pub fn contains(&self, one: &T) -> bool {
        self.0.binary_search(one).is_ok()
    }

    /// One more. False if it was among them.
    pub(super) fn insert(&mut self, one: T) -> bool {
        let place = if self.0.last().is_none_or(|last| *last < one) {
            Err(self.0.len())
        } else {
            self.0.binary_search(&one)
        };
        if let Err(place) = place {
            self.0.insert(place, one);
        }
        place.is_err()
    }

    /// One less. False if it was not among them.
    pub(super) fn remove(&mut self, one: &T) -> bool {
        let place = self.0.binary_search(one);
        if let Ok(place) = place {
            self.0.remove(place);
        }
        place.is_ok()
    }
}

impl<T> Sorted<T> {
    /// All of them, in order.
    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.0.iter()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn retain(&mut self, keep: impl FnMut(&T) -> bool) {
        self.0.retain(keep);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl<T> Default for Sorted<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Ord> FromIterator<T> for Sorted<T> {
    fn from_iter<I: IntoIterator<Item = T>>(all: I) -> Self {
        let mut all: Vec<T> = all.into_iter().collect();
        all.sort_unstable();
        all.dedup();
        Self(all)
    }
}

impl<'a, T> IntoIterator for &'a Sorted<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<T: fmt::Debug> fmt::Debug for Sorted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self).finish()
    }
}

impl<'de, T: Deserialize<'de> + Ord> Deserialize<'de> for Sorted<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Ok(Vec::deserialize(from)?.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set(steps in prop::collection::vec((any::<bool>(), 0..20_u8), 0..100)) {
            let (mut sorted, mut set) = (Sorted::default(), BTreeSet::new());
            for (comes, one) in steps {
                let (ours, theirs) = if comes {
                    (sorted.insert(one), set.insert(one))
                } else {
                    (sorted.remove(&one), set.remove(&one))
                };
                prop_assert_eq!(ours, theirs);
                prop_assert!(sorted.iter().eq(&set));
                prop_assert_eq!(sorted.contains(&7), set.contains(&7));
            }
            let (ours, theirs) = (serde_json::to_string(&sorted), serde_json::to_string(&set));
            prop_assert_eq!(ours.as_ref().ok(), theirs.as_ref().ok());
            let read: Sorted<u8> = serde_json::from_str(&theirs.unwrap_or_default()).expect("a list");
            prop_assert_eq!(read, sorted);
        }
    }

    #[test]
    fn what_was_written_in_another_order_is_put_in_order() {
        let read: Sorted<u8> = serde_json::from_str("[3,1,3,2]").expect("a list");
        assert!(read.iter().eq(&[1, 2, 3]), "{read:?}");
    }
}
