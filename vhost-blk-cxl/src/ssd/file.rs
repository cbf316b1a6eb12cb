//! A file or block device as an SSD, through io_uring and past the page cache where the file allows it.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use cxl_pool::{Area, ByteOffset, Pool};
use tracing::{error, info, warn};

use super::discards::Way;
use super::medium::{Direction, Medium};
use super::open_file::{OpenFile, open};
use super::uring::{Engine, Step};
use super::verifier::{boot_verifier, note_loss, noted_verifier};
use super::volatile::VolatileCacheOptions;
use super::{Command, CommandId, Finished, Full, Geometry, OpenError, Outcome, Ssd};
use crate::message::Operation;
use crate::segments::{Segment, after};

/// Commands that the kernel works on at a time.
const DEPTH: u32 = 512;
/// Commands that wait for us to carry them out, on a file in memory. Nothing works on them meanwhile, so with more of them
/// they would wait here, one behind the other, and not where each volume has its turn.
const DEPTH_IN_MEMORY: u32 = 16;

/// How often the kernel may interrupt one step before it counts as failed.
const RETRIES_MAX: u32 = 100;

/// The longest single read or write; the kernel's own limit is a little below 2 GiB.
const MOVE_MAX: u32 = 1 << 30;

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// How a command is being carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// By moving bytes; this many are done.
    Move { done: u64 },
    /// By giving the range back to the file system. A block device makes zeros, if it can without writing them.
    Punch,
    /// By letting the file system mark the range as zeros. A block device makes them as it can, by writing them else: this is what
    /// BLKZEROOUT does there, only that io_uring has it done without us.
    Zero,
    /// By having a block device forget the range.
    Forget,
    /// By bringing everything to the medium.
    Sync,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    command: Command,
    stage: Stage,
    retries: u32,
}

/// What follows a step.
enum Next {
    Step(Stage),
    End(Outcome),
}

/// A file or block device.
pub struct FileSsd {
    name: String,
    medium: Medium,
    write_verifier: u64,
    geometry: Geometry,
    /// What is written lies in the kernel's cache before it is on the medium.
    cached: bool,
    /// By command id.
    slots: Vec<Option<Slot>>,
    /// The same: where the data of a command lies that has it in several places, else nothing.
    lists: Vec<Vec<Segment>>,
    in_flight: u32,
    depth: u32,
    /// Ended without the kernel.
    ended: VecDeque<Finished>,
    failure: Option<String>,
    /// It has turned out that it cannot make holes of zeros.
    writes_zeroes: bool,
    /// Where it is noted for whoever opens the device next that it lost writes.
    losses: Option<PathBuf>,
}

impl FileSsd {
    /// Opens and locks the file, which is created with `size_bytes` if it does not exist.
    pub fn open(name: &str, path: &Path, size_bytes: Option<u64>, pool: &Pool) -> Result<Self, OpenError> {
        Self::open_with(name, path, size_bytes, pool, None)
    }

    /// The same, with a write cache in between whose contents are lost with the process.
    pub fn open_volatile(
        name: &str,
        path: &Path,
        size_bytes: Option<u64>,
        pool: &Pool,
        cache: VolatileCacheOptions,
    ) -> Result<Self, OpenError> {
        warn!(ssd = name, "it loses what was not flushed when this process ends: for tests only");
        Self::open_with(name, path, size_bytes, pool, Some(cache))
    }

    fn open_with(
        name: &str,
        path: &Path,
        size_bytes: Option<u64>,
        pool: &Pool,
        cache: Option<VolatileCacheOptions>,
    ) -> Result<Self, OpenError> {
        let OpenFile { file, mut geometry, mut direct } = open(name, path, size_bytes)?;
        if cache.is_some() {
            // The cache writes single sectors, through the page cache.
            (geometry.block_bytes, direct) = (512, false);
        }
        let medium =
            Medium::new(name, file, direct, pool.clone(), DEPTH, cache).map_err(|source| OpenError::Io {
                ssd: name.to_owned(),
                what: "make an io_uring for",
                path: path.display().to_string(),
                source,
            })?;
        let write_verifier = medium.write_verifier().unwrap_or_else(boot_verifier);
        info!(ssd = name, path = %path.display(), bytes = geometry.size_bytes, block = geometry.block_bytes, direct, in_memory = medium.is_in_memory(), discards = ?medium.way_of_discards(), "opened");
        let depth = if medium.is_in_memory() { DEPTH_IN_MEMORY } else { DEPTH };
        Ok(Self {
            name: name.to_owned(),
            medium,
            write_verifier,
            geometry,
            cached: !direct,
            slots: Vec::new(),
            lists: Vec::new(),
            in_flight: 0,
            depth,
            ended: VecDeque::with_capacity(DEPTH as usize),
            failure: None,
            writes_zeroes: false,
            losses: None,
        })
    }

    /// Has the same device, opened again before the host is started anew, know by what is noted there that it was given up.
    #[must_use]
    pub fn noting_losses_in(mut self, path: PathBuf) -> Self {
        if self.medium.write_verifier().is_none() {
            self.write_verifier = noted_verifier(&path);
        }
        self.losses = Some(path);
        self
    }

    /// Where a command is entered.
    fn index(&mut self, id: CommandId) -> usize {
        let index = id.0 as usize;
        if index >= self.slots.len() {
            self.slots.resize(index + 1, None);
            self.lists.resize_with(index + 1, Vec::new);
        }
        index
    }

    fn begin(&mut self, slot: Slot) {
        let id = slot.command.id;
        let index = self.index(id);
        self.slots[index] = Some(slot);
        match slot.stage {
            Stage::Move { done } if !self.lists[index].is_empty() => {
                let Command { operation, offset_bytes, force_unit_access, .. } = slot.command;
                let direction = match operation {
                    Operation::Read => Direction::In,
                    _ => Direction::Out { force_unit_access },
                };
                self.medium.push_list(id.0, offset_bytes + done, direction, after(&self.lists[index], done));
            }
            _ => self.medium.push(id.0, step(&slot)),
        }
    }

    /// Whether there is room for another command. If the device failed, that is how it ends at once.
    fn accepts(&mut self, command: &Command) -> Result<bool, Full> {
        if self.in_flight >= self.depth || self.ended.len() >= DEPTH as usize {
            return Err(Full);
        }
        if self.failure.is_some() {
            self.ended.push_back(Finished { id: command.id, outcome: Outcome::Failed });
            return Ok(false);
        }
        self.in_flight += 1;
        Ok(true)
    }

    fn ended(&mut self, id: u32, result: i32) -> Option<Finished> {
        // The kernel gives back only what it was given.
        let mut slot = self.slots.get_mut(id as usize)?.take()?;
        let next = if result == -libc::EINTR || result == -libc::EAGAIN {
            slot.retries += 1;
            if slot.retries > RETRIES_MAX { Next::End(Outcome::Failed) } else { Next::Step(slot.stage) }
        } else {
            follow(&slot, result, u64::from(self.geometry.block_bytes))
        };
        match next {
            Next::Step(stage) => {
                // It is not what somebody else keeps it from for now.
                let is_unable = stage == Stage::Zero && result == -libc::EOPNOTSUPP;
                self.writes_zeroes |= is_unable && slot.stage == Stage::Punch;
                slot.stage = stage;
                self.begin(slot);
                None
            }
            Next::End(outcome) => {
                self.in_flight -= 1;
                self.lists[id as usize].clear();
                if outcome == Outcome::Failed {
                    self.failed(&slot, result);
                }
                Some(Finished { id: CommandId(id), outcome })
            }
        }
    }

    fn failed(&mut self, slot: &Slot, result: i32) {
        let reason = std::io::Error::from_raw_os_error(-result);
        let command = &slot.command;
        let writes_through = self.cached && command.operation.writes() && command.force_unit_access;
        if (slot.stage == Stage::Sync || writes_through) && self.failure.is_none() {
            // After a failed fsync the kernel forgets which pages it could not write: a later one that succeeds says
            // nothing about them, so nothing may be acknowledged any more. A write through the kernel's cache has such an fsync in
            // it, which may tell of what others wrote.
            error!(ssd = self.name, %reason, "a flush failed: the device is given up");
            self.failure = Some(format!("a flush failed: {reason}"));
            self.note_loss();
        } else {
            // The guest learns of each; the log of the first.
            tracing::debug!(ssd = self.name, %reason, command = ?slot.command, "a command failed");
        }
    }
}

impl FileSsd {
    /// The device may be opened again, by another process, which is not to vouch for what is gone.
    fn note_loss(&self) {
        let Some(path) = &self.losses else { return };
        if let Err(error) = note_loss(path) {
            error!(ssd = self.name, path = %path.display(), %error, "it cannot be noted that a flush failed: restart the \
                host before this device is used again, or guests do not hear of what it lost");
        }
    }
}

impl Ssd for FileSsd {
    fn driver(&self) -> &'static str {
        "file"
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn writes_zeroes(&self) -> bool {
        self.writes_zeroes
    }

    fn discard_granularity_bytes(&self) -> Option<u32> {
        self.medium.way_of_discards().granularity_bytes()
    }

    fn submit(&mut self, command: Command) -> Result<(), Full> {
        if !self.accepts(&command)? {
            return Ok(());
        }
        let stage = match command.operation {
            Operation::Read | Operation::Write => Stage::Move { done: 0 },
            Operation::Flush => Stage::Sync,
            Operation::Discard => match self.medium.way_of_discards() {
                Way::Holes { .. } => Stage::Punch,
                Way::Forgets { .. } => Stage::Forget,
                Way::Nothing => {
                    self.in_flight -= 1;
                    self.ended.push_back(Finished { id: command.id, outcome: Outcome::Done });
                    return Ok(());
                }
            },
            Operation::WriteZeroes if command.may_unmap => Stage::Punch,
            Operation::WriteZeroes => Stage::Zero,
        };
        self.begin(Slot { command, stage, retries: 0 });
        Ok(())
    }

    fn submit_list(&mut self, command: Command, segments: &[Segment]) -> Result<(), Full> {
        if self.accepts(&command)? {
            let index = self.index(command.id);
            self.lists[index].extend_from_slice(segments);
            self.begin(Slot { command, stage: Stage::Move { done: 0 }, retries: 0 });
        }
        Ok(())
    }

    fn set_areas(&mut self, areas: &[Area]) {
        self.medium.set_areas(areas);
    }

    fn kick(&mut self) {
        self.medium.submit();
    }

    fn reap(&mut self, into: &mut Vec<Finished>) {
        into.extend(self.ended.drain(..));
        while let Some((id, result)) = self.medium.completed() {
            into.extend(self.ended(id, result));
        }
        // The next steps of commands that have several.
        self.medium.submit();
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        // What the kernel did not take yet ends without an event: someone must come by and kick again.
        self.medium.event()
    }

    fn reads_past_cache(&self, length_bytes: u64) -> bool {
        self.medium.reads_past_cache(length_bytes)
    }

    fn write_verifier(&self) -> u64 {
        self.write_verifier
    }

    fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }
}

/// What the kernel shall do next for a command.
fn step(slot: &Slot) -> Step {
    let Command { offset_bytes, length_bytes, force_unit_access, .. } = slot.command;
    match slot.stage {
        Stage::Punch => Step::Allocate { at: offset_bytes, bytes: length_bytes, mode: PUNCH },
        Stage::Zero => Step::Allocate { at: offset_bytes, bytes: length_bytes, mode: ZERO },
        Stage::Forget => Step::Discard { at: offset_bytes, bytes: length_bytes },
        Stage::Sync => Step::Sync,
        Stage::Move { done } => {
            let at = offset_bytes + done;
            let data = ByteOffset::new(slot.command.data.get() + done);
            let left = length_bytes - done;
            match slot.command.operation {
                Operation::Read => Step::Read { at, bytes: at_most(left, MOVE_MAX), data },
                Operation::Write => {
                    Step::Write { at, bytes: at_most(left, MOVE_MAX), data, force_unit_access }
                }
                _ => Step::WriteZeros { at, bytes: at_most(left, Engine::ZEROS_MAX), force_unit_access },
            }
        }
    }
}

#[allow(clippy::cast_possible_truncation)] // a minimum of something and a u32
fn at_most(bytes: u64, most: u32) -> u32 {
    bytes.min(u64::from(most)) as u32
}

/// What follows a step that ended with `result`, on a device with blocks of `block` bytes.
fn follow(slot: &Slot, result: i32, block: u64) -> Next {
    // Busy is a block device of which somebody else claims the page cache, which would have to be emptied.
    let unsupported =
        matches!(-result, libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV | libc::EBUSY);
    match slot.stage {
        Stage::Move { done } => match u64::try_from(result) {
            Ok(moved) if done + moved >= slot.command.length_bytes => Next::End(Outcome::Done),
            // Less than a block: the file ends before the device does.
            Ok(moved) if moved >= block => Next::Step(Stage::Move { done: done + moved - moved % block }),
            Err(_) | Ok(_) => Next::End(Outcome::Failed),
        },
        // Discarding is advice: a file system without holes need not follow it, nor a device that refuses it after all.
        Stage::Punch if unsupported && slot.command.operation == Operation::Discard => {
            Next::End(Outcome::Done)
        }
        Stage::Forget if unsupported || matches!(-result, libc::ENOTTY | libc::EREMOTEIO) => {
            Next::End(Outcome::Done)
        }
        // Some file systems know zeroed ranges but no holes, as some devices do.
        Stage::Punch if unsupported => Next::Step(Stage::Zero),
        // And others holes but no zeroed ranges. A hole reads as zeros as well, but whoever asks for zeros
        // without unmapping wants the space to stay.
        Stage::Zero if unsupported => Next::Step(Stage::Move { done: 0 }),
        Stage::Punch | Stage::Zero | Stage::Forget | Stage::Sync if result < 0 => Next::End(Outcome::Failed),
        Stage::Punch | Stage::Zero | Stage::Forget if slot.command.force_unit_access => {
            Next::Step(Stage::Sync)
        }
        Stage::Punch | Stage::Zero | Stage::Forget | Stage::Sync => Next::End(Outcome::Done),
    }
}

#[cfg(test)]
mod tests;
