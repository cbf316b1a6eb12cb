//! A small pod: what its endpoints are and report.

use std::collections::BTreeMap;

use cxl_pool::{Area, EndpointId, HostId, LineCount, LineOffset, Role};
use pod_protocol::reports::{DeviceReport, Join};
use pod_protocol::volume_table::VolumeTable;
use uuid::Uuid;

use crate::{Command, FabricWish, NicWish, Options};

/// Bytes of a MiB.
pub const MIB: u64 = 1 << 20;

/// Of a pod whose pool is so large.
pub fn options(pool_mib: u64) -> Options {
    let lines = |bytes: u64| LineCount::covering(bytes);
    Options {
        pool: Uuid::from_u128(0xabcd << 112),
        data: Area { start: LineOffset::new(2 * MIB / 64), lines: lines(pool_mib * MIB) },
        tx_area: lines(2 * MIB),
        rx_area: lines(4 * MIB),
        data_area: lines(2 * MIB),
        net_slots: 1024,
        blk_slots: 256,
        rx_quota_buffers: 256,
        disk_queues: 1,
        socket_name_bytes_max: 80,
        regions_max: crate::REGIONS_MAX,
        nic_leases_max: crate::NIC_LEASES_MAX,
        placement: crate::PlacementPolicy::default(),
        protocol_minor: 0,
    }
}

/// A host's daemon of this role.
pub fn endpoint(host: u16, role: Role) -> EndpointId {
    EndpointId::new(HostId::new(host), role)
}

/// What it says when it joins with these devices.
pub fn join(host: u16, devices: Vec<DeviceReport>) -> Join {
    Join {
        host_name: format!("h{host}"),
        software: "test 1".to_owned(),
        pid: 7,
        devices,
        memory_failures: Vec::new(),
        fence_ms: None,
    }
}

/// An instance on this host with these NICs and volumes, about which nothing else was said.
pub fn create_instance(name: &str, host: u16, nics: Vec<NicWish>, volumes: &[&str]) -> Command {
    Command::CreateInstance {
        name: name.to_owned(),
        host: HostId::new(host),
        nics,
        volumes: volumes.iter().map(|name| (*name).to_owned()).collect(),
        instance_type: None,
        vmm_listens: false,
        ram_bytes: None,
        priority: None,
    }
}

/// A NIC as its backend reports it: of 10 Gbit/s, up or down, a backup or not.
pub fn nic(name: &str, up: bool, backup: bool) -> DeviceReport {
    DeviceReport::Nic {
        name: name.to_owned(),
        driver: "null".to_owned(),
        mac: None,
        up,
        speed_mbps: 10_000,
        mtu: 1500,
        features: 0b1011,
        backup,
        lag: None,
    }
}

/// An empty SSD of so many MiB as its backend reports it.
pub fn ssd(name: &str, mib: u64) -> DeviceReport {
    DeviceReport::Ssd {
        name: name.to_owned(),
        driver: "null".to_owned(),
        size_bytes: mib * MIB,
        block_bytes: 512,
        discard_granularity_bytes: None,
        table: None,
        reserved_bytes: 0,
        identity: None,
        iops: Some(10_000),
        // Less than as many requests of a page.
        bytes_per_second: Some(30 << 20),
    }
}

/// An SSD that keeps its table of volumes, and has none: what the controller knows is more.
pub(super) fn with_table(mut report: DeviceReport) -> DeviceReport {
    if let DeviceReport::Ssd { table, .. } = &mut report {
        *table = Some(VolumeTable::default());
    }
    report
}

/// What endpoints of a host report: host 1 has none, host 2 a NIC and an SSD, host 3 a backup NIC, another NIC, an SSD with a table.
pub fn devices_of(endpoint: EndpointId, up: bool) -> Vec<DeviceReport> {
    match (endpoint.host.get(), endpoint.role) {
        (2, Role::NetBackend) => vec![nic("nic0", up, false)],
        (3, Role::NetBackend) => vec![nic("nic0", true, true), nic("nic1", up, false)],
        (2, Role::BlkBackend) => vec![ssd("ssd0", 64)],
        (3, Role::BlkBackend) => vec![with_table(ssd("ssd0", 32))],
        _ => Vec::new(),
    }
}

/// A fabric of so many elements that carry as much, and a tenant or none.
pub fn fabric(elements: u8, tenant: bool, bytes_per_second: u64) -> FabricWish {
    FabricWish {
        window_us: 1000,
        sample_us: 10_000,
        elements: (0..elements).map(|number| (format!("link{number}"), bytes_per_second)).collect(),
        tenants: tenant.then(|| ("red".to_owned(), 2)).into_iter().collect(),
        signals: BTreeMap::new(),
    }
}
