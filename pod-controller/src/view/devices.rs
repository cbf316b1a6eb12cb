use std::collections::BTreeMap;

use cxl_pool::EndpointId;
use pod_api as api;
use pod_protocol::telemetry::DeviceTelemetry;
use pod_state::{Device, DeviceId, Health, Kind, Loads, NicLoad, Presence, Rates, SsdLoad, SsdLoads, Volume};

use super::{View, conditions};
use crate::controller::Sample;

/// Who uses a device.
#[derive(Clone, Copy)]
struct Uses<'a> {
    /// How many leases.
    leases: u32,
    /// The volumes that stay on it, although it is to be empty.
    stay: &'a [&'a Volume],
}

impl View {
    /// All devices.
    pub fn devices(&self, telemetry: &BTreeMap<EndpointId, Sample>) -> Vec<api::Device> {
        let loads = (&self.state.loads(), &self.state.ssd_loads());
        let (leases, stay) = (self.state.leases_by_device(), self.state.that_stay());
        let devices = self.state.devices.iter();
        let show = |(id, device): (&DeviceId, &Device)| {
            let leases = leases.get(id).copied().unwrap_or(0);
            let uses = Uses { leases, stay: stay.get(id).map_or(&[], Vec::as_slice) };
            self.show_device(id, device, telemetry, (loads, uses))
        };
        devices.map(show).collect()
    }

    /// The device with this name.
    pub fn device(&self, name: &str, telemetry: &BTreeMap<EndpointId, Sample>) -> Option<api::Device> {
        let id = self.state.device_named(name)?;
        let device = self.state.devices.get(&id)?;
        let loads = (&self.state.loads(), &self.state.ssd_loads());
        let stay: Vec<&Volume> = self.state.that_stay_on(&id).collect();
        let uses = Uses { leases: self.state.leases_on(&id), stay: &stay };
        Some(self.show_device(&id, device, telemetry, (loads, uses)))
    }

    fn show_device(
        &self,
        id: &DeviceId,
        device: &Device,
        telemetry: &BTreeMap<EndpointId, Sample>,
        ((nics, ssds), uses): ((&Loads, &SsdLoads), Uses<'_>),
    ) -> api::Device {
        let load = nics.get(id);
        let owner = EndpointId::new(id.host, device.role());
        let (health, reason) = match (&device.health, self.state.endpoints.get(&owner).map(|it| it.presence))
        {
            (Health::Absent, _) if device.is_replaced() => {
                (api::DeviceHealth::Away, Some(pod_state::REPLACED.to_owned()))
            }
            (Health::Absent, _) => {
                (api::DeviceHealth::Away, Some("its host does not have it any more".to_owned()))
            }
            (_, Some(Presence::Fencing | Presence::Fenced | Presence::Gone) | None) => {
                (api::DeviceHealth::Away, Some(format!("{} is not there", self.state.endpoint_name(owner))))
            }
            (Health::Down(reason), _) => (api::DeviceHealth::Down, Some(reason.clone())),
            (Health::Failed(reason), _) => (api::DeviceHealth::Failed, Some(reason.clone())),
            (Health::Up, Some(Presence::Joined | Presence::Silent)) => match &device.held {
                Some(reason) => (api::DeviceHealth::Held, Some(reason.clone())),
                None => (api::DeviceHealth::Up, None),
            },
        };
        let kind = match &device.kind {
            Kind::Nic { mac, speed_mbps, mtu, backup, lag, .. } => api::DeviceKind::Nic {
                mac: mac.map(|mac| mac.to_string()),
                speed_mbps: *speed_mbps,
                mtu: *mtu,
                backup: *backup,
                lag: lag.clone(),
                standby_leases: load.map_or(0, |load| load.standby_leases),
                capacity_mbps: load.map_or(0, |load| load.capacity_mbps),
                reserved_mbps: load.map_or(0, |load| load.reserved_mbps),
                spare_mbps: load.map_or(0, NicLoad::worst_incoming_mbps),
            },
            Kind::Ssd { size_bytes, block_bytes, discard_granularity_bytes, strangers, .. } => {
                let load = ssds.get(id);
                let (capacity, reserved) =
                    (self.state.rate_capacity(device), load.map_or_else(Rates::default, SsdLoad::rates));
                api::DeviceKind::Ssd {
                    size_bytes: *size_bytes,
                    used_bytes: load.map_or(0, SsdLoad::occupied_bytes),
                    iops: capacity.iops,
                    reserved_iops: reserved.iops,
                    bytes_per_second: capacity.bytes_per_second,
                    reserved_bytes_per_second: reserved.bytes_per_second,
                    block_bytes: *block_bytes,
                    discard_granularity_bytes: *discard_granularity_bytes,
                    strangers: strangers.iter().map(|entry| entry.name.clone()).collect(),
                }
            }
        };
        let sample = telemetry.get(&owner);
        let counters =
            sample.and_then(|sample| sample.telemetry.devices.iter().find(|it| it.name == id.name));
        let mut shown = api::Device {
            name: self.state.device_name(id),
            host: self.state.host_name(id.host),
            resource_version: self.state.device_version(id).unwrap_or_default(),
            kind,
            driver: device.driver.clone(),
            health,
            reason,
            leases: uses.leases,
            drained: self.state.is_drained(id),
            labels: device.labels.clone(),
            counters: counters.map(show_counters),
            conditions: Vec::new(),
        };
        let stay: Vec<&str> = uses.stay.iter().map(|volume| volume.name.as_str()).collect();
        shown.conditions = conditions::of_device(&shown, &stay);
        shown
    }
}

fn show_counters(counters: &DeviceTelemetry) -> api::DeviceCounters {
    api::DeviceCounters {
        rx_packets: counters.rx_packets,
        rx_bytes: counters.rx_bytes,
        tx_packets: counters.tx_packets,
        tx_bytes: counters.tx_bytes,
        operations: counters.operations,
        read_bytes: counters.read_bytes,
        write_bytes: counters.write_bytes,
        errors: counters.errors,
        reopened: counters.reopened,
        drops: counters.drops.clone(),
        troubles: counters.troubles.clone(),
    }
}
