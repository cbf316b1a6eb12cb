//! A drive's volatile write cache, emulated: what it holds is lost with the process.
//!
//! It takes the place of the kernel below the `file` driver, so that everything above is what production runs. A write
//! ends while its data is in memory only. A flush brings what ended before it to the file. Sectors may also reach the
//! file at any other moment, each by itself, so that a process that dies leaves any subset of the writes that were not
//! flushed, torn anywhere between sectors. Steps end in any order, and late. Everything is driven by a seed.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use cxl_pool::{HardwareMemory, Memory, Pool};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FallocateFlags, fallocate};

use super::uring::Step;

/// What a drive writes as a whole.
const SECTOR_BYTES: usize = 512;
/// The same for offsets.
const SECTOR: u64 = SECTOR_BYTES as u64;
/// Longer ranges are given back at once: a drive may do so at any time.
const CACHED_RANGE_MAX: u64 = 1 << 20;

/// How an emulated cache behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolatileCacheOptions {
    /// Of everything that is up to chance.
    pub seed: u64,
    /// Whether a flush does what it says. Only a test of the test wants a drive that lies.
    pub obeys_flush: bool,
}

impl VolatileCacheOptions {
    /// An honest drive.
    pub const fn new(seed: u64) -> Self {
        Self { seed, obeys_flush: true }
    }
}

/// What a sector will be, once it reaches the file.
struct Version {
    /// Of which write.
    write: u64,
    /// When that write ended; none while it is under way.
    ended: Option<u64>,
    bytes: [u8; SECTOR_BYTES],
}

/// A step that has not ended.
struct Running {
    id: u32,
    step: Step,
    /// The number of a write; for a flush, what ended before this moment is to be brought to the file.
    moment: u64,
}

/// The cache and the drive behind it.
pub(super) struct VolatileCache {
    file: File,
    /// Keeps others from the file.
    _locked: File,
    memory: HardwareMemory,
    options: VolatileCacheOptions,
    /// Of the sectors that are not in the file, oldest version first.
    sectors: BTreeMap<u64, Vec<Version>>,
    running: Vec<Running>,
    ended: Vec<(u32, i32)>,
    /// Counts writes and ends.
    clock: u64,
    random: u64,
    /// Of 256 chances after each step, how many bring a sector to the file unasked.
    eagerness: u64,
    event: OwnedFd,
    verifier: u64,
}

impl VolatileCache {
    pub(super) fn new(locked: File, pool: &Pool, options: VolatileCacheOptions) -> io::Result<Self> {
        // The same file, without O_DIRECT: sectors are written one by one.
        let path = format!("/proc/self/fd/{}", locked.as_raw_fd());
        let file = File::options().read(true).write(true).open(path)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let mut cache = Self {
            file,
            _locked: locked,
            memory: pool.hardware(),
            options,
            sectors: BTreeMap::new(),
            running: Vec::new(),
            ended: Vec::new(),
            clock: 0,
            random: options.seed,
            eagerness: 0,
            event,
            // Nobody knows what is left of a predecessor's cache.
            verifier: RandomState::new().hash_one(options.seed),
        };
        cache.eagerness = [0, 8, 200][cache.below(3)];
        Ok(cache)
    }

    /// Changes whenever what was not flushed may be lost.
    pub(super) fn write_verifier(&self) -> u64 {
        self.verifier
    }

    pub(super) fn push(&mut self, id: u32, step: Step) {
        self.clock += 1;
        let moment = self.clock;
        match step {
            Step::Write { at, bytes, data, .. } => {
                for index in 0..u64::from(bytes) / SECTOR {
                    let mut sector = [0; SECTOR_BYTES];
                    self.memory.read(data.saturating_add(index * SECTOR), &mut sector);
                    self.add_version(at / SECTOR + index, moment, &sector);
                }
            }
            Step::WriteZeros { at, bytes, .. } => self.add_zeros(at, u64::from(bytes), moment),
            Step::Allocate { at, bytes, .. } if bytes <= CACHED_RANGE_MAX => {
                self.add_zeros(at, bytes, moment);
            }
            Step::Read { .. } | Step::Allocate { .. } | Step::Discard { .. } | Step::Sync => {}
        }
        self.running.push(Running { id, step, moment });
        // Readable as long as there is something to end, or to be told of that has ended.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    fn add_zeros(&mut self, at: u64, bytes: u64, moment: u64) {
        for index in 0..bytes / SECTOR {
            self.add_version(at / SECTOR + index, moment, &[0; SECTOR_BYTES]);
        }
    }

    fn add_version(&mut self, sector: u64, write: u64, bytes: &[u8; SECTOR_BYTES]) {
        self.sectors.entry(sector).or_default().push(Version { write, ended: None, bytes: *bytes });
    }

    /// Ends some of the steps, at least one if there are any.
    pub(super) fn submit(&mut self) {
        let mut first = true;
        while !self.running.is_empty() && (first || self.below(3) > 0) {
            first = false;
            let index = self.below(self.running.len());
            let running = self.running.swap_remove(index);
            let result = match self.end(&running) {
                Ok(bytes) => i32::try_from(bytes).unwrap_or(i32::MAX),
                Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
            };
            self.ended.push((running.id, result));
            while (self.below(256) as u64) < self.eagerness && !self.sectors.is_empty() {
                self.destage_any();
            }
        }
    }

    fn end(&mut self, running: &Running) -> io::Result<u32> {
        self.clock += 1;
        let now = self.clock;
        match running.step {
            Step::Read { at, bytes, data } => {
                for index in 0..u64::from(bytes) / SECTOR {
                    let sector = self.read(at / SECTOR + index)?;
                    self.memory.write(data.saturating_add(index * SECTOR), &sector);
                }
                Ok(bytes)
            }
            Step::Write { at, bytes, force_unit_access, .. }
            | Step::WriteZeros { at, bytes, force_unit_access } => {
                self.ended_write(at, u64::from(bytes), running.moment, now);
                if force_unit_access {
                    for sector in at / SECTOR..(at + u64::from(bytes)) / SECTOR {
                        self.bring_to_file(sector, now)?;
                    }
                }
                Ok(bytes)
            }
            Step::Allocate { at, bytes, .. } if bytes <= CACHED_RANGE_MAX => {
                self.ended_write(at, bytes, running.moment, now);
                Ok(0)
            }
            Step::Allocate { at, bytes, mode } => {
                let range = at / SECTOR..(at + bytes) / SECTOR;
                self.sectors.retain(|sector, _| !range.contains(sector));
                fallocate(&self.file, FallocateFlags::from_bits_retain(mode.cast_unsigned()), at, bytes)?;
                Ok(0)
            }
            // It is asked for holes; and a drive may forget nothing.
            Step::Discard { .. } => Ok(0),
            Step::Sync => {
                if self.options.obeys_flush {
                    let sectors: Vec<u64> = self.sectors.keys().copied().collect();
                    for sector in sectors {
                        self.bring_to_file(sector, running.moment)?;
                    }
                    self.file.sync_data()?;
                }
                Ok(0)
            }
        }
    }

    fn read(&self, sector: u64) -> io::Result<[u8; SECTOR_BYTES]> {
        if let Some(newest) = self.sectors.get(&sector).and_then(|versions| versions.last()) {
            return Ok(newest.bytes);
        }
        let mut bytes = [0; SECTOR_BYTES];
        self.file.read_exact_at(&mut bytes, sector * SECTOR)?;
        Ok(bytes)
    }

    fn ended_write(&mut self, at: u64, bytes: u64, write: u64, now: u64) {
        for (_, versions) in self.sectors.range_mut(at / SECTOR..(at + bytes) / SECTOR) {
            for version in versions.iter_mut().filter(|version| version.write == write) {
                version.ended = Some(now);
            }
        }
    }

    /// Brings the newest version that ended before a moment to the file.
    fn bring_to_file(&mut self, sector: u64, moment: u64) -> io::Result<()> {
        let Some(versions) = self.sectors.get(&sector) else { return Ok(()) };
        let ended = |version: &Version| version.ended.is_some_and(|ended| ended <= moment);
        match versions.iter().rposition(ended) {
            Some(newest) => self.destage(sector, newest),
            None => Ok(()),
        }
    }

    /// Writes a version of a sector, and forgets the ones that it replaced.
    fn destage(&mut self, sector: u64, version: usize) -> io::Result<()> {
        let Some(versions) = self.sectors.get_mut(&sector) else { return Ok(()) };
        self.file.write_all_at(&versions[version].bytes, sector * SECTOR)?;
        versions.drain(..=version);
        if versions.is_empty() {
            self.sectors.remove(&sector);
        }
        Ok(())
    }

    /// Brings a sector to the file that nobody asked for, perhaps one of a write that has not ended.
    fn destage_any(&mut self) {
        let pick = self.below(self.sectors.len());
        let Some((&sector, versions)) = self.sectors.iter().nth(pick) else { return };
        let count = versions.len();
        let version = self.below(count);
        // A file that cannot be written says so with the next flush.
        let _ = self.destage(sector, version);
    }

    pub(super) fn completed(&mut self) -> Option<(u32, i32)> {
        let ended = self.ended.pop();
        if ended.is_none() && self.running.is_empty() {
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
        ended
    }

    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// A random number below another one (splitmix64).
    fn below(&mut self, limit: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        #[allow(clippy::cast_possible_truncation)] // below a usize
        let below = (mixed % limit.max(1) as u64) as usize;
        below
    }
}

#[cfg(test)]
mod tests {
    use cxl_pool::CreateOptions;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_readable(cache: &VolatileCache) -> bool {
        let event = cache.event();
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&event, PollFlags::IN)], Some(&now)).expect("polled") > 0
    }

    #[test]
    fn whoever_waits_for_the_event_hears_of_every_end() {
        let directory = tempfile::tempdir().expect("a directory");
        let options = CreateOptions { size_bytes: Some(16 << 20), ..CreateOptions::default() };
        let pool = Pool::create(&directory.path().join("pool"), &options).expect("a pool");
        let path = directory.path().join("ssd.img");
        let file = File::options().create_new(true).read(true).write(true).open(path).expect("a file");
        for seed in 0..20 {
            let file = file.try_clone().expect("the same file");
            let mut cache =
                VolatileCache::new(file, &pool, VolatileCacheOptions::new(seed)).expect("a cache");
            assert!(!is_readable(&cache));
            for id in 0..3 {
                cache.push(id, Step::Sync);
            }
            let mut ended = 0;
            while ended < 3 {
                assert!(is_readable(&cache), "seed {seed}: {ended} of 3 ended");
                cache.submit();
                assert!(is_readable(&cache), "seed {seed}: nobody has been told yet");
                while cache.completed().is_some() {
                    ended += 1;
                }
            }
            assert!(!is_readable(&cache), "seed {seed}: nothing is left");
        }
    }
}
