//! A pool that fails under a running process: here a file that is truncated while it is mapped.

use std::env;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use cxl_pool::regions::{Purpose, RegionEntry, RegionState, TableVersion, TableWriter};
use cxl_pool::{Area, CreateOptions, HostId, LineCount, LineOffset, Memory, Pool, ReplicaId, poison};

const POOL: &str = "POISON_TEST_POOL";
const RECORD: &str = "POISON_TEST_RECORD";
/// Lines between the beginning of the data area and what is lost.
const BEFORE: &str = "POISON_TEST_BEFORE";

/// Not a test of its own: what the process of the tests below does.
#[test]
fn a_process_that_loses_its_pool() {
    let Some(path) = env::var_os(POOL) else { return };
    let path = Path::new(&path);
    let pool = Pool::open(path).unwrap();
    let record = env::var_os(RECORD);
    if record.is_some() {
        poison::watch(&pool, path, record.as_deref().map(Path::new)).unwrap();
    }
    let before: i64 = env::var(BEFORE).unwrap().parse().unwrap();
    let lost = LineOffset::new(pool.layout().data().start.get().checked_add_signed(before).unwrap());
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(lost.bytes().get() / 4096 * 4096).unwrap();
    pool.software().load(lost.bytes());
    unreachable!("the load does not return");
}

struct Lost {
    output: Output,
    line: u64,
    recorded: Vec<Area>,
}

impl Lost {
    fn page(&self) -> Area {
        Area::new(LineOffset::new(self.line / 64 * 64), LineCount::new(64))
    }
}

fn lose(watches: bool, before: i64) -> Lost {
    lose_after("", watches, before)
}

/// The same where the record has something in it already.
fn lose_after(text: &str, watches: bool, before: i64) -> Lost {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let (path, record) = (directory.path().join("pool"), directory.path().join("record"));
    if !text.is_empty() {
        std::fs::write(&record, text).unwrap();
    }
    let options = CreateOptions { size_bytes: Some(16 << 20), ..CreateOptions::default() };
    let pool = Pool::create(&path, &options).unwrap();
    let entry = RegionEntry {
        id: 17,
        area: Area::new(pool.layout().data().start, LineCount::new(1000)),
        holder: HostId::new(3),
        purpose: Purpose::TxArea,
        state: RegionState::Leased,
    };
    let version = TableVersion { term: 1, index: 1 };
    let mut table = TableWriter::new(pool.layout(), ReplicaId::new(0));
    table.set(&entry).unwrap();
    table.publish(&pool.software(), version);
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "a_process_that_loses_its_pool", "--nocapture"]).env(POOL, &path);
    command.env(BEFORE, before.to_string());
    if watches {
        command.env(RECORD, &record);
    }
    let line = pool.layout().data().start.get().checked_add_signed(before).unwrap();
    let output = command.output().unwrap();
    Lost { output, line, recorded: poison::recorded(&record).unwrap() }
}

#[test]
fn a_daemon_names_the_region_and_notes_what_its_next_life_reports() {
    let lost = lose(true, 100);
    let said = String::from_utf8_lossy(&lost.output.stderr);
    assert_eq!(lost.output.status.code(), Some(poison::EXIT_RECORDED), "{said}");
    assert!(said.contains(&format!("failed at byte {}, line {}", lost.line * 64, lost.line)), "{said}");
    assert!(said.contains("in region 17 of h3"), "{said}");
    assert_eq!(lost.recorded, [lost.page()]);
}

#[test]
fn what_was_not_written_to_its_end_does_not_spoil_what_comes_after_it() {
    let before = Area::new(LineOffset::new(0), LineCount::new(64));
    for cut_off in ["1", "128", "128 ", "128 6", "128 64", "~"] {
        let lost = lose_after(&format!("0 64\n{cut_off}"), true, 100);
        assert_eq!(lost.output.status.code(), Some(poison::EXIT_RECORDED));
        assert_eq!(lost.recorded, [before, lost.page()], "behind {cut_off:?}");
    }
}

#[test]
fn what_no_daemon_can_do_without_is_not_worth_a_restart() {
    // Just before the data area.
    let lost = lose(true, -1);
    let said = String::from_utf8_lossy(&lost.output.stderr);
    assert_eq!(lost.output.status.code(), Some(poison::EXIT_STATUS), "{said}");
    assert!(said.contains("outside all regions"), "{said}");
    assert_eq!(lost.recorded, []);
}

#[test]
fn without_the_watch_the_kernel_ends_it() {
    const SIGBUS: i32 = 7;
    assert_eq!(lose(false, 100).output.status.signal(), Some(SIGBUS));
}

#[test]
fn a_record_that_breaks_off_is_read_up_to_there() {
    let directory = tempfile::tempdir().unwrap();
    let record = directory.path().join("record");
    assert_eq!(poison::recorded(&record).unwrap(), []);
    std::fs::write(&record, "640 64\n0 64\nnonsense\n640 64\n12").unwrap();
    let area = |start| Area::new(LineOffset::new(start), LineCount::new(64));
    assert_eq!(poison::recorded(&record).unwrap(), [area(0), area(640)]);
    std::fs::write(&record, b"0 64\n\xff\xfe\0~\n640 64\n").unwrap();
    assert_eq!(poison::recorded(&record).unwrap(), [area(0), area(640)], "behind what is no text");
    assert!(poison::recorded(directory.path()).is_err());
}
