//! What devices do for nobody's lease: they make zeros of what was deleted, and keep tables of what is there.

use std::sync::mpsc::SyncSender;

use cxl_pool::{ByteOffset, LineOffset, Memory};
use pod_protocol::ids::{LeaseGeneration, LeaseId, PlaceNumber};

use super::in_flight::InFlight;
use super::task::BackendTask;
use crate::message::{Charge, Holder, Operation, Request, Tag};
use crate::ssd::{Command, Outcome};

/// Something to do.
#[derive(Debug, Clone)]
pub(crate) struct Chore {
    /// Which device.
    pub(super) device: usize,
    /// A write, of zeroes or of a table, or a flush.
    pub(super) operation: Operation,
    /// Where on the device.
    pub(super) start_bytes: u64,
    pub(super) length_bytes: u64,
    /// Of a write: where its data lies, in memory of our own beside the pool.
    pub(super) data: ByteOffset,
    /// Hears how it ended; that it never does, if the worker goes first.
    pub(super) done: SyncSender<Outcome>,
}

impl Chore {
    /// As a request. The lease is nobody's: they are counted from one, and never so many.
    fn request(&self) -> Request {
        let holder =
            Holder { lease: LeaseId::MAX, place: PlaceNumber::FIRST, generation: LeaseGeneration::new(0) };
        Request {
            holder,
            tag: Tag::new(0),
            operation: self.operation,
            force_unit_access: false,
            may_unmap: true,
            intent_log: false,
            marked: false,
            charge: Charge::Nothing,
            offset_bytes: self.start_bytes,
            length_bytes: self.length_bytes,
            data: LineOffset::new(0),
            segments: 0,
        }
    }
}

impl<M: Memory> BackendTask<M> {
    /// Begins those for which their devices have room. True if there were any.
    pub(super) fn begin_chores(&mut self) -> bool {
        let mut any = false;
        for _ in 0..self.chores.len() {
            let Some(chore) = self.chores.pop_front() else { break };
            if self.begin_chore(&chore).is_none() {
                // When something has ended there.
                self.chores.push_back(chore);
            } else {
                any = true;
            }
        }
        any
    }

    fn begin_chore(&mut self, chore: &Chore) -> Option<()> {
        let request = chore.request();
        let command = Command {
            id: self.commands.next_id(chore.device)?,
            operation: request.operation,
            force_unit_access: request.force_unit_access,
            may_unmap: request.may_unmap,
            offset_bytes: request.offset_bytes,
            length_bytes: request.length_bytes,
            data: chore.data,
        };
        self.devices.get_mut(chore.device)?.ssd.submit(command).ok()?;
        self.commands.enter(InFlight::of_nobody(request, chore.device, chore.done.clone()));
        Some(())
    }
}
