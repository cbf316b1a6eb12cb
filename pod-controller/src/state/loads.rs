//! What leases ask of the pod's NICs, and the NICs in the order in which they are chosen.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::HostId;

use super::nic_policy::promises;
use super::{DeviceId, Kind, Lease, LeaseKind, State};

/// What a lease without a reservation counts for where loads are compared, in Mbit/s. It is promised nothing.
const BEST_EFFORT_MBPS: u64 = 100;
/// A Mbit/s in bytes per second.
pub(crate) const BYTES_PER_MBIT: u64 = 125_000;
/// Loads are fractions with this denominator.
const SCALE: u64 = 1 << 32;

/// All NICs with what leans on them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Loads {
    nics: BTreeMap<DeviceId, NicLoad>,
    /// Those that can be given to somebody now and are not kept for failover, the least loaded one first.
    ordinary: BTreeSet<(u64, DeviceId)>,
    /// Those that are kept for failover, the one that least leans on first.
    backups: BTreeSet<(u64, u32, DeviceId)>,
}

/// A NIC, and what leans on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NicLoad {
    /// Its speed.
    pub(crate) speed_mbps: u64,
    /// How much of that, or beyond it, may be reserved.
    pub(crate) capacity_mbps: u64,
    /// The largest packet without the Ethernet header.
    pub(crate) mtu: u16,
    /// The offloads that it can do.
    pub(crate) features: u64,
    /// Whether it is kept free for failover.
    pub(crate) backup: bool,
    /// The link aggregation group that it is in.
    pub(crate) lag: Option<String>,
    /// Whether it can be given to somebody now.
    pub(crate) usable: bool,
    /// How many leases use it.
    pub(crate) leases: u32,
    /// What they reserve.
    pub(crate) reserved_mbps: u64,
    /// What they are promised to send and to receive, in bytes per second.
    promised: [u64; 2],
    /// How many leases would move to it.
    pub(crate) standby_leases: u32,
    /// What they would bring, by the host whose failure would have them move.
    incoming_mbps: BTreeMap<HostId, u64>,
}

impl NicLoad {
    /// The most that the failure of one host would bring.
    pub(crate) fn worst_incoming_mbps(&self) -> u64 {
        self.incoming_mbps.values().copied().max().unwrap_or(0)
    }

    /// What can be reserved and would still be carried if any one host failed, were it not for what this host would bring.
    pub(crate) fn free_mbps(&self, without: Option<(HostId, u64)>) -> u64 {
        let incoming = self.incoming_mbps.iter().map(|(host, mbps)| match without {
            Some((from, less)) if from == *host => mbps.saturating_sub(less),
            _ => *mbps,
        });
        let needed = self.reserved_mbps.saturating_add(incoming.max().unwrap_or(0));
        self.capacity_mbps.saturating_sub(needed)
    }

    /// Whether it is fast enough for what its leases are promised and this besides, each way in bytes per second.
    pub(crate) fn can_promise(&self, wanted: [u64; 2]) -> bool {
        let most = self.capacity_mbps.saturating_mul(BYTES_PER_MBIT);
        // Who wants nothing promised can go anywhere.
        wanted
            .iter()
            .zip(self.promised)
            .all(|(wanted, others)| *wanted == 0 || others.saturating_add(*wanted) <= most)
    }

    /// Whether it can carry this now, and after the failure of any one host.
    pub(crate) fn has_room(&self, mbps: u64) -> bool {
        mbps == 0 || mbps <= self.free_mbps(None)
    }

    /// Whether it could carry this too if that host failed.
    pub(crate) fn has_spare(&self, mbps: u64, failing: HostId) -> bool {
        let incoming = self.incoming_mbps.get(&failing).copied().unwrap_or(0);
        let needed = self.reserved_mbps.saturating_add(incoming).saturating_add(mbps);
        mbps == 0 || needed <= self.capacity_mbps
    }

    /// Whether it would carry everything that the failure of this host brings.
    pub(crate) fn carries_failure_of(&self, host: HostId) -> bool {
        let incoming = self.incoming_mbps.get(&host).copied().unwrap_or(0);
        self.reserved_mbps.saturating_add(incoming) <= self.capacity_mbps
    }

    /// What one more lease would have to share.
    fn load(&self) -> u64 {
        // Each lease counts for what it reserves, or for a little.
        let asked = self.reserved_mbps.saturating_add(BEST_EFFORT_MBPS * (u64::from(self.leases) + 1));
        scaled(asked, self.speed_mbps)
    }

    fn backup_load(&self) -> u64 {
        scaled(self.reserved_mbps.saturating_add(self.worst_incoming_mbps()), self.speed_mbps)
    }
}

fn scaled(mbps: u64, of_mbps: u64) -> u64 {
    mbps.saturating_mul(SCALE) / of_mbps.max(1)
}

impl State {
    /// What leases ask of NICs now.
    pub(crate) fn loads(&self) -> Loads {
        let mut loads = Loads::default();
        let percent = self.options.placement.nic_overcommit_percent;
        for (id, device) in &self.devices {
            let Kind::Nic { speed_mbps, mtu, features, backup, ref lag, .. } = device.kind else { continue };
            let nic = NicLoad {
                speed_mbps,
                capacity_mbps: speed_mbps.saturating_mul(percent.into()) / 100,
                mtu,
                features,
                backup,
                lag: lag.clone(),
                usable: self.is_usable(id),
                ..NicLoad::default()
            };
            loads.nics.insert(id.clone(), nic);
        }
        for lease in self.leases.values() {
            for (nic, change) in loads.changes(lease) {
                if let Some(load) = loads.nics.get_mut(&nic) {
                    change.apply(load, true);
                }
            }
        }
        for (id, load) in &loads.nics {
            index(&mut loads.ordinary, &mut loads.backups, id, load, true);
        }
        loads
    }
}

impl Loads {
    /// What leans on a NIC.
    pub(crate) fn get(&self, id: &DeviceId) -> Option<&NicLoad> {
        self.nics.get(id)
    }

    /// The NICs of a host, the least loaded one first.
    pub(crate) fn of_host(&self, host: HostId) -> Vec<(&DeviceId, &NicLoad)> {
        let first = DeviceId { host, name: String::new() };
        let mut nics: Vec<_> = self.nics.range(first..).take_while(|(id, _)| id.host == host).collect();
        nics.sort_by_key(|(id, load)| (load.load(), *id));
        nics
    }

    /// The NICs that are not kept for failover, the least loaded one first.
    pub(crate) fn ordinary(&self) -> impl Iterator<Item = (&DeviceId, &NicLoad)> {
        self.ordinary.iter().filter_map(|(_, id)| Some((id, self.nics.get(id)?)))
    }

    /// The NICs that are kept for failover, the one that least leans on first.
    pub(crate) fn backups(&self) -> impl Iterator<Item = (&DeviceId, &NicLoad)> {
        self.backups.iter().filter_map(|(_, _, id)| Some((id, self.nics.get(id)?)))
    }

    /// A lease came.
    pub(crate) fn note(&mut self, lease: &Lease) {
        self.change(lease, true);
    }

    /// A lease goes, or is about to change.
    pub(crate) fn forget(&mut self, lease: &Lease) {
        self.change(lease, false);
    }

    fn change(&mut self, lease: &Lease, comes: bool) {
        for (nic, change) in self.changes(lease) {
            if let Some(load) = self.nics.get_mut(&nic) {
                index(&mut self.ordinary, &mut self.backups, &nic, load, false);
                change.apply(load, comes);
                index(&mut self.ordinary, &mut self.backups, &nic, load, true);
            }
        }
    }

    /// What a lease is to its NICs. Each of a group may have to carry all of it, when the others fail.
    fn changes(&self, lease: &Lease) -> Vec<(DeviceId, Change)> {
        let LeaseKind::Nic { active, standby, reserved_mbps, policy, .. } = &lease.kind else {
            return Vec::new();
        };
        let promised = promises(policy);
        let active_change = |nic: &DeviceId| (nic.clone(), Change::Active(*reserved_mbps, promised));
        let mut changes = vec![active_change(active)];
        if let Some(lag) = self.get(active).and_then(|nic| nic.lag.as_ref()) {
            let others = self.nics.iter().filter(|(id, nic)| *id != active && nic.lag.as_ref() == Some(lag));
            changes.extend(others.map(|(id, _)| active_change(id)));
        }
        if let Some(standby) = standby {
            changes.push((standby.clone(), Change::Standby(active.host, *reserved_mbps)));
        }
        changes
    }

    /// Whether two NICs are in one link aggregation group.
    pub(crate) fn are_rails(&self, one: &DeviceId, other: &DeviceId) -> bool {
        let lag = |id| self.get(id).and_then(|nic| nic.lag.as_ref());
        one == other || lag(one).is_some() && lag(one) == lag(other)
    }
}

/// What a lease is to one of its NICs.
enum Change {
    Active(u64, [u64; 2]),
    Standby(HostId, u64),
}

impl Change {
    fn apply(&self, load: &mut NicLoad, comes: bool) {
        let count = |now: &mut u32| *now = if comes { *now + 1 } else { now.saturating_sub(1) };
        let sum = |now: &mut u64, mbps: u64| {
            *now = if comes { now.saturating_add(mbps) } else { now.saturating_sub(mbps) };
        };
        match *self {
            Self::Active(mbps, promised) => {
                count(&mut load.leases);
                sum(&mut load.reserved_mbps, mbps);
                load.promised.iter_mut().zip(promised).for_each(|(now, it)| sum(now, it));
            }
            Self::Standby(from, mbps) => {
                count(&mut load.standby_leases);
                if mbps > 0 {
                    let incoming = load.incoming_mbps.entry(from).or_default();
                    sum(incoming, mbps);
                    if *incoming == 0 {
                        load.incoming_mbps.remove(&from);
                    }
                }
            }
        }
    }
}

fn index(
    ordinary: &mut BTreeSet<(u64, DeviceId)>,
    backups: &mut BTreeSet<(u64, u32, DeviceId)>,
    id: &DeviceId,
    load: &NicLoad,
    there: bool,
) {
    match (load.usable, load.backup, there) {
        (false, ..) => {}
        (true, false, true) => {
            ordinary.insert((load.load(), id.clone()));
        }
        (true, false, false) => {
            ordinary.remove(&(load.load(), id.clone()));
        }
        (true, true, true) => {
            backups.insert((load.backup_load(), load.standby_leases, id.clone()));
        }
        (true, true, false) => {
            backups.remove(&(load.backup_load(), load.standby_leases, id.clone()));
        }
    }
}
