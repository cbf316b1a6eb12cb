//! What is promised of devices, and to whom.

use super::*;
use crate::model::{check_reservations, pod_with_ssds, ssd_of};

/// Hosts 1 to 6 with net daemons: each of 2 to 5 has an ordinary NIC, 6 has the backup.
fn pod_of_six(policy: PlacementPolicy) -> State {
    let mut state = State::new(Options { placement: policy, ..options(2048) });
    for host in 1..=6 {
        let device = nic("nic0", true, host == 6);
        let devices = if host == 1 { Vec::new() } else { vec![device] };
        for (role, devices) in [(Role::NetFrontend, Vec::new()), (Role::NetBackend, devices)] {
            let id = endpoint(host, role);
            must(&mut state, &Command::Join { endpoint: id, incarnation: 1, join: join(host, devices) });
        }
    }
    state
}

pub(super) fn create(name: &str, host: u16, wish: NicWish) -> Command {
    create_instance(name, host, vec![wish], &[])
}

pub(super) fn reserve(mbps: u64) -> NicWish {
    NicWish { reserved_mbps: mbps, ..NicWish::default() }
}

fn nic_of(state: &State, instance: &str) -> String {
    let id = state.instance_named(instance).expect("an instance").nics[0];
    state.device_name(state.leases[&id].active_nic().expect("a NIC"))
}

#[test]
fn a_full_nic_sends_the_next_one_elsewhere_and_a_full_pod_says_so() {
    let mut state = pod_of_six(PlacementPolicy::default());
    must(&mut state, &create("a", 2, reserve(6000)));
    must(&mut state, &create("b", 2, reserve(5000)));
    assert_eq!((nic_of(&state, "a").as_str(), nic_of(&state, "b").as_str()), ("h2/nic0", "h3/nic0"));
    // What reserves nothing stays local, however full it is there.
    must(&mut state, &create("c", 2, NicWish::default()));
    assert_eq!(nic_of(&state, "c"), "h2/nic0");
    let refusal = refused(&mut state, &create("d", 2, reserve(10_001)));
    assert_eq!(refusal.kind, RefusalKind::NoRoom);
    assert!(
        refusal.detail.contains("10000") && refusal.detail.contains("nic-overcommit-percent"),
        "{refusal}"
    );
}

#[test]
fn the_backup_must_be_able_to_carry_the_failure_of_any_one_host() {
    let mut state = pod_of_six(PlacementPolicy::default());
    // Different hosts do not fail together: the one backup stands for all of them.
    for (name, host) in [("a", 2), ("b", 3), ("c", 4), ("d", 5)] {
        must(&mut state, &create(name, host, reserve(8000)));
        check_reservations(&state, name);
    }
    // The backup itself carries nobody who reserves, for its own host can fail, and others need it.
    let refusal = refused(&mut state, &create("e", 6, reserve(3000)));
    assert_eq!(refusal.kind, RefusalKind::NoRoom);

    let backup = DeviceId { host: HostId::new(6), name: "nic0".into() };
    must(&mut state, &Command::Link { device: backup, up: false, reason: "no cable".to_owned() });
    let refusal = refused(&mut state, &create("e", 2, reserve(1000)));
    assert!(
        refusal.detail.contains("no backup NIC") && refusal.detail.contains("prove-failover"),
        "{refusal}"
    );
    must(&mut state, &create("e", 2, NicWish::default()));

    let policy = PlacementPolicy { prove_failover: false, ..PlacementPolicy::default() };
    let options = Options { placement: policy, ..state.options.clone() };
    must(&mut state, &Command::Configure { options });
    must(&mut state, &create("f", 2, reserve(1000)));
}

#[test]
fn overcommit_promises_more_than_there_is() {
    let policy = PlacementPolicy { nic_overcommit_percent: 200, ..PlacementPolicy::default() };
    let mut state = pod_of_six(policy);
    for name in ["a", "b"] {
        must(&mut state, &create(name, 2, reserve(9000)));
        check_reservations(&state, name);
    }
    assert_eq!((nic_of(&state, "a").as_str(), nic_of(&state, "b").as_str()), ("h2/nic0", "h2/nic0"));
}

#[test]
fn groups_are_apart_or_together() {
    let mut state = pod_of_six(PlacementPolicy::default());
    let apart = || NicWish { apart: Some("db".to_owned()), ..NicWish::default() };
    let mut hosts = BTreeSet::new();
    for name in ["a", "b", "c", "d", "e"] {
        must(&mut state, &create(name, 2, apart()));
        assert!(hosts.insert(nic_of(&state, name)), "{name} shares a host");
    }
    let refusal = refused(&mut state, &create("f", 2, apart()));
    assert!(refusal.kind == RefusalKind::NoDevice && refusal.detail.contains("db"), "{refusal}");

    let together = || NicWish { together: Some("web".to_owned()), ..NicWish::default() };
    must(&mut state, &create("g", 4, together()));
    must(&mut state, &create("h", 3, together()));
    assert_eq!((nic_of(&state, "g").as_str(), nic_of(&state, "h").as_str()), ("h4/nic0", "h4/nic0"));
    let nameless = NicWish { apart: Some(String::new()), ..NicWish::default() };
    assert_eq!(refused(&mut state, &create("i", 2, nameless)).kind, RefusalKind::InvalidValue);
}

#[test]
fn a_move_keeps_what_is_reserved() {
    let mut state = pod_of_six(PlacementPolicy::default());
    must(&mut state, &create("a", 2, reserve(6000)));
    must(&mut state, &create("b", 3, reserve(6000)));
    let to = |host: Option<u16>| Command::MigrateNic {
        instance: "a".to_owned(),
        device: "net0".to_owned(),
        to: host.map(|host| DeviceId { host: HostId::new(host), name: "nic0".into() }),
    };
    let refusal = refused(&mut state, &to(Some(3)));
    assert!(refusal.kind == RefusalKind::NoRoom && refusal.detail.contains("6000"), "{refusal}");
    must(&mut state, &to(None));
    assert_eq!(nic_of(&state, "a"), "h4/nic0");
    check_reservations(&state, "a");
    // A host that is to be empty sends it on, to where it fits.
    must(&mut state, &create("c", 5, reserve(6000)));
    let drain = |host, on| Command::Drain { host: HostId::new(host), device: None, on };
    must(&mut state, &create("d", 2, reserve(9000)));
    let (lease, generation) = state.drains().next().expect("it still hears the old NIC");
    must(&mut state, &Command::DrainExpired { lease, generation });
    must(&mut state, &drain(4, true));
    assert_eq!(nic_of(&state, "a"), "h4/nic0", "on the backup it would take the room that others need there");
    must(&mut state, &Command::DeleteInstance { name: "d".to_owned(), force: true });
    assert_eq!(nic_of(&state, "a"), "h2/nic0");
    check_reservations(&state, "a");
}

#[test]
fn requests_per_second_of_an_ssd_run_out() {
    let mut state = pod();
    let volume = |name: &str, iops: Option<u64>| Command::CreateVolume {
        name: name.to_owned(),
        size_bytes: MIB,
        device: None,
        replicas: 1,
        minimum_iops: iops,
        minimum_bytes_per_second: None,
        groups: Groups::default(),
    };
    must(&mut state, &volume("a", Some(6000)));
    let refusal = refused(&mut state, &volume("b", Some(5000)));
    assert!(refusal.kind == RefusalKind::NoRoom && refusal.detail.contains("5000 requests/s"), "{refusal}");
    must(&mut state, &volume("b", Some(4000)));
    must(&mut state, &volume("c", None));
    let raise = |name: &str, iops: u64| {
        let qos = Some(Qos { minimum_iops: Some(iops), ..Qos::default() });
        Command::ChangeVolume { name: name.to_owned(), size_bytes: None, qos, groups: None, read_only: None }
    };
    let refusal = refused(&mut state, &raise("c", 1));
    assert!(refusal.kind == RefusalKind::NoRoom && refusal.detail.contains("h2/ssd0"), "{refusal}");
    must(&mut state, &raise("a", 5000));
    must(&mut state, &raise("c", 1000));
}

#[test]
fn overcommit_promises_more_of_ssds_than_they_can_do() {
    let mut state = pod_with_ssds(&[(Some(10_000), None)]);
    let sure = |name: &str, iops: u64| Command::CreateVolume {
        name: name.to_owned(),
        size_bytes: MIB,
        device: None,
        replicas: 1,
        minimum_iops: Some(iops),
        minimum_bytes_per_second: None,
        groups: Groups::default(),
    };
    must(&mut state, &sure("a", 10_000));
    refused(&mut state, &sure("b", 5000));
    let placement = PlacementPolicy { ssd_overcommit_percent: 150, ..PlacementPolicy::default() };
    let options = Options { placement, ..state.options.clone() };
    must(&mut state, &Command::Configure { options });
    must(&mut state, &sure("b", 5000));
    refused(&mut state, &sure("c", 1));
}

#[test]
fn a_volume_lies_near_its_host_where_there_is_room() {
    let mut state = pod_with_ssds(&[(Some(10_000), None), (Some(10_000), None)]);
    let sure = |iops: u64| Qos { minimum_iops: Some(iops), ..Qos::default() };
    let host = HostId::new(2);
    let command = Command::CreateVolume {
        name: "a".to_owned(),
        size_bytes: MIB,
        device: state.ssd_near(host, MIB, (&sure(6000), &Groups::default())),
        replicas: 1,
        minimum_iops: Some(6000),
        minimum_bytes_per_second: None,
        groups: Groups::default(),
    };
    must(&mut state, &command);
    // Its own SSD comes first though the other one is empty.
    assert_eq!(state.ssd_near(host, MIB, (&Qos::default(), &Groups::default())), Some(ssd_of(2)));
    assert_eq!(
        state.ssd_near(host, MIB, (&sure(6000), &Groups::default())),
        None,
        "nothing more can be sure of so much there"
    );
    assert_eq!(
        state.ssd_near(host, 1 << 40, (&Qos::default(), &Groups::default())),
        None,
        "there is no room for so much"
    );
    assert_eq!(
        state.ssd_near(HostId::new(1), MIB, (&Qos::default(), &Groups::default())),
        None,
        "this host has no SSD"
    );
}

#[test]
fn bandwidth_of_an_ssd_runs_out() {
    let mut state = pod();
    let volume = |name: &str, iops: Option<u64>, mib: Option<u64>| Command::CreateVolume {
        name: name.to_owned(),
        size_bytes: MIB,
        device: None,
        replicas: 1,
        minimum_iops: iops,
        minimum_bytes_per_second: mib.map(|mib| mib * MIB),
        groups: Groups::default(),
    };
    must(&mut state, &volume("a", None, Some(20)));
    let refusal = refused(&mut state, &volume("b", None, Some(11)));
    assert!(refusal.kind == RefusalKind::NoRoom && refusal.detail.contains("11.0 MiB/s"), "{refusal}");
    let refusal = refused(&mut state, &volume("b", Some(10), Some(11)));
    assert!(refusal.detail.contains("10 requests/s and 11.0 MiB/s"), "{refusal}");
    must(&mut state, &volume("b", Some(10), Some(10)));
    must(&mut state, &volume("c", Some(10), None));
    let raise = |name: &str, iops: Option<u64>, bytes: u64| {
        let qos = Qos { minimum_iops: iops, minimum_bytes_per_second: Some(bytes), ..Qos::default() };
        Command::ChangeVolume {
            name: name.to_owned(),
            size_bytes: None,
            qos: Some(qos),
            groups: None,
            read_only: None,
        }
    };
    let refusal = refused(&mut state, &raise("c", Some(10), 1));
    assert!(refusal.kind == RefusalKind::NoRoom && refusal.detail.contains("h2/ssd0"), "{refusal}");
    must(&mut state, &raise("a", Some(9000), 15 * MIB));
    must(&mut state, &raise("c", Some(10), 5 * MIB));

    // An SSD that does less than it did is no reason to refuse that less is reserved.
    let mut reports = devices_of(endpoint(2, Role::BlkBackend), true);
    for report in &mut reports {
        if let DeviceReport::Ssd { bytes_per_second, .. } = report {
            *bytes_per_second = Some(5 * MIB);
        }
    }
    let id = endpoint(2, Role::BlkBackend);
    must(&mut state, &Command::Join { endpoint: id, incarnation: 2, join: join(2, reports) });
    assert_eq!(refused(&mut state, &raise("a", None, 16 * MIB)).kind, RefusalKind::NoRoom);
    must(&mut state, &raise("a", None, 14 * MIB));
}

#[test]
fn an_instance_gets_what_its_type_says() {
    let mut state = pod_of_six(PlacementPolicy::default());
    let small = InstanceType {
        nics: 2,
        reserved_mbps: 2000,
        queue_pairs: Some(2),
        volume_iops: None,
        priority: Priority::new(300),
        ..InstanceType::default()
    };
    let set = |instance_type: &InstanceType| Command::SetInstanceType {
        name: "small".to_owned(),
        instance_type: instance_type.clone(),
    };
    let of_type = |name: &str, nics: Vec<NicWish>| Command::CreateInstance {
        name: name.to_owned(),
        host: HostId::new(2),
        nics,
        volumes: Vec::new(),
        instance_type: Some("small".to_owned()),
        vmm_listens: false,
        ram_bytes: None,
        priority: None,
    };
    assert_eq!(refused(&mut state, &of_type("a", Vec::new())).kind, RefusalKind::NotFound);
    must(&mut state, &set(&small));
    must(&mut state, &of_type("a", Vec::new()));
    must(&mut state, &of_type("b", vec![reserve(500)]));
    assert_eq!(state.instance_named("a").unwrap().priority.get(), 300);
    must(&mut state, &set(&InstanceType { reserved_mbps: 1, ..small.clone() }));
    let asked = |state: &State, name: &str| -> Vec<(u64, u16)> {
        let nics = &state.instance_named(name).expect("an instance").nics;
        let nics = nics.iter().map(|id| match state.leases[id].kind {
            LeaseKind::Nic { reserved_mbps, queue_pairs, .. } => (reserved_mbps, queue_pairs),
            LeaseKind::Disk { .. } => (0, 0),
        });
        nics.collect()
    };
    assert_eq!((asked(&state, "a"), asked(&state, "b")), (vec![(2000, 2); 2], vec![(500, 2)]));
    // The engines see to it, and no change of the policy takes it away.
    let minimum = |state: &State| match &state.leases[&state.instance_named("a").unwrap().nics[0]].kind {
        LeaseKind::Nic { policy, .. } => policy.receive.minimum_bytes_per_second,
        LeaseKind::Disk { .. } => None,
    };
    assert_eq!(minimum(&state), Some(2000 * 125_000));
    let policy = NicPolicy { vlan: Some(7), ..NicPolicy::default() };
    let change = Command::ChangeNic { instance: "a".to_owned(), device: "net0".to_owned(), policy };
    must(&mut state, &change);
    assert_eq!(minimum(&state), Some(2000 * 125_000));
    assert_eq!(state.instance_named("a").unwrap().instance_type.as_deref(), Some("small"));
    let wrong = InstanceType { nics: 99, ..small.clone() };
    assert_eq!(refused(&mut state, &set(&wrong)).kind, RefusalKind::InvalidValue);
    let delete = || Command::DeleteInstanceType { name: "small".to_owned() };
    must(&mut state, &delete());
    assert_eq!(refused(&mut state, &delete()).kind, RefusalKind::NotFound);
}

/// As [`pod`], with volumes of which one is sure of something itself, and a type that promises 6000 of the SSD's 10 000 requests/s.
fn pod_that_promises() -> State {
    let mut state = pod();
    speak(&mut state, Protocol::ENDS_PROMISES);
    for (name, minimum_iops) in [("a", None), ("b", None), ("c", Some(1000))] {
        let create = Command::CreateVolume {
            name: name.to_owned(),
            size_bytes: MIB,
            device: None,
            replicas: 1,
            minimum_iops,
            minimum_bytes_per_second: None,
            groups: Groups::default(),
        };
        must(&mut state, &create);
    }
    let instance_type = InstanceType { volume_iops: Some(6000), ..InstanceType::default() };
    must(&mut state, &Command::SetInstanceType { name: "fast".to_owned(), instance_type });
    state
}

fn fast(name: &str, volume: &str) -> Command {
    Command::CreateInstance {
        name: name.to_owned(),
        host: HostId::new(1),
        nics: Vec::new(),
        volumes: vec![volume.to_owned()],
        instance_type: Some("fast".to_owned()),
        vmm_listens: false,
        ram_bytes: None,
        priority: None,
    }
}

fn reserved_iops(state: &State) -> u64 {
    state.ssd_loads().get(&ssd_of(2)).map_or(0, |ssd| ssd.rates().iops)
}

#[test]
fn what_a_type_promises_of_volumes_ends_with_the_lease() {
    let mut state = pod_that_promises();
    for (volume, reserved) in [("a", 7000), ("b", 7000), ("c", 6000), ("a", 7000)] {
        must(&mut state, &fast("vm", volume));
        check_reservations(&state, "vm");
        assert_eq!(reserved_iops(&state), reserved);
        let other = if volume == "b" { "a" } else { "b" };
        assert_eq!(refused(&mut state, &fast("another", other)).kind, RefusalKind::NoRoom);
        must(&mut state, &Command::DeleteInstance { name: "vm".to_owned(), force: true });
        assert_eq!(reserved_iops(&state), 1000);
    }
    must(&mut state, &fast("vm", "a"));
    let attach = Command::AttachDevice { instance: "vm".to_owned(), nic: None, volume: Some("b".to_owned()) };
    assert_eq!(refused(&mut state, &attach).kind, RefusalKind::NoRoom);
    let detach = Command::DetachDevice { instance: "vm".to_owned(), device: "a".to_owned(), force: false };
    must(&mut state, &detach);
    assert_eq!(reserved_iops(&state), 1000);
    must(&mut state, &attach);
    check_reservations(&state, "vm");
}

#[test]
fn what_a_type_promises_holds_whatever_the_volume_is_sure_of_itself() {
    let mut state = pod_that_promises();
    must(&mut state, &fast("vm", "c"));
    let change = |qos| Command::ChangeVolume {
        name: "c".to_owned(),
        size_bytes: None,
        qos: Some(qos),
        groups: None,
        read_only: None,
    };
    let served = |state: &State| {
        let mut objects = state.desired(BLK_BACKEND).into_values();
        objects.find_map(|object| if let Object::Volume(it) = object { it.qos.minimum_iops } else { None })
    };
    assert_eq!(served(&state), Some(6000));
    must(&mut state, &change(Qos { minimum_iops: Some(500), ..Qos::default() }));
    assert_eq!((served(&state), reserved_iops(&state)), (Some(6000), 6000));
    let refusal = refused(&mut state, &change(Qos { iops: Some(5000), ..Qos::default() }));
    assert!(refusal.kind == RefusalKind::InvalidValue && refusal.detail.contains("6000"), "{refusal}");
    let kept = serde_json::to_vec(&state).expect("JSON");
    assert_eq!(serde_json::from_slice::<State>(&kept).expect("a state"), state);
    must(&mut state, &Command::DeleteInstance { name: "vm".to_owned(), force: true });
    assert_eq!(reserved_iops(&state), 500);
}

#[test]
fn a_pod_of_the_version_before_makes_promises_the_volumes_own() {
    let mut state = pod_that_promises();
    must(&mut state, &fast("vm", "a"));
    speak(&mut state, 0);
    assert_eq!(reserved_iops(&state), 7000);
    let written = serde_json::to_string(&state).expect("JSON");
    assert!(!written.contains("promised_iops"), "a controller of that version does not count it");
    must(&mut state, &Command::DeleteInstance { name: "vm".to_owned(), force: true });
    assert_eq!(reserved_iops(&state), 7000);
}

fn apart(group: &str) -> NicWish {
    NicWish { apart: Some(group.to_owned()), ..NicWish::default() }
}

/// Instances a and b on different hosts, each with a NIC that is to be apart from the other's.
fn two_apart() -> State {
    let mut state = pod_of_six(PlacementPolicy::default());
    speak(&mut state, Protocol::DECIDES_BY_MORE);
    must(&mut state, &create("a", 2, apart("db")));
    must(&mut state, &create("b", 3, apart("db")));
    assert_eq!((nic_of(&state, "a").as_str(), nic_of(&state, "b").as_str()), ("h2/nic0", "h3/nic0"));
    state
}

#[test]
fn a_lease_moves_in_order_only_to_where_it_is_apart() {
    let mut state = two_apart();
    let to = |host: u16| Command::MigrateNic {
        instance: "a".to_owned(),
        device: "net0".to_owned(),
        to: Some(DeviceId { host: HostId::new(host), name: "nic0".into() }),
    };
    assert_eq!(refused(&mut state, &to(3)).kind, RefusalKind::NoDevice);
    must(&mut state, &to(4));
    assert_eq!(nic_of(&state, "a"), "h4/nic0");
}

#[test]
fn a_lease_does_not_go_home_to_where_another_of_its_group_is_by_now() {
    let mut state = two_apart();
    let home = DeviceId { host: HostId::new(2), name: "nic0".into() };
    let link = |up| Command::Link { device: home.clone(), up, reason: "its cable".to_owned() };
    must(&mut state, &link(false));
    assert_ne!(nic_of(&state, "a"), "h2/nic0");
    must(&mut state, &link(true));
    must(&mut state, &create("c", 2, apart("db")));
    assert_eq!(nic_of(&state, "c"), "h2/nic0");
    let moved = nic_of(&state, "a");
    must(&mut state, &Command::FailBack { device: home });
    assert_eq!(nic_of(&state, "a"), moved);
}

#[test]
fn what_is_moved_at_once_for_its_load_stays_apart() {
    let mut state = two_apart();
    let nics: BTreeSet<DeviceId> =
        [2, 3].map(|host| DeviceId { host: HostId::new(host), name: "nic0".into() }).into();
    let lease = |state: &State, name: &str| state.instance_named(name).expect("an instance").nics[0];
    let leases = [(lease(&state, "a"), 4000), (lease(&state, "b"), 4000)].into();
    let carried = (2..=6).map(|host| {
        (DeviceId { host: HostId::new(host), name: "nic0".into() }, if host < 4 { 9500 } else { 0 })
    });
    let measured = Measured { nics: carried.collect(), leases };
    // One of the two that are idle looks better than the other.
    let device = DeviceReport::Nic {
        name: "nic0".to_owned(),
        driver: "null".to_owned(),
        mac: None,
        up: true,
        speed_mbps: 40_000,
        mtu: 1500,
        features: 0b1011,
        backup: false,
        lag: None,
    };
    let id = endpoint(4, Role::NetBackend);
    must(&mut state, &Command::Join { endpoint: id, incarnation: 2, join: join(4, vec![device]) });
    let relief = Relief { high_percent: 90, low_percent: 80, moves_max: 4 };
    let moves = state.plan_relief(&nics, &measured, &BTreeSet::new(), relief);
    let hosts: BTreeSet<HostId> = moves.iter().map(|it| it.to.host).collect();
    assert!(!moves.is_empty() && hosts.len() == moves.len(), "{moves:?}");
}
