//! From a backend's receive buffers into a guest's.
//!
//! A frame for which the guest has posted no buffers is dropped at once: nobody waits for a guest. The receive buffers
//! go back to the backend as soon as they were copied; they hold other instances' frames as well, which is why they
//! are copied at all.

use cxl_pool::{ByteOffset, Memory};
use vhost_frontend::{Chain, ChainWriter, Next, Ring};

use super::Frontend;
use super::flow::flow_hash;
use super::port::Port;
use crate::channel_end::ChannelEnd;
use crate::counters::DropReason;
use crate::message::{MAX_PACKET_BYTES, NetMessage, Opcode, Run};
use crate::offloads::Offloads;
use crate::vnet_header::{HEADER_BYTES, VnetHeader};

/// Receive buffers of a guest that one packet may take: the longest packet in buffers of half a page.
const CHAINS_MAX: usize = 64;
/// Pieces of one packet; a backend uses at most one per page.
const PIECES_MAX: usize = 32;
/// What is looked at to tell flows apart: virtio-net, Ethernet, VLAN, IPv6 and port fields.
const FRONT_BYTES: usize = 80;

/// A channel and the packet that is just arriving over it.
pub(super) struct Channel<M: Memory> {
    pub(super) end: ChannelEnd<M>,
    pieces: Vec<NetMessage>,
}

impl<M: Memory> Channel<M> {
    pub(super) fn new(end: ChannelEnd<M>) -> Self {
        Self { end, pieces: Vec::with_capacity(PIECES_MAX) }
    }
}

/// Storage that is reused for every packet.
pub(super) struct Scratch {
    chains: Vec<Chain>,
    used: Vec<(u16, u32)>,
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self {
            chains: (0..CHAINS_MAX).map(|_| Chain::with_capacity(4)).collect(),
            used: Vec::with_capacity(CHAINS_MAX),
        }
    }
}

impl<M: Memory> Frontend<M> {
    /// Takes what a backend sent. Returns whether that was anything.
    pub(super) fn serve_channel(&mut self, place: usize) -> bool {
        let channel = &mut self.channels[place];
        if !channel.end.ready() {
            return false;
        }
        let mut inbox = std::mem::take(&mut self.inbox);
        let count = channel.end.receive(&mut inbox);
        self.invalidate_arrivals(&inbox[..count]);
        for words in &inbox[..count] {
            let Some(message) = NetMessage::decode(*words) else { continue };
            match message.opcode {
                Opcode::Receive => self.receive(place, message),
                Opcode::TransmitDone => {
                    let run = Run::from_code(message.bytes);
                    self.channels[place].end.completed(run.packets);
                    if let Some(port) = self.by_lease.get(&message.lease) {
                        self.ports[*port].transmit_done(&self.channels[place], &message, run);
                    }
                }
                Opcode::Transmit | Opcode::ReceiveDone | Opcode::Offloads => {}
            }
        }
        self.inbox = inbox;
        count > 0
    }

    /// What is about to be read may have been brought into our cache by a prefetch since its last use.
    fn invalidate_arrivals(&self, inbox: &[[u64; 2]]) {
        if M::COHERENT {
            return;
        }
        let mut any = false;
        for words in inbox {
            if let Some(message) = NetMessage::decode(*words)
                && message.opcode == Opcode::Receive
                && self.lies_in_pool(&message)
            {
                self.memory.invalidate(message.line.bytes(), u64::from(message.bytes));
                any = true;
            }
        }
        if any {
            self.memory.full_fence();
        }
    }

    fn lies_in_pool(&self, message: &NetMessage) -> bool {
        let end = message.line.bytes().checked_add(u64::from(message.bytes));
        message.bytes > 0 && end.is_some_and(|end| end.get() <= self.memory.size_bytes())
    }

    /// Takes one piece, and delivers the packet with its last one.
    fn receive(&mut self, place: usize, message: NetMessage) {
        let channel = &mut self.channels[place];
        let belongs = |first: &NetMessage| (first.lease, first.sequence) == (message.lease, message.sequence);
        if channel.pieces.first().is_some_and(|first| !belongs(first)) {
            // The rest of the packet before was never sent.
            self.finish(place, Err(DropReason::BadMessage));
        }
        let in_pool = self.lies_in_pool(&message);
        let channel = &mut self.channels[place];
        channel.pieces.push(message);
        if !in_pool || (message.more && channel.pieces.len() >= PIECES_MAX) {
            self.finish(place, Err(DropReason::BadMessage));
        } else if !message.more {
            self.finish(place, Ok(()));
        }
    }

    /// Delivers or drops the packet that has arrived, and gives its buffers back.
    fn finish(&mut self, place: usize, whole: Result<(), DropReason>) {
        let channel = &mut self.channels[place];
        let pieces = std::mem::take(&mut channel.pieces);
        let id = channel.end.object().id;
        if let Some(first) = pieces.first()
            && let Some(port) = self.by_lease.get(&first.lease)
        {
            let port = &mut self.ports[*port];
            let outcome = match whole {
                Ok(()) if !port.hears(id) => Err(DropReason::Stale),
                Ok(()) => port.deliver(&self.memory, &pieces, &mut self.receive_scratch),
                Err(reason) => Err(reason),
            };
            match outcome {
                Ok(frame_bytes) => port.counters.count_rx(frame_bytes),
                Err(reason) => port.counters.count_drop(reason),
            }
        }
        let end = &mut self.channels[place].end;
        for piece in &pieces {
            // It fits: a backend has no more under way than its share of the ring.
            end.send(&NetMessage { opcode: Opcode::ReceiveDone, more: false, ..*piece });
        }
        let mut pieces = pieces;
        pieces.clear();
        self.channels[place].pieces = pieces;
    }
}

impl Port {
    /// Copies a packet into the guest's buffers. Returns the length of its frame.
    fn deliver<M: Memory>(
        &mut self,
        memory: &M,
        pieces: &[NetMessage],
        scratch: &mut Scratch,
    ) -> Result<u32, DropReason> {
        let total: u64 = pieces.iter().map(|piece| u64::from(piece.bytes)).sum();
        let first = &pieces[0];
        if total > MAX_PACKET_BYTES || first.bytes as usize <= HEADER_BYTES {
            return Err(DropReason::BadMessage);
        }
        let frame_bytes = u32::try_from(total - HEADER_BYTES as u64).map_err(|_| DropReason::BadMessage)?;
        let mut front = [0; FRONT_BYTES];
        let front = &mut front[..(first.bytes as usize).min(FRONT_BYTES)];
        memory.read(first.line.bytes(), front);
        let header = received_header(front, frame_bytes, self.accepts)?;
        let queue = self.queue_for(&front[HEADER_BYTES..]).ok_or(DropReason::NoGuestQueue)?;
        let (header_bytes, merges) = (self.header_bytes, self.merges);
        let ring = self.rings[queue].as_mut().ok_or(DropReason::NoGuestQueue)?;
        let needed = header_bytes as u64 + u64::from(frame_bytes);
        let count = take_chains(ring, &mut scratch.chains, header_bytes, needed, merges)?;
        let header = VnetHeader { buffers: u16::try_from(count).unwrap_or(u16::MAX), ..header };
        scratch.used.clear();
        let written = write_packet(
            memory,
            ring,
            &scratch.chains[..count],
            &mut scratch.used,
            |writer| writer.write(&header.to_bytes()[..header_bytes]),
            pieces,
        );
        let completed = ring.complete_together(&scratch.used);
        if !written || completed.is_err() {
            return Err(DropReason::BadChain);
        }
        Ok(frame_bytes)
    }

    /// The receive queue for a frame: the same for all frames of a flow, among those that run.
    fn queue_for(&self, frame: &[u8]) -> Option<usize> {
        let running = |queue: &usize| self.rings[*queue].as_ref().is_some_and(|ring| !ring.is_broken());
        let queues = (0..self.rings.len()).step_by(2).filter(running);
        match queues.clone().count() {
            0 => None,
            1 => queues.clone().next(),
            count => queues.clone().nth(usize::try_from(flow_hash(frame)).unwrap_or(0) % count),
        }
    }
}

/// Checks the header of a frame that has arrived against what the guest's driver accepts.
fn received_header(front: &[u8], frame_bytes: u32, accepts: Offloads) -> Result<VnetHeader, DropReason> {
    /// The checksum was found valid: the driver need not look.
    const CHECKSUM_VALID: u8 = 2;
    let mut raw = [0; HEADER_BYTES];
    raw.copy_from_slice(front.get(..HEADER_BYTES).ok_or(DropReason::BadMessage)?);
    let header = VnetHeader::parse(raw);
    if !accepts.contains(header.required()) {
        return Err(DropReason::ReceiverOffloads);
    }
    let mut clean = header.check(frame_bytes, u16::MAX, accepts).map_err(|_| DropReason::BadHeader)?;
    if accepts.contains(Offloads::CHECKSUM) && !clean.needs_checksum() {
        clean.flags |= header.flags & CHECKSUM_VALID;
    }
    Ok(clean)
}

/// Takes as many of the guest's buffers as the packet needs, or none.
fn take_chains(
    ring: &mut Ring,
    chains: &mut [Chain],
    header_bytes: usize,
    needed: u64,
    merges: bool,
) -> Result<usize, DropReason> {
    let most = if merges { chains.len() } else { 1 };
    let mut room = 0;
    let mut count = 0;
    let outcome = loop {
        if count == most {
            break Err(DropReason::NoGuestBuffers);
        }
        match ring.next_chain(&mut chains[count]) {
            Ok(Next::Chain) if chains[count].writable_bytes() >= header_bytes as u64 => {
                room += chains[count].writable_bytes();
                count += 1;
                if room >= needed {
                    return Ok(count);
                }
            }
            // A bad buffer at the front costs the guest that buffer and this packet. Behind good ones it has to wait
            // until it is at the front, since buffers are put back in order.
            Ok(Next::Chain | Next::Malformed(_)) if count == 0 => {
                // A ring that cannot be written was parked.
                let _ = ring.complete(chains[0].head(), 0);
                return Err(DropReason::BadChain);
            }
            Ok(Next::Chain | Next::Malformed(_)) => {
                count += 1;
                break Err(DropReason::BadChain);
            }
            Ok(Next::Empty) => break Err(DropReason::NoGuestBuffers),
            Err(error) => {
                tracing::warn!(queue = ring.index(), %error, "a guest broke its queue");
                return Err(DropReason::NoGuestQueue);
            }
        }
    };
    for chain in chains[..count].iter().rev() {
        ring.put_back(chain);
    }
    outcome
}

/// Writes the header and all pieces over the chains, and notes how much went into each. False if the guest's memory
/// went away meanwhile; the chains are used up all the same.
fn write_packet<M: Memory>(
    memory: &M,
    ring: &Ring,
    chains: &[Chain],
    used: &mut Vec<(u16, u32)>,
    write_header: impl Fn(&mut ChainWriter<'_>) -> Result<(), vhost_frontend::CopyError>,
    pieces: &[NetMessage],
) -> bool {
    let mut fine = true;
    let mut source = Source { pieces, consumed: HEADER_BYTES as u64 };
    for (position, chain) in chains.iter().enumerate() {
        let mut writer = ChainWriter::new(ring.memory(), chain.writable());
        let room = writer.left();
        if position == 0 {
            fine &= write_header(&mut writer).is_ok();
        }
        while fine
            && writer.left() > 0
            && let Some((at, bytes)) = source.take(writer.left())
        {
            fine &= writer.copy_from_pool(memory, at, bytes).is_ok();
        }
        let written = if fine { room - writer.left() } else { 0 };
        used.push((chain.head(), u32::try_from(written).unwrap_or(u32::MAX)));
    }
    fine
}

/// The bytes of a packet that are not delivered yet.
struct Source<'a> {
    pieces: &'a [NetMessage],
    /// Bytes of the first piece that are behind us.
    consumed: u64,
}

impl Source<'_> {
    /// The next run of at most `most` bytes.
    fn take(&mut self, most: u64) -> Option<(ByteOffset, u64)> {
        let first = self.pieces.first()?;
        let left = u64::from(first.bytes) - self.consumed;
        let at = first.line.bytes().saturating_add(self.consumed);
        let bytes = left.min(most);
        self.consumed += bytes;
        if bytes == left {
            self.pieces = &self.pieces[1..];
            self.consumed = 0;
        }
        Some((at, bytes))
    }
}
