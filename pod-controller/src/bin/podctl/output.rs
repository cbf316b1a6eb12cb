//! One thing in full.

use std::collections::BTreeMap;
use std::fmt::Write;

use pod_api::{
    ByteSize, CandidatePart, Condition, Device, DeviceKind, Event, Explanation, FailedBack, GuestRam, Host,
    Instance, NicRail, StaysAway, Volume, VolumeQos,
};
use pod_protocol::objects::Priority;

use crate::Failure;
use crate::arguments::Output;
use crate::show::yaml;
use crate::table::{device_health, endpoint_health, plain, shown_labels, speed};
use crate::when;

/// Names and values, one pair a line.
fn pairs(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 1;
    let lines = pairs.iter().map(|(name, value)| format!("{:<width$} {value}", format!("{name}:")));
    lines.collect::<Vec<_>>().join("\n")
}

pub(crate) fn host(host: &Host) -> String {
    let mut lines = vec![
        ("host", format!("{} (id {})", host.name, host.id)),
        ("devices", host.devices.join(", ")),
        ("instances", host.instances.join(", ")),
        ("drained", if host.drained { "its devices are to be empty" } else { "no" }.to_owned()),
    ];
    lines.extend(traits(&host.labels, &[]));
    let mut shown = pairs(&lines);
    let rows = host.endpoints.iter().map(|endpoint| {
        let age = endpoint.telemetry_age_ms.map_or_else(|| "-".to_owned(), |age| format!("{age} ms ago"));
        let health = endpoint_health(endpoint.health).to_owned();
        let protocol = endpoint.protocol.clone().unwrap_or_else(|| "-".to_owned());
        let pid = endpoint.pid.to_string();
        vec![endpoint.role.clone(), health, endpoint.software.clone(), protocol, pid, age]
    });
    let table =
        plain(&["daemon", "health", "software", "protocol", "pid", "telemetry"], &[4], rows.collect());
    let _ = write!(shown, "\n\n{table}");
    shown
}

pub(crate) fn explanation(explanation: &Explanation) -> String {
    let mut shown = String::new();
    for device in &explanation.devices {
        let lines = pairs(&[
            ("device", format!("{} {}", explanation.instance, device.device)),
            ("rule", device.rule.clone()),
            ("if it fails", device.on_failure.clone()),
        ]);
        let rows = device.candidates.iter().map(|candidate| {
            let part = match candidate.part {
                CandidatePart::Active => "in use",
                CandidatePart::Standby => "standby",
                CandidatePart::Possible => "possible",
                CandidatePart::Excluded => "not now",
            };
            vec![candidate.name.clone(), part.to_owned(), candidate.notes.join("; ")]
        });
        let table = plain(&["candidate", "part", "why"], &[], rows.collect());
        let separator = if shown.is_empty() { "" } else { "\n\n" };
        let _ = write!(shown, "{separator}{lines}\n\n{table}");
    }
    shown
}

pub(crate) fn device(device: &Device) -> String {
    let mut lines = vec![
        ("device", device.name.clone()),
        ("driver", device.driver.clone()),
        ("health", device_health(device.health).to_owned()),
    ];
    if let Some(reason) = &device.reason {
        lines.push(("reason", reason.clone()));
    }
    match &device.kind {
        DeviceKind::Nic {
            mac,
            speed_mbps,
            mtu,
            backup,
            lag,
            standby_leases,
            capacity_mbps,
            reserved_mbps,
            spare_mbps,
        } => lines.extend([
            ("mac", mac.clone().unwrap_or_else(|| "-".to_owned())),
            ("speed", speed(*speed_mbps)),
            ("mtu", mtu.to_string()),
            ("backup", if *backup { "yes".to_owned() } else { "no".to_owned() }),
            ("lag", lag.clone().unwrap_or_else(|| "-".to_owned())),
            ("standby leases", standby_leases.to_string()),
            ("reserved", format!("{} of {}", speed(*reserved_mbps), speed(*capacity_mbps))),
            ("kept for the failure of a host", speed(*spare_mbps)),
        ]),
        DeviceKind::Ssd {
            size_bytes,
            used_bytes,
            iops,
            reserved_iops,
            bytes_per_second,
            reserved_bytes_per_second,
            block_bytes,
            discard_granularity_bytes,
            strangers,
        } => {
            let reserved_bytes = ByteSize::new(*reserved_bytes_per_second);
            lines.extend([
                ("size", ByteSize::new(*size_bytes).to_string()),
                ("used", ByteSize::new(*used_bytes).to_string()),
                (
                    "reserved",
                    match iops {
                        Some(iops) => format!("{reserved_iops} of {iops} requests/s"),
                        None => format!("{reserved_iops} requests/s; it is not known how many it can do"),
                    },
                ),
                (
                    "reserved bandwidth",
                    match bytes_per_second.map(ByteSize::new) {
                        Some(bytes) => format!("{reserved_bytes}/s of {bytes}/s"),
                        None => format!("{reserved_bytes}/s; it is not known how much it can do"),
                    },
                ),
                ("block", ByteSize::new(u64::from(*block_bytes)).to_string()),
            ]);
            if let Some(bytes) = discard_granularity_bytes {
                lines.push(("discards", format!("whole units of {}", ByteSize::new(u64::from(*bytes)))));
            }
            if !strangers.is_empty() {
                lines.push((
                    "found on it",
                    format!("{} (podctl devices adopt {})", strangers.join(", "), device.name),
                ));
            }
        }
    }
    lines.push(("leases", device.leases.to_string()));
    if device.drained {
        lines.push(("drained", "it is to be empty".to_owned()));
    }
    lines.extend(traits(&device.labels, &[]));
    if let Some(counters) = &device.counters {
        match device.kind {
            DeviceKind::Nic { .. } => lines.extend([
                ("received", format!("{} frames, {}", counters.rx_packets, ByteSize::new(counters.rx_bytes))),
                ("sent", format!("{} frames, {}", counters.tx_packets, ByteSize::new(counters.tx_bytes))),
            ]),
            DeviceKind::Ssd { .. } => lines.extend([
                ("operations", counters.operations.to_string()),
                ("read", ByteSize::new(counters.read_bytes).to_string()),
                ("written", ByteSize::new(counters.write_bytes).to_string()),
            ]),
        }
        lines.push(("errors", counters.errors.to_string()));
        if counters.reopened > 0 {
            lines.push(("opened again", counters.reopened.to_string()));
        }
        let troubles = counters.troubles.iter().filter(|(_, count)| **count > 0);
        let troubles: Vec<String> = troubles.map(|(name, count)| format!("{name} {count}")).collect();
        if !troubles.is_empty() {
            lines.push(("troubles", troubles.join(", ")));
        }
    }
    pairs(&lines)
}

pub(crate) fn volume(volume: &Volume) -> String {
    let mut lines = vec![
        ("volume", volume.name.clone()),
        ("size", format!("{} ({} bytes)", ByteSize::new(volume.size_bytes), volume.size_bytes)),
    ];
    if let Some(bytes) = volume.allocated_bytes {
        lines.push(("taken up", format!("{} ({bytes} bytes)", ByteSize::new(bytes))));
    }
    if volume.replicas.is_empty() {
        lines.push(("device", format!("{}, from {}", volume.device, ByteSize::new(volume.start_bytes))));
    }
    for replica in &volume.replicas {
        let (start, state) = (ByteSize::new(replica.start_bytes), replica.state.word());
        let what = if volume.stripe_bytes.is_some() { "column" } else { "replica" };
        lines.push((what, format!("{}, from {start}: {state}", replica.device)));
    }
    if let Some(bytes) = volume.stripe_bytes {
        lines.push(("stripes", format!("{} in each by turns", ByteSize::new(bytes))));
    }
    lines.push(("limits", limits(&volume.qos)));
    if volume.read_only {
        lines.push(("guests", "only read it".to_owned()));
    }
    let groups = [("apart from others of", &volume.apart), ("together with others of", &volume.together)];
    lines.extend(groups.into_iter().filter_map(|(what, group)| Some((what, group.clone()?))));
    lines.push(("instance", volume.instance.clone().unwrap_or_else(|| "none".to_owned())));
    lines.extend(traits(&volume.labels, &volume.conditions));
    pairs(&lines)
}

fn limits(qos: &VolumeQos) -> String {
    let mut parts = Vec::new();
    parts.extend(qos.iops.map(|iops| format!("{iops} requests/s")));
    parts.extend(qos.bytes_per_second.map(|bytes| format!("{}/s", ByteSize::new(bytes))));
    if !parts.is_empty() {
        parts.push(format!("bursts of {} ms", qos.burst_ms));
    }
    parts.extend(qos.minimum_iops.map(|iops| format!("{iops} requests/s before others")));
    let minimum_bytes = qos.minimum_bytes_per_second.map(ByteSize::new);
    parts.extend(minimum_bytes.map(|bytes| format!("{bytes}/s before others")));
    if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
}

/// Several NICs that are in use at the same time, and those of them that are not.
fn rails(rails: &[NicRail]) -> String {
    let shown = rails.iter().map(|rail| {
        let note = if rail.in_use { "" } else { " (not in use)" };
        format!("{}{note}", rail.nic)
    });
    shown.collect::<Vec<_>>().join(" + ")
}

pub(crate) fn instance(instance: &Instance) -> String {
    let ready = if instance.ready {
        "yes".to_owned()
    } else {
        format!("no, waiting for {}", instance.waiting_for.join("; "))
    };
    let mut lines =
        vec![("instance", instance.name.clone()), ("host", instance.host.clone()), ("ready", ready)];
    let unusual = instance.priority != Priority::DEFAULT.get();
    lines.extend(unusual.then(|| ("priority", instance.priority.to_string())));
    lines.extend(instance.ram.as_ref().map(|ram| ("ram", guest_ram(ram))));
    lines.extend(traits(&instance.labels, &instance.conditions));
    let mut shown = pairs(&lines);
    if instance.vmm_listens {
        let _ = write!(shown, "\nits VMM listens on the sockets, and the frontends connect");
    }
    if !instance.nics.is_empty() {
        let rows = instance.nics.iter().map(|nic| {
            let backup = nic.backup.clone().unwrap_or_else(|| "none".to_owned());
            let place = match &nic.draining {
                Some(left) => format!("{} (draining {left})", nic.nic),
                None if nic.rails.len() > 1 => rails(&nic.rails),
                None => nic.nic.clone(),
            };
            vec![
                nic.device.clone(),
                place,
                backup,
                nic.mac.clone(),
                nic.mtu.to_string(),
                yes(nic.connected),
                nic.socket.clone(),
            ]
        });
        let header = ["nic", "device", "backup", "mac", "mtu", "connected", "socket"];
        let _ = write!(shown, "\n\n{}", plain(&header, &[4], rows.collect()));
    }
    for nic in instance.nics.iter().filter(|nic| !nic.link) {
        let _ =
            write!(shown, "\n\n{} has no link: {} does not work, and no backup does", nic.device, nic.nic);
    }
    for nic in instance.nics.iter().filter(|nic| nic.reserved_mbps > 0) {
        let sure = if nic.failover_proven { "also" } else { "not" };
        let (rate, name) = (speed(nic.reserved_mbps), &nic.device);
        let _ = write!(shown, "\n\n{name} is sure of {rate}, {sure} when the host of {} fails", nic.nic);
    }
    if !instance.disks.is_empty() {
        let rows = instance.disks.iter().map(|disk| {
            let size = ByteSize::new(disk.size_bytes).to_string();
            vec![disk.device.clone(), disk.ssd.clone(), size, yes(disk.connected), disk.socket.clone()]
        });
        let _ = write!(
            shown,
            "\n\n{}",
            plain(&["disk", "device", "size", "connected", "socket"], &[2], rows.collect())
        );
    }
    let nics = instance.nics.iter().map(|it| (&it.device, it.leaving, &it.refused));
    for (device, leaving, refused) in
        nics.chain(instance.disks.iter().map(|it| (&it.device, it.leaving, &it.refused)))
    {
        let what = match (leaving, refused) {
            (true, _) => "leaves once the guest has let go of it",
            (false, Some(_)) => "is not plugged in",
            (false, None) => continue,
        };
        let why = refused.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
        let _ = write!(shown, "\n\n{device} {what}{why}");
    }
    if let Some(migration) = &instance.migration {
        let ready = if migration.ready {
            "ready".to_owned()
        } else {
            format!("waiting for {}", migration.waiting_for.join("; "))
        };
        let rows = migration
            .devices
            .iter()
            .map(|device| vec![device.device.clone(), yes(device.connected), device.socket.clone()]);
        let table = plain(&["device", "connected", "socket"], &[], rows.collect());
        let ram = migration.ram.as_ref().map(|ram| format!(", with {}", guest_ram(ram)));
        let _ =
            write!(shown, "\n\nmoving to {}: {ready}{}\n\n{table}", migration.to, ram.unwrap_or_default());
    }
    shown
}

/// How much RAM a guest has, and where.
fn guest_ram(ram: &GuestRam) -> String {
    let size = ByteSize::new(ram.size_bytes);
    match ram.start_bytes {
        Some(start) => format!("{size} of the pool from {start:#x} on"),
        None => format!("{size} of the pool, for which there is no room"),
    }
}

/// Labels, and what does not hold.
fn traits(labels: &BTreeMap<String, String>, conditions: &[Condition]) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if !labels.is_empty() {
        lines.push(("labels", shown_labels(labels)));
    }
    let not = conditions.iter().filter(|it| !it.status);
    let not: Vec<String> = not.map(|it| format!("{} ({})", it.kind.word(), it.message)).collect();
    if !not.is_empty() {
        lines.push(("not", not.join("; ")));
    }
    lines
}

/// What became of the leases that belong on a NIC.
pub(crate) fn failed_back(name: &str, stay: &FailedBack, is_tried_only: bool) -> String {
    let (has, stays) = if is_tried_only { ("would have", "would stay") } else { ("has", "stays") };
    if stay.stay.is_empty() {
        return format!("device {name} {has} its leases back");
    }
    let mut text = format!("device {name} {has} those of its leases back that can go there");
    for StaysAway { instance, device, nic, reason } in &stay.stay {
        let _ = write!(text, "\n{device} of {instance} {stays} on {nic}: {reason}");
    }
    text
}

/// As a word.
pub(crate) fn yes(is: bool) -> String {
    if is { "yes".to_owned() } else { "no".to_owned() }
}

/// An event in one line.
pub(crate) fn event_line(event: &Event, format: Output) -> Result<String, Failure> {
    Ok(match format {
        Output::Table | Output::Wide => format!(
            "{:>6}  {}  {:<18}  {:<16}  {}",
            event.sequence,
            when::utc(event.time_ms),
            event.kind.word(),
            event.subject,
            event.message
        ),
        // An event of plain text and numbers always becomes JSON.
        Output::Json => serde_json::to_string(event).unwrap_or_default(),
        Output::Yaml => yaml(event)?.trim_end().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use pod_api::NicPolicy;
    use pod_api::{Disk, EventKind, Nic};

    use super::*;

    #[test]
    fn instance_shows_its_sockets_in_columns() {
        let shown = instance(&Instance {
            resource_version: String::new(),
            name: "vm1".to_owned(),
            id: 1,
            host: "h1".to_owned(),
            instance_type: None,
            copies: None,
            vmm_listens: false,
            priority: 300,
            ram: Some(GuestRam {
                pool: "/dev/dax0.0".to_owned(),
                pool_uuid: String::new(),
                start_bytes: Some(64 << 20),
                size_bytes: 2 << 30,
            }),
            nics: vec![Nic {
                rails: Vec::new(),
                device: "net0".to_owned(),
                socket: "/run/wadi/sockets/vm1-net0.sock".to_owned(),
                mac: "02:00:00:00:00:01".to_owned(),
                mtu: 1500,
                queue_pairs: 1,
                nic: "h2/nic0".to_owned(),
                link: false,
                backup: Some("h3/nic1".to_owned()),
                home: None,
                draining: None,
                policy: NicPolicy::default(),
                reserved_mbps: 0,
                failover_proven: true,
                apart: None,
                together: None,
                lease: 1,
                generation: 1,
                connected: false,
                slot: 0,
                leaving: false,
                plugged: false,
                refused: None,
            }],
            disks: vec![Disk {
                device: "vol0".to_owned(),
                socket: "/run/wadi/sockets/vm1-vol0.sock".to_owned(),
                volume: "vol0".to_owned(),
                serial: "vol0".to_owned(),
                size_bytes: 8 << 30,
                block_bytes: 512,
                queues: 1,
                read_only: false,
                ssd: "h2/ssd0".to_owned(),
                lease: 2,
                generation: 1,
                connected: true,
                slot: 1,
                leaving: true,
                plugged: false,
                refused: Some("the guest keeps it".to_owned()),
            }],
            ready: false,
            waiting_for: vec!["net0: h1/net-frontend to answer".to_owned()],
            migration: None,
            conditions: Vec::new(),
            labels: std::collections::BTreeMap::new(),
        });
        assert_eq!(
            shown,
            "instance: vm1\n\
             host:     h1\n\
             ready:    no, waiting for net0: h1/net-frontend to answer\n\
             priority: 300\n\
             ram:      2.0 GiB of the pool from 0x4000000 on\n\
             \n\
             NIC   DEVICE   BACKUP   MAC                 MTU  CONNECTED  SOCKET\n\
             net0  h2/nic0  h3/nic1  02:00:00:00:00:01  1500  no         /run/wadi/sockets/vm1-net0.sock\n\
             \n\
             net0 has no link: h2/nic0 does not work, and no backup does\n\
             \n\
             DISK  DEVICE      SIZE  CONNECTED  SOCKET\n\
             vol0  h2/ssd0  8.0 GiB  yes        /run/wadi/sockets/vm1-vol0.sock\n\
             \n\
             vol0 leaves once the guest has let go of it: the guest keeps it"
        );
    }

    #[test]
    fn events_are_lines_or_json() {
        let event = Event {
            sequence: 7,
            time_ms: 0,
            kind: EventKind::LinkDown,
            subject: "h2/nic0".to_owned(),
            message: "carrier lost".to_owned(),
        };
        assert_eq!(
            event_line(&event, Output::Table).expect("a line"),
            "     7  1970-01-01 00:00:00.000  link-down           h2/nic0           carrier lost"
        );
        assert_eq!(
            serde_json::from_str::<Event>(&event_line(&event, Output::Json).expect("a line")).ok(),
            Some(event)
        );
    }
}
