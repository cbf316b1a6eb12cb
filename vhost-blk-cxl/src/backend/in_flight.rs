//! Commands that the devices are working on.

use std::sync::mpsc::SyncSender;

use cxl_pool::{Area, Generation, LineCount};
use pod_protocol::ids::{ChannelId, LeaseId};

use crate::message::{Operation, Request};
use crate::segments::Segment;
use crate::ssd::{CommandId, Outcome};

/// Commands that a device has at a time: one that hangs must leave some for the others.
const COMMANDS_PER_DEVICE_MAX: u32 = 1024;

/// A command that a device is working on, and whom to tell.
#[derive(Debug, Clone)]
pub(super) struct InFlight {
    pub(super) request: Request,
    /// Where its data lies, if that is in several places.
    pub(super) list: Vec<Segment>,
    pub(super) device: usize,
    pub(super) channel: ChannelId,
    pub(super) channel_generation: Generation,
    /// Who waits for it, if it is of no frontend.
    pub(super) waited_for: Option<SyncSender<Outcome>>,
}

impl InFlight {
    /// A command that is of no lease and no channel.
    pub(super) fn of_nobody(request: Request, device: usize, done: SyncSender<Outcome>) -> Self {
        let (channel, channel_generation) = (ChannelId::new(0), Generation::new(0));
        Self { request, list: Vec::new(), device, channel, channel_generation, waited_for: Some(done) }
    }

    /// It is ours, and no frontend's: it clears the volume's write-intent log. Of frontends, [`Request::decode`] takes no such
    /// request.
    pub(super) fn clears_log(&self) -> bool {
        self.request.intent_log && self.request.operation == Operation::WriteZeroes
    }

    /// Whether some of its data lies there.
    fn touches(&self, area: &Area) -> bool {
        let request = &self.request;
        if request.segments > 0 {
            return self.list.iter().any(|segment| {
                let lines = LineCount::covering(segment.bytes.into());
                Area::new(segment.start.line(), lines).overlaps(area)
            });
        }
        request.operation.has_data() && Area::new(request.data, request.data_lines()).overlaps(area)
    }
}

/// Commands that have to end before others may begin: those that were entered up to one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Earlier {
    /// Of a lease at one device: whatever they were begun for, they are of the same data.
    AtDevice(u64),
    /// Of a lease, at whichever device: their buffers are used again.
    OfLease(u64),
}

/// All of them, by number.
#[derive(Debug)]
pub(super) struct Commands {
    slots: Vec<Option<InFlight>>,
    /// When a command was entered, counted in commands.
    serials: Vec<u64>,
    entered: u64,
    free: Vec<u32>,
    of_device: Vec<u32>,
}

impl Commands {
    pub(super) fn new(devices: usize) -> Self {
        // A host has a few devices.
        let count = COMMANDS_PER_DEVICE_MAX * u32::try_from(devices).unwrap_or(1);
        Self {
            slots: vec![None; count as usize],
            serials: vec![0; count as usize],
            entered: 0,
            free: (0..count).rev().collect(),
            of_device: vec![0; devices],
        }
    }

    /// The number that the next command gets, if the device may have another.
    pub(super) fn next_id(&self, device: usize) -> Option<CommandId> {
        if self.of_device[device] >= COMMANDS_PER_DEVICE_MAX {
            return None;
        }
        self.free.last().map(|&id| CommandId(id))
    }

    /// How many a device has.
    pub(super) fn of_device(&self, device: usize) -> u32 {
        self.of_device[device]
    }

    /// The serial number of the command that a device has had for the longest time.
    pub(super) fn oldest_of_device(&self, device: usize) -> Option<u64> {
        let of_device = |(slot, &serial): (&Option<InFlight>, &u64)| {
            slot.as_ref().filter(|it| it.device == device).map(|_| serial)
        };
        self.slots.iter().zip(&self.serials).filter_map(of_device).min()
    }

    /// Enters a command under [`Commands::next_id`].
    pub(super) fn enter(&mut self, command: InFlight) {
        if let Some(id) = self.free.pop() {
            self.of_device[command.device] += 1;
            self.entered += 1;
            self.serials[id as usize] = self.entered;
            self.slots[id as usize] = Some(command);
        }
    }

    /// Takes a command that ended.
    pub(super) fn take(&mut self, id: CommandId) -> Option<InFlight> {
        let command = self.slots.get_mut(id.0 as usize)?.take()?;
        self.of_device[command.device] -= 1;
        self.free.push(id.0);
        Some(command)
    }

    pub(super) fn count(&self, matches: impl Fn(&InFlight) -> bool) -> usize {
        self.slots.iter().flatten().filter(|command| matches(command)).count()
    }

    /// How many a device has of a lease, whichever of the lease's places it is or was.
    pub(super) fn of_lease(&self, lease: LeaseId, device: usize) -> usize {
        self.count(|command| command.request.holder.lease == lease && command.device == device)
    }

    /// What a device has of a lease now.
    pub(super) fn at_device(&self) -> Earlier {
        Earlier::AtDevice(self.entered)
    }

    /// What all devices have of a lease now.
    pub(super) fn of_all_devices(&self) -> Earlier {
        Earlier::OfLease(self.entered)
    }

    /// Whether some of these, of this lease, are still with this device, or any.
    pub(super) fn has(&self, earlier: Earlier, lease: LeaseId, device: usize) -> bool {
        let mut all = self.slots.iter().zip(&self.serials);
        all.any(|(slot, &serial)| {
            let Some(command) = slot.as_ref().filter(|it| it.request.holder.lease == lease) else {
                return false;
            };
            match earlier {
                Earlier::AtDevice(last) => serial <= last && command.device == device,
                Earlier::OfLease(last) => serial <= last,
            }
        })
    }

    pub(super) fn touching(&self, area: &Area) -> usize {
        self.count(|command| command.touches(area))
    }
}
