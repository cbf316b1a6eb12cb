//! How much of a guest's receive queues is looked at for what arrives.
//!
//! A chain may have many descriptors, empty ones among them, and a frame may take many chains. A guest whose buffers never suffice
//! would have all of these read again for each frame, while the other guests of its host wait.

use vhost_frontend::Chain;

/// So many descriptors of one guest are looked at in one look at a channel, and what a packet takes beyond them. The frames of a look
/// take less than a fifth of that with any driver's usual buffers.
const DESCRIPTORS_MAX: u32 = 16 << 10;

/// What was looked at of one guest's receive queues.
#[derive(Debug, Default)]
pub(super) struct Walks {
    /// In which look at a channel.
    look: u64,
    descriptors: u32,
}

impl Walks {
    /// Whether more may be looked at in this look.
    #[inline]
    pub(super) fn may_go_on(&mut self, look: u64) -> bool {
        if self.look != look {
            *self = Self { look, descriptors: 0 };
        }
        self.descriptors < DESCRIPTORS_MAX
    }

    /// Notes chains that were looked at, whether or not they are put back.
    #[inline]
    pub(super) fn note(&mut self, chains: &[Chain]) {
        let descriptors: u32 = chains.iter().map(|chain| u32::from(chain.walked())).sum();
        self.descriptors = self.descriptors.saturating_add(descriptors);
    }
}
