//! Instances in VLANs: tags are added to what they send and removed from what they receive.

use cxl_pool::Memory;

use super::Backend;
use super::finishing::{Workbench, read_packet};
use super::outgoing::gather;
use super::port::Port;
use super::share::Reach;
use super::wire::Outgoing;
use crate::counters::DropReason;
use crate::ethernet::Addresses;
use crate::nic::{BATCH_FRAMES, Batch, Piece};
use crate::vlan::{self, TAG_AT, TAG_BYTES};
use crate::vnet_header::{HEADER_BYTES, VnetHeader};

/// The virtio-net header, the addresses, and the tag behind them.
const FRONT_BYTES: usize = HEADER_BYTES + TAG_AT + TAG_BYTES;
/// Where the fronts of frames of one batch lie apart from each other.
const SLOT_BYTES: u64 = 64;

const _: () = assert!(FRONT_BYTES as u64 <= SLOT_BYTES);
const _: () = assert!(BATCH_FRAMES as u64 * SLOT_BYTES <= super::receive_buffers::BUFFER_BYTES as u64);
const _: () = assert!(TAG_AT == Addresses::BYTES);

/// An announcement with a tag.
pub(super) fn tagged_announcement<const N: usize>(frame: &[u8; N], vlan: u16) -> Vec<u8> {
    let mut tagged = Vec::with_capacity(N + TAG_BYTES);
    tagged.extend(&frame[..TAG_AT]);
    tagged.extend(vlan::tag(vlan));
    tagged.extend(&frame[TAG_AT..]);
    tagged
}

impl<M: Memory> Backend<M> {
    /// Adds a packet with a tag to what a NIC is given to send: a front of our own, and the rest of it where it lies. False if
    /// it does not lie where it may.
    pub(super) fn push_tagged(&self, port: &Port, packet: &Outgoing, vlan: u16, outbox: &mut Batch) -> bool {
        let Some(registration) = &port.registrations[packet.registration.get()] else { return false };
        // A NIC that was started has one, unless its receive area is too small for anything.
        let Some(tagging) = port.tagging else { return false };
        let at = tagging.saturating_add(outbox.len() as u64 * SLOT_BYTES);
        let mut front = [0; FRONT_BYTES];
        let old_front = FRONT_BYTES - TAG_BYTES;
        self.memory.read(packet.message.line.bytes(), &mut front[..old_front]);
        front[..HEADER_BYTES].copy_from_slice(&vlan::tagged(packet.header).to_bytes());
        front[old_front..].copy_from_slice(&vlan::tag(vlan));
        self.memory.write(at, &front);
        if port.nic.identity().cache_bypassing {
            self.memory.write_back(at, FRONT_BYTES as u64);
            self.memory.store_fence();
        }
        outbox.push_piece(Piece { at, bytes: u32::try_from(FRONT_BYTES).unwrap_or(u32::MAX) });
        let mut skip = u32::try_from(old_front).unwrap_or(u32::MAX);
        let whole = gather(&self.memory, registration, &packet.message, |piece| {
            // The first piece is longer than that.
            let skipped = std::mem::take(&mut skip).min(piece.bytes);
            let (at, bytes) = (piece.at.saturating_add(u64::from(skipped)), piece.bytes - skipped);
            outbox.push_piece(Piece { at, bytes });
        });
        if whole {
            outbox.end_frame();
        } else {
            outbox.abandon_frame();
        }
        whole
    }

    /// Delivers a frame from the wire, without its tag, to those who are in its VLAN; says whether there is anybody.
    pub(super) fn deliver_in_vlan(
        &mut self,
        place: usize,
        pieces: &[Piece],
        header: VnetHeader,
        addresses: Addresses,
    ) -> bool {
        let bytes: usize = pieces.iter().map(|piece| piece.bytes as usize).sum();
        if bytes < FRONT_BYTES {
            return false;
        }
        let mut tag = [0; TAG_BYTES];
        read_packet(&self.memory, pieces, (FRONT_BYTES - TAG_BYTES) as u64, &mut tag);
        let Some(vlan) = vlan::number(tag) else { return false };
        let mut receivers = std::mem::take(&mut self.in_vlan);
        self.ports[place].switch.route(addresses, Some(vlan), &mut receivers);
        if !receivers.is_empty() {
            self.bring_in(place, pieces);
            let header = vlan::untagged(header);
            let mut bench = std::mem::replace(&mut self.workbench, Workbench(Vec::new()));
            let packet = &mut bench.0[..bytes - TAG_BYTES];
            packet[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
            let (own_addresses, rest) = packet[HEADER_BYTES..].split_at_mut(TAG_AT);
            read_packet(&self.memory, pieces, HEADER_BYTES as u64, own_addresses);
            read_packet(&self.memory, pieces, FRONT_BYTES as u64, rest);
            let mut copied = std::mem::take(&mut self.copied);
            let room = self.put_into_receive_buffers(place, packet, &mut copied);
            self.workbench = bench;
            if room {
                let reach = Reach::of_flooded(addresses.is_flooded());
                self.deliver_as_accepted(place, &copied, header, (&receivers, reach));
            } else {
                self.drop_for(place, &receivers, DropReason::NoReceiveBuffers);
            }
            self.copied = copied;
        }
        let any = !receivers.is_empty();
        self.in_vlan = receivers;
        any
    }
}
