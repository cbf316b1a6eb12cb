//! Requests that are sent twice, and labels.

use super::{pod, volume};
use crate::{Command, IdempotencyKey, KEYS_MAX, Labelled, Labels, RefusalKind, State};

fn asked(key: &str, digest: &str, command: Command) -> Command {
    let key = IdempotencyKey { key: key.to_owned(), digest: digest.to_owned() };
    Command::Request { key: Some(key), labels: Labels::new(), expected: None, asked: Box::new(command) }
}

fn delete(name: &str) -> Command {
    Command::DeleteVolume { name: name.to_owned() }
}

#[test]
fn what_is_asked_twice_is_done_once() {
    let mut state = pod();
    let create = asked("k1", "d1", volume("vol0", 16));
    assert!(!state.apply(&create).expect("there is room").is_empty());
    let (before, volumes) = (state.clone(), state.volumes.len());
    assert_eq!(state.apply(&create), Ok(Vec::new()), "nothing more happens");
    assert_eq!((&state, state.volumes.len()), (&before, volumes));

    let other = asked("k1", "d2", volume("vol1", 16));
    assert_eq!(state.apply(&other).expect_err("another request").kind, RefusalKind::KeyReused);
    assert_eq!(state, before, "a refusal changes nothing");
    // Done once also when it could be done again by now.
    state.apply(&delete("vol0")).expect("nobody uses it");
    assert_eq!(state.apply(&create), Ok(Vec::new()));
    assert!(state.volume_named("vol0").is_none());
    let restarted: State =
        serde_json::from_str(&serde_json::to_string(&state).expect("JSON")).expect("a state");
    assert_eq!(restarted, state, "keys survive a restart");
}

#[test]
fn what_was_refused_may_be_asked_again() {
    let mut state = pod();
    let early = asked("k1", "d1", delete("vol0"));
    assert_eq!(state.apply(&early).expect_err("not there yet").kind, RefusalKind::NotFound);
    state.apply(&volume("vol0", 16)).expect("there is room");
    state.apply(&early).expect("it is there now");
    assert!(state.volume_named("vol0").is_none());
}

#[test]
fn keys_are_forgotten_oldest_first() {
    let mut state = pod();
    let set = |number: usize| {
        let spec = crate::InstanceType::default();
        let command = Command::SetInstanceType { name: "small".to_owned(), instance_type: spec };
        asked(&format!("k{number}"), "d", command)
    };
    for number in 0..=KEYS_MAX {
        state.apply(&set(number)).expect("a key of its own");
    }
    let index = state.index;
    state.apply(&set(KEYS_MAX)).expect("known");
    assert_eq!(state.index, index, "the newest is known");
    state.apply(&set(0)).expect("as if it was new");
    assert_eq!(state.index, index + 1, "the oldest is forgotten");
}

#[test]
fn labels_come_with_a_creation_and_change_as_a_whole() {
    let mut state = pod();
    let labels = |pairs: &[(&str, &str)]| -> Labels {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    };
    let create = |labels: Labels| Command::Request {
        key: None,
        labels,
        expected: None,
        asked: Box::new(volume("vol0", 16)),
    };
    for bad in [("", "x"), ("-a", "x"), ("a=b", "x"), ("a", "x,y"), ("a", "ä")] {
        let refused = state.apply(&create(labels(&[bad]))).expect_err("no label");
        assert_eq!(refused.kind, RefusalKind::InvalidValue, "{bad:?}");
        assert!(state.volume_named("vol0").is_none(), "{bad:?}: all or nothing");
    }
    state.apply(&create(labels(&[("tier", "web"), ("example.org/team", "")]))).expect("there is room");
    let known = |state: &State| state.volume_named("vol0").expect("there").labels.clone();
    assert_eq!(known(&state), labels(&[("example.org/team", ""), ("tier", "web")]));
    let set = |name: &str, pairs| Command::SetLabels {
        of: Labelled::Volume,
        name: name.to_owned(),
        labels: labels(pairs),
    };
    state.apply(&set("vol0", &[("tier", "db")])).expect("it is there");
    assert_eq!(known(&state), labels(&[("tier", "db")]));
    assert_eq!(state.apply(&set("vol9", &[])).expect_err("nobody").kind, RefusalKind::NotFound);
}
