//! Announcing a guest's address for it, where its VMM asks for that after a live migration.

use cxl_pool::Memory;

use super::port::Port;
use super::under_way::{Packet, State, UNDER_WAY_MAX};
use crate::ethernet::{FRAME_BYTES_MIN, announcement};
use crate::vnet_header::{HEADER_BYTES, HEADER_BYTES_U32};

const PACKET_BYTES: usize = HEADER_BYTES + FRAME_BYTES_MIN;

/// Whether a guest's address is to be announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Announcement {
    NotWanted,
    Wanted,
}

impl Port {
    /// Puts the announcement behind the packets under way. Returns whether there was room for it; otherwise it is tried again when
    /// something was acknowledged.
    pub(super) fn push_announcement<M: Memory>(&mut self, memory: &M) -> bool {
        const BYTES: u32 = HEADER_BYTES_U32 + 60;
        const { assert!(BYTES as usize == PACKET_BYTES) };
        if self.under_way.len() >= UNDER_WAY_MAX {
            return false;
        }
        let Some(buffer) = self.buffers.alloc(BYTES) else { return false };
        let mut packet = [0; PACKET_BYTES];
        packet[HEADER_BYTES..].copy_from_slice(&announcement(self.object.mac));
        memory.write(buffer.start(), &packet);
        memory.write_back(buffer.start(), u64::from(BYTES));
        memory.store_fence();
        self.under_way.push(Packet {
            descriptor: None,
            buffer: Some(buffer),
            bytes: BYTES,
            lent: false,
            flow: 0,
            rail: self.rails.rail_of(0),
            state: State::Waiting,
        });
        self.announcement = Announcement::NotWanted;
        self.counters.tx_packets.add(1);
        self.counters.tx_bytes.add(FRAME_BYTES_MIN as u64);
        true
    }
}
