//! Leases that move between NICs that work, and NICs that are not trusted for a while.

use std::collections::BTreeSet;

use pod_api::EventKind;
use pod_protocol::ids::{LeaseGeneration, LeaseId};
use pod_protocol::reports::DeviceReport;
use serde::{Deserialize, Serialize};

use super::{Device, DeviceId, Effect, Health, Kind, Lease, LeaseKind, Refusal, RefusalKind, State};

/// A NIC that a lease has left, and from which it still receives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Draining {
    /// The NIC.
    pub nic: DeviceId,
    /// With which generation the lease used it: what was sent before is still accepted.
    pub generation: LeaseGeneration,
}

impl State {
    /// Moves a device of an instance to another NIC, both of which work: nothing is lost.
    pub(super) fn migrate(
        &mut self,
        instance: &str,
        device: &str,
        to: Option<&DeviceId>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let known = self.instance_named(instance).ok_or_else(|| Refusal::not_found("instance", instance))?;
        let id =
            known.nics.iter().copied().find(|id| self.leases.get(id).is_some_and(|it| it.device == device));
        let Some((id, lease)) = id.and_then(|id| Some((id, self.leases.get(&id)?))) else {
            return Err(Refusal::not_found("NIC of that instance", device));
        };
        let LeaseKind::Nic { active, mtu, draining, reserved_mbps, .. } = &lease.kind else {
            return Err(Refusal::not_found("NIC of that instance", device));
        };
        if draining.is_some() {
            let detail = format!("{device} of {instance} is still being moved: try again in a few seconds");
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        if self.has_rails(lease) {
            let active = self.device_name(active);
            let detail = format!(
                "{device} of {instance} uses all NICs of a link aggregation group, and goes on when one of them goes: nothing has to \
                 be moved. `podctl devices drain {active}` empties one of them"
            );
            return Err(Refusal::new(RefusalKind::InvalidValue, detail));
        }
        let to = match to {
            Some(to) => to.clone(),
            None => self.place_move(&self.loads_now(), lease, true).ok_or_else(|| {
                let detail = format!(
                    "there is no other NIC with a link, and with room for what {device} reserves, that it could move to, or no backup \
                     could take that over there"
                );
                Refusal::new(RefusalKind::NoDevice, detail)
            })?,
        };
        let name = self.device_name(&to);
        if self.decides_by_more() && !self.stays_apart(lease, &to) {
            let detail = format!(
                "{} serves another device of the group that {device} of {instance} is to be apart from: choose a NIC of another host, or none",
                self.host_name(to.host)
            );
            return Err(Refusal::new(RefusalKind::NoDevice, detail));
        }
        if to == *active {
            let detail = format!("{device} of {instance} is on {name} already");
            return Err(Refusal::new(RefusalKind::InvalidValue, detail));
        }
        let Some(Kind::Nic { mtu: nic_mtu, .. }) = self.devices.get(&to).map(|it| &it.kind) else {
            return Err(Refusal::not_found("NIC", &name));
        };
        if nic_mtu < mtu {
            let detail = format!("{name} has an MTU of {nic_mtu}, and {device} of {instance} needs {mtu}");
            return Err(Refusal::new(RefusalKind::InvalidValue, detail));
        }
        if !self.is_up(&to) {
            let detail = format!("{name} does not work now: choose another NIC, or none");
            return Err(Refusal::new(RefusalKind::NoDevice, detail));
        }
        if !self.loads_now().has_room_for(lease, &to) {
            let why = if self.loads_now().may_lean(lease, &to) {
                format!("has no room for the {reserved_mbps} Mbit/s that {device} of {instance} reserves")
            } else {
                "is used by as many instances as it can be, or is their backup".to_owned()
            };
            let detail = format!("{name} {why}: choose another NIC, or none");
            return Err(Refusal::new(RefusalKind::NoRoom, detail));
        }
        if !self.keeps_failover(&self.loads_now(), lease, &to) {
            let detail = format!(
                "{name} has room for the {reserved_mbps} Mbit/s that {device} of {instance} reserves, but no backup NIC of another host \
                 could carry them too if {} failed: choose another NIC, or none, add a NIC with `backup = true`, or allow it with \
                 `prove-failover = false`",
                self.host_name(to.host)
            );
            return Err(Refusal::new(RefusalKind::NoRoom, detail));
        }
        self.move_lease(id, &to, EventKind::Migrated, effects);
        Ok(())
    }

    /// Brings home every lease that belongs on a NIC and has moved away.
    pub(super) fn fail_back(&mut self, home: &DeviceId, effects: &mut Vec<Effect>) -> Result<(), Refusal> {
        if !self.devices.get(home).is_some_and(Device::is_nic) {
            return Err(Refusal::not_found("NIC", &self.device_name(home)));
        }
        if !self.is_usable(home) {
            let detail = format!(
                "{} does not work, or is held since its link flapped: look at it with `podctl devices get`",
                self.device_name(home)
            );
            return Err(Refusal::new(RefusalKind::NoDevice, detail));
        }
        let away: Vec<LeaseId> = self.away_from(home).collect();
        for id in away {
            self.follow();
            let may = |lease: &Lease| {
                let loads = self.loads_now();
                // What it reserves there may be others' by now.
                if self.proves_moves() {
                    loads.has_room_for(lease, home)
                        && (!self.decides_by_more() || self.stays_apart(lease, home))
                } else {
                    loads.may_lean(lease, home)
                }
            };
            if self.leases.get(&id).is_some_and(may) {
                self.move_lease(id, home, EventKind::FailedBack, effects);
            }
        }
        Ok(())
    }

    /// Leases that belong on a NIC and are on another one. Those that [`Command::FailBack`](super::Command::FailBack) leaves there are
    /// being moved, or find no room at home, or another one of their group.
    pub fn that_stay_away(&self, home: &DeviceId) -> impl Iterator<Item = &Lease> {
        let away = self.leases_among(|found| &found.away).into_iter();
        away.filter(move |lease| match &lease.kind {
            LeaseKind::Nic { active, home: belongs, .. } if !self.has_rails(lease) => {
                belongs.as_ref() == Some(home) && active != home
            }
            _ => false,
        })
    }

    /// Leases whose first NIC this is, that are on another one which works, and that are not being moved.
    fn away_from(&self, home: &DeviceId) -> impl Iterator<Item = LeaseId> {
        let away = self.leases_among(|found| &found.away).into_iter();
        away.filter(move |lease| self.missed_home(lease) == Some(home)).map(|lease| lease.id)
    }

    /// The NIC that a lease could go back to, were it not for what that NIC is now.
    fn missed_home<'a>(&self, lease: &'a Lease) -> Option<&'a DeviceId> {
        // One that uses several NICs is nowhere else: if its home is among them, it is there.
        match &lease.kind {
            LeaseKind::Nic { active, home, draining: None, .. } if !self.has_rails(lease) => {
                home.as_ref().filter(|home| *home != active)
            }
            _ => None,
        }
    }

    /// NICs that leases could go back to.
    pub fn missed_homes(&self) -> impl Iterator<Item = &DeviceId> {
        let away = self.leases_among(|found| &found.away).into_iter();
        let missed: BTreeSet<&DeviceId> = away.filter_map(|lease| self.missed_home(lease)).collect();
        missed.into_iter().filter(|id| self.devices.get(id).is_some_and(Device::is_nic) && self.is_usable(id))
    }

    /// Leases that are being moved, with the generation that they had before.
    pub fn drains(&self) -> impl Iterator<Item = (LeaseId, LeaseGeneration)> {
        let moving = self.leases_among(|found| &found.draining).into_iter();
        moving.filter_map(|lease| Some((lease.id, lease.draining()?.generation)))
    }

    pub(super) fn move_lease(
        &mut self,
        id: LeaseId,
        to: &DeviceId,
        kind: EventKind,
        effects: &mut Vec<Effect>,
    ) {
        let chosen = self.leases.get(&id).filter(|_| self.proves_moves());
        let chosen = chosen.map(|lease| self.standby_after(&self.loads_now(), lease, to).0);
        let Some(lease) = self.leases.get_mut(&id) else { return };
        let before = lease.generation;
        let LeaseKind::Nic { active, standby, draining, home, .. } = &mut lease.kind else { return };
        let from = std::mem::replace(active, to.clone());
        match chosen {
            Some(chosen) => *standby = chosen,
            None if standby.as_ref() == Some(to) => *standby = Some(from.clone()),
            None => {}
        }
        if matches!(kind, EventKind::Migrated | EventKind::Balanced) {
            // Where somebody put it is where it belongs; and where there was too much, it does not go back by itself.
            *home = Some(to.clone());
        }
        *draining = Some(Draining { nic: from.clone(), generation: before });
        lease.generation = before.next();
        let device = lease.device.clone();
        let instance = self.instances.get(&lease.instance).map_or_else(String::new, |it| it.name.clone());
        let message = format!("{device} moves from {} to {}", self.device_name(&from), self.device_name(to));
        effects.push(Effect::event(kind, instance, message));
    }

    /// The time is over in which a lease still receives from the NIC that it has left.
    pub(super) fn drain_expired(&mut self, id: LeaseId, before: LeaseGeneration) {
        if let Some(LeaseKind::Nic { draining, .. }) = self.leases.get_mut(&id).map(|lease| &mut lease.kind)
            && draining.as_ref().is_some_and(|it| it.generation == before)
        {
            *draining = None;
        }
    }

    /// A NIC that does not work any more cannot drain: what it has not sent goes through the other one now.
    pub(super) fn end_lost_drains(&mut self) {
        let lost: Vec<LeaseId> = self
            .touched()
            .filter(|lease| lease.draining_nic().is_some_and(|nic| self.is_lost(nic)))
            .map(|lease| lease.id)
            .collect();
        for id in lost {
            if let Some(LeaseKind::Nic { draining, .. }) =
                self.leases.get_mut(&id).map(|lease| &mut lease.kind)
            {
                *draining = None;
            }
        }
    }

    /// A link that comes and goes too often is not trusted for a while.
    pub(super) fn hold(&mut self, id: &DeviceId, reason: &str, effects: &mut Vec<Effect>) {
        let subject = self.device_name(id);
        if let Some(device) =
            self.devices.get_mut(id).filter(|device| device.is_nic() && device.held.is_none())
        {
            device.held = Some(reason.to_owned());
            effects.push(Effect::event(EventKind::LinkHeld, subject, reason));
        }
    }

    /// It is trusted again.
    pub(super) fn release(&mut self, id: &DeviceId, reason: &str, effects: &mut Vec<Effect>) {
        let subject = self.device_name(id);
        if let Some(device) = self.devices.get_mut(id)
            && device.held.take().is_some()
        {
            effects.push(Effect::event(EventKind::LinkReleased, subject, reason));
        }
    }

    /// NICs that are not trusted now.
    pub fn held(&self) -> impl Iterator<Item = &DeviceId> {
        self.devices.iter().filter(|(_, device)| device.held.is_some()).map(|(id, _)| id)
    }

    /// A device that had failed works again, and may have become another one.
    pub(super) fn device_back(&mut self, id: &DeviceId, report: &DeviceReport, effects: &mut Vec<Effect>) {
        let subject = self.device_name(id);
        if let DeviceReport::Ssd { .. } = report {
            // It is the same one as before: it had not answered for long, and has now.
            let ssd = self.devices.get_mut(id).filter(|device| !device.is_nic());
            if let Some(device) = ssd.filter(|device| matches!(device.health, Health::Failed(_))) {
                device.health = Health::Up;
                effects.push(Effect::event(EventKind::DeviceBack, subject, "it answers again"));
            }
            return;
        }
        let DeviceReport::Nic {
            driver: now,
            mac: address,
            up,
            speed_mbps: speed,
            mtu: size,
            features: able,
            lag: group,
            ..
        } = report
        else {
            return;
        };
        let Some(device) = self.devices.get_mut(id) else { return };
        let Device { driver, kind: Kind::Nic { mac, speed_mbps, mtu, features, lag, .. }, health, .. } =
            device
        else {
            return;
        };
        if *health == Health::Absent {
            return;
        }
        driver.clone_from(now);
        lag.clone_from(group);
        (*mac, *speed_mbps, *mtu, *features) = (*address, *speed, *size, *able);
        let before = std::mem::replace(
            health,
            if *up { Health::Up } else { Health::Down("no link when it was opened again".to_owned()) },
        );
        if matches!(before, Health::Failed(_)) {
            effects.push(Effect::event(EventKind::DeviceBack, subject, "it was opened again"));
        }
    }
}
