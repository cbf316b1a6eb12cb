//! A place beside a column: where the column moves to, or what it has left.
//!
//! While it comes, it is brought in line with the column and reads go to the column. When it is complete, nothing is acknowledged
//! without it, and the controller is told. The controller has both change places, or the place leave: a request that only one of
//! them carried out waits for that, and ends as it did at the one that is the column then. One that leaves gets nothing new; the
//! controller hears when nothing is in flight there any more.

use std::time::{Duration, Instant};

use cxl_pool::Memory;
use pod_protocol::objects::{DiskObject, ReplicaObject};
use pod_protocol::reports::Report;
use tracing::{info, warn};

use super::super::Pace;
use super::super::copy_buffers::COPIES_BYTES;
use super::super::regions::Regions;
use super::parts::{Leg, Owner, PARTS_MAX, Part};
use super::{Column, StripedDisk, columns};
use crate::message::Operation;

/// How far it has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stage {
    /// It gets every write, and region by region what was there before.
    Copying,
    /// It has everything, and is bringing it to its medium.
    Flushing,
    /// It has everything, and the controller was told so in this epoch. No write ends without it from here on.
    Told(u64),
    /// It cannot come, for a reason that the controller is told. It may count already, if the controller was told before that it
    /// has everything.
    Broken { counts: bool, reason: String },
    /// It is to go.
    Leaving,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Beside {
    /// The column that it is beside, by its place in the layout.
    pub(super) column: usize,
    number: u32,
    ssd: String,
    /// The controller says that it cannot be reached.
    pub(super) away: bool,
    pub(super) stage: Stage,
    /// Where it differs, or may differ, from the column.
    pub(super) dirty: Regions,
    /// Parts of requests that have begun at either place, and that others may not meet: see [`super::order`].
    pub(super) begun: Vec<u16>,
    /// The flush before it is complete is under way.
    pub(super) settling: bool,
    /// As the controller said last.
    epoch: u64,
    /// The part that it has had for the longest time, and for how long.
    oldest: Option<(u64, Duration)>,
}

impl Beside {
    /// Whether it gets what changes the column.
    pub(super) fn gets_writes(&self) -> bool {
        !matches!(self.stage, Stage::Broken { counts: false, .. } | Stage::Leaving)
    }
}

impl<M: Memory> StripedDisk<M> {
    /// Whether this is no column of the layout.
    pub(super) fn is_beside(&self, at: usize) -> bool {
        at >= self.layout.columns()
    }

    /// Whether no write may be acknowledged without the place beside a column, unless the controller says so.
    pub(super) fn counts_beside(&self) -> bool {
        let stage = self.beside.as_ref().map(|beside| &beside.stage);
        matches!(stage, Some(Stage::Told(_) | Stage::Broken { counts: true, .. }))
    }

    /// The controller may say that a column is where it moved to.
    pub(super) fn change_places(&mut self, object: &DiskObject) {
        let at = self.layout.columns();
        let Some(column) = self.beside.as_ref().map(|beside| beside.column) else { return };
        let said = columns::in_order(object);
        let now = said.get(column).map(|said| &said.ssd);
        if now.is_none() || self.columns.get(at).map(|place| &place.ssd) != now {
            return;
        }
        info!(lease = %self.disk.object().lease, column, "the column has moved");
        self.give_copies_up();
        self.columns.swap(column, at);
        self.parts.swap_columns(column, at);
        self.leave();
        for index in self.parts.in_order(|part| part.column == column) {
            if let Some(Part { leg: Leg::Failed(status), .. }) = self.parts.get(index).copied() {
                self.end(index, status);
            }
        }
    }

    /// The controller says what is beside a column.
    pub(super) fn change_beside(&mut self, object: &DiskObject) {
        let at = self.layout.columns();
        if let Some(beside) = &self.beside {
            let stays = |said: &ReplicaObject| {
                let same = self.columns[at].ssd == said.ssd;
                same && (said.leaving || beside.stage != Stage::Leaving)
            };
            if !object.beside.as_ref().is_some_and(stays) {
                self.vanish();
            }
        }
        let Some(said) = &object.beside else { return };
        if self.beside.is_none() {
            self.appear(said, object);
        }
        let place = &mut self.columns[at];
        place.refused &= place.route.generation == said.route.generation;
        (place.route, place.place) = (said.route, said.place);
        let has_grown = object.size_bytes > self.disk.object().size_bytes;
        let Some(beside) = &mut self.beside else { return };
        if has_grown {
            beside.dirty.grow(self.layout.column_bytes(object.size_bytes));
            self.differ(at);
        }
        let Some(beside) = &mut self.beside else { return };
        beside.away = said.away;
        let is_news = object.epoch > beside.epoch;
        beside.epoch = object.epoch;
        match beside.stage {
            Stage::Leaving => {}
            _ if said.leaving => {
                info!(lease = %self.disk.object().lease, ssd = said.ssd, "the column stays where it is");
                self.give_copies_up();
                self.leave();
            }
            // The controller did not hear it, and will not any more: what it was told is of an older epoch.
            Stage::Told(_) if is_news => beside.stage = Stage::Copying,
            Stage::Broken { .. } if is_news => {
                beside.stage = Stage::Copying;
                beside.dirty.insert_all();
                self.detach();
                self.note_all_begun();
            }
            Stage::Copying | Stage::Flushing | Stage::Told(_) | Stage::Broken { .. } => {}
        }
        self.report();
    }

    fn appear(&mut self, said: &ReplicaObject, object: &DiskObject) {
        info!(lease = %object.lease, ssd = said.ssd, column = said.number, leaving = said.leaving,
            "there is a place beside the column");
        let mut dirty = Regions::none_of(self.layout.column_bytes(object.size_bytes));
        // Nobody knows what was there before, nor how far a predecessor of this frontend came.
        dirty.insert_all();
        self.beside = Some(Beside {
            column: object.replicas.iter().filter(|column| column.number < said.number).count(),
            number: said.number,
            ssd: said.ssd.clone(),
            away: said.away,
            stage: if said.leaving { Stage::Leaving } else { Stage::Copying },
            dirty,
            begun: Vec::with_capacity(PARTS_MAX.into()),
            settling: false,
            epoch: object.epoch,
            oldest: None,
        });
        self.columns.push(Column::new(said));
        // Both places get the same, and reads begin anew in other buffers where one of them is given up.
        self.disk.finder.copies_all = true;
        self.note_all_begun();
        self.keep_spare();
        self.copy_buffers.replenish(&mut self.disk.buffers);
        self.disk.keep_of_area(1, COPIES_BYTES);
        self.recheck = true;
        self.count_dirty();
    }

    /// It gets nothing new from here on.
    fn leave(&mut self) {
        if let Some(beside) = &mut self.beside {
            beside.stage = Stage::Leaving;
            beside.begun.clear();
            (beside.settling, beside.oldest) = (false, None);
        }
        self.detach();
        self.count_dirty();
    }

    /// It is none of the volume's places any more.
    fn vanish(&mut self) {
        self.give_copies_up();
        self.leave();
        self.strand_reads();
        self.orphan_all();
        let at = self.layout.columns();
        self.columns.truncate(at);
        if let Some(beside) = self.beside.take() {
            info!(lease = %self.disk.object().lease, ssd = beside.ssd, "there is nothing beside the column");
        }
        self.disk.finder.copies_all = false;
        self.give_copy_buffers_up();
        self.disk.keep_of_area(0, 0);
        self.recheck = true;
    }

    /// Nothing moves any more. Copies that were given up still have what the column may fill.
    pub(super) fn give_copy_buffers_up(&mut self) {
        self.copy_buffers.give_up(&mut self.disk.buffers);
        self.disk.unblock();
    }

    /// Takes from the place what it was to do. What it has already, it may still be doing: the reads that it got as a column are
    /// waited for. Nothing else is: whatever it still writes, nobody reads it, since no read meets a write there.
    fn detach(&mut self) {
        let at = self.layout.columns();
        for index in self.parts.in_order(|part| part.column == at) {
            let Some(part) = self.parts.get_mut(index) else { continue };
            if part.leg == Leg::Lingering && matches!(part.owner, Owner::Guest(_) | Owner::Copy(_)) {
                part.leg = Leg::Lost;
                self.columns[at].sent += 1;
            }
            let part = *part;
            let is_there = matches!(part.leg, Leg::Sent(_) | Leg::Lost);
            match part.owner {
                // Of copies there are none but those that were given up. They end as others do, with their buffers.
                Owner::Nobody | Owner::Copy(_) => continue,
                Owner::Guest(_) if part.request.operation == Operation::Read => {
                    if !is_there {
                        self.move_to_column(index);
                    }
                    continue;
                }
                Owner::Guest(_) | Owner::Settling => {}
            }
            if !is_there {
                self.parts.remove(index);
            } else if let Some(part) = self.parts.get_mut(index) {
                part.owner = Owner::Nobody;
            }
            if let Owner::Guest(job) = part.owner {
                self.release(job);
            }
        }
        self.columns[at].queue.clear();
        if let Some(beside) = &mut self.beside {
            beside.settling = false;
        }
        self.recheck = true;
    }

    /// Has the column carry out what the place beside it has not.
    pub(super) fn move_to_column(&mut self, index: u16) {
        let Some(column) = self.beside.as_ref().map(|beside| beside.column) else { return };
        if let Some(part) = self.parts.get_mut(index) {
            (part.column, part.leg) = (column, Leg::Queued);
            self.columns[column].queue.push_back(index);
            self.stirred = true;
        }
    }

    /// The column cannot move there.
    pub(super) fn break_off(&mut self, reason: &str) {
        let counts = self.counts_beside();
        let Some(beside) = &mut self.beside else { return };
        if matches!(beside.stage, Stage::Broken { .. } | Stage::Leaving) {
            return;
        }
        warn!(lease = %self.disk.object().lease, ssd = beside.ssd, reason, "the column cannot move there");
        beside.stage = Stage::Broken { counts, reason: reason.to_owned() };
        if !counts {
            beside.begun.clear();
            self.give_copies_up();
            self.detach();
        }
        self.report();
    }

    /// Says again what the controller may have missed, and looks whether the place beside a column hangs.
    pub(crate) fn tick(&mut self, now: Instant, pace: Pace) {
        let passed = self.last_look.passed(now);
        (0..self.columns.len()).for_each(|at| self.note(at));
        if self.beside.is_none() {
            return;
        }
        // It may have been asked before its backend knew the lease's generation.
        let at = self.layout.columns();
        self.columns[at].refused = false;
        if let Some(timeout) = pace.replica_timeout {
            self.give_up_hanging(passed, timeout);
        }
        self.report();
        (self.recheck, self.stirred) = (true, true);
    }

    fn give_up_hanging(&mut self, passed: Duration, timeout: Duration) {
        let at = self.layout.columns();
        // What the place has of before it was given up is waited for while it is used again.
        let all_count = self.beside.as_ref().is_some_and(Beside::gets_writes);
        let is_open = |part: &Part| {
            let counts = all_count || part.owner != Owner::Nobody;
            part.column == at && counts && !matches!(part.leg, Leg::Failed(_))
        };
        let serial = self.parts.oldest_where(is_open);
        let passed = self.columns[at].throttled.accounts_for(passed);
        let Some(beside) = &mut self.beside else { return };
        let known = beside.oldest.filter(|known| Some(known.0) == serial);
        beside.oldest = serial.map(|serial| (serial, known.map_or(Duration::ZERO, |it| it.1 + passed)));
        if beside.oldest.is_none_or(|(_, waited)| waited < timeout) {
            return;
        }
        if beside.stage == Stage::Leaving {
            self.strand_reads();
        } else {
            self.break_off("it kept a request for longer than replica-timeout-ms");
        }
    }

    /// Tells the controller what it has to know.
    pub(super) fn report(&self) {
        let (Some(reporter), Some(beside)) = (&self.reporter, &self.beside) else { return };
        let (lease, replica, epoch) = (self.disk.object().lease, beside.number, beside.epoch);
        let at = self.layout.columns();
        match &beside.stage {
            Stage::Told(epoch) => {
                reporter.report(Report::ReplicaSynced { lease, replica, epoch: *epoch });
            }
            Stage::Broken { reason, .. } => {
                let reason = reason.clone();
                reporter.report(Report::ReplicaFailed { lease, replica, epoch, reason });
            }
            Stage::Leaving if !self.parts.any(|part| part.column == at) => {
                reporter.report(Report::ReplicaLeft { lease, replica, epoch });
            }
            Stage::Copying | Stage::Flushing | Stage::Leaving => {}
        }
    }
}
