//! The `vhost-user` driver against a real target: qemu-storage-daemon, serving a file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::time::{Duration, Instant};

use cxl_pool::{Area, ByteOffset, CreateOptions, HardwareMemory, Memory, Pool};
use pod_protocol::endpoint::{Handler, Reporter};
use pod_protocol::objects::{Object, ObjectId, TableObject};
use pod_protocol::reports::Report;
use pod_protocol::volume_table::{VolumeEntry, VolumeTable};
use rustix::event::{PollFd, PollFlags, poll};
use vhost_blk_cxl::message::Operation;
use vhost_blk_cxl::segments::Segment;
use vhost_blk_cxl::ssd::{Command, CommandId, Finished, Full, OpenError, Outcome, Ssd, VhostUserSsd};

use crate::pod::witness::Witness;
use crate::pod::{Driver, OK, PATIENCE, Pod, T_FLUSH, VOLUME_BYTES, VOLUME_START, eventually, pattern};

pub(crate) const MIB: u64 = 1 << 20;

/// qemu-storage-daemon with a file.
pub(crate) struct Target {
    child: Child,
    pub(crate) socket: PathBuf,
    pub(crate) file: File,
    /// The first flush of each process fails.
    fails_a_flush: bool,
    directory: tempfile::TempDir,
}

impl Target {
    pub(crate) fn start(bytes: u64, export: &str) -> Self {
        Self::start_with(bytes, export, false)
    }

    /// It reports once that it could not write what it has in its cache.
    pub(crate) fn start_failing_a_flush(bytes: u64, export: &str) -> Self {
        Self::start_with(bytes, export, true)
    }

    fn start_with(bytes: u64, export: &str, fails_a_flush: bool) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let (path, socket) = (directory.path().join("disk"), directory.path().join("socket"));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        file.set_len(bytes).unwrap();
        let child = Self::serve(&path, &socket, export, fails_a_flush);
        Self { child, socket, file, fails_a_flush, directory }
    }

    /// A place for something else that belongs to it.
    pub(crate) fn beside(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn serve(path: &Path, socket: &Path, export: &str, fails_a_flush: bool) -> Child {
        let rules = if fails_a_flush {
            ",inject-error.0.event=none,inject-error.0.iotype=flush,inject-error.0.once=on"
        } else {
            ""
        };
        let child = Process::new("setpriv")
            .args(["--pdeathsig", "KILL", "qemu-storage-daemon", "--blockdev"])
            .arg(format!("driver=file,node-name=f0,filename={},discard=unmap", path.display()))
            .args(["--blockdev", &format!("driver=blkdebug,node-name=b0,image=f0,discard=unmap{rules}")])
            .args(["--blockdev", "driver=raw,node-name=d0,file=b0,discard=unmap", "--export"])
            .arg(format!(
                "type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={}{export}",
                socket.display()
            ))
            .stdin(Stdio::null())
            .spawn()
            .expect("qemu-storage-daemon: apt-get install qemu-utils qemu-system-x86");
        eventually(|| socket.exists());
        child
    }

    /// It dies, and another one begins with the same file.
    pub(crate) fn restart(&mut self, export: &str) {
        self.kill();
        // The dead one leaves it.
        let _ = std::fs::remove_file(&self.socket);
        self.child = Self::serve(&self.beside("disk"), &self.socket, export, self.fails_a_flush);
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.kill();
    }
}

pub(crate) fn pool() -> Pool {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = CreateOptions { size_bytes: Some(32 * MIB), ..CreateOptions::default() };
    Pool::create(&directory.path().join("pool"), &options).unwrap()
}

pub(crate) struct Bench {
    memory: HardwareMemory,
    data: Area,
    pub(crate) ssd: VhostUserSsd,
}

impl Bench {
    pub(crate) fn connect(target: &Target) -> Self {
        let pool = pool();
        let ssd = connect(target, &pool);
        Self { memory: pool.hardware(), data: pool.layout().data(), ssd }
    }

    fn buffer(&self, id: u32) -> ByteOffset {
        ByteOffset::new(self.data.start_byte().get() + u64::from(id) * (128 << 10))
    }

    pub(crate) fn command(
        &self,
        id: u32,
        operation: Operation,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Command {
        Command {
            id: CommandId(id),
            operation,
            force_unit_access: false,
            may_unmap: true,
            offset_bytes,
            length_bytes,
            data: self.buffer(id),
        }
    }

    pub(crate) fn finish(&mut self, count: usize) -> Vec<Finished> {
        let mut finished = Vec::new();
        self.ssd.kick();
        loop {
            self.ssd.reap(&mut finished);
            if finished.len() >= count {
                assert_eq!(finished.len(), count);
                return finished;
            }
            let event = self.ssd.event().unwrap();
            let mut fds = [PollFd::from_borrowed_fd(event, PollFlags::IN)];
            assert_eq!(poll(&mut fds, Some(&PATIENCE.try_into().unwrap())), Ok(1), "no event");
        }
    }

    pub(crate) fn run(&mut self, command: Command) -> Outcome {
        self.ssd.submit(command).unwrap();
        self.finish(1)[0].outcome
    }
}

#[test]
fn a_target_full_of_commands_is_the_model() {
    let target = Target::start(8 * MIB, ",writable=on");
    let mut bench = Bench::connect(&target);
    assert_eq!(bench.ssd.geometry().size_bytes, 8 * MIB);
    assert_eq!(bench.ssd.discard_granularity_bytes(), Some(512), "what it calls a block");
    let mut model = vec![0; 8 << 20];
    for round in 0..4_u64 {
        let mut count = 0;
        loop {
            let id = count as u32;
            let (at, bytes) = (u64::from(id) * (100 << 10), 512 * (1 + (u64::from(id) * 7 + round) % 200));
            let operation = match (u64::from(id) + round) % 5 {
                0 => Operation::Read,
                1 => Operation::WriteZeroes,
                _ => Operation::Write,
            };
            let mut command = bench.command(id, operation, at, bytes);
            command.force_unit_access = id.is_multiple_of(3);
            let data = pattern(u64::from(id) << 8 | round, bytes as usize);
            if operation == Operation::Write {
                bench.memory.write(command.data, &data);
            }
            if bench.ssd.submit(command) == Err(Full) {
                break;
            }
            let place = &mut model[at as usize..(at + bytes) as usize];
            match operation {
                Operation::Write => place.copy_from_slice(&data),
                Operation::WriteZeroes => place.fill(0),
                _ => {}
            }
            count += 1;
        }
        assert!(count >= 64, "{count}");
        let finished = bench.finish(count);
        assert!(finished.iter().all(|done| done.outcome == Outcome::Done), "{finished:?}");
        let mut ids: Vec<u32> = finished.iter().map(|done| done.id.0).collect();
        ids.sort_unstable();
        assert_eq!(ids, (0..count as u32).collect::<Vec<u32>>(), "each ended once");
        for id in (0..count as u32).filter(|id| (u64::from(*id) + round) % 5 == 0) {
            let (at, bytes) =
                (id as usize * (100 << 10), 512 * (1 + (id as usize * 7 + round as usize) % 200));
            let mut read = vec![0; bytes];
            bench.memory.read(bench.buffer(id), &mut read);
            assert!(read == model[at..at + bytes], "what command {id} read");
        }
    }
    let flush = bench.command(0, Operation::Flush, 0, 0);
    assert_eq!(bench.run(flush), Outcome::Done);
    let discard = bench.command(0, Operation::Discard, 0, MIB);
    assert_eq!(bench.run(discard), Outcome::Done);
    model[..1 << 20].fill(0);
    let mut found = vec![0; model.len()];
    target.file.read_exact_at(&mut found, 0).unwrap();
    assert!(found == model);
    let beyond = bench.command(0, Operation::Read, 8 * MIB, 512);
    assert_eq!(bench.run(beyond), Outcome::Failed, "the target refuses what it does not have");
}

/// More segments than the target takes in one request, too.
#[test]
fn data_in_several_places_reaches_the_target() {
    let target = Target::start(8 * MIB, ",writable=on");
    let mut bench = Bench::connect(&target);
    for (round, count) in [2_u64, 3, 126, 127, 255].into_iter().enumerate() {
        let place = |index: u64| ByteOffset::new(bench.data.start_byte().get() + (count - index) * 8192);
        let segments: Vec<Segment> = (0..count)
            .map(|index| Segment { start: place(index), bytes: 512 * (1 + index as u32 % 9) })
            .collect();
        let length: u64 = segments.iter().map(|segment| u64::from(segment.bytes)).sum();
        let data = pattern(round as u64, length as usize);
        let mut left = &data[..];
        for segment in &segments {
            let (piece, rest) = left.split_at(segment.bytes as usize);
            bench.memory.write(segment.start, piece);
            left = rest;
        }
        let mut write = bench.command(0, Operation::Write, MIB, length);
        write.force_unit_access = count % 2 == 0;
        bench.ssd.submit_list(write, &segments).unwrap();
        assert_eq!(bench.finish(1)[0].outcome, Outcome::Done);
        let mut found = vec![0; length as usize];
        target.file.read_exact_at(&mut found, MIB).unwrap();
        assert!(found == data, "{count} segments written");
        for segment in &segments {
            bench.memory.zero(segment.start, segment.bytes.into());
        }
        let read = bench.command(1, Operation::Read, MIB, length);
        bench.ssd.submit_list(read, &segments).unwrap();
        assert_eq!(bench.finish(1)[0].outcome, Outcome::Done);
        let mut at = 0;
        for segment in &segments {
            let mut piece = vec![0; segment.bytes as usize];
            bench.memory.read(segment.start, &mut piece);
            assert!(piece == data[at..at + piece.len()], "{count} segments read");
            at += piece.len();
        }
    }
}

#[test]
fn a_target_that_does_not_come_back_fails_what_it_had_and_everything_after() {
    let mut target = Target::start(8 * MIB, ",writable=on");
    let mut bench = Bench::connect(&target);
    bench.ssd = bench.ssd.waiting_for(Duration::ZERO);
    let read = bench.command(0, Operation::Read, 0, 4096);
    assert_eq!(bench.run(read), Outcome::Done);
    target.kill();
    for id in 0..10 {
        let command = bench.command(id, Operation::Write, 0, 4096);
        bench.ssd.submit(command).unwrap();
    }
    assert!(bench.finish(10).iter().all(|done| done.outcome == Outcome::Failed));
    assert!(bench.ssd.failure().is_some_and(|reason| reason.contains("closed")));
    assert_eq!(bench.run(read), Outcome::Failed);
}

/// Reaps until the driver has noticed that the target is gone, which it says by nothing: its event is not readable then.
fn until_noticed(bench: &mut Bench) {
    let mut finished = Vec::new();
    eventually(|| {
        bench.ssd.reap(&mut finished);
        let mut fds = [PollFd::from_borrowed_fd(bench.ssd.event().unwrap(), PollFlags::IN)];
        poll(&mut fds, Some(&rustix::event::Timespec::default())) == Ok(0)
    });
    assert!(finished.is_empty(), "{finished:?}");
}

#[test]
fn what_a_target_had_is_done_by_the_next_one() {
    const WRITABLE: &str = ",writable=on";
    let mut target = Target::start(8 * MIB, WRITABLE);
    let mut bench = Bench::connect(&target);
    let verifier = bench.ssd.write_verifier();
    target.kill();
    let data = |id: u32| pattern(id.into(), 64 << 10);
    let submit = |bench: &mut Bench, id: u32| {
        let mut command = bench.command(id, Operation::Write, u64::from(id) << 17, 64 << 10);
        command.force_unit_access = id.is_multiple_of(2);
        bench.memory.write(command.data, &data(id));
        bench.ssd.submit(command).unwrap();
        bench.ssd.kick();
    };
    // Some before it is known that the target is gone, and some after.
    (0..20).for_each(|id| submit(&mut bench, id));
    until_noticed(&mut bench);
    (20..40).for_each(|id| submit(&mut bench, id));
    assert_eq!((bench.ssd.failure(), bench.ssd.write_verifier()), (None, verifier));
    target.restart(WRITABLE);
    let finished = bench.finish(40);
    assert!(finished.iter().all(|done| done.outcome == Outcome::Done), "{finished:?}");
    assert_ne!(bench.ssd.write_verifier(), verifier, "what was not flushed before may be lost");
    for id in 0..40_u32 {
        let mut found = vec![0; 64 << 10];
        target.file.read_exact_at(&mut found, u64::from(id) << 17).unwrap();
        assert!(found == data(id), "{id}");
    }
    // A disk that is smaller is not the one that it was.
    bench.ssd = bench.ssd.waiting_for(Duration::ZERO);
    target.kill();
    target.file.set_len(MIB).unwrap();
    target.restart(WRITABLE);
    // It listens by now.
    drop(connect(&target, &pool()));
    let read = bench.command(0, Operation::Read, 0, 4096);
    assert_eq!(bench.run(read), Outcome::Failed);
    assert!(bench.ssd.failure().is_some_and(|reason| reason.contains("the right one")));
}

/// Its guest sees nothing of it but flushes that fail, since its write cache may be gone.
#[test]
fn a_target_begins_anew_under_load() {
    const WRITABLE: &str = ",writable=on";
    let mut target = Target::start(VOLUME_START + VOLUME_BYTES, WRITABLE);
    let pool = pool();
    let mut pod: Pod<HardwareMemory> = Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
    pod.start(Box::new(connect(&target, &pool)));
    let mut witness = Witness::new(Driver::connected(&pod), pod.disk.queues, 5);
    for _ in 0..5 {
        witness.work(100).unwrap();
        target.kill();
        witness.power_failed(&target.file, VOLUME_START).unwrap();
        target.restart(WRITABLE);
        witness.work(100).unwrap();
        witness.flush().unwrap();
    }
    assert!(witness.failed_flushes > 0, "it is said what may be gone");
    witness.settle().unwrap();
    witness.power_failed(&target.file, VOLUME_START).unwrap();
}

/// What it had not flushed is gone with it.
#[test]
fn a_target_that_begins_anew_is_known_by_its_verifier() {
    const WRITABLE: &str = ",writable=on";
    let mut target = Target::start(8 * MIB, WRITABLE);
    let verifier = |target: &Target| Bench::connect(target).ssd.write_verifier();
    let first = verifier(&target);
    assert_eq!(verifier(&target), first);
    target.restart(WRITABLE);
    let second = verifier(&target);
    assert_ne!(second, first);
    assert_eq!(verifier(&target), second);
}

#[test]
fn targets_that_will_not_do_are_refused() {
    let target = Target::start(8 * MIB, "");
    eventually(|| match VhostUserSsd::connect("ssd0", &target.socket, &pool()) {
        Err(OpenError::Io { what: "connect to", .. }) => false,
        Err(error) => error.to_string().contains("read-only"),
        Ok(_) => panic!("it is read-only"),
    });
    let nowhere = target.socket.with_file_name("nowhere");
    assert!(matches!(VhostUserSsd::connect("ssd0", &nowhere, &pool()), Err(OpenError::Io { .. })));
}

/// Whoever gets its place sees nothing of it, and its neighbour keeps what it has.
#[test]
fn a_deleted_volume_is_wiped_by_commands_of_the_target() {
    let target = Target::start(VOLUME_START + VOLUME_BYTES + MIB, ",writable=on");
    let size = (VOLUME_START + VOLUME_BYTES + MIB) as usize;
    target.file.write_all_at(&vec![7; size], 0).unwrap();
    let pool = pool();
    let ssd = connect(&target, &pool);
    let mut pod: Pod<HardwareMemory> = Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
    let reporter = Reporter::new().unwrap();
    pod.reporter = Some(reporter.clone());
    pod.start_backend(Box::new(ssd));
    let (volume, id) = (pod.volume.volume, pod.volume.id());
    let table = |deleted| {
        let entry = VolumeEntry {
            id: volume,
            name: "vol0".to_owned(),
            start_bytes: VOLUME_START,
            size_bytes: VOLUME_BYTES,
            deleted,
            mirror: None,
            stripe: None,
        };
        Object::Table(TableObject { ssd: "ssd0".to_owned(), table: VolumeTable { volumes: vec![entry] } })
    };
    let backend = pod.backend.as_mut().unwrap();
    backend.wipe_by_commands(["ssd0".to_owned()]);
    let refused = backend.apply(Object::Volume(pod.volume.clone())).unwrap_err();
    assert!(refused.contains("not in the table"), "{refused}");
    backend.apply(table(false)).unwrap();
    backend.apply(Object::Volume(pod.volume.clone())).unwrap();
    backend.apply(table(true)).unwrap();
    backend.remove(ObjectId::Volume(id)).unwrap();
    let wiped = |it: Report| matches!(it, Report::VolumeWiped { device, volume: of } if device == "ssd0" && of == volume);
    eventually(|| {
        // It is what has it look for what was wiped.
        backend.telemetry();
        reporter.take().into_iter().any(wiped)
    });
    let mut found = vec![0; size];
    target.file.read_exact_at(&mut found, 0).unwrap();
    let of_volume = VOLUME_START as usize..(VOLUME_START + VOLUME_BYTES) as usize;
    assert!(found.iter().enumerate().all(|(at, &byte)| byte == if of_volume.contains(&at) { 0 } else { 7 }));
}

pub(crate) fn connect(target: &Target, pool: &Pool) -> VhostUserSsd {
    let began = Instant::now();
    loop {
        // The socket is there a moment before someone listens.
        match VhostUserSsd::connect("ssd0", &target.socket, pool) {
            Ok(ssd) => return ssd,
            Err(error) => assert!(began.elapsed() < PATIENCE, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_guest_uses_the_disk_of_another_program() {
    let target = Target::start(VOLUME_START + VOLUME_BYTES, ",writable=on");
    let pool = pool();
    let ssd = connect(&target, &pool);
    let mut pod: Pod<HardwareMemory> = Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
    pod.start(Box::new(ssd));
    let mut driver = Driver::connected(&pod);
    for round in 0..50 {
        let data = pattern(round, 64 << 10);
        assert_eq!(driver.write_sectors(round * 8, &data), OK);
        assert_eq!(driver.read_sectors(round * 8, 64 << 10), data);
    }
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
    let mut found = vec![0; 64 << 10];
    target.file.read_exact_at(&mut found, VOLUME_START + 49 * 4096).unwrap();
    assert_eq!(found, pattern(49, 64 << 10));
}
