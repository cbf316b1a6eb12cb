//! How loaded the NICs of each host are, in the order in which they are chosen.
//!
//! Half of all placements look at all NICs of a host, and take one. What else is known of the others, of which each is several lines
//! of the cache, is not read.

use cxl_pool::HostId;
use smol_str::SmolStr;

use super::DeviceId;

/// See the [module](self): by the hosts' numbers, none at the end that is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AtHosts(Vec<Vec<(u64, SmolStr)>>);

impl AtHosts {
    /// The NICs of a host, the least loaded one first.
    pub(super) fn get(&self, host: HostId) -> &[(u64, SmolStr)] {
        self.0.get(usize::from(host.get())).map_or(&[], Vec::as_slice)
    }

    /// A NIC has another load than it had, or came or went.
    pub(super) fn change(&mut self, id: &DeviceId, before: Option<u64>, now: Option<u64>) {
        if before == now {
            return;
        }
        let place = usize::from(id.host.get());
        if self.0.len() <= place {
            self.0.resize_with(place + 1, Vec::new);
        }
        let Some(nics) = self.0.get_mut(place) else { return };
        if let Some(known) =
            before.and_then(|load| nics.iter().position(|it| it.0 == load && it.1 == id.name))
        {
            nics.remove(known);
        }
        if let Some(load) = now {
            let entry = (load, id.name.clone());
            let place = nics.partition_point(|known| *known < entry);
            nics.insert(place, entry);
        }
        if nics.is_empty() {
            let used = self.0.iter().rposition(|nics| !nics.is_empty()).map_or(0, |last| last + 1);
            self.0.truncate(used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nics_of_a_host_are_in_the_order_of_their_loads() {
        let mut all = AtHosts::default();
        let nic = |host: u16, name: &str| DeviceId { host: HostId::new(host), name: name.into() };
        let names = |all: &AtHosts, host| {
            all.get(HostId::new(host)).iter().map(|(_, name)| name.to_string()).collect::<Vec<_>>()
        };
        for (host, name, load) in [(7, "c", 5), (7, "b", 5), (7, "a", 9), (2, "a", 1)] {
            all.change(&nic(host, name), None, Some(load));
        }
        assert_eq!(names(&all, 7), ["b", "c", "a"]);
        all.change(&nic(7, "b"), Some(5), Some(10));
        all.change(&nic(7, "c"), Some(5), Some(5));
        assert_eq!(
            (names(&all, 7), names(&all, 2)),
            (vec!["c".into(), "a".into(), "b".into()], vec!["a".into()])
        );
        for (name, load) in [("a", 9), ("b", 10), ("c", 5)] {
            all.change(&nic(7, name), Some(load), None);
        }
        let mut same = AtHosts::default();
        same.change(&nic(2, "a"), None, Some(1));
        assert_eq!(all, same, "whatever there was before");
        assert_eq!((names(&all, 7), names(&all, 900)), (Vec::new(), Vec::new()));
    }
}
