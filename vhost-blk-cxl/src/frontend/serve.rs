//! How a disk serves its guest: taking requests, sending them, answering them.

use std::sync::atomic::Ordering;
use std::time::Instant;

use cxl_pool::{ByteOffset, LINE_BYTES, LineOffset, Memory};
use tracing::{debug, warn};
use vhost_frontend::pacing::Way;
use vhost_frontend::{Buffer, Chain, ChainError, ChainReader, ChainWriter, CopyError, Next, Ring};

use super::device::{ID_BYTES, caches_writes};
use super::disk::{Allowance, Disk, Served};
use super::parse::{HEADER_BYTES, Parsed, Refusal, parse};
use super::place::Place;
use super::slots::{Slot, State};
use super::steps::{room_for_step, step_bytes_max};
use super::turn_budget::TurnBudget;
use crate::message::{Charge, Completion, Operation, Request, Status};

/// Requests taken from a ring before the next ring's turn.
const RING_BUDGET: usize = 32;

/// How much of a buffer is asked for while the one before is copied.
const PREFETCH_BYTES: u64 = 4096;

/// VIRTIO_BLK_S_OK, _IOERR and _UNSUPP.
const S_OK: u8 = 0;
pub(super) const S_IOERR: u8 = 1;
const S_UNSUPP: u8 = 2;

impl<M: Memory> Disk<M> {
    /// Sends what waits, then takes requests from the rings. True if anything moved.
    pub(crate) fn submit(&mut self, allowance: &mut Allowance<'_>) -> bool {
        if self.object.incoming {
            // Another host's frontend serves the guest until it is here.
            self.blocked = true;
            return false;
        }
        if let Some(pacer) = &mut self.pacer {
            pacer.look();
        }
        self.begin_waiting_flushes();
        self.budget = TurnBudget::whole();
        let mut moved = false;
        let mut left = self.queued.len();
        while !self.refused && allowance.messages > 0 && left > 0 && self.budget.is_left() {
            let Some(index) = self.queued.pop_front() else { break };
            left -= 1;
            match self.place_again(index) {
                Ok(true) => self.send(index, allowance),
                Ok(false) => {
                    // Others hold buffers, and give them back.
                    self.queued.push_back(index);
                    continue;
                }
                Err(_) => self.answer(index, Status::IoError),
            }
            moved = true;
        }
        // New requests must not overtake those, nor touch what an abandoned one may still be writing.
        let held = !self.queued.is_empty() || self.slots.abandoned() > 0;
        if held && !self.object.failed {
            self.blocked = true;
        }
        // Nor is the clock's time to be spent on looking at what has to wait for its share of the fabric.
        let paced = self.pacer.as_ref().is_some_and(|pacer| pacer.is_held(Way::Asked)) && !self.object.failed;
        self.blocked |= self.held || paced;
        if self.blocked {
            return moved;
        }
        // What a predecessor took may have been carried out already, and will be again: whoever saw it, or wrote in its place, before
        // that would see its own undone. Whichever ring it is owed on, it begins first, and what meets it waits for it.
        let owed_here = self.rings.iter().flatten().any(Served::owes);
        let owed_only = !self.object.failed && (owed_here || self.owed_elsewhere.any());
        if owed_only && !owed_here {
            self.blocked = true;
            return moved;
        }
        for turn in 0..self.rings.len() {
            let ring = (self.first_ring + turn) % self.rings.len();
            let mut taken = 0;
            while taken < RING_BUDGET
                && self.budget.is_left()
                && (!owed_only || self.rings[ring].as_ref().is_some_and(Served::owes))
                && self.take_one(ring, allowance)
            {
                taken += 1;
            }
            moved |= taken > 0 || !self.budget.is_left();
            if self.blocked || allowance.messages == 0 && !self.object.failed || !self.budget.is_left() {
                // Who has to wait comes first next time, unless it has just had its turn: of a small share of the fabric the next part is another one's.
                self.first_ring = (ring + usize::from(taken > 0)) % self.rings.len();
                return moved;
            }
        }
        self.first_ring = (self.first_ring + 1) % self.rings.len().max(1);
        moved
    }

    /// There is no channel. Requests stay in their rings, unless the controller says that they need not wait.
    pub(crate) fn submit_without_channel(&mut self) -> bool {
        if self.object.failed {
            return self.submit(&mut Allowance { messages: 0, more: false, outbox: &mut Vec::new() });
        }
        self.blocked = true;
        false
    }

    /// Takes a request from a ring. True if there was one.
    fn take_one(&mut self, ring: usize, allowance: &mut Allowance<'_>) -> bool {
        let (shape, data_step_bytes_max) = (self.shape(), self.data_step_bytes_max());
        let any_under_way = self.slots.with_backend() > 0;
        let failed = self.object.failed;
        let Some(served) = self.rings[ring].as_mut().filter(|served| served.gives_requests()) else {
            return false;
        };
        if allowance.messages == 0 && !failed {
            self.blocked = !allowance.more;
            return false;
        }
        // What fails at once takes no slot: a device that hangs may keep them all.
        let Some(index) = (if failed { Some(self.slots.spare()) } else { self.slots.candidate() }) else {
            self.blocked = true;
            return false;
        };
        let slot = self.slots.get_mut(index);
        let next = served.ring.next_chain(&mut slot.chain);
        slot.unaware = served.unaware > 0;
        served.unaware = served.unaware.saturating_sub(1);
        match next {
            Ok(Next::Chain) => self.budget.walked(slot.chain.walked()),
            Ok(Next::Empty) => return false,
            Ok(Next::Malformed(error)) => {
                self.budget.malformed(slot.chain.walked());
                return self.answer_malformed(ring, index, error);
            }
            Err(error) => {
                if let Some(left_out) = self.warnings.is_due(Instant::now()) {
                    warn!(lease = %self.object.lease, instance = self.object.instance_name, ring, %error, left_out,
                        "the guest broke its ring: it is served no more until the guest resets the disk");
                }
                self.counters.broken_rings.add(1);
                return false;
            }
        }
        let parsed = if failed {
            Parsed::Refused(Refusal::IoError)
        } else {
            parse(served.ring.memory(), &slot.chain, shape)
        };
        let Parsed::Operation { operation, offset_bytes, length_bytes, may_unmap } = parsed else {
            return self.answer_here(ring, index, parsed);
        };
        let range = offset_bytes..offset_bytes.saturating_add(length_bytes);
        let step_bytes_max = step_bytes_max(operation, data_step_bytes_max);
        let in_steps = length_bytes > step_bytes_max;
        if self.under_way.has_to_wait(operation.writes(), &range, in_steps) {
            return served.put_back(slot, &mut self.blocked);
        }
        slot.begin(offset_bytes, length_bytes, step_bytes_max);
        if operation.has_data() {
            let buffers = &mut self.buffers;
            let room = (&mut *buffers, &mut slot.pieces);
            let in_pool = (!in_steps)
                .then(|| self.finder.find(&slot.chain, operation, length_bytes, shape.block_bytes, room))
                .flatten();
            match in_pool {
                Some(place) => slot.place = place,
                None => match room_for_step(buffers, slot.length_bytes, any_under_way) {
                    Some(buffer) => slot.place_in(buffer),
                    None => return served.put_back(slot, &mut self.blocked),
                },
            }
            if let Some(pacer) = &mut self.pacer
                && !pacer.admit(Way::Asked, slot.length_bytes)
            {
                if let Some(buffer) = std::mem::replace(&mut slot.place, Place::Nowhere).buffer() {
                    buffers.free(buffer);
                }
                return served.put_back(slot, &mut self.blocked);
            }
            self.counters.zero_copy.add(u64::from(slot.place.is_in_guest()));
        }
        slot.ring = served.ring.index();
        slot.operation = operation;
        slot.may_unmap = may_unmap;
        slot.vouches = self.unflushed.mark();
        slot.force_unit_access = operation.writes()
            && !caches_writes(served.ring.features(), self.writeback.load(Ordering::Relaxed));
        let copied = match (operation, slot.place) {
            (Operation::Write, Place::Buffer(buffer)) => {
                self.budget.copied(slot.length_bytes);
                copy_in(&self.memory, &served.ring, slot, buffer)
            }
            (Operation::Write, _) => {
                slot.in_guest(|start, bytes| self.memory.write_back(start, bytes));
                Ok(())
            }
            _ => Ok(()),
        };
        served.in_flight += 1;
        if operation != Operation::Flush {
            self.under_way.begin(index, operation.writes(), range, slot.left_bytes > 0);
        }
        self.slots.take();
        match copied {
            Ok(()) => self.send(index, allowance),
            Err(_) => self.answer(index, Status::IoError),
        }
        true
    }

    /// The most recently taken request of a ring breaks the rules. It is answered where its status can be found.
    fn answer_malformed(&mut self, ring: usize, index: u16, error: ChainError) -> bool {
        debug!(lease = %self.object.lease, %error, "malformed request");
        self.counters.malformed.add(1);
        let Some(served) = self.rings[ring].as_mut() else { return false };
        let chain = &self.slots.get(index).chain;
        let Some(status) = served.ring.last_writable(chain) else {
            return self.break_off(ring, index, &error.to_string());
        };
        let mut writer = ChainWriter::new(served.ring.memory(), std::slice::from_ref(&status));
        let written = u32::from(writer.write(&[S_IOERR]).is_ok());
        served.ring.complete(chain.head(), written).is_ok()
    }

    /// The most recently taken request of a ring has no place for a status. Given back without one, the guest would take for it
    /// whatever its driver left there.
    fn break_off(&mut self, ring: usize, index: u16, reason: &str) -> bool {
        let Some(served) = self.rings[ring].as_mut() else { return false };
        served.ring.break_off(&self.slots.get(index).chain);
        if let Some(left_out) = self.warnings.is_due(Instant::now()) {
            warn!(lease = %self.object.lease, instance = self.object.instance_name, ring, reason, left_out,
                "a request has no place for a status: the ring is served no more until the guest resets the disk");
        }
        self.counters.broken_rings.add(1);
        false
    }

    /// Answers what needs no backend.
    fn answer_here(&mut self, ring: usize, index: u16, parsed: Parsed) -> bool {
        self.budget.answered();
        if parsed == Parsed::Refused(Refusal::NoStatus) {
            self.counters.malformed.add(1);
            return self.break_off(ring, index, "it has no writable part");
        }
        let Some(served) = self.rings[ring].as_mut() else { return false };
        let chain = &self.slots.get(index).chain;
        let written = match parsed {
            Parsed::Id => {
                let mut id = [0; ID_BYTES as usize];
                let serial = self.object.serial.as_bytes();
                let length = serial.len().min(id.len());
                id[..length].copy_from_slice(&serial[..length]);
                let mut writer = ChainWriter::new(served.ring.memory(), chain.writable());
                match writer.write(&id) {
                    Ok(()) => write_status(&served.ring, chain, S_OK, ID_BYTES),
                    Err(_) => write_status(&served.ring, chain, S_IOERR, 0),
                }
            }
            Parsed::Refused(Refusal::Unsupported) => {
                self.counters.refused();
                write_status(&served.ring, chain, S_UNSUPP, 0)
            }
            _ => {
                self.counters.refused();
                write_status(&served.ring, chain, S_IOERR, 0)
            }
        };
        // A ring that cannot be written any more parks itself.
        served.ring.complete(chain.head(), written).is_ok()
    }

    /// Puts a request into the outbox. The data of a write has been written back, the buffer of a read is flushed
    /// here if it needs it; a fence before the message follows for all of them.
    fn send(&mut self, index: u16, allowance: &mut Allowance<'_>) {
        let slot = self.slots.get(index);
        match (slot.operation, slot.place) {
            (Operation::Read, Place::Buffer(buffer)) => {
                self.flushed.flush(&self.memory, buffer.start(), slot.length_bytes);
            }
            // The guest has it in its cache, which is ours.
            (Operation::Read, _) => slot.in_guest(|start, bytes| self.memory.flush(start, bytes)),
            _ => {}
        }
        let segments = match slot.place {
            Place::Guests(list) => {
                // Else whoever cuts it writes those of its parts.
                if self.finder.has_whole_lists() {
                    let name = (self.holder(), self.slots.tag(index));
                    self.list.write(&self.memory, list.start(), name, slot.pieces.iter().copied());
                }
                // No more than a list may have.
                u16::try_from(slot.pieces.len()).unwrap_or(u16::MAX)
            }
            _ => 0,
        };
        let request = Request {
            holder: self.holder(),
            tag: self.slots.tag(index),
            operation: slot.operation,
            force_unit_access: slot.force_unit_access,
            may_unmap: slot.may_unmap,
            intent_log: false,
            marked: false,
            charge: Charge::Whole,
            offset_bytes: slot.offset_bytes,
            length_bytes: slot.length_bytes,
            data: slot.place.start().map_or(LineOffset::new(0), ByteOffset::line),
            segments,
        };
        allowance.outbox.push(request.encode());
        allowance.messages -= 1;
        self.slots.get_mut(index).sent_as = request.holder.generation;
        self.slots.set_state(index, State::Sent);
    }

    /// Takes the buffer of a read back from the backend, before [`Disk::complete`] and with a fence in between. True if
    /// there is one.
    pub(crate) fn take_back(&self, completion: &Completion) -> bool {
        let Some(index) = self.slots.find(completion.tag, completion.holder.generation) else { return false };
        let slot = self.slots.get(index);
        if slot.operation != Operation::Read {
            return false;
        }
        if let Place::Buffer(buffer) = slot.place {
            self.memory.invalidate(buffer.start(), slot.length_bytes);
        }
        slot.in_guest(|start, bytes| self.memory.invalidate(start, bytes));
        true
    }

    /// Asks for the data of a read that is copied soon.
    pub(crate) fn prefetch(&self, completion: &Completion) {
        if M::COHERENT {
            return;
        }
        let Some(index) = self.slots.find(completion.tag, completion.holder.generation) else { return };
        let slot = self.slots.get(index);
        if let (Operation::Read, Place::Buffer(buffer)) = (slot.operation, slot.place) {
            // What is longer, the processor brings by itself.
            for at in (0..slot.length_bytes.min(PREFETCH_BYTES)).step_by(LINE_BYTES) {
                self.memory.prefetch(buffer.start().saturating_add(at));
            }
        }
    }

    /// An answer arrived.
    pub(crate) fn complete(&mut self, completion: &Completion) {
        let Some(index) = self.slots.find(completion.tag, completion.holder.generation) else {
            self.counters.stale.add(1);
            return;
        };
        let slot = self.slots.get(index);
        if slot.operation != completion.operation {
            // The backend is confused; it would not do better if asked again.
            self.counters.malformed.add(1);
            self.answer(index, Status::IoError);
        } else if completion.status == Status::Refused && slot.state == State::Sent {
            // The lease moved on while the request was under way; it goes out again with what comes.
            self.refused |= completion.holder == self.holder();
            self.slots.set_state(index, State::Queued);
            self.queued.push_back(index);
        } else if matches!(slot.place, Place::Guests(_))
            && !completion.knows_lists
            && slot.state == State::Sent
        {
            self.copy_instead(index);
        } else {
            let status = self.vouched(index, completion);
            match if status == Status::Ok { self.next_step(index) } else { Ok(false) } {
                Ok(true) => {}
                Ok(false) => self.answer(index, status),
                Err(_) => self.answer(index, Status::IoError),
            }
            if self.unflushed.tells() {
                self.told();
            }
        }
    }

    /// Ends a request. The guest hears of it with the next signal, unless nobody waits for it.
    fn answer(&mut self, index: u16, status: Status) {
        if self.ends_own_flush(index, status) {
            return;
        }
        let slot = self.slots.get(index);
        self.counters.ended(slot.operation, status, slot.total_bytes());
        if slot.state != State::Abandoned {
            self.give_back(index, status);
        }
        self.free(index);
    }

    /// Gives the chain of a request back to the guest.
    pub(super) fn give_back(&mut self, index: u16, status: Status) {
        let slot = self.slots.get(index);
        let Some(Some(served)) = self.rings.get_mut(usize::from(slot.ring)) else { return };
        // Not longer than the longest request.
        let data_bytes = u32::try_from(slot.total_bytes()).unwrap_or(u32::MAX);
        let (status, written) = match (status, slot.operation, slot.place) {
            (Status::Ok, Operation::Read, Place::Buffer(buffer)) => {
                match copy_out(&self.memory, &served.ring, slot, buffer) {
                    Ok(()) => (S_OK, data_bytes),
                    Err(_) => (S_IOERR, 0),
                }
            }
            (Status::Ok, Operation::Read, _) => (S_OK, data_bytes),
            (Status::Ok, ..) => (S_OK, 0),
            (Status::Unsupported, ..) => (S_UNSUPP, 0),
            (Status::IoError | Status::Refused, ..) => (S_IOERR, 0),
        };
        if let Some(log) = served.ring.memory().log()
            && slot.fills_guest_memory()
        {
            // The device may have written all of it, or with an error some.
            log.mark_segments(slot.chain.writable(), slot.length_bytes);
        }
        let written = write_status(&served.ring, &slot.chain, status, written);
        // A ring that cannot be written any more parks itself.
        let _ = served.ring.complete(slot.chain.head(), written);
        served.in_flight -= 1;
    }

    /// Tells the guest about everything that was completed.
    pub(crate) fn signal(&mut self) {
        for served in self.rings.iter_mut().flatten() {
            served.ring.signal();
        }
    }
}

/// Copies the data of a write into the pool and out of our cache.
pub(super) fn copy_in<M: Memory>(
    memory: &M,
    ring: &Ring,
    slot: &Slot,
    buffer: Buffer,
) -> Result<(), CopyError> {
    let mut reader = ChainReader::new(ring.memory(), slot.chain.readable());
    reader
        .skip(HEADER_BYTES + slot.done_bytes)
        .and_then(|()| reader.stream_to_pool(memory, buffer.start(), slot.length_bytes))
}

/// Copies the data of a read to the guest.
pub(super) fn copy_out<M: Memory>(
    memory: &M,
    ring: &Ring,
    slot: &Slot,
    buffer: Buffer,
) -> Result<(), CopyError> {
    let mut writer = ChainWriter::new(ring.memory(), slot.chain.writable());
    writer.skip(slot.done_bytes)?;
    writer.copy_from_pool(memory, buffer.start(), slot.length_bytes)
}

/// Writes the status, the last byte of the writable part. Returns how many bytes the guest may believe were written:
/// `before` and the status.
fn write_status(ring: &Ring, chain: &Chain, status: u8, before: u32) -> u32 {
    let mut writer = ChainWriter::new(ring.memory(), chain.writable());
    let written = writer.skip(chain.writable_bytes() - 1).and_then(|()| writer.write(&[status]));
    if written.is_ok() { before + 1 } else { 0 }
}
