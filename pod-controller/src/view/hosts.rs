use std::collections::BTreeMap;
use std::time::Instant;

use cxl_pool::{EndpointId, HostId};
use pod_api as api;
use pod_protocol::protocol::Spoken;
use pod_state::{Instance, Presence};

use super::{View, conditions};
use crate::controller::Sample;

impl View {
    /// All hosts.
    pub fn hosts(&self, members: (&BTreeMap<EndpointId, Sample>, &Spoken), now: Instant) -> Vec<api::Host> {
        let mut at: BTreeMap<HostId, Vec<&Instance>> = BTreeMap::new();
        for instance in self.state.instances.values() {
            at.entry(instance.host).or_default().push(instance);
        }
        let show = |(id, name): (&HostId, &String)| {
            let instances = at.get(id).map_or(&[][..], Vec::as_slice);
            self.show_host((*id, name), instances, members, now)
        };
        self.state.hosts.iter().map(show).collect()
    }

    /// The host with this name.
    pub fn host(
        &self,
        name: &str,
        members: (&BTreeMap<EndpointId, Sample>, &Spoken),
        now: Instant,
    ) -> Option<api::Host> {
        let id = self.state.host_named(name)?;
        let instances = self.state.instances.values().filter(|instance| instance.host == id);
        Some(self.show_host((id, name), &instances.collect::<Vec<_>>(), members, now))
    }

    fn show_host(
        &self,
        (id, name): (HostId, &str),
        instances: &[&Instance],
        members: (&BTreeMap<EndpointId, Sample>, &Spoken),
        now: Instant,
    ) -> api::Host {
        let (telemetry, spoken) = members;
        let endpoints = self.state.endpoints_at(id).map(|(endpoint, known)| api::Endpoint {
            role: endpoint.role.to_string(),
            software: known.software.clone(),
            pid: known.pid,
            health: match known.presence {
                Presence::Joined => api::EndpointHealth::Joined,
                Presence::Silent => api::EndpointHealth::Silent,
                Presence::Fencing => api::EndpointHealth::Fencing,
                Presence::Fenced => api::EndpointHealth::Fenced,
                Presence::Gone => api::EndpointHealth::Gone,
            },
            telemetry_age_ms: telemetry.get(endpoint).map(|sample| {
                u64::try_from(now.saturating_duration_since(sample.at).as_millis()).unwrap_or(u64::MAX)
            }),
            protocol: spoken.by_endpoint(*endpoint).map(|protocol| protocol.to_string()),
        });
        let mut shown = api::Host {
            name: name.to_owned(),
            id: id.get(),
            resource_version: self.state.host_version(id).unwrap_or_default(),
            endpoints: endpoints.collect(),
            devices: self.state.devices_at(id).map(|(device, _)| self.state.device_name(device)).collect(),
            drained: self.state.is_drained_host(id),
            labels: self.state.labels_of_host(id),
            instances: instances.iter().map(|instance| instance.name.clone()).collect(),
            conditions: Vec::new(),
        };
        shown.conditions = conditions::of_host(&shown);
        shown
    }
}
