//! A disk whose volume has several replicas, on devices of different hosts.
//!
//! The [`Disk`] serves the guest as any other disk does. What it would send to its one backend comes here instead, goes to
//! the replicas, and is answered when it is done:
//!
//! - A write, and a flush, when every replica has it that *counts*: those that the controller takes for in sync, and those
//!   that it may take for in sync because it was told that they are. A replica that misses something is reported. Until the
//!   controller has confirmed that it does not count any more, which it writes down first, the guest waits: a replica that
//!   lacks what was acknowledged is never taken for good later.
//! - A read, when one replica in sync has answered it: the one with the fewest requests, of which one on our own host may have a few
//!   more, else the first.
//! - A discard is carried out as zeroes that may be unmapped: devices do with it what they like, and reads come from any of them.
//! - Writes that meet, and a read and a write that do, are carried out one after the other, in the order in which they came:
//!   replicas would order them differently, and two reads could see a write come and go. So a read never sees a write that is
//!   not on all replicas that count, whichever of them the successor of this frontend takes for right.
//!
//! How replicas are brought in line is in the `resync` module, and what is remembered of writes that were under way in `intent`.

mod alone;
mod answers;
mod begin;
mod hanging;
mod intent;
mod membership;
mod remembering;
mod replica;
mod resync;
mod work;

use std::collections::VecDeque;
use std::time::Instant;

use cxl_pool::Memory;
use pod_protocol::endpoint::Reporter;
use pod_protocol::ids::ChannelId;
use pod_protocol::objects::DiskObject;
use pod_protocol::reports::Report;
use vhost_frontend::Buffer;

use self::intent::Intent;
use self::replica::{Replica, Resync};
pub(super) use self::work::REPLICAS_MAX;
use self::work::{Leg, Works};
use super::Pace;
use super::copy_buffers::{COPIES_BYTES, COPIES_MAX, CopyBuffers};
use super::disk::{Disk, REQUESTS_MAX};
use super::guest_side::GuestSide;
use super::last_look::LastLook;
use super::regions::REGION_BYTES;
use crate::message::{Request, Words};

/// Requests of our own: copies, one flush for each replica, and those for the log of intents.
const OWN_MAX: u16 = 2 + 4 + 3;
const _: () = assert!(COPIES_MAX <= 2, "each copy needs room");
const _: () = assert!(REPLICAS_MAX <= 4, "each replica needs room for its flush");

/// A mirrored disk. All of it belongs to the worker.
pub(crate) struct MirroredDisk<M: Memory> {
    pub(crate) disk: Disk<M>,
    reporter: Option<Reporter>,
    replicas: Vec<Replica>,
    /// Those that are gone, and may still fill a buffer.
    departed: Vec<Replica>,
    /// What the disk is once it has one place only and nothing is in flight; until then nothing new is taken.
    alone: Option<DiskObject>,
    /// The replica that others are brought in line with. None of its regions is dirty.
    source: usize,
    /// Of the set of replicas in sync, as the controller said last.
    epoch: u64,
    works: Works,
    /// Requests that have yet to begin.
    waiting: VecDeque<u16>,
    /// Requests of the guest that have begun: those that change the medium, and reads.
    writes: Vec<u16>,
    reads: Vec<u16>,
    /// Those that [`MirroredDisk::pump`] has found to have to wait.
    held_back: Vec<u16>,
    /// Regions that reads wait for.
    wanted: VecDeque<u64>,
    /// Something ended, so that what waits may go on.
    recheck: bool,
    /// Something was queued.
    stirred: bool,
    /// Kept free for reads whose buffers a dead replica may still fill.
    spares: Vec<Buffer>,
    copy_buffers: CopyBuffers,
    /// Its losses are of what no other replica had.
    pub(super) guest: GuestSide,
    last_look: LastLook,
    intent: Intent,
}

impl<M: Memory> MirroredDisk<M> {
    pub(crate) fn new(mut disk: Disk<M>, reporter: Option<Reporter>) -> Self {
        let object = disk.object();
        let replicas: Vec<Replica> = object
            .replicas
            .iter()
            .take(REPLICAS_MAX)
            .map(|replica| Replica::new(replica, object.size_bytes))
            .collect();
        let source = replicas.iter().position(|replica| replica.in_sync).unwrap_or(0);
        let epoch = object.epoch;
        let mut spares = Vec::new();
        let intent = Intent::new(&disk.object, &mut disk.buffers);
        for _ in 1..replicas.len() {
            spares.extend(disk.spare());
        }
        let mut copy_buffers = CopyBuffers::default();
        copy_buffers.replenish(&mut disk.buffers);
        disk.under_way.keep_apart(false);
        // A replica that was dropped may still fill a buffer, which can be kept aside if it is ours only. And what the guest changes
        // while it is written, replicas would have in different versions.
        disk.finder.copies_all = true;
        let mut mirrored = Self {
            disk,
            reporter,
            replicas,
            departed: Vec::new(),
            alone: None,
            source,
            epoch,
            works: Works::new(REQUESTS_MAX, OWN_MAX),
            waiting: VecDeque::with_capacity(REQUESTS_MAX.into()),
            writes: Vec::with_capacity(REQUESTS_MAX.into()),
            reads: Vec::with_capacity(REQUESTS_MAX.into()),
            held_back: Vec::with_capacity(REQUESTS_MAX.into()),
            wanted: VecDeque::new(),
            recheck: true,
            stirred: false,
            spares,
            copy_buffers,
            guest: GuestSide::new(),
            last_look: LastLook::default(),
            intent,
        };
        // Until the log is read, nothing is known of what a predecessor was writing when it ended: what replicas hold may differ
        // there.
        for index in 0..mirrored.replicas.len() {
            if index != source {
                mirrored.replicas[index].dirty.insert_all();
            }
        }
        mirrored.keep_of_area();
        mirrored.count_dirty();
        mirrored
    }

    /// Has the guest's requests find room beside what is kept for bad days and for our own.
    fn keep_of_area(&mut self) {
        let spares = self.spares.len().max(self.replicas.len().saturating_sub(1));
        self.disk.keep_of_area(spares, COPIES_BYTES + intent::BUFFERS_BYTES);
    }

    /// Takes requests from the guest. True if anything moved.
    pub(crate) fn take(&mut self) -> bool {
        // An SSD that it has left may keep what it has for long: it goes on as it is meanwhile.
        if self.alone.is_some() && self.departed.is_empty() {
            self.disk.blocked = true;
            return false;
        }
        let served = self.disk.object().failed || self.replicas.iter().any(Replica::gets_reads);
        if !served {
            return self.disk.submit_without_channel();
        }
        let Self { disk, guest, works, waiting, .. } = self;
        let moved = guest.take(disk, |request| waiting.extend(works.enter(request.same_everywhere())));
        if moved || self.recheck {
            self.pump();
        }
        moved
    }

    /// How many requests a channel's backend has.
    pub(crate) fn with_backend(&self, channel: ChannelId) -> u32 {
        let all = self.replicas.iter().chain(&self.departed);
        all.filter(|replica| replica.is_on(channel)).map(|replica| replica.sent).sum()
    }

    /// Sends what goes over a channel, so many messages at most. Returns how many.
    pub(crate) fn send(&mut self, channel: ChannelId, room: u32, outbox: &mut Vec<Words>) -> u32 {
        let on = |replica: &&Replica| replica.is_on(channel);
        let mut others = self.replicas.iter().filter(on).count();
        let mut sent = 0;
        for index in 0..self.replicas.len() {
            if self.replicas[index].is_on(channel) {
                // Each its share of what is left, so that one that gets all reads does not keep the other from being written.
                let share = (room - sent).div_ceil(u32::try_from(others).unwrap_or(1));
                sent += self.send_to(index, share, outbox);
                others -= 1;
            }
        }
        sent
    }

    fn send_to(&mut self, index: usize, room: u32, outbox: &mut Vec<Words>) -> u32 {
        let lease = self.disk.object().lease;
        let mut sent = 0;
        while sent < room && self.replicas[index].is_there() {
            let replica = &mut self.replicas[index];
            let Some(number) = replica.queue.pop_front() else { break };
            let Some(work) = self.works.get_mut(number) else { continue };
            let holder = replica.holder(lease);
            work.legs[index] = Leg::Sent(holder);
            // Nothing is written before its mark is on the medium.
            let request = Request { holder, marked: true, ..work.request };
            outbox.push(request.encode());
            replica.sent += 1;
            sent += 1;
        }
        sent
    }

    /// Gives the guest its answers, once all channels were looked at. True if there were any.
    pub(crate) fn settle(&mut self) -> bool {
        self.last_look.heard = true;
        if self.recheck {
            self.pump();
        }
        self.guest.settle(&mut self.disk)
    }

    /// Whether something is to be sent, or done, that was not when this was asked last.
    pub(crate) fn is_stirred(&mut self) -> bool {
        std::mem::take(&mut self.stirred) || self.recheck
    }

    /// Says again what the controller may have missed, and tries again what failed.
    pub(crate) fn tick(&mut self, now: Instant, pace: Pace) {
        if let Some(timeout) = pace.replica_timeout {
            self.drop_hanging(now, timeout);
        }
        self.sweep(now, pace.sweep_every);
        for index in 0..self.replicas.len() {
            let replica = &mut self.replicas[index];
            if replica.resync == Resync::Resting {
                replica.resync = Resync::Idle;
                self.recheck = true;
            }
            // One that is on its way back may have been asked before its backend knew the lease's generation.
            let counts = self.replicas[index].counts();
            self.replicas[index].refused &= counts;
            self.report(index);
            self.report_leaving(index);
            self.note(index);
        }
    }

    fn report(&self, index: usize) {
        let (Some(reporter), replica) = (&self.reporter, &self.replicas[index]) else { return };
        let (lease, number) = (self.disk.object().lease, replica.number);
        if let Some(reason) = &replica.failing {
            let reason = reason.clone();
            reporter.report(Report::ReplicaFailed { lease, replica: number, epoch: self.epoch, reason });
        } else if let Resync::Told(epoch) = replica.resync {
            reporter.report(Report::ReplicaSynced { lease, replica: number, epoch });
        }
    }

    /// Shows how much has yet to be brought in line, of all replicas.
    fn count_dirty(&self) {
        let regions: u64 = self.replicas.iter().map(|replica| replica.dirty.len()).sum();
        self.disk.counters.dirty_bytes.set(regions.saturating_mul(REGION_BYTES));
    }

    /// The controller changed what may change while a disk is in use.
    pub(crate) fn update(&mut self, object: DiskObject) {
        self.alone = object.replicas.is_empty().then(|| object.clone());
        let object = if object.replicas.is_empty() { self.with_one_place(object) } else { object };
        self.change_members(&object);
        self.disk.update(object);
        if self.disk.object().failed {
            self.refuse_waiting();
        }
        self.advance_all();
        self.recheck = true;
    }
}
