//! What leases ask of the pod's NICs, and the NICs in the order in which they are chosen.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::HostId;
use smol_str::SmolStr;

use super::alike::Alike;
use super::at_hosts::AtHosts;
use super::nic_order::{Order, Standing};
use super::nic_policy::promises;
use super::{Device, DeviceId, Filling, Kind, Lease, LeaseKind, State};

/// What a lease without a reservation counts for where loads are compared, in Mbit/s. It is promised nothing.
const BEST_EFFORT_MBPS: u64 = 100;
/// A Mbit/s in bytes per second.
pub(crate) const BYTES_PER_MBIT: u64 = 125_000;
/// Loads are fractions with this denominator.
const SCALE: u64 = 1 << 32;

/// All NICs with what leans on them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loads {
    nics: BTreeMap<DeviceId, NicLoad>,
    order: Order,
    at_hosts: AtHosts,
}

/// A NIC, and what leans on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NicLoad {
    /// Its speed.
    pub speed_mbps: u64,
    /// How much of that, or beyond it, may be reserved.
    pub capacity_mbps: u64,
    /// The largest packet without the Ethernet header.
    pub mtu: u16,
    /// The offloads that it can do.
    pub features: u64,
    /// Whether it is kept free for failover.
    pub backup: bool,
    /// The link aggregation group that it is in.
    pub lag: Option<String>,
    /// Whether it works.
    pub up: bool,
    /// Whether it can be given to somebody now: it works, is trusted, and is not to be empty.
    pub usable: bool,
    /// How many leases use it.
    pub leases: u32,
    /// How many may use it or have it as their backup.
    leases_max: u32,
    /// What they reserve.
    pub reserved_mbps: u64,
    /// What they are promised to send and to receive, in bytes per second.
    promised: [u64; 2],
    /// How many leases would move to it.
    pub standby_leases: u32,
    /// What they would bring, by the host whose failure would have them move.
    incoming_mbps: BTreeMap<HostId, u64>,
    /// The most of that.
    worst_incoming_mbps: u64,
}

impl NicLoad {
    /// The most that the failure of one host would bring.
    pub const fn worst_incoming_mbps(&self) -> u64 {
        self.worst_incoming_mbps
    }

    /// What can be reserved and would still be carried if any one host failed, were it not for what this host would bring.
    pub fn free_mbps(&self, without: Option<(HostId, u64)>) -> u64 {
        let incoming = match without {
            None => self.worst_incoming_mbps,
            Some((from, less)) => {
                let incoming = self.incoming_mbps.iter();
                let left =
                    incoming.map(|(host, mbps)| mbps.saturating_sub(if from == *host { less } else { 0 }));
                left.max().unwrap_or(0)
            }
        };
        let needed = self.reserved_mbps.saturating_add(incoming);
        self.capacity_mbps.saturating_sub(needed)
    }

    /// Whether it is fast enough for what its leases are promised and this besides, each way in bytes per second.
    pub fn can_promise(&self, wanted: [u64; 2]) -> bool {
        let most = self.capacity_mbps.saturating_mul(BYTES_PER_MBIT);
        // Who wants nothing promised can go anywhere.
        wanted
            .iter()
            .zip(self.promised)
            .all(|(wanted, others)| *wanted == 0 || others.saturating_add(*wanted) <= most)
    }

    /// Whether it can carry this now, and after the failure of any one host.
    pub fn has_room(&self, mbps: u64) -> bool {
        mbps == 0 || mbps <= self.free_mbps(None)
    }

    /// Whether it could carry this too if that host failed. So much of that counts for it already.
    pub fn has_spare(&self, mbps: u64, failing: HostId, counted: u64) -> bool {
        let incoming = self.incoming_mbps.get(&failing).copied().unwrap_or(0);
        let others = self.reserved_mbps.saturating_add(incoming).saturating_sub(counted);
        mbps == 0 || others.saturating_add(mbps) <= self.capacity_mbps
    }

    /// Whether it would carry everything that the failure of this host brings.
    pub fn carries_failure_of(&self, host: HostId) -> bool {
        let incoming = self.incoming_mbps.get(&host).copied().unwrap_or(0);
        self.reserved_mbps.saturating_add(incoming) <= self.capacity_mbps
    }

    /// Whether as many leases as may lean on it already.
    pub fn is_crowded(&self) -> bool {
        self.leases.saturating_add(self.standby_leases) >= self.leases_max
    }

    /// Whether it can be given to one more lease now.
    pub fn takes_more(&self) -> bool {
        self.usable && !self.is_crowded()
    }

    /// What one more lease would have to share.
    fn load(&self) -> u64 {
        // Each lease counts for what it reserves, or for a little.
        let asked = self.reserved_mbps.saturating_add(BEST_EFFORT_MBPS * (u64::from(self.leases) + 1));
        scaled(asked, self.speed_mbps)
    }

    /// The failure of a host would bring another amount than before.
    fn bring(&mut self, from: HostId, change: impl FnOnce(&mut u64)) {
        let incoming = self.incoming_mbps.entry(from).or_default();
        let before = *incoming;
        change(incoming);
        let now = *incoming;
        if now == 0 {
            self.incoming_mbps.remove(&from);
        }
        if now >= self.worst_incoming_mbps {
            self.worst_incoming_mbps = now;
        } else if before == self.worst_incoming_mbps {
            self.worst_incoming_mbps = self.incoming_mbps.values().copied().max().unwrap_or(0);
        }
    }

    fn rank(&self) -> Option<Standing> {
        if !self.takes_more() {
            return (self.up && !self.is_crowded()).then_some(Standing::Reluctant);
        }
        Some(if self.backup {
            Standing::Backup((self.backup_load(), self.standby_leases))
        } else {
            Standing::Ordinary((self.load(), 0))
        })
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
    pub fn loads(&self) -> Loads {
        let mut loads = Loads::default();
        for (id, device) in &self.devices {
            loads.nics.extend(self.nic_load(id, device).map(|nic| (id.clone(), nic)));
        }
        for lease in self.leases.values() {
            let group = loads.others_of_group(lease);
            for (nic, change) in changes(lease, &group) {
                if let Some(load) = loads.nics.get_mut(nic) {
                    change.apply(load, true);
                }
            }
        }
        for (id, load) in &loads.nics {
            loads.order.insert(id.clone(), load.rank());
            loads.at_hosts.change(id, None, Some(load.load()));
        }
        loads
    }

    /// What leases ask of some NICs, without an order among them.
    pub fn loads_of(&self, nics: &BTreeSet<DeviceId>) -> Loads {
        let load_of = |id| self.devices.get(id).and_then(|device| self.nic_load(id, device));
        let mut loads = Loads::default();
        loads.nics.extend(nics.iter().filter_map(|id| Some((id.clone(), load_of(id)?))));
        // What leans on one of a group may lean on each of it.
        let groups: BTreeSet<String> = loads.nics.values().filter_map(|nic| nic.lag.clone()).collect();
        if !groups.is_empty() {
            let all = self.devices.iter().filter_map(|(id, device)| Some((id, self.nic_load(id, device)?)));
            let of_groups = all.filter(|(_, nic)| nic.lag.as_ref().is_some_and(|lag| groups.contains(lag)));
            loads.nics.extend(of_groups.map(|(id, nic)| (id.clone(), nic)));
        }
        for lease in self.leases.values() {
            let group = loads.others_of_group(lease);
            for (nic, change) in changes(lease, &group) {
                if let Some(load) = loads.nics.get_mut(nic) {
                    change.apply(load, true);
                }
            }
        }
        loads
    }

    /// What leases ask of NICs, without looking at all of them if that is kept.
    pub(super) fn loads_now(&self) -> Cow<'_, Loads> {
        let is_followed =
            self.endpoints.is_followed() && self.devices.is_followed() && self.leases.is_followed();
        match self.found().filter(|_| is_followed) {
            Some(found) => Cow::Borrowed(&found.loads),
            None => Cow::Owned(self.loads()),
        }
    }

    /// A NIC on which nothing leans.
    pub(super) fn nic_load(&self, id: &DeviceId, device: &Device) -> Option<NicLoad> {
        let Kind::Nic { speed_mbps, mtu, features, backup, ref lag, .. } = device.kind else { return None };
        let percent = self.options.placement.nic_overcommit_percent;
        Some(NicLoad {
            speed_mbps,
            capacity_mbps: speed_mbps.saturating_mul(percent.into()) / 100,
            mtu,
            features,
            backup,
            lag: lag.clone(),
            up: self.is_up(id),
            usable: self.is_usable(id),
            leases_max: self.options.nic_leases_max,
            ..NicLoad::default()
        })
    }
}

/// Whether a lease leans on the same NICs, as much as before.
pub(super) fn leans_alike(old: Option<&Lease>, new: Option<&Lease>) -> bool {
    let leans = |lease: &'_ Lease| match &lease.kind {
        LeaseKind::Nic { reserved_mbps, policy, .. } => Some((*reserved_mbps, promises(policy))),
        LeaseKind::Disk { .. } => None,
    };
    old.and_then(leans) == new.and_then(leans)
        && old.and_then(Lease::active_nic) == new.and_then(Lease::active_nic)
        && old.and_then(Lease::standby_nic) == new.and_then(Lease::standby_nic)
}

impl Loads {
    /// A NIC is this now, with what leans on it as before; or there is none. Returns whether it was another one.
    pub(super) fn refresh(&mut self, id: &DeviceId, now: Option<NicLoad>) -> bool {
        let before = self.nics.remove(id);
        let stood = before.as_ref().and_then(NicLoad::rank);
        let load = before.as_ref().map(NicLoad::load);
        let Some(mut now) = now else {
            self.at_hosts.change(id, load, None);
            self.order.change(id, stood, None);
            return before.is_some();
        };
        if let Some(before) = &before {
            now.leases = before.leases;
            now.reserved_mbps = before.reserved_mbps;
            now.promised = before.promised;
            now.standby_leases = before.standby_leases;
            now.incoming_mbps.clone_from(&before.incoming_mbps);
            now.worst_incoming_mbps = before.worst_incoming_mbps;
        }
        let changed = before.as_ref() != Some(&now);
        self.order.change(id, stood, now.rank());
        self.at_hosts.change(id, load, Some(now.load()));
        self.nics.insert(id.clone(), now);
        changed
    }

    /// What leans on a NIC.
    pub fn get(&self, id: &DeviceId) -> Option<&NicLoad> {
        self.nics.get(id)
    }

    /// All NICs with what leans on them.
    pub fn nics(&self) -> impl Iterator<Item = (&DeviceId, &NicLoad)> {
        self.nics.iter()
    }

    /// The NICs of a host: the least loaded one first, or where they are packed, as [`Self::most_loaded`] has them and then the others.
    pub(super) fn of_host(
        &self,
        host: HostId,
        filling: Filling,
    ) -> impl Iterator<Item = (&DeviceId, &NicLoad)> {
        let mut nics: Vec<&(u64, SmolStr)> = self.at_hosts.get(host).iter().collect();
        if filling == Filling::Pack {
            nics.sort_by_key(|(load, name)| match *load {
                load @ ..=SCALE => (false, SCALE - load, name),
                load => (true, load, name),
            });
        }
        let id = move |name: &SmolStr| DeviceId { host, name: name.clone() };
        nics.into_iter().filter_map(move |(_, name)| self.nics.get_key_value(&id(name)))
    }

    /// The NICs that are not kept for failover, the least loaded one first.
    pub fn ordinary(&self) -> impl Iterator<Item = (&DeviceId, &NicLoad)> {
        self.order.ordinary.values().flat_map(Alike::iter).filter_map(|id| Some((id, self.nics.get(id)?)))
    }

    /// The NICs that are not kept for failover and have something to share yet, the most loaded one first. That what reserves nothing
    /// counts for a little keeps them from having more and more of it.
    pub(super) fn most_loaded(&self) -> impl Iterator<Item = (&DeviceId, &NicLoad)> {
        let shared = self.order.ordinary.range(..(SCALE + 1, 0)).rev();
        shared.flat_map(|(_, alike)| alike.iter()).filter_map(|id| Some((id, self.nics.get(id)?)))
    }

    /// The NICs that are kept for failover, the one that least leans on first.
    pub fn backups(&self) -> impl Iterator<Item = (&DeviceId, &NicLoad)> {
        self.order.backups.values().flat_map(Alike::iter).filter_map(|id| Some((id, self.nics.get(id)?)))
    }

    /// The NICs that work, and are to be empty or are not trusted: for who has nothing else.
    pub(super) fn reluctant(&self) -> impl Iterator<Item = (&DeviceId, &NicLoad)> {
        self.order.reluctant.iter().filter_map(|id| Some((id, self.nics.get(id)?)))
    }

    /// Of the ordinary NICs than which none is less loaded, those of these hosts.
    pub(super) fn least_loaded_of(&self, hosts: &[HostId]) -> impl Iterator<Item = (&DeviceId, &NicLoad)> {
        let alike = self.order.ordinary.values().next();
        alike.into_iter().flat_map(|alike| self.of_hosts(alike, hosts))
    }

    /// The backups of these hosts on which as much leans as on this one.
    pub(super) fn backups_like(
        &self,
        nic: &NicLoad,
        hosts: &[HostId],
    ) -> impl Iterator<Item = (&DeviceId, &NicLoad)> {
        let alike = match nic.rank() {
            Some(Standing::Backup(rank)) => self.order.backups.get(&rank),
            _ => None,
        };
        alike.into_iter().flat_map(|alike| self.of_hosts(alike, hosts))
    }

    /// Those of these hosts, which are in order.
    fn of_hosts<'a>(
        &'a self,
        alike: &'a Alike,
        hosts: &[HostId],
    ) -> impl Iterator<Item = (&'a DeviceId, &'a NicLoad)> {
        debug_assert!(hosts.is_sorted());
        hosts.iter().flat_map(|host| alike.of_host(*host)).filter_map(|id| Some((id, self.nics.get(id)?)))
    }

    /// A lease came.
    pub fn note(&mut self, lease: &Lease) {
        self.change(lease, true);
    }

    /// A lease goes, or is about to change. Returns whether there is a NIC for one more lease that was for none before, if only in need.
    pub fn forget(&mut self, lease: &Lease) -> bool {
        self.change(lease, false)
    }

    fn change(&mut self, lease: &Lease, comes: bool) -> bool {
        let mut opens = false;
        let group = self.others_of_group(lease);
        for (nic, change) in changes(lease, &group) {
            if let Some(load) = self.nics.get_mut(nic) {
                let (stood, before) = (load.rank(), load.load());
                change.apply(load, comes);
                opens |= stood.is_none() && load.rank().is_some();
                self.order.change(nic, stood, load.rank());
                self.at_hosts.change(nic, Some(before), Some(load.load()));
            }
        }
        opens
    }

    /// The other NICs of the group of a lease's active one.
    fn others_of_group(&self, lease: &Lease) -> Vec<DeviceId> {
        let Some(active) = lease.active_nic() else { return Vec::new() };
        let Some(lag) = self.get(active).and_then(|nic| nic.lag.as_ref()) else { return Vec::new() };
        let others = self.nics.iter().filter(|(id, nic)| *id != active && nic.lag.as_ref() == Some(lag));
        others.map(|(id, _)| id.clone()).collect()
    }

    /// Whether two NICs are in one link aggregation group.
    pub fn are_rails(&self, one: &DeviceId, other: &DeviceId) -> bool {
        let lag = |id| self.get(id).and_then(|nic| nic.lag.as_ref());
        one == other || lag(one).is_some() && lag(one) == lag(other)
    }
}

/// What a lease is to one of its NICs.
#[derive(Clone, Copy)]
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
                    load.bring(from, |incoming| sum(incoming, mbps));
                }
            }
        }
    }
}

/// What a lease is to its NICs. Each of a group may have to carry all of it, when the others fail.
fn changes<'a>(
    lease: &'a Lease,
    others_of_group: &'a [DeviceId],
) -> impl Iterator<Item = (&'a DeviceId, Change)> {
    let nic = match &lease.kind {
        LeaseKind::Nic { active, standby, reserved_mbps, policy, .. } => {
            let leans = Change::Active(*reserved_mbps, promises(policy));
            let would = Change::Standby(active.host, *reserved_mbps);
            let standby = standby.as_ref().map(|standby| (standby, would));
            let actives = [active].into_iter().chain(others_of_group).map(move |nic| (nic, leans));
            Some(actives.chain(standby))
        }
        LeaseKind::Disk { .. } => None,
    };
    nic.into_iter().flatten()
}
