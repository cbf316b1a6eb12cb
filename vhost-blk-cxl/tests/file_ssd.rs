//! The `file` driver on real files and block devices, with its data in a real pool. Run as root: some of it mounts file
//! systems, in a mount namespace of its own.

#![allow(clippy::cast_possible_truncation, reason = "small numbers, chosen by the test")]

mod pod;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::time::Duration;

use cxl_pool::{Area, CreateOptions, LineCount, Memory, Pool};
use pod::file_bench::{Bench, MIB, PATIENCE, directories};
use pod::loop_device::{Done, LoopDevice};
use pod::pattern;
use vhost_blk_cxl::message::Operation;
use vhost_blk_cxl::ssd::{FileSsd, Full, OpenError, Outcome, Ssd};

/// Areas are named, left out and named again while commands use them, across the ends of registered pieces.
#[test]
fn areas_come_and_go_under_commands() {
    const LENGTH: u64 = MIB;
    const COUNT: u32 = 12;
    for directory in directories() {
        let mut bench = Bench::open(&directory.path().join("ssd"), 32 * MIB);
        let half = LineCount::new(bench.data.lines.get() / 2);
        let halves = [
            Area::new(bench.data.start, half),
            Area::new(
                bench.data.start.saturating_add(half),
                LineCount::new(bench.data.lines.get() - half.get()),
            ),
        ];
        let choices: [&[Area]; 4] = [&[bench.data], &halves[..1], &[], &halves];
        for round in 0..16 {
            // Each of them for a write and for a read.
            let areas = choices[round / 2 % choices.len()];
            // The last round's commands are under way, or their areas gone.
            bench.ssd.set_areas(areas);
            let operation = if round % 2 == 0 { Operation::Write } else { Operation::Read };
            for id in 0..COUNT {
                let command = bench.command(id, operation, u64::from(id) * LENGTH, LENGTH);
                let seed = u64::from(id) + (round as u64 / 2) * 100;
                let data =
                    if round % 2 == 0 { pattern(seed, LENGTH as usize) } else { vec![0x55; LENGTH as usize] };
                bench.memory.write(command.data, &data);
                bench.ssd.submit(command).unwrap();
            }
            bench.ssd.kick();
            // Gone at once, while the device works.
            bench.ssd.set_areas(&[]);
            let ended = bench.finish(COUNT as usize);
            assert!(ended.iter().all(|ended| ended.outcome == Outcome::Done), "{ended:?}");
            for id in (0..COUNT).filter(|_| round % 2 == 1) {
                let mut found = vec![0; LENGTH as usize];
                bench.memory.read(bench.buffer(id, LENGTH), &mut found);
                assert!(
                    found == pattern(u64::from(id) + (round as u64 / 2) * 100, LENGTH as usize),
                    "round {round}, {id}"
                );
            }
        }
    }
}

#[test]
fn a_device_full_of_commands_is_the_model() {
    // One in memory does not take what it cannot work on.
    for (directory, depth) in directories().into_iter().zip([512u32, 16]) {
        let path = directory.path().join("ssd.img");
        let mut bench = Bench::open(&path, 8 * MIB);
        let block = u64::from(bench.ssd.geometry().block_bytes);
        let mut model = vec![0; 8 << 20];
        // Three rounds of as many as it takes, each its own place, of odd numbers of blocks.
        for round in 0..3u64 {
            let slot_bytes = 8 * MIB / 512;
            let mut count = 0;
            loop {
                let id = count as u32;
                let blocks = 1 + (u64::from(id) * 7 + round) % (slot_bytes / block);
                let at = u64::from(id % 512) * slot_bytes;
                let operation =
                    if (u64::from(id) + round) % 3 == 0 { Operation::Read } else { Operation::Write };
                let mut command = bench.command(id, operation, at, blocks * block);
                command.data = bench.buffer(id, slot_bytes);
                let data = pattern(u64::from(id) << 8 | round, command.length_bytes as usize);
                if operation == Operation::Write {
                    bench.memory.write(command.data, &data);
                }
                if bench.ssd.submit(command) == Err(Full) {
                    break;
                }
                if operation == Operation::Write {
                    model[at as usize..at as usize + data.len()].copy_from_slice(&data);
                }
                count += 1;
            }
            assert_eq!(count, depth as usize, "its depth");
            let finished = bench.finish(count);
            assert!(finished.iter().all(|done| done.outcome == Outcome::Done), "{finished:?}");
            let mut ids: Vec<u32> = finished.iter().map(|done| done.id.0).collect();
            ids.sort_unstable();
            assert_eq!(ids, (0..depth).collect::<Vec<u32>>(), "each ended once");
        }
        assert_eq!(bench.simple(Operation::Flush, 0, 0), Outcome::Done);
        assert_eq!(fs::read(&path).unwrap(), model);
        for at in (0..8 * MIB).step_by(MIB as usize) {
            assert_eq!(bench.read(at, 1 << 20), model[at as usize..][..1 << 20]);
        }
    }
}

#[test]
fn discards_give_space_back_and_zeroes_read_as_zeros() {
    for directory in directories() {
        let path = directory.path().join("ssd.img");
        let mut bench = Bench::open(&path, 4 * MIB);
        let allocated = || fs::metadata(&path).unwrap().blocks() * 512;
        let data = pattern(1, 1 << 20);
        for at in 0..4 {
            assert_eq!(bench.write(at * MIB, &data), Outcome::Done);
        }
        assert_eq!(bench.simple(Operation::Flush, 0, 0), Outcome::Done);
        let full = allocated();
        assert!(full >= 4 * MIB);
        assert_eq!(bench.simple(Operation::Discard, 0, MIB), Outcome::Done);
        let mut unmap = bench.command(0, Operation::WriteZeroes, MIB, MIB);
        unmap.may_unmap = true;
        assert_eq!(bench.run(unmap), Outcome::Done);
        let thin = allocated();
        assert!(thin <= full - 2 * MIB, "{thin} of {full} bytes are still allocated");
        // Not a multiple of what zeros are written from.
        let zeroed = 3 * 64 * 1024 + 4096;
        assert_eq!(bench.simple(Operation::WriteZeroes, 2 * MIB, zeroed), Outcome::Done);
        let mut through = bench.command(0, Operation::WriteZeroes, 3 * MIB, 4096);
        through.force_unit_access = true;
        assert_eq!(bench.run(through), Outcome::Done);
        assert_eq!(allocated(), thin, "who does not want to unmap keeps the space");
        assert_eq!(bench.read(0, 1 << 20), vec![0; 1 << 20]);
        assert_eq!(bench.read(MIB, 1 << 20), vec![0; 1 << 20]);
        let third = bench.read(2 * MIB, 1 << 20);
        assert!(third[..zeroed as usize].iter().all(|&byte| byte == 0));
        assert_eq!(third[zeroed as usize..], data[zeroed as usize..]);
        let fourth = bench.read(3 * MIB, 1 << 20);
        assert_eq!((&fourth[..4096], &fourth[4096..]), (&[0; 4096][..], &data[4096..]));
    }
}

#[test]
fn a_file_cut_short_fails_what_lies_behind_its_end_only() {
    for directory in directories() {
        let path = directory.path().join("ssd.img");
        let mut bench = Bench::open(&path, MIB);
        let data = pattern(2, 1 << 20);
        assert_eq!(bench.write(0, &data), Outcome::Done);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        // At a block, at no line, and everything.
        for length in [512 * 1024, 300 * 1024 + 100, 0] {
            file.set_len(length).unwrap();
            assert_eq!(bench.simple(Operation::Read, 0, MIB), Outcome::Failed);
            assert_eq!(bench.simple(Operation::Read, MIB - 4096, 4096), Outcome::Failed);
            if length > 4096 {
                assert_eq!(bench.read(0, 4096), data[..4096]);
            }
        }
        // Writing makes it grow again.
        assert_eq!(bench.write(0, &data), Outcome::Done);
        assert_eq!(bench.read(0, 1 << 20), data);
        assert_eq!(bench.ssd.failure(), None);
    }
}

/// What runs in a mount namespace of its own: whatever it mounts goes with its thread.
fn with_mounts(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(|| {
        // SAFETY: it affects the thread's view of mounts, not file descriptors or memory.
        #[allow(unsafe_code)]
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }.expect("run as root");
        sh("mount --make-rprivate /");
        test();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

fn sh(command: &str) -> String {
    let output = Process::new("sh").args(["-c", command]).output().expect("a shell");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn a_full_file_system_gives_errors_and_recovers() {
    with_mounts(|| {
        let directory = tempfile::tempdir().unwrap();
        let shown = directory.path().display();
        sh(&format!("mount -t tmpfs -o size=1m none {shown}"));
        let mut bench = Bench::open(&directory.path().join("ssd.img"), 8 * MIB);
        let data = pattern(3, 256 << 10);
        let outcomes: Vec<Outcome> = (0..8).map(|at| bench.write(at * MIB, &data)).collect();
        assert_eq!(outcomes[0], Outcome::Done);
        assert_eq!(outcomes[7], Outcome::Failed);
        assert_eq!(bench.simple(Operation::WriteZeroes, 7 * MIB, 512 << 10), Outcome::Failed);
        assert_eq!(bench.read(0, data.len()), data);
        assert_eq!(bench.ssd.failure(), None, "a full file system is no broken device");
        assert_eq!(bench.simple(Operation::Discard, MIB, 7 * MIB), Outcome::Done);
        assert_eq!(bench.write(7 * MIB, &data), Outcome::Done);
        assert_eq!(bench.read(7 * MIB, data.len()), data);
        drop(bench);
        sh(&format!("umount {shown}"));
    });
}

/// A loop device over a file of so many bytes in this directory.
fn loop_device(directory: &Path, bytes: u64) -> Option<(LoopDevice, PathBuf)> {
    let backing = directory.join("backing");
    File::create(&backing).unwrap().set_len(bytes).unwrap();
    Some((LoopDevice::over(&backing)?, backing))
}

#[test]
fn a_block_device_is_flushed_discarded_and_fails() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let Some((device, backing)) = loop_device(directory.path(), 8 * MIB) else { return };
    let mut bench = Bench::open(&device.path, 0);
    assert_eq!(bench.ssd.geometry().size_bytes, 8 * MIB);
    let data = pattern(4, 64 << 10);
    assert_eq!(bench.write(4096, &data), Outcome::Done);
    let before = device.done().flushes;
    assert_eq!(bench.simple(Operation::Flush, 0, 0), Outcome::Done);
    assert_eq!(device.done().flushes, before + 1, "a flush reaches the medium");
    let mut through = bench.command(0, Operation::Write, 0, 4096);
    through.force_unit_access = true;
    assert_eq!(bench.run(through), Outcome::Done);
    assert_eq!(device.done().flushes, before + 2, "so does a write through the cache");
    assert_eq!(bench.simple(Operation::Discard, 4096, 4096), Outcome::Done);
    assert_eq!(bench.simple(Operation::WriteZeroes, 8192, 4096), Outcome::Done);
    let read = bench.read(4096, 64 << 10);
    assert!(read[..8192].iter().all(|&byte| byte == 0));
    assert_eq!(read[8192..], data[8192..]);
    // The medium disappears under the device.
    OpenOptions::new().write(true).open(&backing).unwrap().set_len(MIB).unwrap();
    assert_eq!(bench.simple(Operation::Read, 4 * MIB, 4096), Outcome::Failed);
    assert_eq!(bench.read(4096, 64 << 10), read);
}

#[test]
fn a_block_device_is_told_to_forget_and_not_to_write_zeros() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let Some((device, backing)) = loop_device(directory.path(), 16 * MIB) else { return };
    let allocated = || fs::metadata(&backing).unwrap().blocks() * 512;
    let mut bench = Bench::open(&device.path, 0);
    let data = pattern(6, 1 << 20);
    for at in 0..16 {
        assert_eq!(bench.write(at * MIB, &data), Outcome::Done);
    }
    let (full, before) = (allocated(), device.done());
    // Many at a time, with writes between them; they wait on the device's event only.
    let mut ids = 0..;
    for at in 0..12 {
        for operation in [Operation::Discard, Operation::Write] {
            let start = (at % 4 + if operation == Operation::Write { 4 } else { 0 }) * MIB;
            let mut command = bench.command(0, operation, start + at / 4 * (128 << 10), 128 << 10);
            command.id = vhost_blk_cxl::ssd::CommandId(ids.next().unwrap());
            bench.ssd.submit(command).unwrap();
        }
    }
    let ended = bench.finish(24);
    assert!(ended.iter().all(|ended| ended.outcome == Outcome::Done), "{ended:?}");
    let Done { writes, discards, .. } = device.done();
    assert_eq!((discards - before.discards, writes - before.writes), (12, 12));
    assert!(allocated() <= full - 12 * (128 << 10), "its medium has the space back");
    for at in 0..4 {
        let read = bench.read(at * MIB, 1 << 20);
        let forgotten = 3 * (128 << 10);
        assert!(read[..forgotten].iter().all(|&byte| byte == 0), "as this device does");
        assert_eq!(read[forgotten..], data[forgotten..]);
    }
    // Zeroes are what is asked for, whoever wants to have the space back.
    let before = device.done();
    for (at, may_unmap) in [(12, true), (13, false)] {
        let mut zeroes = bench.command(0, Operation::WriteZeroes, at * MIB + 4096, MIB - 8192);
        (zeroes.may_unmap, zeroes.force_unit_access) = (may_unmap, true);
        assert_eq!(bench.run(zeroes), Outcome::Done);
        let read = bench.read(at * MIB, 1 << 20);
        assert!(read[4096..][..(1 << 20) - 8192].iter().all(|&byte| byte == 0));
        assert_eq!((&read[..4096], &read[(1 << 20) - 4096..]), (&data[..4096], &data[(1 << 20) - 4096..]));
    }
    let Done { discards, flushes, .. } = device.done();
    assert_eq!(discards, before.discards);
    assert!(flushes >= before.flushes + 2, "and they are on the medium");
}

/// As QEMU has it: discards are advice, which is taken where it can be.
#[test]
fn a_block_device_that_cannot_forget_keeps_what_it_has() {
    with_mounts(|| {
        let directory = tempfile::tempdir().unwrap();
        let shown = directory.path().display();
        // Its files have no holes.
        sh(&format!("mount -t ramfs none {shown}"));
        if let Some((device, _)) = loop_device(directory.path(), 4 * MIB) {
            let mut bench = Bench::open(&device.path, 0);
            let data = pattern(7, 1 << 20);
            assert_eq!(bench.write(MIB, &data), Outcome::Done);
            let before = device.done();
            assert_eq!(bench.simple(Operation::Discard, MIB, MIB), Outcome::Done);
            assert_eq!(bench.read(MIB, 1 << 20), data);
            assert_eq!(device.done(), before, "it was not asked");
            for may_unmap in [true, false] {
                let mut zeroes = bench.command(0, Operation::WriteZeroes, MIB, MIB);
                zeroes.may_unmap = may_unmap;
                assert_eq!(bench.run(zeroes), Outcome::Done);
                assert_eq!(bench.read(MIB, 1 << 20), vec![0; 1 << 20]);
                assert_eq!(bench.write(MIB, &data), Outcome::Done);
            }
        }
        sh(&format!("umount --lazy {shown}"));
    });
}

/// Says to a child of this test what to do; see [`the_predecessor`].
const PREDECESSOR: &str = "WADI_TEST_PREDECESSOR";

/// Not a test of its own: the process that is killed by the one below.
#[test]
fn the_predecessor() {
    let Some(path) = std::env::var_os(PREDECESSOR) else { return };
    let mut bench = Bench::open(Path::new(&path), 0);
    let command = bench.command(0, Operation::Write, 0, MIB);
    bench.memory.write(command.data, &pattern(5, 1 << 20));
    println!("opened");
    // Until the file system is frozen.
    std::io::stdin().read_line(&mut String::new()).unwrap();
    bench.ssd.submit(command).unwrap();
    bench.ssd.kick();
    println!("submitted");
    std::thread::sleep(PATIENCE * 3);
}

struct Predecessor(Child);

impl Predecessor {
    fn start(program: &Path, path: &Path) -> Self {
        let child = Process::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(program)
            .args(["--exact", "the_predecessor", "--nocapture"])
            .env(PREDECESSOR, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        Self(child.unwrap())
    }

    fn wait_for(&mut self, said: &str) {
        use std::io::Read;
        let out = self.0.stdout.as_mut().unwrap();
        let mut heard = String::new();
        let mut byte = [0];
        while !heard.ends_with(said) {
            assert_eq!(out.read(&mut byte).unwrap(), 1, "it ended, saying {heard:?}");
            heard.push(byte[0].into());
        }
    }
}

impl Drop for Predecessor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A frozen file system, which lets go also when a test fails.
struct Frozen(PathBuf);

impl Frozen {
    fn freeze(at: &Path) -> Self {
        sh(&format!("fsfreeze --freeze {}", at.display()));
        Self(at.to_owned())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        sh(&format!("fsfreeze --unfreeze {}", self.0.display()));
    }
}

#[test]
fn a_dead_predecessors_writes_end_before_the_device_is_opened() {
    // With mounts of one's own inside a chroot, it would be told with the chroot's own path.
    let program = std::env::current_exe().unwrap();
    with_mounts(move || {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let mountpoint = directory.path().join("mounted");
        fs::create_dir(&mountpoint).unwrap();
        let Some((device, _)) = loop_device(directory.path(), 32 * MIB) else { return };
        sh(&format!("mkfs.ext4 -q {0} && mount {0} {1}", device.path.display(), mountpoint.display()));
        let path = mountpoint.join("ssd.img");
        let file = File::create(&path).unwrap();
        file.write_all_at(&vec![0; 2 << 20], 0).unwrap();
        file.sync_all().unwrap();
        drop(file);
        let mut predecessor = Predecessor::start(&program, &path);
        predecessor.wait_for("opened\n");
        // In use by a living process: refused, however long one waits.
        let pool_directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let options = CreateOptions { size_bytes: Some(32 * MIB), ..CreateOptions::default() };
        let pool = Pool::create(&pool_directory.path().join("pool"), &options).unwrap();
        assert!(matches!(FileSsd::open("ssd0", &path, None, &pool), Err(OpenError::Locked { .. })));
        // Its write is in the kernel's hands and cannot go on when it dies.
        let frozen = Frozen::freeze(&mountpoint);
        std::io::Write::write_all(predecessor.0.stdin.as_mut().unwrap(), b"\n").unwrap();
        predecessor.wait_for("submitted\n");
        predecessor.0.kill().unwrap();
        let successor = {
            let path = path.clone();
            std::thread::spawn(move || Bench::open(&path, 0))
        };
        std::thread::sleep(Duration::from_millis(500));
        assert!(!successor.is_finished(), "opened while a write of the dead process was in flight");
        drop(frozen);
        let mut bench = successor.join().unwrap();
        // The write is over: what we write now is not overwritten.
        assert!([pattern(5, 1 << 20), vec![0; 1 << 20]].contains(&bench.read(0, 1 << 20)));
        let newer = pattern(6, 1 << 20);
        assert_eq!(bench.write(0, &newer), Outcome::Done);
        drop(predecessor);
        assert_eq!(bench.read(0, 1 << 20), newer);
        drop((bench, pool));
        // The kernel may hold the file a moment longer.
        sh(&format!("umount --lazy {}", mountpoint.display()));
    });
}
