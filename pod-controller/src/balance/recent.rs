use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use cxl_pool::{EndpointId, Role};
use pod_state::{DeviceId, DiskRates, Measured, Rates};

use super::samples::{Counters, Pair};

/// How fast what endpoints count grew not long ago. Cheap to keep: it is put together where somebody wants to know.
#[derive(Clone, Debug)]
pub(super) struct Recent(Vec<(EndpointId, Instant, Arc<Counters>)>);

impl FromIterator<(EndpointId, Instant, Arc<Counters>)> for Recent {
    fn from_iter<I: IntoIterator<Item = (EndpointId, Instant, Arc<Counters>)>>(rates: I) -> Self {
        Self(rates.into_iter().collect())
    }
}

impl Recent {
    fn of(&self, role: Role) -> impl Iterator<Item = (EndpointId, &Counters)> {
        self.0.iter().filter(move |(it, ..)| it.role == role).map(|(it, _, rates)| (*it, &**rates))
    }

    /// When was measured what an endpoint's devices carry.
    pub(super) fn measured_at(&self, endpoint: EndpointId) -> Option<Instant> {
        self.0.iter().find(|(it, ..)| *it == endpoint).map(|(_, at, _)| *at)
    }

    fn devices<T>(&self, role: Role, shown: fn(Pair) -> T) -> BTreeMap<DeviceId, T> {
        let devices = self.of(role).flat_map(|(EndpointId { host, .. }, rates)| {
            let devices = rates.devices.iter();
            devices.map(move |(name, it)| (DeviceId { host, name: name.as_str().into() }, shown(*it)))
        });
        devices.collect()
    }

    /// What passes through NICs.
    pub(super) fn nics(&self) -> BTreeMap<DeviceId, u64> {
        self.devices(Role::NetBackend, mbps)
    }

    /// The same, and for which leases.
    pub(super) fn measured(&self) -> Measured {
        let mut leases = BTreeMap::new();
        for (lease, it) in self.of(Role::NetFrontend).flat_map(|(_, rates)| &rates.leases) {
            // While an instance moves, two frontends know its leases.
            *leases.entry(*lease).or_default() += mbps(*it);
        }
        Measured { nics: self.nics(), leases }
    }

    /// What SSDs do.
    pub(super) fn ssds(&self) -> BTreeMap<DeviceId, Rates> {
        self.devices(Role::BlkBackend, rates)
    }

    /// The same, and for which leases.
    pub(super) fn disks(&self) -> DiskRates {
        let leases = self.of(Role::BlkBackend).flat_map(|(EndpointId { host, .. }, found)| {
            found.leases.iter().map(move |(lease, it)| ((host, *lease), rates(*it)))
        });
        DiskRates { ssds: self.ssds(), leases: leases.collect() }
    }
}

/// In the direction in which it is more.
fn mbps([one, other]: Pair) -> u64 {
    one.max(other).saturating_mul(8) / 1_000_000
}

const fn rates([iops, bytes_per_second]: Pair) -> Rates {
    Rates { iops, bytes_per_second }
}
