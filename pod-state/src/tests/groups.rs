//! Volumes that lie apart from others, or with them.

use std::collections::BTreeSet;

use pod_protocol::protocol::Protocol;

use super::super::model::{guest, pod_with_ssds, ssd_of, volume};
use super::*;
use crate::model::guest_with_volume;

/// h1 with guests, and so many hosts from h2 with an SSD each.
fn pod_of(ssds: usize) -> State {
    let mut state = pod_with_ssds(&vec![(None, None); ssds]);
    let speaks = state.speaking(Protocol::GROUPS_VOLUMES);
    must(&mut state, &speaks);
    state
}

fn apart(name: &str) -> Groups {
    Groups { apart: Some(name.to_owned()), together: None }
}

fn together(name: &str) -> Groups {
    Groups { apart: None, together: Some(name.to_owned()) }
}

fn striped(name: &str, columns: u8, groups: Groups) -> Command {
    let (name, size_bytes) = (name.to_owned(), 8 * MIB);
    Command::CreateStriped {
        name,
        size_bytes,
        columns,
        stripe_bytes: 64 << 10,
        minimum_iops: None,
        minimum_bytes_per_second: None,
        groups,
    }
}

fn hosts_of(state: &State, volume: &str) -> BTreeSet<u16> {
    let volume = state.volume_named(volume).expect("a volume");
    volume.devices().map(|ssd| ssd.host.get()).collect()
}

fn moved(name: &str, from: u16, to: Option<u16>) -> Command {
    Command::AddReplica { name: name.to_owned(), device: to.map(ssd_of), replaces: Some(ssd_of(from)) }
}

#[test]
fn volumes_that_have_to_be_apart_share_no_host() {
    let mut state = pod_of(4);
    must(&mut state, &volume("data", (None, 2), apart("db")));
    must(&mut state, &volume("log", (None, 1), apart("db")));
    let (data, log) = (hosts_of(&state, "data"), hosts_of(&state, "log"));
    assert!(data.is_disjoint(&log), "{data:?} {log:?}");
    // Three of four are taken.
    let refusal = refused(&mut state, &volume("copy", (None, 2), apart("db")));
    assert_eq!(refusal.kind, RefusalKind::NoRoom);
    assert!(refusal.detail.contains("the 3 hosts that others of the group db lie on"), "{refusal}");
    let refusal = refused(&mut state, &striped("wide", 2, apart("db")));
    assert!(refusal.detail.contains("of the group db"), "{refusal}");
    let taken = *log.first().expect("it lies somewhere");
    let refusal = refused(&mut state, &volume("copy", (Some(taken), 1), apart("db")));
    assert_eq!(refusal.kind, RefusalKind::NoDevice);
    assert!(refusal.detail.contains("of the group db lies on an SSD of h"), "{refusal}");
    // Whose name is that of another kind of group, or of another group, is none of it.
    must(&mut state, &volume("other", (Some(taken), 1), together("db")));
    must(&mut state, &volume("another", (Some(taken), 1), apart("web")));
    must(&mut state, &volume("copy", (None, 1), apart("db")));
    // A volume that is gone is in nobody's way.
    must(&mut state, &Command::DeleteVolume { name: "log".to_owned() });
    must(&mut state, &volume("log", (None, 1), apart("db")));
    assert_eq!(hosts_of(&state, "log"), log);
}

#[test]
fn they_stay_apart_wherever_they_move() {
    let mut state = pod_of(4);
    for (name, host) in [("a", 2), ("b", 3)] {
        must(&mut state, &volume(name, (Some(host), 1), apart("db")));
        must(&mut state, &guest(&format!("vm-{name}"), &[name]));
    }
    let refusal = refused(&mut state, &moved("a", 2, Some(3)));
    assert_eq!(refusal.kind, RefusalKind::NoDevice);
    refused(
        &mut state,
        &Command::AddReplica { name: "a".to_owned(), device: Some(ssd_of(3)), replaces: None },
    );
    must(&mut state, &moved("a", 2, None));
    let a = hosts_of(&state, "a");
    assert!(!a.contains(&3), "{a:?}");
    // Where it comes to, and what it leaves, count.
    refused(&mut state, &moved("b", 3, Some(*a.last().expect("two"))));
    refused(&mut state, &moved("b", 3, Some(2)));

    // A host that is to be empty: its volume goes where no other of the group is, or stays.
    must(&mut state, &Command::Drain { host: HostId::new(3), device: None, on: true });
    let b = hosts_of(&state, "b");
    assert_eq!((b.len(), b.is_disjoint(&a)), (2, true), "{b:?} {a:?}");
}

#[test]
fn one_that_has_nowhere_to_go_from_a_drained_host_stays() {
    let mut state = pod_of(3);
    for (name, host) in [("a", 2), ("b", 3), ("c", 4)] {
        must(&mut state, &volume(name, (Some(host), 1), apart("db")));
        must(&mut state, &guest(&format!("vm-{name}"), &[name]));
    }
    must(&mut state, &Command::Drain { host: HostId::new(3), device: None, on: true });
    assert_eq!(hosts_of(&state, "b"), BTreeSet::from([3]));
    must(&mut state, &Command::DeleteInstance { name: "vm-c".to_owned(), force: true });
    must(&mut state, &Command::DeleteVolume { name: "c".to_owned() });
    assert_eq!(hosts_of(&state, "b"), BTreeSet::from([3, 4]), "it goes as soon as it can");
}

#[test]
fn columns_of_a_striped_volume_stay_apart_from_others() {
    let mut state = pod_of(4);
    must(&mut state, &volume("log", (Some(4), 1), apart("db")));
    must(&mut state, &striped("wide", 2, apart("db")));
    let wide = hosts_of(&state, "wide");
    assert!(!wide.contains(&4), "{wide:?}");
    let from = *wide.first().expect("two");
    refused(&mut state, &moved("wide", from, Some(4)));
    must(&mut state, &moved("wide", from, None));
    assert!(!hosts_of(&state, "wide").contains(&4));
}

#[test]
fn volumes_that_are_to_be_together_lie_on_one_ssd_while_it_has_room() {
    let mut state = pod_of(3);
    // Elsewhere there is more room.
    must(&mut state, &volume("a", (Some(3), 1), together("app")));
    must(&mut state, &volume("b", (None, 1), together("app")));
    assert_eq!(hosts_of(&state, "b"), BTreeSet::from([3]));
    must(&mut state, &volume("c", (None, 1), together("other")));
    assert_ne!(hosts_of(&state, "c"), BTreeSet::from([3]), "it is of another group");
    // 64 MiB hold eight.
    for number in 0..5 {
        must(&mut state, &volume(&format!("d{number}"), (None, 1), together("app")));
        assert!(hosts_of(&state, &format!("d{number}")).contains(&3));
    }
    must(&mut state, &volume("pair", (None, 2), together("app")));
    assert!(hosts_of(&state, "pair").contains(&3), "one of its places is with them");
    must(&mut state, &volume("last", (None, 1), together("app")));
    assert!(
        !hosts_of(&state, "last").contains(&3),
        "there is no room for it any more, and it is not refused"
    );
    let elsewhere = hosts_of(&state, "pair").into_iter().find(|it| *it != 3);
    assert_eq!(hosts_of(&state, "last").first().copied(), elsewhere, "the next best is where one of them is");
}

#[test]
fn another_ssd_of_the_same_host_comes_before_other_hosts() {
    let mut state = pod_of(3);
    let mut devices = vec![ssd("ssd0", 8), ssd("ssd1", 64)];
    for device in &mut devices {
        if let DeviceReport::Ssd { iops, bytes_per_second, .. } = device {
            (*iops, *bytes_per_second) = (None, None);
        }
    }
    let join = join(3, devices);
    must(&mut state, &Command::Join { endpoint: endpoint(3, Role::BlkBackend), incarnation: 2, join });
    must(&mut state, &volume("a", (Some(3), 1), together("app")));
    must(&mut state, &volume("big", (Some(3), 1), Groups::default()).on("ssd1"));
    must(&mut state, &volume("b", (None, 1), together("app")));
    let b = state.volume_named("b").expect("a volume").replicas[0].device.clone();
    assert_eq!(b, DeviceId { host: HostId::new(3), name: "ssd1".into() });
}

impl Command {
    /// The same volume on another SSD of the same host.
    fn on(mut self, ssd: &str) -> Self {
        if let Self::CreateVolume { device: Some(device), .. } = &mut self {
            device.name = ssd.into();
        }
        self
    }
}

#[test]
fn a_volume_that_is_to_be_near_a_host_is_with_its_group_first() {
    let mut state = pod_of(3);
    let near = |state: &State, groups: &Groups| {
        state.ssd_near(HostId::new(2), 8 * MIB, (&Qos::default(), groups)).map(|it| it.host.get())
    };
    assert_eq!(near(&state, &together("app")), Some(2));
    must(&mut state, &volume("a", (Some(3), 1), together("app")));
    assert_eq!(near(&state, &together("app")), None, "the controller chooses, and takes the group's");
    assert_eq!(near(&state, &Groups::default()), Some(2));
    must(&mut state, &volume("b", (Some(2), 1), apart("db")));
    assert_eq!(near(&state, &apart("db")), None);
}

#[test]
fn groups_are_for_pods_of_which_everybody_knows_them() {
    let mut state = pod_of(3);
    must(&mut state, &volume("a", (Some(2), 1), apart("db")));
    let lease = guest_with_volume(&mut state, "plain", 4, 3, 1);
    assert!(lease.is_some());
    let old = state.speaking(0);
    let effects = must(&mut state, &old);
    assert_eq!(kinds(&effects), [EventKind::VolumeChanged]);
    assert!(state.volumes.values().all(|it| it.groups.is_empty()));
    let json = serde_json::to_string(&state).expect("JSON");
    assert!(!json.contains("groups") && !json.contains("\"apart\""), "an older controller could not read it");

    for asked in [volume("b", (None, 1), together("db")), striped("wide", 2, apart("db"))] {
        let request =
            Command::Request { key: None, labels: Labels::new(), expected: None, asked: Box::new(asked) };
        assert!(state.check_spoken(&request).is_err(), "whoever asks is told before anybody else is");
        let refusal = refused(&mut state, &request);
        assert!(refusal.kind == RefusalKind::Busy && refusal.detail.contains("1.1"), "{refusal}");
    }
    // What says nothing new is what it was.
    let plain = volume("b", (None, 1), Groups::default());
    assert!(!serde_json::to_string(&plain).expect("JSON").contains("groups"));
    must(&mut state, &plain);
    let new = state.speaking(Protocol::GROUPS_VOLUMES);
    must(&mut state, &new);
    must(&mut state, &volume("c", (Some(2), 1), apart("db")));
}

#[test]
fn names_of_groups_are_short_text() {
    let mut state = pod_of(3);
    for name in [String::new(), "x".repeat(64), "a\nb".to_owned()] {
        for groups in [apart(&name), together(&name)] {
            assert_eq!(
                refused(&mut state, &volume("a", (None, 1), groups.clone())).kind,
                RefusalKind::InvalidValue
            );
            assert_eq!(refused(&mut state, &striped("a", 2, groups)).kind, RefusalKind::InvalidValue);
        }
    }
    must(&mut state, &volume("a", (None, 1), apart(&"x".repeat(63))));
}

#[test]
fn groups_outlive_a_restart_of_the_controller() {
    let mut state = pod_of(3);
    must(&mut state, &volume("a", (Some(2), 1), apart("db")));
    let kept = serde_json::to_vec(&state).expect("JSON");
    let mut again: State = serde_json::from_slice(&kept).expect("a state");
    assert_eq!(again, state);
    refused(&mut again, &volume("b", (Some(2), 1), apart("db")));
}

fn regroup(name: &str, groups: Groups) -> Command {
    Command::ChangeVolume {
        name: name.to_owned(),
        size_bytes: None,
        qos: None,
        groups: Some(groups),
        read_only: None,
    }
}

fn contrary(state: &State, volume: &str) -> Vec<String> {
    state.contrary(state.volume_named(volume).expect("a volume"))
}

#[test]
fn a_volume_that_comes_into_a_group_stays_where_it_lies_until_it_moves() {
    let mut state = pod_of(3);
    for (name, host) in [("a", 2), ("b", 2), ("c", 3)] {
        must(
            &mut state,
            &volume(name, (Some(host), 1), if name == "a" { apart("db") } else { Groups::default() }),
        );
        must(&mut state, &guest(&format!("vm-{name}"), &[name]));
    }
    let effects = must(&mut state, &regroup("b", apart("db")));
    let told = format!("{effects:?}");
    assert_eq!(kinds(&effects), [EventKind::VolumeChanged]);
    assert!(told.contains("apart from others of the group db; a of the group db"), "{told}");
    assert_eq!(hosts_of(&state, "b"), BTreeSet::from([2]), "nothing moves by itself");
    for (one, other) in [("a", "b"), ("b", "a")] {
        let said = contrary(&state, one);
        assert!(said.len() == 1 && said[0].starts_with(&format!("{other} of the group db")), "{said:?}");
    }
    assert_eq!(must(&mut state, &regroup("b", apart("db"))), [], "it is in that group already");
    must(&mut state, &regroup("c", apart("db")));
    assert_eq!(contrary(&state, "c"), [""; 0]);
    // What moves goes where none of them is.
    refused(&mut state, &moved("b", 2, Some(3)));
    must(&mut state, &Command::Drain { host: HostId::new(2), device: None, on: true });
    let moved: Vec<_> =
        ["a", "b"].map(|name| hosts_of(&state, name)).into_iter().filter(|it| it.len() == 2).collect();
    assert_eq!(moved, [BTreeSet::from([2, 4])], "one of them has somewhere to go");
    // None of a group, it is in nobody's way.
    must(&mut state, &regroup("c", Groups::default()));
    let mut left = ["a", "b"].map(|name| hosts_of(&state, name));
    left.sort();
    assert_eq!(left, [BTreeSet::from([2, 3]), BTreeSet::from([2, 4])]);
}

#[test]
fn groups_change_as_a_whole_and_their_names_are_looked_at() {
    let mut state = pod_of(3);
    must(&mut state, &volume("a", (Some(2), 1), apart("db")));
    must(&mut state, &volume("b", (Some(3), 1), together("app")));
    must(&mut state, &regroup("a", together("app")));
    let groups = |state: &State| state.volume_named("a").expect("a volume").groups.clone();
    assert_eq!(groups(&state), together("app"));
    assert_eq!(
        contrary(&state, "a"),
        ["no other one of the group app, which is to be together, lies on its host"]
    );
    assert_eq!(refused(&mut state, &regroup("a", apart(""))).kind, RefusalKind::InvalidValue);
    assert_eq!(refused(&mut state, &regroup("none", apart("db"))).kind, RefusalKind::NotFound);
    // Nobody that is left is in its way.
    must(&mut state, &volume("c", (Some(2), 1), apart("db")));
    must(&mut state, &moved("a", 2, Some(3)));

    let old = state.speaking(0);
    must(&mut state, &old);
    let refusal = refused(&mut state, &regroup("a", apart("db")));
    assert!(refusal.kind == RefusalKind::Busy && refusal.detail.contains("1.1"), "{refusal}");
    assert_eq!(must(&mut state, &regroup("a", Groups::default())), [], "it is in none");
}
