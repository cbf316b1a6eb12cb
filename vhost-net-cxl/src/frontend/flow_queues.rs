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
/// Of so many flows it is known at the same time, if none have the same place: as many as Linux' TAP devices know.
const FLOWS: usize = 4096;

/// The newest pair of queues of each flow.
pub(super) struct FlowQueues {
    /// By the flow's hash: the pair's number and one, or nothing. Flows with the same place share what is known: then packets
    /// take another queue than they might, and none is lost.
    pairs: Box<[u8; FLOWS]>,
}

impl FlowQueues {
    pub(super) fn new() -> Self {
        Self { pairs: Box::new([0; FLOWS]) }
    }

    /// The guest sent a packet of a flow over the transmit queue of this pair.
    #[inline]
    pub(super) fn note(&mut self, flow: u32, pair: u16) {
        // A pair beyond what fits is not known of.
        self.pairs[Self::place(flow)] = u8::try_from(pair + 1).unwrap_or(0);
    }

    /// The pair that it used last, if that is known.
    #[inline]
    pub(super) fn pair(&self, flow: u32) -> Option<usize> {
        usize::from(self.pairs[Self::place(flow)]).checked_sub(1)
    }

    fn place(flow: u32) -> usize {
        flow as usize % FLOWS
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
