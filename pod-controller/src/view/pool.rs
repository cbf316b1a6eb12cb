use pod_api as api;
use pod_protocol::ids::LeaseId;
use pod_state::{Purpose, Region, RegionUse};

use super::View;

impl View {
    /// The pool without its regions.
    pub(crate) fn pool(&self) -> api::Pool {
        let (regions, reached) = (&self.state.regions, self.facts.reached.as_ref());
        let gaps = regions.gaps();
        let quarantined = regions.iter().filter(|region| region.usage == RegionUse::Quarantined);
        let failed = regions.iter().filter(|region| region.usage == RegionUse::Failed);
        api::Pool {
            path: self.facts.path.clone(),
            uuid: self.pool_uuid(),
            resource_version: self.version(),
            protocol: self.state.protocol().to_string(),
            coherence: reached.map_or_else(|| "unknown".to_owned(), |pool| pool.coherence.clone()),
            size_bytes: reached.map_or_else(|| regions.data().end().bytes().get(), |pool| pool.size_bytes),
            data_start_bytes: regions.data().start.bytes().get(),
            data_bytes: regions.data().lines.bytes(),
            free_bytes: gaps.iter().map(|gap| gap.lines.bytes()).sum(),
            quarantined_bytes: quarantined.map(|region| region.area.lines.bytes()).sum(),
            failed_bytes: failed.map(|region| region.area.lines.bytes()).sum(),
            largest_free_bytes: gaps.iter().map(|gap| gap.lines.bytes()).max().unwrap_or(0),
            regions: Vec::new(),
            next: None,
        }
    }

    /// One of its regions.
    pub(crate) fn region(&self, region: &Region) -> api::Region {
        let owner = match &region.purpose {
            Purpose::Ring(channel) => match self.state.channels.get(channel) {
                Some(channel) => {
                    let ends = [channel.frontend, channel.backend].map(|end| self.state.endpoint_name(end));
                    ends.join(" and ")
                }
                None => channel.to_string(),
            },
            Purpose::Transmit(lease) | Purpose::Data(lease) => self.lease_owner(*lease),
            Purpose::Receive(nic) => self.state.device_name(nic),
            Purpose::Ram(instance) => {
                let owner = self.state.instances.get(instance).map(|it| it.name.clone());
                owner.unwrap_or_else(|| instance.to_string())
            }
            Purpose::Board(endpoint) => self.state.endpoint_name(*endpoint),
            Purpose::Nothing => String::new(),
        };
        api::Region {
            id: region.id.get(),
            start_bytes: region.area.start.bytes().get(),
            size_bytes: region.area.lines.bytes(),
            purpose: purpose(&region.purpose).to_owned(),
            owner,
            state: region_state(region.usage),
            holders: region.holders.iter().map(|holder| self.state.endpoint_name(*holder)).collect(),
        }
    }

    /// Whose lease it is; its number when it has ended.
    fn lease_owner(&self, id: LeaseId) -> String {
        let lease = self.state.leases.get(&id);
        let owner = lease.and_then(|lease| Some((self.state.instances.get(&lease.instance)?, lease)));
        owner
            .map_or_else(|| id.to_string(), |(instance, lease)| format!("{} {}", instance.name, lease.device))
    }
}

/// What a region is for, in a word.
pub(crate) const fn purpose(purpose: &Purpose) -> &'static str {
    match purpose {
        Purpose::Ring(_) => "rings",
        Purpose::Transmit(_) => "transmit",
        Purpose::Receive(_) => "receive",
        Purpose::Data(_) => "data",
        Purpose::Ram(_) => "ram",
        Purpose::Board(_) => "board",
        Purpose::Nothing => "none",
    }
}

pub(crate) const fn region_state(usage: RegionUse) -> api::RegionState {
    match usage {
        RegionUse::InUse => api::RegionState::InUse,
        RegionUse::Quarantined => api::RegionState::Quarantined,
        RegionUse::Failed => api::RegionState::Failed,
    }
}
