//! A pool that fails under a running process: here a file that is truncated while it is mapped.

use std::env;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use cxl_pool::regions::{self, Purpose, RegionEntry, RegionState, TableVersion};
use cxl_pool::{Area, CreateOptions, HostId, LineCount, Memory, Pool, ReplicaId, poison};

const POOL: &str = "POISON_TEST_POOL";
const WATCHES: &str = "POISON_TEST_WATCHES";

/// Not a test of its own: what the process of the tests below does.
#[test]
fn a_process_that_loses_its_pool() {
    let Some(path) = env::var_os(POOL) else { return };
    let path = Path::new(&path);
    let pool = Pool::open(path).unwrap();
    if env::var_os(WATCHES).is_some() {
        poison::watch(&pool, path).unwrap();
    }
    let lost = pool.layout().data().start.checked_add(LineCount::new(100)).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(pool.layout().data().start_byte().get()).unwrap();
    pool.software().load(lost.bytes());
    unreachable!("the load does not return");
}

fn lose(watches: bool) -> (Output, u64) {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("pool");
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
    regions::publish(&pool.software(), pool.layout(), ReplicaId::new(0), version, &[entry]).unwrap();
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "a_process_that_loses_its_pool", "--nocapture"]).env(POOL, &path);
    if watches {
        command.env(WATCHES, "1");
    }
    let byte = pool.layout().data().start_byte().get() + 100 * 64;
    (command.output().unwrap(), byte)
}

#[test]
fn a_daemon_ends_with_a_status_of_its_own_and_names_the_region() {
    let (output, byte) = lose(true);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(poison::EXIT_STATUS), "{said}");
    assert!(said.contains(&format!("failed at byte {byte}, line {}", byte / 64)), "{said}");
    assert!(said.contains("in region 17 of h3"), "{said}");
}

#[test]
fn without_the_watch_the_kernel_ends_it() {
    const SIGBUS: i32 = 7;
    assert_eq!(lose(false).0.status.signal(), Some(SIGBUS));
}
