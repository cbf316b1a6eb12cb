//! Versions of resources, and changes that are for one of them.

use super::*;

fn at(resource: Resource, versions: &[&String], asked: Command) -> Command {
    let versions = versions.iter().map(|it| (*it).clone()).collect();
    let expected = Some(Expected { resource, versions });
    Command::Request { key: None, labels: Labels::new(), expected, asked: Box::new(asked) }
}

#[test]
fn a_version_changes_with_its_resource_and_with_nothing_else() {
    let mut state = pod();
    must(&mut state, &volume("vol0", 16));
    must(&mut state, &volume("vol1", 16));
    let version =
        |state: &State, name: &str| state.version(&Resource::Volume(name.to_owned())).expect("there");
    let (first, other) = (version(&state, "vol0"), version(&state, "vol1"));
    let label = |value: &str| Command::SetLabels {
        of: Labelled::Volume,
        name: "vol0".to_owned(),
        labels: [("tier".to_owned(), value.to_owned())].into(),
    };
    let vol0 = || Resource::Volume("vol0".to_owned());
    must(&mut state, &at(vol0(), &[&first], label("web")));
    let second = version(&state, "vol0");
    assert_ne!(first, second);
    assert_eq!(other, version(&state, "vol1"));

    let refusal = refused(&mut state, &at(vol0(), &[&first], label("db")));
    assert_eq!(refusal.kind, RefusalKind::Changed);
    assert!(refusal.detail.contains(&second) && refusal.detail.contains(&first), "{refusal}");
    must(&mut state, &at(vol0(), &[&first, &second], label("db")));
    must(&mut state, &at(vol0(), &[], label("cache")));

    // Under the same name, and yet another one.
    let last = version(&state, "vol0");
    must(&mut state, &at(vol0(), &[&last], Command::DeleteVolume { name: "vol0".to_owned() }));
    let refusal = refused(&mut state, &at(vol0(), &[&last], label("web")));
    assert_eq!(refusal.kind, RefusalKind::NotFound);
    must(&mut state, &volume("vol0", 16));
    assert!(![first, second, last].contains(&version(&state, "vol0")));
}

#[test]
fn what_was_done_already_expects_nothing() {
    let mut state = pod();
    must(&mut state, &volume("vol0", 16));
    let resource = Resource::Volume("vol0".to_owned());
    let versions = vec![state.version(&resource).expect("there")];
    let grow = Command::ChangeVolume {
        name: "vol0".to_owned(),
        size_bytes: Some(32 << 20),
        qos: None,
        groups: None,
        read_only: None,
    };
    let request = Command::Request {
        key: Some(IdempotencyKey { key: "grow".to_owned(), digest: "1".to_owned() }),
        labels: Labels::new(),
        expected: Some(Expected { resource, versions }),
        asked: Box::new(grow),
    };
    must(&mut state, &request);
    must(&mut state, &request);
}

#[test]
fn every_resource_has_a_version_that_a_restart_leaves() {
    let mut state = pod();
    must(&mut state, &instance("vm1", 1, &[]));
    must(
        &mut state,
        &Command::SetInstanceType { name: "small".to_owned(), instance_type: InstanceType::default() },
    );
    let kept = serde_json::to_vec(&state).expect("JSON");
    let again: State = serde_json::from_slice(&kept).expect("a state");
    let resources = state.hosts.keys().map(|host| Resource::Host(*host));
    let resources = resources.chain(state.devices.keys().cloned().map(Resource::Device));
    let named = [Resource::Instance("vm1".to_owned()), Resource::InstanceType("small".to_owned())];
    for resource in resources.chain(named) {
        let version = state.version(&resource);
        assert!(version.is_some(), "{resource:?}");
        assert_eq!(version, again.version(&resource), "{resource:?}");
    }
    let vm1 = Resource::Instance("vm1".to_owned());
    let before = state.version(&vm1);
    let device = nic_lease(&state).active_nic().expect("a NIC").clone();
    must(&mut state, &Command::Link { device, up: false, reason: "pulled".to_owned() });
    assert_ne!(before, state.version(&vm1), "its lease is elsewhere");
}
