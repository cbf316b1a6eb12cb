use cxl_pool::{Area, LineCount, LineOffset};
use tempfile::TempDir;
use uuid::Uuid;

use super::*;
use crate::api::EventKind;
use crate::state::Options;

fn state() -> State {
    State::new(Options {
        pool: Uuid::nil(),
        data: Area { start: LineOffset::new(0), lines: LineCount::new(1 << 20) },
        tx_area: LineCount::new(1),
        rx_area: LineCount::new(1),
        data_area: LineCount::new(1),
        net_slots: 8,
        blk_slots: 8,
        rx_quota_buffers: 64,
        disk_queues: 1,
        socket_name_bytes_max: 80,
        regions_max: crate::state::REGIONS_MAX,
        placement: crate::state::PlacementPolicy::default(),
    })
}

fn command(number: u64) -> Command {
    Command::Join {
        endpoint: "h1/net-frontend".parse().expect("an endpoint"),
        incarnation: number,
        join: pod_protocol::reports::Join {
            host_name: "h1".to_owned(),
            software: "test".to_owned(),
            pid: 1,
            devices: Vec::new(),
            memory_failures: Vec::new(),
        },
    }
}

fn event(sequence: u64) -> Event {
    let (subject, message) = ("h1".to_owned(), "x".repeat(100));
    Event { sequence, time_ms: 1, kind: EventKind::EndpointJoined, subject, message }
}

/// A state file after so many commits, each with an event of which the last ten are kept.
fn written(directory: &TempDir, commits: u64) -> (PathBuf, State) {
    let path = directory.path().join("state.redb");
    let (mut store, recovered) = Store::open(&path).expect("a new file");
    assert!(recovered.state.is_none() && recovered.events.is_empty() && recovered.term == 1);
    let mut state = state();
    store.keep_snapshot(&state).expect("written");
    for number in 1..=commits {
        let command = command(number);
        state.apply(&command).expect("applied");
        let first = number.saturating_sub(9);
        store.commit(&[(state.index, &command)], &[event(number)], first, &state).expect("written");
    }
    (path, state)
}

#[test]
fn what_was_committed_is_there_again() {
    for commits in [0, 1, 10, LOG_MAX - 1, LOG_MAX, LOG_MAX + 1, LOG_MAX * 2 + 5] {
        let directory = tempfile::tempdir().expect("a directory");
        let (path, state) = written(&directory, commits);
        let (_, recovered) = Store::open(&path).expect("it opens");
        assert_eq!(recovered.state, Some(state), "after {commits}");
        assert_eq!(recovered.term, 2);
        let sequences: Vec<u64> = recovered.events.iter().map(|event| event.sequence).collect();
        assert_eq!(sequences, (commits.saturating_sub(9).max(1)..=commits).collect::<Vec<_>>());
    }
}

#[test]
fn file_in_use_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("state.redb");
    let _store = Store::open(&path).expect("a new file");
    assert!(matches!(Store::open(&path), Err(StoreError::InUse { .. })));
}

#[test]
fn somebody_elses_file_is_refused_and_left_alone() {
    let directory = tempfile::tempdir().expect("a directory");
    for (name, content) in [("text", "hello\n".repeat(1000)), ("short", "re".to_owned())] {
        let path = directory.path().join(name);
        std::fs::write(&path, &content).expect("written");
        let error = Store::open(&path).expect_err("refused");
        assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
        assert_eq!(std::fs::read_to_string(&path).expect("still there"), content);
    }
    assert!(matches!(Store::open(directory.path()), Err(StoreError::Io { .. })));
    assert!(matches!(Store::open(Path::new("/nonexistent/state.redb")), Err(StoreError::Io { .. })));
}

#[test]
fn wrong_checksum_is_damage() {
    let directory = tempfile::tempdir().expect("a directory");
    let (path, _) = written(&directory, 3);
    {
        let (store, _) = Store::open(&path).expect("it opens");
        let wrong = store.database.write(|transaction| {
            transaction.open_table(LOG)?.insert(2, b"\0\0\0\0{}".as_slice())?;
            Ok(())
        });
        wrong.expect("written");
    }
    let error = Store::open(&path).expect_err("refused");
    assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
    assert!(error.to_string().contains("restore it from a backup"), "{error}");
}

#[test]
fn missing_command_is_damage() {
    let directory = tempfile::tempdir().expect("a directory");
    let (path, _) = written(&directory, 3);
    {
        let (store, _) = Store::open(&path).expect("it opens");
        let gap = store.database.write(|transaction| {
            transaction.open_table(LOG)?.remove(2)?;
            Ok(())
        });
        gap.expect("written");
    }
    assert!(matches!(Store::open(&path), Err(StoreError::Damaged { .. })));
}

#[test]
fn another_format_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let (path, _) = written(&directory, 1);
    {
        let (store, _) = Store::open(&path).expect("it opens");
        let newer = store.database.write(|transaction| {
            transaction.open_table(NUMBERS)?.insert("format", FORMAT + 1)?;
            Ok(())
        });
        newer.expect("written");
    }
    assert!(matches!(Store::open(&path), Err(StoreError::Format { found: 2, .. })));
}

/// Bytes that rot give the state as it was, or an error; never another state, and never a panic.
#[test]
fn damaged_bytes_give_the_state_or_an_error() {
    let directory = tempfile::tempdir().expect("a directory");
    let (path, state) = written(&directory, 5);
    let good = std::fs::read(&path).expect("readable");
    let mut refused = 0;
    for number in 0..64 {
        let mut bad = good.clone();
        let at = number * bad.len() / 64;
        let end = (at + 32).min(bad.len());
        for byte in &mut bad[at..end] {
            *byte ^= 0x5a;
        }
        let copy = directory.path().join(format!("copy-{number}"));
        std::fs::write(&copy, &bad).expect("written");
        match Store::open(&copy) {
            Ok((_, recovered)) => assert_eq!(recovered.state.as_ref(), Some(&state), "at {at}"),
            Err(_) => refused += 1,
        }
        std::fs::remove_file(&copy).expect("removed");
    }
    assert!(refused > 0);
}

#[test]
fn truncated_file_gives_an_error() {
    let directory = tempfile::tempdir().expect("a directory");
    let (path, _) = written(&directory, 5);
    let good = std::fs::read(&path).expect("readable");
    for length in [4, 64, 4096, good.len() / 2] {
        let copy = directory.path().join(format!("copy-{length}"));
        std::fs::write(&copy, &good[..length]).expect("written");
        assert!(Store::open(&copy).is_err(), "cut to {length}");
    }
}
