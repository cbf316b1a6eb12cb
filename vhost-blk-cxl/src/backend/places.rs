//! The places of volumes that the worker serves.

use std::sync::Arc;

use cxl_pool::Memory;
use pod_protocol::ids::{LeaseId, PlaceId};
use pod_protocol::objects::VolumeObject;

use super::dispatch::is_same_use;
use super::in_flight::Earlier;
use super::task::BackendTask;
use super::volume::Volume;
use crate::counters::Counters;
use crate::message::Status;

impl<M: Memory> BackendTask<M> {
    /// Serves a volume, or what is new of it.
    pub(super) fn volume(
        &mut self,
        object: VolumeObject,
        device: usize,
        intent_log: Option<u64>,
        counters: Arc<Counters>,
    ) {
        let (id, now_ns) = (object.id(), self.now_ns());
        let waits_for = self.earlier_than(&object, device);
        // A device has one place of a volume: whatever else it was here before, it is no longer.
        while let Some(other) = self.others_on(id, device) {
            self.remove_volume(other);
        }
        let volume = match self.volumes.remove(&id) {
            Some(mut same) if is_same_use(&same.object, &object) && same.device == device => {
                same.throttle.set(object.qos, now_ns);
                if same.is_active {
                    self.devices[device].sharing.turns.set_priority(id, object.priority);
                }
                same.object = object;
                same.intent_log = intent_log;
                same.counters = counters;
                same
            }
            old => {
                if let Some(old) = old {
                    self.refuse_held(old);
                }
                let in_flight = self.commands.of_lease(id.lease, device);
                Volume::new(object, device, intent_log, counters, (in_flight, waits_for))
            }
        };
        self.volumes.insert(id, volume);
        self.admit_early(id.lease);
    }

    /// What has to end before a new place is used, or one under another name or of another generation: what its device has of the
    /// lease; and all of it, unless the lease is known here, with the buffers that it had, and does not wait for that anyway.
    fn earlier_than(&self, object: &VolumeObject, device: usize) -> Option<Earlier> {
        let mut known = self.places_of(object.lease).map(|(_, volume)| volume).filter(|volume| {
            volume.object.channel == object.channel && volume.object.data_area == object.data_area
        });
        let earlier = match known.next() {
            Some(first) => {
                let of_lease = [first].into_iter().chain(known).filter_map(|volume| match volume.waits_for {
                    Some(Earlier::OfLease(last)) => Some(last),
                    Some(Earlier::AtDevice(_)) | None => None,
                });
                of_lease.max().map_or(self.commands.at_device(), Earlier::OfLease)
            }
            None => self.commands.of_all_devices(),
        };
        Some(earlier).filter(|earlier| self.commands.has(*earlier, object.lease, device))
    }

    /// Another place of the same lease that is on this device.
    fn others_on(&self, id: PlaceId, device: usize) -> Option<PlaceId> {
        self.places_of(id.lease)
            .find(|(other, volume)| *other != id && volume.device == device)
            .map(|it| it.0)
    }

    fn places_of(&self, lease: LeaseId) -> impl Iterator<Item = (PlaceId, &Volume)> {
        self.volumes.range(PlaceId::all(lease)).map(|(id, volume)| (*id, volume))
    }

    /// Serves it no longer. What its device has of it goes on.
    pub(super) fn remove_volume(&mut self, id: PlaceId) {
        if let Some(volume) = self.volumes.remove(&id) {
            self.refuse_held(volume);
        }
        for channel in self.channels.values_mut() {
            for request in channel.early.extract_if(.., |request| request.holder.place_id() == id) {
                channel.outbox.push_back(request.not_done(Status::Refused).encode());
            }
        }
    }

    /// Tells the devices where commands have their data.
    pub(super) fn name_areas(&mut self) {
        for (index, device) in self.devices.iter_mut().enumerate() {
            let of_device = self.volumes.values().filter(|volume| volume.device == index);
            let areas = of_device.flat_map(|volume| {
                [Some(volume.object.data_area), volume.object.ram_area].into_iter().flatten()
            });
            device.ssd.set_areas(&areas.collect::<Vec<_>>());
        }
    }

    fn refuse_held(&mut self, mut volume: Volume) {
        self.devices[volume.device].sharing.turns.leave(volume.object.id());
        let Some(channel) = self.channels.get_mut(&volume.object.channel) else { return };
        for held in volume.held.drain() {
            channel.waiting = channel.waiting.saturating_sub(1);
            channel.outbox.push_back(held.request.not_done(Status::Refused).encode());
        }
    }
}
