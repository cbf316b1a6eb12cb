//! Which pair of queues a guest uses for a flow (virtio 1.2, §5.1.6.5.6.1, automatic receive steering).
//!
//! What arrives of a flow goes to the receive queue beside the transmit queue that the guest used for it last: to the CPU that works
//! for it, where the guest's driver has a pair of queues for each CPU. Else what answers it would be sent by another CPU, over
//! another queue, and in the end one CPU would do the work of all.

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
