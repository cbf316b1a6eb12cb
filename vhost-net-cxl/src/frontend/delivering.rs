//! Copying a frame that has arrived into its guest's buffers, as a whole or in parts.

use cxl_pool::{ByteOffset, Memory};
use vhost_frontend::{Chain, ChainWriter, GuestView, Next, Ring};
use vm_memory::Bytes;

use super::port::Port;
use super::receive::Scratch;
use super::walks::Walks;
use crate::counters::DropReason;
use crate::message::{MAX_PACKET_BYTES, NetMessage};
use crate::offloads::Offloads;
use crate::vnet_header::{HEADER_BYTES, HEADER_BYTES_U32, VnetHeader};

/// What of a frame is copied, in bytes from its begin.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) from: u32,
    pub(super) to: u32,
}

/// The length of a frame, 0 if that is no good.
#[inline]
pub(super) fn frame_bytes(pieces: &[NetMessage]) -> u32 {
    let total: u64 = pieces.iter().map(|piece| u64::from(piece.bytes)).sum();
    u32::try_from(total.min(MAX_PACKET_BYTES + 1)).unwrap_or(u32::MAX).saturating_sub(HEADER_BYTES_U32)
}

/// Copies a packet, or a part of it, into its guest's buffers. They are used up with the last part, and stay where they are until then.
#[inline]
pub(super) fn deliver<M: Memory>(
    memory: &M,
    ports: &mut [Port],
    index: usize,
    pieces: &[NetMessage],
    span: Part,
    scratch: &mut Scratch,
) -> Result<(), DropReason> {
    let port = &mut ports[index];
    let (first, frame_bytes) = (&pieces[0], frame_bytes(pieces));
    if u64::from(frame_bytes) > MAX_PACKET_BYTES - HEADER_BYTES as u64 || first.bytes as usize <= HEADER_BYTES
    {
        return Err(DropReason::BadMessage);
    }
    let queue = port.queue_for(memory, first).ok_or(DropReason::NoGuestQueue)?;
    let mut raw = [0; HEADER_BYTES];
    memory.read(first.line.bytes(), &mut raw);
    let header = received_header(raw, frame_bytes, port.accepts)?;
    if scratch.dry == Some((index, queue)) || !ports[index].walks.may_go_on(scratch.look) {
        return Err(DropReason::NoGuestBuffers);
    }
    scratch.filled.show_unless(Some((index, queue)), ports);
    let port = &mut ports[index];
    let (header_bytes, merges) = (port.header_bytes, port.merges);
    let ring = port.rings[queue].as_mut().ok_or(DropReason::NoGuestQueue)?;
    let needed = header_bytes as u64 + u64::from(frame_bytes);
    let used = &mut scratch.filled.used;
    let taken = take_chains(ring, (&mut scratch.chains, used), header_bytes, needed, merges, &mut port.walks);
    let count = match taken {
        Ok(0) => {
            scratch.dry = Some((index, queue));
            return Err(DropReason::NoGuestBuffers);
        }
        Ok(count) => count,
        Err(reason) => return Err(reason),
    };
    let header = VnetHeader { buffers: u16::try_from(count).unwrap_or(u16::MAX), ..header };
    let before = used.len();
    let header = &header.to_bytes()[..header_bytes];
    let chains = &scratch.chains[..count];
    let fine = if span.from == 0 && span.to == frame_bytes {
        write_packet(memory, ring, chains, used, header, pieces)
    } else {
        write_part(memory, ring, chains, used, (header, span), pieces)
    };
    if !fine {
        // Given back with nothing in them.
        used[before..].iter_mut().for_each(|(_, written)| *written = 0);
        return Err(DropReason::BadChain);
    }
    if span.to < frame_bytes {
        used.truncate(before);
        chains.iter().rev().for_each(|chain| ring.put_back(chain));
    }
    Ok(())
}

/// Checks the header of a frame that has arrived against what the guest's driver accepts.
#[inline]
pub(super) fn received_header(
    raw: [u8; HEADER_BYTES],
    frame_bytes: u32,
    accepts: Offloads,
) -> Result<VnetHeader, DropReason> {
    /// The checksum was found valid: the driver need not look.
    const CHECKSUM_VALID: u8 = 2;
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

/// Takes as many of the guest's buffers as the packet needs, or none: 0 if there are none at all. A bad one is noted in `used`, behind
/// those that were filled before: a successor would begin at the used index, and take the others for it.
fn take_chains(
    ring: &mut Ring,
    (chains, used): (&mut [Chain], &mut Vec<(u16, u32)>),
    header_bytes: usize,
    needed: u64,
    merges: bool,
    walks: &mut Walks,
) -> Result<usize, DropReason> {
    let most = if merges { chains.len() } else { 1 };
    let mut room = 0;
    let mut count = 0;
    let outcome = loop {
        if count == most {
            break Err(DropReason::NoGuestBuffers);
        }
        let next = ring.next_chain(&mut chains[count]);
        if matches!(next, Ok(Next::Chain | Next::Malformed(_))) {
            walks.note(&chains[count..=count]);
        }
        match next {
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
                used.push((chains[0].head(), 0));
                return Err(DropReason::BadChain);
            }
            Ok(Next::Chain | Next::Malformed(_)) => {
                count += 1;
                break Err(DropReason::BadChain);
            }
            Ok(Next::Empty) if count == 0 => return Ok(0),
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
#[inline]
pub(super) fn write_packet<M: Memory>(
    memory: &M,
    ring: &Ring,
    chains: &[Chain],
    used: &mut Vec<(u16, u32)>,
    header: &[u8],
    pieces: &[NetMessage],
) -> bool {
    if let ([chain], [piece]) = (chains, pieces)
        && let [segment] = chain.writable()
        && let Some(buffer) = GuestView::new(ring.memory()).slice(segment.address, segment.bytes as usize)
    {
        // One buffer, one piece: nearly all packets.
        let payload = piece.bytes as usize - HEADER_BYTES;
        let written = header.len() + payload;
        let from = piece.line.bytes().saturating_add(HEADER_BYTES as u64);
        return match buffer.subslice(header.len(), payload) {
            Ok(rest) if buffer.write_slice(header, 0).is_ok() => {
                memory.copy_to(from, &rest);
                if let Some(log) = ring.memory().log() {
                    log.mark(segment.address, written as u64);
                }
                used.push((chain.head(), u32::try_from(written).unwrap_or(u32::MAX)));
                true
            }
            // There was room when the chains were taken.
            _ => {
                used.push((chain.head(), 0));
                false
            }
        };
    }
    let mut fine = true;
    let mut source = Source { pieces, consumed: HEADER_BYTES as u64 };
    for (position, chain) in chains.iter().enumerate() {
        let mut writer = ChainWriter::new(ring.memory(), chain.writable());
        let room = writer.left();
        if position == 0 {
            fine &= writer.write(header).is_ok();
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

/// As [`write_packet`], but only a part of it.
fn write_part<M: Memory>(
    memory: &M,
    ring: &Ring,
    chains: &[Chain],
    used: &mut Vec<(u16, u32)>,
    (header, part): (&[u8], Part),
    pieces: &[NetMessage],
) -> bool {
    let mut fine = true;
    let mut source = Source { pieces, consumed: HEADER_BYTES as u64 };
    let (from, to) = (u64::from(part.from), u64::from(part.to));
    // Where in the frame we are.
    let mut place = 0;
    for (position, chain) in chains.iter().enumerate() {
        let mut writer = ChainWriter::new(ring.memory(), chain.writable());
        let room = writer.left();
        if position == 0 {
            fine &= if from == 0 { writer.write(header) } else { writer.skip(header.len() as u64) }.is_ok();
        }
        while fine
            && writer.left() > 0
            && place < to
            && let Some((at, bytes)) =
                source.take(writer.left().min(if place < from { from } else { to } - place))
        {
            let is_there = place < from;
            place += bytes;
            fine &=
                if is_there { writer.skip(bytes) } else { writer.copy_from_pool(memory, at, bytes) }.is_ok();
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
