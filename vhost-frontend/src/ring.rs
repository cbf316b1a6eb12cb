//! A started vring in the hands of an engine's worker.

mod batch;
mod earlier;
#[cfg(test)]
mod starting_tests;

use std::fs::File;
use std::iter::once;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use thiserror::Error;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_AVAIL_F_NO_INTERRUPT,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

pub use self::earlier::OthersOwe;
use crate::chain::{Chain, ChainError, ChainLimits, Segment, Table};
use crate::event;
use crate::inflight::InflightQueue;
use crate::memory::GuestMemory;
use crate::notes::Notes;
use crate::view::GuestView;

/// A used ring: flags and index, then elements, then the index at which the device wants a kick.
const USED_HEADER_BYTES: u64 = 4;
const USED_ELEMENT_BYTES: u64 = 8;
const AVAILABLE_EVENT_BYTES: u64 = 2;

/// A guest broke its ring beyond use. The ring is parked: nothing is taken from it until the driver resets the device. What
/// was taken before is still given back, if the used ring is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum RingBroken {
    /// The ring does not lie in guest memory (any more).
    #[error("the ring does not lie in guest memory")]
    NotInMemory,
    /// The available index moved by more than the ring is long.
    #[error("the available index jumped from {next} to {index} in a ring of {size}")]
    AvailableIndex {
        /// The next one we would have taken.
        next: u16,
        /// What the guest says.
        index: u16,
        /// The ring's size.
        size: u16,
    },
    /// The available ring names a descriptor beyond the table.
    #[error("the available ring names descriptor {head} of {size}")]
    Head {
        /// The index.
        head: u16,
        /// The ring's size.
        size: u16,
    },
}

/// What [`Ring::next_chain`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Nothing is available.
    Empty,
    /// The chain holds a request.
    Chain,
    /// The guest offered a chain that breaks the rules; its head is set. Count it, and give it back with [`Ring::complete`],
    /// or break the ring with [`Ring::break_off`] where a guest that is not told of it would be misled.
    Malformed(ChainError),
}

/// The call descriptor: the VMM may replace it while the ring runs (it does whenever the guest masks an interrupt).
pub(crate) type SharedCall = Arc<Mutex<Option<File>>>;

/// What a ring is made of.
#[derive(Debug)]
pub struct RingParts {
    /// The ring's index.
    pub index: u16,
    /// Addresses, size and next indices.
    pub queue: Queue,
    /// Where it lies.
    pub memory: GuestMemory,
    /// The guest's notification; none for a ring that is polled all the time.
    pub kick: Option<File>,
    /// Our notification; shared, since it may be replaced.
    pub call: Arc<Mutex<Option<File>>>,
    /// Tells the VMM that the ring broke.
    pub error: Option<File>,
    /// The acknowledged virtio features.
    pub features: u64,
    /// Whether the driver uses event indices is not known, whatever the features say: it is signalled and asked for kicks in both ways.
    pub event_index_unknown: bool,
    /// Where requests in flight are recorded.
    pub inflight: Option<InflightQueue>,
    /// The device completes in the order of the ring. What a predecessor took and did not complete is in the ring behind the used index, in
    /// its order, and is taken there once more.
    pub in_order: bool,
}

/// What is done for a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Service {
    /// Requests are taken and given back.
    Full,
    /// It is broken: what was taken before is given back.
    GivesBack,
    /// Its used ring cannot be written any more, either.
    Silent,
}

/// A started and enabled vring.
///
/// Look at it once when it arrives: a guest may have kicked before. Requests that a predecessor took and did not
/// complete come first, in the order in which they were taken.
#[derive(Debug)]
pub struct Ring {
    parts: RingParts,
    table: Table,
    /// The available index as last read.
    available: u16,
    /// Heads to hand out again, last first.
    again: Vec<u16>,
    /// Whether the most recent head came from there.
    taken_again: bool,
    service: Service,
    enabled: bool,
    /// What is known of rings that start after it.
    others_owe: OthersOwe,
    notes: Option<Notes>,
    unsignalled: bool,
    /// The used index when the guest was last signalled, or found not to want it.
    signalled: u16,
}

impl Ring {
    /// A ring ready for use. Its used index must have been read from guest memory, and `parts.queue` validated.
    pub fn new(mut parts: RingParts) -> Self {
        let mut again = Vec::new();
        if let Some(inflight) = &mut parts.inflight {
            let recovered = inflight.recover(parts.queue.next_used());
            if parts.in_order {
                // The last one first: those that still have a mark are always the first ones of the ring.
                recovered.heads.iter().rev().for_each(|head| inflight.put_back(*head));
                parts.queue.set_next_avail(parts.queue.next_used());
            } else {
                parts.queue.set_next_avail(recovered.next_available);
                again = recovered.heads;
                again.reverse();
            }
        }
        // A driver that knows no event indices does not look at ours.
        parts.queue.set_event_idx(has(parts.features, VIRTIO_RING_F_EVENT_IDX) || parts.event_index_unknown);
        let table = Table {
            address: GuestAddress(parts.queue.desc_table()),
            size: parts.queue.size(),
            indirect: has(parts.features, VIRTIO_RING_F_INDIRECT_DESC),
            limits: ChainLimits::default(),
        };
        let available = parts.queue.next_avail();
        // A predecessor may have completed requests and died before it signalled them: one signal too many is harmless.
        let signalled = parts.queue.next_used();
        let ring = Self {
            parts,
            table,
            available,
            again,
            taken_again: false,
            service: Service::Full,
            enabled: true,
            others_owe: OthersOwe::Nothing,
            notes: None,
            unsignalled: false,
            signalled,
        };
        // It may be used up to where it began, once around. Whoever has offered nothing waits for nothing.
        let offered =
            ring.parts.queue.avail_idx(&*ring.parts.memory, Ordering::Acquire).map_or(0, |index| index.0);
        if ring.parts.queue.next_used() != 0 || offered != 0 {
            ring.call();
        }
        if ring.parts.event_index_unknown {
            // A predecessor may have told it, by the flags, not to kick. One that knows event indices looks at nothing else.
            let used = GuestAddress(ring.parts.queue.used_ring());
            let _ = ring.parts.memory.store(0_u16, used, Ordering::Relaxed);
            ring.log_notification();
        }
        ring
    }

    /// The same ring, which the VMM has disabled.
    #[must_use]
    pub fn disabled(self) -> Self {
        Self { enabled: false, ..self }
    }

    /// Whether what is offered is to be served. If not, it is given back and has no effect.
    #[inline]
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// The ring's index.
    pub fn index(&self) -> u16 {
        self.parts.index
    }

    /// How many descriptors it has.
    pub fn size(&self) -> u16 {
        self.table.size
    }

    /// The virtio features that the driver acknowledged.
    pub fn features(&self) -> u64 {
        self.parts.features
    }

    /// The guest's memory, to read and write what chains name.
    pub fn memory(&self) -> &GuestMemory {
        &self.parts.memory
    }

    /// Replaces the guest's memory after the VMM added or removed some.
    pub fn set_memory(&mut self, memory: GuestMemory) {
        self.parts.memory = memory;
    }

    /// Narrows what a chain may be.
    pub fn set_limits(&mut self, limits: ChainLimits) {
        self.table.limits = limits;
    }

    /// Readable when the guest kicked; to be watched while asleep.
    pub fn kick(&self) -> Option<BorrowedFd<'_>> {
        self.parts.kick.as_ref().map(AsFd::as_fd)
    }

    /// Takes a kick off the descriptor.
    pub fn drain_kick(&self) {
        if let Some(kick) = &self.parts.kick {
            // The descriptor does not block; nothing there is as good as something there.
            let _ = rustix::io::read(kick, &mut [0u8; 8]);
        }
    }

    /// The index of the next available entry: what the VMM is told when the ring stops.
    pub fn next_available(&self) -> u16 {
        self.parts.queue.next_avail()
    }

    /// How many requests the guest has made available by now that were not taken yet.
    pub fn waiting(&self) -> usize {
        let next = self.parts.queue.next_avail();
        if self.is_broken() {
            return 0;
        }
        let index = self.parts.queue.avail_idx(&*self.parts.memory, Ordering::Acquire);
        let new = index.map_or(0, |index| index.0.wrapping_sub(next)).min(self.table.size);
        self.again.len() + usize::from(new)
    }

    /// How many requests a predecessor took that were neither taken again nor given back yet.
    pub fn owed(&self) -> usize {
        if self.is_broken() { 0 } else { self.again.len() }
    }

    /// Whether the guest broke it.
    pub fn is_broken(&self) -> bool {
        self.service != Service::Full
    }

    /// Takes the next request into `chain`. An error is returned once; after it the ring is empty for ever.
    pub fn next_chain(&mut self, chain: &mut Chain) -> Result<Next, RingBroken> {
        if self.is_broken() {
            return Ok(Next::Empty);
        }
        let head = match self.next_head() {
            Ok(Some(head)) => head,
            Ok(None) => return Ok(Next::Empty),
            Err(broken) => {
                self.park();
                return Err(broken);
            }
        };
        Ok(match self.table.walk(&GuestView::new(&self.parts.memory), head, chain) {
            Ok(()) => Next::Chain,
            Err(error) => {
                chain.set_fault(Some(error));
                Next::Malformed(error)
            }
        })
    }

    /// The last byte that the device may write of a chain that breaks the rules: where devices of many kinds have their
    /// status. None if it cannot be found, or is no guest memory.
    pub fn last_writable(&self, malformed: &Chain) -> Option<Segment> {
        self.table.last_writable(&GuestView::new(&self.parts.memory), malformed.head())
    }

    /// Ends the service of a ring that holds what cannot be answered, as a device does that needs a reset: nothing is taken
    /// from it any more, and the VMM is told. What was taken before is completed as ever: its data have moved, and a guest
    /// that never hears of it waits for ever. The most recently taken chain is in the ring again, so that whoever is given
    /// the ring without a reset meets it too.
    pub fn break_off(&mut self, chain: &Chain) {
        if !self.is_broken() {
            self.put_back(chain);
            self.park();
        }
    }

    /// Gives the most recently taken chain back to the ring, as if it had not been taken.
    pub fn put_back(&mut self, chain: &Chain) {
        if self.taken_again {
            self.again.push(chain.head());
            return;
        }
        let next = self.parts.queue.next_avail().wrapping_sub(1);
        self.parts.queue.set_next_avail(next);
        if let Some(inflight) = &mut self.parts.inflight {
            inflight.put_back(chain.head());
        }
    }

    /// Puts a request into the used ring, with `written` bytes of its writable part filled. The guest learns of it by
    /// [`Ring::signal`]. An error is returned once, of a ring that was not broken before.
    pub fn complete(&mut self, head: u16, written: u32) -> Result<(), RingBroken> {
        if self.service == Service::Silent {
            return Ok(());
        }
        if let Some(inflight) = &self.parts.inflight {
            inflight.completing(once(head));
        }
        let next = self.parts.queue.next_used();
        if self.parts.queue.add_used(&*self.parts.memory, head, written).is_err() {
            return self.silence();
        }
        self.log_used(next, 1);
        if let Some(inflight) = &self.parts.inflight {
            inflight.completed(once(head), self.parts.queue.next_used());
        }
        self.unsignalled = true;
        Ok(())
    }

    /// Signals what was completed since the last call, if the guest wants to know. Call it once for many completions.
    pub fn signal(&mut self) {
        if !std::mem::take(&mut self.unsignalled) || self.service == Service::Silent {
            return;
        }
        let wanted = if self.parts.queue.event_idx_enabled() && !self.parts.event_index_unknown {
            self.event_reached()
        } else {
            // Those who know event indices leave these flags alone, and are signalled each time.
            // The used index before the flags.
            fence(Ordering::SeqCst);
            let flags: u16 = self
                .parts
                .memory
                .load(GuestAddress(self.parts.queue.avail_ring()), Ordering::Relaxed)
                .map_or(0, u16::from_le);
            u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0
        };
        if wanted {
            self.call();
        }
    }

    /// Asks the guest to kick. True when requests came meanwhile: look again before sleeping.
    pub fn enable_notifications(&mut self) -> bool {
        if self.is_broken() {
            return false;
        }
        if !self.again.is_empty() {
            return true;
        }
        let more = self.parts.queue.enable_notification(&*self.parts.memory).unwrap_or(false);
        self.log_notification();
        more
    }

    /// Tells the guest not to kick while we poll.
    pub fn disable_notifications(&mut self) {
        if !self.is_broken() {
            // A ring that cannot be written is found out when it is next used.
            let _ = self.parts.queue.disable_notification(&*self.parts.memory);
            self.log_notification();
        }
    }

    /// With VIRTIO_F_EVENT_IDX: whether the index at which the guest wants a signal was passed since the last one.
    /// Asked of the guest's memory here and not of the queue, which counts completions one by one.
    fn event_reached(&mut self) -> bool {
        let used = self.parts.queue.next_used();
        let before = std::mem::replace(&mut self.signalled, used);
        // The used index before the event.
        fence(Ordering::SeqCst);
        let at = GuestAddress(self.parts.queue.avail_ring() + 4 + 2 * u64::from(self.table.size));
        let event: u16 = match self.parts.memory.load(at, Ordering::Relaxed) {
            Ok(event) => u16::from_le(event),
            // A signal too many is harmless.
            Err(_) => return true,
        };
        used.wrapping_sub(event).wrapping_sub(1) < used.wrapping_sub(before)
    }

    fn next_head(&mut self) -> Result<Option<u16>, RingBroken> {
        if let Some(head) = self.again.pop() {
            self.taken_again = true;
            return Ok(Some(head));
        }
        let next = self.parts.queue.next_avail();
        let size = self.table.size;
        if next == self.available {
            let index = self
                .parts
                .queue
                .avail_idx(&*self.parts.memory, Ordering::Acquire)
                .map_err(|_| RingBroken::NotInMemory)?
                .0;
            if index.wrapping_sub(next) > size {
                return Err(RingBroken::AvailableIndex { next, index, size });
            }
            if index == next {
                return Ok(None);
            }
            self.available = index;
        }
        // The ring begins with flags and index, two bytes each; its size was checked to be not 0.
        let at = self.parts.queue.avail_ring() + 4 + 2 * u64::from(next % size);
        let head: u16 = self
            .parts
            .memory
            .load(GuestAddress(at), Ordering::Relaxed)
            .map(u16::from_le)
            .map_err(|_| RingBroken::NotInMemory)?;
        if head >= size {
            return Err(RingBroken::Head { head, size });
        }
        self.parts.queue.set_next_avail(next.wrapping_add(1));
        if let Some(inflight) = &mut self.parts.inflight {
            inflight.take(head);
        }
        self.taken_again = false;
        Ok(Some(head))
    }

    /// Logs `count` elements of the used ring from `next` on, and its index.
    #[inline]
    fn log_used(&self, next: u16, count: u16) {
        let Some(log) = self.parts.memory.log() else { return };
        let used = self.parts.queue.used_ring();
        log.mark(GuestAddress(used), USED_HEADER_BYTES);
        let first = next % self.table.size;
        // Up to the end of the ring, and then from its beginning.
        let before_end = count.min(self.table.size - first);
        for (first, count) in [(first, before_end), (0, count - before_end)] {
            let at = used + USED_HEADER_BYTES + USED_ELEMENT_BYTES * u64::from(first);
            log.mark(GuestAddress(at), USED_ELEMENT_BYTES * u64::from(count));
        }
    }

    /// Logs the places by which the guest is told whether to kick.
    fn log_notification(&self) {
        let Some(log) = self.parts.memory.log() else { return };
        let used = self.parts.queue.used_ring();
        log.mark(GuestAddress(used), USED_HEADER_BYTES);
        let event = used + USED_HEADER_BYTES + USED_ELEMENT_BYTES * u64::from(self.table.size);
        log.mark(GuestAddress(event), AVAILABLE_EVENT_BYTES);
    }

    /// The used ring cannot be written.
    #[cold]
    fn silence(&mut self) -> Result<(), RingBroken> {
        let was_broken = self.is_broken();
        if !was_broken {
            self.park();
        }
        self.service = Service::Silent;
        if was_broken { Ok(()) } else { Err(RingBroken::NotInMemory) }
    }

    fn park(&mut self) {
        self.service = Service::GivesBack;
        if let Some(error) = &self.parts.error {
            event::signal(error);
        }
    }

    fn call(&self) {
        let call = self.parts.call.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(call) = call.as_ref() {
            event::signal(call);
        }
    }
}

fn has(features: u64, bit: u32) -> bool {
    features & (1 << bit) != 0
}
