//! A device of the `file` driver, and the pool that its data goes through.

use std::path::Path;
use std::time::{Duration, Instant};

use cxl_pool::{Area, ByteOffset, CreateOptions, HardwareMemory, Memory, Pool};
use rustix::event::{PollFd, PollFlags, poll};
use vhost_blk_cxl::message::Operation;
use vhost_blk_cxl::ssd::{Command, CommandId, FileSsd, Finished, Outcome, Ssd};

pub const MIB: u64 = 1 << 20;
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A device and the pool that its data goes through.
pub struct Bench {
    pub memory: HardwareMemory,
    pub pool: Pool,
    pub data: Area,
    pub ssd: FileSsd,
}

impl Bench {
    pub fn open(path: &Path, size_bytes: u64) -> Self {
        let pool_directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let options = CreateOptions { size_bytes: Some(32 * MIB), ..CreateOptions::default() };
        let pool = Pool::create(&pool_directory.path().join("pool"), &options).unwrap();
        // The mapping is enough from here on, and nothing is left of a process that is killed.
        drop(pool_directory);
        Self::with(FileSsd::open("ssd0", path, Some(size_bytes), &pool).unwrap(), pool)
    }

    pub fn with(ssd: FileSsd, pool: Pool) -> Self {
        Self { memory: pool.hardware(), data: pool.layout().data(), pool, ssd }
    }

    /// Where a command of this number may keep this many bytes.
    pub fn buffer(&self, id: u32, bytes: u64) -> ByteOffset {
        let at = ByteOffset::new(self.data.start_byte().get() + u64::from(id) * bytes.next_multiple_of(4096));
        assert!(self.data.contains(at, bytes));
        at
    }

    pub fn command(&self, id: u32, operation: Operation, offset_bytes: u64, length_bytes: u64) -> Command {
        Command {
            id: CommandId(id),
            operation,
            force_unit_access: false,
            may_unmap: false,
            offset_bytes,
            length_bytes,
            data: self.buffer(if operation.has_data() { id } else { 0 }, length_bytes.min(MIB)),
        }
    }

    /// Waits, on the device's event only, for so many commands.
    pub fn finish(&mut self, count: usize) -> Vec<Finished> {
        let began = Instant::now();
        let mut finished = Vec::new();
        self.ssd.kick();
        loop {
            self.ssd.reap(&mut finished);
            if finished.len() >= count {
                assert_eq!(finished.len(), count);
                return finished;
            }
            assert!(began.elapsed() < PATIENCE, "{} of {count} ended", finished.len());
            // A file in memory works only while it is asked.
            let Some(event) = self.ssd.event() else { continue };
            let mut fds = [PollFd::from_borrowed_fd(event, PollFlags::IN)];
            assert_eq!(poll(&mut fds, Some(&PATIENCE.try_into().unwrap())), Ok(1), "no event");
        }
    }

    pub fn run(&mut self, command: Command) -> Outcome {
        self.ssd.submit(command).unwrap();
        self.finish(1)[0].outcome
    }

    pub fn simple(&mut self, operation: Operation, offset_bytes: u64, length_bytes: u64) -> Outcome {
        let command = self.command(0, operation, offset_bytes, length_bytes);
        self.run(command)
    }

    pub fn write(&mut self, at: u64, data: &[u8]) -> Outcome {
        let command = self.command(0, Operation::Write, at, data.len() as u64);
        self.memory.write(command.data, data);
        self.run(command)
    }

    pub fn read(&mut self, at: u64, bytes: usize) -> Vec<u8> {
        let command = self.command(0, Operation::Read, at, bytes as u64);
        self.memory.write(command.data, &vec![0x55; bytes]);
        assert_eq!(self.run(command), Outcome::Done);
        let mut data = vec![0; bytes];
        self.memory.read(command.data, &mut data);
        data
    }
}

/// A directory where O_DIRECT goes to a disk, and one where it does not.
pub fn directories() -> [tempfile::TempDir; 2] {
    [tempfile::tempdir_in("/var/tmp").unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()]
}
