//! No device at all: a sink, a source or an echo, for tests and benchmarks.
//!
//! Sink and source access memory as the device of a host does whose allocating writes are off: a sink reads nothing, and a source
//! writes past the caches. The source also tells flows apart. An echo does all by the CPU, and tells nothing.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

use cxl_pool::{LINE_BYTES, Memory};
use pod_protocol::ids::MacAddress;

use super::{
    Batch, Flow, FlowTag, Identity, LinkState, Nic, NicConfig, NicError, NullMode, OnLinkChange, Piece, Taken,
};
use crate::backend::receive_buffers::{BUFFER_BYTES, BufferIndex, ReceiveBuffers};
use crate::offloads::Offloads;
use crate::vnet_header::{HEADER_BYTES, HEADER_BYTES_U32};

const MTU: u16 = 1500;
/// Buffers that an echo holds in reserve: the packets that may be between sending and receiving.
const STASH_BUFFERS: usize = 512;
const FRAME_BYTES_MAX: u32 = 1514;
const ADDRESS_BYTES: usize = 6;
const COPY_BYTES: usize = 4096;
/// A source puts frames at different distances from the beginning of their buffers. At one and the same, which is a page's
/// beginning, all of them would share a few sets of the caches.
const PLACES: u64 = 16;
const PLACE_BYTES: u64 = 2 * LINE_BYTES as u64;
const _: () = assert!((PLACES - 1) * PLACE_BYTES + 24 * LINE_BYTES as u64 <= BUFFER_BYTES as u64);

/// No device.
pub struct NullNic<M: Memory> {
    identity: Identity,
    link: LinkState,
    mode: NullMode,
    memory: M,
    /// What a source sends, with its header, and zeros up to a line's end.
    pattern: Vec<u8>,
    pattern_bytes: u32,
    destination: Option<MacAddress>,
    /// What its frames get.
    tag: Option<FlowTag>,
    stash: Vec<(BufferIndex, cxl_pool::ByteOffset)>,
    /// Frames on their way back.
    echoed: VecDeque<Piece>,
    /// How many pieces each of them has.
    echoed_pieces: VecDeque<usize>,
}

impl<M: Memory> NullNic<M> {
    /// A NIC as configured.
    pub fn new(config: &NicConfig, memory: M) -> Self {
        let identity = Identity {
            name: config.name.clone(),
            driver: config.driver,
            mac: None,
            mtu: MTU,
            speed_mbps: config.speed_mbps,
            backup: config.backup,
            lag: config.lag.clone(),
            offloads: Offloads::ALL,
            cache_bypassing: config.cache_bypassing || config.mode != NullMode::Echo,
        };
        // A frame is at most as long as a buffer.
        let pattern_bytes = HEADER_BYTES_U32 + config.frame_bytes.min(FRAME_BYTES_MAX);
        let mut pattern = vec![0u8; (pattern_bytes as usize).next_multiple_of(LINE_BYTES)];
        if let Some(destination) = config.destination {
            let frame = &mut pattern[HEADER_BYTES..];
            frame[..ADDRESS_BYTES].copy_from_slice(&destination.bytes());
            // A local address that no instance has.
            frame[ADDRESS_BYTES..2 * ADDRESS_BYTES].copy_from_slice(&[0x06, 0, 0, 0, 0, 0]);
            // A local experimental type, so that guests ignore the frame.
            frame[2 * ADDRESS_BYTES..][..2].copy_from_slice(&[0x88, 0xb5]);
        }
        Self {
            identity,
            link: LinkState::new(true),
            mode: config.mode,
            memory,
            pattern,
            pattern_bytes,
            destination: config.destination,
            tag: None,
            stash: Vec::with_capacity(STASH_BUFFERS),
            echoed: VecDeque::with_capacity(STASH_BUFFERS),
            echoed_pieces: VecDeque::with_capacity(STASH_BUFFERS),
        }
    }

    /// Copies a packet into stashed buffers with its addresses exchanged; false if there are too few.
    fn echo(&mut self, packet: &[Piece]) -> bool {
        let packet_bytes: u32 = packet.iter().map(|piece| piece.bytes).sum();
        let pieces = packet_bytes.div_ceil(BUFFER_BYTES) as usize;
        if self.stash.len() < pieces {
            return false;
        }
        let mut bounce = [0u8; COPY_BYTES];
        let mut done = 0;
        while done < packet_bytes {
            let bytes = (packet_bytes - done).min(BUFFER_BYTES);
            let bounce = &mut bounce[..bytes as usize];
            self.gather(packet, done, bounce);
            if done == 0 && bounce.len() >= HEADER_BYTES + 2 * ADDRESS_BYTES {
                bounce[HEADER_BYTES..][..2 * ADDRESS_BYTES].rotate_left(ADDRESS_BYTES);
            }
            if let Some((_, at)) = self.stash.pop() {
                self.memory.write(at, bounce);
                self.echoed.push_back(Piece { at, bytes });
            }
            done += bytes;
        }
        self.echoed_pieces.push_back(pieces);
        true
    }
}

impl<M: Memory> Nic for NullNic<M> {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn link(&self) -> &LinkState {
        &self.link
    }

    fn watch_link(&mut self, _on_change: OnLinkChange) -> Result<(), NicError> {
        Ok(())
    }

    fn start(&mut self, buffers: &mut ReceiveBuffers) -> Result<(), NicError> {
        self.stash.clear();
        self.echoed.clear();
        self.echoed_pieces.clear();
        self.restock(buffers);
        Ok(())
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn set_receiver_offloads(&mut self, _offloads: Offloads) -> Result<(), NicError> {
        Ok(())
    }

    fn receive(&mut self, buffers: &mut ReceiveBuffers, batch: &mut Batch) -> Result<(), NicError> {
        while self.mode == NullMode::Source && !batch.is_full() {
            let Some(buffer) = buffers.take() else { break };
            let start = buffers.offset(buffer);
            let place = start.get() / u64::from(BUFFER_BYTES) % PLACES;
            let at = start.saturating_add(place * PLACE_BYTES);
            if M::COHERENT {
                self.memory.write(at, &self.pattern[..self.pattern_bytes as usize]);
            } else {
                self.memory.write_streaming(at, &self.pattern);
            }
            let piece = Piece { at, bytes: self.pattern_bytes };
            match self.tag {
                Some(tag) => batch.push_tagged_frame(piece, tag),
                None => batch.push_frame(piece),
            }
        }
        if self.mode == NullMode::Source {
            // As a device does: what it wrote is there before anybody is told.
            self.memory.store_fence();
        }
        while !batch.is_full() {
            let Some(pieces) = self.echoed_pieces.pop_front() else { break };
            for piece in self.echoed.drain(..pieces) {
                batch.push_piece(piece);
            }
            batch.end_frame();
        }
        self.restock(buffers);
        Ok(())
    }

    fn set_flows(&mut self, flows: &[Flow]) {
        let mine = flows.iter().find(|flow| Some(flow.destination) == self.destination);
        self.tag = mine.map(|flow| flow.tag);
    }

    fn transmit(&mut self, packets: &Batch) -> Result<usize, NicError> {
        if self.mode != NullMode::Echo {
            return Ok(packets.len());
        }
        let taken = packets.frames().take_while(|packet| self.echo(packet)).count();
        Ok(taken)
    }

    fn transmit_frame(&mut self, _frame: &[u8]) -> Result<Taken, NicError> {
        Ok(Taken::Whole)
    }

    fn has_work(&self) -> bool {
        self.mode == NullMode::Source || !self.echoed_pieces.is_empty()
    }
}

impl<M: Memory> NullNic<M> {
    /// Reads a packet from its byte `skip` on.
    fn gather(&self, packet: &[Piece], mut skip: u32, mut into: &mut [u8]) {
        for piece in packet {
            if skip >= piece.bytes {
                skip -= piece.bytes;
                continue;
            }
            let here = into.len().min((piece.bytes - skip) as usize);
            let (now, later) = into.split_at_mut(here);
            self.memory.read(piece.at.saturating_add(u64::from(skip)), now);
            into = later;
            skip = 0;
        }
    }

    fn restock(&mut self, buffers: &mut ReceiveBuffers) {
        if self.mode != NullMode::Echo {
            return;
        }
        // Half of the area stays with those who receive.
        let most = STASH_BUFFERS.min(buffers.len() / 2);
        while self.stash.len() + self.echoed.len() < most {
            let Some(buffer) = buffers.take() else { return };
            self.stash.push((buffer, buffers.offset(buffer)));
        }
    }
}
