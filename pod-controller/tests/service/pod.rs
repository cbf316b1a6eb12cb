//! The controller with real endpoints over a real pool.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::support::{FakeEndpoint, Pod, RunningController, nic, ssd, until, vm};
use cxl_pool::Role;
use pod_api::client::ClientError;
use pod_api::{
    ByteSize, CreateInstance, CreateVolume, DeviceHealth, DeviceKind, EventKind, InstanceTypeSpec,
    RegionState,
};
use pod_controller::controller::ControllerError;
use pod_controller::store::StoreError;
use pod_protocol::objects::{Object, RegistrationState};
use pod_protocol::reports::Report;

const WAIT: Duration = Duration::from_secs(30);

fn create_volume(pod: &Pod, name: &str) {
    let request = CreateVolume::new(name, ByteSize::new(64 << 20));
    pod.client().create_volume(&request).expect("room for a volume");
}

fn registrations(endpoint: &FakeEndpoint) -> Vec<RegistrationState> {
    let objects = endpoint.objects().into_values();
    objects
        .filter_map(|object| if let Object::Registration(it) = object { Some(it.state) } else { None })
        .collect()
}

#[test]
fn instance_is_ready_when_its_daemons_have_everything() {
    let pod = Pod::demo();
    create_volume(&pod, "vol0");
    let instance = pod.client().create_instance(&vm("vm1", &["vol0"]), WAIT).expect("created");
    assert!(instance.ready, "{:?}", instance.waiting_for);
    let nic = &instance.nics[0];
    assert_eq!((nic.nic.as_str(), nic.backup.as_deref()), ("h2/nic0", Some("h3/nic0")));
    assert_eq!(nic.socket, pod.path("run/sockets/vm1-net0.sock").display().to_string());
    assert_eq!(instance.disks[0].ssd, "h2/ssd0");
    assert_eq!(registrations(pod.endpoint(2, Role::NetBackend)), [RegistrationState::Active]);
    assert_eq!(registrations(pod.endpoint(3, Role::NetBackend)), [RegistrationState::Standby]);
    assert!(pod.endpoint(1, Role::NetFrontend).objects().values().any(|it| matches!(it, Object::Port(_))));
    assert!(pod.endpoint(1, Role::BlkFrontend).objects().values().any(|it| matches!(it, Object::Disk(_))));
}

#[test]
fn a_volume_lies_on_its_hosts_own_ssd_where_that_has_room() {
    let mut pod = Pod::demo();
    pod.join(3, Role::BlkBackend, vec![ssd("ssd0")]);
    until("the second SSD", || {
        pod.client().device("h3", "ssd0").ok().filter(|it| it.health == DeviceHealth::Up)
    });
    let create = |name: &str, near: &str, mib: u64| {
        let size = ByteSize::new(mib << 20);
        let request = CreateVolume { near: Some(near.to_owned()), ..CreateVolume::new(name, size) };
        pod.client().create_volume(&request).map(|volume| volume.device)
    };
    // Whichever the others are: each has less to do than the one that is near.
    assert_eq!(create("a", "h3", 512).expect("room"), "h3/ssd0");
    assert_eq!(create("b", "h3", 64).expect("room"), "h3/ssd0");
    assert_eq!(create("c", "h2", 64).expect("room"), "h2/ssd0");
    assert_eq!(create("d", "h3", 640).expect("room elsewhere"), "h2/ssd0");
    // A host without SSDs is near none: where most is free.
    assert_eq!(create("e", "h1", 64).expect("room elsewhere"), "h3/ssd0");
    assert_eq!(create("f", "h9", 64).expect_err("no such host").status(), Some(404));
    let wanted = Some("h2/ssd0".to_owned());
    let both = CreateVolume {
        near: Some("h2".to_owned()),
        device: wanted,
        ..CreateVolume::new("g", ByteSize::new(1 << 20))
    };
    assert_eq!(pod.client().create_volume(&both).expect_err("one or the other").status(), Some(400));
}

#[test]
fn devices_are_filled_as_the_configuration_says() {
    let mut pod = Pod::demo();
    create_volume(&pod, "vol0");
    pod.client().create_instance(&vm("vm1", &["vol0"]), WAIT).expect("created");
    let rules = |pod: &Pod| {
        let explained = pod.client().explain_instance("vm1").ok()?;
        Some(explained.devices.into_iter().map(|device| device.rule).collect::<Vec<_>>().join("; "))
    };
    let spread = rules(&pod).expect("an explanation");
    assert!(spread.contains("the least loaded") && spread.contains("largest share free"), "{spread}");
    pod.stop_controller();
    let config = pod.config_with("nic-placement = 'pack'\nssd-placement = 'pack'");
    pod.controller = Some(RunningController::start(&config).expect("a controller"));
    // Once everybody is back, and so the pod known to speak the version that has it.
    until("the rules of packing", || {
        let packed = rules(&pod)?;
        (packed.contains("the most loaded") && packed.contains("smallest share free")).then_some(())
    });
}

#[test]
fn what_is_reserved_is_promised_shown_and_explained() {
    let pod = Pod::demo();
    let client = pod.client();
    let labels = BTreeMap::from([("tier".to_owned(), "web".to_owned())]);
    let spec = InstanceTypeSpec { nics: 1, reserved_mbps: 6000, labels, ..InstanceTypeSpec::default() };
    client.set_instance_type("large", &spec).expect("set");
    assert_eq!(client.instance_type("large").expect("there").spec, spec);
    for (label, found) in [("tier=web", 1), ("tier=db", 0)] {
        assert_eq!(client.instance_types_with(&[("label", label)]).expect("a list").len(), found, "{label}");
    }
    let large = |name: &str| {
        let instance_type = Some("large".to_owned());
        CreateInstance { nics: Vec::new(), instance_type, ..vm(name, &[]) }
    };
    let tried = client.try_instance(&large("vm1")).expect("a dry run");
    assert_eq!((tried.nics[0].reserved_mbps, tried.nics[0].failover_proven), (6000, true));
    let instance = client.create_instance(&large("vm1"), WAIT).expect("created");
    assert_eq!(instance.instance_type.as_deref(), Some("large"));
    assert_eq!((instance.nics[0].nic.as_str(), instance.nics[0].failover_proven), ("h2/nic0", true));
    let refused = client.create_instance(&large("vm2"), WAIT).expect_err("there is one ordinary NIC");
    assert_eq!(refused.status(), Some(409));
    assert!(refused.to_string().contains("no NIC has 6000 Mbit/s left"), "{refused}");
    let device = client.device("h2", "nic0").expect("a NIC");
    let DeviceKind::Nic { capacity_mbps, reserved_mbps, .. } = device.kind else { panic!("no NIC") };
    assert_eq!((capacity_mbps, reserved_mbps), (10_000, 6000));
    let backup = client.device("h3", "nic0").expect("a NIC");
    let DeviceKind::Nic { spare_mbps, .. } = backup.kind else { panic!("no NIC") };
    assert_eq!(spare_mbps, 6000);
    let explained = client.explain_instance("vm1").expect("an explanation");
    assert!(explained.devices[0].on_failure.contains("6000 Mbit/s to spare"), "{explained:?}");
    client.delete_instance_type("large").expect("deleted");
    let gone = client.create_instance(&large("vm2"), WAIT).expect_err("no such type");
    assert_eq!(gone.status(), Some(404));
}

#[test]
fn lost_link_moves_the_instance() {
    let pod = Pod::demo();
    let client = pod.client();
    client.create_instance(&vm("vm1", &[]), WAIT).expect("created");
    let link = |up| Report::Link { device: "nic0".to_owned(), up, reason: "carrier".to_owned() };
    pod.endpoint(2, Role::NetBackend).reporter.report(link(false));
    until("the failover", || {
        let instance = client.instance("vm1").ok()?;
        (instance.nics[0].nic == "h3/nic0" && instance.ready).then_some(())
    });
    until("the backup NIC to be active", || {
        (registrations(pod.endpoint(3, Role::NetBackend)) == [RegistrationState::Active]).then_some(())
    });
    assert_eq!(client.device("h2", "nic0").expect("there").health, DeviceHealth::Down);
    let events = client.events(0).expect("events").events;
    assert!(events.iter().any(|event| event.kind == EventKind::Failover && event.subject == "vm1"));
}

#[test]
fn regions_are_asked_for_by_what_they_are_and_in_pages() {
    let pod = Pod::demo();
    create_volume(&pod, "vol0");
    let client = pod.client();
    client.create_instance(&vm("vm1", &["vol0"]), WAIT).expect("created");
    let pool = client.pool().expect("the pool");
    let rings = client.pool_with(&[("purpose", "rings"), ("state", "in-use")]).expect("the pool").regions;
    assert!(!rings.is_empty() && rings.len() < pool.regions.len());
    assert!(rings.iter().all(|region| region.purpose == "rings"), "{rings:?}");
    assert!(client.pool_with(&[("state", "failed")]).expect("the pool").regions.is_empty());
    let (mut paged, mut next) = (Vec::new(), None::<String>);
    loop {
        let mut fields = vec![("limit", "2")];
        fields.extend(next.as_deref().map(|next| ("continue", next)));
        let page = client.pool_with(&fields).expect("a page");
        assert!(page.regions.len() <= 2 && page.free_bytes == pool.free_bytes);
        paged.extend(page.regions);
        next = page.next;
        if next.is_none() {
            break;
        }
    }
    assert_eq!(paged, pool.regions);
}

#[test]
fn restarted_controller_disturbs_nothing() {
    let mut pod = Pod::demo();
    create_volume(&pod, "vol0");
    let before = pod.client().create_instance(&vm("vm1", &["vol0"]), WAIT).expect("created");
    let pool = pod.client().pool().expect("the pool");
    let events = pod.client().events(0).expect("events").events;
    let frontend = pod.endpoint(1, Role::BlkFrontend);
    let applied = frontend.held.lock().expect("no panic").applied;
    let objects = frontend.objects();

    pod.stop_controller();
    pod.start_controller();
    let client = pod.client();
    let after = until("the instance to be ready again", || client.instance("vm1").ok().filter(|it| it.ready));
    assert_eq!(after, before);
    assert_eq!(client.pool().expect("the pool").regions, pool.regions);
    let frontend = pod.endpoint(1, Role::BlkFrontend);
    assert_eq!(frontend.objects(), objects);
    until("the objects to be confirmed", || {
        (frontend.held.lock().expect("no panic").synced == 2).then_some(())
    });
    assert_eq!(frontend.held.lock().expect("no panic").applied, applied, "nothing was made anew");
    let later = client.events(0).expect("events").events;
    assert_eq!(later[..events.len()], events, "events survive");
}

#[test]
fn everything_deleted_is_free_again() {
    let pod = Pod::demo();
    let client = pod.client();
    let before = client.pool().expect("the pool");
    create_volume(&pod, "vol0");
    client.create_instance(&vm("vm1", &["vol0"]), WAIT).expect("created");
    let refused = client.delete_volume("vol0").expect_err("it is leased");
    assert_eq!(refused.status(), Some(409));
    client.delete_instance("vm1").expect("deleted");
    client.delete_volume("vol0").expect("deleted");
    until("all regions to be let go of", || {
        (client.pool().ok()?.free_bytes == before.free_bytes).then_some(())
    });
    assert!(pod.endpoint(1, Role::NetFrontend).objects().is_empty());
    assert!(registrations(pod.endpoint(2, Role::NetBackend)).is_empty());
}

#[test]
fn restarted_daemons_get_fresh_regions_and_the_old_ones_come_back() {
    let mut pod = Pod::demo();
    create_volume(&pod, "vol0");
    let client = pod.client();
    client.create_instance(&vm("vm1", &["vol0"]), WAIT).expect("created");
    let before = client.pool().expect("the pool");
    for (host, role, devices) in [
        (1, Role::NetFrontend, Vec::new()),
        (1, Role::BlkFrontend, Vec::new()),
        (2, Role::BlkBackend, vec![ssd("ssd0")]),
        (3, Role::NetBackend, vec![nic("nic0", true)]),
    ] {
        drop(pod.endpoints.remove(&(host, role)));
        pod.join(host, role, devices);
        until("the instance to be ready again", || {
            let joined = client.host(&format!("h{host}")).ok()?;
            let joined = joined.endpoints.iter().all(|it| it.health == pod_api::EndpointHealth::Joined);
            let holds = pod.endpoint(host, role).held.lock().expect("no panic").synced > 0;
            (joined && holds && client.instance("vm1").ok()?.ready).then_some(())
        });
    }
    let after = until("the quarantine to end", || {
        let pool = client.pool().ok()?;
        pool.regions.iter().all(|region| region.state == RegionState::InUse).then_some(pool)
    });
    assert_eq!(after.free_bytes, before.free_bytes);
    let ids = |pool: &pod_api::Pool| pool.regions.iter().map(|it| it.id).collect::<Vec<_>>();
    assert_ne!(ids(&after), ids(&before));
}

#[test]
fn refusal_of_a_daemon_is_shown_and_tried_again() {
    let pod = Pod::demo();
    let client = pod.client();
    let frontend = pod.endpoint(1, Role::NetFrontend);
    frontend.held.lock().expect("no panic").refuse = Some("the socket exists".to_owned());
    let instance = client.create_instance(&vm("vm1", &[]), Duration::from_millis(300)).expect("created");
    assert!(!instance.ready);
    let instance = until("the reason", || {
        client
            .instance("vm1")
            .ok()
            .filter(|it| it.waiting_for.iter().any(|why| why.contains("the socket exists")))
    });
    assert!(!instance.ready);
    frontend.held.lock().expect("no panic").refuse = None;
    until("another try", || client.instance("vm1").ok().filter(|it| it.ready));
    let events = client.events(0).expect("events").events;
    assert_eq!(events.iter().filter(|event| event.kind == EventKind::CommandFailed).count(), 1, "told once");
}

#[test]
fn second_controller_on_the_same_state_is_refused() {
    let pod = Pod::new_in_file();
    let error = RunningController::start(&pod.config()).err().expect("refused");
    assert!(matches!(error, ControllerError::Store(StoreError::InUse { .. })), "{error}");
    assert!(error.to_string().contains("stop that one first"));
}

#[test]
fn second_controller_of_the_same_pool_is_refused() {
    let pod = Pod::new_in_file();
    let mut config = pod.config();
    config.controller.state = pod.path("other.redb");
    config.controller.listen = Some(pod.path("other.sock"));
    let error = RunningController::start(&config).err().expect("refused");
    assert!(matches!(error, ControllerError::Port(_)), "{error}");
}

#[test]
fn state_of_another_pool_is_refused() {
    let mut pod = Pod::new();
    pod.stop_controller();
    let options = cxl_pool::CreateOptions {
        size_bytes: Some(256 << 20),
        force: true,
        ..cxl_pool::CreateOptions::default()
    };
    cxl_pool::Pool::create(&pod.path("pool"), &options).expect("a new pool");
    let error = RunningController::start(&pod.config()).err().expect("refused");
    assert!(matches!(error, ControllerError::Pool(_)), "{error}");
    let uuid = cxl_pool::Pool::open(&pod.path("pool")).expect("the pool").superblock().uuid;
    assert!(error.to_string().contains(&format!("--adopt-pool {uuid}")), "{error}");
    let mut config = pod.config();
    config.controller.adopt_pool = Some(uuid::Uuid::from_u128(1));
    let error = RunningController::start(&config).err().expect("refused");
    assert!(matches!(error, ControllerError::Pool(_)), "another pool was meant: {error}");
}

#[test]
fn new_pool_after_a_power_cut_keeps_volumes_and_instances() {
    let mut pod = Pod::demo();
    create_volume(&pod, "vol0");
    create_volume(&pod, "vol1");
    let client = pod.client();
    let before = client.create_instance(&vm("vm1", &["vol0"]), WAIT).expect("created");
    let volumes = client.volumes().expect("volumes");
    pod.endpoints.clear();
    pod.stop_controller();
    std::fs::remove_file(pod.path("pool")).expect("gone");
    let options = cxl_pool::CreateOptions {
        size_bytes: Some(128 << 20),
        mode: cxl_pool::CoherenceMode::Hardware,
        host_slots: 4,
        ..cxl_pool::CreateOptions::default()
    };
    let pool = cxl_pool::Pool::create(&pod.path("pool"), &options).expect("a new pool");
    let mut config = pod.config();
    config.controller.adopt_pool = Some(pool.superblock().uuid);
    pod.controller = Some(RunningController::start(&config).expect("adopted"));
    for (host, role, devices) in [
        (1, Role::NetFrontend, Vec::new()),
        (1, Role::BlkFrontend, Vec::new()),
        (2, Role::NetBackend, vec![nic("nic0", false)]),
        (2, Role::BlkBackend, vec![ssd("ssd0")]),
        (3, Role::NetBackend, vec![nic("nic0", true)]),
    ] {
        pod.join(host, role, devices);
    }
    let after = until("the instance to be ready again", || client.instance("vm1").ok().filter(|it| it.ready));
    assert_eq!(client.volumes().expect("volumes"), volumes);
    assert_eq!((&after.nics[0].mac, &after.nics[0].lease), (&before.nics[0].mac, &before.nics[0].lease));
    assert_eq!(
        (after.disks[0].lease, &after.disks[0].serial),
        (before.disks[0].lease, &before.disks[0].serial)
    );
    assert!(after.disks[0].generation > before.disks[0].generation);
    // From here on the state is about the new pool.
    pod.stop_controller();
    pod.start_controller();
    until("the instance to be ready again", || client.instance("vm1").ok().filter(|it| it.ready));
}

#[test]
fn disks_fail_after_the_grace_and_come_back() {
    let mut pod = Pod::demo();
    create_volume(&pod, "vol0");
    pod.client().create_instance(&vm("vm1", &["vol0"]), WAIT).expect("created");
    let failed = |pod: &Pod| {
        let mut objects = pod.endpoint(1, Role::BlkFrontend).objects().into_values();
        objects.find_map(|it| if let Object::Disk(disk) = it { Some(disk.failed) } else { None })
    };
    // Nobody is given up while guests are made to wait.
    drop(pod.endpoints.remove(&(2, Role::BlkBackend)));
    pod.join(2, Role::BlkBackend, vec![ssd("ssd0")]);
    until("the backend to serve again", || {
        (!pod.endpoint(2, Role::BlkBackend).objects().is_empty()).then_some(())
    });
    assert_eq!(failed(&pod), Some(false));
    let events = |pod: &Pod| pod.client().events(0).expect("events").events;
    assert!(events(&pod).iter().all(|event| event.kind != EventKind::DiskFailed));

    pod.stop_controller();
    let mut config = pod.config();
    config.controller.blk_grace_ms = 50;
    pod.controller = Some(RunningController::start(&config).expect("a controller"));
    drop(pod.endpoints.remove(&(2, Role::BlkBackend)));
    until("the disk to fail", || (failed(&pod) == Some(true)).then_some(()));
    pod.join(2, Role::BlkBackend, vec![ssd("ssd0")]);
    until("the disk to be back", || (failed(&pod) == Some(false)).then_some(()));
    // Frontends are told at once, and whoever reads events a little later.
    for kind in [EventKind::DiskFailed, EventKind::DiskBack] {
        until("an event", || events(&pod).iter().any(|event| event.kind == kind).then_some(()));
    }
}

#[test]
fn host_that_never_returns_is_reset_and_deleted() {
    let mut pod = Pod::demo();
    let client = pod.client();
    client.create_instance(&vm("vm1", &[]), WAIT).expect("created");
    assert_eq!(client.reset_host("h3").expect_err("it beats").status(), Some(409));
    assert_eq!(client.reset_host("h9").expect_err("unknown").status(), Some(404));
    drop(pod.endpoints.remove(&(3, Role::NetBackend)));
    until("the host to be reset", || client.reset_host("h3").ok());
    client.delete_host("h3").expect("deleted");
    client.delete_instance("vm1").expect("deleted");
    until("the quarantine to end", || {
        let regions = client.pool().ok()?.regions;
        regions.iter().all(|region| region.state == RegionState::InUse).then_some(())
    });
}

#[test]
fn events_are_followed_and_resumed() {
    let pod = Pod::new();
    let client = pod.client();
    let seen = until("its start", || Some(client.events(0).ok()?.events.last()?.sequence));
    let mut stream = client.follow_events(seen).expect("a stream");
    let other = pod.client();
    let refused = other.delete_volume("nothing").expect_err("there is none");
    assert!(matches!(refused, ClientError::Refused(_)));
    let mut pod = pod;
    pod.join(2, Role::BlkBackend, vec![ssd("ssd0")]);
    let joined = stream.next().expect("an event").expect("whole");
    assert_eq!((joined.kind, joined.sequence), (EventKind::EndpointJoined, seen + 1));
    create_volume(&pod, "vol0");
    let created = stream.next().expect("an event").expect("whole");
    assert_eq!(created.kind, EventKind::VolumeCreated);
    let mut resumed = other.follow_events(joined.sequence).expect("a stream");
    assert_eq!(resumed.next().expect("an event").expect("whole"), created);
}

/// The same with members that this version does not know, wherever there are members.
fn with_more(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(members) => {
            members.values_mut().for_each(with_more);
            // One alone may be the name of a variant.
            if members.len() > 1 {
                members.insert("of-a-later-version".to_owned(), serde_json::json!({ "what": [1, "two"] }));
            }
        }
        serde_json::Value::Array(values) => values.iter_mut().for_each(with_more),
        _ => {}
    }
}

#[test]
fn what_a_later_minor_version_adds_to_objects_is_ignored() {
    let pod = Pod::demo();
    let client = pod.client();
    client.create_volume(&crate::support::replicas::volume("vol0")).expect("created");
    client.create_instance(&vm("vm1", &["vol0"]), Duration::from_secs(30)).expect("created");
    let mut kinds = std::collections::BTreeSet::new();
    for endpoint in pod.endpoints.values() {
        for object in endpoint.objects().into_values() {
            let mut later = serde_json::to_value(&object).expect("JSON");
            kinds.extend(later["kind"].as_str().map(str::to_owned));
            with_more(&mut later);
            let understood: Result<Object, _> = serde_json::from_value(later.clone());
            assert_eq!(understood.unwrap_or_else(|error| panic!("{later}: {error}")), object);
        }
    }
    for kind in ["channel", "nic", "registration", "port", "volume", "disk"] {
        assert!(kinds.contains(kind), "{kind} is not among {kinds:?}");
    }
}
