//! Copying a guest's packet into its buffer in the pool, and what it has to be like.

use cxl_pool::{ByteOffset, LINE_BYTES, Memory};
use vhost_frontend::{Buffer, Chain, ChainReader, GuestMemory, GuestView};
use vm_memory::VolatileSlice;

use super::flow::FLOW_BYTES;
use super::lending::Ranges;
use crate::counters::DropReason;
use crate::message::MAX_PACKET_BYTES;
use crate::offloads::Offloads;
use crate::vnet_header::{ETHERNET_BYTES, HEADER_BYTES, HEADER_BYTES_U32, VnetHeader};

/// Packets in several pieces up to this length are put together before they are written, where the pool's hosts are not coherent.
pub(super) const BOUNCE_BYTES: usize = 2048;
/// As much of the front of a packet is looked at again once it is in the pool, its header included.
const LOOKED_AT_BYTES: usize = HEADER_BYTES + FLOW_BYTES;

/// The lines that these are in.
const FRONT_BYTES: usize = LOOKED_AT_BYTES.next_multiple_of(LINE_BYTES);

const _: () = assert!(FRONT_BYTES + LINE_BYTES <= BOUNCE_BYTES);

/// What a packet of a guest has to be like.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    pub(super) header_bytes: usize,
    pub(super) mtu: u16,
    pub(super) may_leave: Offloads,
}

impl Rules {
    /// The length of the frame in a chain.
    #[inline]
    pub(super) fn frame_bytes(self, chain: &Chain) -> Result<u32, DropReason> {
        let bytes = chain.readable_bytes().checked_sub(self.header_bytes as u64);
        let fits = |bytes: &u64| {
            (u64::from(ETHERNET_BYTES)..=MAX_PACKET_BYTES - HEADER_BYTES as u64).contains(bytes)
        };
        let bytes = bytes.filter(fits).and_then(|bytes| u32::try_from(bytes).ok());
        bytes.filter(|_| chain.fault().is_none()).ok_or(DropReason::BadChain)
    }

    /// Puts a packet into its buffer: all of it, or where it lies if that is in the pool. Returns its header, as it was cleaned.
    #[inline]
    pub(super) fn put<M: Memory>(
        self,
        memory: &M,
        of_guest: (&GuestMemory, &GuestView<'_>),
        chain: &Chain,
        (frame_bytes, ranges): (u32, Option<&Ranges>),
        buffer: Buffer,
        bounce: &mut [u8],
    ) -> Result<VnetHeader, DropReason> {
        match ranges {
            Some(ranges) => self.scatter(memory, of_guest, chain, (frame_bytes, ranges), buffer, bounce),
            None => self.copy(memory, of_guest, chain, frame_bytes, buffer, bounce),
        }
    }

    /// Copies a packet into its buffer and checks its header. From there on only our copy of it counts: the guest may
    /// rewrite its own at any time. A store fence is all that it needs to be announced.
    ///
    /// Where the pool's hosts are not coherent, it goes past the cache: the backend has thrown the buffer's lines out of it, so
    /// that storing to them would fetch them first. `bounce` has its front then.
    #[inline]
    fn copy<M: Memory>(
        self,
        memory: &M,
        (guest, view): (&GuestMemory, &GuestView<'_>),
        chain: &Chain,
        frame_bytes: u32,
        buffer: Buffer,
        bounce: &mut [u8],
    ) -> Result<VnetHeader, DropReason> {
        let mut raw = [0; HEADER_BYTES];
        if self.header_bytes == HEADER_BYTES
            && let [segment] = chain.readable()
            && let Some(packet) = view.slice(segment.address, segment.bytes as usize)
        {
            if M::COHERENT {
                memory.copy_from(buffer.start(), &packet);
                memory.read(buffer.start(), &mut raw);
                let header = self.clean(raw, frame_bytes)?;
                let clean = header.to_bytes();
                if clean != raw {
                    memory.write(buffer.start(), &clean);
                }
                return Ok(header);
            }
            return self.stream(memory, &packet, frame_bytes, buffer, bounce);
        }
        let mut reader = ChainReader::new(guest, chain.readable());
        reader.read(&mut raw[..self.header_bytes]).map_err(|_| DropReason::BadChain)?;
        let header = self.clean(raw, frame_bytes)?;
        let clean = header.to_bytes();
        let payload = buffer.start().saturating_add(HEADER_BYTES as u64);
        if M::COHERENT {
            memory.write(buffer.start(), &clean);
            reader.copy_to_pool(memory, payload, frame_bytes.into()).map_err(|_| DropReason::BadChain)?;
            return Ok(header);
        }
        let bytes = HEADER_BYTES + frame_bytes as usize;
        if bytes <= BOUNCE_BYTES {
            bounce[..HEADER_BYTES].copy_from_slice(&clean);
            reader.read(&mut bounce[HEADER_BYTES..bytes]).map_err(|_| DropReason::BadChain)?;
            write_lines(memory, buffer.start(), bytes, bounce);
        } else {
            let whole = (0, HEADER_BYTES_U32 + frame_bytes);
            return self.copy_part(memory, guest, chain, (frame_bytes, whole), buffer, bounce);
        }
        Ok(header)
    }

    /// Copies a part of a packet, from one place in its buffer to another, of which the first is at the begin of a line. With the first part its header is
    /// checked and returned; with the last one `bounce` has its front where the pool's hosts are not coherent.
    pub(super) fn copy_part<M: Memory>(
        self,
        memory: &M,
        guest: &GuestMemory,
        chain: &Chain,
        (frame_bytes, (mut from, to)): (u32, (u32, u32)),
        buffer: Buffer,
        bounce: &mut [u8],
    ) -> Result<VnetHeader, DropReason> {
        let bad_chain = |_| DropReason::BadChain;
        let mut reader = ChainReader::new(guest, chain.readable());
        let mut header = VnetHeader::default();
        if from == 0 {
            let mut raw = [0; HEADER_BYTES];
            reader.read(&mut raw[..self.header_bytes]).map_err(bad_chain)?;
            header = self.clean(raw, frame_bytes)?;
            // Written back with the front of the frame, which lies in the same line.
            memory.write(buffer.start(), &header.to_bytes());
            from = HEADER_BYTES_U32;
        } else {
            reader.skip(self.header_bytes as u64 + u64::from(from - HEADER_BYTES_U32)).map_err(bad_chain)?;
        }
        let at = buffer.start().saturating_add(from.into());
        reader.stream_to_pool(memory, at, (to - from).into()).map_err(bad_chain)?;
        if !M::COHERENT && to == HEADER_BYTES_U32 + frame_bytes {
            // What is looked at again, to tell flows apart.
            let front = LOOKED_AT_BYTES.min(to as usize);
            let mut reader = ChainReader::new(guest, chain.readable());
            reader.skip(self.header_bytes as u64).map_err(bad_chain)?;
            reader.read(&mut bounce[HEADER_BYTES..front]).map_err(bad_chain)?;
        }
        Ok(header)
    }

    /// As [`Rules::copy`], past the cache, for a packet in one piece: but for its front, and the end that fills no line, it takes no way
    /// round by `bounce`.
    #[inline]
    fn stream<M: Memory>(
        self,
        memory: &M,
        packet: &VolatileSlice<'_>,
        frame_bytes: u32,
        buffer: Buffer,
        bounce: &mut [u8],
    ) -> Result<VnetHeader, DropReason> {
        let front_bytes = packet.len().min(FRONT_BYTES);
        packet.copy_to(&mut bounce[..front_bytes]);
        let (raw, _) = bounce.split_first_chunk_mut().ok_or(DropReason::BadChain)?;
        let header = self.clean(*raw, frame_bytes)?;
        *raw = header.to_bytes();
        write_lines(memory, buffer.start(), front_bytes, bounce);
        let end = packet.len() - (packet.len() - front_bytes) % LINE_BYTES;
        let at = |place: usize| buffer.start().saturating_add(place as u64);
        let whole = packet.subslice(front_bytes, end - front_bytes).map_err(|_| DropReason::BadChain)?;
        if !whole.is_empty() {
            memory.stream_from(at(front_bytes), &whole);
        }
        let rest = packet.offset(end).map_err(|_| DropReason::BadChain)?;
        if !rest.is_empty() {
            let line = &mut bounce[FRONT_BYTES..FRONT_BYTES + LINE_BYTES];
            rest.copy_to(&mut line[..rest.len()]);
            write_lines(memory, at(end), rest.len(), line);
        }
        Ok(header)
    }

    #[inline]
    pub(super) fn clean(self, raw: [u8; HEADER_BYTES], frame_bytes: u32) -> Result<VnetHeader, DropReason> {
        let header = VnetHeader::parse(raw);
        header.check(frame_bytes, self.mtu, self.may_leave).map_err(|_| DropReason::BadHeader)
    }
}

/// Writes `bytes` bytes that lie in `from` into a packet's buffer, past the cache and as whole lines: parts of lines would have to be
/// fetched. A buffer has nothing but its packet.
#[inline]
fn write_lines<M: Memory>(memory: &M, at: ByteOffset, bytes: usize, from: &mut [u8]) {
    let lines = bytes.next_multiple_of(LINE_BYTES);
    from[bytes..lines].fill(0);
    memory.write_streaming(at, &from[..lines]);
}
