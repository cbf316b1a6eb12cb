//! Marking on the replicas themselves what is about to be written, so that whoever serves the disk next knows where they may
//! differ. What the log holds, and when it may be relied on, is in [`crate::intent_log`].
//!
//! - A write begins when its units are marked on every replica that counts. Marks are written for all requests that wait for
//!   some at once, one content at a time.
//! - A frontend that begins reads the log of the replica that others are brought in line with. Nothing is served before.
//! - A replica that comes in line gets the log before anybody counts on it. As long as one is away or dirty somewhere, what it
//!   misses stays marked.
//! - Every few seconds all replicas are flushed, and units where nobody wrote since the time before are marked no longer.

use std::time::{Duration, Instant};

use cxl_pool::Memory;
use pod_protocol::objects::DiskObject;
use tracing::{info, warn};
use vhost_frontend::{Buffer, BufferArea};

use super::super::regions::{REGION_BYTES, Regions};
use super::MirroredDisk;
use super::replica::{Replica, Resync};
use super::work::{Leg, Purpose, Work};
use crate::intent_log::{self, IntentLog, Units};
use crate::message::{Operation, Request, Status};

/// Kept for reading and writing the log, whatever the guest's requests take. A replica that is lost may keep one for a while.
const BUFFERS: usize = 2;
/// What they take of the disk's area.
pub(super) const BUFFERS_BYTES: u64 = BUFFERS as u64 * intent_log::BYTES;

/// How far the log is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It has yet to be read; this request does.
    Loading(Option<u16>),
    /// Every write is marked.
    Kept,
    /// Nobody writes to the disk.
    Unneeded,
}

/// What is known of the log.
#[derive(Debug)]
pub(super) struct Intent {
    state: State,
    /// What the next content says.
    log: IntentLog,
    /// What is marked on every replica that counts.
    durable: Units,
    /// What was written to since marks were taken away last.
    recent: Units,
    /// Number of the last content that was begun.
    version: u64,
    /// There is something that the last content does not say.
    changed: bool,
    /// A content is being written.
    writing: bool,
    /// What that marks.
    begun: Units,
    /// A flush is under way after which these may be marked no longer.
    sweeping: bool,
    candidates: Units,
    swept: Option<Instant>,
    /// The last replica did not take the log: requests before this one that are not marked fail.
    refuses: Option<u64>,
    buffers: Vec<Buffer>,
}

impl Intent {
    pub(super) fn new(object: &DiskObject, area: &mut BufferArea) -> Self {
        let mut intent = Self {
            state: if object.read_only { State::Unneeded } else { State::Loading(None) },
            log: IntentLog::of_unknown(object.volume, object.size_bytes, Vec::new()),
            durable: Units::none(),
            recent: Units::none(),
            version: 0,
            changed: false,
            writing: false,
            begun: Units::none(),
            sweeping: false,
            candidates: Units::none(),
            swept: None,
            refuses: None,
            buffers: Vec::with_capacity(BUFFERS),
        };
        intent.replenish(area);
        intent
    }

    /// Takes buffers in place of those that a lost replica kept.
    pub(super) fn replenish(&mut self, area: &mut BufferArea) {
        while self.buffers.len() < BUFFERS
            && let Some(buffer) = area.alloc(BYTES)
        {
            self.buffers.push(buffer);
        }
    }

    /// Gives its buffers back.
    pub(super) fn give_up(&mut self, area: &mut BufferArea) {
        self.buffers.drain(..).for_each(|buffer| area.free(buffer));
    }

    pub(super) fn is_loading(&self) -> bool {
        matches!(self.state, State::Loading(_))
    }

    /// A replica may lack anything that was not flushed everywhere.
    pub(super) fn differs_where_marked(&self, replica: &mut Replica) {
        if self.state != State::Kept {
            return replica.dirty.insert_all();
        }
        for unit in self.log.marked.iter() {
            replica.dirty.insert_range(regions_of(&self.log, unit, &replica.dirty));
        }
    }

    /// Units where replicas differ stay marked.
    fn keep_dirty(&mut self, replicas: &[Replica]) {
        for dirty in replicas.iter().map(|replica| &replica.dirty).filter(|dirty| !dirty.is_empty()) {
            let differs =
                |unit: &u64| regions_of(&self.log, *unit, dirty).any(|region| dirty.contains(region));
            let differing: Vec<u64> = self.candidates.iter().filter(differs).collect();
            for unit in differing {
                self.candidates.remove(unit);
            }
        }
    }

    /// The volume became larger.
    pub(super) fn grow(&mut self, size_bytes: u64) {
        if self.state != State::Kept || size_bytes <= self.log.size_bytes() {
            return;
        }
        if self.log.grow(size_bytes) {
            // What is known of units is of smaller ones. Nothing is taken away before it is known again.
            self.durable.clear();
            self.begun.clear();
            self.candidates.clear();
            self.log.marked.iter().for_each(|unit| self.recent.insert(unit));
        }
        self.changed = true;
    }
}

#[expect(clippy::cast_possible_truncation, reason = "4096")]
const BYTES: u32 = intent_log::BYTES as u32;

impl<M: Memory> MirroredDisk<M> {
    /// Whether a request that changes the medium may begin. Where it may not, its units will be marked.
    pub(super) fn is_marked(&mut self, request: &Request) -> bool {
        let intent = &mut self.intent;
        if intent.state != State::Kept {
            return intent.state == State::Unneeded;
        }
        let units = intent.log.units(request.offset_bytes, request.length_bytes);
        let mut marked = true;
        for unit in units.clone().filter(|&unit| !intent.durable.contains(unit)) {
            marked = false;
            intent.log.marked.insert(unit);
            intent.changed |= !(intent.writing && intent.begun.contains(unit));
        }
        if marked {
            units.for_each(|unit| intent.recent.insert(unit));
        }
        marked
    }

    /// Whether a request waited for a mark that could not be made.
    pub(super) fn cannot_mark(&self, work: &Work) -> bool {
        let Request { offset_bytes, length_bytes, .. } = work.request;
        let durable = |unit: u64| self.intent.durable.contains(unit);
        self.intent.refuses.is_some_and(|before| work.sequence < before)
            && !self.intent.log.units(offset_bytes, length_bytes).all(durable)
    }

    fn log_request(&self, operation: Operation, buffer: Buffer) -> Request {
        let request = self.own_request(operation, 0, intent_log::BYTES, Some(buffer));
        Request { intent_log: true, force_unit_access: operation.writes(), ..request }
    }

    /// Reads what a predecessor left.
    pub(super) fn load_log(&mut self) {
        if self.intent.state != State::Loading(None) || self.disk.object().incoming {
            // Another host's frontend serves the guest, and writes to the log.
            return;
        }
        let source = self.source;
        if !self.replicas.get(source).is_some_and(Replica::gets_reads) {
            return;
        }
        let Some(buffer) = self.intent.buffers.pop() else {
            return self.intent.replenish(&mut self.disk.buffers);
        };
        let request = self.log_request(Operation::Read, buffer);
        let Some(index) = self.works.enter_own(request, Purpose::LoadLog { buffer }) else {
            return self.intent.buffers.push(buffer);
        };
        if let Some(work) = self.works.get_mut(index) {
            work.begun = true;
        }
        self.intent.state = State::Loading(Some(index));
        self.disk.flushed.flush(&self.disk.memory, buffer.start(), intent_log::BYTES);
        self.queue(index, source);
    }

    /// The replica whose log was being read cannot be asked any more.
    pub(super) fn abort_load(&mut self, number: u16, index: usize, buffer: Buffer, sent: bool) {
        match self.replicas[index].orphans.last_mut().filter(|_| sent) {
            Some(orphan) => orphan.buffer = Some(buffer),
            None => self.intent.buffers.push(buffer),
        }
        self.works.remove(number);
        self.intent.state = State::Loading(None);
        self.recheck = true;
    }

    pub(super) fn advance_load(&mut self, index: u16, buffer: Buffer, work: &Work) {
        let answered = |leg: &&Leg| matches!(leg, Leg::Done | Leg::Failed(_));
        let Some(&leg) = work.legs.iter().find(answered) else { return };
        let mut bytes = [0; intent_log::LENGTH];
        if leg == Leg::Done {
            let memory = &self.disk.memory;
            memory.invalidate(buffer.start(), intent_log::BYTES);
            memory.full_fence();
            memory.read(buffer.start(), &mut bytes);
        }
        self.intent.buffers.push(buffer);
        self.works.remove(index);
        self.take_over(IntentLog::decode(&bytes, self.disk.object().volume));
        self.recheck = true;
    }

    /// Goes on with the log of a predecessor, if there is one that tells of all replicas in sync.
    fn take_over(&mut self, found: Option<(IntentLog, u64)>) {
        let DiskObject { lease, volume, size_bytes, .. } = *self.disk.object();
        let in_sync: Vec<u32> =
            self.replicas.iter().filter(|it| it.in_sync).map(|replica| replica.number).collect();
        let usable = |log: &IntentLog| {
            log.size_bytes() <= size_bytes && in_sync.iter().all(|number| log.covered.contains(number))
        };
        let intent = &mut self.intent;
        intent.state = State::Kept;
        intent.changed = true;
        let Some((mut log, version)) = found.filter(|(log, _)| usable(log)) else {
            info!(%lease, "nothing is known of where replicas may differ: all of the volume is compared");
            intent.log = IntentLog::of_unknown(volume, size_bytes, in_sync);
            return;
        };
        log.grow(size_bytes);
        info!(%lease, units = log.marked.iter().count(), unit_bytes = log.unit_bytes(), version,
            "replicas may differ where it is marked");
        for (index, replica) in self.replicas.iter_mut().enumerate() {
            if index != self.source && log.covered.contains(&replica.number) {
                replica.dirty.clear();
                let units = log.marked.iter();
                units.for_each(|unit| replica.dirty.insert_range(regions_of(&log, unit, &replica.dirty)));
            }
        }
        (intent.log, intent.version) = (log, version);
    }

    /// Writes what the log has to say now.
    pub(super) fn write_log(&mut self) {
        let failing = |replica: &Replica| replica.counts() && replica.failing.is_some();
        if self.intent.state != State::Kept
            || !self.intent.changed
            || self.intent.writing
            || self.disk.object().incoming
            // What is to be dropped would not have it.
            || self.replicas.iter().any(failing)
        {
            return;
        }
        let targets: Vec<usize> = (0..self.replicas.len()).filter(|&index| self.gets_log(index)).collect();
        let Some(buffer) = self.intent.buffers.pop() else {
            return self.intent.replenish(&mut self.disk.buffers);
        };
        let version = self.intent.version + 1;
        let bytes = self.intent.log.encode(version);
        self.disk.memory.write(buffer.start(), &bytes);
        self.disk.memory.write_back(buffer.start(), intent_log::BYTES);
        let request = self.log_request(Operation::Write, buffer);
        let Some(index) = self.works.enter_own(request, Purpose::WriteLog { version, buffer }) else {
            return self.intent.buffers.push(buffer);
        };
        let intent = &mut self.intent;
        (intent.version, intent.changed, intent.writing) = (version, false, true);
        intent.begun.copy_from(&intent.log.marked);
        if let Some(work) = self.works.get_mut(index) {
            work.begun = true;
        }
        for target in targets {
            self.queue(index, target);
        }
        // Where no SSD keeps one, it is over.
        self.advance(index);
    }

    fn gets_log(&self, index: usize) -> bool {
        let replica = &self.replicas[index];
        replica.keeps_log && replica.gets_writes()
    }

    pub(super) fn advance_log(&mut self, index: u16, version: u64, buffer: Buffer, work: &Work) {
        if work.legs.iter().any(|leg| leg.is_open()) {
            return;
        }
        self.works.remove(index);
        self.intent.buffers.push(buffer);
        self.intent.writing = false;
        self.recheck = true;
        let mut everywhere = true;
        for replica in 0..self.replicas.len() {
            let counts = self.replicas[replica].counts();
            match work.legs[replica] {
                Leg::Done => self.replicas[replica].log_version = version,
                Leg::Failed(Status::Unsupported) => {
                    let replica = &mut self.replicas[replica];
                    info!(lease = %self.disk.object().lease, ssd = replica.ssd,
                        "the SSD keeps no log of what is being written to it");
                    replica.keeps_log = false;
                }
                Leg::Failed(_) if counts => {
                    everywhere = false;
                    let others = self.fail(replica, "it failed to note what is about to be written");
                    self.doubt(replica, work);
                    self.intent.changed |= others;
                    if !others {
                        warn!(lease = %self.disk.object().lease, ssd = self.replicas[replica].ssd,
                            "it cannot be noted what is about to be written");
                        self.intent.refuses = Some(work.sequence);
                    }
                }
                Leg::Failed(_) => {
                    self.doubt(replica, work);
                    self.stumble(replica, &work.request);
                }
                Leg::None if counts && self.replicas[replica].keeps_log => {
                    // It was not one of those that count, or has yet to be dropped.
                    everywhere = false;
                    self.intent.changed = true;
                }
                Leg::None | Leg::Queued | Leg::Sent(_) => {}
            }
        }
        if everywhere {
            let intent = &mut self.intent;
            intent.durable.set_to_common(&intent.begun, &intent.log.marked);
            self.admit_joining(version);
        }
    }

    /// A replica has everything, on its medium. It counts when it has the log too, and the log tells of it.
    pub(super) fn join(&mut self, target: usize) {
        let number = self.replicas[target].number;
        if self.intent.state != State::Kept {
            return self.count_on(target);
        }
        let replicas = &self.replicas;
        let covered = &mut self.intent.log.covered;
        covered.retain(|&covered| replicas.iter().any(|replica| replica.number == covered));
        if !covered.contains(&number) {
            covered.push(number);
        }
        self.intent.changed = true;
        self.replicas[target].resync = Resync::Joining(self.intent.version + 1);
    }

    /// Everybody who gets the log has this content.
    fn admit_joining(&mut self, version: u64) {
        for target in 0..self.replicas.len() {
            let replica = &mut self.replicas[target];
            let Resync::Joining(since) = replica.resync else { continue };
            if version < since || replica.keeps_log && replica.log_version < since {
                continue;
            }
            if replica.dirty.is_empty() {
                self.count_on(target);
            } else {
                replica.resync = Resync::Copying;
            }
        }
    }

    fn count_on(&mut self, target: usize) {
        let replica = &mut self.replicas[target];
        info!(lease = %self.disk.object().lease, ssd = replica.ssd, "the replica is in line again");
        replica.resync = Resync::Told(self.epoch);
        self.report(target);
    }

    /// Looks for marks that are not needed any more.
    pub(super) fn sweep(&mut self, now: Instant, every: Duration) {
        let waits = |replica: &Replica| matches!(replica.resync, Resync::Joining(_));
        if !self.intent.writing && self.replicas.iter().any(waits) {
            // Its content did not arrive everywhere.
            self.intent.changed = true;
            self.recheck = true;
        }
        let swept = *self.intent.swept.get_or_insert(now);
        let there = |replica: &Replica| replica.is_there() && replica.gets_writes();
        if self.intent.state != State::Kept
            || self.intent.sweeping
            || self.alone.is_some()
            || self.disk.object().incoming
            || now.duration_since(swept) < every
            || !self.replicas.iter().all(there)
        {
            return;
        }
        let intent = &mut self.intent;
        intent.swept = Some(now);
        intent.candidates.copy_from(&intent.log.marked);
        intent.candidates.subtract(&intent.recent);
        intent.recent.clear();
        for work in self.writes.iter().filter_map(|&index| self.works.get(index)) {
            let units = intent.log.units(work.request.offset_bytes, work.request.length_bytes);
            units.for_each(|unit| intent.candidates.remove(unit));
        }
        intent.keep_dirty(&self.replicas);
        if intent.candidates.is_empty() {
            return;
        }
        let request = self.own_request(Operation::Flush, 0, 0, None);
        let Some(index) = self.works.enter_own(request, Purpose::Sweep) else { return };
        self.intent.sweeping = true;
        for replica in 0..self.replicas.len() {
            let mark = self.replicas[replica].unflushed.mark();
            if let Some(work) = self.works.get_mut(index) {
                work.marks[replica] = mark;
                work.begun = true;
            }
            self.queue(index, replica);
        }
    }

    pub(super) fn advance_sweep(&mut self, index: u16, work: &Work) {
        if work.legs.iter().any(|leg| leg.is_open()) {
            return;
        }
        self.works.remove(index);
        self.recheck = true;
        self.intent.sweeping = false;
        for replica in 0..self.replicas.len() {
            if work.legs[replica] == Leg::Failed(Status::IoError) {
                self.fail(replica, "it failed to flush");
                self.doubt(replica, work);
            }
        }
        let intent = &mut self.intent;
        let flushed = |(replica, leg): (&Replica, &Leg)| replica.gets_writes() && *leg == Leg::Done;
        if !self.replicas.iter().zip(&work.legs).all(flushed) {
            return;
        }
        intent.candidates.subtract(&intent.recent);
        // The flush may have shown that a replica lost what others have.
        intent.keep_dirty(&self.replicas);
        if !intent.candidates.is_empty() {
            // From here on a write there has to wait for a mark, as the log may not have this one any more.
            intent.log.marked.subtract(&intent.candidates);
            intent.durable.subtract(&intent.candidates);
            intent.changed = true;
        }
    }

    /// A backend began anew: its SSD may have a place for the log now.
    pub(super) fn ask_for_log_again(&mut self, index: usize) {
        self.intent.changed |= !std::mem::replace(&mut self.replicas[index].keeps_log, true);
    }

    /// What could not be marked has failed. It is tried again for the next request.
    pub(super) fn refused(&mut self) {
        self.intent.refuses = None;
    }
}

/// The regions of a unit.
fn regions_of(log: &IntentLog, unit: u64, all: &Regions) -> std::ops::Range<u64> {
    let regions = log.unit_bytes() / REGION_BYTES;
    unit * regions..((unit + 1) * regions).min(all.total())
}
