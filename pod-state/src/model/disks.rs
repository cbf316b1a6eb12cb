//! Volumes of guests on SSDs of hosts of their own.

use cxl_pool::{HostId, Role};
use pod_protocol::ids::LeaseId;
use pod_protocol::reports::DeviceReport;

use super::pod::{MIB, create_instance, endpoint, join, options, ssd};
use crate::{Command, DeviceId, Groups, State};

/// The SSD of a host.
pub fn ssd_of(host: u16) -> DeviceId {
    DeviceId { host: HostId::new(host), name: "ssd0".into() }
}

/// h1 with guests, and hosts from h2 with an SSD of 64 MiB each that can do so many requests and bytes per second.
pub fn pod_with_ssds(able: &[(Option<u64>, Option<u64>)]) -> State {
    let mut state = State::new(options(512));
    let frontend = endpoint(1, Role::BlkFrontend);
    let command = Command::Join { endpoint: frontend, incarnation: 1, join: join(1, Vec::new()) };
    state.apply(&command).expect("a free slot");
    for (host, able) in (2..).zip(able) {
        let mut device = ssd("ssd0", 64);
        if let DeviceReport::Ssd { iops, bytes_per_second, .. } = &mut device {
            (*iops, *bytes_per_second) = *able;
        }
        let (id, join) = (endpoint(host, Role::BlkBackend), join(host, vec![device]));
        state.apply(&Command::Join { endpoint: id, incarnation: 1, join }).expect("a free slot");
    }
    state
}

/// To make a volume of 8 MiB with so many replicas, one of them on the SSD of this host.
pub fn volume(name: &str, (host, replicas): (Option<u16>, u8), groups: Groups) -> Command {
    Command::CreateVolume {
        name: name.to_owned(),
        size_bytes: 8 * MIB,
        device: host.map(ssd_of),
        replicas,
        minimum_iops: None,
        minimum_bytes_per_second: None,
        groups,
    }
}

/// A guest with a volume of this name and size, on the SSD of this host and so many others.
pub fn guest_with_volume(
    state: &mut State,
    volume: &str,
    mib: u64,
    host: u16,
    replicas: u8,
) -> Option<LeaseId> {
    let create = Command::CreateVolume {
        name: volume.to_owned(),
        size_bytes: mib * MIB,
        device: Some(ssd_of(host)),
        replicas,
        minimum_iops: None,
        minimum_bytes_per_second: None,
        groups: Groups::default(),
    };
    state.apply(&create).ok()?;
    let name = format!("vm-{volume}");
    state.apply(&guest(&name, &[volume])).ok()?;
    state.instance_named(&name)?.disks.first().copied()
}

/// A guest on h1 with these volumes.
pub fn guest(name: &str, volumes: &[&str]) -> Command {
    create_instance(name, 1, Vec::new(), volumes)
}
