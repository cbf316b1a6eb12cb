//! Copying a guest's packet into its buffer in the pool, and what it has to be like.

use cxl_pool::{LINE_BYTES, Memory};
use vhost_frontend::{Buffer, Chain, ChainReader, GuestMemory, GuestView};
use vm_memory::VolatileSlice;

use crate::counters::DropReason;
use crate::message::MAX_PACKET_BYTES;
use crate::offloads::Offloads;
use crate::vnet_header::{ETHERNET_BYTES, HEADER_BYTES, VnetHeader};

/// Packets up to this length are copied past the cache, where the pool's hosts are not coherent.
pub(super) const BOUNCE_BYTES: usize = 2048;

/// How a packet was put into the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// Its lines are still to be written back.
    Cached,
    /// A fence is all that it needs.
    PastTheCache,
}

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

    /// Copies a packet into its buffer and checks its header. From there on only our copy of it counts: the guest may
    /// rewrite its own at any time.
    #[inline]
    pub(super) fn copy<M: Memory>(
        self,
        memory: &M,
        (guest, view): (&GuestMemory, &GuestView<'_>),
        chain: &Chain,
        frame_bytes: u32,
        buffer: Buffer,
        bounce: &mut [u8],
    ) -> Result<Written, DropReason> {
        let mut raw = [0; HEADER_BYTES];
        if self.header_bytes == HEADER_BYTES
            && let [segment] = chain.readable()
            && let Some(packet) = view.slice(segment.address, segment.bytes as usize)
        {
            if !M::COHERENT && packet.len() <= BOUNCE_BYTES {
                return self.stream(memory, &packet, frame_bytes, buffer, bounce);
            }
            memory.copy_from(buffer.start(), &packet);
            memory.read(buffer.start(), &mut raw);
            let clean = self.clean(raw, frame_bytes)?.to_bytes();
            if clean != raw {
                memory.write(buffer.start(), &clean);
            }
            return Ok(Written::Cached);
        }
        let mut reader = ChainReader::new(guest, chain.readable());
        reader.read(&mut raw[..self.header_bytes]).map_err(|_| DropReason::BadChain)?;
        memory.write(buffer.start(), &self.clean(raw, frame_bytes)?.to_bytes());
        let payload = buffer.start().saturating_add(HEADER_BYTES as u64);
        reader.copy_to_pool(memory, payload, u64::from(frame_bytes)).map_err(|_| DropReason::BadChain)?;
        Ok(Written::Cached)
    }

    /// As [`Rules::copy`], past the cache: the backend has thrown the buffer's lines out of it, so that storing to them would
    /// fetch them first.
    #[inline]
    fn stream<M: Memory>(
        self,
        memory: &M,
        packet: &VolatileSlice<'_>,
        frame_bytes: u32,
        buffer: Buffer,
        bounce: &mut [u8],
    ) -> Result<Written, DropReason> {
        // Whole lines: parts of lines would have to be fetched. A buffer has nothing but its packet.
        let lines = packet.len().next_multiple_of(LINE_BYTES);
        debug_assert!(lines <= buffer.bytes() as usize);
        let (content, rest) = bounce[..lines].split_at_mut(packet.len());
        packet.copy_to(content);
        rest.fill(0);
        let (header, _) = content.split_first_chunk_mut().ok_or(DropReason::BadChain)?;
        *header = self.clean(*header, frame_bytes)?.to_bytes();
        memory.write_streaming(buffer.start(), &bounce[..lines]);
        Ok(Written::PastTheCache)
    }

    #[inline]
    pub(super) fn clean(self, raw: [u8; HEADER_BYTES], frame_bytes: u32) -> Result<VnetHeader, DropReason> {
        let header = VnetHeader::parse(raw);
        header.check(frame_bytes, self.mtu, self.may_leave).map_err(|_| DropReason::BadHeader)
    }
}
