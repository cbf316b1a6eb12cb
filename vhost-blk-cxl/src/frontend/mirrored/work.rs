//! Requests of a mirrored disk on their way through its replicas.

use vhost_frontend::Buffer;

use super::super::unflushed::Mark;
use crate::message::{Holder, Request, Status, Tag};

/// Replicas of a volume, with one that it is moving to.
pub(in crate::frontend) const REPLICAS_MAX: usize = 4;

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The guest made it.
    Guest,
    /// Bringing a region of a replica in line with the source.
    Copy { target: usize, region: u64, stage: Stage, buffer: Buffer },
    /// Reading the log of intents that a predecessor left.
    LoadLog { buffer: Buffer },
    /// Writing the log of intents.
    WriteLog { version: u64, buffer: Buffer },
    /// A flush of all, after which marks in the log are not needed any more.
    Sweep,
    /// A flush that tells whether a replica still has what it had (before), or has what it got (after).
    Settle { target: usize },
}

/// How far a copy has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Waits for writes to the region that were under way; new ones wait for it.
    Draining,
    /// The source is read.
    Reading,
    /// The target is written.
    Writing,
}

/// What has become of a request at one replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leg {
    /// It does not go there.
    None,
    /// To be sent.
    Queued,
    /// With the backend, sent as this.
    Sent(Holder),
    /// Done.
    Done,
    /// It was not done.
    Failed(Status),
}

impl Leg {
    pub(super) fn is_open(self) -> bool {
        matches!(self, Self::Queued | Self::Sent(_))
    }
}

/// A request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Work {
    pub(super) request: Request,
    pub(super) purpose: Purpose,
    pub(super) legs: [Leg; REPLICAS_MAX],
    /// It waits for nothing but its replicas.
    pub(super) begun: bool,
    /// Of a read: the dead replica may still fill its buffer, so it needs another one.
    pub(super) needs_buffer: bool,
    /// Of a read: replicas that could not serve it.
    pub(super) tried: [bool; REPLICAS_MAX],
    /// Counts requests in the order in which they came.
    pub(super) sequence: u64,
    /// Of a flush: what it vouches for at each replica.
    pub(super) marks: [Mark; REPLICAS_MAX],
    /// Of a copy: both replicas may differ there once more.
    pub(super) spoiled: bool,
}

impl Work {
    pub(super) fn new(request: Request, purpose: Purpose, sequence: u64) -> Self {
        Self {
            request,
            purpose,
            legs: [Leg::None; REPLICAS_MAX],
            begun: false,
            needs_buffer: false,
            tried: [false; REPLICAS_MAX],
            sequence,
            marks: [Mark::default(); REPLICAS_MAX],
            spoiled: false,
        }
    }
}

impl Work {
    /// There is no replica at this place any more, and those behind it move up.
    fn close_gap(&mut self, at: usize) {
        fn close<T: Copy>(array: &mut [T; REPLICAS_MAX], at: usize, empty: T) {
            array.copy_within(at + 1.., at);
            array[REPLICAS_MAX - 1] = empty;
        }
        close(&mut self.legs, at, Leg::None);
        close(&mut self.tried, at, false);
        close(&mut self.marks, at, Mark::default());
        if let Purpose::Copy { target, .. } | Purpose::Settle { target } = &mut self.purpose
            && *target > at
        {
            *target -= 1;
        }
    }
}

/// All of them: those of the guest at the places of the disk's slots, then our own.
#[derive(Debug)]
pub(super) struct Works {
    all: Vec<Option<Work>>,
    own_from: u16,
    uses: u16,
    sequence: u64,
}

impl Works {
    pub(super) fn new(slots: u16, own: u16) -> Self {
        Self { all: vec![None; usize::from(slots + own)], own_from: slots, uses: 0, sequence: 0 }
    }

    /// Enters a request of the guest.
    pub(super) fn enter(&mut self, request: Request) -> Option<u16> {
        let index = index_of(request.tag).filter(|&index| index < self.own_from)?;
        debug_assert!(self.all[usize::from(index)].is_none(), "the disk has not been answered yet");
        self.sequence += 1;
        self.all[usize::from(index)] = Some(Work::new(request, Purpose::Guest, self.sequence));
        Some(index)
    }

    /// Enters one of our own, if there is a place.
    pub(super) fn enter_own(&mut self, mut request: Request, purpose: Purpose) -> Option<u16> {
        let free = |index: &u16| self.all[usize::from(*index)].is_none();
        let end = u16::try_from(self.all.len()).unwrap_or(u16::MAX);
        let index = (self.own_from..end).find(free)?;
        self.uses = self.uses.wrapping_add(1);
        request.tag = Tag::new(u32::from(self.uses) << 16 | u32::from(index));
        self.sequence += 1;
        self.all[usize::from(index)] = Some(Work::new(request, purpose, self.sequence));
        Some(index)
    }

    pub(super) fn get(&self, index: u16) -> Option<&Work> {
        self.all.get(usize::from(index))?.as_ref()
    }

    pub(super) fn get_mut(&mut self, index: u16) -> Option<&mut Work> {
        self.all.get_mut(usize::from(index))?.as_mut()
    }

    /// The one that bears this tag.
    pub(super) fn find(&self, tag: Tag) -> Option<u16> {
        let index = index_of(tag)?;
        (self.get(index)?.request.tag == tag).then_some(index)
    }

    pub(super) fn remove(&mut self, index: u16) -> Option<Work> {
        self.all.get_mut(usize::from(index))?.take()
    }

    pub(super) fn next_sequence(&self) -> u64 {
        self.sequence + 1
    }

    /// Goes on counting requests from there.
    pub(super) fn count_from(&mut self, sequence: u64) {
        self.sequence = self.sequence.max(sequence);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.iter().all(Option::is_none)
    }

    /// There is no replica at this place any more, and those behind it move up.
    pub(super) fn close_gap(&mut self, at: usize) {
        self.all.iter_mut().flatten().for_each(|work| work.close_gap(at));
    }

    /// All that there are, in the order in which they came.
    pub(super) fn in_order(&self) -> Vec<u16> {
        let mut found: Vec<(u64, u16)> = (0_u16..)
            .zip(&self.all)
            .filter_map(|(index, work)| work.as_ref().map(|work| (work.sequence, index)))
            .collect();
        found.sort_unstable();
        found.into_iter().map(|(_, index)| index).collect()
    }

    /// The number of the oldest one of which something holds.
    pub(super) fn oldest_where(&self, holds: impl Fn(&Work) -> bool) -> Option<u64> {
        self.all.iter().flatten().filter(|work| holds(work)).map(|work| work.sequence).min()
    }

    /// What has been copied so far of the regions that are on their way does not make replicas alike any more.
    pub(super) fn spoil_copies(&mut self) {
        for work in self.all.iter_mut().flatten() {
            let stage = if let Purpose::Copy { stage, .. } = work.purpose { Some(stage) } else { None };
            work.spoiled |= stage.is_some_and(|stage| stage != Stage::Draining);
        }
    }

    /// Our own that are under way.
    pub(super) fn own(&self) -> impl Iterator<Item = (u16, &Work)> {
        (0_u16..)
            .zip(&self.all)
            .skip(usize::from(self.own_from))
            .filter_map(|(index, work)| Some((index, work.as_ref()?)))
    }
}

fn index_of(tag: Tag) -> Option<u16> {
    u16::try_from(tag.get() & 0xffff).ok()
}
