//! How much is taken from a guest's transmit queues in a turn of the worker, while all others of its host wait.
//!
//! Packets are counted, but they are not alike: a chain may have hundreds of descriptors, and what is lent has to be written back where the
//! pool's hosts are not coherent. No guest that sends what drivers usually send comes near these limits.

use vhost_frontend::Chain;

use crate::vnet_header::WireCost;

/// So many bytes are copied from a queue in a turn, and at most one packet more: about what stays in a core's own cache until the
/// backend, or the kernel for it, reads it. Long packets would push each other out of it.
pub(super) const COPIED_BYTES_PER_TURN: u64 = 256 << 10;
/// So many bytes that are lent, and at most one packet of each queue more.
pub(super) const LENT_BYTES_PER_TURN: u64 = 2 << 20;
/// Descriptors that are looked at, and what one chain of each queue takes beyond them.
pub(super) const DESCRIPTORS_PER_TURN: u32 = 4096;

/// What may be taken from a guest's queues at a time.
#[derive(Clone, Copy)]
pub(super) struct Budget {
    pub(super) packets: usize,
    /// What they may come to on the wire: packets until that is used up, the last one of them whole.
    cost: WireCost,
    pub(super) descriptors: u32,
    lent_bytes: u64,
}

impl Budget {
    /// Packets, whatever they come to on the wire.
    pub(super) const fn packets(packets: usize) -> Self {
        Self::within(packets, WireCost { frames: u64::MAX, bytes: u64::MAX })
    }

    /// Packets, until they come to this on the wire.
    pub(super) const fn within(packets: usize, cost: WireCost) -> Self {
        Self { packets, cost, descriptors: DESCRIPTORS_PER_TURN, lent_bytes: LENT_BYTES_PER_TURN }
    }

    /// What the next one of so many queues may take.
    pub(super) fn share(&self, queues: usize) -> Self {
        // There are a few.
        let count = u32::try_from(queues).unwrap_or(u32::MAX);
        Self {
            packets: self.packets.div_ceil(queues),
            cost: self.cost,
            descriptors: self.descriptors.div_ceil(count),
            lent_bytes: self.lent_bytes.div_ceil(u64::from(count)),
        }
    }

    /// Takes away what a queue has used.
    pub(super) fn spend(&mut self, taken: &Taken) {
        self.packets -= taken.packets;
        self.cost.frames = self.cost.frames.saturating_sub(taken.cost.frames);
        self.cost.bytes = self.cost.bytes.saturating_sub(taken.cost.bytes);
        self.descriptors = self.descriptors.saturating_sub(taken.descriptors);
        self.lent_bytes = self.lent_bytes.saturating_sub(taken.lent_bytes);
    }

    /// Whether nothing more may be begun where this was taken already. How many descriptors are looked at, is decided before.
    #[inline]
    pub(super) fn is_used_up_by(&self, taken: &Taken) -> bool {
        taken.cost.frames >= self.cost.frames
            || taken.cost.bytes >= self.cost.bytes
            || taken.lent_bytes >= self.lent_bytes
            || self.descriptors == 0
    }
}

/// What was taken.
#[derive(Default)]
pub(super) struct Taken {
    /// Chains, those that hold no packet included.
    pub(super) packets: usize,
    /// What the packets come to on the wire.
    pub(super) cost: WireCost,
    /// Descriptors that were looked at, also of chains that were put back.
    descriptors: u32,
    pub(super) lent_bytes: u64,
    /// The next packet has to wait for its share of the fabric.
    pub(super) held: bool,
}

impl Taken {
    /// Notes chains that were looked at.
    #[inline]
    pub(super) fn note_walked(&mut self, chains: &[Chain]) {
        let walked: u32 = chains.iter().map(|chain| u32::from(chain.walked())).sum();
        self.descriptors += walked;
    }

    /// Adds what was taken from a further queue.
    pub(super) fn add(&mut self, other: &Self) {
        self.packets += other.packets;
        self.cost += other.cost;
        self.descriptors += other.descriptors;
        self.lent_bytes += other.lent_bytes;
        self.held |= other.held;
    }
}
