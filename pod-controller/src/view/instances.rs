use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use cxl_pool::{EndpointId, Role};
use pod_api as api;
use pod_protocol::ids::{InstanceId, LeaseId, VolumeId};
use pod_protocol::objects::Priority;
use pod_state::{DeviceId, Instance, InstanceType, Lease, LeaseKind, Loads, State, Volume};

use super::{View, conditions};
use crate::controller::Sample;

impl View {
    /// All volumes, by name.
    pub fn volumes(&self, telemetry: &BTreeMap<EndpointId, Sample>) -> Vec<api::Volume> {
        let mut volumes: Vec<&Volume> = self.volumes_there().collect();
        volumes.sort_by(|a, b| a.name.cmp(&b.name));
        self.show_volumes(&volumes, telemetry)
    }

    /// The volumes that are not deleted, by when they were made.
    pub(crate) fn volumes_there(&self) -> impl Iterator<Item = &Volume> {
        self.state.volumes.values().filter(|volume| !volume.deleted)
    }

    /// Some volumes.
    pub(crate) fn show_volumes(
        &self,
        volumes: &[&Volume],
        telemetry: &BTreeMap<EndpointId, Sample>,
    ) -> Vec<api::Volume> {
        // Whose each is, is found by looking through all leases: once.
        let wanted: HashSet<VolumeId> = volumes.iter().map(|volume| volume.id).collect();
        let leases = self.state.leases.values().filter_map(|lease| Some((lease.volume()?, lease)));
        let leases: HashMap<VolumeId, &Lease> =
            leases.filter(|(volume, _)| wanted.contains(volume)).collect();
        let show = |volume: &&Volume| self.show_volume(volume, leases.get(&volume.id).copied(), telemetry);
        volumes.iter().map(show).collect()
    }

    /// The volumes that an instance has leased.
    pub(crate) fn volumes_of(&self, instance: &str) -> BTreeSet<VolumeId> {
        let disks = self.state.instance_named(instance).into_iter().flat_map(|it| &it.disks);
        disks.filter_map(|id| self.state.leases.get(id)?.volume()).collect()
    }

    /// Whether a volume, as it is shown, lies on this SSD.
    pub(crate) fn lies_on(&self, volume: &Volume, ssd: &str) -> bool {
        let first = volume.replicas.first().into_iter();
        let others = volume.places().filter(|_| volume.replicas.len() > 1);
        first.chain(others).any(|place| self.state.device_name(&place.device) == ssd)
    }

    /// The volume with this name.
    pub fn volume(&self, name: &str, telemetry: &BTreeMap<EndpointId, Sample>) -> Option<api::Volume> {
        let volume = self.state.volume_named(name)?;
        let lease = self.state.lease_of_volume(volume.id);
        Some(self.show_volume(volume, lease, telemetry))
    }

    /// What a volume takes up in its places, if all of their SSDs tell.
    fn allocated_bytes(volume: &Volume, telemetry: &BTreeMap<EndpointId, Sample>) -> Option<u64> {
        let on = |ssd: &DeviceId| {
            let backend = EndpointId { host: ssd.host, role: Role::BlkBackend };
            let counted = telemetry.get(&backend)?.telemetry.allocated_bytes.get(ssd.name.as_str())?;
            counted.iter().find(|(id, _)| *id == volume.id).map(|&(_, bytes)| bytes)
        };
        volume.devices().map(on).try_fold(0_u64, |sum, bytes| Some(sum.saturating_add(bytes?)))
    }

    fn show_volume(
        &self,
        volume: &Volume,
        lease: Option<&Lease>,
        telemetry: &BTreeMap<EndpointId, Sample>,
    ) -> api::Volume {
        let instance = lease.and_then(|lease| self.state.instances.get(&lease.instance));
        let first = volume.replicas.first();
        let replicas = volume.places().filter(|_| volume.replicas.len() > 1);
        let replicas = replicas.map(|replica| api::VolumeReplica {
            device: self.state.device_name(&replica.device),
            start_bytes: replica.start_bytes,
            state: match (replica.stale, self.state.is_up(&replica.device)) {
                _ if replica.leaving => api::ReplicaState::Leaving,
                (false, true) => api::ReplicaState::InSync,
                (false, false) => api::ReplicaState::Away,
                (true, true) => api::ReplicaState::Stale,
                (true, false) => api::ReplicaState::StaleAway,
            },
        });
        let unreachable = volume.replicas.iter().map(|it| &it.device).filter(|ssd| !self.state.is_up(ssd));
        let away: Vec<String> = unreachable.map(|ssd| self.state.device_name(ssd)).collect();
        let mut shown = api::Volume {
            name: volume.name.clone(),
            id: volume.id.get(),
            resource_version: State::volume_version(volume, lease.map(|lease| lease.id)),
            device: first.map_or_else(String::new, |it| self.state.device_name(&it.device)),
            start_bytes: first.map_or(0, |it| it.start_bytes),
            stripe_bytes: volume.stripe_bytes,
            replicas: replicas.collect(),
            size_bytes: volume.size_bytes,
            allocated_bytes: Self::allocated_bytes(volume, telemetry),
            qos: volume.qos.into(),
            read_only: volume.read_only,
            instance: instance.map(|instance| instance.name.clone()),
            apart: volume.groups.apart.clone(),
            together: volume.groups.together.clone(),
            labels: volume.labels.clone(),
            conditions: Vec::new(),
        };
        shown.conditions =
            conditions::of_volume(&shown, &away, volume.replicas.len(), &self.state.contrary(volume));
        shown
    }

    /// All instances, by name.
    pub fn instances(&self) -> Vec<api::Instance> {
        let mut instances: Vec<&Instance> = self.state.instances.values().collect();
        instances.sort_by(|a, b| a.name.cmp(&b.name));
        self.show_instances(&instances)
    }

    /// Some instances.
    pub(crate) fn show_instances(&self, instances: &[&Instance]) -> Vec<api::Instance> {
        let nics = instances.iter().flat_map(|instance| self.leases(&instance.nics));
        let backups = nics.filter_map(|lease| lease.standby_nic().cloned()).collect();
        let loads = self.state.loads_of(&backups);
        instances.iter().map(|instance| self.show_instance(instance, &loads)).collect()
    }

    /// The instance with this name.
    pub fn instance(&self, name: &str) -> Option<api::Instance> {
        let instance = self.state.instance_named(name)?;
        self.show_instances(&[instance]).pop()
    }

    /// Whether a VMM can be started for an instance; nothing if there is none.
    pub(crate) fn is_ready(&self, id: InstanceId) -> Option<bool> {
        self.state.instances.get(&id).map(|instance| self.waits_for(instance).next().is_none())
    }

    /// Whether a VMM can be started where an instance moves to; nothing if it does not move, or there is none.
    pub(crate) fn is_migration_ready(&self, id: InstanceId) -> Option<bool> {
        let instance = self.state.instances.get(&id).filter(|instance| instance.incoming.is_some())?;
        Some(self.migration_waits_for(instance).next().is_none())
    }

    /// Whether an instance, as it is shown, uses this NIC or SSD.
    pub(crate) fn uses(&self, instance: &Instance, device: &str) -> bool {
        let is = |id: &DeviceId| self.state.device_name(id) == device;
        let nic = |lease: &Lease| lease.active_nic().is_some_and(is);
        let ssd = |lease: &Lease| {
            let volume = lease.volume().and_then(|id| self.state.volumes.get(&id));
            volume.is_some_and(|volume| volume.devices().any(is))
        };
        self.leases(&instance.nics).any(nic) || self.leases(&instance.disks).any(ssd)
    }

    fn leases<'a>(&'a self, ids: &'a [LeaseId]) -> impl Iterator<Item = &'a Lease> {
        ids.iter().filter_map(|id| self.state.leases.get(id))
    }

    fn waits_for<'a>(&'a self, instance: &'a Instance) -> impl Iterator<Item = String> + 'a {
        let leases = self.leases(&instance.nics).chain(self.leases(&instance.disks));
        let waits = |lease: &Lease| Some(format!("{}: {}", lease.device, self.waiting.here.get(&lease.id)?));
        leases.filter_map(waits).chain(ram_waits(instance, false))
    }

    fn migration_waits_for<'a>(&'a self, instance: &'a Instance) -> impl Iterator<Item = String> + 'a {
        let leases = self.leases(&instance.nics).chain(self.leases(&instance.disks));
        let waits =
            |lease: &Lease| Some(format!("{}: {}", lease.device, self.waiting.incoming.get(&lease.id)?));
        leases.filter_map(waits).chain(ram_waits(instance, true))
    }

    fn show_instance(&self, instance: &Instance, loads: &Loads) -> api::Instance {
        let waiting_for: Vec<String> = self.waits_for(instance).collect();
        let mut shown = api::Instance {
            name: instance.name.clone(),
            id: instance.id.get(),
            resource_version: self.state.instance_version(instance),
            host: self.state.host_name(instance.host),
            instance_type: instance.instance_type.clone(),
            copies: self.state.copied_by(instance).map(|volume| volume.name.clone()),
            vmm_listens: instance.vmm_listens,
            priority: instance.priority.get(),
            ram: self.show_ram(instance, false),
            nics: self.leases(&instance.nics).filter_map(|lease| self.show_nic(lease, loads)).collect(),
            disks: self.leases(&instance.disks).filter_map(|lease| self.show_disk(lease)).collect(),
            ready: waiting_for.is_empty(),
            waiting_for,
            migration: self.show_migration(instance),
            labels: instance.labels.clone(),
            conditions: Vec::new(),
        };
        shown.conditions = conditions::of_instance(&shown);
        shown
    }

    /// All instance types, by name.
    pub fn instance_types(&self) -> Vec<api::InstanceType> {
        self.state.types.iter().map(|(name, it)| show_type(name, it)).collect()
    }

    /// The instance type with this name.
    pub fn instance_type(&self, name: &str) -> Option<api::InstanceType> {
        self.state.types.get(name).map(|it| show_type(name, it))
    }

    fn show_migration(&self, instance: &Instance) -> Option<api::Migration> {
        let to = self.state.host_name(instance.incoming?);
        let waiting_for: Vec<String> = self.migration_waits_for(instance).collect();
        let leases = self.leases(&instance.nics).chain(self.leases(&instance.disks));
        let devices = leases.filter_map(|lease| {
            let incoming = lease.incoming.as_ref()?;
            let socket = self.socket(&incoming.socket);
            Some(api::MigratingDevice { device: lease.device.clone(), socket, connected: incoming.connected })
        });
        let (ready, ram) = (waiting_for.is_empty(), self.show_ram(instance, true));
        Some(api::Migration { to, ready, devices: devices.collect(), ram, waiting_for })
    }

    fn show_ram(&self, instance: &Instance, incoming: bool) -> Option<api::GuestRam> {
        let ram = instance.ram.as_ref()?;
        let region = if incoming { ram.incoming } else { ram.region };
        let region = region.and_then(|region| self.state.regions.get(region));
        Some(api::GuestRam {
            pool: self.facts.path.clone(),
            pool_uuid: self.pool_uuid(),
            start_bytes: region.map(|region| region.area.start_byte().get()),
            size_bytes: ram.lines.bytes(),
        })
    }

    fn socket(&self, name: &str) -> String {
        self.sockets.join(name).display().to_string()
    }

    fn show_nic(&self, lease: &Lease, loads: &Loads) -> Option<api::Nic> {
        let LeaseKind::Nic {
            mac,
            mtu,
            queue_pairs,
            active,
            standby,
            home,
            policy,
            reserved_mbps,
            apart,
            together,
            ..
        } = &lease.kind
        else {
            return None;
        };
        Some(api::Nic {
            device: lease.device.clone(),
            socket: self.socket(&lease.socket),
            mac: mac.to_string(),
            mtu: *mtu,
            queue_pairs: *queue_pairs,
            nic: self.state.device_name(active),
            link: self.state.has_link(lease),
            rails: self.show_rails(active),
            backup: standby.as_ref().map(|standby| self.state.device_name(standby)),
            home: home.as_ref().map(|home| self.state.device_name(home)),
            policy: policy.clone().into(),
            reserved_mbps: *reserved_mbps,
            failover_proven: loads.is_failover_proven(lease),
            apart: apart.clone(),
            together: together.clone(),
            draining: lease.draining_nic().map(|nic| self.state.device_name(nic)),
            lease: lease.id.get(),
            generation: lease.generation.get(),
            connected: lease.connected,
            slot: self.state.slot_of(lease),
            leaving: lease.leaving,
            plugged: lease.plugged,
            refused: lease.refused.clone(),
        })
    }

    fn show_rails(&self, active: &DeviceId) -> Vec<api::NicRail> {
        let rails = self.state.rails_of(active);
        let show = |nic: &DeviceId| api::NicRail {
            nic: self.state.device_name(nic),
            in_use: self.state.is_usable(nic),
        };
        rails.iter().filter(|_| rails.len() > 1).map(show).collect()
    }

    fn show_disk(&self, lease: &Lease) -> Option<api::Disk> {
        let LeaseKind::Disk { volume, serial, queues, read_only, .. } = &lease.kind else { return None };
        let volume = self.state.volumes.get(volume)?;
        Some(api::Disk {
            device: lease.device.clone(),
            socket: self.socket(&lease.socket),
            volume: volume.name.clone(),
            serial: serial.clone(),
            size_bytes: volume.size_bytes,
            block_bytes: self.state.block_bytes_of(volume).unwrap_or_default(),
            queues: *queues,
            read_only: *read_only,
            ssd: volume.devices().map(|ssd| self.state.device_name(ssd)).collect::<Vec<_>>().join(", "),
            lease: lease.id.get(),
            generation: lease.generation.get(),
            connected: lease.connected,
            slot: self.state.slot_of(lease),
            leaving: lease.leaving,
            plugged: lease.plugged,
            refused: lease.refused.clone(),
        })
    }
}

/// What the RAM of an instance's guest waits for.
fn ram_waits(instance: &Instance, incoming: bool) -> Option<String> {
    let ram = instance.ram.as_ref()?;
    let region = if incoming { ram.incoming } else { ram.region };
    region.is_none().then(|| "ram: room in the pool, or a frontend of its host".to_owned())
}

fn show_type(name: &str, it: &InstanceType) -> api::InstanceType {
    let InstanceType { nics, reserved_mbps, queue_pairs, volume_iops, priority, ref labels } = *it;
    let (priority, labels) = (priority.map(Priority::get), labels.clone());
    let spec = api::InstanceTypeSpec { nics, reserved_mbps, queue_pairs, volume_iops, priority, labels };
    api::InstanceType { name: name.to_owned(), resource_version: State::type_version(name, it), spec }
}
