//! Commands that the devices are working on.

use cxl_pool::{Area, Generation};
use pod_protocol::ids::{ChannelId, LeaseId};

use crate::message::Request;
use crate::ssd::CommandId;

/// Commands that all devices of a host have at a time.
const COMMANDS_MAX: u32 = 2048;

/// A command that a device is working on, and whom to tell.
#[derive(Debug, Clone, Copy)]
pub(super) struct InFlight {
    pub(super) request: Request,
    pub(super) device: usize,
    pub(super) channel: ChannelId,
    pub(super) channel_generation: Generation,
}

impl InFlight {
    /// The lines of its data.
    fn data(&self) -> Option<Area> {
        let request = &self.request;
        request.operation.has_data().then(|| Area::new(request.data, request.data_lines()))
    }
}

/// All of them, by number.
#[derive(Debug)]
pub(super) struct Commands {
    slots: Vec<Option<InFlight>>,
    free: Vec<u32>,
}

impl Commands {
    pub(super) fn new() -> Self {
        Self { slots: vec![None; COMMANDS_MAX as usize], free: (0..COMMANDS_MAX).rev().collect() }
    }

    /// The number that the next command gets.
    pub(super) fn next_id(&self) -> Option<CommandId> {
        self.free.last().map(|&id| CommandId(id))
    }

    /// Enters a command under [`Commands::next_id`].
    pub(super) fn enter(&mut self, command: InFlight) {
        if let Some(id) = self.free.pop() {
            self.slots[id as usize] = Some(command);
        }
    }

    /// Takes a command that ended.
    pub(super) fn take(&mut self, id: CommandId) -> Option<InFlight> {
        let command = self.slots.get_mut(id.0 as usize)?.take()?;
        self.free.push(id.0);
        Some(command)
    }

    pub(super) fn count(&self, matches: impl Fn(&InFlight) -> bool) -> usize {
        self.slots.iter().flatten().filter(|command| matches(command)).count()
    }

    pub(super) fn of_lease(&self, lease: LeaseId) -> usize {
        self.count(|command| command.request.holder.lease == lease)
    }

    pub(super) fn touching(&self, area: &Area) -> usize {
        self.count(|command| command.data().is_some_and(|data| data.overlaps(area)))
    }
}
