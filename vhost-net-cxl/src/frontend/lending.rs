//! Packets whose payload stays in the guest's memory, because that lies in the pool: they are
//! [scattered](crate::scattered), and their memory is lent to the backend until it has completed them.
//!
//! So a queue is not stopped, nor are its descriptors given back, while memory of its packets is lent; and a VMM that takes
//! guest memory back is not told that it is gone as long as some of that may be lent. A backend that
//! does not answer within [`PATIENCE`] is not waited for any longer: it is gone, or was told that the lease is no longer
//! served with that generation. What it may still hold is never announced again.

use std::time::{Duration, Instant};

use cxl_pool::{ByteOffset, LINE_BYTES, Memory};
use pod_protocol::worker::Reply;
use vhost_frontend::{Buffer, Chain, ChainReader, GuestMemory, GuestView, PoolMap, PoolRam};

use super::copying::Rules;
use super::port::Port;
use crate::counters::DropReason;
use crate::scattered::{self, BUFFER_BYTES, FRONT_BYTES, RANGES_MAX, write_list};
use crate::vnet_header::{HEADER_BYTES, VnetHeader};

/// How long a queue that is to stop waits for the backend. A backend holds a packet for a second at most.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where the payload of a packet lies; storage that is used for one packet after the other.
pub(super) struct Ranges {
    list: [(ByteOffset, u32); RANGES_MAX],
    count: usize,
}

impl Ranges {
    pub(super) const fn new() -> Self {
        Self { list: [(ByteOffset::new(0), 0); RANGES_MAX], count: 0 }
    }

    /// Finds the payload of a packet of `bytes` bytes with its header, where that takes `header_bytes` in the chain. Nothing if
    /// it does not lie in the pool, or if copying it is as cheap.
    #[inline]
    pub(super) fn find(
        &mut self,
        map: &PoolMap,
        chain: &Chain,
        header_bytes: usize,
        bytes: u32,
    ) -> Option<&Self> {
        if map.is_empty() || bytes <= BUFFER_BYTES {
            return None;
        }
        let front = u64::from(FRONT_BYTES) - HEADER_BYTES as u64 + header_bytes as u64;
        let rest = u64::from(bytes - FRONT_BYTES);
        self.count = map.ranges(chain.readable(), front, rest, &mut self.list)?;
        Some(self)
    }

    fn get(&self) -> &[(ByteOffset, u32)] {
        &self.list[..self.count]
    }
}

impl Rules {
    /// Copies the front of a packet into its buffer, checks its header, which it returns, and lists where the rest of it lies. All that the
    /// backend will read is written back; a fence is all that it needs.
    #[inline]
    pub(super) fn scatter<M: Memory>(
        self,
        memory: &M,
        (guest, view): (&GuestMemory, &GuestView<'_>),
        chain: &Chain,
        (frame_bytes, ranges): (u32, &Ranges),
        buffer: Buffer,
        bounce: &mut [u8],
    ) -> Result<VnetHeader, DropReason> {
        let first = match chain.readable() {
            [first, ..] if self.header_bytes == HEADER_BYTES && first.bytes >= FRONT_BYTES => {
                view.slice(first.address, FRONT_BYTES as usize)
            }
            _ => None,
        };
        let (front, list) = bounce.split_at_mut(FRONT_BYTES as usize);
        let list_bytes = write_list(ranges.get(), list);
        let end = FRONT_BYTES as usize + list_bytes;
        if M::COHERENT
            && let Some(whole) = &first
        {
            memory.copy_from(buffer.start(), whole);
            let mut raw = [0; HEADER_BYTES];
            memory.read(buffer.start(), &mut raw);
            let header = self.clean(raw, frame_bytes)?;
            let clean = header.to_bytes();
            if clean != raw {
                memory.write(buffer.start(), &clean);
            }
            memory.write(scattered::list(buffer.start()), &list[..list_bytes]);
            return Ok(header);
        }
        let (front, frame) = front.split_first_chunk_mut::<HEADER_BYTES>().ok_or(DropReason::BadChain)?;
        let mut raw = [0; HEADER_BYTES];
        if let Some(whole) = first {
            whole.copy_to(&mut raw);
            let rest = whole.offset(HEADER_BYTES).map_err(|_| DropReason::BadChain)?;
            rest.copy_to(frame);
        } else {
            let mut reader = ChainReader::new(guest, chain.readable());
            reader.read(&mut raw[..self.header_bytes]).map_err(|_| DropReason::BadChain)?;
            reader.read(frame).map_err(|_| DropReason::BadChain)?;
        }
        let header = self.clean(raw, frame_bytes)?;
        *front = header.to_bytes();
        if M::COHERENT {
            memory.write(buffer.start(), &bounce[..end]);
            return Ok(header);
        }
        let lines = end.next_multiple_of(LINE_BYTES);
        bounce[end..lines].fill(0);
        memory.write_streaming(buffer.start(), &bounce[..lines]);
        for (at, bytes) in ranges.get() {
            // The guest wrote it on this host, so it may lie in this host's caches only.
            memory.write_back(*at, u64::from(*bytes));
        }
        Ok(header)
    }
}

/// A queue that is to stop, and who wants to know where it stopped.
pub(super) struct Stopping {
    index: u16,
    reply: Reply<u16>,
    deadline: Instant,
}

/// Memory that a VMM takes back, and who wants to know when it is gone.
pub(super) struct TakenBack {
    /// Packets before the one of this number may lie there.
    before: u16,
    reply: Reply<()>,
    deadline: Instant,
}

impl Port {
    /// The guest's memory is this from now on. Answers once nothing is lent of what is not in it any more.
    pub(super) fn change_memory(&mut self, memory: &GuestMemory, reply: Reply<()>) {
        let lent = std::mem::take(&mut self.pool_map);
        self.set_memory(memory);
        let before = self.under_way.next_number();
        if lent.is_within(&self.pool_map) || !self.under_way.lends_before(before) {
            return reply.send(());
        }
        let deadline = *self.patience_ends.get_or_insert_with(|| Instant::now() + PATIENCE);
        self.taken_back.push(TakenBack { before, reply, deadline });
    }

    /// Answers who took memory back that is not lent any more, or is not waited for any longer.
    pub(super) fn finish_taking_back(&mut self) {
        let returned = |port: &Self, it: &TakenBack| {
            !port.under_way.lends_before(it.before) || it.deadline <= Instant::now()
        };
        while let Some(place) = self.taken_back.iter().position(|it| returned(self, it)) {
            let taken = self.taken_back.swap_remove(place);
            if !self.under_way.lends_before(taken.before) {
                // It answers.
                self.patience_ends = None;
            }
            taken.reply.send(());
        }
    }

    /// Notes where in the pool the guest's memory lies, if it does.
    pub(super) fn map_memory(&mut self, memory: &GuestMemory) {
        let leased = self.object.ram_area.zip(self.pool_file);
        self.pool_map = leased.map_or_else(PoolMap::default, |(leased, file)| {
            PoolMap::new(memory, &PoolRam { file, leased: Some(leased) })
        });
    }

    /// Takes nothing from a queue any more, and answers once none of its memory is lent.
    pub(super) fn stop_when_returned(&mut self, index: u16, reply: Reply<u16>) {
        let deadline = *self.patience_ends.get_or_insert_with(|| Instant::now() + PATIENCE);
        self.stopping.push(Stopping { index, reply, deadline });
    }

    /// Whether a queue is about to stop.
    #[inline]
    pub(super) fn is_stopping(&self, index: usize) -> bool {
        self.stopping.iter().any(|stopping| usize::from(stopping.index) == index)
    }

    /// Stops the queues whose memory has come back, or is not waited for any longer.
    pub(super) fn finish_stopping(&mut self) {
        let returned =
            |port: &Self, it: &Stopping| !port.under_way.lends(it.index) || it.deadline <= Instant::now();
        while let Some(place) = self.stopping.iter().position(|it| returned(self, it)) {
            let stopping = self.stopping.swap_remove(place);
            if !self.under_way.lends(stopping.index) {
                // It answers.
                self.patience_ends = None;
            }
            let next = self.take_ring(stopping.index).map_or(0, |ring| ring.next_available());
            stopping.reply.send(next);
        }
    }
}
