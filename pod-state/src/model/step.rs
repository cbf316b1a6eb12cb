//! What may happen to a pod, drawn at random.

use cxl_pool::Role;
use proptest::prelude::*;

/// A step of a run. Numbers pick from what there is, so that most steps do something.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Without one of its devices, now and then.
    Join {
        host: u16,
        role: usize,
        restart: bool,
        up: bool,
        lacks: Option<usize>,
    },
    Silent {
        host: u16,
        role: usize,
    },
    Back {
        host: u16,
        role: usize,
    },
    Gone {
        host: u16,
        role: usize,
    },
    FenceExpired {
        host: u16,
    },
    Link {
        host: u16,
        nic: u8,
        up: bool,
    },
    Failed {
        host: u16,
        nic: u8,
    },
    DeviceBack {
        host: u16,
        nic: u8,
        up: bool,
    },
    Migrate {
        name: u8,
        to: Option<(u16, u8)>,
    },
    Drained {
        lease: usize,
    },
    Speaks {
        minor: u16,
    },
    Relieve {
        host: u16,
        mbps: u64,
    },
    FailBack {
        host: u16,
        nic: u8,
    },
    Drain {
        host: u16,
        device: Option<bool>,
        on: bool,
    },
    Label {
        host: u16,
        device: Option<bool>,
        value: Option<u8>,
    },
    Trust {
        host: u16,
        nic: u8,
        held: bool,
    },
    Attach {
        lease: usize,
        incoming: bool,
        connected: bool,
        running: bool,
    },
    MoveTo {
        name: u8,
        host: u16,
    },
    StayHere {
        name: u8,
    },
    MovedTo {
        name: u8,
        force: bool,
    },
    Scrub {
        endpoint: usize,
        region: usize,
    },
    ScrubAll,
    CreateVolume {
        name: u8,
        mib: u64,
        device: Option<u16>,
        replicas: u8,
        iops: Option<u64>,
        groups: InGroups,
    },
    CreateStriped {
        name: u8,
        mib: u64,
        iops: Option<u64>,
        groups: InGroups,
    },
    Protect {
        name: u8,
        on: bool,
    },
    Group {
        name: u8,
        groups: InGroups,
    },
    Replica {
        volume: usize,
        number: u32,
        epoch: u64,
        says: Says,
    },
    AddReplica {
        name: u8,
        device: Option<(u16, u8)>,
        replaces: Option<(u16, u8)>,
    },
    RemoveReplica {
        name: u8,
        ssd: (u16, u8),
    },
    DeleteVolume {
        name: u8,
    },
    DeleteDevice {
        host: u16,
        nic: Option<u8>,
        lose_data: bool,
    },
    WipeAll,
    Copiers,
    CreateInstance {
        name: u8,
        host: u16,
        nics: usize,
        volumes: Vec<u8>,
        mac: Option<u8>,
        ask: Ask,
    },
    DeleteInstance {
        name: u8,
    },
    DeviceComes {
        name: u8,
        volume: Option<u8>,
    },
    DeviceGoes {
        lease: usize,
        force: bool,
        answer: Option<bool>,
    },
    Fabric {
        elements: u8,
        tenant: bool,
        mb_per_second: u64,
    },
    Mchannel {
        name: u8,
        weight: u32,
        element: u8,
        tenant: bool,
    },
    ClearMchannel {
        name: u8,
    },
}

/// In which groups of volumes one is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InGroups {
    pub(super) apart: bool,
    pub(super) together: bool,
}

fn in_groups() -> impl Strategy<Value = InGroups> {
    let both = (prop::bool::weighted(0.3), prop::bool::weighted(0.2));
    both.prop_map(|(apart, together)| InGroups { apart, together })
}

/// What is asked of NICs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) reserved_mbps: u64,
    pub(super) apart: bool,
    pub(super) together: bool,
    /// By way of an instance type.
    pub(super) by_type: bool,
    /// MiB of RAM in the pool.
    pub(super) ram_mib: Option<u64>,
}

fn ask() -> impl Strategy<Value = Ask> {
    let reserved = prop_oneof![2 => Just(0), 3 => 500_u64..7000];
    let ram = prop::option::weighted(0.4, 1_u64..8);
    (reserved, prop::bool::weighted(0.2), prop::bool::weighted(0.2), prop::bool::weighted(0.3), ram).prop_map(
        |(reserved_mbps, apart, together, by_type, ram_mib)| Ask {
            reserved_mbps,
            apart,
            together,
            by_type,
            ram_mib,
        },
    )
}

/// What a frontend says of a replica.
#[derive(Clone, Copy, Debug)]
pub(super) enum Says {
    Failed,
    Synced,
    Left,
}

pub(super) const ROLES: [Role; 4] =
    [Role::NetFrontend, Role::NetBackend, Role::BlkFrontend, Role::BlkBackend];

/// All daemons of all hosts join, and there are a few volumes and instances.
pub(super) fn everybody() -> Vec<Step> {
    let join = |(host, role)| Step::Join { host, role, restart: false, up: true, lacks: None };
    let groups = InGroups::default();
    let volume = |name: u8| Step::CreateVolume {
        name,
        mib: 2,
        device: None,
        replicas: 1 + name % 2,
        iops: None,
        groups,
    };
    let joins = (1..4).flat_map(|host| (0..ROLES.len()).map(move |role| join((host, role))));
    let ask = Ask { reserved_mbps: 0, apart: false, together: false, by_type: false, ram_mib: None };
    let instance = |name: u8| Step::CreateInstance {
        name,
        host: u16::from(name) + 1,
        nics: 1,
        volumes: vec![name],
        mac: None,
        ask,
    };
    joins.chain((0..5).map(volume)).chain((0..3).map(instance)).collect()
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    let (host, role) = (1_u16..4, 0_usize..4);
    // A host and which of its SSDs: often of the same host.
    let ssd = (1_u16..4, 0_u8..2);
    prop_oneof![
        8 => (host.clone(), role.clone(), any::<bool>(), prop::bool::weighted(0.8), prop::option::weighted(0.3, 0_usize..2))
            .prop_map(|(host, role, restart, up, lacks)| Step::Join { host, role, restart, up, lacks }),
        2 => (host.clone(), role.clone()).prop_map(|(host, role)| Step::Silent { host, role }),
        1 => (host.clone(), role.clone()).prop_map(|(host, role)| Step::Back { host, role }),
        1 => (host.clone(), role).prop_map(|(host, role)| Step::Gone { host, role }),
        1 => host.clone().prop_map(|host| Step::FenceExpired { host }),
        3 => (host.clone(), 0_u8..2, any::<bool>()).prop_map(|(host, nic, up)| Step::Link { host, nic, up }),
        1 => (host.clone(), 0_u8..2).prop_map(|(host, nic)| Step::Failed { host, nic }),
        1 => (host.clone(), 0_u8..2, any::<bool>()).prop_map(|(host, nic, up)| Step::DeviceBack { host, nic, up }),
        3 => (0_u8..5, prop::option::of((host.clone(), 0_u8..2))).prop_map(|(name, to)| Step::Migrate { name, to }),
        2 => (0_usize..8).prop_map(|lease| Step::Drained { lease }),
        1 => prop::bool::weighted(0.8).prop_map(|new| Step::Speaks { minor: new.into() }),
        2 => (host.clone(), 0_u64..12_000).prop_map(|(host, mbps)| Step::Relieve { host, mbps }),
        1 => (host.clone(), 0_u8..2).prop_map(|(host, nic)| Step::FailBack { host, nic }),
        2 => (host.clone(), any::<Option<bool>>(), any::<bool>())
            .prop_map(|(host, device, on)| Step::Drain { host, device, on }),
        1 => (host.clone(), any::<Option<bool>>(), prop::option::of(0_u8..2))
            .prop_map(|(host, device, value)| Step::Label { host, device, value }),
        1 => (host.clone(), 0_u8..2, any::<bool>()).prop_map(|(host, nic, held)| Step::Trust { host, nic, held }),
        4 => (0_usize..8, any::<bool>(), any::<bool>(), any::<bool>()).prop_map(
            |(lease, incoming, connected, running)| Step::Attach { lease, incoming, connected, running }
        ),
        3 => (0_u8..5, host.clone()).prop_map(|(name, host)| Step::MoveTo { name, host }),
        1 => (0_u8..5).prop_map(|name| Step::StayHere { name }),
        1 => (0_u8..5, any::<bool>()).prop_map(|(name, force)| Step::MovedTo { name, force }),
        4 => (0_usize..12, 0_usize..8).prop_map(|(endpoint, region)| Step::Scrub { endpoint, region }),
        2 => Just(Step::ScrubAll),
        3 => (0_u8..5, 1_u64..20, prop::option::of(2_u16..4), 1_u8..3, prop::option::of(1_u64..8000), in_groups()).prop_map(
            |(name, mib, device, replicas, iops, groups)| Step::CreateVolume { name, mib, device, replicas, iops, groups }
        ),
        2 => (0_u8..5, 1_u64..20, prop::option::of(1_u64..16_000), in_groups())
            .prop_map(|(name, mib, iops, groups)| Step::CreateStriped { name, mib, iops, groups }),
        2 => (0_u8..5, in_groups()).prop_map(|(name, groups)| Step::Group { name, groups }),
        1 => (0_u8..5, any::<bool>()).prop_map(|(name, on)| Step::Protect { name, on }),
        5 => (0_usize..4, 0_u32..4, 0_u64..2, prop::sample::select(vec![Says::Failed, Says::Synced, Says::Left]))
            .prop_map(|(volume, number, epoch, says)| Step::Replica { volume, number, epoch, says }),
        3 => (0_u8..5, prop::option::of(ssd.clone()), prop::option::of(ssd.clone()))
            .prop_map(|(name, device, replaces)| Step::AddReplica { name, device, replaces }),
        1 => (0_u8..5, ssd).prop_map(|(name, ssd)| Step::RemoveReplica { name, ssd }),
        1 => (0_u8..5).prop_map(|name| Step::DeleteVolume { name }),
        2 => (host.clone(), prop::option::of(0_u8..2), prop::bool::weighted(0.7))
            .prop_map(|(host, nic, lose_data)| Step::DeleteDevice { host, nic, lose_data }),
        1 => Just(Step::WipeAll),
        2 => Just(Step::Copiers),
        5 => (0_u8..5, host, 0_usize..3, prop::collection::vec(0_u8..5, 0..3), prop::option::of(0_u8..4), ask()).prop_map(
            |(name, host, nics, volumes, mac, ask)| Step::CreateInstance { name, host, nics, volumes, mac, ask }
        ),
        2 => (0_u8..5).prop_map(|name| Step::DeleteInstance { name }),
        3 => (0_u8..5, prop::option::of(0_u8..5)).prop_map(|(name, volume)| Step::DeviceComes { name, volume }),
        3 => (0_usize..8, any::<bool>(), prop::option::weighted(0.3, any::<bool>()))
            .prop_map(|(lease, force, answer)| Step::DeviceGoes { lease, force, answer }),
        2 => (0_u8..3, any::<bool>(), 1_u64..100)
            .prop_map(|(elements, tenant, mb_per_second)| Step::Fabric { elements, tenant, mb_per_second }),
        3 => (0_u8..5, 1_u32..5, 0_u8..2, any::<bool>())
            .prop_map(|(name, weight, element, tenant)| Step::Mchannel { name, weight, element, tenant }),
        1 => (0_u8..5).prop_map(|name| Step::ClearMchannel { name }),
    ]
}
