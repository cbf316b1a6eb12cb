//! Which pair of queues a guest uses for a flow (virtio 1.2, §5.1.6.5.6.1, automatic receive steering).
//!
//! What arrives of a flow goes to the receive queue beside the transmit queue that the guest used for it last: to the CPU that works
//! for it, where the guest's driver has a pair of queues for each CPU. Else what answers it would be sent by another CPU, over
//! another queue, and in the end one CPU would do the work of all.

use cxl_pool::Memory;

use super::flow::flow_hash;
use super::port::Port;
use crate::message::NetMessage;
use crate::vnet_header::HEADER_BYTES;

/// What is looked at to tell flows apart: virtio-net, Ethernet, VLAN, IPv6 and port fields.
const FRONT_BYTES: usize = 80;
/// Flows that differ in the low bits of their hash only by chance are known side by side, so many of them.
const WAYS: usize = 8;
/// Of so many flows it is known at the same time, if they spread well: as many as Linux' TAP devices know.
const FLOWS: usize = 4096;
const SETS: usize = FLOWS / WAYS;
/// The pair's number and one, or nothing.
const PAIR_BITS: u32 = 8;
const PAIR_MASK: u32 = (1 << PAIR_BITS) - 1;

// What is left of a hash besides its set's number fits beside the pair, so no flow is taken for another with a different hash.
const _: () = assert!(SETS.is_power_of_two() && SETS.trailing_zeros() >= PAIR_BITS);
const _: () = assert!(size_of::<Set>() == 32 && align_of::<Set>() == 32, "a set lies in one cache line");

/// The newest pair of queues of each flow.
pub(super) struct FlowQueues {
    sets: Box<[Set; SETS]>,
}

/// Flows whose hashes have the same low bits, the one that sent last in front: a new one drives out the one that was silent for longest.
/// Two of them that had one place would drag each other from queue to queue, and arrive out of order.
#[derive(Clone, Copy)]
#[repr(align(32))]
struct Set([u32; WAYS]);

impl FlowQueues {
    pub(super) fn new() -> Self {
        Self { sets: Box::new([Set([0; WAYS]); SETS]) }
    }

    /// The guest sent a packet of a flow over the transmit queue of this pair.
    #[inline]
    pub(super) fn note(&mut self, flow: u32, pair: u16) {
        // A pair beyond what fits is not known of.
        let pair = u8::try_from(pair + 1).unwrap_or(0);
        let (set, tag) = Self::place(flow);
        let known = &mut self.sets[set].0;
        let entry = tag | u32::from(pair);
        // A guest sends several packets of a flow in a row.
        if known[0] == entry {
            return;
        }
        let way = known.iter().position(|it| it & !PAIR_MASK == tag).unwrap_or(WAYS - 1);
        known[..=way].rotate_right(1);
        known[0] = entry;
    }

    /// The pair that it used last, if that is known.
    #[inline]
    pub(super) fn pair(&self, flow: u32) -> Option<usize> {
        let (set, tag) = Self::place(flow);
        let entry = self.sets[set].0.iter().find(|it| *it & !PAIR_MASK == tag)?;
        ((entry & PAIR_MASK) as usize).checked_sub(1)
    }

    /// The set's number, and what else there is of the hash, where an entry has it.
    fn place(flow: u32) -> (usize, u32) {
        (flow as usize % SETS, flow >> SETS.trailing_zeros() << PAIR_BITS)
    }
}

impl Port {
    /// The receive queues that run.
    #[inline]
    fn receive_queues(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.rings.len()).step_by(2).filter(|queue| self.runs(*queue))
    }

    #[inline]
    fn runs(&self, queue: usize) -> bool {
        self.rings.get(queue).and_then(Option::as_ref).is_some_and(|ring| !ring.is_broken())
    }

    /// The receive queue for all frames, if only one runs.
    #[inline]
    pub(super) fn only_queue(&self) -> Option<usize> {
        let mut queues = self.receive_queues();
        let first = queues.next();
        first.filter(|_| queues.next().is_none())
    }

    /// Whether any receive queue runs.
    pub(super) fn has_queue(&self) -> bool {
        self.receive_queues().next().is_some()
    }

    /// Whether several receive queues run.
    #[inline]
    pub(super) fn has_queues(&self) -> bool {
        self.receive_queues().nth(1).is_some()
    }

    /// The receive queue for a frame: beside the queue over which the guest sends its flow, or the same for all frames of a flow,
    /// among those that run.
    #[inline]
    pub(super) fn queue_for<M: Memory>(&self, memory: &M, first: &NetMessage) -> Option<usize> {
        let count = self.receive_queues().count();
        if count <= 1 {
            return self.receive_queues().next();
        }
        let mut front = [0; FRONT_BYTES];
        let front = &mut front[..(first.bytes as usize).min(FRONT_BYTES)];
        memory.read(first.line.bytes(), front);
        let flow = flow_hash(&front[HEADER_BYTES..]);
        let beside = self.flow_queues.pair(flow).map(|pair| 2 * pair);
        beside.filter(|queue| self.runs(*queue)).or_else(|| self.receive_queues().nth(flow as usize % count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_whose_hashes_are_alike_keep_their_queues() {
        let mut queues = FlowQueues::new();
        let alike = |number: u16| 5 + (u32::from(number) << FLOWS.trailing_zeros());
        for number in 0..8 {
            queues.note(alike(number), number);
        }
        for number in 0..8 {
            assert_eq!(queues.pair(alike(number)), Some(number.into()));
        }
        // The second has been silent for longest once the first has sent again.
        queues.note(alike(0), 0);
        queues.note(alike(8), 8);
        assert_eq!(queues.pair(alike(1)), None);
        for number in [0, 2, 3, 4, 5, 6, 7, 8] {
            assert_eq!(queues.pair(alike(number)), Some(number.into()));
        }
    }

    #[test]
    fn the_last_pair_of_a_flow_is_known() {
        let mut queues = FlowQueues::new();
        assert_eq!(queues.pair(7), None);
        queues.note(7, 3);
        queues.note(u32::MAX, 0);
        queues.note(7, 1);
        assert_eq!((queues.pair(7), queues.pair(u32::MAX), queues.pair(8)), (Some(1), Some(0), None));
        queues.note(7, u16::from(u8::MAX));
        assert_eq!(queues.pair(7), None, "it is none of the others");
    }
}
