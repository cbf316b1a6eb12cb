//! Which NIC a lease gets, and which one takes over.
//!
//! A reservation is accepted only where it holds: on a NIC with room for it, beside a backup on another host that could carry
//! it together with everything else that the failure of the first host would bring. Leases that reserve nothing are promised
//! nothing, and always find a place.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{EndpointId, HostId, Role};

use super::loads::{Loads, NicLoad};
use super::nic_policy::promises;
use super::standby::StandbyWish;
use super::{DeviceId, Filling, Lease, LeaseKind, NicWish, Refusal, RefusalKind, State};

/// The smallest MTU that IPv4 allows.
pub(super) const MTU_MIN: u16 = 68;

/// Where a lease is put.
#[derive(Debug)]
pub(super) struct NicPlace {
    pub(super) active: DeviceId,
    pub(super) standby: Option<DeviceId>,
}

/// Why NICs were passed over.
#[derive(Debug, Default)]
struct Passed {
    apart: bool,
    /// Too few NICs of its group work, or it is in none.
    few_rails: bool,
    /// The most that one of them has left.
    full: Option<(u64, DeviceId)>,
    /// One with room, but without a backup.
    no_spare: Option<DeviceId>,
}

impl State {
    /// The NIC for a new lease, and its backup: not one that is kept for failover if there is another; one that is near what
    /// it wants to be near; one of the instance's own host; where NICs are packed the most loaded one; else the least loaded
    /// one, among equals one whose backend the host has a channel to, for each channel takes memory, and is looked at by both
    /// sides again and again.
    pub(super) fn place_nic(&self, loads: &Loads, host: HostId, wish: &NicWish) -> Result<NicPlace, Refusal> {
        let apart = self.hosts_apart(wish.apart.as_deref());
        let group = wish.together.as_deref();
        let near = group.map_or_else(BTreeSet::new, |group| {
            self.hosts_serving(group, |_, together| together == Some(group))
        });
        let filling = self.nic_filling();
        let own = || near.iter().copied().chain([host]).flat_map(|host| loads.of_host(host, filling));
        let known = self.backends_known_to(host);
        let known = &known[..];
        let packed = || (filling == Filling::Pack).then(|| loads.most_loaded()).into_iter().flatten();
        let others = || packed().chain(loads.least_loaded_of(known)).chain(loads.ordinary());
        let ordinary = || own().filter(|(_, nic)| !nic.backup).chain(others());
        let all = || ordinary().chain(own().filter(|(_, nic)| nic.backup)).chain(loads.backups());
        // Who does not ask for several NICs gets one that stands alone, if there is one.
        let wanted = wish.rails.map_or(1, usize::from);
        let alone_first = all().filter(|(_, nic)| wanted < 2 && nic.lag.is_none());
        let candidates = alone_first.chain(all().filter(|(_, nic)| nic.lag.is_some() || wanted >= 2));
        let mut passed = Passed::default();
        // What a backup is asked for depends on the host only: it is not looked for again.
        let mut alone: BTreeSet<HostId> = BTreeSet::new();
        for (id, nic) in candidates {
            if !nic.takes_more() || wish.mtu.is_some_and(|mtu| mtu > nic.mtu) {
                continue;
            }
            // Most stand alone: then they are compared as they are.
            let rails = if nic.lag.is_some() { self.rails_of(id) } else { Vec::new() };
            let rails = if rails.is_empty() { std::slice::from_ref(id) } else { &rails[..] };
            let works = |id: &&DeviceId| loads.get(id).is_some_and(|nic| nic.usable);
            if wanted >= 2 && rails.iter().filter(works).count() < wanted {
                passed.few_rails = true;
                continue;
            }
            if rails.iter().any(|rail| apart.contains(&rail.host)) {
                passed.apart = true;
                continue;
            }
            let has_room = |rail: &DeviceId| {
                loads.get(rail).is_some_and(|nic| {
                    !nic.is_crowded()
                        && nic.has_room(wish.reserved_mbps)
                        && nic.can_promise(promises(&wish.policy))
                        && wish.mtu.is_none_or(|mtu| mtu <= nic.mtu)
                })
            };
            if !rails.iter().all(has_room) {
                passed.full = passed.full.max(Some((nic.free_mbps(None), id.clone())));
                continue;
            }
            if alone.contains(&id.host) {
                continue;
            }
            let mtu = wish.mtu.unwrap_or(MTU_MIN);
            let for_it =
                StandbyWish { mtu, features: nic.features, reserved_mbps: wish.reserved_mbps, of: None };
            let (standby, proven) = match loads.place_standby((id, known), &for_it) {
                Some((standby, proven)) => (Some(standby), proven),
                None => (None, false),
            };
            if wish.reserved_mbps > 0 && self.options.placement.prove_failover && !proven {
                // A backup serves others on its host, but not itself.
                if !nic.backup {
                    alone.insert(id.host);
                }
                passed.no_spare.get_or_insert_with(|| id.clone());
                continue;
            }
            return Ok(NicPlace { active: id.clone(), standby });
        }
        Err(self.no_place(loads, wish, &passed))
    }

    /// The hosts to whose network backends one's frontend has channels.
    pub(super) fn backends_known_to(&self, host: HostId) -> Vec<HostId> {
        let frontend = EndpointId::new(host, Role::NetFrontend);
        if let Some(found) = self.found().filter(|_| self.channels.is_followed()) {
            let backends = found.channels.get(&frontend).into_iter().flat_map(BTreeMap::keys);
            return backends.map(|backend| backend.host).collect();
        }
        let its = self.channels.values().filter(|channel| channel.frontend == frontend);
        let hosts: BTreeSet<HostId> = its.map(|channel| channel.backend.host).collect();
        hosts.into_iter().collect()
    }

    fn no_place(&self, loads: &Loads, wish: &NicWish, passed: &Passed) -> Refusal {
        let mbps = wish.reserved_mbps;
        if let Some(nic) = &passed.no_spare {
            return Refusal::new(
                RefusalKind::NoRoom,
                format!(
                    "{} has {mbps} Mbit/s to give, but no backup NIC of another host could carry them too if {} failed: \
                     reserve less, add a NIC with `backup = true`, or allow it with `prove-failover = false`",
                    self.device_name(nic),
                    self.host_name(nic.host)
                ),
            );
        }
        if let Some((free, nic)) = &passed.full {
            let minimum =
                if promises(&wish.policy) == [0, 0] { "" } else { " and can promise what is wanted" };
            return Refusal::new(
                RefusalKind::NoRoom,
                format!(
                    "no NIC has {mbps} Mbit/s left{minimum}, {} has most with {free}: reserve less, add a NIC, or raise \
                     `nic-overcommit-percent`",
                    self.device_name(nic)
                ),
            );
        }
        if passed.few_rails {
            return Refusal::new(
                RefusalKind::NoDevice,
                format!(
                    "no link aggregation group has {} NICs of different hosts that work: give their NICs the same `lag`, look at them \
                     with `podctl devices list`, or ask for fewer rails",
                    wish.rails.unwrap_or(1)
                ),
            );
        }
        if passed.apart {
            return Refusal::new(
                RefusalKind::NoDevice,
                format!(
                    "every host with a NIC that would do serves the group {} already: add a NIC on another host, or leave \
                     `apart` out",
                    wish.apart.as_deref().unwrap_or_default()
                ),
            );
        }
        if let Some(nic) = loads.crowded() {
            let detail = format!(
                "{} instances use {} or have it as their backup, which is as many as can, and there is no other NIC that would \
                 do: add a NIC",
                self.options.nic_leases_max,
                self.device_name(nic)
            );
            return Refusal::new(RefusalKind::NoRoom, detail);
        }
        let mtu = wish.mtu.map_or_else(String::new, |mtu| format!(" that can carry an MTU of {mtu}"));
        Refusal::new(
            RefusalKind::NoDevice,
            format!("there is no NIC with a link{mtu}: look at the NICs with `podctl devices list`"),
        )
    }

    /// The hosts whose NICs serve leases that are to be apart from others of this group.
    fn hosts_apart(&self, group: Option<&str>) -> BTreeSet<HostId> {
        group.map_or_else(BTreeSet::new, |group| self.hosts_serving(group, |apart, _| apart == Some(group)))
    }

    /// Whether NICs of a host serve leases of a group that is to be apart.
    pub fn serves_apart(&self, host: HostId, group: Option<&str>) -> bool {
        self.hosts_apart(group).contains(&host)
    }

    /// Whether a lease that moves there is still apart from others of its group.
    pub(super) fn stays_apart(&self, lease: &Lease, to: &DeviceId) -> bool {
        let LeaseKind::Nic { active, apart, .. } = &lease.kind else { return true };
        to.host == active.host || apart.is_none() || !self.serves_apart(to.host, apart.as_deref())
    }

    fn hosts_serving(
        &self,
        group: &str,
        belongs: impl Fn(Option<&str>, Option<&str>) -> bool,
    ) -> BTreeSet<HostId> {
        let serving = self.leases_of_group(group).into_iter().filter_map(|lease| match &lease.kind {
            LeaseKind::Nic { active, apart, together, .. } => {
                belongs(apart.as_deref(), together.as_deref()).then(|| self.rails_of(active))
            }
            LeaseKind::Disk { .. } => None,
        });
        serving.flatten().map(|nic| nic.host).collect()
    }

    /// The NIC that a lease moves to if nobody says which: one that can give what the lease is promised, an ordinary one before a
    /// backup, the least loaded one. In order, only
    /// where what it reserves holds, also when the host there fails; in need, anywhere, but where there is room for it first; and where
    /// nothing else works, on one that is to be empty or is not trusted, which it leaves as soon as there is another.
    pub(super) fn place_move(&self, loads: &Loads, lease: &Lease, in_order: bool) -> Option<DeviceId> {
        let LeaseKind::Nic { active, standby, mtu, apart, policy, .. } = &lease.kind else { return None };
        let apart = self.hosts_apart(apart.as_deref());
        let mut best: Option<([bool; 4], &DeviceId)> = None;
        // Of those that are better than none, its own backup is as good as any.
        let has_one =
            standby.as_ref().and_then(|id| loads.get(id)).is_some_and(|nic| nic.up && *mtu <= nic.mtu);
        let in_need = !in_order && !has_one && self.decides_by_more();
        let reluctant = in_need.then(|| loads.reluctant()).into_iter().flatten();
        // However many lean on its own backup: it is one of them.
        let backup = standby.as_ref().and_then(|id| Some((id, loads.get(id)?)));
        let backup = backup.filter(|(_, nic)| nic.usable && nic.is_crowded());
        for (id, nic) in loads.ordinary().chain(loads.backups()).chain(backup).chain(reluctant) {
            let has_room = loads.has_room_for(lease, id);
            // Nothing is moved in order to a group or from one; and no NIC of its own group takes over from the others.
            if loads.are_rails(id, active) || in_order && nic.lag.is_some() {
                continue;
            }
            if nic.mtu < *mtu || (in_order && !has_room) {
                continue;
            }
            let close = apart.contains(&id.host) && id.host != active.host;
            if in_order && close {
                continue;
            }
            let breaks = !has_room || close || !nic.can_promise(promises(policy));
            let rank = [!nic.usable, breaks, nic.backup, standby.as_ref() == Some(id)];
            if in_order && !self.keeps_failover(loads, lease, id) {
                continue;
            }
            if best.as_ref().is_none_or(|(known, _)| rank < *known) {
                best = Some((rank, id));
            }
            if rank == [false; 4] {
                break;
            }
        }
        best.map(|(_, id)| id.clone())
    }
}

impl Loads {
    /// Whether a lease can move to a NIC, and what it and others reserve still holds there.
    pub(super) fn has_room_for(&self, lease: &Lease, id: &DeviceId) -> bool {
        let LeaseKind::Nic { active, standby, reserved_mbps, .. } = &lease.kind else { return false };
        // What it would bring as its own backup it brings now.
        let coming = (standby.as_ref() == Some(id)).then_some((active.host, *reserved_mbps));
        let holds = |nic: &NicLoad| *reserved_mbps <= nic.free_mbps(coming) || *reserved_mbps == 0;
        self.get(id).is_some_and(holds) && self.may_lean(lease, id)
    }

    /// Whether a lease leans on a NIC, or may begin to.
    pub(super) fn may_lean(&self, lease: &Lease, id: &DeviceId) -> bool {
        let leans = lease.active_nic() == Some(id) || lease.standby_nic() == Some(id);
        leans || self.get(id).is_none_or(|nic| !nic.is_crowded())
    }

    /// Any NIC that works and on which too many lean for one more.
    fn crowded(&self) -> Option<&DeviceId> {
        let mut nics = self.nics();
        nics.find(|(_, nic)| nic.usable && nic.is_crowded()).map(|(id, _)| id)
    }

    /// Whether what a lease reserves is sure to be carried when the host of its NIC fails.
    pub fn is_failover_proven(&self, lease: &Lease) -> bool {
        let LeaseKind::Nic { active, standby: Some(standby), reserved_mbps, .. } = &lease.kind else {
            return false;
        };
        // The lease itself is among what would come.
        let carries = self.get(standby).is_some_and(|nic| nic.usable && nic.carries_failure_of(active.host));
        *reserved_mbps == 0 || (standby.host != active.host && carries)
    }
}
