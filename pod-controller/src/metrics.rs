//! Metrics for Prometheus, made from what is known at the moment they are asked for.
//!
//! Names and units are as Prometheus wants them: seconds, bytes and ratios, `_total` at the end of what only grows.

mod controllers;
mod mchannels;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use pod_api::{DeviceHealth, DeviceKind, EndpointHealth, RegionState};
use pod_state::{Lease, LeaseKind};
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Registry, Unit};

use crate::controller::Handle;
use crate::view::{purpose, region_state};

type Labels = Vec<(&'static str, String)>;

/// A counter that somebody else counts.
#[derive(Clone, Debug, Default)]
struct Total(Number);

/// Time that somebody else counts, in seconds.
#[derive(Clone, Debug, Default)]
struct Seconds(Fraction);

impl TypedMetric for Seconds {
    const TYPE: MetricType = MetricType::Counter;
}

impl EncodeMetric for Seconds {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        encoder.encode_counter::<NoLabelSet, f64, u64>(&self.0.get(), None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }
}

impl TypedMetric for Total {
    const TYPE: MetricType = MetricType::Counter;
}

impl EncodeMetric for Total {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        encoder.encode_counter::<NoLabelSet, u64, u64>(&self.0.get(), None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }
}

type Totals = Family<Labels, Total>;
type SecondTotals = Family<Labels, Seconds>;
type Number = Gauge<u64, AtomicU64>;
type Gauges = Family<Labels, Number>;
type Fraction = Gauge<f64, AtomicU64>;
type Fractions = Family<Labels, Fraction>;

/// A registry whose families are declared when they are first filled.
struct Page {
    registry: Registry,
}

impl Page {
    fn totals(&mut self, name: &str, help: &str) -> Totals {
        let family = Totals::default();
        self.registry.register(name, help, family.clone());
        family
    }

    fn gauges(&mut self, name: &str, help: &str) -> Gauges {
        let family = Gauges::default();
        self.registry.register(name, help, family.clone());
        family
    }

    /// Counters of time; the name ends in `seconds`.
    fn second_totals(&mut self, name: &str, help: &str) -> SecondTotals {
        let family = SecondTotals::default();
        self.registry.register(name, help, family.clone());
        family
    }

    /// Gauges of what is no whole number.
    fn fractions(&mut self, name: &str, help: &str) -> Fractions {
        let family = Fractions::default();
        self.registry.register(name, help, family.clone());
        family
    }

    fn byte_gauges(&mut self, name: &str, help: &str) -> Gauges {
        let family = Gauges::default();
        self.registry.register_with_unit(name, help, Unit::Bytes, family.clone());
        family
    }

    /// A gauge of which there is one.
    fn number(&mut self, name: &str, help: &str, value: u64) {
        let number = Number::default();
        number.set(value);
        self.registry.register(name, help, number);
    }

    /// A counter of which there is one.
    fn total(&mut self, name: &str, help: &str, value: u64) {
        let total = Total::default();
        total.0.set(value);
        self.registry.register(name, help, total);
    }
}

fn count(family: &Totals, labels: &Labels, value: u64) {
    family.get_or_create(labels).0.set(value);
}

fn count_us(family: &SecondTotals, labels: &Labels, us: u64) {
    family.get_or_create(labels).0.set(seconds(us));
}

/// Microseconds as seconds.
fn seconds(us: u64) -> f64 {
    std::time::Duration::from_micros(us).as_secs_f64()
}

/// All metrics in Prometheus' own text format, which knows no units and no end, and calls a counter as its samples are called.
pub fn plain_text(handle: &Handle) -> String {
    plain(&text(handle))
}

fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len() + text.len() / 8);
    let mut described = None;
    for line in text.lines() {
        // Writing to a string does not fail.
        let _ = match line.strip_prefix("# ").and_then(|rest| rest.split_once(' ')) {
            Some(("HELP", _)) => {
                described = line.splitn(4, ' ').nth(3);
                Ok(())
            }
            Some(("TYPE", kind)) => {
                let (name, kind) = kind.split_once(' ').unwrap_or((kind, "untyped"));
                let suffix = if kind == "counter" { "_total" } else { "" };
                let help = described.take().unwrap_or_default();
                writeln!(plain, "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}")
            }
            Some(_) => Ok(()),
            None if line == "# EOF" => Ok(()),
            None => writeln!(plain, "{line}"),
        };
    }
    plain
}

/// All metrics in the text format of OpenMetrics.
pub fn text(handle: &Handle) -> String {
    let mut page = Page { registry: Registry::with_prefix("wadi") };
    controllers::add(&mut page, handle);
    add_hosts(&mut page, handle);
    add_protocol(&mut page, handle);
    add_devices(&mut page, handle);
    add_leases(&mut page, handle);
    add_channels(&mut page, handle);
    add_endpoint_counters(&mut page, handle);
    mchannels::add(&mut page, handle);
    add_volumes(&mut page, handle);
    add_pool(&mut page, handle);
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = encode(&mut text, &page.registry);
    text
}

fn add_hosts(page: &mut Page, handle: &Handle) {
    let joined = page.gauges("endpoint_joined", "Whether an endpoint beats");
    let age = page.fractions("endpoint_telemetry_age_seconds", "Age of an endpoint's last telemetry");
    for host in handle.view().hosts((&handle.telemetry(), handle.spoken()), Instant::now()) {
        for endpoint in host.endpoints {
            let labels = vec![("host", host.name.clone()), ("role", endpoint.role)];
            joined.get_or_create(&labels).set(u64::from(endpoint.health == EndpointHealth::Joined));
            if let Some(age_ms) = endpoint.telemetry_age_ms {
                age.get_or_create(&labels).set(seconds(age_ms.saturating_mul(1000)));
            }
        }
    }
}

fn add_protocol(page: &mut Page, handle: &Handle) {
    let minor = page.gauges("protocol_minor", "Minor of the version that the whole pod speaks");
    minor.get_or_create(&Vec::new()).set(handle.view().state.protocol().minor.into());
    let unknown = page.totals("messages_not_understood", "Messages of daemons that said nothing known here");
    count(&unknown, &Vec::new(), handle.not_understood());
}

fn add_devices(page: &mut Page, handle: &Handle) {
    let up = page.gauges("device_up", "Whether a device can be used");
    let leases = page.gauges("device_leases", "Leases that use a device now");
    let packets = page.totals("device_packets", "Frames of a NIC");
    let bytes = page.totals("device_bytes", "Bytes of a device");
    let operations = page.totals("device_operations", "Requests that an SSD completed");
    let errors = page.totals("device_errors", "What a device refused or failed");
    let reopened = page.totals("device_reopened", "How often a NIC was opened again after its driver failed");
    let troubles = page.totals("device_troubles", "What the kernel and PCIe count of a NIC's troubles");
    let drops = page.totals("device_drops", "Frames that a NIC received and nobody got, by reason");
    let held = page.gauges("device_held", "Whether a NIC is not trusted since its link flapped");
    for device in handle.view().devices(&handle.telemetry()) {
        let labels = vec![("device", device.name.clone())];
        up.get_or_create(&labels)
            .set(u64::from(matches!(device.health, DeviceHealth::Up | DeviceHealth::Held)));
        if matches!(device.kind, DeviceKind::Nic { .. }) {
            held.get_or_create(&labels).set(u64::from(device.health == DeviceHealth::Held));
        }
        leases.get_or_create(&labels).set(u64::from(device.leases));
        let Some(counters) = device.counters else { continue };
        let with =
            |direction: &str| vec![("device", device.name.clone()), ("direction", direction.to_owned())];
        if matches!(device.kind, DeviceKind::Nic { .. }) {
            count(&packets, &with("receive"), counters.rx_packets);
            count(&packets, &with("transmit"), counters.tx_packets);
            count(&bytes, &with("receive"), counters.rx_bytes);
            count(&bytes, &with("transmit"), counters.tx_bytes);
        } else {
            count(&operations, &labels, counters.operations);
            count(&bytes, &with("read"), counters.read_bytes);
            count(&bytes, &with("write"), counters.write_bytes);
        }
        count(&errors, &labels, counters.errors);
        if matches!(device.kind, DeviceKind::Nic { .. }) {
            count(&reopened, &labels, counters.reopened);
            for (reason, number) in &counters.drops {
                count(&drops, &vec![("device", device.name.clone()), ("reason", reason.clone())], *number);
            }
            for (kind, number) in &counters.troubles {
                count(&troubles, &vec![("device", device.name.clone()), ("kind", kind.clone())], *number);
            }
        }
    }
}

fn add_leases(page: &mut Page, handle: &Handle) {
    let connected = page.gauges("lease_connected", "Whether a VMM uses a leased device");
    let draining = page.gauges("lease_draining", "Whether a lease still receives from a NIC that it left");
    let failovers = page.gauges("lease_generation", "How often a lease changed its holder or device, from 1");
    let packets = page.totals("lease_packets", "Frames of an instance at an endpoint");
    let bytes = page.totals("lease_bytes", "Bytes of an instance at an endpoint");
    let requests = page.totals("lease_requests", "Block requests of an instance at an endpoint");
    let throttled = page
        .totals("lease_throttled", "Requests and packets that had to wait for what their instance may use");
    let errors = page.totals("lease_errors", "Requests that the guest saw fail");
    let waits =
        page.totals("lease_rate_waits", "How often an instance waited for the rate that it is allowed");
    let drops = page.totals("lease_drops", "Frames and messages dropped");
    let state = &handle.view().state;
    let name = |lease: &Lease| -> Option<Labels> {
        let instance = state.instances.get(&lease.instance)?.name.clone();
        Some(vec![("instance", instance), ("device", lease.device.clone())])
    };
    for lease in state.leases.values() {
        let Some(labels) = name(lease) else { continue };
        connected.get_or_create(&labels).set(u64::from(lease.connected));
        failovers.get_or_create(&labels).set(u64::from(lease.generation.get()));
        if matches!(lease.kind, LeaseKind::Nic { .. }) {
            draining.get_or_create(&labels).set(u64::from(lease.draining_nic().is_some()));
        }
    }
    for (endpoint, sample) in handle.telemetry() {
        for counters in &sample.telemetry.leases {
            let Some(lease) = state.leases.get(&counters.lease) else { continue };
            let Some(mut labels) = name(lease) else { continue };
            labels.push(("endpoint", state.endpoint_name(endpoint)));
            let with = |key: &'static str, value: &str| {
                let mut labels = labels.clone();
                labels.push((key, value.to_owned()));
                labels
            };
            match lease.kind {
                LeaseKind::Nic { .. } => {
                    count(&packets, &with("direction", "transmit"), counters.tx_packets);
                    count(&packets, &with("direction", "receive"), counters.rx_packets);
                    count(&bytes, &with("direction", "transmit"), counters.tx_bytes);
                    count(&bytes, &with("direction", "receive"), counters.rx_bytes);
                    count(&waits, &labels, counters.rate_waits);
                    count(&throttled, &labels, counters.throttled);
                }
                LeaseKind::Disk { .. } => {
                    count(&requests, &with("operation", "read"), counters.reads);
                    count(&requests, &with("operation", "write"), counters.writes);
                    count(&requests, &with("operation", "flush"), counters.flushes);
                    count(&bytes, &with("direction", "read"), counters.read_bytes);
                    count(&bytes, &with("direction", "write"), counters.write_bytes);
                    count(&throttled, &labels, counters.throttled);
                }
            }
            count(&errors, &labels, counters.errors);
            for (reason, number) in &counters.drops {
                count(&drops, &with("reason", reason), *number);
            }
        }
    }
}

fn add_channels(page: &mut Page, handle: &Handle) {
    let messages = page.totals("channel_messages", "Messages of a channel of the data path, at one end");
    let stalls = page.totals("channel_stalls", "How often a sender found a channel full");
    let faults = page.totals("channel_faults", "Messages that came to nothing, by reason");
    let depth = page.gauges("channel_depth", "Requests over a channel that its other end has not completed");
    let depth_max = page.gauges("channel_depth_max", "How many those may be");
    let state = &handle.view().state;
    for (endpoint, sample) in handle.telemetry() {
        for channel in &sample.telemetry.channels {
            let labels = vec![
                ("channel", channel.channel.get().to_string()),
                ("endpoint", state.endpoint_name(endpoint)),
                ("peer", state.endpoint_name(channel.peer)),
            ];
            let with = |key: &'static str, value: &str| {
                let mut labels = labels.clone();
                labels.push((key, value.to_owned()));
                labels
            };
            count(&messages, &with("direction", "sent"), channel.sent);
            count(&messages, &with("direction", "received"), channel.received);
            count(&stalls, &labels, channel.stalls);
            count(&faults, &with("reason", "unreadable"), channel.unreadable);
            count(&faults, &with("reason", "stray"), channel.strays);
            count(&faults, &with("reason", "no-room"), channel.lost);
            depth.get_or_create(&labels).set(channel.depth);
            depth_max.get_or_create(&labels).set(channel.depth_max);
        }
    }
}

fn add_endpoint_counters(page: &mut Page, handle: &Handle) {
    let counters = page.totals("endpoint_events", "What else an endpoint counts, by name");
    let gauges = page.gauges("endpoint_value", "What an endpoint has of something now, by name");
    let state = &handle.view().state;
    for (endpoint, sample) in handle.telemetry() {
        for (name, value) in &sample.telemetry.counters {
            let labels = vec![("endpoint", state.endpoint_name(endpoint)), ("name", name.clone())];
            count(&counters, &labels, *value);
        }
        for (name, value) in &sample.telemetry.gauges {
            let labels = vec![("endpoint", state.endpoint_name(endpoint)), ("name", name.clone())];
            gauges.get_or_create(&labels).set(*value);
        }
    }
}

fn add_volumes(page: &mut Page, handle: &Handle) {
    let size = page.byte_gauges("volume_size", "Size of a volume");
    let allocated =
        page.byte_gauges("volume_allocated", "What a volume takes up of its SSDs, where they tell");
    for volume in handle.view().volumes(&handle.telemetry()) {
        let labels = vec![("volume", volume.name)];
        size.get_or_create(&labels).set(volume.size_bytes);
        if let Some(bytes) = volume.allocated_bytes {
            allocated.get_or_create(&labels).set(bytes);
        }
    }
}

fn add_pool(page: &mut Page, handle: &Handle) {
    let view = handle.view();
    let pool = view.pool();
    let regions = page.byte_gauges("regions", "Bytes of the pool's data area, by what they are for");
    // There may be a million of them.
    let mut bytes: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for region in view.state.regions.iter() {
        let state = match region_state(region.usage) {
            RegionState::InUse => "in-use",
            RegionState::Quarantined => "quarantined",
            RegionState::Failed => "failed",
        };
        *bytes.entry((purpose(&region.purpose), state)).or_default() += region.area.lines.bytes();
    }
    for ((purpose, state), bytes) in bytes {
        let labels = vec![("purpose", purpose.to_owned()), ("state", state.to_owned())];
        regions.get_or_create(&labels).set(bytes);
    }
    page.number("pool_free_bytes", "The pool's data area in no region", pool.free_bytes);
    page.number(
        "pool_largest_free_bytes",
        "The longest free range of the pool's data area",
        pool.largest_free_bytes,
    );
    page.number("volumes", "Volumes", view.state.volumes.len() as u64);
    page.number("instances", "Instances", view.state.instances.len() as u64);
    page.total("failovers", "Leases that moved to their backup, since the pod began", view.state.failovers);
    page.total("commands", "Commands that were committed, since the pod began", view.state.index);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_calls_counters_as_their_samples() {
        let text = "# HELP wadi_a Things.\n# TYPE wadi_a counter\nwadi_a_total{x=\"1\"} 2\n# HELP wadi_b_bytes Size of a thing.\n\
                    # TYPE wadi_b_bytes gauge\n# UNIT wadi_b_bytes bytes\nwadi_b_bytes 3\n# EOF\n";
        assert_eq!(
            plain(text),
            "# HELP wadi_a_total Things.\n# TYPE wadi_a_total counter\nwadi_a_total{x=\"1\"} 2\n# HELP wadi_b_bytes Size of a \
             thing.\n# TYPE wadi_b_bytes gauge\nwadi_b_bytes 3\n"
        );
    }
}
