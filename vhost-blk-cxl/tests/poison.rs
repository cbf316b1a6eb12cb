//! Memory of the pool that fails under daemons that work with it.

#![allow(clippy::cast_possible_truncation, reason = "small numbers, chosen by the test")]

mod pod;
mod processes;

use std::env;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Command;

use cxl_pool::regions::{self, Purpose, RegionEntry};
use cxl_pool::{CoherenceMode, Pool, poison};
use pod_api::RegionState;
use processes::{Daemon, Load, Pod, Side, client};
use rustix::fs::{FallocateFlags, fallocate};

/// Where the process of the test below has a file system of its own.
const SMALL: &str = "POISON_TEST_DIRECTORY";
const PAGE_BYTES: u64 = 4096;

/// Runs this test again where it may mount something that nobody else sees, and that goes with it.
fn in_own_namespace(test: &str) -> bool {
    if env::var_os(SMALL).is_some() {
        return true;
    }
    let directory = tempfile::tempdir().unwrap();
    let mount = r#"mount -t tmpfs -o size=160M none "$0" && exec "$@""#;
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", mount])
        .arg(directory.path())
        .arg(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(SMALL, directory.path())
        .output()
        .unwrap();
    print!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    false
}

/// Takes a page away from a file in memory, and all that there is to put in its place: who touches it gets the same signal as
/// from a poisoned line.
fn lose(pool: &Path, at: u64) {
    let file = File::options().write(true).open(pool).unwrap();
    fallocate(&file, FallocateFlags::empty(), 0, file.metadata().unwrap().len()).unwrap();
    let mut filler = File::options().create(true).append(true).open(pool.with_file_name("filler")).unwrap();
    while filler.write_all(&[1; PAGE_BYTES as usize]).is_ok() {}
    fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, PAGE_BYTES).unwrap();
    while filler.write_all(&[1; PAGE_BYTES as usize]).is_ok() {}
}

fn data_area(path: &Path) -> RegionEntry {
    let pool = Pool::open(path).unwrap();
    let table = regions::read(&pool.software(), pool.layout()).unwrap();
    table.entries.into_iter().find(|entry| entry.purpose == Purpose::DataArea).unwrap()
}

fn status_of(daemon: Option<Daemon>) -> Option<i32> {
    daemon.unwrap().0.wait().unwrap().code()
}

#[test]
fn a_disk_goes_on_in_other_memory_and_nobody_is_given_what_failed() {
    if !in_own_namespace("a_disk_goes_on_in_other_memory_and_nobody_is_given_what_failed") {
        return;
    }
    let path = Path::new(&env::var_os(SMALL).unwrap()).join("pool");
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut pod = Pod::start_in(directory, &path, CoherenceMode::Software, "socket");
    let mut load = Load::connect(&pod.socket);
    let lost = data_area(&path);
    lose(&path, lost.area.start_byte().get());
    // The first request of a disk lies at the beginning of its area.
    load.offer_write(0);
    assert_eq!(status_of(pod.frontend.take()), Some(poison::EXIT_RECORDED));
    let log = fs::read_to_string(pod.directory.path().join("log")).unwrap();
    assert!(log.contains(&format!("in region {} of h1", lost.id)), "{log}");
    // What supervisors do with this status. The backend has the region too, and is made to let go of it.
    pod.start_daemon(Side::Frontend);
    assert_eq!(status_of(pod.backend.take()), Some(poison::EXIT_RECORDED));
    pod.start_daemon(Side::Backend);
    load.reconnect(&pod.socket);
    load.work(500);
    load.finish(&pod);
    let shown = client(&pod).pool().unwrap();
    let region = shown.regions.iter().find(|region| region.id == lost.id).expect("it is kept for good");
    assert_eq!(region.state, RegionState::Failed);
    assert_eq!(shown.failed_bytes, lost.area.bytes());
    // Another life tells the same again, which changes nothing.
    pod.kill(Side::Frontend);
    pod.start_daemon(Side::Frontend);
    load.reconnect(&pod.socket);
    load.work(200);
    load.finish(&pod);
    assert_eq!(client(&pod).pool().unwrap().failed_bytes, lost.area.bytes());
}
