//! Who comes back, and what it finds.

use cxl_pool::Area;
use pod_protocol::ids::PlaceId;

use super::*;

#[test]
fn rejoining_after_a_controller_restart_moves_nothing() {
    let mut state = pod_with_vm();
    let before = state.clone();
    for id in [NET_FRONTEND, BLK_FRONTEND, NET_BACKEND, BLK_BACKEND, BACKUP_BACKEND] {
        let desired = state.desired(id);
        let mut devices = devices_of(id, true);
        if id == BACKUP_BACKEND {
            devices[1] = nic("nic1", false, false);
        }
        let effects = must(
            &mut state,
            &Command::Join { endpoint: id, incarnation: 1, join: join(id.host.get(), devices) },
        );
        assert_eq!(effects, Vec::new());
        assert_eq!(state.desired(id), desired);
    }
    assert_eq!(
        (state.regions, state.leases, state.channels),
        (before.regions, before.leases, before.channels)
    );
}

#[test]
fn restarted_frontend_gets_everything_fresh() {
    let mut state = pod_with_vm();
    let before = port(&state);
    let old = nic_lease(&state).area.expect("an area").region;
    join_as(&mut state, NET_FRONTEND, 2);
    let after = port(&state);
    assert_ne!(after.tx_area, before.tx_area);
    assert_ne!(after.active.generation, before.active.generation);
    assert_eq!(after.active.channel, before.active.channel, "the channel keeps its name");
    let region = state.regions.get(old).expect("quarantined");
    assert_eq!(region.usage, RegionUse::Quarantined);
    assert!([NET_FRONTEND, NET_BACKEND, BACKUP_BACKEND].iter().all(|holder| region.holders.contains(holder)));

    for command in scrub_all(&state) {
        must(&mut state, &command);
    }
    assert_eq!(state.regions.get(old), None, "free again once all have let go");
}

#[test]
fn storage_backend_flushes_before_it_serves_again() {
    let mut state = pod_with_vm();
    let lease = disk_lease(&state);
    let area = lease.area.expect("an area").region;
    let frontend_before = state.desired(BLK_FRONTEND);
    join_as(&mut state, BLK_BACKEND, 2);
    assert_eq!(
        state.desired(BLK_FRONTEND),
        frontend_before,
        "the frontend keeps what it has until there is better"
    );
    assert!(state.desired(BLK_BACKEND).is_empty(), "nothing is served over a cache that was not flushed");
    assert_eq!(state.scrubs(BLK_BACKEND).keys().copied().collect::<Vec<_>>(), [area]);

    must(&mut state, &Command::Scrubbed { endpoint: BLK_BACKEND, incarnation: 1, region: area });
    assert!(state.desired(BLK_BACKEND).is_empty(), "an answer of the dead does not count");
    must(&mut state, &Command::Scrubbed { endpoint: BLK_BACKEND, incarnation: 2, region: area });
    assert!(state.desired(BLK_BACKEND).contains_key(&ObjectId::Volume(PlaceId::first(lease.id))));
    let channel = |objects: Objects| {
        objects
            .into_values()
            .find_map(|it| if let Object::Channel(it) = it { Some(it) } else { None })
            .expect("one")
    };
    let (old, new) = (channel(frontend_before), channel(state.desired(BLK_FRONTEND)));
    assert_eq!(old.id, new.id);
    assert!(new.generation > old.generation && new.outgoing != old.outgoing);
    assert_eq!(disk_lease(&state).area, lease.area, "data of requests under way stays where it is");
}

#[test]
fn another_pool_is_refused() {
    let mut state = pod_with_vm();
    let mut other = options(256);
    other.pool = uuid::Uuid::from_u128(1);
    assert_eq!(refused(&mut state, &Command::Configure { options: other }).kind, RefusalKind::InvalidValue);
    let mut larger = options(256);
    larger.tx_area = cxl_pool::LineCount::covering(4 * MIB);
    let before = state.regions.clone();
    must(&mut state, &Command::Configure { options: larger });
    assert_eq!(state.regions, before, "what is allocated stays");
}

#[test]
fn adopted_pool_keeps_what_the_pod_is_made_of() {
    let mut state = pod_with_vm();
    let before = state.clone();
    let regions: Vec<_> = state.regions.iter().map(|region| region.id).collect();
    let mut other = state.options.clone();
    other.pool = uuid::Uuid::from_u128(7);
    refused(&mut state, &Command::Configure { options: other.clone() });
    must(&mut state, &Command::AdoptPool { options: other });
    assert_eq!(state.regions.iter().count(), 0);
    assert!(state.channels.values().all(|channel| channel.rings.is_none()));
    assert_eq!(state.volumes, before.volumes);
    assert_eq!(state.instances, before.instances);
    for id in [NET_FRONTEND, BLK_FRONTEND, NET_BACKEND, BLK_BACKEND, BACKUP_BACKEND] {
        join_as(&mut state, id, 2);
    }
    for command in scrub_all(&state) {
        must(&mut state, &command);
    }
    assert!(state.channels.values().all(|channel| channel.rings.is_some()));
    assert!(state.regions.iter().all(|region| !regions.contains(&region.id)), "numbers go on");
    for (id, lease) in &state.leases {
        assert!(lease.generation != before.leases[id].generation && lease.area.is_some());
    }
    assert!(port(&state).mac == port(&before).mac && !disk_failed(&state));
}

/// As [`pod_with_vm`], with a VM that runs, in a pod that remembers that.
fn pod_with_running_vm() -> State {
    let mut state = pod_with_vm();
    speak(&mut state, Protocol::REMEMBERS_VMMS);
    let (net, disk) = (nic_lease(&state).id, disk_lease(&state).id);
    must(&mut state, &attached(NET_FRONTEND, net, true));
    must(&mut state, &attached(BLK_FRONTEND, disk, true));
    state
}

fn restart_frontends(state: &mut State, incarnation: u64) {
    for id in [NET_FRONTEND, BLK_FRONTEND] {
        join_as(state, id, incarnation);
    }
}

fn delete() -> Command {
    Command::DeleteInstance { name: "vm1".to_owned(), force: false }
}

#[test]
fn a_vmm_that_is_about_to_connect_again_keeps_its_devices() {
    let mut state = pod_with_running_vm();
    let (net, disk) = (nic_lease(&state).id, disk_lease(&state).id);
    // Also where the next life ends before it has said anything, and where the state was read back.
    for incarnation in [2, 3] {
        restart_frontends(&mut state, incarnation);
        assert!(!nic_lease(&state).connected && !nic_lease(&state).running);
        let refusal = refused(&mut state, &delete());
        assert!(
            refusal.kind == RefusalKind::Connected && refusal.detail.contains("started anew"),
            "{refusal}"
        );
        let kept = serde_json::to_vec(&state).expect("JSON");
        assert_eq!(serde_json::from_slice::<State>(&kept).expect("a state"), state);
    }
    let detach =
        Command::DetachDevice { instance: "vm1".to_owned(), device: "vol0".to_owned(), force: false };
    assert_eq!(kinds(&must(&mut state, &detach)), [EventKind::DeviceLeaving]);
    // One comes again, and one does not.
    assert_eq!(kinds(&must(&mut state, &attached(NET_FRONTEND, net, true))), [EventKind::Attached]);
    let effects = must(&mut state, &unattached(BLK_FRONTEND, disk));
    assert_eq!(kinds(&effects), [EventKind::Detached, EventKind::DeviceDetached]);
    let refusal = refused(&mut state, &delete());
    assert!(refusal.detail.contains("stop the VM"), "{refusal}");
    must(&mut state, &unattached(NET_FRONTEND, net));
    must(&mut state, &delete());
}

#[test]
fn a_vmm_that_does_not_come_again_has_gone() {
    let mut state = pod_with_running_vm();
    let (net, disk) = (nic_lease(&state).id, disk_lease(&state).id);
    let plugged = Command::DeviceAnswered {
        instance: "vm1".to_owned(),
        device: "net0".to_owned(),
        plugged: true,
        refused: None,
    };
    must(&mut state, &plugged);
    restart_frontends(&mut state, 2);
    for (endpoint, lease) in [(NET_FRONTEND, net), (BLK_FRONTEND, disk)] {
        assert_eq!(kinds(&must(&mut state, &unattached(endpoint, lease))), [EventKind::Detached]);
        assert_eq!(kinds(&must(&mut state, &unattached(endpoint, lease))), []);
    }
    assert!(!nic_lease(&state).plugged);
    restart_frontends(&mut state, 3);
    must(&mut state, &delete());
}

#[test]
fn a_pod_of_the_version_before_remembers_no_vmm() {
    let mut state = pod_with_running_vm();
    restart_frontends(&mut state, 2);
    speak(&mut state, 0);
    let written = serde_json::to_string(&state).expect("JSON");
    assert!(
        !written.contains("used_before"),
        "a controller of that version would keep what it does not know"
    );
    let (net, disk) = (nic_lease(&state).id, disk_lease(&state).id);
    must(&mut state, &attached(NET_FRONTEND, net, true));
    must(&mut state, &attached(BLK_FRONTEND, disk, true));
    restart_frontends(&mut state, 3);
    must(&mut state, &delete());
}

/// Where a network frontend takes frames from, of the backend of h2.
fn receives(state: &State) -> Option<Vec<Area>> {
    let objects = state.desired(NET_FRONTEND).into_values();
    let mut channels =
        objects.filter_map(|object| if let Object::Channel(it) = object { Some(it) } else { None });
    channels.find(|it| it.peer == NET_BACKEND).expect("a channel").receives
}

/// Where the NIC of h2 receives.
fn receive_area(state: &State) -> Area {
    let nic = DeviceId { host: NET_BACKEND.host, name: "nic0".into() };
    state.nic_object(&nic).expect("a NIC at work").rx_area
}

#[test]
fn frontends_are_told_where_each_life_of_a_backend_receives_once_all_of_the_pod_knows_such_a_thing() {
    let mut state = pod_with_vm();
    assert_eq!(receives(&state), None);
    speak(&mut state, 1);
    let first = receive_area(&state);
    assert_eq!(receives(&state), Some(vec![first]));
    must(&mut state, &Command::Gone { endpoint: NET_BACKEND });
    join_as(&mut state, NET_BACKEND, 2);
    let second = receive_area(&state);
    assert_ne!(first, second, "the life before may still write to its area");
    assert_eq!(receives(&state), Some(vec![second]));
    speak(&mut state, 0);
    assert_eq!(receives(&state), None);
}
