use cxl_pool::Role;
use pod_state::model::{create_instance, endpoint, join, options};
use pod_state::{Labelled, State};

use std::sync::Arc;

use super::*;
use crate::config::testing::pool_and_config;
use crate::controller::{Desk, Request};
use crate::replication::Sight;

/// Whoever carries out what is asked for.
fn handle() -> (Handle, tempfile::TempDir) {
    let state = State::new(options(64));
    behind(&state.clone(), state)
}

/// A controller that shows what there was before, and has one carry out what is asked for that knows better. With the first answer of
/// that one it sees so itself.
pub(in super::super) fn behind(before: &State, mut state: State) -> (Handle, tempfile::TempDir) {
    let directory = tempfile::tempdir().expect("a directory");
    let (pool, config) = pool_and_config(directory.path());
    let (desk, handle) = Desk::new(&pool, &config, before, Vec::new()).expect("a descriptor");
    let shown = handle.clone();
    std::thread::spawn(move || {
        while let Ok(Request::Apply { command, reply }) = desk.requests().recv() {
            let outcome = state.apply(&command).map(|_| ()).map_err(SubmitError::Refused);
            let state = Some(Arc::new(state.clone()));
            shown.catch_up(Sight { state, leases: None, events: Vec::new() }, || true);
            let _ = reply.send(outcome);
        }
    });
    (handle, directory)
}

fn change(handle: &Handle, digest: &str) -> Change {
    let key = Some(IdempotencyKey { key: "k1".to_owned(), digest: digest.to_owned() });
    Change { key, ..Change::of(handle, None) }
}

fn nobody() -> Result<(), SubmitError> {
    Err(SubmitError::no_replica(7))
}

/// h1 and h2 can have instances.
fn hosts() -> State {
    let mut state = State::new(options(512));
    for host in [1, 2] {
        let (endpoint, join) = (endpoint(host, Role::BlkFrontend), join(host, Vec::new()));
        state.apply(&Command::Join { endpoint, incarnation: 1, join }).expect("a free slot");
    }
    state
}

/// There has been an instance on each of these hosts, and is on the last.
fn with_instance_on(all: &[u16]) -> State {
    let mut state = hosts();
    for host in all {
        // There is none at first.
        let _ = state.apply(&delete("vm1"));
        state.apply(&create_instance("vm1", *host, Vec::new(), &[])).expect("room");
    }
    state
}

fn delete(name: &str) -> Command {
    Command::DeleteInstance { name: name.to_owned(), force: false }
}

#[tokio::test]
async fn who_is_bound_to_a_host_is_not_judged_by_where_an_instance_was() {
    // It has moved, and whoever is asked does not know yet.
    let (handle, _directory) = behind(&with_instance_on(&[1]), with_instance_on(&[1, 2]));
    let refused = Change::of(&handle, Some("h1")).submit(delete("vm1")).await;
    let Err(refused) = refused else { panic!("it is on h2") };
    assert_eq!(refused.status(), StatusCode::FORBIDDEN);
    Change::of(&handle, Some("h2")).submit(delete("vm1")).await.expect("it is still there");

    // It has changed and is where it was: then it is asked for again.
    let mut now = with_instance_on(&[1]);
    let labels = Labels::from([("a".to_owned(), "b".to_owned())]);
    now.apply(&Command::SetLabels { of: Labelled::Instance, name: "vm1".to_owned(), labels }).expect("there");
    let (handle, _directory) = behind(&with_instance_on(&[1]), now);
    Change::of(&handle, Some("h1")).submit(delete("vm1")).await.expect("it is on h1");

    // It is not known here yet, and may be anywhere.
    let (handle, _directory) = behind(&hosts(), with_instance_on(&[2]));
    let refused = Change::of(&handle, Some("h1")).submit(delete("vm1")).await;
    let Err(refused) = refused else { panic!("there is none") };
    assert_eq!(refused.status(), StatusCode::NOT_FOUND);
    Change::of(&handle, None).submit(delete("vm1")).await.expect("it is still there");
}

#[tokio::test]
async fn a_deed_whose_end_nobody_noted_is_not_refused_when_it_is_asked_for_again() {
    let (handle, _directory) = handle();
    let refused = change(&handle, "a").once(async { nobody() }, async { nobody() }).await;
    assert!(refused.is_err(), "it never was there");
    let refused = change(&handle, "a").once(async { nobody() }, async { nobody() }).await;
    assert!(refused.is_err(), "what was refused is not remembered");

    // It is done, and the process that did it ends.
    let (done, hears) = tokio::sync::oneshot::channel();
    let deed = async {
        let _ = done.send(());
        std::future::pending().await
    };
    let first = change(&handle, "a");
    tokio::select! {
        _ = first.once(async { Ok(()) }, deed) => panic!("it goes on"),
        outcome = hears => outcome.expect("it is done"),
    }
    let other = change(&handle, "b").once(async { Ok(()) }, async { Ok(()) }).await;
    assert!(other.is_err(), "the key is another request's");
    change(&handle, "a").once(async { nobody() }, async { nobody() }).await.expect("it was done");
    let again = async { panic!("it is not done again") };
    change(&handle, "a").once(async { nobody() }, again).await.expect("that is remembered");
    handle.stop();
}

#[tokio::test]
async fn a_deed_that_was_begun_and_not_done_is_done() {
    let (handle, _directory) = handle();
    let first = change(&handle, "a");
    let fails = first.once(async { Ok(()) }, async { Err(SubmitError::NoLeader) });
    assert!(fails.await.is_err());
    let mut done = false;
    let deed = async {
        done = true;
        Ok(())
    };
    change(&handle, "a").once(async { Ok(()) }, deed).await.expect("done");
    assert!(done);
    handle.stop();
}
