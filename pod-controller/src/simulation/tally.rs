//! How often each of several things happened.

use std::collections::BTreeMap;

/// See the [module](self).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tally<K>(BTreeMap<K, u64>);

impl<K> Default for Tally<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Copy + Ord> Tally<K> {
    /// One happened, if it really did.
    pub(crate) fn note(&mut self, kind: K, happened: bool) {
        if happened {
            *self.0.entry(kind).or_default() += 1;
        }
    }

    /// With what happened elsewhere.
    pub(crate) fn add(&mut self, more: &Self) {
        for (kind, more) in &more.0 {
            *self.0.entry(*kind).or_default() += more;
        }
    }

    /// Those of these that never happened.
    pub(crate) fn missing(&self, all: &[K]) -> Vec<K> {
        all.iter().filter(|kind| !self.0.contains_key(kind)).copied().collect()
    }
}
