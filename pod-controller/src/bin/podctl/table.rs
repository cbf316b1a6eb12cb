//! Lists, one line each.

use std::collections::BTreeMap;

use pod_api::{
    ByteSize, Condition, Controller, Device, DeviceHealth, DeviceKind, EndpointHealth, Host, Instance,
    InstanceType, InstanceTypeSpec, RegionState, ReplicaState, Volume, VolumeReplica,
};

use crate::output::yes;

/// A table without lines around it, as other tools of this kind have: two spaces between columns, none at the end.
pub(crate) fn plain(header: &[&str], right: &[usize], mut rows: Vec<Vec<String>>) -> String {
    rows.insert(0, header.iter().map(|name| name.to_uppercase()).collect());
    let width_of =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..header.len()).map(|column| width_of(column).unwrap_or(0)).collect();
    let lines = rows.iter().map(|row| {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            if right.contains(&column) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// The name of a column, and what stands in it.
type Column<T> = (&'static str, fn(&T) -> String);

/// Adds columns that are shown only where there is room.
fn widen<T>(header: &mut Vec<&str>, rows: &mut [Vec<String>], things: &[T], more: &[Column<T>]) {
    for (name, cell) in more {
        header.push(name);
        rows.iter_mut().zip(things).for_each(|(row, thing)| row.push(cell(thing)));
    }
}

/// Labels as they are asked for.
pub(crate) fn shown_labels(labels: &BTreeMap<String, String>) -> String {
    let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
    if labels.is_empty() { "-".to_owned() } else { labels.join(",") }
}

/// What does not hold of a thing.
fn failing(conditions: &[Condition]) -> String {
    let not: Vec<String> =
        conditions.iter().filter(|it| !it.status).map(|it| it.kind.word().to_owned()).collect();
    list(&not)
}

pub(crate) fn controllers(controllers: &[Controller]) -> String {
    let rows = controllers.iter().map(|controller| {
        let behind = controller.behind_changes.map_or_else(|| "-".to_owned(), |changes| changes.to_string());
        let protocol = controller.protocol.clone().unwrap_or_else(|| "-".to_owned());
        let part = match controller {
            Controller { leads: true, .. } => "leads",
            Controller { outside: true, .. } => "votes",
            _ => "follows",
        };
        vec![controller.replica.to_string(), part.to_owned(), yes(controller.answers), behind, protocol]
    });
    plain(&["replica", "part", "answers", "behind", "protocol"], &[0, 3], rows.collect())
}

pub(crate) fn hosts(hosts: &[Host], wide: bool) -> String {
    let rows = hosts.iter().map(|host| {
        let endpoints: Vec<String> = host
            .endpoints
            .iter()
            .map(|endpoint| match endpoint.health {
                EndpointHealth::Joined => endpoint.role.clone(),
                health => format!("{} ({})", endpoint.role, endpoint_health(health)),
            })
            .collect();
        vec![
            host.name.clone(),
            host.id.to_string(),
            list(&endpoints),
            list(&host.devices),
            list(&host.instances),
        ]
    });
    let (mut header, mut rows) =
        (vec!["host", "id", "daemons", "devices", "instances"], rows.collect::<Vec<_>>());
    if wide {
        let drained: fn(&Host) -> String = |it| if it.drained { "yes".to_owned() } else { "no".to_owned() };
        let more: [Column<Host>; 3] = [
            ("drained", drained),
            ("labels", |it| shown_labels(&it.labels)),
            ("not", |it| failing(&it.conditions)),
        ];
        widen(&mut header, &mut rows, hosts, &more);
    }
    or_none("no host has joined yet", plain(&header, &[1], rows), hosts)
}

pub(crate) fn devices(devices: &[Device], wide: bool) -> String {
    let rows = devices.iter().map(|device| {
        let (kind, capacity, note) = match &device.kind {
            DeviceKind::Nic { speed_mbps, backup, lag, standby_leases, reserved_mbps, .. } => {
                let mut notes = Vec::new();
                notes.extend(backup.then(|| format!("backup for {standby_leases}")));
                notes.extend(lag.as_ref().map(|lag| format!("in lag {lag}")));
                notes.extend((*reserved_mbps > 0).then(|| format!("{} reserved", speed(*reserved_mbps))));
                let note = notes.join(", ");
                ("nic", speed(*speed_mbps), note)
            }
            DeviceKind::Ssd { size_bytes, used_bytes, .. } => (
                "ssd",
                ByteSize::new(*size_bytes).to_string(),
                format!("{} used", ByteSize::new(*used_bytes)),
            ),
        };
        let health = device_health(device.health).to_owned();
        vec![
            device.name.clone(),
            kind.to_owned(),
            device.driver.clone(),
            health,
            capacity,
            device.leases.to_string(),
            note,
        ]
    });
    let mut header = vec!["device", "type", "driver", "health", "capacity", "leases", "note"];
    let mut rows: Vec<_> = rows.collect();
    if wide {
        let reason: fn(&Device) -> String = |it| it.reason.clone().unwrap_or_else(|| "-".to_owned());
        let more: [Column<Device>; 3] = [
            ("reason", reason),
            ("labels", |it| shown_labels(&it.labels)),
            ("not", |it| failing(&it.conditions)),
        ];
        widen(&mut header, &mut rows, devices, &more);
    }
    or_none("no host has reported a device yet", plain(&header, &[4, 5], rows), devices)
}

pub(crate) fn volumes(volumes: &[Volume], wide: bool) -> String {
    let rows = volumes.iter().map(|volume| {
        vec![
            volume.name.clone(),
            ByteSize::new(volume.size_bytes).to_string(),
            volume.allocated_bytes.map_or_else(|| "-".to_owned(), |bytes| ByteSize::new(bytes).to_string()),
            places(volume),
            volume.instance.clone().unwrap_or_else(|| "-".to_owned()),
        ]
    });
    let (mut header, mut rows) =
        (vec!["volume", "size", "taken up", "device", "instance"], rows.collect::<Vec<_>>());
    if wide {
        let id: fn(&Volume) -> String = |it| it.id.to_string();
        let labels: fn(&Volume) -> String = |it| shown_labels(&it.labels);
        let not: fn(&Volume) -> String = |it| failing(&it.conditions);
        widen(&mut header, &mut rows, volumes, &[("id", id), ("labels", labels), ("not", not)]);
    }
    or_none(
        "no volumes; create one: podctl volumes create vol0 --size 8G",
        plain(&header, &[1, 2], rows),
        volumes,
    )
}

fn places(volume: &Volume) -> String {
    if volume.replicas.is_empty() {
        return volume.device.clone();
    }
    let place = |replica: &VolumeReplica| match replica.state {
        ReplicaState::InSync => replica.device.clone(),
        state => format!("{} ({})", replica.device, state.word()),
    };
    volume.replicas.iter().map(place).collect::<Vec<_>>().join(", ")
}

pub(crate) fn instance_types(types: &[InstanceType], wide: bool) -> String {
    let count = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
    let rows = types.iter().map(|it| {
        let InstanceTypeSpec { nics, reserved_mbps, queue_pairs, volume_iops, priority, .. } = it.spec;
        let reserved = if reserved_mbps == 0 { "-".to_owned() } else { speed(reserved_mbps) };
        let pairs = count(queue_pairs.map(u64::from));
        let priority = count(priority.map(u64::from));
        vec![it.name.clone(), nics.to_string(), reserved, pairs, count(volume_iops), priority]
    });
    let (mut header, mut rows) = (
        vec!["type", "nics", "reserved", "queue pairs", "volume iops", "priority"],
        rows.collect::<Vec<_>>(),
    );
    if wide {
        let labels: fn(&InstanceType) -> String = |it| shown_labels(&it.spec.labels);
        widen(&mut header, &mut rows, types, &[("labels", labels)]);
    }
    or_none(
        "no instance types; describe one: podctl types set small --reserve 2G",
        plain(&header, &[1, 2, 3, 4, 5], rows),
        types,
    )
}

pub(crate) fn instances(instances: &[Instance], wide: bool) -> String {
    let rows = instances.iter().map(|instance| {
        let nics: Vec<String> = instance.nics.iter().map(|nic| nic.nic.clone()).collect();
        let disks: Vec<String> =
            instance.disks.iter().map(|disk| format!("{} on {}", disk.volume, disk.ssd)).collect();
        let connected =
            instance.nics.iter().any(|nic| nic.connected) || instance.disks.iter().any(|disk| disk.connected);
        let status = match (instance.ready, connected) {
            _ if instance.copies.is_some() => "copies",
            (false, _) => "waiting",
            (true, false) => "ready",
            (true, true) => "in use",
        };
        vec![instance.name.clone(), instance.host.clone(), status.to_owned(), list(&nics), list(&disks)]
    });
    let (mut header, mut rows) =
        (vec!["instance", "host", "status", "nics", "disks"], rows.collect::<Vec<_>>());
    if wide {
        let macs: fn(&Instance) -> String =
            |it| list(&it.nics.iter().map(|nic| nic.mac.clone()).collect::<Vec<_>>());
        let priority: fn(&Instance) -> String = |it| it.priority.to_string();
        let labels: fn(&Instance) -> String = |it| shown_labels(&it.labels);
        let not: fn(&Instance) -> String = |it| failing(&it.conditions);
        let more = [("mac", macs), ("priority", priority), ("labels", labels), ("not", not)];
        widen(&mut header, &mut rows, instances, &more);
    }
    or_none(
        "no instances; create one: podctl instances create vm1 --host h1 --nic --volume vol0",
        plain(&header, &[], rows),
        instances,
    )
}

fn or_none<T>(none: &str, table: String, rows: &[T]) -> String {
    if rows.is_empty() { none.to_owned() } else { table }
}

fn list(words: &[String]) -> String {
    if words.is_empty() { "-".to_owned() } else { words.join(", ") }
}

pub(crate) fn speed(mbps: u64) -> String {
    if mbps >= 1000 && mbps.is_multiple_of(1000) {
        format!("{} Gbit/s", mbps / 1000)
    } else {
        format!("{mbps} Mbit/s")
    }
}

pub(crate) const fn device_health(health: DeviceHealth) -> &'static str {
    match health {
        DeviceHealth::Up => "up",
        DeviceHealth::Held => "held",
        DeviceHealth::Down => "down",
        DeviceHealth::Failed => "failed",
        DeviceHealth::Away => "away",
    }
}

pub(crate) const fn endpoint_health(health: EndpointHealth) -> &'static str {
    match health {
        EndpointHealth::Joined => "joined",
        EndpointHealth::Silent => "silent",
        EndpointHealth::Fencing => "fencing",
        EndpointHealth::Fenced => "fenced",
        EndpointHealth::Gone => "gone",
    }
}

pub(crate) const fn region_state(state: RegionState) -> &'static str {
    match state {
        RegionState::InUse => "in use",
        RegionState::Quarantined => "quarantined",
        RegionState::Failed => "failed",
    }
}

#[cfg(test)]
mod tests {
    use pod_api::VolumeQos;

    use super::*;

    #[test]
    fn columns_line_up() {
        let volume = |name: &str, size_bytes: u64, instance: Option<&str>| Volume {
            resource_version: String::new(),
            name: name.to_owned(),
            id: 1,
            device: "h2/ssd0".to_owned(),
            start_bytes: 0,
            size_bytes,
            allocated_bytes: instance.map(|_| 3 << 20),
            stripe_bytes: None,
            replicas: Vec::new(),
            qos: VolumeQos::default(),
            read_only: false,
            instance: instance.map(str::to_owned),
            conditions: Vec::new(),
            apart: None,
            together: None,
            labels: std::collections::BTreeMap::new(),
        };
        let rows = [volume("a", 8 << 30, Some("vm1")), volume("longer-name", 512 << 20, None)];
        let wide = volumes(&rows, true);
        assert!(
            wide.starts_with("VOLUME            SIZE  TAKEN UP  DEVICE   INSTANCE  ID  LABELS  NOT\n"),
            "{wide}"
        );
        assert_eq!(
            volumes(&rows, false),
            "VOLUME            SIZE  TAKEN UP  DEVICE   INSTANCE\n\
             a              8.0 GiB   3.0 MiB  h2/ssd0  vm1\n\
             longer-name  512.0 MiB         -  h2/ssd0  -"
        );
    }

    #[test]
    fn empty_lists_say_what_to_do() {
        assert!(volumes(&[], false).contains("podctl volumes create"));
        assert!(instances(&[], true).contains("podctl instances create"));
        assert!(!hosts(&[], false).contains("HOST"));
    }
}
