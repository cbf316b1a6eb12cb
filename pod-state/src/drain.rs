//! Devices and hosts that are to be empty, so that they can be taken away: nothing new is placed on them, and what is there
//! leaves in order, as far as there is somewhere to go.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::HostId;
use pod_api::EventKind;
use pod_protocol::ids::{LeaseId, VolumeId};

use super::{DeviceId, Effect, Lease, LeaseKind, Refusal, RefusalKind, State, Volume};

/// How many volumes leave an SSD at a time: each is copied, and the guests of the pod go on meanwhile.
const VOLUMES_AT_ONCE: usize = 2;

impl State {
    /// Whether a device is to be empty, by itself or with its host.
    pub fn is_drained(&self, id: &DeviceId) -> bool {
        let by_itself = match self.found().filter(|_| self.devices.is_followed()) {
            Some(found) => found.drained.contains(id),
            None => self.devices.get(id).is_some_and(|device| device.drained),
        };
        by_itself || self.drained_hosts.contains(&id.host)
    }

    /// The volumes that stay on an SSD that is to be empty, in the order of their numbers, until a [copier](Self::copiers_due) comes, since no
    /// instance uses them: frontends copy.
    pub fn that_stay_on<'a>(&'a self, id: &'a DeviceId) -> impl Iterator<Item = &'a Volume> {
        let drained = self.is_drained(id);
        let volumes = self.volumes.values().filter(move |_| drained);
        volumes
            .filter(|it| !it.deleted && it.replica_on(id).is_some() && self.lease_of_volume(it.id).is_none())
    }

    /// The same of all SSDs on which any stay, for whoever asks for many: all volumes and leases are looked through once.
    pub fn that_stay(&self) -> BTreeMap<&DeviceId, Vec<&Volume>> {
        let mut stay: BTreeMap<&DeviceId, Vec<&Volume>> = BTreeMap::new();
        let drained: BTreeSet<&DeviceId> = self.devices.keys().filter(|id| self.is_drained(id)).collect();
        if drained.is_empty() {
            return stay;
        }
        let leased: BTreeSet<VolumeId> = self.leases.values().filter_map(Lease::volume).collect();
        for volume in self.volumes.values().filter(|it| !it.deleted && !leased.contains(&it.id)) {
            let ssds: BTreeSet<&DeviceId> = volume.devices().filter(|ssd| drained.contains(ssd)).collect();
            for ssd in ssds {
                stay.entry(ssd).or_default().push(volume);
            }
        }
        stay
    }

    /// Whether a host is to be empty.
    pub fn is_drained_host(&self, host: HostId) -> bool {
        self.drained_hosts.contains(&host)
    }

    /// Refuses what would bring an instance to a host that is to be empty.
    pub(super) fn check_may_come(&self, host: HostId) -> Result<(), Refusal> {
        if self.decides_by_more() && self.is_drained_host(host) {
            let name = self.host_name(host);
            let detail = format!(
                "{name} is to be empty: choose another host, or let it be used again (podctl hosts undrain {name})"
            );
            return Err(Refusal::new(RefusalKind::HostNotReady, detail));
        }
        Ok(())
    }

    /// A device, or all devices of a host with those that it gets later, are to be empty, or may be used again.
    pub(super) fn drain(
        &mut self,
        host: HostId,
        device: Option<&str>,
        on: bool,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let host_name = self.host_name(host);
        let (subject, before) = match device {
            Some(name) => {
                let subject = format!("{host_name}/{name}");
                let id = DeviceId { host, name: name.into() };
                let known =
                    self.devices.get_mut(&id).ok_or_else(|| Refusal::not_found("device", &subject))?;
                (subject, std::mem::replace(&mut known.drained, on))
            }
            None if !self.hosts.contains_key(&host) => return Err(Refusal::not_found("host", &host_name)),
            None if on => (host_name, !self.drained_hosts.insert(host)),
            None => (host_name, self.drained_hosts.remove(&host)),
        };
        let devices: Vec<DeviceId> = self.devices_at(host).map(|(id, _)| id.clone()).collect();
        for id in &devices {
            self.devices.touch(id);
        }
        if before != on {
            let (kind, message) = if on {
                (
                    EventKind::DrainBegun,
                    "it is to be empty: nothing new comes to it, and what is there leaves",
                )
            } else {
                (EventKind::DrainEnded, "it may be used again")
            };
            effects.push(Effect::event(kind, subject, message));
        }
        Ok(())
    }

    /// Moves the leases on drained NICs. What has nowhere to go stays, and leaves as soon as it can.
    pub(super) fn nics_leave(&mut self, effects: &mut Vec<Effect>) {
        let leaving = self.leaving_nics(self.work().any(|work| work.has_other_nics));
        if self.decides_by_more() {
            // Whatever leaves room from here on may be a way out.
            self.note_less_load(false);
        }
        for id in self.highest_first(leaving) {
            // Looked for one by one, since each that has moved is a load where it is now.
            if let Some(to) = self.way_out(id) {
                self.move_lease(id, &to, EventKind::Drained, effects);
                self.follow();
            }
        }
    }

    /// Whether a lease that found no way out of its drained NIC has one by now: another one that left it, or that moved for some other reason,
    /// was in its way, or left room for it.
    pub(super) fn has_way_out(&self) -> bool {
        self.decides_by_more()
            && self.work().any(|work| work.has_less_load)
            && self.leaving_nics(false).into_iter().any(|id| self.way_out(id).is_some())
    }

    /// The leases that are to leave their NICs and may find somewhere to go: those that were touched, and all others if there are other
    /// NICs than there were, or NICs with more room.
    fn leaving_nics(&self, has_other_nics: bool) -> BTreeSet<LeaseId> {
        let waiting = self.found().filter(|it| has_other_nics || it.work.has_less_load);
        let waiting = waiting.into_iter().flat_map(|it| &it.leaving).filter_map(|id| self.leases.get(id));
        let leaving = self.touched().chain(waiting);
        leaving.filter(|lease| self.is_to_leave(lease)).map(|lease| lease.id).collect()
    }

    /// Where a lease goes that is to leave its NIC.
    fn way_out(&self, id: LeaseId) -> Option<DeviceId> {
        self.place_move(&self.loads_now(), self.leases.get(&id)?, true)
    }

    /// Whether a lease is on a NIC that is to be empty, and works so far.
    pub(super) fn is_to_leave(&self, lease: &Lease) -> bool {
        let LeaseKind::Nic { active, draining: None, .. } = &lease.kind else { return false };
        self.is_drained(active) && self.is_up(active) && !self.has_rails(lease)
    }

    /// Whether a volume is being moved, and will arrive: one that nobody uses any more is copied by nobody, and an SSD that is lost gets
    /// nothing. What becomes of its other places does not matter.
    fn goes_on_moving(&self, volume: &Volume) -> bool {
        let coming = volume.replicas.iter().filter(|place| place.replaces.is_some()).chain(&volume.beside);
        let mut coming = coming.filter(|place| place.stale && !place.leaving);
        let may_arrive =
            self.lease_of_volume(volume.id).is_some() && !coming.any(|place| self.is_lost(&place.device));
        volume.is_moving() && (may_arrive || !self.decides_by_more())
    }

    /// Moves the volumes on drained SSDs, as far as they are in use: it is their frontend that copies them.
    pub(super) fn volumes_leave(&mut self, effects: &mut Vec<Effect>) {
        let alone = self.found().into_iter().flat_map(|found| &found.drained);
        let with_hosts = self.drained_hosts.iter().flat_map(|host| self.devices_at(*host)).map(|it| it.0);
        let is_ssd = |id: &&DeviceId| self.devices.get(id).is_some_and(|device| !device.is_nic());
        let ssds: BTreeSet<DeviceId> = alone.chain(with_hosts).filter(is_ssd).cloned().collect();
        for ssd in ssds {
            self.follow();
            let here = |volume: &&Volume| !volume.deleted && volume.replica_on(&ssd).is_some();
            let there = self.found().and_then(|found| found.on_ssd.get(&ssd)).into_iter().flatten();
            let there: Vec<VolumeId> = there.copied().collect();
            let there = || there.iter().filter_map(|id| self.volumes.get(id));
            let under_way = there().filter(here).filter(|volume| self.goes_on_moving(volume)).count();
            let leased = |volume: &Volume| {
                let lease = self.lease_of_volume(volume.id).filter(|_| !volume.is_moving())?;
                Some((Reverse(self.priority_of(lease)), volume.name.clone()))
            };
            let mut waiting: Vec<_> = there().filter(here).filter_map(leased).collect();
            // The others as they came.
            waiting.sort_by_key(|(priority, _)| *priority);
            let mut room = VOLUMES_AT_ONCE.saturating_sub(under_way);
            for (_, name) in waiting {
                // One that has nowhere to go is tried again with whatever happens next.
                if room > 0 && self.add_replica(&name, None, Some(&ssd), effects).is_ok() {
                    room -= 1;
                }
            }
        }
    }
}
