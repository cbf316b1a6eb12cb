//! What holds of the moves by which devices are relieved: no more of them than the policy allows, no lease or volume twice in a short
//! time, only off devices that were measured to carry much and only to ones that still carry little, and an end once guests go on as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cxl_pool::HostId;
use pod_api::{Event, EventKind};
use pod_protocol::ids::{LeaseId, VolumeId};
use pod_state::{Command, Device, DeviceId, Measured, Rates, Relief, State, VolumeRelief, share};

use super::physical::Physical;
use crate::balance::{BalanceMode, BalancePolicy, ReliefPolicy};

/// Clocks that remember moves are read in ms.
const READ_IN_MS: u64 = 2;
/// Nothing has moved for so long when all is at rest.
const QUIET_MS: u64 = 5000;
/// How often at most somebody moves once guests go on as they are: what was measured before may still be wrong.
const AGAIN_MAX: usize = 3;

/// What simulated controllers do about loads. Rates are taken over more time than what tells them is late by.
pub(crate) fn policy() -> BalancePolicy {
    let relief = Relief { high_percent: 80, low_percent: 60, moves_max: 4 };
    let rest = Duration::from_secs(2);
    let nics = ReliefPolicy { mode: BalanceMode::Move, relief, windows: 2, rest, period: rest };
    let ssds = ReliefPolicy { relief: Relief { moves_max: 3, ..relief }, ..nics };
    BalancePolicy { window: Duration::from_secs(1), nics, ssds, volume_bytes_max: 256 << 30 }
}

/// Who moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Lease(LeaseId),
    Volume(VolumeId),
}

/// A move that was committed.
#[derive(Clone, Debug)]
struct Moved {
    at_ms: u64,
    of_nic: bool,
    /// Nobody, if it is gone by then.
    who: Option<Who>,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Moves {
    moved: Vec<Moved>,
    /// What was told of it, as a journal keeps it.
    pub(super) told: Vec<Event>,
    /// How often leases moved, and volumes.
    pub(crate) count: [u64; 2],
}

impl Moves {
    /// These commands were committed and kept, this was told of them, and it led to this state.
    pub(crate) fn note<'a>(
        &mut self,
        commands: impl Iterator<Item = &'a Command>,
        told: Vec<Event>,
        state: &State,
    ) -> Result<(), String> {
        let mut leases: Vec<(Option<Who>, DeviceId, DeviceId)> = Vec::new();
        for event in told.into_iter().filter(|event| event.kind == EventKind::Balanced) {
            let (what, from, to) = read(&event.message)?;
            let of_nic = from.name.starts_with("nic");
            let who = if of_nic {
                let instance = state.instance_named(&event.subject);
                let mut nics = instance.into_iter().flat_map(|it| &it.nics);
                let is_it = |id: &&LeaseId| state.leases.get(id).is_some_and(|lease| lease.device == what);
                nics.find(is_it).map(|lease| Who::Lease(*lease))
            } else {
                state.volume_named(&what).map(|volume| Who::Volume(volume.id))
            };
            if of_nic {
                leases.push((who, from, to));
            }
            self.allow(Moved { at_ms: event.time_ms, of_nic, who }, &event.message)?;
            self.told.push(event);
        }
        for command in commands {
            if let Command::Relieve { nics, measured, relief, .. } = command {
                follows(state, (nics, measured, *relief), &leases)?;
            }
        }
        Ok(())
    }

    fn allow(&mut self, it: Moved, message: &str) -> Result<(), String> {
        let at_ms = it.at_ms;
        let BalancePolicy { nics, ssds, .. } = policy();
        let policy = if it.of_nic { nics } else { ssds };
        let within = |time: Duration| {
            let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX) - READ_IN_MS;
            self.moved.iter().filter(move |old| at_ms.saturating_sub(old.at_ms) < ms)
        };
        let rests = it.who.is_some() && within(policy.rest).any(|old| old.who == it.who);
        if rests {
            return Err(format!("{message} although it moved just before"));
        }
        let used = within(policy.period).filter(|old| old.of_nic == it.of_nic).count();
        if used >= policy.relief.moves_max as usize {
            return Err(format!("{message} although {used} have moved just before"));
        }
        self.count[usize::from(!it.of_nic)] += 1;
        self.moved.push(it);
        Ok(())
    }

    /// Why there is more to come, once guests go on as they are.
    pub(crate) fn restless(&self, state: &State, physical: &Physical) -> Option<String> {
        let settled_ms = physical.loads.as_ref()?.settled_ms()?;
        let since = self.moved.iter().filter(|it| it.at_ms > settled_ms);
        let mut often: BTreeMap<Who, usize> = BTreeMap::new();
        for who in since.filter_map(|it| it.who) {
            let times = often.entry(who).or_default();
            *times += 1;
            if *times > AGAIN_MAX {
                return Some(format!("{who:?} moves to and fro"));
            }
        }
        if let Some(last) = self.moved.last().filter(|it| physical.now_us / 1000 - it.at_ms < QUIET_MS) {
            return Some(format!("{last:?} was not long ago"));
        }
        let BalancePolicy { nics, ssds, volume_bytes_max, .. } = policy();
        let (on_nics, on_ssds) = physical.true_loads();
        let speed = |nic: &DeviceId| state.speed_mbps(nic);
        let too_much = |(nic, mbps): &(&DeviceId, &u64)| {
            speed(nic).is_some_and(|speed| **mbps >= share(speed, nics.relief.high_percent).max(1))
        };
        let overloaded: BTreeSet<DeviceId> =
            on_nics.nics.iter().filter(too_much).map(|(nic, _)| nic.clone()).collect();
        let plan = state.plan_relief(&overloaded, &on_nics, &BTreeSet::new(), nics.relief);
        if let Some(first) = plan.first() {
            return Some(format!(
                "{} carries too much, and nobody moves {}",
                state.device_name(&first.from),
                state.show_move(first)
            ));
        }
        let does_too_much = |ssd: &DeviceId, does: Rates| {
            let can_do = state.devices.get(ssd).map(Device::can_do);
            can_do.is_some_and(|can_do| can_do.part(ssds.relief.high_percent).is_used_up(does))
        };
        let overloaded = on_ssds.ssds.iter().filter(|(ssd, does)| does_too_much(ssd, **does));
        // What is copied or wiped there has to end first.
        let overloaded: BTreeSet<DeviceId> =
            overloaded.map(|(ssd, _)| ssd.clone()).filter(|ssd| !state.is_copying(ssd)).collect();
        let limits = VolumeRelief { relief: ssds.relief, bytes_max: volume_bytes_max };
        let plan = state.plan_volume_moves(&overloaded, &on_ssds, &BTreeSet::new(), limits);
        let first = plan.first()?;
        Some(format!(
            "{} does too much, and nobody moves {}",
            state.device_name(&first.from),
            state.show_volume_move(first)
        ))
    }
}

/// What moved, and from where to where.
fn read(message: &str) -> Result<(String, DeviceId, DeviceId), String> {
    let parts = message.split_once(" moves from ").and_then(|(what, way)| {
        let (from, to) = way.split_once(" to ")?;
        Some((what.to_owned(), device(from)?, device(to)?))
    });
    parts.ok_or_else(|| format!("{message:?} says of nobody what moved"))
}

/// As `h2/nic0`.
fn device(name: &str) -> Option<DeviceId> {
    let (host, name) = name.split_once('/')?;
    let host = host.strip_prefix('h')?.parse().ok()?;
    Some(DeviceId { host: HostId::new(host), name: name.into() })
}

/// Whether leases moved as what was measured has it.
fn follows(
    state: &State,
    (nics, measured, relief): (&BTreeSet<DeviceId>, &Measured, Relief),
    moved: &[(Option<Who>, DeviceId, DeviceId)],
) -> Result<(), String> {
    let low = |nic: &DeviceId| state.speed_mbps(nic).map(|speed| share(speed, relief.low_percent));
    let mut rates: BTreeMap<&DeviceId, u64> = measured.nics.iter().map(|(nic, mbps)| (nic, *mbps)).collect();
    for nic in nics {
        let carries = measured.nics.get(nic).copied().unwrap_or(0);
        if low(nic).is_some_and(|low| carries <= low) {
            return Err(format!("{nic:?} is relieved, and carries {carries} Mbit/s"));
        }
    }
    for (who, from, to) in moved {
        if !nics.contains(from) {
            return Err(format!("{who:?} leaves {from:?}, which does not carry too much"));
        }
        let mbps = match who {
            Some(Who::Lease(lease)) => measured.leases.get(lease).copied().unwrap_or(0),
            _ => 0,
        };
        if let Some(there) = rates.get_mut(from) {
            *there = there.saturating_sub(mbps);
        }
        *rates.entry(to).or_default() += mbps;
    }
    for (who, _, to) in moved {
        let carries = rates.get(to).copied().unwrap_or(0);
        if low(to).is_some_and(|low| carries > low) {
            return Err(format!("{who:?} comes to {to:?}, which carries {carries} Mbit/s then"));
        }
    }
    Ok(())
}
