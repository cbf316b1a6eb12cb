//! What metrics say: each is what a daemon reports under the name that it should, or what the API shows.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pod_api::{Fabric, FabricSignal, MchannelSpec};

use crate::support::numbers::number_of;
use crate::support::replicas::volume;
use crate::support::{Pod, until, vm};

/// The NIC and the disk of the instance, at the frontends that serve them.
const NIC: &str = "instance=\"vm1\",device=\"net0\",endpoint=\"h1/net-frontend\"";
const DISK: &str = "instance=\"vm1\",device=\"vol0\",endpoint=\"h1/blk-frontend\"";
const VCPUS: &str = "instance=\"vm1\",device=\"vcpus\",endpoint=\"h1/net-frontend\"";
const SHARE: &str = "instance=\"vm1\",tenant=\"default\"";

/// Counters, and what they are called in telemetry.
const REPORTED: [(&str, &str, &str); 45] = [
    ("device_packets_total", "device=\"h2/nic0\",direction=\"receive\"", "devices.rx_packets"),
    ("device_packets_total", "device=\"h2/nic0\",direction=\"transmit\"", "devices.tx_packets"),
    ("device_bytes_total", "device=\"h2/nic0\",direction=\"receive\"", "devices.rx_bytes"),
    ("device_bytes_total", "device=\"h2/nic0\",direction=\"transmit\"", "devices.tx_bytes"),
    ("device_bytes_total", "device=\"h2/ssd0\",direction=\"read\"", "devices.read_bytes"),
    ("device_bytes_total", "device=\"h2/ssd0\",direction=\"write\"", "devices.write_bytes"),
    ("device_operations_total", "device=\"h2/ssd0\"", "devices.operations"),
    ("device_errors_total", "device=\"h2/nic0\"", "devices.errors"),
    ("device_errors_total", "device=\"h2/ssd0\"", "devices.errors"),
    ("device_reopened_total", "device=\"h2/nic0\"", "devices.reopened"),
    ("device_drops_total", "device=\"h2/nic0\",reason=\"no-receiver\"", "devices.drops.no-receiver"),
    ("device_troubles_total", "device=\"h2/nic0\",kind=\"rx-crc-errors\"", "devices.troubles.rx-crc-errors"),
    ("lease_packets_total", "NIC,direction=\"transmit\"", "leases.tx_packets"),
    ("lease_packets_total", "NIC,direction=\"receive\"", "leases.rx_packets"),
    ("lease_bytes_total", "NIC,direction=\"transmit\"", "leases.tx_bytes"),
    ("lease_bytes_total", "NIC,direction=\"receive\"", "leases.rx_bytes"),
    ("lease_bytes_total", "DISK,direction=\"read\"", "leases.read_bytes"),
    ("lease_bytes_total", "DISK,direction=\"write\"", "leases.write_bytes"),
    ("lease_requests_total", "DISK,operation=\"read\"", "leases.reads"),
    ("lease_requests_total", "DISK,operation=\"write\"", "leases.writes"),
    ("lease_requests_total", "DISK,operation=\"flush\"", "leases.flushes"),
    ("lease_errors_total", "NIC", "leases.errors"),
    ("lease_errors_total", "DISK", "leases.errors"),
    ("lease_throttled_total", "NIC", "leases.throttled"),
    ("lease_throttled_total", "DISK", "leases.throttled"),
    ("lease_rate_waits_total", "NIC", "leases.rate_waits"),
    ("lease_drops_total", "NIC,reason=\"no-buffer\"", "leases.drops.no-buffer"),
    ("channel_messages_total", "CHANNEL,direction=\"sent\"", "channels.sent"),
    ("channel_messages_total", "CHANNEL,direction=\"received\"", "channels.received"),
    ("channel_stalls_total", "CHANNEL", "channels.stalls"),
    ("channel_faults_total", "CHANNEL,reason=\"unreadable\"", "channels.unreadable"),
    ("channel_faults_total", "CHANNEL,reason=\"stray\"", "channels.strays"),
    ("channel_faults_total", "CHANNEL,reason=\"no-room\"", "channels.lost"),
    ("channel_depth", "CHANNEL", "channels.depth"),
    ("channel_depth_max", "CHANNEL", "channels.depth_max"),
    ("endpoint_events_total", "endpoint=\"h1/net-frontend\",name=\"fences\"", "counters.fences"),
    (
        "endpoint_value",
        "endpoint=\"h1/blk-frontend\",name=\"mirror-dirty-bytes\"",
        "gauges.mirror-dirty-bytes",
    ),
    ("mchannel_bytes_total", "NIC", "mchannels.bytes"),
    ("mchannel_bytes_total", "DISK", "mchannels.bytes"),
    ("mchannel_bytes_total", "VCPUS", "vcpus.bytes"),
    ("mchannel_messages_total", "NIC", "mchannels.messages"),
    ("mchannel_vcpu_rate_bytes_per_second", "SHARE", "vcpus.rate"),
    ("mchannel_vcpu_demand_bytes_per_second", "SHARE", "vcpus.demand"),
    ("fabric_estimated_bytes_per_second", "element=\"link\"", "elements.capacity"),
    ("volume_allocated_bytes", "volume=\"vol0\"", "allocated_bytes.ssd0"),
];

/// The samples of a page, by their names with labels.
fn samples(page: &str) -> BTreeMap<String, f64> {
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    let sample = |line: &str| {
        let (name, value) = line.rsplit_once(' ')?;
        Some((name.strip_prefix("wadi_")?.to_owned(), value.parse().ok()?))
    };
    lines.map(|line| sample(line).unwrap_or_else(|| panic!("{line:?} is no sample"))).collect()
}

#[expect(clippy::cast_precision_loss, reason = "as metrics show it")]
fn shown(number: u64) -> f64 {
    number as f64
}

/// A pod in which there is some of everything, and every number that daemons report is another one.
fn page() -> (Pod, BTreeMap<String, f64>) {
    let pod = Pod::demo();
    let client = pod.client();
    client.create_volume(&volume("vol0")).expect("there is room");
    client.create_instance(&vm("vm1", &["vol0"]), Duration::from_secs(30)).expect("created");
    let fabric = Fabric {
        elements: [("link".to_owned(), 1_000_000)].into(),
        signals: [("link".to_owned(), FabricSignal::Probe)].into(),
        ..client.fabric().expect("an answer")
    };
    client.set_fabric(&fabric).expect("it makes sense");
    let spec = MchannelSpec { weight: 1, tenant: "default".to_owned(), path: vec!["link".to_owned()] };
    client.set_mchannel("vm1", &spec).expect("it makes sense");
    for endpoint in pod.endpoints.values() {
        endpoint.held.lock().expect("no panic").all_differ = true;
    }
    let differ = [NIC, DISK].map(|labels| format!("mchannel_bytes_total{{{labels}}}"));
    let found = until("reports of all daemons in which all numbers differ", || {
        let found = samples(&client.metrics().ok()?);
        let devices = ["h2/nic0", "h2/ssd0", "h3/nic0"];
        let told = devices.iter().all(|device| {
            found.get(&format!("device_errors_total{{device=\"{device}\"}}"))
                == Some(&number_of("devices.errors"))
        });
        (told && differ.iter().all(|it| found.get(it) == Some(&number_of("mchannels.bytes"))))
            .then_some(found)
    });
    (pod, found)
}

#[test]
fn every_metric_says_what_it_is_called() {
    let (pod, found) = page();
    let client = pod.client();
    let channel = found.keys().find_map(|name| {
        let labels = name.strip_prefix("channel_stalls_total{")?.strip_suffix('}')?;
        labels.contains("endpoint=\"h1/net-frontend\",peer=\"h2/").then(|| labels.to_owned())
    });
    let channel = channel.expect("the instance's frontend has a channel");
    let mut expected: Vec<(String, f64)> = Vec::new();
    for (metric, labels, field) in REPORTED {
        let mut labels = labels.to_owned();
        for (word, written) in
            [("NIC", NIC), ("DISK", DISK), ("VCPUS", VCPUS), ("SHARE", SHARE), ("CHANNEL", channel.as_str())]
        {
            if labels == word || labels.starts_with(&format!("{word},")) {
                labels = labels.replacen(word, written, 1);
            }
        }
        expected.push((format!("{metric}{{{labels}}}"), number_of(field)));
    }
    let of = |metric: &str, labels: &str, value: f64| (format!("{metric}{{{labels}}}"), value);
    let whole = |field: &str| number_of(field);
    // Of whole µs, as they are shown elsewhere; telemetry has ns.
    let micros = |field: &str| (number_of(field) / 1000.0).floor() / 1e6;
    let demand = 2.0 * whole("mchannels.demand") + whole("vcpus.demand");
    let share = whole("mchannels.share").min(whole("vcpus.share"));
    let pool = client.pool().expect("the pool");
    let bytes = |purpose: &str| {
        let of_it = pool.regions.iter().filter(|region| region.purpose == purpose);
        shown(of_it.map(|region| region.size_bytes).sum())
    };
    let lease = "instance=\"vm1\",device=\"net0\"";
    expected.extend([
        of("mchannel_held_seconds_total", NIC, whole("mchannels.held_us") / 1e6),
        of("mchannel_vcpu_slept_seconds_total", VCPUS, whole("vcpus.slept_us") / 1e6),
        of("mchannel_vcpu_run_seconds", SHARE, micros("vcpus.run_ns")),
        of("mchannel_vcpu_window_seconds", SHARE, micros("vcpus.window_ns")),
        of("mchannel_rate_bytes_per_second", SHARE, 2.0 * whole("mchannels.rate") + whole("vcpus.rate")),
        of("mchannel_demand_bytes_per_second", SHARE, demand),
        of("mchannel_share_bytes_per_second", SHARE, share),
        of("mchannel_run_ratio", SHARE, share / demand),
        of("mchannel_vcpus_uncounted", SHARE, 0.0),
        of("fabric_capacity_bytes_per_second", "element=\"link\"", 1e6),
        of("fabric_load_level", "element=\"link\"", 2.0),
        of("endpoint_joined", "host=\"h3\",role=\"net-backend\"", 1.0),
        of("device_up", "device=\"h2/nic0\"", 1.0),
        of("device_held", "device=\"h2/nic0\"", 0.0),
        of("device_leases", "device=\"h2/nic0\"", 1.0),
        of("lease_connected", lease, 0.0),
        of("lease_draining", lease, 0.0),
        of("lease_generation", lease, 1.0),
        of("volume_size_bytes", "volume=\"vol0\"", shown(1 << 20)),
        of("regions_bytes", "purpose=\"transmit\",state=\"in-use\"", bytes("transmit")),
        of("regions_bytes", "purpose=\"rings\",state=\"in-use\"", bytes("rings")),
    ]);
    for (name, value) in [
        ("protocol_minor{}", 1.0),
        ("messages_not_understood_total{}", 0.0),
        ("controller_has_leader", 1.0),
        ("controller_leads", 1.0),
        ("store_available", 1.0),
        ("pool_free_bytes", shown(pool.free_bytes)),
        ("pool_largest_free_bytes", shown(pool.largest_free_bytes)),
        ("volumes", 1.0),
        ("instances", 1.0),
        ("failovers_total", 0.0),
    ] {
        expected.push((name.to_owned(), value));
    }
    let wrong: Vec<String> = expected
        .iter()
        .filter(|(name, value)| found.get(name).is_none_or(|said| (said - value).abs() > 1e-9 * value.abs()))
        .map(|(name, value)| format!("{name} is {:?}, not {value}", found.get(name)))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");

    // What is not looked at here: how old telemetry is and how many commands there were differs each time; a pod with one controller
    // has no replicas.
    let unseen = ["endpoint_telemetry_age_seconds", "commands_total", "controller_behind_changes"];
    let name = |sample: &str| sample.split('{').next().unwrap_or_default().to_owned();
    let seen: BTreeSet<String> =
        expected.iter().map(|(sample, _)| name(sample)).chain(unseen.map(str::to_owned)).collect();
    let all: BTreeSet<String> = found.keys().map(|sample| name(sample)).collect();
    assert_eq!(all.difference(&seen).collect::<Vec<_>>(), Vec::<&String>::new(), "nobody looks at these");
}
