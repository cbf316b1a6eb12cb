//! Labels of hosts, devices and types of instances.

use super::*;

fn labels(value: &str) -> Labels {
    [("rack".to_owned(), value.to_owned())].into()
}

fn label(of: Labelled, name: &str, value: &str) -> Command {
    let labels = if value.is_empty() { Labels::new() } else { labels(value) };
    Command::SetLabels { of, name: name.to_owned(), labels }
}

fn pod_of_now() -> State {
    let mut state = pod();
    let speaks = state.speaking(1);
    must(&mut state, &speaks);
    state
}

fn labels_of(state: &State) -> (Labels, Labels) {
    let device = state.device_named("h2/nic0").and_then(|id| state.devices.get(&id)).expect("a device");
    (state.labels_of_host(HostId::new(2)), device.labels.clone())
}

#[test]
fn hosts_and_devices_keep_their_labels_while_they_are_known() {
    let mut state = pod_of_now();
    must(&mut state, &label(Labelled::Host, "h2", "a"));
    must(&mut state, &label(Labelled::Device, "h2/nic0", "b"));
    assert_eq!(labels_of(&state), (labels("a"), labels("b")));
    must(&mut state, &Command::Gone { endpoint: NET_BACKEND });
    assert_eq!(labels_of(&state), (labels("a"), labels("b")));
    join_as(&mut state, NET_BACKEND, 2);
    assert_eq!(labels_of(&state), (labels("a"), labels("b")), "it joined again");
    let json = serde_json::to_vec(&state).expect("JSON");
    assert_eq!(serde_json::from_slice::<State>(&json).expect("a state"), state);

    must(&mut state, &label(Labelled::Host, "h2", ""));
    must(&mut state, &label(Labelled::Device, "h2/nic0", ""));
    assert_eq!(labels_of(&state), (Labels::new(), Labels::new()));
}

#[test]
fn what_is_not_there_bears_no_labels() {
    let mut state = pod_of_now();
    for (of, name) in [(Labelled::Host, "h9"), (Labelled::Device, "h2/nic9"), (Labelled::Device, "nic0")] {
        assert_eq!(refused(&mut state, &label(of, name, "a")).kind, RefusalKind::NotFound);
    }
    let bad = Command::SetLabels { of: Labelled::Host, name: "h2".to_owned(), labels: labels("no spaces") };
    assert_eq!(refused(&mut state, &bad).kind, RefusalKind::InvalidValue);
    // One that is deleted takes its labels with it: whoever comes under its number has none.
    must(&mut state, &label(Labelled::Host, "h3", "a"));
    must(&mut state, &Command::Gone { endpoint: BACKUP_BACKEND });
    must(&mut state, &Command::ResetHost { name: "h3".to_owned() });
    must(&mut state, &Command::DeleteHost { name: "h3".to_owned() });
    join_as(&mut state, BACKUP_BACKEND, 2);
    assert_eq!(state.labels_of_host(HostId::new(3)), Labels::new());
}

#[test]
fn a_version_changes_with_labels_and_counts() {
    let mut state = pod_of_now();
    for (of, name) in [(Labelled::Host, "h2"), (Labelled::Device, "h2/nic0")] {
        let command = label(of, name, "a");
        let resource = command.changes(&state).expect("it is there");
        let first = state.version(&resource).expect("a version");
        let outcome = state.carry_out(&command).expect("it is there");
        assert!(outcome.changed);
        let second = state.version(&resource).expect("a version");
        assert_ne!(first, second);
        let again = state.carry_out(&command).expect("it is there");
        // A row that somebody was handed counts as changed.
        assert!(!again.changed || of == Labelled::Device);
        let at = |versions: Vec<String>| Command::Request {
            key: None,
            labels: Labels::new(),
            expected: Some(Expected { resource: resource.clone(), versions }),
            asked: Box::new(label(of, name, "b")),
        };
        assert_eq!(refused(&mut state, &at(vec![first.clone()])).kind, RefusalKind::Changed);
        must(&mut state, &at(vec![second]));
        must(&mut state, &label(of, name, ""));
        assert_eq!(state.version(&resource), Some(first), "without labels it is what it was");
    }
}

#[test]
fn labels_are_for_pods_of_which_everybody_knows_them() {
    let mut state = pod_of_now();
    must(&mut state, &label(Labelled::Host, "h2", "a"));
    must(&mut state, &label(Labelled::Device, "h2/nic0", "b"));
    let old = state.speaking(0);
    must(&mut state, &old);
    assert_eq!(labels_of(&state), (Labels::new(), Labels::new()));
    assert!(!serde_json::to_string(&state).expect("JSON").contains("host_labels"));
    for (of, name) in [(Labelled::Host, "h2"), (Labelled::Device, "h2/nic0")] {
        assert!(state.check_spoken(&label(of, name, "a")).is_err());
        assert_eq!(refused(&mut state, &label(of, name, "a")).kind, RefusalKind::Busy);
    }
    must(&mut state, &volume("vol0", 16));
    must(&mut state, &label(Labelled::Volume, "vol0", "a"));
}

#[test]
fn types_bear_labels_once_everybody_knows_them() {
    let mut state = pod_of_now();
    let set = |text: &str| {
        let labels = if text.is_empty() { Labels::new() } else { labels(text) };
        let instance_type = InstanceType { labels, ..InstanceType::default() };
        Command::SetInstanceType { name: "small".to_owned(), instance_type }
    };
    let of_type = |state: &State| state.types["small"].labels.clone();
    must(&mut state, &set("a"));
    assert_eq!(of_type(&state), labels("a"));
    assert_eq!(refused(&mut state, &set("no spaces")).kind, RefusalKind::InvalidValue);
    // Instances have labels of their own.
    let mut create = instance("vm1", 1, &[]);
    if let Command::CreateInstance { instance_type, .. } = &mut create {
        *instance_type = Some("small".to_owned());
    }
    must(&mut state, &create);
    assert_eq!(state.instance_named("vm1").expect("it was made").labels, Labels::new());
    let old = state.speaking(0);
    must(&mut state, &old);
    assert_eq!(of_type(&state), Labels::new());
    assert_eq!(refused(&mut state, &set("a")).kind, RefusalKind::Busy);
    must(&mut state, &set(""));
}
