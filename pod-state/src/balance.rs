//! NICs that carry more than they should: some of their leases move to NICs that carry less.
//!
//! What was measured comes in with the command, so that the same commands give the same moves.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::HostId;
use pod_api::EventKind;
use pod_protocol::ids::LeaseId;
use pod_protocol::objects::Priority;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::nic_policy::promises;
use super::sorted::Sorted;
use super::{DeviceId, Effect, Kind, Lease, LeaseKind, Loads, State};

/// What passes through NICs, and for leases, in Mbit/s of the direction in which it is more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// By NIC; those of which nothing is known are not among them.
    #[serde(with = "super::pairs")]
    pub nics: BTreeMap<DeviceId, u64>,
    /// By lease.
    #[serde(deserialize_with = "by_lease")]
    pub leases: BTreeMap<LeaseId, u64>,
}

/// Keys of JSON are text. Inside a command, which is read in whole before it is known which one it is, nothing turns them back into numbers.
fn by_lease<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<LeaseId, u64>, D::Error> {
    let read = BTreeMap::<String, u64>::deserialize(from)?.into_iter().map(|(key, mbps)| {
        let lease = key.parse().ok().and_then(LeaseId::new);
        Ok((lease.ok_or_else(|| D::Error::custom(format!("{key:?} is no lease's number")))?, mbps))
    });
    read.collect()
}

/// How far NICs are relieved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relief {
    /// A NIC that carries so much of its speed is overloaded, in percent.
    pub high_percent: u32,
    /// Until it carries no more than this, leases leave it; and no NIC carries more than this because of those that come.
    pub low_percent: u32,
    /// How many leases move at most.
    pub moves_max: u32,
}

/// When it is a lease's turn to leave a NIC that carries too much.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    /// It carries its part of what is too much, which the moves that are left share: those of the lowest priority first.
    Part(Priority, Relieved),
    /// Less than that: whoever carries most, so that nobody is moved in vain for having a low priority.
    Little(Reverse<u64>, Priority),
}

/// What is left of what is too much once a lease is gone.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Relieved {
    /// Nothing: the smallest that does it, in Mbit/s, burdens others least.
    Whole(u64),
    /// Some: the largest, so that few move.
    Some(Reverse<u64>),
}

/// A lease that is to move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Whose.
    pub lease: LeaseId,
    /// Which NIC it leaves.
    pub from: DeviceId,
    /// Where to.
    pub to: DeviceId,
    /// What it brings there, in Mbit/s.
    pub mbps: u64,
}

impl State {
    /// Which leases would leave these NICs, as far as they fit elsewhere. Those first that carry their part of what is too much, which the
    /// moves that are left share: the lowest priority, and of one priority the smallest that is enough, or else the largest. Then those that
    /// carry less, the largest first. None that is being moved, that rests, that has to be with others, or that carries next to nothing.
    pub fn plan_relief(
        &self,
        overloaded: &BTreeSet<DeviceId>,
        measured: &Measured,
        resting: &BTreeSet<LeaseId>,
        relief: Relief,
    ) -> Vec<Move> {
        let is_spent = |moves: &[Move]| moves.len() >= relief.moves_max as usize;
        if is_spent(&[]) {
            return Vec::new();
        }
        let mut loads = self.loads_now().into_owned();
        let mut carried = measured.nics.clone();
        let mut moves = Vec::new();
        let mut apart = BTreeSet::new();
        for from in overloaded {
            if is_spent(&moves) {
                break;
            }
            let Some(most) = loads.get(from).map(|nic| share(nic.speed_mbps, relief.low_percent)) else {
                continue;
            };
            let can_move = |lease: &&Lease| {
                lease.active_nic() == Some(from)
                    && !self.has_rails(lease)
                    && lease.draining_nic().is_none()
                    && !resting.contains(&lease.id)
                    && matches!(&lease.kind, LeaseKind::Nic { together: None, .. })
            };
            let rate = |lease: &Lease| measured.leases.get(&lease.id).copied().unwrap_or(0);
            let trifle = if self.decides_by_more() { most / 1000 } else { 0 };
            let mut leases: Vec<&Lease> = self.leases_near(from).filter(can_move).collect();
            leases.retain(|lease| rate(lease) > trifle);
            loop {
                let there = carried.get(from).copied().unwrap_or(0);
                let left = relief.moves_max as usize - moves.len();
                if there <= most || left == 0 {
                    break;
                }
                let turn = |lease: &Lease| self.turn_of(lease, rate(lease), there - most, left);
                let next = (0..leases.len()).min_by_key(|at| leases.get(*at).map(|it| (turn(it), it.id)));
                let Some(next) = next else { break };
                let lease = leases.swap_remove(next);
                let mbps = rate(lease);
                let Some(to) = self.relief_for(lease, mbps, (&loads, &carried, &apart), relief) else {
                    continue;
                };
                if let LeaseKind::Nic { apart: Some(group), .. } = &lease.kind {
                    apart.insert((group.clone(), to.host));
                }
                carried.insert(from.clone(), there.saturating_sub(mbps));
                *carried.entry(to.clone()).or_default() += mbps;
                // What it reserves goes with it.
                let mut after = lease.clone();
                if let LeaseKind::Nic { active, standby, .. } = &mut after.kind {
                    if self.proves_moves() {
                        *standby = self.standby_after(&loads, lease, &to).0;
                    }
                    active.clone_from(&to);
                }
                loads.forget(lease);
                loads.note(&after);
                moves.push(Move { lease: lease.id, from: from.clone(), to, mbps });
            }
        }
        moves
    }

    /// When a lease that carries so much leaves a NIC that carries so much too much, with so many moves left. Replicas of 1.0 go by
    /// priority alone, and of one priority the largest goes first.
    fn turn_of(&self, lease: &Lease, mbps: u64, too_much: u64, moves_left: usize) -> Turn {
        let priority = self.priority_of(lease);
        let share = too_much.div_ceil(moves_left.max(1) as u64);
        match self.decides_by_more() {
            false => Turn::Part(priority, Relieved::Some(Reverse(mbps))),
            true if mbps < share => Turn::Little(Reverse(mbps), priority),
            true if mbps < too_much => Turn::Part(priority, Relieved::Some(Reverse(mbps))),
            true => Turn::Part(priority, Relieved::Whole(mbps)),
        }
    }

    /// The leases that use a NIC, and maybe others.
    fn leases_near(&self, nic: &DeviceId) -> Box<dyn Iterator<Item = &Lease> + '_> {
        match self.found().filter(|_| self.leases.is_followed()) {
            Some(found) => {
                let known = found.on_nic.get(nic).into_iter().flat_map(Sorted::iter);
                Box::new(known.filter_map(|id| self.leases.get(id)))
            }
            None => Box::new(self.leases.values()),
        }
    }

    /// The NIC that would carry the least of its speed with this lease, and not too much.
    fn relief_for(
        &self,
        lease: &Lease,
        mbps: u64,
        (loads, carried, planned): (&Loads, &BTreeMap<DeviceId, u64>, &BTreeSet<(String, HostId)>),
        relief: Relief,
    ) -> Option<DeviceId> {
        let LeaseKind::Nic { active, mtu, apart, policy, .. } = &lease.kind else { return None };
        // One of its group is about to be there.
        let is_taken = |host: HostId| {
            let group = apart.clone().filter(|_| self.decides_by_more());
            group.is_some_and(|group| planned.contains(&(group, host)))
        };
        let fits = loads.ordinary().filter_map(|(id, nic)| {
            let with = carried.get(id)?.saturating_add(mbps);
            let apart = apart.as_deref();
            let good = id != active
                && nic.lag.is_none()
                && nic.mtu >= *mtu
                && with <= share(nic.speed_mbps, relief.low_percent)
                && loads.has_room_for(lease, id)
                && self.keeps_failover(loads, lease, id)
                && nic.can_promise(promises(policy))
                && (id.host == active.host || apart.is_none() || !self.serves_apart(id.host, apart))
                && !is_taken(id.host);
            good.then_some((with.saturating_mul(1 << 20) / nic.speed_mbps.max(1), id))
        });
        fits.min().map(|(_, id)| id.clone())
    }

    /// Moves leases off NICs.
    pub(super) fn relieve(
        &mut self,
        overloaded: &BTreeSet<DeviceId>,
        measured: &Measured,
        resting: &BTreeSet<LeaseId>,
        relief: Relief,
        effects: &mut Vec<Effect>,
    ) {
        for it in self.plan_relief(overloaded, measured, resting, relief) {
            self.follow();
            self.move_lease(it.lease, &it.to, EventKind::Balanced, effects);
        }
    }

    /// The speed of a NIC.
    pub fn speed_mbps(&self, id: &DeviceId) -> Option<u64> {
        match self.devices.get(id)?.kind {
            Kind::Nic { speed_mbps, .. } => Some(speed_mbps),
            Kind::Ssd { .. } => None,
        }
    }

    /// What is planned, in words.
    pub fn show_move(&self, it: &Move) -> String {
        let lease = self.leases.get(&it.lease);
        let instance = lease.and_then(|lease| self.instances.get(&lease.instance));
        format!(
            "{} of {} with {} Mbit/s to {}",
            lease.map_or("a device", |lease| &lease.device),
            instance.map_or("an instance", |instance| &instance.name),
            it.mbps,
            self.device_name(&it.to)
        )
    }
}

/// So much of a speed.
pub fn share(mbps: u64, percent: u32) -> u64 {
    mbps.saturating_mul(percent.into()) / 100
}
