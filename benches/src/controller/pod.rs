//! A pod of which there is nothing but the controller's state.

use anyhow::{Context, Result, anyhow, ensure};
use cxl_pool::simulated::Random;
use cxl_pool::{Area, EndpointId, HostId, LineCount, LineOffset, REGION_SLOTS_MOST, Role};
use pod_protocol::protocol::Protocol;
use pod_protocol::reports::{DeviceReport, Join};
use pod_state::{Command, Groups, NIC_LEASES_MAX, NicWish, Options, PlacementPolicy, State};
use uuid::Uuid;

/// NICs, and SSDs, of each host that has devices: every second one.
pub(super) const DEVICES: u32 = 10;
const VOLUME_BYTES: u64 = 10 << 30;
/// What an instance reserves.
const RESERVED_MBPS: u64 = 500;
/// One host in so many of those with devices has backup NICs only.
const BACKUPS: u16 = 8;

/// A pod.
pub(super) struct Pod {
    state: State,
    hosts: u16,
}

/// How many devices a pod of so many hosts has.
pub(super) fn devices(hosts: u16) -> u32 {
    u32::from(hosts / 2) * DEVICES * 2
}

impl Pod {
    /// A pod whose daemons have joined.
    pub(super) fn new(hosts: u16) -> Result<Self> {
        let mut pod = Self { state: State::new(options()), hosts };
        for number in 1..=hosts {
            for role in [Role::NetFrontend, Role::NetBackend, Role::BlkFrontend, Role::BlkBackend] {
                pod.join(number, role)?;
            }
        }
        Ok(pod)
    }

    /// Places a volume.
    pub(super) fn place_volume(&mut self, number: u32) -> Result<()> {
        self.apply(&Command::CreateVolume {
            name: format!("disk{number}"),
            size_bytes: VOLUME_BYTES,
            device: None,
            replicas: 1,
            minimum_iops: None,
            minimum_bytes_per_second: None,
            groups: Groups::default(),
        })
    }

    /// Places an instance with a NIC, on one host after the other.
    pub(super) fn place(&mut self, number: u32) -> Result<()> {
        self.place_with(number, Vec::new())
    }

    /// Places an instance with a NIC and a disk: each its own one of the volumes, in an order of [`in_any_order`].
    pub(super) fn place_with_disk(&mut self, number: u32, order: &[u32]) -> Result<()> {
        let volume = order.get(usize::try_from(number)?).context("there is no such volume")?;
        self.place_with(number, vec![format!("disk{volume}")])
    }

    /// How many channels there are.
    pub(super) fn channels(&self) -> usize {
        self.state.channels.len()
    }

    fn place_with(&mut self, number: u32, volumes: Vec<String>) -> Result<()> {
        let host = HostId::new(u16::try_from(number % u32::from(self.hosts))? + 1);
        let nics = vec![NicWish { reserved_mbps: RESERVED_MBPS, ..NicWish::default() }];
        let name = format!("vm{number}");
        self.apply(&Command::CreateInstance {
            name,
            host,
            nics,
            volumes,
            instance_type: None,
            vmm_listens: false,
            ram_bytes: None,
            priority: None,
        })
    }

    /// A host with devices fails: everything on its NICs moves, and gets another backup. Returns how much.
    pub(super) fn fail_host(&mut self) -> Result<u64> {
        let endpoint = EndpointId::new(HostId::new(2), Role::NetBackend);
        self.apply(&Command::Silent { endpoint })?;
        self.apply(&Command::FenceExpired { endpoint, incarnation: 1 })?;
        // Backups are chosen with whatever is commanded next, which may be nothing.
        while self.state.lacks_backups() {
            self.apply(&Command::nothing())?;
        }
        let left = self
            .state
            .leases
            .values()
            .filter(|it| it.active_nic().is_some_and(|nic| nic.host == endpoint.host));
        ensure!(left.count() == 0, "leases stayed on the NICs of a host that failed");
        ensure!(self.state.failovers > 0, "nothing was on the host that failed");
        Ok(self.state.failovers)
    }

    /// How long its state is as it is kept.
    pub(super) fn bytes(&self) -> Result<f64> {
        #[expect(clippy::cast_precision_loss, reason = "a figure to be shown")]
        Ok(serde_json::to_vec(&self.state)?.len() as f64)
    }

    pub(super) fn state(&self) -> &State {
        &self.state
    }

    fn apply(&mut self, command: &Command) -> Result<()> {
        let applied = self.state.apply(command);
        applied.map(drop).map_err(|refusal| anyhow!("{command:?} was refused: {refusal}"))
    }

    fn join(&mut self, number: u16, role: Role) -> Result<()> {
        let join = join(number, role);
        let endpoint = EndpointId::new(HostId::new(number), role);
        self.apply(&Command::Join { endpoint, incarnation: 1, join })
    }
}

/// So many numbers, shuffled, and the same each time. In any order by a rule, a host would get volumes of a few SSDs, or of many, as
/// the numbers of hosts and SSDs happen to fit: and so a few channels, or many.
pub(super) fn in_any_order(count: u32) -> Vec<u32> {
    let mut random = Random::new(1);
    let mut order: Vec<(u64, u32)> = (0..count).map(|number| (random.bits(), number)).collect();
    order.sort_unstable();
    order.into_iter().map(|(_, number)| number).collect()
}

/// What a daemon of a host says when it joins.
pub(super) fn join(number: u16, role: Role) -> Join {
    let owns = number.is_multiple_of(2);
    let backup = has_backups(number);
    let devices = match role {
        Role::NetBackend if owns => (0..DEVICES).map(|nic| nic_report(nic, backup)).collect(),
        Role::BlkBackend if owns => (0..DEVICES).map(ssd_report).collect(),
        _ => Vec::new(),
    };
    Join {
        host_name: format!("h{number}"),
        software: "bench 1".to_owned(),
        pid: 1,
        devices,
        memory_failures: Vec::new(),
        fence_ms: None,
    }
}

/// Whether a host's NICs are kept for failover.
pub(super) fn has_backups(host: u16) -> bool {
    (host / 2).is_multiple_of(BACKUPS)
}

/// What a daemon says of a NIC.
pub(super) fn nic_report(number: u32, backup: bool) -> DeviceReport {
    DeviceReport::Nic {
        name: format!("nic{number}"),
        driver: "null".to_owned(),
        mac: None,
        up: true,
        speed_mbps: 100_000,
        mtu: 1500,
        features: 0,
        backup,
        lag: None,
    }
}

/// What a daemon says of an SSD.
pub(super) fn ssd_report(number: u32) -> DeviceReport {
    DeviceReport::Ssd {
        name: format!("ssd{number}"),
        driver: "null".to_owned(),
        size_bytes: 1 << 40,
        block_bytes: 4096,
        discard_granularity_bytes: None,
        table: None,
        reserved_bytes: 0,
        identity: None,
        iops: None,
        bytes_per_second: None,
    }
}

/// The default sizes, in a pool of 8 TiB.
pub(super) fn options() -> Options {
    Options {
        pool: Uuid::from_u128(1),
        data: Area { start: LineOffset::new(0), lines: LineCount::covering(8 << 40) },
        tx_area: LineCount::covering(16 << 20),
        rx_area: LineCount::covering(32 << 20),
        data_area: LineCount::covering(16 << 20),
        net_slots: 8192,
        blk_slots: 8192,
        rx_quota_buffers: 4096,
        disk_queues: 1,
        socket_name_bytes_max: 80,
        regions_max: REGION_SLOTS_MOST as usize,
        nic_leases_max: NIC_LEASES_MAX,
        placement: PlacementPolicy::default(),
        protocol_minor: Protocol::CURRENT.minor,
    }
}
