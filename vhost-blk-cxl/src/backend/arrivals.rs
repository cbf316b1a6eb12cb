//! Requests that arrive: from the channel to the queues of their volumes. What the host's cache may hold of their data is dropped on
//! the way, and lists of segments are read, for all that came together with one fence.

use std::collections::BTreeMap;

use cxl_pool::Memory;
use pod_protocol::ids::{ChannelId, LeaseId, PlaceId};

use super::check::{has_list_of, reads_buffer_of};
use super::task::BackendTask;
use super::volume::Volume;
use crate::message::{Holder, Operation, Request, Status};
use crate::segments::{ListBuffer, Segment, list_bytes};

/// Requests taken from a channel per turn.
const RECEIVE_BUDGET: usize = 64;

/// A request that waits.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) request: Request,
    /// Where its data lies, if that is in several places, and if that could be read.
    pub(super) list: Vec<Segment>,
}

/// What came in one turn, and what that takes.
#[derive(Default)]
pub(super) struct Arrivals {
    requests: Vec<Held>,
    buffer: ListBuffer,
    /// Lists that ended: their room is used again.
    spare: Vec<Vec<Segment>>,
}

impl Arrivals {
    fn add(&mut self, request: Request) {
        self.requests.push(Held { request, list: Vec::new() });
    }

    /// A list is over.
    pub(super) fn recycle(&mut self, list: Vec<Segment>) {
        if list.capacity() > 0 {
            self.spare.push(list);
        }
    }
}

/// Whether a place of a lease, of which nothing is known, is one of a holder of before.
fn has_moved_on(volumes: &BTreeMap<PlaceId, Volume>, holder: Holder) -> bool {
    let mut others = volumes.range(PlaceId::all(holder.lease)).map(|(_, volume)| volume.object.generation);
    others.any(|generation| generation.is_newer_than(holder.generation))
}

impl<M: Memory> BackendTask<M> {
    /// Takes requests from a channel to their volumes.
    pub(super) fn receive(&mut self, id: ChannelId) -> bool {
        let Some(channel) = self.channels.get_mut(&id) else { return false };
        let Some(data) = &mut channel.data else { return false };
        let slots = channel.object.outgoing.slots as usize;
        let mut taken = 0;
        // A frontend that takes no answers, or has more outstanding than it may, is not asked for more.
        while taken < RECEIVE_BUDGET
            && channel.outbox.is_empty()
            && channel.waiting < slots
            && let Some(words) = data.receive()
        {
            taken += 1;
            let Ok(request) = Request::decode(&words) else {
                self.malformed.add(1);
                continue;
            };
            let holder = request.holder;
            match self.volumes.get(&holder.place_id()) {
                Some(volume)
                    if holder.generation == volume.object.generation && volume.object.channel == id =>
                {
                    self.arrivals.add(request);
                    channel.waiting += 1;
                }
                // Over whichever channel: the lease has moved on, perhaps to another host.
                Some(volume)
                    if holder.generation != volume.object.generation
                        && !holder.generation.is_newer_than(volume.object.generation) =>
                {
                    volume.counters.stale.add(1);
                    channel.outbox.push_back(request.not_done(Status::Refused).encode());
                }
                None if has_moved_on(&self.volumes, holder) => {
                    channel.outbox.push_back(request.not_done(Status::Refused).encode());
                }
                _ if channel.early.len() < slots => channel.early.push(request),
                _ => {
                    self.malformed.add(1);
                    channel.outbox.push_back(request.not_done(Status::Refused).encode());
                }
            }
        }
        self.admit();
        taken > 0
    }

    /// What came before its volume does what it would have done afterwards.
    pub(super) fn admit_early(&mut self, lease: LeaseId) {
        let volumes = &self.volumes;
        let is_due = |request: &mut Request| {
            let holder = request.holder;
            holder.lease == lease
                && (volumes.contains_key(&holder.place_id()) || has_moved_on(volumes, holder))
        };
        for channel in self.channels.values_mut() {
            for request in channel.early.extract_if(.., is_due) {
                let volume = volumes.get(&request.holder.place_id());
                let is_served = volume.is_some_and(|volume| {
                    request.holder.generation == volume.object.generation
                        && channel.object.id == volume.object.channel
                });
                if !is_served {
                    channel.outbox.push_back(request.not_done(Status::Refused).encode());
                    continue;
                }
                self.arrivals.add(request);
                channel.waiting += 1;
            }
        }
        self.admit();
    }

    /// Gives what arrived to its volumes, all of which are served.
    fn admit(&mut self) {
        let (mut lists, mut to_read) = (false, false);
        for held in &self.arrivals.requests {
            let request = &held.request;
            let Some(volume) = self.volumes.get(&request.holder.place_id()) else { continue };
            if has_list_of(request, &volume.object) {
                self.memory.invalidate(request.data_start(), list_bytes(request.segments).into());
                lists = true;
            } else if reads_buffer_of(request, &volume.object)
                && !self.devices[volume.device].ssd.bypasses_cache()
            {
                self.memory.invalidate(request.data_start(), request.length_bytes);
                to_read = true;
            }
        }
        if lists {
            // The invalidations of all lists before the first look at one.
            self.memory.full_fence();
            // That was good for the data in one piece, too.
            to_read = self.read_lists();
        }
        if to_read {
            // The invalidations of all buffers before the device reads any.
            self.memory.full_fence();
        }
        for held in self.arrivals.requests.drain(..) {
            let id = held.request.holder.place_id();
            let Some(volume) = self.volumes.get_mut(&id) else { continue };
            if !std::mem::replace(&mut volume.is_active, true) {
                self.devices[volume.device].sharing.turns.enter(id, volume.object.priority);
            }
            volume.held.push(held);
        }
    }

    /// Reads the lists of what arrived. True if lines were invalidated.
    fn read_lists(&mut self) -> bool {
        let mut to_read = false;
        let Arrivals { requests, buffer, spare } = &mut self.arrivals;
        for Held { request, list } in requests {
            let Some(volume) = self.volumes.get(&request.holder.place_id()) else { continue };
            if !has_list_of(request, &volume.object) {
                continue;
            }
            *list = spare.pop().unwrap_or_default();
            if buffer.read(&self.memory, request, list).is_err() {
                // It is answered with an error in its turn.
                volume.counters.malformed.add(1);
                continue;
            }
            if request.operation == Operation::Write && !self.devices[volume.device].ssd.bypasses_cache() {
                for segment in list {
                    if volume.object.may_hold(segment.start, segment.bytes.into()) {
                        self.memory.invalidate(segment.start, segment.bytes.into());
                        to_read = true;
                    }
                }
            }
        }
        to_read
    }
}
