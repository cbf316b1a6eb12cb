//! Who copies what nobody uses, one promise each.

use cxl_pool::EndpointId;
use pod_protocol::objects::Object;
use pod_protocol::protocol::Protocol;

use super::super::model::{self, check, endpoint, join, pod_with_ssds, scrub_all, ssd_of};
use super::super::{DeviceId, Groups};
use super::*;

fn must(state: &mut State, command: &Command) {
    state.apply(command).unwrap_or_else(|refusal| panic!("{command:?}: {refusal}"));
    check(state);
}

fn refused(state: &mut State, command: &Command) -> RefusalKind {
    let before = state.clone();
    let refusal = state.apply(command).expect_err("it cannot be");
    assert_eq!(*state, before, "a refused command changed something");
    refusal.kind
}

/// SSDs on h2 and those after it, frontends on h1 and h2, and a volume on h2 that nobody uses.
fn pod() -> State {
    let mut state = pod_with_ssds(&[(None, None); 3]);
    let speaking = state.speaking(Protocol::HAS_COPIERS);
    must(&mut state, &speaking);
    for host in [1, 2] {
        let endpoint = endpoint(host, Role::BlkFrontend);
        if !state.endpoints.contains_key(&endpoint) {
            must(&mut state, &Command::Join { endpoint, incarnation: 1, join: join(host, Vec::new()) });
        }
    }
    must(&mut state, &model::volume("unused", (Some(2), 1), Groups::default()));
    state
}

fn drain(host: u16, on: bool) -> Command {
    Command::Drain { host: HostId::new(host), device: None, on }
}

/// Does what is due; what cannot be done now is left.
fn look(state: &mut State) -> Vec<Command> {
    let due = state.copiers_due();
    for command in &due {
        must(state, command);
    }
    for command in scrub_all(state) {
        must(state, &command);
    }
    due
}

fn copiers(state: &State) -> Vec<(&str, HostId)> {
    let copiers = state.instances.values().filter(|it| it.copier);
    copiers.map(|it| (it.name.as_str(), it.host)).collect()
}

fn volume(state: &State) -> &Volume {
    state.volume_named("unused").expect("it is there")
}

fn lies_on(state: &State) -> Vec<DeviceId> {
    volume(state).devices().cloned().collect()
}

/// The frontend that copies says that it has done so.
fn copied(state: &State, host: u16) -> Command {
    let endpoint = endpoint(host, Role::BlkFrontend);
    let lease = state.lease_of_volume(volume(state).id).expect("a copier").id;
    let place = volume(state).replicas.iter().find(|it| it.stale).expect("it is being copied");
    Command::ReplicaSynced { endpoint, lease, replica: place.number, epoch: volume(state).epoch }
}

#[test]
fn a_volume_that_nobody_uses_leaves_an_ssd_that_is_to_be_empty() {
    let mut state = pod();
    assert_eq!(look(&mut state), [], "there is nothing to do");
    must(&mut state, &drain(2, true));
    assert_eq!(lies_on(&state), [ssd_of(2)]);
    look(&mut state);
    // Not on h2, to which nothing comes.
    let id = volume(&state).id;
    assert_eq!(copiers(&state), [(format!("copier-{}", id.get()).as_str(), HostId::new(1))]);
    let disks = state.desired(endpoint(1, Role::BlkFrontend)).into_values();
    let sockets: Vec<_> =
        disks.filter_map(|it| if let Object::Disk(it) = it { Some(it.socket) } else { None }).collect();
    assert_eq!(sockets, [format!("copier-{}-disk.sock", id.get())], "a frontend has it");
    assert!(volume(&state).is_moving());
    assert_eq!(look(&mut state), [], "it is at work");
    let done = copied(&state, 1);
    must(&mut state, &done);
    look(&mut state);
    assert_eq!(copiers(&state), [], "it has done its work");
    assert!(!lies_on(&state).contains(&ssd_of(2)));
    assert_eq!(look(&mut state), []);
}

#[test]
fn a_volume_that_can_go_nowhere_is_left_alone_until_it_can() {
    let mut state = pod();
    let others: Vec<EndpointId> = state
        .endpoints
        .keys()
        .filter(|it| it.role == Role::BlkBackend && it.host.get() != 2)
        .copied()
        .collect();
    for endpoint in &others {
        must(&mut state, &Command::Silent { endpoint: *endpoint });
    }
    must(&mut state, &drain(2, true));
    assert_eq!(look(&mut state), []);
    must(&mut state, &Command::Back { endpoint: others[0] });
    assert_eq!(look(&mut state).len(), 1);
    // It is not to be empty any more before anything was copied: the move goes on, as one that somebody asked for.
    must(&mut state, &drain(2, false));
    assert_eq!(look(&mut state), []);
    let device = lies_on(&state)[1].clone();
    must(&mut state, &Command::RemoveReplica { name: "unused".to_owned(), device });
    look(&mut state);
    assert_eq!((copiers(&state), lies_on(&state)), (vec![], vec![ssd_of(2)]));
}

#[test]
fn whoever_wants_a_volume_gets_it_from_its_copier() {
    let mut state = pod();
    must(&mut state, &drain(2, true));
    look(&mut state);
    must(&mut state, &model::guest("vm1", &["unused"]));
    assert_eq!(copiers(&state), []);
    let lease = state.lease_of_volume(volume(&state).id).expect("a lease");
    assert_eq!(state.instances[&lease.instance].name, "vm1");
    assert!(volume(&state).is_moving(), "its frontend goes on with what is left");
    assert_eq!(look(&mut state), [], "it needs no other one");
    // Without it, a copier goes on.
    must(&mut state, &Command::DeleteInstance { name: "vm1".to_owned(), force: true });
    look(&mut state);
    assert_eq!(copiers(&state).len(), 1);
    must(&mut state, &model::guest("vm2", &[]));
    let attach =
        Command::AttachDevice { instance: "vm2".to_owned(), nic: None, volume: Some("unused".to_owned()) };
    must(&mut state, &attach);
    assert_eq!(copiers(&state), []);
}

#[test]
fn who_does_not_get_a_volume_leaves_it_to_its_copier() {
    let mut state = pod();
    must(&mut state, &drain(2, true));
    look(&mut state);
    assert_eq!(refused(&mut state, &model::guest("vm1", &["unused", "other"])), RefusalKind::NotFound);
    assert_eq!(copiers(&state).len(), 1);
}

#[test]
fn a_copier_keeps_a_volume_from_nothing() {
    let protect = Command::ChangeVolume {
        name: "unused".to_owned(),
        size_bytes: None,
        qos: None,
        groups: None,
        read_only: Some(true),
    };
    let delete = Command::DeleteVolume { name: "unused".to_owned() };
    for command in [protect, delete] {
        let mut state = pod();
        must(&mut state, &drain(2, true));
        look(&mut state);
        must(&mut state, &command);
        assert_eq!(copiers(&state), [], "{command:?}");
    }
}

#[test]
fn a_copier_gets_no_devices_and_does_not_move() {
    let mut state = pod();
    must(&mut state, &model::volume("other", (Some(3), 1), Groups::default()));
    must(&mut state, &drain(2, true));
    look(&mut state);
    let instance = copiers(&state)[0].0.to_owned();
    let attach =
        Command::AttachDevice { instance: instance.clone(), nic: None, volume: Some("other".to_owned()) };
    let migrate = Command::PrepareMigration { name: instance, to: HostId::new(2) };
    must(&mut state, &drain(2, false));
    for command in [attach, migrate] {
        assert_eq!(refused(&mut state, &command), RefusalKind::Busy, "{command:?}");
    }
}

#[test]
fn a_move_and_a_replica_that_missed_something_need_nobody_who_uses_the_volume() {
    let mut state = pod();
    let device = Some(ssd_of(3));
    let add = Command::AddReplica { name: "unused".to_owned(), device: device.clone(), replaces: None };
    must(&mut state, &add);
    look(&mut state);
    // Where some of it lies.
    assert_eq!(copiers(&state)[0].1, HostId::new(2));
    let done = copied(&state, 2);
    must(&mut state, &done);
    look(&mut state);
    assert_eq!((copiers(&state), lies_on(&state)), (vec![], vec![ssd_of(2), ssd_of(3)]));

    let to = ssd_of(4);
    must(
        &mut state,
        &Command::AddReplica { name: "unused".to_owned(), device: Some(to.clone()), replaces: device },
    );
    look(&mut state);
    // Whoever copies is lost: another one does.
    let frontend = endpoint(2, Role::BlkFrontend);
    must(&mut state, &Command::Gone { endpoint: frontend });
    look(&mut state);
    assert_eq!(copiers(&state)[0].1, HostId::new(1));
    let done = copied(&state, 1);
    must(&mut state, &done);
    look(&mut state);
    assert_eq!((copiers(&state), lies_on(&state)), (vec![], vec![ssd_of(2), to]));
}

#[test]
fn there_are_few_at_a_time_and_none_where_not_all_of_the_pod_knows_of_them() {
    let mut state = pod();
    for number in 0..COPIERS_MAX + 2 {
        must(&mut state, &model::volume(&format!("vol{number}"), (Some(2), 1), Groups::default()));
    }
    must(&mut state, &drain(2, true));
    look(&mut state);
    assert_eq!(copiers(&state).len(), COPIERS_MAX);
    let speaking = state.speaking(Protocol::HAS_COPIERS - 1);
    must(&mut state, &speaking);
    assert_eq!(look(&mut state), []);
    assert_eq!(copiers(&state), []);
    let create = Command::CreateCopier { volume: volume(&state).id, host: HostId::new(1) };
    assert_eq!(refused(&mut state, &create), RefusalKind::Busy);
}

#[test]
fn an_instance_of_somebodys_is_no_copier() {
    let mut state = pod();
    must(&mut state, &model::guest("vm1", &["unused"]));
    let instance = state.instance_named("vm1").expect("it is there").id;
    must(&mut state, &Command::EndCopier { instance });
    assert!(state.instance_named("vm1").is_some());
    let create = Command::CreateCopier { volume: volume(&state).id, host: HostId::new(1) };
    assert_eq!(refused(&mut state, &create), RefusalKind::Leased);
}
