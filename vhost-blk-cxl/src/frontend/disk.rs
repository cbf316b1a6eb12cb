//! One guest's disk: its rings, its buffers, its requests in flight.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use cxl_pool::Memory;
use pod_protocol::ids::PlaceNumber;
use pod_protocol::objects::DiskObject;
use vhost_frontend::pacing::{Pacer, Pacing};
use vhost_frontend::{BufferArea, GuestMemory, Notes, PoolMap, PoolRam, Ring, StopReason};

use super::device::{REQUEST_BYTES_MAX, caches_writes};
use super::flushed::Flushed;
use super::owed_elsewhere::OwedElsewhere;
use super::own_flush::OwnFlush;
use super::parse::Shape;
use super::place::{Finder, Place};
use super::seldom::Seldom;
use super::slots::{Slot, Slots, State};
use super::taking_back::TakenBack;
use super::turn_budget::TurnBudget;
use super::under_way::UnderWay;
use super::unflushed::Unflushed;
use crate::counters::Counters;
use crate::message::{Holder, Words};
use crate::segments::ListBuffer;

/// Requests that one disk has in flight at most.
pub(super) const REQUESTS_MAX: u16 = 512;
/// Buffers are whole pages: what direct I/O wants.
const BUFFER_UNIT_BYTES: u32 = 4096;

/// A ring in our hands.
pub(super) struct Served {
    pub(super) ring: Ring,
    pub(super) in_flight: u32,
    /// How many of the next requests the guest made before it could know of a loss.
    pub(super) unaware: usize,
    /// Asked to let go: as soon as nothing is in flight.
    pub(super) stopping: Option<Stopping>,
}

/// Who waits for a ring to be let go of.
pub(super) struct Stopping {
    done: SyncSender<u16>,
    /// What a predecessor took and did not answer stays in the record of requests in flight, for whoever is given the ring next. Else
    /// it is answered first: a VMM on another host has no such record, and takes for done all that was taken.
    leaves_owed: bool,
    /// That is answered with errors: whoever waits has waited long enough.
    pub(super) refuses_owed: bool,
}

impl Served {
    /// How many requests are to be taken before it is let go of: those that a predecessor owes.
    pub(super) fn owed(&self) -> usize {
        if self.stopping.as_ref().is_some_and(|it| it.leaves_owed) { 0 } else { self.ring.owed() }
    }

    /// Whether there is something that must be taken before any new request of any ring.
    pub(super) fn owes(&self) -> bool {
        self.owed() > 0 && !self.refuses_owed()
    }

    /// Whether what is owed is answered with errors.
    pub(super) fn refuses_owed(&self) -> bool {
        self.stopping.as_ref().is_some_and(|it| it.refuses_owed)
    }

    /// Whether requests are taken from it.
    pub(super) fn gives_requests(&self) -> bool {
        self.stopping.is_none() || self.owes()
    }

    /// Leaves the request that was just taken in its ring until something has ended, which has the rings looked at again. False, for
    /// nothing was taken.
    pub(super) fn put_back(&mut self, slot: &Slot, blocked: &mut bool) -> bool {
        self.ring.put_back(&slot.chain);
        self.unaware += usize::from(slot.unaware);
        *blocked = true;
        false
    }
}

/// What a disk may send in this turn.
pub(crate) struct Allowance<'a> {
    /// Messages that the channel takes.
    pub(crate) messages: u32,
    /// There is room for more in the next turn.
    pub(crate) more: bool,
    /// Where they go.
    pub(crate) outbox: &'a mut Vec<Words>,
}

/// A disk. All of it belongs to the worker. How it serves the guest is in the `serve` module.
#[expect(clippy::struct_excessive_bools, reason = "they come and go independently of each other")]
pub(crate) struct Disk<M: Memory> {
    pub(super) memory: M,
    pub(super) object: DiskObject,
    pub(super) counters: Arc<Counters>,
    /// Completed writes may still be in a cache: the driver's wish.
    pub(super) writeback: Arc<AtomicBool>,
    pub(super) buffers: BufferArea,
    pub(super) flushed: Flushed,
    /// What of the pool may be the guest's memory.
    pool_ram: Option<PoolRam>,
    /// Finds data in the guest's memory.
    pub(super) finder: Finder,
    /// How long a step of a request with data is at most, for what is left of the area.
    pub(super) step_bytes_most: u64,
    /// For a list on its way to the pool.
    pub(super) list: ListBuffer,
    pub(super) slots: Slots,
    pub(super) under_way: UnderWay,
    pub(super) unflushed: Unflushed,
    /// For a successor.
    pub(super) notes: Option<Notes>,
    /// They are those of a predecessor.
    pub(super) adopts: bool,
    pub(super) rings: Vec<Option<Served>>,
    /// Which of them were served here.
    known_rings: Vec<bool>,
    /// Those that no guest asked for.
    pub(super) own_flushes: Vec<OwnFlush>,
    /// Such that wait for a slot, by those who wait for them.
    pub(super) waiting_flushes: Vec<SyncSender<()>>,
    /// Requests to be sent (again), in order, before any new one is taken.
    pub(super) queued: VecDeque<u16>,
    /// The backend refused the lease's current generation: wait until the controller says something new.
    pub(super) refused: bool,
    /// What keeps us from taking requests is mended by an event only: until then the rings are not looked at.
    pub(super) blocked: bool,
    /// Nothing new is taken: as soon as nothing is in flight, the disk becomes a mirrored one.
    pub(super) held: bool,
    /// Whether of rings that have yet to start a predecessor owes requests.
    pub(super) owed_elsewhere: OwedElsewhere,
    pub(super) first_ring: usize,
    /// Of rings that are being stopped, what a predecessor owes is refused.
    pub(super) refuses_owed: bool,
    /// What may still be done in this turn.
    pub(super) budget: TurnBudget,
    /// Warnings of rings that the guest broke.
    pub(super) warnings: Seldom,
    /// Holds it to its share of the fabric, if it has one.
    pub(super) pacer: Option<Pacer>,
    /// A VMM takes memory back in which data of requests may lie.
    pub(super) taken_back: Option<TakenBack>,
}

impl<M: Memory> Disk<M> {
    pub(crate) fn new(
        memory: M,
        object: DiskObject,
        counters: Arc<Counters>,
        writeback: Arc<AtomicBool>,
        pool_ram: Option<PoolRam>,
    ) -> Self {
        Self {
            memory,
            buffers: BufferArea::new(object.data_area, BUFFER_UNIT_BYTES),
            flushed: Flushed::nothing_of(object.data_area, BUFFER_UNIT_BYTES),
            rings: (0..object.queues).map(|_| None).collect(),
            known_rings: vec![false; object.queues.into()],
            finder: Finder::new(object.stripe_bytes),
            object,
            counters,
            writeback,
            pool_ram,
            step_bytes_most: REQUEST_BYTES_MAX,
            list: ListBuffer::default(),
            slots: Slots::new(REQUESTS_MAX),
            under_way: UnderWay::none(REQUESTS_MAX),
            unflushed: Unflushed::default(),
            notes: None,
            adopts: false,
            own_flushes: Vec::new(),
            waiting_flushes: Vec::new(),
            queued: VecDeque::with_capacity(REQUESTS_MAX.into()),
            refused: false,
            blocked: false,
            held: false,
            owed_elsewhere: OwedElsewhere::Nothing,
            first_ring: 0,
            refuses_owed: false,
            budget: TurnBudget::default(),
            warnings: Seldom::default(),
            pacer: None,
            taken_back: None,
        }
    }

    pub(crate) fn object(&self) -> &DiskObject {
        &self.object
    }

    /// The controller changed what may change while a disk is in use.
    pub(crate) fn update(&mut self, object: DiskObject) {
        debug_assert_eq!(object.data_area, self.object.data_area);
        let arrives = self.object.incoming && !object.incoming;
        self.object = object;
        if arrives && self.object.untold {
            // The frontend that it had before could not tell it.
            self.unflushed.lose(self.slots.next_sequence());
            self.lost_writes();
            self.note();
        }
        self.refused = false;
        self.blocked = false;
        if self.object.failed {
            self.give_up_where(true, |_| true);
        }
    }

    /// Serves a ring. True if a predecessor served it before, here or on another host, of whose writes some may lie in the device's cache still.
    pub(crate) fn start_ring(&mut self, mut ring: Ring) -> bool {
        // A chain may be longer than any request that was offered, which is refused then: its status has a place too.
        ring.disable_notifications();
        self.find_in_pool(ring.memory());
        let index = usize::from(ring.index());
        let known = std::mem::replace(&mut self.known_rings[index], true);
        let caches = caches_writes(ring.features(), self.writeback.load(Ordering::Relaxed));
        let inherited = !known && ring.was_used_before();
        self.take_notes(ring.notes());
        if inherited {
            self.unflushed.written();
        }
        self.owed_elsewhere = OwedElsewhere::beside(ring.others_owe(), Instant::now());
        self.rings[index] = Some(Served { ring, in_flight: 0, unaware: 0, stopping: None });
        self.blocked = false;
        if inherited && !caches {
            // Its driver never will. Nobody waits for it.
            self.flush_writes(std::sync::mpsc::sync_channel(1).0);
        }
        inherited
    }

    /// Lets go of a ring as soon as it may, and says so with its next available index.
    pub(crate) fn stop_ring(&mut self, index: u16, reason: StopReason, done: SyncSender<u16>) {
        // Those that have not started may not do so any more.
        self.owed_elsewhere = OwedElsewhere::Nothing;
        self.blocked = false;
        // Where the guest is about to come to, nothing of it was ever taken.
        let leaves_owed = reason == StopReason::Disconnected || self.object.incoming;
        match self.rings.get_mut(usize::from(index)) {
            Some(Some(served)) => {
                served.stopping = Some(Stopping { done, leaves_owed, refuses_owed: false });
            }
            // Never started, or gone with the disk: nothing was taken from it.
            _ => drop(done.try_send(0)),
        }
        self.release_stopped();
    }

    /// The lease is gone: whoever stops a ring need not wait.
    pub(crate) fn let_go(&mut self) {
        self.give_up_where(true, |_| true);
        for served in self.rings.iter_mut().flatten() {
            if let Some(stopping) = &mut served.stopping {
                stopping.leaves_owed = true;
            }
        }
        self.release_stopped();
    }

    /// Gives rings back that were asked for and have nothing in flight, and of which nothing is owed; and memory that was asked for and in
    /// which nothing is.
    pub(crate) fn release_stopped(&mut self) {
        self.finish_taking_back();
        for place in &mut self.rings {
            if let Some(served) = place
                && served.in_flight == 0
                && served.owed() == 0
                && let Some(stopping) = served.stopping.take()
            {
                served.ring.signal();
                let _ = stopping.done.try_send(served.ring.next_available());
                *place = None;
            }
        }
    }

    pub(super) fn set_guest_memory(&mut self, memory: &GuestMemory) {
        self.find_in_pool(memory);
        for served in self.rings.iter_mut().flatten() {
            served.ring.set_memory(GuestMemory::clone(memory));
        }
    }

    fn find_in_pool(&mut self, memory: &GuestMemory) {
        self.finder.map = self.pool_ram.map_or_else(PoolMap::default, |ram| PoolMap::new(memory, &ram));
    }

    /// The rings that it has.
    pub(crate) fn rings(&self) -> impl Iterator<Item = &Ring> {
        self.rings.iter().flatten().map(|served| &served.ring)
    }

    /// The channel begins a new generation. Nothing that was sent before will be answered, and once the new one is
    /// ready nothing of it is being carried out any more: everything is sent again.
    pub(crate) fn channel_restarts(&mut self) {
        let again = self.slots.in_state(State::Sent);
        self.counters.resubmitted.add(again.len() as u64);
        for &slot in again.iter().rev() {
            self.slots.set_state(slot, State::Lingering);
            self.queued.push_front(slot);
        }
        self.refused = false;
    }

    /// Another backend has the volume. The one before has let go of it, or its host could not reach the pool any more, before the
    /// controller gave it to this one.
    pub(crate) fn changes_channel(&mut self) {
        self.channel_restarts();
        self.earlier_is_over();
    }

    /// Nothing is being carried out any more of what was sent over an earlier generation of the channel, or one that is gone.
    fn earlier_is_over(&mut self) {
        for slot in self.slots.in_state(State::Abandoned) {
            self.free(slot);
        }
        for slot in self.slots.in_state(State::Lingering) {
            self.slots.set_state(slot, State::Queued);
        }
        // Before any of it is sent again.
        self.finish_taking_back();
    }

    /// The new generation is ready: what nobody waits for is over.
    pub(crate) fn channel_ready(&mut self) {
        self.earlier_is_over();
        self.blocked = false;
        // The backend may be another one by now.
        self.finder.lists = true;
        if self.object.failed {
            // Of what was kept although it had failed, nothing is being carried out any more.
            self.give_up_where(true, |_| true);
        }
    }

    /// There is no channel any more: nobody at its other end carries out anything.
    pub(crate) fn channel_removed(&mut self) {
        if self.object.failed {
            self.channel_restarts();
            self.earlier_is_over();
            self.give_up_where(true, |_| true);
            self.release_stopped();
        }
    }

    /// The channel has room again.
    pub(crate) fn unblock(&mut self) {
        self.blocked = false;
    }

    /// Holds it to a share of the fabric, or no longer.
    pub(crate) fn pace(&mut self, pacing: Option<Arc<Pacing>>) {
        self.pacer = pacing.map(Pacer::new);
        self.blocked = false;
    }

    /// When to try again what waits for its share of the fabric, or for a ring that may not come, if anything does.
    pub(crate) fn wait(&self) -> Option<Duration> {
        let paced = self.pacer.as_ref().and_then(Pacer::wait);
        paced.into_iter().chain(self.owed_elsewhere.wait(Instant::now)).min()
    }

    /// That time is over, or another disk's.
    pub(crate) fn wait_is_over(&mut self) {
        if let Some(pacer) = &mut self.pacer {
            pacer.resume();
            self.blocked = false;
        }
        if self.owed_elsewhere.is_over(Instant::now) {
            self.blocked = false;
        }
    }

    /// Nobody can say when such a time is over.
    pub(crate) fn waits_for_no_clock(&mut self) {
        if self.owed_elsewhere.wait(Instant::now).is_some() {
            self.owed_elsewhere = OwedElsewhere::Nothing;
        }
    }

    /// Takes no new requests, or takes them again.
    pub(crate) fn hold(&mut self, held: bool) {
        self.held = held;
        self.blocked = false;
    }

    /// Whether nothing is in flight, and nothing waits to be sent.
    pub(crate) fn is_quiet(&self) -> bool {
        self.queued.is_empty() && self.slots.with_backend() == 0
    }

    /// How many requests are with the backend.
    pub(crate) fn with_backend(&self) -> u32 {
        self.slots.with_backend()
    }

    /// Asks the guest to kick. False if there is something to do at once.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        let blocked = self.blocked;
        let mut idle = true;
        for served in self.rings.iter_mut().flatten().filter(|served| served.gives_requests()) {
            let more = served.ring.enable_notifications();
            idle &= blocked || !more;
        }
        idle
    }

    pub(crate) fn resume(&mut self) {
        for served in self.rings.iter_mut().flatten() {
            served.ring.disable_notifications();
        }
    }

    pub(super) fn holder(&self) -> Holder {
        let DiskObject { lease, route, .. } = self.object;
        // One place is the first there is.
        Holder { lease, place: PlaceNumber::FIRST, generation: route.generation }
    }

    pub(super) fn shape(&self) -> Shape {
        let DiskObject { size_bytes, block_bytes, read_only, .. } = self.object;
        Shape { size_bytes, block_bytes, read_only }
    }

    pub(super) fn free(&mut self, slot: u16) {
        let place = std::mem::replace(&mut self.slots.get_mut(slot).place, Place::Nowhere);
        if let Some(buffer) = place.buffer() {
            self.buffers.free(buffer);
        }
        self.under_way.end(slot);
        self.slots.set_state(slot, State::Free);
    }
}
