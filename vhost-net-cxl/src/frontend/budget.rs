//! How much is taken from a guest's transmit queues in a turn of the worker, while all others of its host wait.

use crate::vnet_header::WireCost;

/// So many bytes are copied from a queue in a turn, and at most one packet more: about what stays in a core's own cache until the
/// backend, or the kernel for it, reads it. Long packets would push each other out of it.
pub(super) const COPIED_BYTES_PER_TURN: u64 = 256 << 10;

/// What may be taken from a guest's queues at a time.
#[derive(Clone, Copy)]
pub(super) struct Budget {
    pub(super) packets: usize,
    /// What they may come to on the wire: packets until that is used up, the last one of them whole.
    cost: WireCost,
}

impl Budget {
    /// Packets, whatever they come to on the wire.
    pub(super) const fn packets(packets: usize) -> Self {
        Self::within(packets, WireCost { frames: u64::MAX, bytes: u64::MAX })
    }

    /// Packets, until they come to this on the wire.
    pub(super) const fn within(packets: usize, cost: WireCost) -> Self {
        Self { packets, cost }
    }

    /// What the next one of so many queues may take.
    pub(super) fn share(&self, queues: usize) -> Self {
        Self { packets: self.packets.div_ceil(queues), cost: self.cost }
    }

    /// Takes away what a queue has used.
    pub(super) fn spend(&mut self, taken: &Taken) {
        self.packets -= taken.packets;
        self.cost.frames = self.cost.frames.saturating_sub(taken.cost.frames);
        self.cost.bytes = self.cost.bytes.saturating_sub(taken.cost.bytes);
    }

    /// Whether nothing more may be begun where this was taken already.
    #[inline]
    pub(super) fn is_used_up_by(&self, taken: &Taken) -> bool {
        taken.cost.frames >= self.cost.frames || taken.cost.bytes >= self.cost.bytes
    }
}

/// What was taken.
#[derive(Default)]
pub(super) struct Taken {
    /// Chains, those that hold no packet included.
    pub(super) packets: usize,
    /// What the packets come to on the wire.
    pub(super) cost: WireCost,
    /// The next packet has to wait for its share of the fabric.
    pub(super) held: bool,
}

impl Taken {
    /// Adds what was taken from a further queue.
    pub(super) fn add(&mut self, other: &Self) {
        self.packets += other.packets;
        self.cost += other.cost;
        self.held |= other.held;
    }
}
