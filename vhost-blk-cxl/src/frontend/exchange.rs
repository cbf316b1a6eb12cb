//! What the worker exchanges with one backend in a turn: answers first, then requests.

use cxl_pool::Memory;
use pod_protocol::data_channel::DataChannel;
use pod_protocol::ids::ChannelId;
use pod_protocol::objects::ChannelObject;

use super::disk::Allowance;
use super::task::FrontendTask;
use super::turn_budget;
use crate::message::{Completion, Operation, WORDS, Words};

/// Answers taken from a channel per turn.
pub(super) const RECEIVE_BUDGET: usize = 64;
/// Requests sent on a channel per turn.
const SEND_BUDGET: u32 = 64;

/// Requests that a disk may have with a backend however many others have.
const SHARE_LEAST: u32 = 4;

/// How many more requests a disk may send that has `outstanding` already, where of a channel's so many are `free`, of which others want some.
///
/// It may have as many as are still free (a dynamic threshold, A. K. Choudhury, E. L. Hahne: Dynamic Queue Length Thresholds for
/// Shared-Memory Packet Switches, 1998). So disks whose device hangs never fill a channel: of n of them each has the (n+1)th part, and as much is
/// left for those whose device answers.
fn share_of(free: u32, outstanding: u32, others: bool) -> u32 {
    // Each that it sends is one less that is free.
    if others { free.min(free.max(SHARE_LEAST).saturating_sub(outstanding).div_ceil(2)) } else { free }
}

/// A channel to a backend.
pub(super) struct Channel<M: Memory> {
    pub(super) data: DataChannel<M, WORDS>,
    pub(super) ready: bool,
    /// More are never outstanding than the way back has room for.
    capacity: u32,
    outbox: Vec<Words>,
}

impl<M: Memory> Channel<M> {
    pub(super) fn new(data: DataChannel<M, WORDS>, object: &ChannelObject) -> Self {
        let capacity = object.incoming.slots.min(object.outgoing.slots);
        Self { data, ready: false, capacity, outbox: Vec::with_capacity(SEND_BUDGET as usize) }
    }
}

impl<M: Memory> FrontendTask<M> {
    /// Takes answers from a channel.
    pub(super) fn receive(&mut self, id: ChannelId) -> bool {
        let Some(channel) = self.channels.get_mut(&id) else { return false };
        self.completions.clear();
        let mut taken_back = false;
        let (mut of_spread, mut read_bytes) = (0, 0_u64);
        // What was read is copied to the guests, all of it before anything else is done.
        while self.completions.len() + of_spread < RECEIVE_BUDGET
            && read_bytes < turn_budget::BYTES
            && let Some(words) = channel.data.receive()
        {
            let Ok(completion) = Completion::decode(&words) else {
                self.malformed.add(1);
                continue;
            };
            if completion.operation == Operation::Read {
                read_bytes = read_bytes.saturating_add(completion.length_bytes);
            }
            match self.disks.get(&completion.holder.lease) {
                // Another backend was asked, or this one before the volume moved on: the request may be under way elsewhere.
                Some(disk) if disk.object().route.channel != id => disk.counters.stale.add(1),
                Some(disk) => {
                    taken_back |= disk.take_back(&completion);
                    self.completions.push(completion);
                }
                None => match self.spread.get_mut(&completion.holder.lease) {
                    Some(disk) => {
                        disk.complete(id, &completion);
                        of_spread += 1;
                    }
                    // Its lease was taken away meanwhile.
                    None => self.malformed.add(1),
                },
            }
        }
        if self.completions.is_empty() {
            return of_spread > 0;
        }
        if taken_back {
            // The invalidations of all buffers before the first read of any.
            self.memory.full_fence();
        }
        for (position, completion) in self.completions.iter().enumerate() {
            if let Some(next) = self.completions.get(position + 1)
                && let Some(disk) = self.disks.get(&next.holder.lease)
            {
                disk.prefetch(next);
            }
            if let Some(disk) = self.disks.get_mut(&completion.holder.lease) {
                disk.complete(completion);
            }
        }
        for disk in self.disks.values_mut().filter(|disk| disk.object().route.channel == id) {
            disk.unblock();
            disk.signal();
            disk.release_stopped();
        }
        true
    }

    /// Takes requests of all disks of a channel and sends them.
    pub(super) fn send(&mut self, id: ChannelId) -> bool {
        let Some(channel) = self.channels.get_mut(&id) else { return false };
        let disks = || self.disks.values().filter(|disk| disk.object().route.channel == id);
        let (plain, outstanding) = disks().fold((0, 0), |(n, sum), disk| (n + 1, sum + disk.with_backend()));
        let spread = || self.spread.values().filter(|disk| disk.uses(id));
        let (count, outstanding) =
            spread().fold((plain, outstanding), |(n, sum), disk| (n + 1, sum + disk.with_backend(id)));
        if count == 0 {
            return false;
        }
        // Answers that we took but have not acknowledged yet still take up their ring. Were they not counted, the backend could
        // find it full, and nobody would wake it when it no longer is.
        let unacknowledged = u32::try_from(channel.data.receiver.lag()).unwrap_or(u32::MAX);
        // What nobody has.
        let mut free = channel.capacity.saturating_sub(outstanding);
        let mut room = free.saturating_sub(unacknowledged);
        if room < free.min(SEND_BUDGET) {
            // Or a device that hangs keeps everybody waiting: no answer of its comes, after which this would be done by itself.
            channel.data.receiver.acknowledge_now();
            room = free;
        }
        room = room.min(channel.data.sender.free());
        let mut moved = false;
        let mut left = room.min(SEND_BUDGET);
        for (position, disk) in
            self.disks.values_mut().filter(|disk| disk.object().route.channel == id).enumerate()
        {
            let may = share_of(free, disk.with_backend(), count > 1).min(room);
            // Each its share of what is left, so that one guest cannot keep the others from being served.
            let share = left.div_ceil(count - u32::try_from(position).unwrap_or(0)).min(may);
            // Who has had its share goes on in the next turn. Where the channel is full, only an answer makes room.
            let more = may > share;
            let mut allowance = Allowance { messages: share, more, outbox: &mut channel.outbox };
            moved |= disk.submit(&mut allowance);
            disk.release_stopped();
            let sent = share - allowance.messages;
            (left, room, free) = (left - sent, room - sent, free - sent);
        }
        for (position, disk) in (plain..).zip(self.spread.values_mut().filter(|disk| disk.uses(id))) {
            let may = share_of(free, disk.with_backend(id), count > 1).min(room);
            let share = left.div_ceil(count - position).min(may);
            let sent = disk.send(id, share, &mut channel.outbox);
            moved |= sent > 0;
            (left, room, free) = (left - sent, room - sent, free - sent);
        }
        if !channel.outbox.is_empty() {
            // All data before any message that announces it.
            self.memory.store_fence();
            for words in channel.outbox.drain(..) {
                let sent = channel.data.send(words);
                debug_assert!(sent.is_ok(), "the channel had room for as many");
            }
            channel.data.publish();
        }
        for disk in self.disks.values_mut().filter(|disk| disk.object().route.channel == id) {
            disk.signal();
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_whose_devices_hang_leave_room_for_others() {
        const SLOTS: u32 = 8192;
        for disks in [2, 16, 17, 100, 1000] {
            let mut has = vec![0; disks];
            let mut sent = true;
            while sent {
                sent = false;
                for at in 0..disks {
                    let room = SLOTS - has.iter().sum::<u32>();
                    let more = share_of(room, has[at], true).min(512 - has[at]).min(1);
                    has[at] += more;
                    sent |= more > 0;
                }
            }
            let room = SLOTS - has.iter().sum::<u32>();
            let least = has.iter().min().copied().unwrap_or(0);
            assert!(
                least >= SHARE_LEAST && share_of(room, 0, true) >= SHARE_LEAST,
                "{disks}: {least}, {room}"
            );
            assert!(has.iter().all(|it| *it <= least + 1));
        }
        assert_eq!(share_of(64, 0, false), 64, "all of it is for the only one");
    }
}
