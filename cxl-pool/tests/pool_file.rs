//! A pool in a file: creating, opening, and what is refused and how.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use cxl_pool::{
    ByteOffset, CoherenceMode, CreateOptions, HostId, LineCount, Memory, Pool, PoolError, Record, ReplicaId,
};
use vm_memory::VolatileSlice;

const MIB: u64 = 1 << 20;

fn options() -> CreateOptions {
    CreateOptions { size_bytes: Some(64 * MIB), ..CreateOptions::default() }
}

struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { directory: tempfile::tempdir_in("/dev/shm").unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("pool")
    }

    fn with_pool() -> Self {
        let place = Self::new();
        Pool::create(&place.path(), &options()).unwrap();
        place
    }

    fn overwrite(&self, at: u64, bytes: &[u8]) {
        File::options().write(true).open(self.path()).unwrap().write_all_at(bytes, at).unwrap();
    }

    fn files(&self) -> usize {
        fs::read_dir(self.directory.path()).unwrap().count()
    }
}

fn refused(path: &Path) -> PoolError {
    Pool::open(path).err().expect("must be refused")
}

#[test]
fn a_created_pool_opens_as_it_was_created() {
    let place = Place::new();
    let options = CreateOptions { mode: CoherenceMode::Hardware, host_slots: 3, ..options() };
    let created = Pool::create(&place.path(), &options).unwrap();
    let opened = Pool::open(&place.path()).unwrap();
    assert_eq!(opened.superblock(), created.superblock());
    assert_eq!(opened.superblock().mode, CoherenceMode::Hardware);
    assert_eq!(opened.superblock().host_slots, 3);
    assert_eq!(opened.file_identity(), created.file_identity());
    assert_eq!(opened.layout().data().end().bytes().get(), 64 * MIB);
    assert_eq!(place.files(), 1, "nothing else is left in the directory");
}

/// What one mapping writes past the cache, another one reads.
fn streamed<M: Memory>(writer: &M, reader: &M, at: ByteOffset, guest: &mut [u8]) {
    writer.stream_from(at, &VolatileSlice::from(&mut *guest));
    writer.store_fence();
    reader.invalidate(at, guest.len() as u64);
    reader.full_fence();
    let mut read = vec![0; guest.len()];
    reader.read(at, &mut read);
    assert!(read == guest, "{} bytes from {at} on", guest.len());
    writer.zero(at, guest.len() as u64);
}

#[test]
fn what_one_mapping_writes_another_reads() {
    let place = Place::with_pool();
    let (a, b) = (Pool::open(&place.path()).unwrap(), Pool::open(&place.path()).unwrap());
    let at = a.layout().data().start_byte();
    let bytes: Vec<u8> = (0..10_000_u32).map(|byte| byte.to_le_bytes()[0]).collect();
    for shift in [0, 1, 63, 64] {
        let at = at.saturating_add(shift);
        let (writer, reader) = (a.software(), b.software());
        let mut read = vec![0; bytes.len()];
        let check = |read: &mut Vec<u8>| {
            reader.invalidate(at, bytes.len() as u64);
            reader.full_fence();
            reader.read(at, read);
            assert!(*read == bytes, "shifted by {shift}");
            writer.zero(at, bytes.len() as u64);
        };
        writer.write(at, &bytes);
        writer.write_back(at, bytes.len() as u64);
        writer.full_fence();
        check(&mut read);
        writer.write_streaming(at, &bytes);
        writer.full_fence();
        check(&mut read);

        let mut guest = bytes.clone();
        for part in [bytes.len() - bytes.len() % 64, bytes.len(), 0, 1, 63, 65, 130] {
            let guest = &mut guest[..part];
            streamed(&writer, &reader, at, guest);
            streamed(&a.hardware(), &b.hardware(), at, guest);
        }
        a.hardware().copy_from(at, &VolatileSlice::from(guest.as_mut_slice()));
        guest.fill(0);
        b.hardware().copy_to(at, &VolatileSlice::from(guest.as_mut_slice()));
        assert!(guest == bytes);
    }
    // SAFETY: the area lies in the mapping that `a` holds, and nobody writes to it now.
    let first = unsafe { a.pointer(a.layout().data()).read_volatile() };
    let mut expected = [0];
    b.hardware().read(at, &mut expected);
    assert_eq!([first], expected);
}

#[test]
#[should_panic(expected = "lie outside the pool")]
fn accesses_outside_the_pool_panic() {
    let place = Place::with_pool();
    let memory = Pool::open(&place.path()).unwrap().software();
    memory.read(ByteOffset::new(64 * MIB - 1), &mut [0; 2]);
}

#[test]
fn an_existing_pool_is_replaced_only_by_force() {
    let place = Place::with_pool();
    let before = Pool::open(&place.path()).unwrap();
    assert!(matches!(Pool::create(&place.path(), &options()), Err(PoolError::Exists { .. })));
    let after = Pool::create(&place.path(), &CreateOptions { force: true, ..options() }).unwrap();
    assert_ne!(before.superblock().uuid, after.superblock().uuid);
    // Who has the old one open still has it.
    before.software().load(ByteOffset::new(0));
    assert_eq!(place.files(), 1);
}

#[test]
fn a_pool_that_cannot_be_created_leaves_nothing_behind() {
    let place = Place::new();
    let create = |size_bytes| Pool::create(&place.path(), &CreateOptions { size_bytes, ..options() }).err();
    assert!(matches!(create(None), Some(PoolError::Size { .. })));
    assert!(matches!(create(Some(3)), Some(PoolError::Size { .. })));
    assert!(matches!(create(Some(1 << 60)), Some(PoolError::NoSpace { .. })));
    assert_eq!(place.files(), 0);
    let nowhere = place.directory.path().join("no/pool");
    assert!(matches!(Pool::create(&nowhere, &options()), Err(PoolError::DirectoryMissing { .. })));
    let device = Path::new("/dev/null");
    assert!(matches!(Pool::create(device, &options()), Err(PoolError::UnsupportedFile { .. })));
}

#[test]
fn what_is_not_a_whole_pool_of_this_version_is_refused() {
    let place = Place::with_pool();
    let path = place.path();

    place.overwrite(32, &[1]);
    assert!(matches!(refused(&path), PoolError::Checksum { .. }));
    place.overwrite(8, &[9]);
    assert!(matches!(refused(&path), PoolError::MajorVersion { .. }), "even with a bad checksum");
    place.overwrite(0, b"NOTAPOOL");
    assert!(matches!(refused(&path), PoolError::NotAPool { .. }));

    let place = Place::with_pool();
    let path = place.path();
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(128 * MIB).unwrap();
    assert!(matches!(refused(&path), PoolError::SizeMismatch { .. }));
    file.set_len(4096).unwrap();
    assert!(matches!(refused(&path), PoolError::Truncated { .. }));
    file.set_len(10).unwrap();
    assert!(matches!(refused(&path), PoolError::Truncated { .. }));
    assert!(matches!(refused(Path::new("/dev/shm/there/is/none")), PoolError::Missing { .. }));
    assert!(matches!(refused(Path::new("/dev/shm")), PoolError::UnsupportedFile { .. }));
    assert!(matches!(refused(Path::new("/dev/zero")), PoolError::UnsupportedFile { .. }));
}

/// How much of the file's memory is taken already.
fn taken_bytes(place: &Place) -> u64 {
    std::fs::metadata(place.path()).unwrap().blocks() * 512
}

#[test]
fn memory_is_taken_when_the_pool_is_created_unless_it_is_to_be_sparse() {
    for (sparse, taken) in [(&["--sparse"][..], 0..16 * MIB), (&[], 64 * MIB..u64::MAX)] {
        let place = Place::new();
        let path = place.path();
        let created = wadi_pool(&[&["create", path.to_str().unwrap(), "--size", "64M"], sparse].concat());
        assert!(created.status.success(), "{created:?}");
        assert!(taken.contains(&taken_bytes(&place)), "{sparse:?}: {}", taken_bytes(&place));
    }
}

fn wadi_pool(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_wadi-pool")).args(arguments).output().unwrap()
}

#[test]
fn the_tool_creates_and_inspects() {
    let place = Place::new();
    let path = place.path();
    let path = path.to_str().unwrap();
    let created = wadi_pool(&["create", path, "--size", "64M", "--coherence", "hardware", "--hosts", "4"]);
    assert!(created.status.success(), "{created:?}");
    let pool = Pool::open(&place.path()).unwrap();
    let host = pool.layout().endpoints().last().unwrap();
    let hello = cxl_pool::Hello { incarnation: 5, pid: 4242, protocol: (1, 0), started_unix_ms: 0 };
    hello.publish(&pool.hardware(), pool.layout().hello(host));
    let entry = cxl_pool::regions::RegionEntry {
        id: 17,
        area: cxl_pool::Area::new(pool.layout().data().start, LineCount::new(32_768)),
        holder: HostId::new(2),
        purpose: cxl_pool::regions::Purpose::TxArea,
        state: cxl_pool::regions::RegionState::Leased,
    };
    let version = cxl_pool::regions::TableVersion { term: 1, index: 9 };
    let mut table = cxl_pool::regions::TableWriter::new(pool.layout(), ReplicaId::new(0));
    table.set(&entry).unwrap();
    table.publish(&pool.hardware(), version);

    let text = String::from_utf8(wadi_pool(&["inspect", path]).stdout).unwrap();
    for expected in ["hardware", "64 MiB", "h4/agent", "pid 4242", "TxArea", "2 MiB"] {
        assert!(text.contains(expected), "{expected} is missing in:\n{text}");
    }
    let json: serde_json::Value =
        serde_json::from_slice(&wadi_pool(&["inspect", path, "--json"]).stdout).unwrap();
    assert_eq!(json["superblock"]["host_slots"], 4);
    assert_eq!(json["superblock"]["region_slots"], 4095);
    assert_eq!(json["superblock"]["minor"], 0, "daemons that know 1.0 only can use it");
    assert_eq!(json["regions"]["entries"][0]["id"], 17);
}

#[test]
fn a_pool_may_have_room_for_more_regions() {
    let place = Place::new();
    let path = place.path();
    let size_and_regions = ["--size", "64M", "--regions", "50000"];
    let created = wadi_pool(&[&["create", path.to_str().unwrap()], &size_and_regions[..]].concat());
    assert!(String::from_utf8_lossy(&created.stdout).contains("at most 50000 regions"), "{created:?}");
    let pool = Pool::open(&path).unwrap();
    assert_eq!(pool.layout().region_slots(), 50_000);
    // Who knows 1.0 only would look for everything elsewhere.
    assert_eq!((pool.superblock().major, pool.superblock().minor), (1, 2));
}

#[test]
fn the_tool_fails_with_one_line_that_says_what_to_do() {
    let place = Place::with_pool();
    let path = place.path();
    let path = path.to_str().unwrap();
    for (arguments, advice) in [
        (&["inspect", "/dev/shm/none"][..], "wadi-pool create"),
        (&["create", path, "--size", "64M"], "--force"),
        (&["create", path, "--size", "64M", "--force", "--regions", "7"], "from 4095 to"),
        (&["create", "/dev/shm/none", "--size", "3M"], "multiple of 2 MiB"),
        (&["create", "/dev/shm/no/ne", "--size", "64M"], "mkdir -p"),
    ] {
        let output = wadi_pool(arguments);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.starts_with("error: ") && message.contains(advice), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}
