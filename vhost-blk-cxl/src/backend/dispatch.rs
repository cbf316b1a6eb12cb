//! From the volumes to the devices: each volume has a queue of its own, so that a device that hangs, or a volume that
//! has had its share, keeps nobody else waiting.

use cxl_pool::Memory;
use pod_protocol::ids::LeaseId;
use pod_protocol::objects::VolumeObject;
use tracing::info;

use super::arrivals::Held;
use super::check::{Rejected, check};
use super::in_flight::InFlight;
use super::task::BackendTask;
use super::volume::LogTrust;
use crate::intent_log;
use crate::message::{Operation, Request, Status};
use crate::ssd::Command;

/// Requests of a volume that begin before it is another volume's turn.
const VOLUME_BUDGET: usize = 64;

/// What became of a volume's first request.
enum Attempt {
    /// It began, or was answered.
    Done,
    /// It has to wait.
    Waits,
}

impl<M: Memory> BackendTask<M> {
    /// Passes requests of all volumes to the devices.
    pub(super) fn dispatch(&mut self) -> bool {
        self.due_ns = None;
        if self.active.is_empty() {
            return false;
        }
        let mut active = std::mem::take(&mut self.active);
        let mut served = std::mem::take(&mut self.served);
        let mut moved = false;
        let timed = active
            .iter()
            .any(|lease| self.volumes.get(lease).is_some_and(|volume| volume.throttle.needs_clock()));
        let now_ns = if timed { self.now_ns() } else { 0 };
        if timed {
            // Who has had less than it is sure to get comes first.
            for &lease in &active {
                let below = |task: &Self| {
                    task.volumes.get(&lease).is_some_and(|volume| volume.throttle.is_below_minimum(now_ns))
                };
                while below(self) && self.attempt(lease, now_ns) == Some(true) {
                    moved = true;
                }
            }
        }
        active.retain(|&lease| {
            let mut begun = 0;
            while begun < VOLUME_BUDGET {
                match self.attempt(lease, now_ns) {
                    Some(true) => begun += 1,
                    Some(false) => break,
                    // It has no more.
                    None => {
                        moved |= begun > 0;
                        return false;
                    }
                }
            }
            moved |= begun > 0;
            if begun > 0 {
                served.push(lease);
            }
            begun == 0
        });
        // Who got nothing comes first next time.
        active.append(&mut served);
        self.active = active;
        self.served = served;
        moved
    }

    /// Tries to begin a volume's first request. None if it has none.
    fn attempt(&mut self, lease: LeaseId, now_ns: u64) -> Option<bool> {
        let volume = self.volumes.get_mut(&lease)?;
        let Some(request) = volume.held.front().map(|held| held.request) else {
            volume.is_active = false;
            return None;
        };
        if volume.draining > 0 {
            return Some(false);
        }
        // The guest pays for its own requests only, not for what is noted on its behalf.
        let is_charged = volume.throttle.needs_clock() && !request.intent_log;
        if is_charged && let Some(until) = volume.waits_until(now_ns) {
            self.due_ns = Some(self.due_ns.map_or(until, |due| due.min(until)));
            return Some(false);
        }
        match self.begin(lease) {
            Attempt::Waits => Some(false),
            Attempt::Done => {
                let volume = self.volumes.get_mut(&lease)?;
                if let Some(held) = volume.held.pop_front() {
                    self.arrivals.recycle(held.list);
                }
                volume.throttled = false;
                if is_charged {
                    let bytes = if request.operation.has_data() { request.length_bytes } else { 0 };
                    volume.throttle.take(bytes, now_ns);
                }
                if let Some(channel) = self.channels.get_mut(&volume.object.channel) {
                    channel.waiting = channel.waiting.saturating_sub(1);
                }
                Some(true)
            }
        }
    }

    /// Begins a volume's first request, which is of its current generation, or answers it.
    fn begin(&mut self, lease: LeaseId) -> Attempt {
        let Some(volume) = self.volumes.get_mut(&lease) else { return Attempt::Done };
        let Some(Held { request, list }) = volume.held.front() else { return Attempt::Done };
        let request = *request;
        let id = volume.object.channel;
        let Some(channel) = self.channels.get_mut(&id) else { return Attempt::Done };
        let device = &mut self.devices[volume.device];
        let offset_bytes =
            match check(&request, list, &volume.object, volume.intent_log, device.ssd.geometry()) {
                Ok(offset) => offset,
                Err(Rejected(status)) => {
                    volume.counters.refused();
                    channel.outbox.push_back(request.not_done(status).encode());
                    return Attempt::Done;
                }
            };
        if volume.log_trust == LogTrust::BeingCleared {
            return Attempt::Waits;
        }
        if volume.log_trust == LogTrust::NotCleared && request.operation.writes() {
            volume.log_trust = LogTrust::Kept;
            volume.counters.ended(request.operation, Status::IoError, 0);
            channel.outbox.push_back(request.not_done(Status::IoError).encode());
            return Attempt::Done;
        }
        let log_to_clear = volume.log_to_clear(&request);
        let (request, offset_bytes) = match log_to_clear {
            Some(log_start) => (clearing_log(&request), log_start),
            None => (request, offset_bytes),
        };
        let Some(command) = self.commands.next_id(volume.device) else { return Attempt::Waits };
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
            return Attempt::Waits;
        }
        let list = match volume.held.front_mut() {
            Some(held) if request.segments > 0 => std::mem::take(&mut held.list),
            _ => Vec::new(),
        };
        self.commands.enter(InFlight {
            request,
            list,
            device: volume.device,
            channel: id,
            channel_generation: channel.object.generation,
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
        Attempt::Done
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
