use std::sync::Arc;

use cxl_pool::{Area, LineCount, LineOffset};
use pod_api::EventKind;
use pod_state::Options;
use tempfile::TempDir;
use uuid::Uuid;

use super::etcd::{EtcdCredentials, EtcdError, EtcdLink, EtcdStore};
use super::*;

#[path = "../../tests/service/support/etcd_server.rs"]
pub(super) mod server;

use server::Etcd;

pub(super) fn state() -> State {
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
        regions_max: pod_state::REGIONS_MAX,
        nic_leases_max: pod_state::NIC_LEASES_MAX,
        placement: pod_state::PlacementPolicy::default(),
        protocol_minor: 0,
    })
}

pub(super) fn command(number: u64) -> Command {
    Command::Join {
        endpoint: "h1/net-frontend".parse().expect("an endpoint"),
        incarnation: number,
        join: pod_protocol::reports::Join {
            host_name: "h1".to_owned(),
            software: "test".to_owned(),
            pid: 1,
            devices: Vec::new(),
            memory_failures: Vec::new(),
            fence_ms: None,
        },
    }
}

pub(super) fn event(sequence: u64) -> Event {
    let (subject, message) = ("h1".to_owned(), "x".repeat(100));
    Event { sequence, time_ms: 1, kind: EventKind::EndpointJoined, subject, message }
}

/// Where a store is, of both kinds: what is promised of one holds of the other.
enum Place {
    File(TempDir),
    Etcd(Etcd),
}

/// A file, and the directory that it will be in.
fn file() -> (Place, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().to_path_buf();
    (Place::File(directory), path)
}

enum Kept {
    File(Box<Store>),
    Etcd(Box<EtcdStore>),
}

impl Place {
    fn both() -> [Self; 2] {
        [Self::File(tempfile::tempdir().expect("a directory")), Self::Etcd(Etcd::start())]
    }

    fn open(&self) -> Result<(Kept, Recovered), StoreError> {
        match self {
            Self::File(directory) => {
                let (store, recovered) = Store::open(&directory.path().join("state.redb"))?;
                Ok((Kept::File(Box::new(store)), recovered))
            }
            Self::Etcd(etcd) => {
                let (store, recovered) = EtcdStore::open(&link(etcd), 0)?;
                Ok((Kept::Etcd(Box::new(store)), recovered))
            }
        }
    }
}

pub(super) fn link(etcd: &Etcd) -> Arc<EtcdLink> {
    let address = etcd.address("wadi/pod1").parse().expect("an address");
    Arc::new(EtcdLink::new(&address, &EtcdCredentials::default()).expect("a connection"))
}

impl Kept {
    fn begin(&mut self, state: &State) -> Result<(), StoreError> {
        match self {
            Self::File(store) => store.keep_snapshot(state),
            Self::Etcd(store) => store.begin(state, Vec::new()),
        }
    }

    fn commit(
        &mut self,
        number: u64,
        command: &Command,
        first: u64,
        state: &State,
    ) -> Result<(), StoreError> {
        let (commands, events) = ([(state.index, command)], [event(number)]);
        let shown = Arc::new(state.clone());
        match self {
            Self::File(store) => {
                let mut done = 0;
                let mut meanwhile = || done += 1;
                let is_odd = number % 2 == 1;
                store.commit(&commands, &events, first, state, is_odd.then_some(&mut meanwhile))?;
                assert!(done <= i32::from(is_odd), "it may be done once, and what is kept is the same");
                store.tidy(&shown);
            }
            Self::Etcd(store) => {
                store.commit(&commands, &events, state)?;
                store.tidy(&shown);
            }
        }
        Ok(())
    }

    /// Waits until no snapshot is being written.
    fn wait_written(&self) {
        let writes = || match self {
            Self::File(store) => store.is_writing(),
            Self::Etcd(store) => store.is_writing(),
        };
        while writes() {
            std::thread::yield_now();
        }
    }

    /// How many changes a controller that starts has to read.
    fn logged(&self) -> usize {
        match self {
            Self::File(store) => {
                let table =
                    |transaction: &redb::ReadTransaction| Ok(transaction.open_table(LOG)?.iter()?.count());
                store.database.read(table).expect("readable")
            }
            Self::Etcd(store) => store.names_raw().iter().filter(|name| name.starts_with("log/")).count(),
        }
    }

    /// Puts something wrong in the place of change 2, or nothing at all.
    fn spoil_second(&self, wrong: Option<&[u8]>) {
        match (self, wrong) {
            (Self::File(store), _) => {
                let spoilt = store.database.write(|transaction| {
                    let mut log = transaction.open_table(LOG)?;
                    match wrong {
                        Some(wrong) => log.insert(2, wrong)?,
                        None => log.remove(2)?,
                    };
                    Ok(())
                });
                spoilt.expect("written");
            }
            (Self::Etcd(store), Some(wrong)) => store.put_raw("log/0000000000000003/00000000", wrong),
            (Self::Etcd(store), None) => store.delete_raw("log/0000000000000003/00000000"),
        }
    }

    fn set_format(&self, format: u64) {
        match self {
            Self::File(store) => {
                let newer = store.database.write(|transaction| {
                    transaction.open_table(NUMBERS)?.insert("format", format)?;
                    Ok(())
                });
                newer.expect("written");
            }
            Self::Etcd(store) => {
                let head = serde_json::json!({ "format": format, "new": true });
                store.put_raw("head", &seal(&head).expect("sealed"));
            }
        }
    }
}

/// So many commits, each with an event of which a file keeps the last ten.
fn written(place: &Place, commits: u64) -> State {
    let (mut store, recovered) = place.open().expect("a new place");
    assert!(recovered.state.is_none() && recovered.events.is_empty() && recovered.term == 1);
    let mut state = state();
    store.begin(&state).expect("written");
    for number in 1..=commits {
        let command = command(number);
        state.apply(&command).expect("applied");
        store.commit(number, &command, number.saturating_sub(9), &state).expect("written");
    }
    state
}

fn is_damage(error: &StoreError) -> bool {
    matches!(error, StoreError::Damaged { .. } | StoreError::Etcd(EtcdError::Damaged { .. }))
}

#[test]
fn what_was_committed_is_there_again() {
    for commits in [0, 1, 10, LOG_LEAST - 1, LOG_LEAST, LOG_LEAST + 1, LOG_LEAST * 2 + 5] {
        for place in Place::both() {
            let state = written(&place, commits);
            let (_, recovered) = place.open().expect("it opens");
            assert_eq!(recovered.state, Some(state), "after {commits}");
            assert_eq!(recovered.term, 2);
            let sequences: Vec<u64> = recovered.events.iter().map(|event| event.sequence).collect();
            let first = if matches!(place, Place::File(_)) { commits.saturating_sub(9).max(1) } else { 1 };
            assert_eq!(sequences, (first..=commits).collect::<Vec<_>>());
        }
    }
}

/// It may know none of the commands before.
#[test]
fn a_controller_of_an_older_version_finds_no_command_of_a_newer_one() {
    for place in Place::both() {
        let mut state = written(&place, 5);
        let (mut store, _) = place.open().expect("it opens");
        assert!(store.logged() >= 5);
        let mut commit = |command: Command| {
            state.apply(&command).expect("applied");
            store.commit(state.index, &command, 1, &state).expect("written");
            store.logged()
        };
        let options = Options { disk_queues: 2, ..self::state().options };
        assert_eq!(commit(Command::Configure { options }), 0);
        assert_eq!(commit(command(7)), 1);
        drop(store);
        let (_, recovered) = place.open().expect("it opens");
        assert_eq!(recovered.state, Some(state));
    }
}

#[test]
fn place_in_use_is_refused() {
    for place in Place::both() {
        let _store = place.open().expect("a new place");
        let Err(error) = place.open() else { panic!("two have it") };
        assert!(
            matches!(error, StoreError::InUse { .. } | StoreError::Etcd(EtcdError::InUse { .. })),
            "{error}"
        );
        assert!(error.to_string().contains("stop that one first"), "{error}");
    }
}

#[test]
fn wrong_checksum_is_damage() {
    for place in Place::both() {
        written(&place, 3);
        place.open().expect("it opens").0.spoil_second(Some(b"\0\0\0\0{}"));
        let Err(error) = place.open() else { panic!("it opens") };
        assert!(is_damage(&error), "{error}");
        assert!(error.to_string().contains("from a backup"), "{error}");
    }
}

#[test]
fn missing_command_is_damage() {
    for place in Place::both() {
        written(&place, 3);
        place.open().expect("it opens").0.spoil_second(None);
        let Err(error) = place.open() else { panic!("it opens") };
        assert!(is_damage(&error), "{error}");
    }
}

#[test]
fn another_format_is_refused() {
    for place in Place::both() {
        written(&place, 1);
        place.open().expect("it opens").0.set_format(3);
        let Err(error) = place.open() else { panic!("it opens") };
        assert!(
            matches!(
                error,
                StoreError::Format { found: 3, .. } | StoreError::Etcd(EtcdError::Format { found: 3, .. })
            ),
            "{error}"
        );
    }
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

/// Bytes that rot give the state as it was, or an error; never another state, and never a panic.
#[test]
fn damaged_bytes_give_the_state_or_an_error() {
    let (place, directory) = file();
    let state = written(&place, 5);
    let path = directory.join("state.redb");
    let good = std::fs::read(&path).expect("readable");
    let mut refused = 0;
    for number in 0..64 {
        let mut bad = good.clone();
        let at = number * bad.len() / 64;
        let end = (at + 32).min(bad.len());
        for byte in &mut bad[at..end] {
            *byte ^= 0x5a;
        }
        let copy = directory.join(format!("copy-{number}"));
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
    let (place, directory) = file();
    written(&place, 5);
    let path = directory.join("state.redb");
    let good = std::fs::read(&path).expect("readable");
    for length in [4, 64, 4096, good.len() / 2] {
        let copy = directory.join(format!("copy-{length}"));
        std::fs::write(&copy, &good[..length]).expect("written");
        assert!(Store::open(&copy).is_err(), "cut to {length}");
    }
}

mod marks;
mod snapshots;
