use std::collections::BTreeMap;

use cxl_channel::RingPlacement;
use cxl_pool::{Area, EndpointId, Role};
use pod_protocol::ids::{LeaseId, PlaceId, RegionId};
use pod_protocol::objects::{
    ChannelObject, DiskObject, Engine, NicObject, ObjectId, PortObject, RegistrationObject,
    RegistrationState, ReplicaObject, Route, TableObject, VolumeObject,
};

use super::{
    Channel, Device, DeviceId, Health, Incoming, Kind, Lease, LeaseKind, Purpose, RegionUse, Replica, Rings,
    State, Volume,
};

impl State {
    /// The NIC of a backend that is there, and may receive.
    pub(super) fn nic_object(&self, nic: &DeviceId) -> Option<NicObject> {
        Some(NicObject { nic: nic.name.to_string(), rx_area: self.rx_area(nic)? })
    }

    fn rx_area(&self, nic: &DeviceId) -> Option<Area> {
        let known = self.devices.get(nic).filter(|known| known.health != Health::Absent)?;
        match known.kind {
            Kind::Nic { rx: Some(rx), .. } if self.is_life(nic.net_backend(), rx.incarnation) => {
                self.area(rx.region)
            }
            _ => None,
        }
    }

    /// The table of volumes of an SSD that keeps one. What nobody adopted is not overwritten.
    pub(super) fn table_object(&self, ssd: &DeviceId) -> Option<TableObject> {
        let known = self.devices.get(ssd).filter(|known| known.health != Health::Absent)?;
        match &known.kind {
            Kind::Ssd { keeps_table: true, strangers, .. } if strangers.is_empty() => {
                Some(TableObject { ssd: ssd.name.to_string(), table: self.volume_table(ssd) })
            }
            _ => None,
        }
    }

    /// The areas that an endpoint must let go of, or flush before it serves them.
    pub fn scrubs(&self, id: EndpointId) -> BTreeMap<RegionId, Area> {
        let mut scrubs: BTreeMap<RegionId, Area> =
            self.regions.pending(id).map(|region| (region.id, region.area)).collect();
        if let Some(incarnation) = self.life_of(id).filter(|_| id.role == Role::BlkBackend) {
            for lease in self.leases_on_ssds_of(id) {
                if let LeaseKind::Disk { clean_for, .. } = &lease.kind
                    && clean_for.get(&id.host) != Some(&incarnation)
                    && let Some(hold) = lease.area
                    && let Some(area) = self.area(hold.region)
                {
                    scrubs.insert(hold.region, area);
                }
                scrubs.extend(self.unclean_ram(lease, id));
            }
        }
        scrubs
    }

    /// Whether a region is to be let go of.
    pub fn is_retired(&self, region: RegionId) -> bool {
        self.regions.get(region).is_some_and(|region| region.usage == RegionUse::Quarantined)
    }

    /// What serves a lease now: the backends, and the objects there that let them. Until a backend has that, the
    /// frontend's messages would be refused. The replicas of a mirror that may be relied on know which may not before the
    /// frontend does, since it acknowledges then what the others lack; so do the columns of a striped volume when one has moved.
    pub fn services(&self, lease: LeaseId) -> Vec<(EndpointId, ObjectId)> {
        let Some(lease) = self.leases.get(&lease) else { return Vec::new() };
        match &lease.kind {
            LeaseKind::Nic { active, .. } => {
                let service = |nic: &DeviceId| {
                    let id = ObjectId::Registration { lease: lease.id, nic: nic.name.to_string() };
                    (nic.net_backend(), id)
                };
                [service(active)].into_iter().chain(self.other_rails(active).iter().map(service)).collect()
            }
            LeaseKind::Disk { volume, .. } => {
                let Some(volume) = self.volumes.get(volume) else { return Vec::new() };
                let mut services = Vec::new();
                for it in volume.replicas.iter().filter(|it| !it.stale) {
                    let (ssd, id) = (&it.device, PlaceId { lease: lease.id, place: it.place });
                    services.push((ssd.blk_backend(), ObjectId::Volume(id)));
                    if volume.is_mirrored() || volume.beside.is_some() {
                        services.push((ssd.blk_backend(), ObjectId::Table(ssd.name.to_string())));
                    }
                }
                services
            }
        }
    }

    /// The frontend's object of a lease.
    pub fn offer(&self, lease: &Lease) -> ObjectId {
        match lease.kind {
            LeaseKind::Nic { .. } => ObjectId::Port(lease.id),
            LeaseKind::Disk { .. } => ObjectId::Disk(lease.id),
        }
    }

    fn is_life(&self, id: EndpointId, incarnation: u64) -> bool {
        self.endpoints.get(&id).is_some_and(|endpoint| endpoint.incarnation == incarnation)
    }

    pub(super) fn area(&self, region: RegionId) -> Option<Area> {
        self.regions.get(region).filter(|region| region.usage == RegionUse::InUse).map(|region| region.area)
    }

    /// The rings of a channel, if they were made for the life of this endpoint that is there.
    fn rings_at(&self, channel: &Channel, id: EndpointId) -> Option<Rings> {
        let rings = channel.rings?;
        let incarnation = match id {
            _ if id == channel.frontend => rings.frontend_incarnation,
            _ if id == channel.backend => rings.backend_incarnation,
            _ => return None,
        };
        self.is_life(id, incarnation).then_some(rings)
    }

    pub(super) fn channel_at(&self, channel: &Channel, id: EndpointId) -> Option<ChannelObject> {
        let rings = self.rings_at(channel, id)?;
        let placement =
            |region| self.area(region).map(|area| RingPlacement { start: area.start, slots: rings.slots });
        let (to_backend, to_frontend) = (placement(rings.to_backend)?, placement(rings.to_frontend)?);
        let (peer, outgoing, incoming) = if id == channel.frontend {
            (channel.backend, to_backend, to_frontend)
        } else {
            (channel.frontend, to_frontend, to_backend)
        };
        let (engine, generation) = (channel.engine(), channel.generation);
        let receives = (id == channel.frontend).then(|| self.receive_areas(channel, &rings)).flatten();
        Some(ChannelObject { id: channel.id, engine, peer, generation, outgoing, incoming, receives })
    }

    /// Where the NICs receive of the life of a network backend that rings were made for, in the order in which it lies in the pool.
    /// None of what else there is, and none where some of the pod does not know such a thing.
    fn receive_areas(&self, channel: &Channel, rings: &Rings) -> Option<Vec<Area>> {
        if channel.engine() != Engine::Net || !self.limits_backends() {
            return None;
        }
        let area = |device: &Device| match device.kind {
            Kind::Nic { rx: Some(rx), .. } if rx.incarnation == rings.backend_incarnation => {
                self.area(rx.region)
            }
            _ => None,
        };
        let mut areas: Vec<Area> =
            self.devices_at(channel.backend.host).filter_map(|(_, device)| area(device)).collect();
        areas.sort_unstable();
        Some(areas)
    }

    /// The route of a lease from a frontend to a backend, if the frontend has the channel.
    pub(super) fn route(&self, lease: &Lease, frontend: EndpointId, backend: EndpointId) -> Option<Route> {
        let channel = self.channel_between(frontend, backend)?;
        self.rings_at(channel, frontend)?;
        Some(Route { channel: channel.id, generation: lease.generation })
    }

    /// The route of a disk: also over a channel that has yet to be made. A VMM that reconnects to a restarted frontend does
    /// not wait long for the socket, while requests may wait for a backend.
    fn disk_route(&self, lease: &Lease, frontend: EndpointId, ssd: &DeviceId) -> Option<Route> {
        let channel = self.channel_between(frontend, ssd.blk_backend())?;
        Some(Route { channel: channel.id, generation: lease.generation })
    }

    /// Whether one of the frontends of a lease has a channel to what serves it.
    pub fn is_reachable(&self, lease: &Lease, frontend: EndpointId) -> bool {
        let services = self.services(lease.id);
        services.iter().any(|(backend, _)| self.route(lease, frontend, *backend).is_some())
    }

    /// The area of a lease at its frontend.
    fn own_area(&self, lease: &Lease, frontend: EndpointId) -> Option<Area> {
        let area = match self.incoming_at(lease, frontend) {
            Some(incoming) => incoming.area,
            None => lease.area,
        };
        let hold = area.filter(|hold| self.is_life(frontend, hold.incarnation))?;
        self.area(hold.region)
    }

    /// What a frontend holds of a lease, if it does not serve it yet.
    fn incoming_at<'a>(&self, lease: &'a Lease, frontend: EndpointId) -> Option<&'a Incoming> {
        lease.incoming.as_ref().filter(|_| self.incoming_frontend(lease) == Some(frontend))
    }

    /// Where the guest of a lease has its RAM at a frontend.
    fn ram_at(&self, lease: &Lease, frontend: EndpointId) -> Option<Area> {
        match self.incoming_at(lease, frontend) {
            Some(_) => self.incoming_ram_of(lease),
            None => self.ram_of(lease),
        }
    }

    fn socket_at(&self, lease: &Lease, frontend: EndpointId) -> String {
        self.incoming_at(lease, frontend).map_or(&lease.socket, |incoming| &incoming.socket).clone()
    }

    pub(super) fn port(&self, lease: &Lease, frontend: EndpointId) -> Option<PortObject> {
        let LeaseKind::Nic { mac, mtu, queue_pairs, features, active, standby, draining, policy, .. } =
            &lease.kind
        else {
            return None;
        };
        Some(PortObject {
            lease: lease.id,
            instance: lease.instance,
            instance_name: self.instances.get(&lease.instance)?.name.clone(),
            device: lease.device.clone(),
            socket: self.socket_at(lease, frontend),
            vmm_listens: self.instances.get(&lease.instance)?.vmm_listens,
            mac: *mac,
            mtu: *mtu,
            queue_pairs: *queue_pairs,
            features: *features,
            tx_area: self.own_area(lease, frontend)?,
            active: self.route(lease, frontend, active.net_backend())?,
            rails: self.rail_objects(lease, frontend),
            standby: standby.as_ref().and_then(|standby| self.route(lease, frontend, standby.net_backend())),
            policy: policy.clone(),
            draining: draining.as_ref().and_then(|left| {
                let route = self.route(lease, frontend, left.nic.net_backend())?;
                Some(Route { generation: left.generation, ..route })
            }),
            incoming: self.incoming_at(lease, frontend).is_some(),
            ram_area: self.ram_at(lease, frontend),
        })
    }

    pub(super) fn disk(&self, lease: &Lease, frontend: EndpointId) -> Option<DiskObject> {
        let LeaseKind::Disk { volume, serial, queues, read_only, .. } = &lease.kind else { return None };
        let volume = self.volumes.get(volume)?;
        let replica = |replica: &Replica| {
            Some(ReplicaObject {
                number: replica.number,
                ssd: self.device_name(&replica.device),
                route: self.disk_route(lease, frontend, &replica.device)?,
                place: replica.place,
                in_sync: !replica.stale,
                away: self.is_lost(&replica.device),
                leaving: replica.leaving,
            })
        };
        let places = Self::replicas_for(frontend, volume);
        let first = places.first()?;
        let replicas: Option<Vec<ReplicaObject>> = places.iter().map(|it| replica(it)).collect();
        Some(DiskObject {
            lease: lease.id,
            instance: lease.instance,
            instance_name: self.instances.get(&lease.instance)?.name.clone(),
            device: lease.device.clone(),
            socket: self.socket_at(lease, frontend),
            vmm_listens: self.instances.get(&lease.instance)?.vmm_listens,
            volume: volume.id,
            serial: serial.clone(),
            size_bytes: volume.size_bytes,
            block_bytes: self.block_bytes_of(volume)?,
            discard_granularity_bytes: self.discard_granularity_of(volume),
            read_only: *read_only,
            queues: *queues,
            data_area: self.own_area(lease, frontend)?,
            ram_area: self.ram_at(lease, frontend),
            route: self.disk_route(lease, frontend, &first.device)?,
            replicas: replicas?.into_iter().filter(|_| volume.replicas.len() > 1).collect(),
            stripe_bytes: volume.stripe_bytes,
            beside: volume.beside.as_ref().filter(|_| self.moves_columns()).and_then(replica),
            number: if let [only] = volume.replicas.as_slice() { Some(only.number) } else { None },
            epoch: volume.epoch,
            failed: self.is_failed_disk(lease),
            write_through: lease.write_through,
            untold: lease.untold,
            incoming: self.incoming_at(lease, frontend).is_some(),
        })
    }

    /// The logical block of a volume: the largest of its SSDs.
    pub fn block_bytes_of(&self, volume: &Volume) -> Option<u32> {
        volume.devices().filter_map(|ssd| self.block_bytes(ssd)).max()
    }

    /// The logical block of an SSD.
    pub fn block_bytes(&self, device: &DeviceId) -> Option<u32> {
        match self.devices.get(device)?.kind {
            Kind::Ssd { block_bytes, .. } => Some(block_bytes),
            Kind::Nic { .. } => None,
        }
    }

    /// The channel over which a backend reaches the frontend of a lease, if the backend has it.
    fn channel_to_frontend(&self, lease: &Lease, backend: EndpointId) -> Option<&Channel> {
        let channel = self.channel_between(self.frontend_of(lease)?, backend)?;
        self.rings_at(channel, backend).map(|_| channel)
    }

    pub(super) fn registration(&self, lease: &Lease, device: &DeviceId) -> Option<RegistrationObject> {
        let LeaseKind::Nic { mac, mtu, features, active, standby, draining, policy, .. } = &lease.kind else {
            return None;
        };
        let (state, generation) = match (device, draining) {
            _ if self.are_rails(active, device) => (RegistrationState::Active, lease.generation),
            // With the generation that it had: what is on its way is still good.
            (_, Some(left)) if *device == left.nic => (RegistrationState::Draining, left.generation),
            _ if Some(device) == standby.as_ref() => (RegistrationState::Standby, lease.generation),
            _ => return None,
        };
        self.rx_area(device)?;
        let has_other_rails = !self.other_rails(active).is_empty();
        Some(RegistrationObject {
            lease: lease.id,
            nic: device.name.to_string(),
            instance: lease.instance,
            generation,
            mac: *mac,
            mtu: *mtu,
            features: *features,
            channel: self.channel_to_frontend(lease, device.net_backend())?.id,
            tx_area: self.area(lease.area?.region)?,
            state,
            rx_quota_buffers: self.options.rx_quota_buffers,
            policy: policy.clone(),
            ram_area: self.ram_of(lease),
            has_other_rails: has_other_rails && state == RegistrationState::Active,
            priority: self.priority_of(lease),
        })
    }

    /// What a backend serves of a lease: one place, or two while it moves from the one to the other.
    pub(super) fn served_volumes(&self, lease: &Lease, backend: EndpointId) -> Vec<VolumeObject> {
        let volume = lease.volume().and_then(|volume| self.volumes.get(&volume));
        let places = volume.into_iter().flat_map(|volume| volume.places().map(move |place| (volume, place)));
        let here = places.filter(|(_, place)| place.device.blk_backend() == backend);
        here.filter_map(|it| self.served_volume(lease, it, backend)).collect()
    }

    fn served_volume(
        &self,
        lease: &Lease,
        (volume, replica): (&Volume, &Replica),
        backend: EndpointId,
    ) -> Option<VolumeObject> {
        let LeaseKind::Disk { read_only, clean_for, .. } = &lease.kind else { return None };
        // Who has come without its SSD cannot serve it.
        self.devices.get(&replica.device).filter(|ssd| ssd.health != Health::Absent)?;
        if !self.is_life(backend, *clean_for.get(&backend.host)?)
            || self.unclean_ram(lease, backend).is_some()
        {
            return None;
        }
        let hold = lease.area?;
        debug_assert!(matches!(self.regions.get(hold.region).map(|it| &it.purpose), Some(Purpose::Data(_))));
        Some(VolumeObject {
            lease: lease.id,
            place: replica.place,
            volume: volume.id,
            ssd: replica.device.name.to_string(),
            start_bytes: replica.start_bytes,
            size_bytes: volume.place_bytes(),
            // Where it has several places the frontend writes, whatever the guest may: it brings one in line, or moves one.
            read_only: *read_only && volume.places().count() == 1,
            generation: lease.generation,
            channel: self.channel_to_frontend(lease, backend)?.id,
            data_area: self.area(hold.region)?,
            ram_area: self.ram_of(lease),
            instance: lease.instance,
            qos: volume.share_of_place(),
            priority: self.priority_of(lease),
        })
    }
}
