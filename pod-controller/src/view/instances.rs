use std::collections::BTreeMap;

use cxl_pool::{EndpointId, Role};
use pod_api as api;
use pod_protocol::ids::LeaseId;
use pod_protocol::objects::Priority;
use pod_state::{DeviceId, Instance, InstanceType, Lease, LeaseKind, Loads, State, Volume};

use super::{View, conditions};
use crate::controller::Sample;

impl View {
    /// All volumes, by name.
    pub fn volumes(&self, telemetry: &BTreeMap<EndpointId, Sample>) -> Vec<api::Volume> {
        let mut volumes: Vec<api::Volume> = {
            let there = self.state.volumes.values().filter(|volume| !volume.deleted);
            there.map(|it| self.show_volume(it, telemetry)).collect()
        };
        volumes.sort_by(|a, b| a.name.cmp(&b.name));
        volumes
    }

    /// The volume with this name.
    pub fn volume(&self, name: &str, telemetry: &BTreeMap<EndpointId, Sample>) -> Option<api::Volume> {
        self.state.volume_named(name).map(|volume| self.show_volume(volume, telemetry))
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

    fn show_volume(&self, volume: &Volume, telemetry: &BTreeMap<EndpointId, Sample>) -> api::Volume {
        let lease = self.state.lease_of_volume(volume.id);
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
            resource_version: self.state.volume_version(volume),
            device: first.map_or_else(String::new, |it| self.state.device_name(&it.device)),
            start_bytes: first.map_or(0, |it| it.start_bytes),
            stripe_bytes: volume.stripe_bytes,
            replicas: replicas.collect(),
            size_bytes: volume.size_bytes,
            allocated_bytes: Self::allocated_bytes(volume, telemetry),
            qos: volume.qos.into(),
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
        let loads = self.state.loads();
        let instances = self.state.instances.values().map(|instance| self.show_instance(instance, &loads));
        let mut instances: Vec<api::Instance> = instances.collect();
        instances.sort_by(|a, b| a.name.cmp(&b.name));
        instances
    }

    /// The instance with this name.
    pub fn instance(&self, name: &str) -> Option<api::Instance> {
        self.state.instance_named(name).map(|instance| self.show_instance(instance, &self.state.loads()))
    }

    fn show_instance(&self, instance: &Instance, loads: &Loads) -> api::Instance {
        let leases = |ids: &[LeaseId]| -> Vec<&Lease> {
            ids.iter().filter_map(|id| self.state.leases.get(id)).collect()
        };
        let (nics, disks) = (leases(&instance.nics), leases(&instance.disks));
        let mut waiting_for: Vec<String> = nics
            .iter()
            .chain(&disks)
            .filter_map(|lease| Some(format!("{}: {}", lease.device, self.waiting.here.get(&lease.id)?)))
            .collect();
        waiting_for.extend(ram_waits(instance, false));
        let mut shown = api::Instance {
            name: instance.name.clone(),
            id: instance.id.get(),
            resource_version: self.state.instance_version(instance),
            host: self.state.host_name(instance.host),
            instance_type: instance.instance_type.clone(),
            vmm_listens: instance.vmm_listens,
            priority: instance.priority.get(),
            ram: self.show_ram(instance, false),
            nics: nics.into_iter().filter_map(|lease| self.show_nic(lease, loads)).collect(),
            disks: disks.into_iter().filter_map(|lease| self.show_disk(lease)).collect(),
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
        let ids = instance.nics.iter().chain(&instance.disks);
        let leases: Vec<&Lease> = ids.filter_map(|id| self.state.leases.get(id)).collect();
        let waits =
            |lease: &&Lease| Some(format!("{}: {}", lease.device, self.waiting.incoming.get(&lease.id)?));
        let waiting_for = leases.iter().filter_map(waits).chain(ram_waits(instance, true));
        let waiting_for: Vec<String> = waiting_for.collect();
        let devices = leases.into_iter().filter_map(|lease| {
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
            pool_uuid: self.facts.uuid.clone(),
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
    let InstanceType { nics, reserved_mbps, queue_pairs, volume_iops, priority } = *it;
    let priority = priority.map(Priority::get);
    let spec = api::InstanceTypeSpec { nics, reserved_mbps, queue_pairs, volume_iops, priority };
    api::InstanceType { name: name.to_owned(), resource_version: State::type_version(name, it), spec }
}
