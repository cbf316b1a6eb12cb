//! A disk whose volume lies on several devices, unit by unit in turn: what one of them cannot do, several can together.
//!
//! The [`Disk`] serves the guest as any other disk does. What it would send to its one backend comes here instead, is cut into
//! parts, each for one column, and answered when all of them are done. Nothing is kept twice: when a column fails, so does the
//! disk. Only while a column moves to another device, that has a place *beside* the column (`beside`), which gets everything
//! that the column gets, and what was there before (`copies`).

mod answers;
mod beside;
mod columns;
mod copies;
mod layout;
mod lists;
mod order;
mod parts;
mod stranded;

use std::collections::VecDeque;

use cxl_pool::Memory;
use pod_protocol::endpoint::Reporter;
use pod_protocol::ids::{ChannelId, LeaseId, PlaceNumber};
use pod_protocol::objects::{DiskObject, ReplicaObject, Route};

use self::beside::Beside;
use self::copies::Copies;
use self::layout::{Layout, Piece};
use self::lists::PartData;
use self::parts::{Job, Leg, Owner, Part, Parts};
use self::stranded::Stranded;
use super::copy_buffers::CopyBuffers;
use super::disk::{Disk, REQUESTS_MAX};
use super::guest_side::GuestSide;
use super::last_look::{LastLook, Throttled};
use super::unflushed::{Mark, Unflushed};
use crate::message::{Holder, Operation, Request, Tag, Words};
use crate::segments::{SEGMENTS_MAX, Segment};

/// A device that a share of the volume lies on.
struct Column {
    /// The device, as `h2/ssd0`: no other place of the volume is there.
    ssd: String,
    route: Route,
    /// Which of the lease's places it is where that leads.
    place: PlaceNumber,
    /// Its channel can be used.
    ready: bool,
    /// Its backend refused the lease's current generation: wait until the controller says something new.
    refused: bool,
    /// What is to be sent to it.
    queue: VecDeque<u16>,
    /// How many parts it has.
    sent: u32,
    unflushed: Unflushed,
    /// How long what it has may wait for the volume's rates.
    throttled: Throttled,
}

impl Column {
    fn new(said: &ReplicaObject) -> Self {
        Self {
            ssd: said.ssd.clone(),
            route: said.route,
            place: said.place,
            ready: false,
            refused: false,
            queue: VecDeque::new(),
            sent: 0,
            unflushed: Unflushed::default(),
            throttled: Throttled::default(),
        }
    }

    /// Whether it is reached over this channel; another one may be as well.
    fn is_on(&self, channel: ChannelId) -> bool {
        self.route.channel == channel
    }

    /// As what requests are sent to it.
    fn holder(&self, lease: LeaseId) -> Holder {
        Holder { lease, place: self.place, generation: self.route.generation }
    }
}

/// What became of a request that was to be cut.
enum Cut {
    Done,
    /// It has to wait for what it meets where a column moves.
    Waits,
    /// It has to wait, and so do all others.
    NoRoom,
}

/// A striped disk. All of it belongs to the worker.
pub(crate) struct StripedDisk<M: Memory> {
    pub(crate) disk: Disk<M>,
    reporter: Option<Reporter>,
    layout: Layout,
    /// Those of the layout, and then the place beside one of them, if there is one.
    columns: Vec<Column>,
    beside: Option<Beside>,
    copies: Copies,
    copy_buffers: CopyBuffers,
    jobs: Vec<Option<Job>>,
    parts: Parts,
    /// Requests that have yet to be cut.
    waiting: VecDeque<u16>,
    stranded: Stranded,
    /// For the segments of a part.
    gathered: Vec<Segment>,
    /// Counts requests.
    sequence: u64,
    pub(super) guest: GuestSide,
    last_look: LastLook,
    /// Something ended, so that what waits may go on.
    recheck: bool,
    /// Something was queued.
    stirred: bool,
}

impl<M: Memory> StripedDisk<M> {
    pub(crate) fn new(disk: Disk<M>, unit_bytes: u64, reporter: Option<Reporter>) -> Self {
        let said = columns::in_order(disk.object());
        let columns: Vec<Column> = said.into_iter().map(Column::new).collect();
        let mut striped = Self {
            reporter,
            layout: Layout::new(columns.len(), unit_bytes),
            columns,
            beside: None,
            copies: Copies::default(),
            copy_buffers: CopyBuffers::default(),
            disk,
            jobs: vec![None; REQUESTS_MAX.into()],
            parts: Parts::new(),
            waiting: VecDeque::with_capacity(REQUESTS_MAX.into()),
            stranded: Stranded::default(),
            gathered: Vec::with_capacity(SEGMENTS_MAX),
            sequence: 0,
            guest: GuestSide::new(),
            last_look: LastLook::default(),
            recheck: false,
            stirred: false,
        };
        let object = striped.disk.object().clone();
        striped.change_beside(&object);
        striped
    }

    /// Takes requests from the guest. True if anything moved.
    pub(crate) fn take(&mut self) -> bool {
        let mut columns = self.columns.iter().take(self.layout.columns());
        if !self.disk.object().failed && !columns.any(|column| column.ready) {
            return self.disk.submit_without_channel();
        }
        let Self { disk, guest, jobs, waiting, sequence, .. } = self;
        let moved = guest.take(disk, |request| {
            let Ok(index) = u16::try_from(request.tag.get() & 0xffff) else { return };
            *sequence += 1;
            if let Some(job) = jobs.get_mut(usize::from(index)) {
                debug_assert!(job.is_none(), "the disk has not been answered yet");
                *job = Some(Job::new(request, *sequence));
                waiting.push_back(index);
            }
        });
        if moved || self.recheck {
            self.pump();
        }
        moved
    }

    /// Lets everything go on that may.
    fn pump(&mut self) {
        self.recheck = false;
        self.begin_stranded_anew();
        self.cut_waiting();
        self.resync();
    }

    /// Cuts what waits, in order, as far as it may go on and there is room. None of these meets another one.
    fn cut_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some(index) = self.waiting.pop_front() else { break };
            match self.cut(index) {
                Cut::Done => {}
                Cut::Waits => self.waiting.push_back(index),
                Cut::NoRoom => {
                    self.waiting.push_front(index);
                    break;
                }
            }
        }
    }

    fn cut(&mut self, index: u16) -> Cut {
        let Some(Some(job)) = self.jobs.get(usize::from(index)) else { return Cut::Done };
        let request = job.request;
        let (offset, length) = (request.offset_bytes, request.length_bytes);
        let pieces = match request.operation {
            Operation::Read | Operation::Write => self.layout.count(offset, length),
            Operation::Flush | Operation::Discard | Operation::WriteZeroes => self.layout.columns(),
        };
        // Each may have to go to the place beside its column too.
        let needed = if self.beside.is_some() { pieces * 2 } else { pieces };
        if self.parts.room() < needed {
            return Cut::NoRoom;
        }
        if self.must_wait(&request) {
            return Cut::Waits;
        }
        match request.operation {
            Operation::Read | Operation::Write => {
                let mut next_list = request.data;
                for piece in self.layout.pieces(offset, length) {
                    let data = self.data_of(index, &request, &piece, &mut next_list);
                    self.add(index, &request, piece, data);
                }
            }
            Operation::Discard | Operation::WriteZeroes => {
                for piece in self.layout.ranges(offset, length) {
                    self.add(index, &request, piece, PartData::none());
                }
            }
            Operation::Flush => {
                for column in 0..self.layout.columns() {
                    let piece = Piece { column, offset_bytes: 0, length_bytes: 0, data_bytes: 0 };
                    self.add(index, &request, piece, PartData::none());
                }
            }
        }
        Cut::Done
    }

    fn add(&mut self, job: u16, whole: &Request, piece: Piece, PartData { data, segments }: PartData) {
        let (offset_bytes, length_bytes) = (piece.offset_bytes, piece.length_bytes);
        let request = Request { tag: Tag::new(0), offset_bytes, length_bytes, data, segments, ..*whole };
        let mut twin = self.twin_of(piece.column, request.operation);
        if twin.is_some() && self.is_in_guest(job) {
            // The guest may change it meanwhile, and both places would have different versions: what the column gets is copied.
            self.differ_in(&request);
            twin = None;
        }
        let request = if twin.is_some() { request.same_everywhere() } else { request };
        for column in [Some(piece.column), twin].into_iter().flatten() {
            let Some(index) = self.enter(Owner::Guest(job), column, request) else { continue };
            if let Some(part) = self.parts.get_mut(index) {
                part.data_bytes = piece.data_bytes;
            }
            if let Some(Some(job)) = self.jobs.get_mut(usize::from(job)) {
                job.open += 1;
                self.note_begin(index);
            }
        }
    }

    /// Has a part sent to a column, if there is room for it.
    fn enter(&mut self, owner: Owner, column: usize, request: Request) -> Option<u16> {
        let it = self.columns.get_mut(column)?;
        let mark = if request.operation == Operation::Flush { it.unflushed.mark() } else { Mark::default() };
        let part = Part { request, owner, column, leg: Leg::Queued, serial: 0, mark, data_bytes: 0 };
        let part = self.parts.enter(part)?;
        it.queue.push_back(part);
        self.stirred = true;
        Some(part)
    }

    /// Sends what goes over a channel, so many messages at most. Returns how many.
    pub(crate) fn send(&mut self, channel: ChannelId, room: u32, outbox: &mut Vec<Words>) -> u32 {
        let mut others = self.columns.iter().filter(|column| column.is_on(channel)).count();
        let mut sent = 0;
        for at in 0..self.columns.len() {
            if self.columns[at].is_on(channel) {
                // Each its share of what is left, so that a column that is read does not keep what is beside it from being written.
                let share = (room - sent).div_ceil(u32::try_from(others).unwrap_or(1));
                sent += self.send_to(at, share, outbox);
                others -= 1;
            }
        }
        sent
    }

    fn send_to(&mut self, at: usize, room: u32, outbox: &mut Vec<Words>) -> u32 {
        let lease = self.disk.object().lease;
        let mut sent = 0;
        while sent < room && self.columns[at].ready && !self.columns[at].refused {
            let column = &mut self.columns[at];
            let Some(index) = column.queue.pop_front() else { break };
            let Some(part) = self.parts.get_mut(index) else { continue };
            let holder = column.holder(lease);
            part.leg = Leg::Sent(holder);
            column.sent += 1;
            sent += 1;
            let part = *part;
            if part.request.segments > 0 {
                self.write_list(&part, holder);
            }
            outbox.push(Request { holder, ..part.request }.encode());
        }
        sent
    }

    /// Gives the guest its answers, once all channels were looked at. True if there were any.
    pub(crate) fn settle(&mut self) -> bool {
        self.last_look.heard = true;
        if self.disk.slots.abandoned() > 0 || self.disk.hurries() {
            self.drop_abandoned();
        }
        if self.recheck {
            self.pump();
        }
        let answered = self.guest.settle(&mut self.disk);
        // There may be buffers for what waits for one.
        self.recheck |= answered && (self.beside.is_some() || self.stranded.any_wait());
        answered
    }

    /// Whether something is to be sent, or done, that was not when this was asked last.
    pub(crate) fn is_stirred(&mut self) -> bool {
        std::mem::take(&mut self.stirred) || self.recheck
    }

    /// The controller changed what may change while a disk is in use.
    pub(crate) fn update(&mut self, object: DiskObject) {
        self.change_places(&object);
        self.change_columns(&object);
        self.change_beside(&object);
        self.disk.update(object);
        self.drop_abandoned();
        self.recheck = true;
        self.stirred = true;
    }
}
