use std::sync::Arc;

use openraft::storage::RaftLogStorage;
use openraft::testing::{StoreBuilder, Suite};
use openraft::{CommittedLeaderId, RaftLogReader};
use pod_api::EventKind;
use pod_state::{Command, Options, PlacementPolicy};
use tempfile::TempDir;

use super::super::log::Log;
use super::*;

fn options() -> Options {
    let layout = cxl_pool::Layout::new(64 << 20, 4, 3, cxl_pool::REGION_SLOTS_LEAST).expect("large enough");
    Options {
        pool: uuid::Uuid::from_u128(1),
        data: layout.data(),
        tx_area: cxl_pool::LineCount::covering(1 << 20),
        rx_area: cxl_pool::LineCount::covering(1 << 20),
        data_area: cxl_pool::LineCount::covering(1 << 20),
        net_slots: 8192,
        blk_slots: 8192,
        rx_quota_buffers: 64,
        disk_queues: 1,
        socket_name_bytes_max: 64,
        regions_max: 4095,
        nic_leases_max: pod_state::NIC_LEASES_MAX,
        placement: PlacementPolicy { prove_failover: false, ..PlacementPolicy::default() },
        protocol_minor: 0,
    }
}

fn event(sequence: u64) -> Event {
    Event {
        sequence,
        time_ms: 0,
        kind: EventKind::LinkUp,
        subject: "h1/nic0".to_owned(),
        message: String::new(),
    }
}

pub(in crate::replication) fn begin() -> Change {
    Change::Begin { state: Box::new(State::new(options())), events: vec![event(1)], terms: 7 }
}

fn configure(base: u64, disk_queues: u16, sequence: u64) -> Change {
    let options = Options { disk_queues, ..options() };
    Change::Turn { base, commands: vec![Command::Configure { options }], events: vec![event(sequence)] }
}

struct Builder;

impl StoreBuilder<Replicated, Log, Machine, TempDir> for Builder {
    async fn build(&self) -> Result<(TempDir, Log, Machine), StorageError<LogOwner>> {
        let directory = tempfile::tempdir().expect("a directory");
        let file = Arc::new(LogFile::open(&directory.path().join("log")).expect("a new file"));
        let machine = Machine::open(Arc::clone(&file)).expect("empty");
        Ok((directory, Log(file), machine))
    }
}

#[test]
fn log_and_machine_keep_the_rules_of_raft() {
    Suite::test_all(Builder).expect("every rule");
}

#[test]
fn change_upon_another_state_is_void() {
    let mut known = Known::default();
    assert_eq!(known.change(configure(0, 2, 2)), Ok(Outcome::Void), "nothing has begun");
    assert_eq!(known.change(begin()), Ok(Outcome::Done));
    assert_eq!(known.change(begin()), Ok(Outcome::Void));
    assert_eq!(known.change(configure(0, 2, 2)), Ok(Outcome::Done));
    // The same again, as from a leader that did not hear what became of it.
    assert_eq!(known.change(configure(0, 2, 2)), Ok(Outcome::Void));
    let told = |sequence| Change::Turn { base: 1, commands: Vec::new(), events: vec![event(sequence)] };
    assert_eq!(known.change(told(3)), Ok(Outcome::Done));
    assert_eq!(known.change(told(3)), Ok(Outcome::Void));
    let sequences: Vec<u64> = known.events.iter().map(|event| event.sequence).collect();
    assert_eq!((sequences, known.terms), (vec![1, 2, 3], 7));
    let state = known.state.expect("begun");
    assert_eq!((state.index, state.options.disk_queues), (1, 2));
}

#[test]
fn change_that_was_decided_and_is_refused_here_ends_the_replica() {
    let mut known = Known::default();
    known.change(begin()).expect("made");
    let commands = vec![Command::DeleteVolume { name: "nowhere".to_owned() }];
    let refused = known.change(Change::Turn { base: 0, commands, events: Vec::new() });
    assert!(refused.expect_err("refused").contains("command 1 of the log"));
}

fn entry(index: u64, change: Change) -> Entry<Replicated> {
    let log_id = LogId::new(CommittedLeaderId::new(1, 0), index);
    Entry { log_id, payload: EntryPayload::Normal(change) }
}

#[test]
fn snapshot_survives_and_is_what_another_replica_gets() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let directory = tempfile::tempdir().expect("a directory");
    let open = |name: &str| Arc::new(LogFile::open(&directory.path().join(name)).expect("a file"));
    runtime.block_on(async {
        let mut machine = Machine::open(open("one")).expect("empty");
        let entries = [entry(0, begin()), entry(1, configure(0, 3, 2))];
        assert_eq!(machine.apply(entries).await.expect("applied"), [Outcome::Done; 2]);
        let snapshot = machine.build_snapshot().await.expect("built");
        drop(machine);

        let again = Machine::open(open("one")).expect("a snapshot");
        assert_eq!(again.index(), 1);
        let mut other = Machine::open(open("two")).expect("empty");
        other.install_snapshot(&snapshot.meta, snapshot.snapshot).await.expect("installed");
        let state = |machine: &Machine| machine.look(|known| known.state.clone());
        assert_eq!(state(&other), state(&again));
        assert_eq!(other.applied_state().await.expect("known").0, snapshot.meta.last_log_id);
    });
}

/// Raft has the log cut off without waiting for the snapshot that has what was there.
#[test]
fn nothing_is_cut_off_before_the_snapshot_in_its_place_is_kept() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("two");
    let open = |path: &std::path::Path| Arc::new(LogFile::open(path).expect("a file"));
    let entries = || [entry(0, begin()), entry(1, configure(0, 3, 2))];
    let (newer, older) = runtime.block_on(async {
        let mut source = Machine::open(open(&directory.path().join("one"))).expect("empty");
        let [first, second] = entries();
        source.apply([first]).await.expect("applied");
        let older = source.build_snapshot().await.expect("built");
        source.apply([second]).await.expect("applied");
        (source.build_snapshot().await.expect("built"), older)
    });
    let last = newer.meta.last_log_id.expect("it has something");
    runtime.block_on(async {
        let file = open(&path);
        let (mut log, mut machine) =
            (Log(Arc::clone(&file)), Machine::open(Arc::clone(&file)).expect("empty"));
        let mut reader = log.clone();
        openraft::storage::RaftLogStorageExt::blocking_append(&mut log, entries()).await.expect("appended");
        machine.begin_receiving_snapshot().await.expect("begun");
        let mut purge = std::pin::pin!(log.purge(last));
        tokio::select! {
            biased;
            _ = &mut purge => panic!("what is in no snapshot is gone"),
            () = tokio::task::yield_now() => {}
        }
        assert_eq!(reader.try_get_log_entries(..).await.expect("read").len(), 2);
        machine.install_snapshot(&newer.meta, newer.snapshot).await.expect("installed");
        purge.await.expect("there is a snapshot");
        assert_eq!(reader.try_get_log_entries(..).await.expect("read").len(), 0);

        // One that was begun before is not kept in its place.
        let data = String::from_utf8(older.snapshot.get_ref().clone()).expect("JSON");
        file.keep_snapshot(&older.meta, &data, 0).await.expect("the disk is there");
        assert_eq!(file.snapshot().expect("read").expect("there is one").0.last_log_id, Some(last));

        // One that cannot be kept ends the replica, with all that it has.
        machine.begin_receiving_snapshot().await.expect("begun");
        let nonsense = Box::new(Cursor::new(b"nonsense".to_vec()));
        machine.install_snapshot(&newer.meta, nonsense).await.expect_err("no snapshot");
        reader.purge(LogId { index: last.index + 1, ..last }).await.expect_err("there is no such snapshot");
    });
    // A log that was cut off too early is not used.
    runtime.block_on(async {
        let mut log = Log(open(&path));
        log.purge(LogId { index: last.index + 1, ..last }).await.expect("none is under way");
    });
    let error = LogFile::open(&path).expect_err("something is missing").to_string();
    assert!(error.contains("older than its first entry"), "{error}");
}

#[test]
fn damaged_log_is_refused_with_what_to_do() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("log");
    let file = Arc::new(LogFile::open(&path).expect("a new file"));
    let owner = file.owner();
    runtime.block_on(async {
        let mut log = Log(Arc::clone(&file));
        openraft::storage::RaftLogStorageExt::blocking_append(
            &mut log,
            [entry(0, begin()), entry(1, configure(0, 3, 2))],
        )
        .await
        .expect("appended");
        assert_eq!(log.try_get_log_entries(..).await.expect("read").len(), 2);
    });
    drop(file);
    let good = std::fs::read(&path).expect("there");
    let reopened = LogFile::open(&path).expect("undamaged");
    assert_eq!(reopened.owner(), owner);
    drop(reopened);

    // A byte of the newest entry, wherever the file has it.
    let bytes = std::fs::read(&path).expect("there");
    let needle = b"\"disk_queues\":3";
    let places: Vec<usize> = bytes
        .windows(needle.len())
        .enumerate()
        .filter(|(_, window)| window == needle)
        .map(|(at, _)| at)
        .collect();
    assert!(!places.is_empty(), "the entry is in the file");
    let mut damaged = bytes.clone();
    for at in places {
        damaged[at + needle.len() - 1] = b'4';
    }
    std::fs::write(&path, &damaged).expect("written");
    let error = LogFile::open(&path).expect_err("damaged").to_string();
    assert!(error.contains("damaged") && error.contains("if the others run, move it away"), "{error}");

    // Cut off at its end, or no database at all.
    std::fs::write(&path, &good[..good.len() / 2]).expect("written");
    assert!(LogFile::open(&path).is_err(), "half of it");
    std::fs::write(&path, b"something else").expect("written");
    let error = LogFile::open(&path).expect_err("no log").to_string();
    assert!(error.contains("no such log"), "{error}");
}
