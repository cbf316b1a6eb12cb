//! From the volumes to the devices: each volume has a queue of its own, so that a device that hangs, or a volume that
//! has had its share, keeps nobody else waiting. Those who are sure of a minimum come first; of what is left each has as much as its
//! priority says.

use cxl_pool::Memory;
use pod_protocol::ids::PlaceId;
use pod_protocol::objects::VolumeObject;
use tracing::info;

use super::arrivals::Held;
use super::check::{Rejected, check};
use super::in_flight::InFlight;
use super::sharing::{Room, Sharing, cost, moved_bytes};
use super::task::BackendTask;
use super::volume::{LogTrust, Volume};
use crate::intent_log;
use crate::message::{Operation, Request, Status};
use crate::ssd::Command;

/// Requests of a device that begin before what it has finished is looked at.
const BUDGET: usize = 256;

/// Which of a volume's requests it is the turn of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// It has had less than it is sure to get: the guest's. What is copied for it pays for nothing, and would never make up for that.
    Minimum,
    /// Any.
    Usual,
}

/// What became of a volume's first request.
enum Attempt {
    /// It began, or was answered; that costs so much.
    Done(u64),
    /// It has to wait, whatever the device could do.
    Waits,
    /// It has to wait, and all others of this device as well.
    NoRoom,
    /// There is none.
    Nothing,
}

impl<M: Memory> BackendTask<M> {
    /// Passes requests of all volumes to the devices.
    pub(super) fn dispatch(&mut self) -> bool {
        self.due_ns = None;
        let mut moved = false;
        for device in 0..self.devices.len() {
            if !self.devices[device].sharing.turns.is_empty() {
                let mut sharing = std::mem::take(&mut self.devices[device].sharing);
                moved |= self.dispatch_to(&mut sharing);
                self.devices[device].sharing = sharing;
            }
        }
        moved
    }

    fn dispatch_to(&mut self, Sharing { turns, room }: &mut Sharing) -> bool {
        let is_timed =
            |id| self.volumes.get(&id).is_some_and(|volume: &Volume| volume.throttle.needs_clock());
        let timed = turns.iter().any(is_timed);
        let now_ns = if timed { self.now_ns() } else { 0 };
        let mut begun = 0;
        if timed {
            // Who has had less than it is sure to get comes first.
            for id in turns.iter() {
                let below = |task: &Self| {
                    task.volumes.get(&id).is_some_and(|volume| volume.throttle.is_below_minimum(now_ns))
                };
                while begun < BUDGET
                    && below(self)
                    && matches!(self.attempt(id, Turn::Minimum, room, now_ns), Attempt::Done(_))
                {
                    begun += 1;
                }
            }
        }
        while begun < BUDGET
            && let Some(id) = turns.current()
        {
            match self.attempt(id, Turn::Usual, room, now_ns) {
                Attempt::Done(cost) => {
                    turns.pay(cost);
                    begun += 1;
                }
                Attempt::Waits => turns.set_aside(),
                Attempt::NoRoom => break,
                Attempt::Nothing => {
                    if let Some(volume) = self.volumes.get_mut(&id) {
                        volume.is_active = false;
                    }
                    turns.leave_first();
                }
            }
        }
        turns.take_back();
        begun > 0
    }

    /// Tries to begin a request of a volume.
    fn attempt(&mut self, id: PlaceId, turn: Turn, room: &mut Room, now_ns: u64) -> Attempt {
        let Some(volume) = self.volumes.get_mut(&id) else { return Attempt::Nothing };
        if volume.held.is_empty() {
            return Attempt::Nothing;
        }
        if volume.waits_for.is_some() {
            return Attempt::Waits;
        }
        // The guest pays for its own requests only, not for what is noted or copied on its behalf.
        let is_limited = volume.throttle.needs_clock();
        let until = if is_limited && volume.held.any_of_guest() { volume.waits_until(now_ns) } else { None };
        if let Some(until) = until {
            self.due_ns = Some(self.due_ns.map_or(until, |due| due.min(until)));
        }
        let chosen = match turn {
            Turn::Usual => volume.held.choose(until.is_some()),
            Turn::Minimum if until.is_some() => None,
            Turn::Minimum => volume.held.choose_guests(),
        };
        let Some(request) = chosen.map(|held| held.request) else { return Attempt::Waits };
        let writes_zeroes = || self.devices[volume.device].ssd.writes_zeroes();
        let moved = if is_limited && !request.is_free() { moved_bytes(&request, writes_zeroes) } else { 0 };
        let attempt = self.begin(id, room);
        if matches!(attempt, Attempt::Done(_))
            && let Some(volume) = self.volumes.get_mut(&id)
        {
            if let Some(held) = volume.held.take() {
                self.arrivals.recycle(held.list);
            }
            if !request.is_free() {
                volume.throttled = false;
                if is_limited {
                    volume.throttle.take(moved, now_ns);
                }
            }
            if let Some(channel) = self.channels.get_mut(&volume.object.channel) {
                channel.waiting = channel.waiting.saturating_sub(1);
            }
        }
        attempt
    }

    /// Begins the request of a volume that was chosen, which is of its current generation, or answers it.
    fn begin(&mut self, id: PlaceId, room: &mut Room) -> Attempt {
        let Some(volume) = self.volumes.get_mut(&id) else { return Attempt::Nothing };
        let Some(Held { request, list }) = volume.held.first() else { return Attempt::Nothing };
        let request = *request;
        let done = Attempt::Done(cost(&request, || self.devices[volume.device].ssd.writes_zeroes()));
        let on = volume.object.channel;
        let Some(channel) = self.channels.get_mut(&on) else { return done };
        let device = &mut self.devices[volume.device];
        let offset_bytes =
            match check(&request, list, &volume.object, volume.intent_log, device.ssd.geometry()) {
                Ok(offset) => offset,
                Err(Rejected(status)) => {
                    volume.counters.refused();
                    channel.outbox.push_back(request.not_done(status).encode());
                    return done;
                }
            };
        if volume.log_trust == LogTrust::BeingCleared {
            return Attempt::Waits;
        }
        if volume.log_trust == LogTrust::NotCleared && request.operation.writes() {
            volume.log_trust = LogTrust::Kept;
            volume.counters.ended(request.operation, Status::IoError, 0);
            channel.outbox.push_back(request.not_done(Status::IoError).encode());
            return done;
        }
        if !room.is_there(self.commands.of_device(volume.device), volume.in_flight) {
            return Attempt::NoRoom;
        }
        let log_to_clear = volume.log_to_clear(&request);
        let (request, offset_bytes) = match log_to_clear {
            Some(log_start) => (clearing_log(&request), log_start),
            None => (request, offset_bytes),
        };
        let Some(command) = self.commands.next_id(volume.device) else { return Attempt::NoRoom };
        let command = Command {
            id: command,
            operation: request.operation,
            force_unit_access: request.force_unit_access,
            may_unmap: request.may_unmap,
            offset_bytes,
            length_bytes: request.length_bytes,
            data: request.data_start(),
        };
        let submitted = match request.segments {
            0 => device.ssd.submit(command),
            _ => device.ssd.submit_list(command, list),
        };
        if submitted.is_err() {
            return Attempt::NoRoom;
        }
        volume.in_flight += 1;
        room.taken();
        let list = match volume.held.first_mut() {
            Some(held) if request.segments > 0 => std::mem::take(&mut held.list),
            _ => Vec::new(),
        };
        self.commands.enter(InFlight {
            request,
            list,
            device: volume.device,
            channel: on,
            channel_generation: channel.object.generation,
            waited_for: None,
        });
        if log_to_clear.is_some() {
            info!(lease = %volume.object.lease, volume = %volume.object.volume,
                "writes begin that are not marked in the log of intents: it is cleared");
            volume.log_trust = LogTrust::BeingCleared;
            return Attempt::Waits;
        }
        if request.intent_log && request.operation.writes() {
            volume.log_trust = LogTrust::Kept;
        }
        done
    }
}

/// What clears the log before a request that is not marked there.
fn clearing_log(request: &Request) -> Request {
    Request {
        operation: Operation::WriteZeroes,
        force_unit_access: true,
        may_unmap: false,
        intent_log: true,
        segments: 0,
        offset_bytes: 0,
        length_bytes: intent_log::BYTES,
        ..*request
    }
}

/// Whether requests of one of them may go on as requests of the other.
pub(super) fn is_same_use(one: &VolumeObject, other: &VolumeObject) -> bool {
    one.generation == other.generation && one.channel == other.channel && one.data_area == other.data_area
}
