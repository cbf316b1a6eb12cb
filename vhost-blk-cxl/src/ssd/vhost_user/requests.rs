//! From commands to virtio-blk requests and back: a command may take several.

use cxl_pool::ByteOffset;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};

use crate::message::Operation;
use crate::segments::{Segment, after};
use crate::ssd::{Command, Finished, Full, Outcome};

/// Commands that the target has at a time: each takes three descriptors of the ring.
pub(super) const DEPTH: u16 = 80;
/// What zeros are written from where the target cannot write zeroes by itself.
pub(super) const ZEROS_BYTES: u32 = 64 << 10;
/// The longest single read or write.
const MOVE_MAX: u64 = 1 << 30;
const SECTOR_BYTES: u64 = 512;

/// What the target can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Abilities {
    /// It has a cache that it can be told to flush.
    pub(super) flush: bool,
    /// Sectors of one discard; none if it knows none.
    pub(super) discard_sectors_max: u32,
    /// What a discard has to be a multiple of to have an effect, if it says so.
    pub(super) discard_granularity_bytes: Option<u32>,
    /// Sectors of one write of zeroes.
    pub(super) zeroes_sectors_max: u32,
    /// Places of one read or write, at least one.
    pub(super) segments_max: u16,
}

/// What belongs to a request beside header and status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Nothing,
    /// A buffer in the pool.
    Pool {
        at: ByteOffset,
        bytes: u32,
        writable: bool,
    },
    /// So many segments of the command's list, after the first `done` bytes of it.
    List {
        done: u64,
        segments: u16,
        writable: bool,
    },
    /// The range of a discard or of a write of zeroes.
    Range {
        sector: u64,
        sectors: u32,
        unmap: bool,
    },
    /// So many zeros.
    Zeros {
        bytes: u32,
    },
}

/// A request as it goes to the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Outgoing {
    pub(super) slot: u16,
    pub(super) kind: u32,
    pub(super) sector: u64,
    pub(super) part: Part,
}

/// How far a command is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Move { done: u64 },
    Range { done: u64 },
    Zeros { done: u64 },
    Sync,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    command: Command,
    stage: Stage,
    /// A flush failed since it began.
    again: bool,
}

impl Slot {
    const fn new(command: Command, stage: Stage) -> Self {
        Self { command, stage, again: false }
    }
}

/// All commands that the target works on.
#[derive(Debug)]
pub(super) struct Requests {
    abilities: Abilities,
    slots: Vec<Option<Slot>>,
    /// By slot: where the data of a command lies that has it in several places, else nothing.
    lists: Vec<Vec<Segment>>,
    free: Vec<u16>,
    flush_failed: bool,
}

impl Requests {
    /// What a discard has to be a multiple of to have an effect, as the target says now.
    pub(super) const fn discard_granularity_bytes(&self) -> Option<u32> {
        self.abilities.discard_granularity_bytes
    }

    /// Whether zeros are written as data is, since the target cannot make them.
    pub(super) const fn writes_zeroes(&self) -> bool {
        self.abilities.zeroes_sectors_max == 0
    }

    pub(super) fn new(abilities: Abilities) -> Self {
        let lists = vec![Vec::new(); DEPTH.into()];
        let free = (0..DEPTH).rev().collect();
        Self { abilities, slots: vec![None; DEPTH.into()], lists, free, flush_failed: false }
    }

    /// The places of a command's data, if there are several.
    pub(super) fn list(&self, slot: u16) -> &[Segment] {
        self.lists.get(usize::from(slot)).map_or(&[], Vec::as_slice)
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.free.len() == usize::from(DEPTH)
    }

    /// What a command begins with, if there is anything to ask for.
    fn first_stage(&self, operation: Operation) -> Option<Stage> {
        Some(match operation {
            Operation::Read | Operation::Write => Stage::Move { done: 0 },
            Operation::Flush if !self.abilities.flush => return None,
            Operation::Flush => Stage::Sync,
            // Discarding is advice.
            Operation::Discard if self.abilities.discard_sectors_max == 0 => return None,
            Operation::WriteZeroes if self.abilities.zeroes_sectors_max == 0 => Stage::Zeros { done: 0 },
            Operation::Discard | Operation::WriteZeroes => Stage::Range { done: 0 },
        })
    }

    /// Accepts a command: its first request, or none if there is nothing to ask for.
    pub(super) fn begin(&mut self, command: Command) -> Result<Option<Outgoing>, Full> {
        let Some(stage) = self.first_stage(command.operation) else { return Ok(None) };
        let slot = self.free.pop().ok_or(Full)?;
        self.slots[usize::from(slot)] = Some(Slot::new(command, stage));
        Ok(self.outgoing(slot))
    }

    /// Accepts a read or write whose data lies in several places.
    pub(super) fn begin_list(
        &mut self,
        command: Command,
        segments: &[Segment],
    ) -> Result<Option<Outgoing>, Full> {
        let slot = *self.free.last().ok_or(Full)?;
        self.lists[usize::from(slot)].extend_from_slice(segments);
        self.begin(command)
    }

    /// Whether a flush failed since this was asked last, of a command of its own or after a write that is not to end in a cache. What the
    /// target has in hand then it has to do once more.
    pub(super) const fn take_failed_flush(&mut self) -> bool {
        std::mem::replace(&mut self.flush_failed, false)
    }

    /// A target that could not write something may say so once, to whoever flushes first, and forget it. That may be what it was writing
    /// for others, which it has yet to answer; and what else it flushes is no sign that nothing is lost.
    fn doubt_all(&mut self) {
        self.flush_failed = true;
        for entry in self.slots.iter_mut().flatten() {
            entry.again = entry.command.operation != Operation::Read;
        }
    }

    /// The target answered: the next request of the same command, or how it ended. Neither for a slot that it does not
    /// have.
    pub(super) fn answered(&mut self, slot: u16, status: u8) -> (Option<Outgoing>, Option<Finished>) {
        let Some(&Some(entry)) = self.slots.get(usize::from(slot)) else { return (None, None) };
        let (command, left) = (entry.command, left(&entry));
        let step = step(&entry, &self.lists[usize::from(slot)], self.abilities);
        let unsupported = u32::from(status) == VIRTIO_BLK_S_UNSUPP;
        let next = match entry.stage {
            Stage::Range { .. } if unsupported && command.operation == Operation::Discard => {
                Err(Outcome::Done)
            }
            Stage::Range { done } if unsupported => Ok(Stage::Zeros { done }),
            _ if u32::from(status) != VIRTIO_BLK_S_OK => Err(Outcome::Failed),
            Stage::Sync => Err(Outcome::Done),
            Stage::Move { .. } | Stage::Range { .. } | Stage::Zeros { .. } if step >= left => {
                if command.force_unit_access && self.abilities.flush {
                    Ok(Stage::Sync)
                } else {
                    Err(Outcome::Done)
                }
            }
            Stage::Move { done } => Ok(Stage::Move { done: done + step }),
            Stage::Range { done } => Ok(Stage::Range { done: done + step }),
            Stage::Zeros { done } => Ok(Stage::Zeros { done: done + step }),
        };
        let failed = next == Err(Outcome::Failed);
        let next = match self.first_stage(command.operation) {
            Some(first) if entry.again && !failed => Ok(first),
            _ => next,
        };
        match next {
            Ok(stage) => {
                self.slots[usize::from(slot)] = Some(Slot::new(command, stage));
                (self.outgoing(slot), None)
            }
            Err(outcome) => {
                self.slots[usize::from(slot)] = None;
                self.lists[usize::from(slot)].clear();
                self.free.push(slot);
                if failed && entry.stage == Stage::Sync {
                    self.doubt_all();
                }
                (None, Some(Finished { id: command.id, outcome }))
            }
        }
    }

    /// Another target has to do all of it, each command from its beginning: what the one before had done of it and not flushed may be
    /// lost. Returns the requests; what there is nothing to ask for is done.
    pub(super) fn begin_anew(&mut self, abilities: Abilities, into: &mut Vec<Finished>) -> Vec<Outgoing> {
        self.abilities = abilities;
        let mut again = Vec::new();
        for slot in 0..DEPTH {
            let Some(command) = self.slots[usize::from(slot)].map(|entry| entry.command) else { continue };
            let stage = self.first_stage(command.operation);
            self.slots[usize::from(slot)] = stage.map(|stage| Slot::new(command, stage));
            if stage.is_none() {
                self.lists[usize::from(slot)].clear();
                self.free.push(slot);
                into.push(Finished { id: command.id, outcome: Outcome::Done });
            }
            again.extend(self.outgoing(slot));
        }
        again
    }

    /// The target is gone: everything fails.
    pub(super) fn fail_all(&mut self, into: &mut Vec<Finished>) {
        self.lists.iter_mut().for_each(Vec::clear);
        for (slot, entry) in (0..DEPTH).zip(&mut self.slots) {
            if let Some(entry) = entry.take() {
                into.push(Finished { id: entry.command.id, outcome: Outcome::Failed });
                self.free.push(slot);
            }
        }
    }

    fn outgoing(&self, slot: u16) -> Option<Outgoing> {
        let entry = self.slots[usize::from(slot)].as_ref()?;
        let Command { operation, offset_bytes, data, may_unmap, .. } = entry.command;
        let list = self.list(slot);
        let bytes = step(entry, list, self.abilities);
        // A step is at most MOVE_MAX long, and ranges are counted in sectors.
        let short = u32::try_from(bytes).unwrap_or(u32::MAX);
        let (kind, done, part) = match entry.stage {
            Stage::Sync => (VIRTIO_BLK_T_FLUSH, 0, Part::Nothing),
            Stage::Move { done } => {
                let writable = operation == Operation::Read;
                let part = if list.is_empty() {
                    Part::Pool { at: data.saturating_add(done), bytes: short, writable }
                } else {
                    let segments = after(list, done).take(self.abilities.segments_max.into()).count();
                    // No more than one request may have.
                    let segments = u16::try_from(segments).unwrap_or(u16::MAX);
                    Part::List { done, segments, writable }
                };
                (if writable { VIRTIO_BLK_T_IN } else { VIRTIO_BLK_T_OUT }, done, part)
            }
            Stage::Zeros { done } => (VIRTIO_BLK_T_OUT, done, Part::Zeros { bytes: short }),
            Stage::Range { done } => {
                let discard = operation == Operation::Discard;
                let sectors = u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX);
                let sector = (offset_bytes + done) / SECTOR_BYTES;
                let part = Part::Range { sector, sectors, unmap: may_unmap && !discard };
                (if discard { VIRTIO_BLK_T_DISCARD } else { VIRTIO_BLK_T_WRITE_ZEROES }, 0, part)
            }
        };
        let has_place = matches!(part, Part::Pool { .. } | Part::List { .. } | Part::Zeros { .. });
        let sector = if has_place { (offset_bytes + done) / SECTOR_BYTES } else { 0 };
        Some(Outgoing { slot, kind, sector, part })
    }
}

fn left(entry: &Slot) -> u64 {
    let done = match entry.stage {
        Stage::Move { done } | Stage::Range { done } | Stage::Zeros { done } => done,
        Stage::Sync => 0,
    };
    entry.command.length_bytes - done
}

/// How many bytes the next request of a command is about, whose data lies in these places if there are several.
fn step(entry: &Slot, list: &[Segment], abilities: Abilities) -> u64 {
    let sectors = |max: u32| u64::from(max) * SECTOR_BYTES;
    let most = match entry.stage {
        Stage::Move { done } if !list.is_empty() => after(list, done)
            .take(abilities.segments_max.into())
            .map(|segment| u64::from(segment.bytes))
            .sum(),
        Stage::Move { .. } => MOVE_MAX,
        Stage::Zeros { .. } => ZEROS_BYTES.into(),
        Stage::Range { .. } if entry.command.operation == Operation::Discard => {
            sectors(abilities.discard_sectors_max)
        }
        Stage::Range { .. } => sectors(abilities.zeroes_sectors_max),
        Stage::Sync => 0,
    };
    left(entry).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ssd::CommandId;

    const ABLE: Abilities = Abilities {
        flush: true,
        discard_sectors_max: 16,
        discard_granularity_bytes: None,
        zeroes_sectors_max: 16,
        segments_max: 2,
    };
    const OK: u8 = 0;
    const IOERR: u8 = 1;
    const UNSUPP: u8 = 2;

    fn command(operation: Operation, length_bytes: u64, force_unit_access: bool) -> Command {
        let (id, data) = (CommandId(7), ByteOffset::new(4096));
        Command { id, operation, force_unit_access, may_unmap: true, offset_bytes: 1024, length_bytes, data }
    }

    /// Answers every request with what is said for it, and returns what was asked for and how it ended.
    fn run(abilities: Abilities, command: Command, statuses: &[u8]) -> (Vec<(u32, u64, Part)>, Outcome) {
        let mut requests = Requests::new(abilities);
        let mut asked = Vec::new();
        let Some(mut out) = requests.begin(command).unwrap() else { return (asked, Outcome::Done) };
        for &status in statuses {
            asked.push((out.kind, out.sector, out.part));
            match requests.answered(out.slot, status) {
                (Some(next), None) => out = next,
                (None, Some(finished)) => {
                    assert_eq!(finished.id, command.id);
                    assert!(requests.is_empty());
                    return (asked, finished.outcome);
                }
                other => panic!("{other:?}"),
            }
        }
        panic!("it wants more after {asked:?}");
    }

    #[test]
    fn a_write_through_the_cache_is_flushed() {
        let (asked, outcome) = run(ABLE, command(Operation::Write, 8192, true), &[OK, OK]);
        let data = Part::Pool { at: ByteOffset::new(4096), bytes: 8192, writable: false };
        assert_eq!(asked, [(VIRTIO_BLK_T_OUT, 2, data), (VIRTIO_BLK_T_FLUSH, 0, Part::Nothing)]);
        assert_eq!(outcome, Outcome::Done);
        assert_eq!(run(ABLE, command(Operation::Write, 8192, true), &[OK, IOERR]).1, Outcome::Failed);
        let simple = Abilities { flush: false, ..ABLE };
        assert_eq!(run(simple, command(Operation::Write, 8192, true), &[OK]).0.len(), 1);
        assert_eq!(run(simple, command(Operation::Flush, 0, false), &[]), (Vec::new(), Outcome::Done));
    }

    #[test]
    fn ranges_are_cut_to_what_the_target_takes() {
        let (asked, outcome) = run(ABLE, command(Operation::WriteZeroes, 20 * 512, false), &[OK, OK]);
        let range =
            |sector, sectors| (VIRTIO_BLK_T_WRITE_ZEROES, 0, Part::Range { sector, sectors, unmap: true });
        assert_eq!(asked, [range(2, 16), range(18, 4)]);
        assert_eq!(outcome, Outcome::Done);
        let (asked, _) = run(ABLE, command(Operation::Discard, 512, false), &[OK]);
        assert_eq!(asked, [(VIRTIO_BLK_T_DISCARD, 0, Part::Range { sector: 2, sectors: 1, unmap: false })]);
    }

    #[test]
    fn what_the_target_cannot_do_is_done_otherwise() {
        let zeroes = command(Operation::WriteZeroes, 3 * 64 * 1024, false);
        let unable = Abilities { discard_sectors_max: 0, zeroes_sectors_max: 0, ..ABLE };
        assert!(Requests::new(unable).writes_zeroes() && !Requests::new(ABLE).writes_zeroes());
        let (asked, outcome) = run(unable, zeroes, &[OK, OK, OK]);
        let written: Vec<u64> = asked
            .iter()
            .map(|(kind, sector, part)| {
                assert_eq!((*kind, *part), (VIRTIO_BLK_T_OUT, Part::Zeros { bytes: ZEROS_BYTES }));
                *sector
            })
            .collect();
        assert_eq!((written, outcome), (vec![2, 130, 258], Outcome::Done));
        let (asked, outcome) = run(ABLE, zeroes, &[OK, UNSUPP, OK, OK, OK]);
        assert_eq!((asked[2].1, outcome), (2 + 16, Outcome::Done), "it goes on where it was");
        assert_eq!(run(unable, command(Operation::Discard, 512, false), &[]).1, Outcome::Done);
        assert_eq!(run(ABLE, command(Operation::Discard, 512, false), &[UNSUPP]).1, Outcome::Done);
        assert_eq!(run(ABLE, command(Operation::Read, 512, false), &[UNSUPP]).1, Outcome::Failed);
    }

    #[test]
    fn a_list_goes_in_as_many_requests_as_the_target_needs() {
        let list: Vec<Segment> =
            (0..5).map(|index| Segment { start: ByteOffset::new(8192 * index), bytes: 512 }).collect();
        let mut requests = Requests::new(ABLE);
        let mut out = requests.begin_list(command(Operation::Read, 5 * 512, true), &list).unwrap().unwrap();
        let mut asked = Vec::new();
        let outcome = loop {
            asked.push((out.kind, out.sector, out.part));
            match requests.answered(out.slot, OK) {
                (Some(next), None) => out = next,
                (_, finished) => break finished.unwrap().outcome,
            }
        };
        let part = |done, segments| Part::List { done, segments, writable: true };
        let moved = |sector, done, segments| (VIRTIO_BLK_T_IN, sector, part(done, segments));
        let flushed = (VIRTIO_BLK_T_FLUSH, 0, Part::Nothing);
        assert_eq!(asked, [moved(2, 0, 2), moved(4, 1024, 2), moved(6, 2048, 1), flushed]);
        assert_eq!(outcome, Outcome::Done);
        // Whoever comes next has no list.
        let next = requests.begin(command(Operation::Read, 512, false)).unwrap().unwrap();
        assert!(matches!(next.part, Part::Pool { bytes: 512, .. }) && requests.list(next.slot).is_empty());
    }

    #[test]
    fn answers_to_nothing_are_ignored_and_no_more_is_begun_than_fits() {
        let mut requests = Requests::new(ABLE);
        assert_eq!(requests.answered(3, OK), (None, None));
        assert_eq!(requests.answered(60_000, OK), (None, None));
        for _ in 0..DEPTH {
            assert!(requests.begin(command(Operation::Read, 512, false)).unwrap().is_some());
        }
        assert_eq!(requests.begin(command(Operation::Read, 512, false)), Err(Full));
        let mut finished = Vec::new();
        requests.fail_all(&mut finished);
        assert_eq!(finished.len(), usize::from(DEPTH));
        assert!(requests.is_empty() && finished.iter().all(|it| it.outcome == Outcome::Failed));
    }

    #[test]
    fn what_is_under_way_when_a_flush_fails_is_done_once_more() {
        let mut requests = Requests::new(ABLE);
        let write = |through| command(Operation::Write, 8192, through);
        let commands = [
            command(Operation::Flush, 0, false),
            command(Operation::Flush, 0, false),
            write(false),
            write(true),
            command(Operation::WriteZeroes, 20 * 512, false),
            command(Operation::Read, 8192, false),
        ];
        let begun = commands.map(|it| requests.begin(it).unwrap().unwrap());
        let [failing, flush, plain, through, zeroes, read] = begun;
        // One is at its flush, and one has had a part of its range.
        assert_eq!(requests.answered(through.slot, OK).0.unwrap().kind, VIRTIO_BLK_T_FLUSH);
        assert!(requests.answered(zeroes.slot, OK).0.is_some());
        assert!(!requests.take_failed_flush());
        assert_eq!(requests.answered(failing.slot, IOERR).1.unwrap().outcome, Outcome::Failed);
        assert!(requests.take_failed_flush() && !requests.take_failed_flush());
        for again in [flush, plain, through, zeroes] {
            assert_eq!(requests.answered(again.slot, OK), (Some(again), None), "from its beginning");
        }
        assert_eq!(requests.answered(read.slot, OK).1.unwrap().outcome, Outcome::Done);
        for once in [flush, plain] {
            assert_eq!(requests.answered(once.slot, OK).1.unwrap().outcome, Outcome::Done);
        }
        assert_eq!(requests.answered(zeroes.slot, IOERR).1.unwrap().outcome, Outcome::Failed);
        assert!(!requests.take_failed_flush(), "it was no flush");
        // A write that is not to end in a cache is flushed, which may fail too.
        assert!(requests.answered(through.slot, OK).0.is_some());
        assert_eq!(requests.answered(through.slot, IOERR).1.unwrap().outcome, Outcome::Failed);
        assert!(requests.take_failed_flush() && requests.is_empty());
    }
}
