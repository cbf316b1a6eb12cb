//! A disk whose volume lies on several devices, unit by unit in turn: what one of them cannot do, several can together.
//!
//! The [`Disk`] serves the guest as any other disk does. What it would send to its one backend comes here instead, is cut into
//! parts, each for one column, and answered when all of them are done. Nothing is kept twice: when a column fails, so does the
//! disk.

mod columns;
mod layout;
mod parts;

use std::collections::VecDeque;

use cxl_pool::{LineCount, Memory};
use pod_protocol::ids::ChannelId;
use pod_protocol::objects::{DiskObject, Route};
use tracing::warn;

use self::layout::{Layout, Piece};
use self::parts::{Job, Leg, Part, Parts};
use super::disk::{Disk, REQUESTS_MAX};
use super::guest_side::GuestSide;
use super::slots::State;
use super::unflushed::{Mark, Unflushed};
use crate::message::{Completion, Holder, Operation, Request, Status, Tag, Words};

/// A device that the volume lies on.
struct Column {
    route: Route,
    /// Its channel can be used.
    ready: bool,
    /// Its backend refused the lease's current generation: wait until the controller says something new.
    refused: bool,
    /// What is to be sent to it.
    queue: VecDeque<u16>,
    /// How many parts it has.
    sent: u32,
    unflushed: Unflushed,
}

/// A striped disk. All of it belongs to the worker.
pub(crate) struct StripedDisk<M: Memory> {
    pub(crate) disk: Disk<M>,
    layout: Layout,
    columns: Vec<Column>,
    jobs: Vec<Option<Job>>,
    parts: Parts,
    /// Requests that have yet to be cut.
    waiting: VecDeque<u16>,
    /// Counts requests.
    sequence: u64,
    guest: GuestSide,
    /// Something was queued.
    stirred: bool,
}

impl<M: Memory> StripedDisk<M> {
    pub(crate) fn new(disk: Disk<M>, unit_bytes: u64) -> Self {
        let routes = columns::routes(disk.object());
        let column = |route| Column {
            route,
            ready: false,
            refused: false,
            queue: VecDeque::new(),
            sent: 0,
            unflushed: Unflushed::default(),
        };
        Self {
            layout: Layout::new(routes.len(), unit_bytes),
            columns: routes.into_iter().map(column).collect(),
            disk,
            jobs: vec![None; REQUESTS_MAX.into()],
            parts: Parts::new(),
            waiting: VecDeque::with_capacity(REQUESTS_MAX.into()),
            sequence: 0,
            guest: GuestSide::new(),
            stirred: false,
        }
    }

    /// Takes requests from the guest. True if anything moved.
    pub(crate) fn take(&mut self) -> bool {
        if !self.disk.object().failed && !self.columns.iter().any(|column| column.ready) {
            return self.disk.submit_without_channel();
        }
        let Self { disk, guest, jobs, waiting, sequence, .. } = self;
        let moved = guest.take(disk, |request| {
            let Ok(index) = u16::try_from(request.tag.get() & 0xffff) else { return };
            *sequence += 1;
            if let Some(job) = jobs.get_mut(usize::from(index)) {
                debug_assert!(job.is_none(), "the disk has not been answered yet");
                *job = Some(Job { request, open: 0, status: Status::Ok, sequence: *sequence });
                waiting.push_back(index);
            }
        });
        self.cut_waiting();
        moved
    }

    /// Cuts what waits, in order, as far as there is room.
    fn cut_waiting(&mut self) {
        while let Some(&index) = self.waiting.front() {
            if !self.cut(index) {
                return;
            }
            self.waiting.pop_front();
        }
    }

    fn cut(&mut self, index: u16) -> bool {
        let Some(Some(job)) = self.jobs.get(usize::from(index)) else { return true };
        let request = job.request;
        let (offset, length) = (request.offset_bytes, request.length_bytes);
        let needed = match request.operation {
            Operation::Read | Operation::Write => self.layout.count(offset, length),
            Operation::Flush | Operation::Discard | Operation::WriteZeroes => self.columns.len(),
        };
        if self.parts.room() < needed {
            return false;
        }
        match request.operation {
            Operation::Read | Operation::Write => {
                self.layout.pieces(offset, length).for_each(|piece| self.add(index, &request, piece));
            }
            Operation::Discard | Operation::WriteZeroes => {
                self.layout.ranges(offset, length).for_each(|piece| self.add(index, &request, piece));
            }
            Operation::Flush => {
                for column in 0..self.columns.len() {
                    self.add(
                        index,
                        &request,
                        Piece { column, offset_bytes: 0, length_bytes: 0, data_bytes: 0 },
                    );
                }
            }
        }
        true
    }

    fn add(&mut self, job: u16, whole: &Request, piece: Piece) {
        // Pieces are whole sectors, and so whole lines.
        let data = if whole.operation.has_data() {
            whole.data.saturating_add(LineCount::covering(piece.data_bytes))
        } else {
            whole.data
        };
        let (offset_bytes, length_bytes) = (piece.offset_bytes, piece.length_bytes);
        let request = Request { tag: Tag::new(0), offset_bytes, length_bytes, data, ..*whole };
        let column = &mut self.columns[piece.column];
        let mark =
            if whole.operation == Operation::Flush { column.unflushed.mark() } else { Mark::default() };
        let part = Part { request, job, column: piece.column, leg: Leg::Queued, serial: 0, mark };
        if let (Some(part), Some(Some(job))) = (self.parts.enter(part), self.jobs.get_mut(usize::from(job))) {
            column.queue.push_back(part);
            job.open += 1;
            self.stirred = true;
        }
    }

    /// Sends what goes over a channel, so many messages at most. Returns how many.
    pub(crate) fn send(&mut self, channel: ChannelId, room: u32, outbox: &mut Vec<Words>) -> u32 {
        let Some(at) = self.column_on(channel) else { return 0 };
        let lease = self.disk.object().lease;
        let column = &mut self.columns[at];
        let mut sent = 0;
        while sent < room && column.ready && !column.refused {
            let Some(index) = column.queue.pop_front() else { break };
            let Some(part) = self.parts.get_mut(index) else { continue };
            let generation = column.route.generation;
            part.leg = Leg::Sent(generation);
            outbox.push(Request { holder: Holder { lease, generation }, ..part.request }.encode());
            column.sent += 1;
            sent += 1;
        }
        sent
    }

    /// An answer arrived.
    pub(crate) fn complete(&mut self, channel: ChannelId, completion: &Completion) {
        let generation = completion.holder.generation;
        let found = self.parts.find(completion.tag).and_then(|index| {
            let part = *self.parts.get(index)?;
            let there = self.columns[part.column].route.channel == channel;
            (there && part.leg == Leg::Sent(generation)).then_some((index, part))
        });
        let Some((index, part)) = found else { return self.disk.counters.stale.add(1) };
        let column = &mut self.columns[part.column];
        column.sent -= 1;
        if part.request.operation != completion.operation {
            // The backend is confused; it would not do better if asked again.
            self.disk.counters.malformed.add(1);
            self.end(index, Status::IoError);
        } else if completion.status == Status::Refused {
            // The lease moved on while the request was under way; it goes out again with what comes.
            column.refused |= generation == column.route.generation;
            column.queue.push_back(index);
            if let Some(part) = self.parts.get_mut(index) {
                part.leg = Leg::Queued;
            }
        } else {
            let status = self.vouched(&part, completion);
            self.end(index, status);
        }
    }

    /// The status of a part, given what its column remembers of earlier ones.
    fn vouched(&mut self, part: &Part, completion: &Completion) -> Status {
        if completion.status != Status::Ok {
            return completion.status;
        }
        let unflushed = &mut self.columns[part.column].unflushed;
        let next = self.sequence + 1;
        if unflushed.answered(completion.write_verifier, next) {
            warn!(lease = %self.disk.object().lease, column = part.column,
                "the SSD lost writes that were not flushed: the guest's next flush fails");
            self.disk.counters.lost_writes.add(1);
            self.guest.losses.take_losses(unflushed);
        }
        let sequence = self.jobs.get(usize::from(part.job)).copied().flatten().map_or(0, |job| job.sequence);
        match part.request.operation {
            Operation::Write | Operation::WriteZeroes if !part.request.force_unit_access => {
                unflushed.written();
            }
            Operation::Flush if !unflushed.flushed(sequence, part.mark, next) => return Status::IoError,
            _ => {}
        }
        Status::Ok
    }

    /// A part is over, and with the last one its request.
    fn end(&mut self, index: u16, status: Status) {
        let Some(part) = self.parts.remove(index) else { return };
        let Some(Some(job)) = self.jobs.get_mut(usize::from(part.job)) else { return };
        job.note(status);
        if job.open == 0 {
            self.finish(part.job);
        }
    }

    fn finish(&mut self, index: u16) {
        let Some(job) = self.jobs.get_mut(usize::from(index)).and_then(Option::take) else { return };
        self.guest.end(&self.disk, &job.request, job.status, job.sequence, self.sequence + 1);
    }

    /// Gives the guest its answers, once all channels were looked at. True if there were any.
    pub(crate) fn settle(&mut self) -> bool {
        if self.disk.slots.abandoned() > 0 {
            self.drop_abandoned();
        }
        let answered = self.guest.settle(&mut self.disk);
        if answered {
            self.cut_waiting();
        }
        answered
    }

    /// Whether something is to be sent that was not when this was asked last.
    pub(crate) fn is_stirred(&mut self) -> bool {
        std::mem::take(&mut self.stirred)
    }

    /// Whether nobody waits for a request any more.
    fn is_abandoned(&self, job: u16) -> bool {
        self.disk.slots.get(job).state == State::Abandoned
    }

    /// Ends what nobody waits for and no backend has.
    fn drop_abandoned(&mut self) {
        for index in self.parts.in_order(|part| part.leg == Leg::Queued && self.is_abandoned(part.job)) {
            if let Some(part) = self.parts.get(index) {
                let queue = &mut self.columns[part.column].queue;
                queue.retain(|&queued| queued != index);
            }
            self.end(index, Status::IoError);
        }
        for _ in 0..self.waiting.len() {
            let Some(job) = self.waiting.pop_front() else { break };
            if self.is_abandoned(job) {
                if let Some(Some(job)) = self.jobs.get_mut(usize::from(job)) {
                    job.status = Status::IoError;
                }
                self.finish(job);
            } else {
                self.waiting.push_back(job);
            }
        }
    }

    /// The controller changed what may change while a disk is in use.
    pub(crate) fn update(&mut self, object: DiskObject) {
        self.change_columns(&object);
        self.disk.update(object);
        self.drop_abandoned();
        self.stirred = true;
    }
}
