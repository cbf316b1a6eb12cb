//! The order in which NICs are chosen.

use std::collections::{BTreeMap, BTreeSet};

use super::DeviceId;
use super::alike::Alike;

/// The NICs that can be given to one more lease now, or could in need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Order {
    /// Those that are not kept for failover, the least loaded ones first.
    pub(super) ordinary: Ranked,
    /// Those that are kept for failover, the ones that least leans on first.
    pub(super) backups: Ranked,
    /// Those that work, and are to be empty or are not trusted: better than none.
    pub(super) reluctant: BTreeSet<DeviceId>,
}

/// By how much is on them. Those that are alike are together: of them those of certain hosts are sought.
type Ranked = BTreeMap<Rank, Alike>;

/// How much is on a NIC, to compare with others of its sort.
type Rank = (u64, u32);

/// Where a NIC stands, if it can be given to one more lease now, or could in need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    Ordinary(Rank),
    Backup(Rank),
    Reluctant,
}

impl Order {
    pub(super) fn insert(&mut self, id: DeviceId, standing: Option<Standing>) {
        match standing {
            None => {}
            Some(Standing::Reluctant) => {
                self.reluctant.insert(id);
            }
            Some(Standing::Ordinary(rank)) => self.ordinary.entry(rank).or_default().insert(id),
            Some(Standing::Backup(rank)) => self.backups.entry(rank).or_default().insert(id),
        }
    }

    fn remove(&mut self, id: &DeviceId, standing: Option<Standing>) {
        let (all, rank) = match standing {
            None => return,
            Some(Standing::Reluctant) => {
                self.reluctant.remove(id);
                return;
            }
            Some(Standing::Ordinary(rank)) => (&mut self.ordinary, rank),
            Some(Standing::Backup(rank)) => (&mut self.backups, rank),
        };
        if let Some(alike) = all.get_mut(&rank) {
            alike.remove(id);
            if alike.is_empty() {
                all.remove(&rank);
            }
        }
    }

    /// A NIC stands elsewhere than it did.
    pub(super) fn change(&mut self, id: &DeviceId, before: Option<Standing>, now: Option<Standing>) {
        if before != now {
            self.remove(id, before);
            self.insert(id.clone(), now);
        }
    }
}
