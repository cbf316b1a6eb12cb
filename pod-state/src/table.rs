//! Tables of the state that know what was changed in them.
//!
//! What is derived from a table follows its changes, instead of being made anew from all of it; and a command that turns out to be
//! impossible takes its changes back. Neither is part of the state: tables with the same rows are the same.

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::fmt;
use std::ops::{Index, RangeBounds};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Rows as they were.
pub(super) type Past<K, V> = BTreeMap<K, Was<V>>;

/// How a row was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Was<V> {
    /// Not there.
    Absent,
    /// Like this. Boxed: most commands change few rows, and a map has room for more.
    Row(Box<V>),
    /// As it is now, in what anybody derives something from; how it was before the command is known.
    Alike,
}

impl<V> Was<V> {
    /// The row, where there was another one.
    pub(super) fn row(&self) -> Option<&V> {
        match self {
            Self::Row(row) => Some(row),
            Self::Absent | Self::Alike => None,
        }
    }
}

/// A map that notes what is changed.
///
/// Rows lie by themselves: a lease takes half a KiB, and nodes with a dozen of them would spread what is looked through for one
/// over as many pages as there are leases.
pub struct Table<K, V> {
    rows: BTreeMap<K, Box<V>>,
    /// What changed since somebody last followed, as it was then.
    fresh: Past<K, V>,
    /// What changed since the command began and was followed, as it was before the command.
    before: Past<K, V>,
    /// What was followed since somebody took a copy, if somebody does.
    uncopied: Option<BTreeSet<K>>,
}

impl<K: Ord, V> Table<K, V> {
    /// A row.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.rows.get(key).map(Box::as_ref)
    }

    /// Whether there is such a row.
    pub fn contains_key(&self, key: &K) -> bool {
        self.rows.contains_key(key)
    }

    /// Rows whose keys are among these, in order.
    pub fn range(&self, keys: impl RangeBounds<K>) -> impl DoubleEndedIterator<Item = (&K, &V)> {
        self.rows.range(keys).map(|(key, row)| (key, &**row))
    }
}

impl<K, V> Table<K, V> {
    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// All rows, in the order of their keys.
    pub fn iter(&self) -> Iter<'_, K, V> {
        Iter(self.rows.iter())
    }

    /// The keys of all rows, in order.
    pub fn keys(&self) -> impl DoubleEndedIterator<Item = &K> {
        self.rows.keys()
    }

    /// All rows, without their keys.
    pub fn values(&self) -> impl DoubleEndedIterator<Item = &V> {
        self.rows.values().map(Box::as_ref)
    }
}

/// All rows of a table, in the order of their keys.
pub struct Iter<'a, K, V>(btree_map::Iter<'a, K, Box<V>>);

impl<'a, K, V> Iterator for Iter<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(|(key, row)| (key, &**row))
    }
}

impl<K: Ord + Clone, V: Clone> Table<K, V> {
    /// A row to be changed.
    pub(super) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let row = self.rows.get_mut(key)?;
        note(&mut self.fresh, key, || Was::Row(row.clone()));
        Some(row)
    }

    /// A row to be changed in what nobody derives anything from but what has to be settled.
    pub(super) fn get_mut_aside(&mut self, key: &K) -> Option<&mut V> {
        if !self.before.contains_key(key) {
            return self.get_mut(key);
        }
        let row = self.rows.get_mut(key)?;
        self.fresh.entry(key.clone()).or_insert(Was::Alike);
        Some(row)
    }

    /// All rows to be changed.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        for (key, row) in &self.rows {
            note(&mut self.fresh, key, || Was::Row(row.clone()));
        }
        self.rows.values_mut().map(Box::as_mut)
    }

    /// A row comes, in place of what is returned.
    pub(super) fn insert(&mut self, key: K, row: V) -> Option<V> {
        self.put(key, Box::new(row)).map(|old| *old)
    }

    fn put(&mut self, key: K, row: Box<V>) -> Option<Box<V>> {
        note(&mut self.fresh, &key, || self.rows.get(&key).cloned().map_or(Was::Absent, Was::Row));
        self.rows.insert(key, row)
    }

    /// A row goes.
    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        let old = self.rows.remove(key)?;
        note(&mut self.fresh, key, || Was::Row(old.clone()));
        Some(*old)
    }

    /// Rows that are not kept go.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&K, &V) -> bool) {
        let gone: Vec<K> =
            self.rows.iter().filter(|(key, row)| !keep(key, row)).map(|it| it.0.clone()).collect();
        for key in gone {
            self.remove(&key);
        }
    }

    /// All rows go.
    pub(super) fn clear(&mut self) {
        self.retain(|_, _| false);
    }

    /// Has those who follow look at a row again, for what they derive from it depends on something else too.
    pub(super) fn touch(&mut self, key: &K) {
        self.get_mut(key);
    }

    /// Whether everybody has followed.
    pub(super) fn is_followed(&self) -> bool {
        self.fresh.is_empty()
    }

    /// What there is to follow. Given back when that is done.
    pub(super) fn begin_to_follow(&mut self) -> Past<K, V> {
        std::mem::take(&mut self.fresh)
    }

    /// Everybody has followed these changes.
    pub(super) fn followed(&mut self, fresh: Past<K, V>) {
        if let Some(uncopied) = &mut self.uncopied {
            uncopied.extend(fresh.keys().cloned());
        }
        if self.before.is_empty() {
            self.before = fresh;
            return;
        }
        for (key, old) in fresh {
            self.before.entry(key).or_insert(old);
        }
    }

    /// The rows that may be other ones than when this was asked before; nothing if all may be. All changes must have been followed.
    pub(super) fn take_uncopied(&mut self) -> Option<BTreeSet<K>> {
        self.uncopied.replace(BTreeSet::new())
    }

    /// The rows of which a copy has yet to hear, whether or not that was followed; nothing if nobody takes copies.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn uncopied(&self) -> Option<BTreeSet<K>> {
        let followed = self.uncopied.as_ref()?;
        Some(followed.iter().chain(self.fresh.keys()).cloned().collect())
    }

    /// Makes these rows what they are in another table.
    pub(super) fn copy_rows(&mut self, other: &Self, keys: &BTreeSet<K>) {
        for key in keys {
            match other.rows.get(key) {
                Some(row) => drop(self.rows.insert(key.clone(), row.clone())),
                None => drop(self.rows.remove(key)),
            }
        }
    }

    /// Whether any row is another one than before the command. All changes must have been followed.
    pub(super) fn has_changed(&self) -> bool
    where
        V: PartialEq,
    {
        self.before.iter().any(|(key, was)| match was {
            Was::Absent => self.rows.contains_key(key),
            Was::Row(old) => self.rows.get(key) != Some(old),
            Was::Alike => false,
        })
    }

    /// What was changed is not taken back any more.
    pub(super) fn commit(&mut self) {
        self.before.clear();
    }

    /// Makes all rows what they were before the command, which is a change like any.
    pub(super) fn take_back(&mut self) {
        let fresh = self.begin_to_follow();
        self.followed(fresh.clone());
        self.fresh = fresh;
        for (key, old) in std::mem::take(&mut self.before) {
            match old {
                Was::Row(old) => drop(self.put(key, old)),
                Was::Absent => drop(self.remove(&key)),
                Was::Alike => {}
            }
        }
    }
}

/// Notes how a row was that is changed, unless that is known.
fn note<K: Ord + Clone, V>(fresh: &mut Past<K, V>, key: &K, was: impl FnOnce() -> Was<V>) {
    match fresh.get_mut(key) {
        // What somebody derives something from has not been changed so far.
        Some(known @ Was::Alike) => *known = was(),
        Some(_) => {}
        None => {
            fresh.insert(key.clone(), was());
        }
    }
}

impl<K: Ord, V> Index<&K> for Table<K, V> {
    type Output = V;

    fn index(&self, key: &K) -> &V {
        &self.rows[key]
    }
}

impl<'a, K, V> IntoIterator for &'a Table<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Iter<'a, K, V>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<K, V> From<BTreeMap<K, Box<V>>> for Table<K, V> {
    fn from(rows: BTreeMap<K, Box<V>>) -> Self {
        Self { rows, fresh: BTreeMap::new(), before: BTreeMap::new(), uncopied: None }
    }
}

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        BTreeMap::new().into()
    }
}

impl<K: Clone, V: Clone> Clone for Table<K, V> {
    fn clone(&self) -> Self {
        self.rows.clone().into()
    }
}

impl<K: PartialEq, V: PartialEq> PartialEq for Table<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.rows == other.rows
    }
}

impl<K: Eq, V: Eq> Eq for Table<K, V> {}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for Table<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rows.fmt(f)
    }
}

impl<K: Serialize, V: Serialize> Serialize for Table<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.rows.serialize(serializer)
    }
}

impl<'de, K: Deserialize<'de> + Ord, V: Deserialize<'de>> Deserialize<'de> for Table<K, V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        BTreeMap::deserialize(deserializer).map(Self::from)
    }
}

/// Tables whose keys are no text, as lists of pairs.
pub(super) mod pairs {
    use super::super::pairs;
    use super::{Deserialize, Deserializer, Serialize, Serializer, Table};

    pub(crate) fn serialize<K: Serialize, V: Serialize, S: Serializer>(
        table: &Table<K, V>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        pairs::serialize(&table.rows, serializer)
    }

    pub(crate) fn deserialize<'de, K, V, D>(deserializer: D) -> Result<Table<K, V>, D::Error>
    where
        K: Deserialize<'de> + Ord,
        V: Deserialize<'de>,
        D: Deserializer<'de>,
    {
        pairs::deserialize(deserializer).map(Table::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows<const N: usize>(rows: [(u8, &'static str); N]) -> Table<u8, &'static str> {
        BTreeMap::from(rows.map(|(key, row)| (key, Box::new(row)))).into()
    }

    fn was(row: &'static str) -> Was<&'static str> {
        Was::Row(Box::new(row))
    }

    fn table() -> Table<u8, &'static str> {
        let mut table = rows([(1, "one"), (2, "two"), (3, "three")]);
        *table.get_mut(&1).unwrap() = "uno";
        table.remove(&2);
        table.insert(4, "four");
        table
    }

    #[test]
    fn changes_are_followed_once_and_as_they_were_then() {
        let mut table = table();
        let first = table.begin_to_follow();
        assert_eq!(first, BTreeMap::from([(1, was("one")), (2, was("two")), (4, Was::Absent)]));
        table.followed(first);
        assert!(table.is_followed());
        *table.get_mut(&1).unwrap() = "eins";
        assert_eq!(table.begin_to_follow(), BTreeMap::from([(1, was("uno"))]));
    }

    #[test]
    fn what_is_changed_aside_is_copied_once_unless_more_of_it_changes() {
        let mut table = rows([(1, "one"), (2, "two")]);
        *table.get_mut_aside(&2).unwrap() = "zwei";
        assert_eq!(table.begin_to_follow(), BTreeMap::from([(2, was("two"))]), "it was not known before");
        *table.get_mut(&1).unwrap() = "uno";
        let fresh = table.begin_to_follow();
        table.followed(fresh);
        *table.get_mut_aside(&1).unwrap() = "eins";
        let fresh = table.begin_to_follow();
        assert_eq!(fresh, BTreeMap::from([(1, Was::Alike)]));
        table.followed(fresh);
        *table.get_mut_aside(&1).unwrap() = "un";
        table.remove(&1);
        assert_eq!(table.begin_to_follow(), BTreeMap::from([(1, was("un"))]));
        table.take_back();
        assert_eq!(table[&1], "one");
        assert_eq!(table.get_mut_aside(&3), None);
    }

    #[test]
    fn what_is_taken_back_is_as_before_the_command_whoever_followed_when() {
        let before = [(1, "one"), (2, "two"), (3, "three")];
        for followed in [false, true] {
            let mut table = table();
            if followed {
                let fresh = table.begin_to_follow();
                table.followed(fresh);
                *table.get_mut(&1).unwrap() = "eins";
                table.remove(&4);
                table.insert(2, "zwei");
                table.remove(&3);
            }
            table.take_back();
            assert_eq!(table, rows(before));
            let mut seen: Vec<u8> = table.begin_to_follow().into_keys().collect();
            seen.retain(|key| !table.contains_key(key));
            assert_eq!(seen, [4], "that it is gone again is a change");
        }
        let mut table = table();
        let fresh = table.begin_to_follow();
        table.followed(fresh);
        table.commit();
        table.take_back();
        assert_eq!(table, rows([(1, "uno"), (3, "three"), (4, "four")]));
    }
}
