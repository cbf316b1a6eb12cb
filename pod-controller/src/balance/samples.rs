use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cxl_pool::{EndpointId, Role};
use pod_protocol::ids::LeaseId;
use pod_protocol::telemetry::{DeviceTelemetry, LeaseTelemetry, Telemetry};

use super::recent::Recent;

/// What grows: bytes in and out of NICs and their leases, requests and bytes of SSDs and theirs.
pub(super) type Pair = [u64; 2];

/// Counters of an endpoint's devices and leases, or how much they grow in a second.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) devices: BTreeMap<String, Pair>,
    pub(super) leases: BTreeMap<LeaseId, Pair>,
}

/// What endpoints have counted, and how fast that grew.
#[derive(Debug)]
pub(super) struct Samples {
    window: Duration,
    counted: BTreeMap<EndpointId, (Instant, Counters)>,
    rates: BTreeMap<EndpointId, (Instant, Arc<Counters>)>,
}

impl Counters {
    /// What an endpoint says, as far as loads are told by it. Leases of NICs are counted by their frontends, since other backends
    /// than that of the NIC in use know of them; those of disks at the SSD, since what is copied counts there as well.
    fn read(role: Role, telemetry: &Telemetry) -> Option<Self> {
        let (devices, leases) = (&telemetry.devices, &telemetry.leases);
        Some(match role {
            Role::NetBackend => Self {
                devices: devices.iter().map(|it| (it.name.clone(), [it.rx_bytes, it.tx_bytes])).collect(),
                leases: BTreeMap::new(),
            },
            Role::NetFrontend => Self {
                devices: BTreeMap::new(),
                leases: leases.iter().map(|it| (it.lease, [it.rx_bytes, it.tx_bytes])).collect(),
            },
            Role::BlkBackend => {
                let bytes = |read: u64, written: u64| read.saturating_add(written);
                let device = |it: &DeviceTelemetry| {
                    (it.name.clone(), [it.operations, bytes(it.read_bytes, it.write_bytes)])
                };
                let lease = |it: &LeaseTelemetry| {
                    let requests = it.reads.saturating_add(it.writes).saturating_add(it.flushes);
                    (it.lease, [requests, bytes(it.read_bytes, it.write_bytes)])
                };
                Self {
                    devices: devices.iter().map(device).collect(),
                    leases: leases.iter().map(lease).collect(),
                }
            }
            _ => return None,
        })
    }
}

impl Samples {
    /// Of this long at least.
    pub(super) const fn new(window: Duration) -> Self {
        Self { window, counted: BTreeMap::new(), rates: BTreeMap::new() }
    }

    /// An endpoint says what it has counted. Returns whether its rates are others now.
    pub(super) fn note(&mut self, endpoint: EndpointId, now: Instant, telemetry: &Telemetry) -> bool {
        let before = self.counted.get(&endpoint);
        let elapsed = before.map(|(at, _)| now.saturating_duration_since(*at));
        if elapsed.is_some_and(|elapsed| elapsed < self.window) {
            return false;
        }
        let Some(counted) = Counters::read(endpoint.role, telemetry) else { return false };
        let rates = before.zip(elapsed).map(|((_, before), elapsed)| Counters {
            devices: rates(&before.devices, &counted.devices, elapsed),
            leases: rates(&before.leases, &counted.leases, elapsed),
        });
        self.counted.insert(endpoint, (now, counted));
        let has_rates = rates.is_some();
        self.rates.extend(rates.map(|rates| (endpoint, (now, Arc::new(rates)))));
        has_rates
    }

    /// An endpoint is gone, and counts from zero when it is back.
    pub(super) fn forget(&mut self, endpoint: EndpointId) {
        self.counted.remove(&endpoint);
        self.rates.remove(&endpoint);
    }

    /// What grew, in a second, as measured not long ago.
    pub(super) fn recent(&self, now: Instant) -> Recent {
        let longest = 3 * self.window + Duration::from_secs(1);
        let recent = self.rates.iter().filter(|(_, (at, _))| now.saturating_duration_since(*at) <= longest);
        recent.map(|(endpoint, (at, rates))| (*endpoint, *at, Arc::clone(rates))).collect()
    }
}

/// What grew, in a second; nothing of what began anew.
fn rates<K: Ord + Clone>(
    before: &BTreeMap<K, Pair>,
    now: &BTreeMap<K, Pair>,
    elapsed: Duration,
) -> BTreeMap<K, Pair> {
    let us = elapsed.as_micros().max(1);
    let in_second = |grown: u64| u64::try_from(u128::from(grown) * 1_000_000 / us).unwrap_or(u64::MAX);
    let rate = |(key, now): (&K, &Pair)| {
        let before = before.get(key)?;
        let grown = [now[0].checked_sub(before[0])?, now[1].checked_sub(before[1])?];
        Some((key.clone(), grown.map(in_second)))
    };
    now.iter().filter_map(rate).collect()
}
