//! Guests whose RAM lies in the pool.

use cxl_pool::Area;
use pod_protocol::ids::RegionId;

use super::*;

const RAM: u64 = 8 * MIB;

fn with_ram(name: &str, nics: usize, volumes: &[&str], bytes: u64) -> Command {
    let mut create = instance(name, nics, volumes);
    if let Command::CreateInstance { ram_bytes, .. } = &mut create {
        *ram_bytes = Some(bytes);
    }
    create
}

fn pod_with_ram() -> State {
    let mut state = pod();
    must(&mut state, &volume("vol0", 16));
    must(&mut state, &with_ram("vm1", 1, &["vol0"], RAM));
    state
}

fn ram(state: &State) -> &GuestRam {
    state.instance_named("vm1").and_then(|instance| instance.ram.as_ref()).expect("RAM in the pool")
}

fn area(state: &State, region: RegionId) -> Area {
    state.regions.get(region).expect("a region").area
}

/// The RAM that each object of an endpoint names.
fn told(state: &State, id: EndpointId) -> Vec<Option<Area>> {
    let objects = state.desired(id).into_values();
    objects
        .filter_map(|object| match object {
            Object::Port(it) => Some(it.ram_area),
            Object::Disk(it) => Some(it.ram_area),
            Object::Registration(it) => Some(it.ram_area),
            Object::Volume(it) => Some(it.ram_area),
            _ => None,
        })
        .collect()
}

fn delete(state: &mut State) {
    must(state, &Command::DeleteInstance { name: "vm1".to_owned(), force: false });
}

fn scrubbed(state: &mut State, endpoint: EndpointId, region: RegionId) {
    let incarnation = state.endpoints[&endpoint].incarnation;
    must(state, &Command::Scrubbed { endpoint, incarnation, region });
}

#[test]
fn everyone_who_serves_the_guest_is_told_where_its_ram_is() {
    let state = pod_with_ram();
    let region = ram(&state).region.expect("a region");
    let area = area(&state, region);
    assert_eq!(area.bytes(), RAM);
    assert!(area.start_byte().get().is_multiple_of(2 * MIB), "huge pages");
    for id in [NET_FRONTEND, BLK_FRONTEND, NET_BACKEND, BLK_BACKEND, BACKUP_BACKEND] {
        assert_eq!(told(&state, id), [Some(area)], "{id}");
        assert!(state.regions.get(region).expect("a region").holders.contains(&id), "{id}");
    }
    let other = pod_with_vm();
    assert_eq!(told(&other, BLK_BACKEND), [None], "who asked for none has none");
}

#[test]
fn ram_stays_where_it_is_whatever_fails_around_the_guest() {
    let mut state = pod_with_ram();
    let before = ram(&state).region;
    for (id, life) in [(NET_FRONTEND, 2), (BLK_FRONTEND, 2), (NET_BACKEND, 2), (BLK_BACKEND, 2)] {
        join_as(&mut state, id, life);
        for command in scrub_all(&state) {
            must(&mut state, &command);
        }
    }
    let nic = DeviceId { host: HostId::new(2), name: "nic0".into() };
    must(&mut state, &Command::Link { device: nic, up: false, reason: "cable".to_owned() });
    assert_eq!(registration(&state, BACKUP_BACKEND), Some(RegistrationState::Active), "it failed over");
    assert_eq!(ram(&state).region, before);
    let kept = serde_json::to_vec(&state).expect("JSON");
    let restarted: State = serde_json::from_slice(&kept).expect("it reads back");
    assert_eq!(restarted, state);
    let area = area(&state, before.expect("a region"));
    for id in [NET_FRONTEND, BLK_FRONTEND, NET_BACKEND, BLK_BACKEND, BACKUP_BACKEND] {
        assert_eq!(told(&state, id), [Some(area)], "{id}");
    }
}

#[test]
fn ram_is_free_when_the_last_who_had_it_let_go() {
    let mut state = pod_with_ram();
    let region = ram(&state).region.expect("a region");
    let before = area(&state, region);
    let holders = state.regions.get(region).expect("a region").holders.clone();
    assert_eq!(holders.len(), 5);
    delete(&mut state);
    for (count, holder) in holders.iter().enumerate() {
        assert!(
            state.regions.get(region).is_some(),
            "{holder} may still write there, after {count} confirmed"
        );
        assert!(state.scrubs(*holder).contains_key(&region), "{holder} is asked");
        let gaps = state.regions.gaps();
        assert!(gaps.iter().all(|gap| !gap.overlaps(&before)), "it is given to nobody");
        scrubbed(&mut state, *holder, region);
    }
    assert!(state.regions.get(region).is_none());
}

#[test]
fn storage_backend_flushes_what_its_predecessor_read_into_ram() {
    let mut state = pod_with_ram();
    let region = ram(&state).region.expect("a region");
    assert_eq!(told(&state, BLK_BACKEND).len(), 1, "fresh RAM is in no cache");
    join_as(&mut state, BLK_BACKEND, 2);
    let data = disk_lease(&state).area.expect("an area").region;
    assert_eq!(state.scrubs(BLK_BACKEND).into_keys().collect::<Vec<_>>(), {
        let mut both = [region, data];
        both.sort();
        both
    });
    scrubbed(&mut state, BLK_BACKEND, data);
    assert_eq!(told(&state, BLK_BACKEND), [], "it does not serve before it flushed the RAM too");
    scrubbed(&mut state, BLK_BACKEND, region);
    assert_eq!(told(&state, BLK_BACKEND), [Some(area(&state, region))]);
}

#[test]
fn moving_guest_gets_ram_of_its_own_on_the_other_host() {
    let mut state = pod_with_ram();
    let old = ram(&state).region.expect("a region");
    let there = [endpoint(3, Role::NetFrontend), endpoint(3, Role::BlkFrontend)];
    for id in there {
        join_as(&mut state, id, 1);
    }
    let prepare = Command::PrepareMigration { name: "vm1".to_owned(), to: HostId::new(3) };
    must(&mut state, &prepare);
    let new = ram(&state).incoming.expect("a second region");
    for id in there {
        assert_eq!(told(&state, id), [Some(area(&state, new))], "{id}");
    }
    assert_eq!(told(&state, NET_FRONTEND), [Some(area(&state, old))]);
    assert_eq!(told(&state, BLK_BACKEND), [Some(area(&state, old))], "the guest runs here yet");

    must(&mut state, &Command::AbortMigration { name: "vm1".to_owned() });
    assert!(state.is_retired(new) && !state.is_retired(old));
    must(&mut state, &prepare);
    let new = ram(&state).incoming.expect("another region");
    must(&mut state, &Command::ActivateMigration { name: "vm1".to_owned(), force: false });
    assert_eq!((ram(&state).region, ram(&state).incoming), (Some(new), None));
    assert!(state.is_retired(old));
    for id in [there[0], there[1], NET_BACKEND] {
        assert_eq!(told(&state, id), [Some(area(&state, new))], "{id}");
    }
    assert!(state.scrubs(NET_FRONTEND).contains_key(&old), "the host that it left has to let go");
}

#[test]
fn there_is_no_room_for_a_second_copy_of_a_large_guest() {
    let mut state = pod();
    must(&mut state, &with_ram("vm1", 1, &[], 130 * MIB));
    join_as(&mut state, endpoint(3, Role::NetFrontend), 1);
    let to = Command::PrepareMigration { name: "vm1".to_owned(), to: HostId::new(3) };
    let refusal = refused(&mut state, &to);
    assert_eq!(refusal.kind, RefusalKind::NoRoom);
    assert!(refusal.detail.contains("another 130.0 MiB of RAM"), "{refusal}");
}

#[test]
fn what_cannot_be_had_is_refused_with_advice() {
    let mut state = pod();
    for (bytes, nics, kind, word) in [
        (1 << 20, 1, RefusalKind::InvalidValue, "multiple of 2.0 MiB"),
        (0, 1, RefusalKind::InvalidValue, "multiple of 2.0 MiB"),
        (8 * MIB, 0, RefusalKind::InvalidValue, "ask for one as well"),
        (1 << 40, 1, RefusalKind::NoRoom, "largest free range"),
        (!(2 * MIB - 1), 1, RefusalKind::NoRoom, "largest free range"),
    ] {
        let refusal = refused(&mut state, &with_ram("vm1", nics, &[], bytes));
        assert_eq!(refusal.kind, kind, "{bytes}: {refusal}");
        assert!(refusal.detail.contains(word), "{bytes}: {refusal}");
    }
    state.options.placement.guest_ram = false;
    let refusal = refused(&mut state, &with_ram("vm1", 1, &[], RAM));
    assert!(refusal.detail.contains("guest-ram = true"), "{refusal}");
    must(&mut state, &instance("vm1", 1, &[]));
}

#[test]
fn guest_whose_ram_failed_gets_other_ram() {
    let mut state = pod_with_ram();
    let old = ram(&state).region.expect("a region");
    let mut join = join(1, Vec::new());
    let failed = area(&state, old).start;
    join.memory_failures = vec![Area::new(failed, cxl_pool::LineCount::new(64))];
    let effects = must(&mut state, &Command::Join { endpoint: NET_FRONTEND, incarnation: 2, join });
    assert!(kinds(&effects).contains(&EventKind::MemoryFailed));
    let new = ram(&state).region.expect("other RAM");
    assert_ne!(new, old);
    assert!(!area(&state, new).overlaps(&area(&state, old)));
    for id in [NET_BACKEND, BACKUP_BACKEND] {
        join_as(&mut state, id, 2);
    }
    assert_eq!(told(&state, NET_FRONTEND), [Some(area(&state, new))]);
}
