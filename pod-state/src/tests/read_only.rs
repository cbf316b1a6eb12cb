//! Volumes that guests only read.

use pod_protocol::objects::{DiskObject, VolumeObject};

use super::super::model::{guest, pod_with_ssds, ssd_of, volume};
use super::*;

fn read_only(name: &str, on: bool) -> Command {
    Command::ChangeVolume {
        name: name.to_owned(),
        size_bytes: None,
        qos: None,
        groups: None,
        read_only: Some(on),
    }
}

/// What the frontend is told of the guest's disk, and the backends of its places.
fn told(state: &State) -> (Vec<bool>, Vec<bool>) {
    let all = [1, 2, 3].into_iter().flat_map(|host| {
        [Role::BlkFrontend, Role::BlkBackend]
            .into_iter()
            .flat_map(move |role| state.desired(endpoint(host, role)).into_values())
    });
    let (mut disks, mut places) = (Vec::new(), Vec::new());
    for object in all {
        match object {
            Object::Disk(DiskObject { read_only, .. }) => disks.push(read_only),
            Object::Volume(VolumeObject { read_only, .. }) => places.push(read_only),
            _ => {}
        }
    }
    (disks, places)
}

/// A volume on h2, and nobody who uses it.
fn pod() -> State {
    let mut state = pod_with_ssds(&[(None, None); 2]);
    let speaking = state.speaking(Protocol::PROTECTS_VOLUMES);
    must(&mut state, &speaking);
    must(&mut state, &volume("vol", (Some(2), 1), Groups::default()));
    state
}

fn scrub(state: &mut State) {
    for command in scrub_all(state) {
        must(state, &command);
    }
}

#[test]
fn a_guest_cannot_write_to_a_volume_that_is_only_read() {
    let mut state = pod();
    must(&mut state, &read_only("vol", true));
    assert_eq!(must(&mut state, &read_only("vol", true)), [], "it is already");
    must(&mut state, &guest("vm", &["vol"]));
    scrub(&mut state);
    assert_eq!(told(&state), (vec![true], vec![true]));
    let refusal = refused(&mut state, &read_only("vol", false));
    assert_eq!(refusal.kind, RefusalKind::Leased);
    assert!(refusal.detail.contains("podctl instances detach vm vol"), "{refusal}");
}

/// What frontends write to bring a replica in line is no guest's.
#[test]
fn a_volume_that_is_only_read_is_copied_all_the_same() {
    let mut state = pod();
    must(&mut state, &read_only("vol", true));
    must(&mut state, &guest("vm", &["vol"]));
    let add = Command::AddReplica { name: "vol".to_owned(), device: Some(ssd_of(3)), replaces: None };
    must(&mut state, &add);
    scrub(&mut state);
    assert_eq!(told(&state), (vec![true], vec![false; 2]));
}

#[test]
fn it_is_not_kept_where_the_version_before_is_spoken() {
    let mut state = pod();
    must(&mut state, &read_only("vol", true));
    let speaking = state.speaking(0);
    let effects = must(&mut state, &speaking);
    assert!(
        matches!(&effects[..], [Effect::Event { kind: EventKind::VolumeChanged, message, .. }] if message.contains("not read only any more")),
        "{effects:?}"
    );
    assert!(!serde_json::to_string(&state.volumes).unwrap().contains("read_only"));
    assert_eq!(refused(&mut state, &read_only("vol", true)).kind, RefusalKind::Busy);
    must(&mut state, &read_only("vol", false));
}
