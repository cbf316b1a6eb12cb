//! Memory that a VMM takes back while requests have their data there: a guest's that lies in the pool, and is not copied.
//!
//! The VMM may use it for something else as soon as it is told that it is gone, so it is told so when nothing of it is lent any more.
//! Requests that are not answered in time fail, but for reads that a device may be carrying out, as when [rings stop](super::giving_up).

use std::sync::mpsc::SyncSender;

use cxl_pool::Memory;
use vhost_frontend::{GuestMemory, PoolMap};

use super::disk::Disk;
use super::slots::{Slot, State};

/// Who wants to know when it is gone.
pub(super) struct TakenBack {
    done: SyncSender<()>,
    /// Who waits has waited long enough.
    hurries: bool,
}

/// Whether data of a request lies in what is not the guest's any more.
fn is_outside(map: &PoolMap, slot: &Slot) -> bool {
    let mut outside = false;
    slot.in_guest(|start, bytes| outside |= !map.has(start, bytes));
    outside
}

impl<M: Memory> Disk<M> {
    /// The guest's memory is this from now on. Answers once nothing is lent of what is not in it any more.
    pub(super) fn change_memory(&mut self, memory: &GuestMemory, done: SyncSender<()>) {
        self.set_guest_memory(memory);
        // A VMM waits for one thing at a time: whoever asked before has gone.
        self.taken_back = Some(TakenBack { done, hurries: false });
        self.finish_taking_back();
    }

    /// Waits for nothing any longer but for what a device may still fill.
    pub(super) fn hurry_taking_back(&mut self) {
        if let Some(taken) = &mut self.taken_back {
            taken.hurries = true;
        }
        self.release_stopped();
    }

    /// Whether a VMM has waited long enough for memory.
    pub(super) fn hurries_taking_back(&self) -> bool {
        self.taken_back.as_ref().is_some_and(|taken| taken.hurries)
    }

    /// Whether it has for that in which data of this request lies.
    pub(super) fn is_taken_back(&self, slot: &Slot) -> bool {
        self.hurries_taking_back() && is_outside(&self.finder.map, slot)
    }

    /// Answers who took memory back, if nothing of it is lent any more.
    pub(super) fn finish_taking_back(&mut self) {
        if self.taken_back.is_none() {
            return;
        }
        if self.hurries_taking_back() {
            let map = self.finder.map.clone();
            self.give_up_where(true, |slot| is_outside(&map, slot));
        }
        // What failed may still be read by a device, which nobody believes.
        let is_lent = |slot: &Slot| {
            (slot.state != State::Abandoned || slot.fills_guest_memory())
                && is_outside(&self.finder.map, slot)
        };
        if !self.slots.any(is_lent)
            && let Some(taken) = self.taken_back.take()
        {
            let _ = taken.done.try_send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, sync_channel};

    use cxl_pool::simulated::{SimulatedMemory, SimulatedPool};
    use cxl_pool::{ByteOffset, HostId};

    use super::super::place::Place;
    use super::super::place::tests::object;
    use super::*;
    use crate::message::Operation;

    /// A disk with a request in guest memory, in this state.
    fn disk(operation: Operation, state: State) -> (Disk<SimulatedMemory>, u16) {
        let memory = SimulatedPool::new(1, 1 << 20).host(HostId::new(1));
        let mut disk = Disk::new(memory, object(), Arc::default(), Arc::default(), None);
        let index = disk.slots.candidate().unwrap();
        disk.slots.take();
        let slot = disk.slots.get_mut(index);
        (slot.operation, slot.length_bytes, slot.place) = (operation, 4096, Place::Guest(ByteOffset::new(0)));
        disk.slots.set_state(index, state);
        if matches!(state, State::Queued | State::Lingering) {
            disk.queued.push_back(index);
        }
        (disk, index)
    }

    /// All memory is taken back.
    fn take_all(disk: &mut Disk<SimulatedMemory>) -> Receiver<()> {
        let (done, answer) = sync_channel(1);
        disk.change_memory(&GuestMemory::default(), done);
        answer
    }

    #[test]
    fn memory_is_gone_when_its_request_has_ended() {
        for state in [State::Queued, State::Lingering, State::Sent] {
            for operation in [Operation::Read, Operation::Write] {
                let (mut disk, index) = disk(operation, state);
                let answer = take_all(&mut disk);
                disk.release_stopped();
                assert!(answer.try_recv().is_err(), "{operation:?} {state:?}");
                disk.free(index);
                disk.release_stopped();
                assert_eq!(answer.try_recv(), Ok(()));
            }
        }
        let (mut disk, index) = disk(Operation::Write, State::Sent);
        disk.slots.get_mut(index).place = Place::Nowhere;
        assert_eq!(take_all(&mut disk).try_recv(), Ok(()), "nothing of the guest's");
    }

    #[test]
    fn what_no_device_fills_is_not_waited_for_longer_than_one_waits() {
        for (operation, state) in [
            (Operation::Write, State::Sent),
            (Operation::Write, State::Lingering),
            (Operation::Write, State::Queued),
            (Operation::Read, State::Queued),
        ] {
            let (mut disk, index) = disk(operation, state);
            let answer = take_all(&mut disk);
            assert!(answer.try_recv().is_err());
            disk.hurry_taking_back();
            assert_eq!(answer.try_recv(), Ok(()), "{operation:?} {state:?}");
            let is_under_way = state != State::Queued;
            assert_eq!(disk.slots.get(index).state == State::Abandoned, is_under_way);
            assert!(disk.queued.is_empty(), "it is not sent");
        }
    }

    #[test]
    fn what_a_device_fills_is_waited_for_and_not_asked_for_again() {
        for state in [State::Sent, State::Lingering] {
            let (mut disk, index) = disk(Operation::Read, state);
            let answer = take_all(&mut disk);
            disk.hurry_taking_back();
            assert!(answer.try_recv().is_err(), "{state:?}");
            disk.channel_restarts();
            assert!(answer.try_recv().is_err());
            disk.channel_ready();
            assert_eq!(answer.try_recv(), Ok(()));
            assert!(disk.queued.is_empty() && disk.slots.get(index).state == State::Free);
        }
    }
}
