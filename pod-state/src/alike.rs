//! Devices on which as much is, of which those of certain hosts are sought.

use std::collections::{BTreeSet, btree_set};

use cxl_pool::HostId;
use smol_str::SmolStr;

use super::DeviceId;

/// See the [module](self).
///
/// Most of the hosts that are sought have none of them. To look that up among all takes longer than anything else of a placement,
/// and the longer the larger the pod is: so there is a bit for each host, and those of a thousand take two lines of the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Alike {
    all: BTreeSet<DeviceId>,
    /// Which hosts have one, by their numbers; none at the end that is empty.
    hosts: Vec<u64>,
}

/// The word and the bit of a host.
fn place(host: HostId) -> (usize, u64) {
    (usize::from(host.get() / 64), 1 << (host.get() % 64))
}

impl Alike {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// All of them, in order.
    pub(super) fn iter(&self) -> btree_set::Iter<'_, DeviceId> {
        self.all.iter()
    }

    /// Those of a host, in order.
    pub(super) fn of_host(&self, host: HostId) -> impl Iterator<Item = &DeviceId> {
        let (word, bit) = place(host);
        let known = self.hosts.get(word).filter(|bits| **bits & bit != 0);
        known.into_iter().flat_map(move |_| self.from(host)).take_while(move |id| id.host == host)
    }

    pub(super) fn insert(&mut self, id: DeviceId) {
        let (word, bit) = place(id.host);
        if self.hosts.len() <= word {
            self.hosts.resize(word + 1, 0);
        }
        if let Some(bits) = self.hosts.get_mut(word) {
            *bits |= bit;
        }
        self.all.insert(id);
    }

    pub(super) fn remove(&mut self, id: &DeviceId) {
        self.all.remove(id);
        if self.from(id.host).next().is_some_and(|next| next.host == id.host) {
            return;
        }
        let (word, bit) = place(id.host);
        if let Some(bits) = self.hosts.get_mut(word) {
            *bits &= !bit;
        }
        let used = self.hosts.iter().rposition(|bits| *bits != 0).map_or(0, |last| last + 1);
        self.hosts.truncate(used);
    }

    /// Those of this host and of all after it.
    fn from(&self, host: HostId) -> btree_set::Range<'_, DeviceId> {
        self.all.range(DeviceId { host, name: SmolStr::default() }..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic(host: u16, name: &str) -> DeviceId {
        DeviceId { host: HostId::new(host), name: name.into() }
    }

    fn of_host(alike: &Alike, host: u16) -> Vec<DeviceId> {
        alike.of_host(HostId::new(host)).cloned().collect()
    }

    #[test]
    fn those_of_a_host_are_found_whatever_came_and_went() {
        let mut alike = Alike::default();
        for (host, name) in [(700, "b"), (2, "a"), (700, "a"), (65_535, "a"), (63, "a"), (64, "a")] {
            alike.insert(nic(host, name));
        }
        alike.insert(nic(2, "a"));
        assert_eq!(of_host(&alike, 700), [nic(700, "a"), nic(700, "b")]);
        assert_eq!(of_host(&alike, 64), [nic(64, "a")]);
        for host in [0, 1, 65, 699, 701] {
            assert_eq!(of_host(&alike, host), [], "{host}");
        }
        for (host, name) in [(65_535, "a"), (700, "a"), (64, "a"), (5, "a")] {
            alike.remove(&nic(host, name));
        }
        assert_eq!(of_host(&alike, 700), [nic(700, "b")]);
        assert_eq!((of_host(&alike, 64), of_host(&alike, 65_535)), (vec![], vec![]));
        assert!(!alike.is_empty());

        let mut same = Alike::default();
        for (host, name) in [(2, "a"), (63, "a"), (700, "b")] {
            same.insert(nic(host, name));
        }
        assert_eq!(alike, same, "whatever there was before");
        for (host, name) in [(2, "a"), (63, "a"), (700, "b")] {
            same.remove(&nic(host, name));
        }
        assert!(same.is_empty());
        assert_eq!(same, Alike::default());
    }
}
