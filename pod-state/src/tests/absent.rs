//! Devices that an endpoint has no more: for a while, or for good.

use pod_protocol::volume_table::VolumeTable;

use super::*;

const NIC: DeviceId = DeviceId { host: HostId::new(2), name: smol_str::SmolStr::new_static("nic0") };
const SSD: DeviceId = DeviceId { host: HostId::new(2), name: smol_str::SmolStr::new_static("ssd0") };

/// The next life of a daemon, with these devices.
fn comes_with(state: &mut State, id: EndpointId, devices: Vec<DeviceReport>) -> Vec<Effect> {
    let incarnation = state.endpoints[&id].incarnation + 1;
    must(state, &Command::Join { endpoint: id, incarnation, join: join(id.host.get(), devices) })
}

fn comes_without_devices(state: &mut State, id: EndpointId) -> Vec<Effect> {
    comes_with(state, id, Vec::new())
}

fn comes_with_all(state: &mut State, id: EndpointId) -> Vec<Effect> {
    comes_with(state, id, devices_of(id, true))
}

fn scrub(state: &mut State) {
    for command in scrub_all(state) {
        must(state, &command);
    }
}

#[test]
fn a_nic_that_is_no_more_is_left_and_then_forgotten() {
    let mut state = pod_with_vm();
    let rx = state.regions.iter().find(|it| it.purpose == Purpose::Receive(NIC)).expect("it receives").id;
    let effects = comes_without_devices(&mut state, NET_BACKEND);
    assert!(kinds(&effects).contains(&EventKind::DeviceGone), "{effects:?}");
    assert!(kinds(&effects).contains(&EventKind::Failover), "{effects:?}");
    assert_eq!(nic_lease(&state).active_nic().map(|nic| nic.host), Some(BACKUP_BACKEND.host));
    // The lease may return there.
    assert_eq!(state.devices[&NIC].health, Health::Absent);
    assert_eq!(registration(&state, NET_BACKEND), None);
    let retired = state.regions.get(rx).expect("some have yet to let go of it");
    assert_eq!(retired.usage, RegionUse::Quarantined);

    must(&mut state, &Command::DeleteInstance { name: "vm1".to_owned(), force: true });
    let effects = comes_without_devices(&mut state, NET_BACKEND);
    assert!(!kinds(&effects).contains(&EventKind::DeviceGone), "that was said");
    assert!(!state.devices.contains_key(&NIC), "nobody refers to it");
    scrub(&mut state);
    assert!(state.regions.iter().all(|it| it.purpose != Purpose::Receive(NIC)), "its area is free");
}

#[test]
fn a_nic_that_nobody_uses_is_forgotten_at_once_and_its_area_given_back() {
    let mut state = pod();
    let effects = comes_without_devices(&mut state, NET_BACKEND);
    assert_eq!(kinds(&effects), [EventKind::EndpointJoined, EventKind::DeviceGone]);
    assert!(!state.devices.contains_key(&NIC));
    scrub(&mut state);
    assert!(state.regions.iter().all(|it| it.purpose != Purpose::Receive(NIC)));
}

#[test]
fn a_nic_that_comes_back_receives_into_a_new_area_and_serves_again() {
    let mut state = pod_with_vm();
    // Nobody else could serve the lease.
    comes_without_devices(&mut state, BACKUP_BACKEND);
    comes_without_devices(&mut state, NET_BACKEND);
    assert_eq!(nic_lease(&state).active_nic(), Some(&NIC), "there is no other");
    for up in [true, false] {
        let link = Command::Link { device: NIC, up, reason: "late".to_owned() };
        assert_eq!(must(&mut state, &link), [], "what was said of it before it went counts no more");
    }
    let effects = comes_with_all(&mut state, NET_BACKEND);
    assert!(kinds(&effects).contains(&EventKind::DeviceBack), "{effects:?}");
    assert_eq!(state.devices[&NIC].health, Health::Up);
    scrub(&mut state);
    assert_eq!(registration(&state, NET_BACKEND), Some(RegistrationState::Active));
}

#[test]
fn a_disk_whose_ssd_is_no_more_answers_errors_until_it_is_back() {
    let mut state = pod_with_vm();
    scrub(&mut state);
    let serves = |state: &State| {
        state
            .desired(BLK_BACKEND)
            .values()
            .any(|object| matches!(object, Object::Volume(_) | Object::Table(_)))
    };
    assert!(serves(&state) && !disk_failed(&state));
    let effects = comes_without_devices(&mut state, BLK_BACKEND);
    assert!(kinds(&effects).contains(&EventKind::DeviceGone), "{effects:?}");
    assert!(kinds(&effects).contains(&EventKind::DiskFailed), "nobody would ever answer: {effects:?}");
    assert!(disk_failed(&state));
    scrub(&mut state);
    assert!(!serves(&state), "it has nothing to serve from");

    let effects = comes_with_all(&mut state, BLK_BACKEND);
    assert!(kinds(&effects).contains(&EventKind::DeviceBack), "{effects:?}");
    assert!(kinds(&effects).contains(&EventKind::DiskBack), "{effects:?}");
    scrub(&mut state);
    assert!(serves(&state) && !disk_failed(&state));
}

#[test]
fn an_ssd_stays_known_for_as_long_as_a_volume_is_on_it() {
    let mut state = pod();
    must(&mut state, &volume("vol0", 16));
    assert!(state.volume_named("vol0").expect("it is there").replica_on(&SSD).is_some());
    comes_without_devices(&mut state, BLK_BACKEND);
    assert_eq!(state.devices[&SSD].health, Health::Absent);
    let wanted = Command::CreateVolume {
        name: "vol1".to_owned(),
        size_bytes: MIB,
        device: Some(SSD),
        replicas: 1,
        minimum_iops: None,
        minimum_bytes_per_second: None,
        groups: Groups::default(),
    };
    assert_eq!(refused(&mut state, &wanted).kind, RefusalKind::NoRoom);
    // Another instance may have it: its disk answers errors.
    must(&mut state, &instance("vm1", 0, &["vol0"]));
    assert!(disk_failed(&state));
    must(&mut state, &Command::DeleteInstance { name: "vm1".to_owned(), force: true });
    must(&mut state, &Command::DeleteVolume { name: "vol0".to_owned() });
    comes_without_devices(&mut state, BLK_BACKEND);
    assert!(!state.devices.contains_key(&SSD), "nobody refers to it");
}

#[test]
fn what_has_yet_to_be_wiped_keeps_an_ssd_known() {
    let mut state = pod();
    // Host 3's keeps a table, so what is deleted there is wiped first.
    let backend = endpoint(3, Role::BlkBackend);
    join_as(&mut state, backend, 1);
    let ssd = DeviceId { host: backend.host, name: "ssd0".into() };
    let create = Command::CreateVolume {
        name: "vol0".to_owned(),
        size_bytes: MIB,
        device: Some(ssd.clone()),
        replicas: 2,
        minimum_iops: None,
        minimum_bytes_per_second: None,
        groups: Groups::default(),
    };
    must(&mut state, &create);
    must(&mut state, &Command::RemoveReplica { name: "vol0".to_owned(), device: ssd.clone() });
    let volume = state.volume_named("vol0").expect("it is there");
    assert!(volume.replica_on(&ssd).is_none() && volume.former.len() == 1, "{volume:?}");
    let id = volume.id;
    comes_without_devices(&mut state, backend);
    assert_eq!(state.devices[&ssd].health, Health::Absent);
    comes_with_all(&mut state, backend);
    must(&mut state, &Command::VolumeWiped { device: ssd.clone(), volume: id });
    comes_without_devices(&mut state, backend);
    assert!(!state.devices.contains_key(&ssd), "nobody refers to it");
}

#[test]
fn a_mirror_goes_on_without_an_ssd_that_is_no_more() {
    let mut state = pod();
    join_as(&mut state, endpoint(3, Role::BlkBackend), 1);
    let create = Command::CreateVolume {
        name: "vol0".to_owned(),
        size_bytes: MIB,
        device: None,
        replicas: 2,
        minimum_iops: None,
        minimum_bytes_per_second: None,
        groups: Groups::default(),
    };
    must(&mut state, &create);
    must(&mut state, &instance("vm1", 0, &["vol0"]));
    scrub(&mut state);
    let effects = comes_without_devices(&mut state, BLK_BACKEND);
    assert!(kinds(&effects).contains(&EventKind::ReplicaDropped), "{effects:?}");
    assert!(!disk_failed(&state), "the other has everything");
    let is_behind = |state: &State| {
        state.volume_named("vol0").and_then(|it| it.replica_on(&SSD)).is_some_and(|replica| replica.stale)
    };
    assert!(is_behind(&state));
    comes_with_all(&mut state, BLK_BACKEND);
    assert!(is_behind(&state), "it has to be brought in line first");
}

/// The same daemon's next life, with an SSD on which this number stands, and an empty table.
fn comes_with_ssd(state: &mut State, number: u64) -> Vec<Effect> {
    let mut devices = devices_of(BLK_BACKEND, true);
    for device in &mut devices {
        if let DeviceReport::Ssd { identity, table, .. } = device {
            (*identity, *table) = (Some(number), Some(VolumeTable::default()));
        }
    }
    comes_with(state, BLK_BACKEND, devices)
}

fn has_table(state: &State) -> bool {
    state.desired(BLK_BACKEND).values().any(|object| matches!(object, Object::Table(_)))
}

#[test]
fn an_ssd_that_was_replaced_is_away_until_it_is_back_or_given_up() {
    let mut state = pod_with_vm();
    speak(&mut state, Protocol::KNOWS_SSDS);
    comes_with_ssd(&mut state, 1);
    scrub(&mut state);
    assert!(has_table(&state) && !disk_failed(&state));
    for _ in 0..2 {
        let effects = comes_with_ssd(&mut state, 2);
        assert!(state.devices[&SSD].is_replaced() && state.devices[&SSD].health == Health::Absent);
        assert!(disk_failed(&state), "it answers errors, and no zeros");
        assert!(!has_table(&state), "nothing is written to it");
        let told = |effect: &&Effect| matches!(effect, Effect::Event { message, .. } if message.contains("another SSD"));
        assert_eq!(effects.iter().filter(told).count(), 1, "{effects:?}");
        assert!(kinds(&comes_with_ssd(&mut state, 2)).iter().all(|it| *it != EventKind::DeviceGone), "once");
        // It is put back.
        let effects = comes_with_ssd(&mut state, 1);
        assert!(kinds(&effects).contains(&EventKind::DeviceBack), "{effects:?}");
        scrub(&mut state);
        assert!(has_table(&state) && !disk_failed(&state) && !state.devices[&SSD].is_replaced());
    }
    // Or given up.
    comes_with_ssd(&mut state, 2);
    must(&mut state, &Command::DeleteInstance { name: "vm1".to_owned(), force: true });
    assert_eq!(
        refused(&mut state, &Command::DeleteDevice { device: SSD, lose_data: false }).kind,
        RefusalKind::Busy
    );
    must(&mut state, &Command::DeleteDevice { device: SSD, lose_data: true });
    comes_with_ssd(&mut state, 2);
    assert!(state.devices[&SSD].health == Health::Up && !state.devices[&SSD].is_replaced());
    must(&mut state, &volume("vol0", 16));
    // One that nothing lies on may be any.
    must(&mut state, &Command::DeleteVolume { name: "vol0".to_owned() });
    let id = state.volumes.keys().copied().next().expect("it has yet to be wiped");
    must(&mut state, &Command::VolumeWiped { device: SSD, volume: id });
    comes_with_ssd(&mut state, 3);
    assert_eq!(state.devices[&SSD].health, Health::Up);
}

#[test]
fn ssds_are_known_by_their_names_where_controllers_of_the_version_before_are() {
    let mut state = pod_with_vm();
    speak(&mut state, Protocol::KNOWS_SSDS);
    comes_with_ssd(&mut state, 1);
    comes_with_ssd(&mut state, 2);
    assert!(state.devices[&SSD].is_replaced());
    speak(&mut state, 0);
    assert!(!state.devices[&SSD].is_replaced());
    comes_with_ssd(&mut state, 2);
    assert_eq!(state.devices[&SSD].health, Health::Up);
    assert!(matches!(state.devices[&SSD].kind, Kind::Ssd { identity: None, .. }));
    // Which is known again with the next life of its daemon.
    speak(&mut state, Protocol::KNOWS_SSDS);
    comes_with_ssd(&mut state, 2);
    comes_with_ssd(&mut state, 1);
    assert!(state.devices[&SSD].is_replaced());
    // A daemon of the version before says nothing of it.
    comes_with_all(&mut state, BLK_BACKEND);
    assert!(state.devices[&SSD].health == Health::Up && !state.devices[&SSD].is_replaced());
    comes_with_ssd(&mut state, 1);
    assert!(state.devices[&SSD].is_replaced(), "it is remembered");
}

/// A disk of another program with this number, or an empty one, which gets its number with its first table.
fn comes_with_anothers_disk(state: &mut State, number: Option<u64>) {
    let mut devices = devices_of(BLK_BACKEND, true);
    for device in &mut devices {
        if let DeviceReport::Ssd { identity, table, driver, reserved_bytes, .. } = device {
            (*identity, *table) = (number, Some(VolumeTable::default()));
            (*driver, *reserved_bytes) = ("vhost-user".to_owned(), 1 << 20);
        }
    }
    comes_with(state, BLK_BACKEND, devices);
}

#[test]
fn an_empty_disk_of_another_program_is_not_the_one_that_had_a_number() {
    let mut state = pod_with_vm();
    speak(&mut state, Protocol::KNOWS_SSDS);
    let is_replaced = |state: &State| state.devices[&SSD].is_replaced();
    // Its table has yet to be written.
    for number in [None, None, Some(1), Some(1)] {
        comes_with_anothers_disk(&mut state, number);
        assert!(!is_replaced(&state), "{number:?}");
    }
    comes_with_anothers_disk(&mut state, None);
    assert!(is_replaced(&state));
    comes_with_anothers_disk(&mut state, Some(1));
    assert!(!is_replaced(&state));
    // Once nothing is left on the one before, any will do, with whatever number it gets.
    must(&mut state, &Command::DeleteInstance { name: "vm1".to_owned(), force: true });
    must(&mut state, &Command::DeleteVolume { name: "vol0".to_owned() });
    let id = state.volumes.keys().copied().next().expect("it has yet to be wiped");
    must(&mut state, &Command::VolumeWiped { device: SSD, volume: id });
    comes_with_anothers_disk(&mut state, None);
    must(&mut state, &volume("vol0", 16));
    comes_with_anothers_disk(&mut state, Some(2));
    assert!(!is_replaced(&state));
}
