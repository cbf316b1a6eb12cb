use std::collections::BTreeSet;

use cxl_pool::{EndpointId, Role};
use pod_api::EventKind;
use pod_protocol::config::FENCE_MS;
use pod_protocol::ids::LeaseId;
use pod_protocol::reports::{DeviceReport, Join};
use pod_protocol::volume_table::VolumeTable;

use super::name::check_reported_name;
use super::replaced::has_yet_to_get_its_number;
use super::{
    Device, DeviceId, Effect, Endpoint, Health, Kind, Labels, LeaseKind, Presence, Refusal, RefusalKind,
    State, UsedBefore,
};

/// More devices than a host has slots for.
const DEVICES_MAX: usize = 256;
/// Failed pieces of memory with which a pool is of no more use.
const FAILURES_MAX: usize = 1024;

impl State {
    pub(super) fn join(
        &mut self,
        id: EndpointId,
        incarnation: u64,
        join: &Join,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        self.check_join(id, join)?;
        if self.is_fenced(id, incarnation) {
            return Err(Refusal::new(
                RefusalKind::JoinConflict,
                "what it held was taken back and may be somebody else's: start it again",
            ));
        }
        let restarted = self.endpoints.get(&id).is_none_or(|known| known.incarnation != incarnation);
        if self.hosts.insert(id.host, join.host_name.clone()).is_none_or(|name| name != join.host_name) {
            // Others are told of its devices by that name.
            self.everyone_is_stale();
        }
        self.endpoints.insert(
            id,
            Endpoint {
                incarnation,
                presence: Presence::Joined,
                software: join.software.clone(),
                pid: join.pid,
                given_up: false,
                fence_ms: join.fence_ms,
            },
        );
        self.memory_failed(id, &join.memory_failures, effects);
        if restarted {
            self.revoke_from_predecessor(id);
            let message = format!("{}, pid {}", join.software, join.pid);
            effects.push(Effect::event(EventKind::EndpointJoined, self.endpoint_name(id), message));
        }
        for report in &join.devices {
            let device = DeviceId { host: id.host, name: report.name().into() };
            if self.is_another(&device, report) {
                self.note_replaced(&device, effects);
            } else {
                self.note_device(id, report, restarted, effects);
            }
        }
        self.note_absent_devices(id, join, effects);
        Ok(())
    }

    /// Whether this life of a daemon lost what it held. It must not act any more, and never joins again.
    pub fn is_fenced(&self, id: EndpointId, incarnation: u64) -> bool {
        self.endpoints.get(&id).is_some_and(|known| {
            known.incarnation == incarnation && matches!(known.presence, Presence::Fencing | Presence::Fenced)
        })
    }

    /// Has this life of an endpoint lose what it holds.
    pub(super) fn fence(&mut self, id: EndpointId, why: &str, effects: &mut Vec<Effect>) {
        let Some(endpoint) = self.endpoints.get_mut(&id) else { return };
        endpoint.presence = Presence::Fencing;
        effects.push(Effect::Fence { endpoint: id, incarnation: endpoint.incarnation });
        effects.push(Effect::event(EventKind::EndpointFenced, self.endpoint_name(id), why));
    }

    fn check_join(&self, id: EndpointId, join: &Join) -> Result<(), Refusal> {
        let conflict = |detail: String| Err(Refusal::new(RefusalKind::JoinConflict, detail));
        check_reported_name("a host", &join.host_name)?;
        if let Some(other) = self.host_named(&join.host_name).filter(|other| *other != id.host) {
            return conflict(format!(
                "the name {} belongs to host id {}: give this host another name, or the id it had",
                join.host_name,
                other.get()
            ));
        }
        if let Some(known) = self.hosts.get(&id.host).filter(|known| **known != join.host_name) {
            return conflict(format!(
                "host id {} belongs to the host {known}: give {} another id",
                id.host.get(),
                join.host_name
            ));
        }
        if join.devices.len() > DEVICES_MAX {
            return conflict(format!(
                "{} devices are more than the {DEVICES_MAX} of a host",
                join.devices.len()
            ));
        }
        if join.memory_failures.len() > FAILURES_MAX {
            return conflict(format!(
                "{} failures of the pool's memory are more than {FAILURES_MAX}: replace the memory, and make a new pool",
                join.memory_failures.len()
            ));
        }
        if let Some(ms) = join.fence_ms.filter(|ms| !FENCE_MS.contains(ms)) {
            return conflict(format!("fence-ms = {ms}: use {} to {}", FENCE_MS.start(), FENCE_MS.end()));
        }
        let mut names = BTreeSet::new();
        for report in &join.devices {
            let name = report.name();
            check_reported_name("a device", name)?;
            let owner = match report {
                DeviceReport::Nic { .. } => Role::NetBackend,
                DeviceReport::Ssd { .. } => Role::BlkBackend,
            };
            if owner != id.role {
                return conflict(format!("a {} cannot own the device {name}", id.role));
            }
            if !names.insert(name) {
                return conflict(format!("two devices are named {name}: give each its own name"));
            }
            let device = DeviceId { host: id.host, name: name.into() };
            if self.devices.get(&device).is_some_and(|known| known.role() != id.role) {
                return conflict(format!(
                    "this host has a NIC and an SSD named {name}: give each its own name"
                ));
            }
        }
        Ok(())
    }

    /// A frontend that was restarted holds its leases anew: what its predecessor may still send is refused, and what it said of
    /// a column that moves does not count. The VMMs that it served are about to connect again.
    fn revoke_from_predecessor(&mut self, id: EndpointId) {
        let concerned = || self.leases_served_by(id).into_iter();
        let held: Vec<LeaseId> =
            concerned().filter(|lease| self.frontend_of(lease) == Some(id)).map(|lease| lease.id).collect();
        let incoming: Vec<LeaseId> = concerned()
            .filter(|lease| self.incoming_frontend(lease) == Some(id))
            .map(|lease| lease.id)
            .collect();
        let remembers = self.remembers_vmms();
        let remembered =
            |connected, running, found| UsedBefore::of(connected, running, found).filter(|_| remembers);
        for lease in incoming {
            if let Some(incoming) = self.leases.get_mut(&lease).and_then(|lease| lease.incoming.as_mut()) {
                incoming.used_before = remembered(incoming.connected, incoming.running, incoming.used_before);
                (incoming.connected, incoming.running) = (false, false);
            }
        }
        for lease in held {
            self.begin_column_move_anew(lease);
            if let Some(lease) = self.leases.get_mut(&lease) {
                lease.generation = lease.generation.next();
                lease.used_before = remembered(lease.connected, lease.running, lease.used_before);
                (lease.connected, lease.running) = (false, false);
                if let LeaseKind::Nic { draining, .. } = &mut lease.kind {
                    // Whoever waited for the old NIC is gone.
                    *draining = None;
                }
            }
        }
    }

    fn note_device(
        &mut self,
        id: EndpointId,
        report: &DeviceReport,
        restarted: bool,
        effects: &mut Vec<Effect>,
    ) {
        let device_id = DeviceId { host: id.host, name: report.name().into() };
        let known = self.devices.remove(&device_id);
        let held = known.as_ref().and_then(|known| known.held.clone());
        let drained = known.as_ref().is_some_and(|known| known.drained);
        let labels = known.as_ref().map_or_else(Labels::new, |known| known.labels.clone());
        // A daemon of an earlier version says nothing of it.
        let known_identity = match &known {
            Some(Device { kind: Kind::Ssd { identity, .. }, .. }) if !has_yet_to_get_its_number(report) => {
                *identity
            }
            _ => None,
        };
        if let DeviceReport::Ssd { table: Some(table), .. } = report {
            self.pass_over_numbers(table);
        }
        let (driver, kind, mut health) = match report {
            DeviceReport::Nic { driver, mac, up, speed_mbps, mtu, features, backup, lag, .. } => {
                let rx = match &known {
                    Some(Device { kind: Kind::Nic { rx, .. }, .. }) => *rx,
                    _ => None,
                };
                let kind = Kind::Nic {
                    mac: *mac,
                    speed_mbps: *speed_mbps,
                    mtu: *mtu,
                    features: *features,
                    backup: *backup,
                    lag: lag.clone(),
                    rx,
                };
                let health =
                    if *up { Health::Up } else { Health::Down("no link when it was opened".to_owned()) };
                (driver, kind, health)
            }
            DeviceReport::Ssd {
                driver,
                size_bytes,
                block_bytes,
                discard_granularity_bytes,
                table,
                reserved_bytes,
                iops,
                bytes_per_second,
                identity,
                ..
            } => (
                driver,
                Kind::Ssd {
                    size_bytes: *size_bytes,
                    block_bytes: *block_bytes,
                    discard_granularity_bytes: discard_granularity_bytes.filter(|_| self.shows_discards()),
                    iops: *iops,
                    bytes_per_second: *bytes_per_second,
                    reserved_bytes: *reserved_bytes,
                    keeps_table: table.is_some(),
                    strangers: table
                        .as_ref()
                        .map_or_else(Vec::new, |table| self.strangers(&device_id, table)),
                    identity: identity.or(known_identity).filter(|_| self.knows_ssds()),
                    replaced: false,
                },
                self.fits(&device_id, *size_bytes),
            ),
        };
        // A link that is still down is down for the reason that was seen first.
        if let (Health::Down(_), Some(Device { health: Health::Down(reason), .. })) = (&health, &known) {
            health = Health::Down(reason.clone());
        }
        // The same life of a daemon has not cured a failed device; a new one may have.
        if !restarted && let Some(Device { health: Health::Failed(reason), .. }) = &known {
            health = Health::Failed(reason.clone());
        }
        if let Some(known) = known.as_ref().filter(|known| known.health != health) {
            let event = match (&known.health, &health) {
                (_, Health::Failed(reason)) => Some((EventKind::DeviceFailed, reason.as_str())),
                (_, Health::Down(reason)) => Some((EventKind::LinkDown, reason.as_str())),
                (Health::Down(_), Health::Up) => Some((EventKind::LinkUp, "it has a link again")),
                (Health::Absent, Health::Up) => Some((EventKind::DeviceBack, "its host has it again")),
                _ => None,
            };
            if let Some((kind, message)) = event {
                effects.push(Effect::event(kind, self.device_name(&device_id), message));
            }
        }
        self.devices
            .insert(device_id, Device { driver: driver.clone(), kind, health, held, drained, labels });
    }

    /// Volumes get no number any more that an SSD's table has, be it of a controller whose state was lost: the log of what is
    /// being written to a mirror would be taken for another one's.
    fn pass_over_numbers(&mut self, table: &VolumeTable) {
        // One out of all reason was given by no controller.
        let given = table.volumes.iter().map(|entry| entry.id.get()).filter(|&number| number < u32::MAX / 2);
        self.last.volume = self.last.volume.max(given.max().unwrap_or(0));
    }

    /// An SSD that became smaller than the volumes on it must not be served: their ends are gone.
    fn fits(&self, device: &DeviceId, size_bytes: u64) -> Health {
        let beyond = self.volumes.values().find(|volume| {
            volume
                .replica_on(device)
                .is_some_and(|it| it.start_bytes.saturating_add(volume.place_bytes()) > size_bytes)
        });
        match beyond {
            Some(volume) => Health::Failed(format!(
                "it has {size_bytes} bytes, but the volume {} ends beyond: is it the right device?",
                volume.name
            )),
            None => Health::Up,
        }
    }

    fn note_absent_devices(&mut self, id: EndpointId, join: &Join, effects: &mut Vec<Effect>) {
        let reported: BTreeSet<&str> = join.devices.iter().map(DeviceReport::name).collect();
        let owned = self.devices_at(id.host).filter(|(_, known)| known.role() == id.role);
        let absent: Vec<DeviceId> = owned
            .filter(|(device, _)| !reported.contains(device.name.as_str()))
            .map(|(device, _)| device.clone())
            .collect();
        for device in absent {
            // What has yet to be wiped there is, should it come back.
            let wanted =
                self.volumes.values().any(|volume| volume.all_places().any(|it| it.device == device))
                    || self.leases.values().any(|lease| lease.nics().any(|nic| *nic == device));
            let name = self.device_name(&device);
            if let Some(known) = self.devices.get_mut(&device).filter(|known| known.health != Health::Absent)
            {
                known.health = Health::Absent;
                effects.push(Effect::event(
                    EventKind::DeviceGone,
                    name,
                    "its host does not have it any more",
                ));
            }
            if !wanted {
                self.forget_device(&device);
            }
        }
    }

    pub(super) fn forget_device(&mut self, id: &DeviceId) {
        if let Some(Device { kind: Kind::Nic { rx: Some(rx), .. }, .. }) = self.devices.remove(id) {
            self.regions.retire(rx.region);
        }
    }
}
