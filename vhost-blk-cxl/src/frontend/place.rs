//! Where the data of a request lies: in a buffer of ours, or where the guest has it, in one piece or in several.

use cxl_pool::{ByteOffset, LINE_BYTES, Memory};
use tracing::debug;
use vhost_frontend::pacing::Way;
use vhost_frontend::{Buffer, BufferArea, Chain, CopyError, PoolMap};

use super::device::{REQUEST_BYTES_MAX, SECTOR_BYTES};
use super::disk::Disk;
use super::parse::HEADER_BYTES;
use super::serve::copy_in;
use super::slots::State;
use super::steps::room_for_step;
use crate::message::Operation;
use crate::segments::{SEGMENTS_MAX, Segment, list_bytes};

/// Where the data of a request lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// It has none, or none yet.
    Nowhere,
    /// In a buffer of ours, from or to which it is copied.
    Buffer(Buffer),
    /// Where the guest has it: in its own memory, which is a part of the pool.
    Guest(ByteOffset),
    /// The same, in several places, of which a list stands in a buffer of ours.
    Guests(Buffer),
}

impl Place {
    /// What the backend is told: where the data is in the pool, or the list of where it is.
    pub(crate) fn start(self) -> Option<ByteOffset> {
        match self {
            Self::Nowhere => None,
            Self::Buffer(buffer) | Self::Guests(buffer) => Some(buffer.start()),
            Self::Guest(start) => Some(start),
        }
    }

    /// Calls `each` for all that the guest has itself.
    pub(super) fn in_guest(
        self,
        length_bytes: u64,
        pieces: &[Segment],
        mut each: impl FnMut(ByteOffset, u64),
    ) {
        match self {
            Self::Guest(start) => each(start, length_bytes),
            Self::Guests(_) => pieces.iter().for_each(|piece| each(piece.start, piece.bytes.into())),
            Self::Nowhere | Self::Buffer(_) => {}
        }
    }

    /// Whether the guest has it itself.
    pub(super) fn is_in_guest(self) -> bool {
        matches!(self, Self::Guest(_) | Self::Guests(_))
    }

    /// What of our own it takes up.
    pub(crate) fn buffer(self) -> Option<Buffer> {
        match self {
            Self::Buffer(buffer) | Self::Guests(buffer) => Some(buffer),
            Self::Nowhere | Self::Guest(_) => None,
        }
    }
}

/// Finds data in the guest's memory.
#[derive(Debug)]
pub(super) struct Finder {
    /// Where in the pool the guest's memory lies, if it does.
    pub(super) map: PoolMap,
    /// The backend takes lists, as far as we know.
    pub(super) lists: bool,
    /// All data is copied, wherever it lies.
    pub(super) copies_all: bool,
    /// Requests are cut into units of so many bytes, and each part has a list of its own.
    unit_bytes: Option<u64>,
    found: Box<[(ByteOffset, u32); SEGMENTS_MAX]>,
}

impl Finder {
    /// For a disk whose requests are cut into units of so many bytes, or are not.
    pub(super) fn new(unit_bytes: Option<u64>) -> Self {
        let found = Box::new([(ByteOffset::new(0), 0); SEGMENTS_MAX]);
        Self { map: PoolMap::default(), lists: true, copies_all: false, unit_bytes, found }
    }

    /// Whether a request in several pieces has one list.
    pub(super) fn has_whole_lists(&self) -> bool {
        self.unit_bytes.is_none()
    }

    /// How much room the list of so many segments takes up, or those of all parts of the request.
    fn lists_bytes(&self, segments: u16, length_bytes: u64) -> Option<u32> {
        let Some(unit_bytes) = self.unit_bytes else { return Some(list_bytes(segments)) };
        // Each part may have a segment that was cut, and has a header and whole lines.
        let more = list_bytes(0) + u32::try_from(LINE_BYTES).ok()?;
        let parts = u32::try_from(length_bytes / unit_bytes + 2).ok()?;
        list_bytes(segments).checked_add(parts.checked_mul(more)?)
    }

    /// Where the guest keeps the data of a request, if it is where others may reach it: only whole lines change hands, and devices
    /// want whole sectors, and of each piece whole blocks. For several pieces there must be room for a list; what they are
    /// is then in `pieces`.
    pub(super) fn find(
        &mut self,
        chain: &Chain,
        operation: Operation,
        length_bytes: u64,
        block_bytes: u32,
        (buffers, pieces): (&mut BufferArea, &mut Vec<Segment>),
    ) -> Option<Place> {
        if self.copies_all || self.map.is_empty() {
            return None;
        }
        let (segments, skip) = match operation {
            Operation::Read => (chain.writable(), 0),
            _ => (chain.readable(), HEADER_BYTES),
        };
        let count = self.map.ranges(segments, skip, length_bytes, &mut self.found[..])?;
        let found = &self.found[..count];
        let sectors = |(start, bytes): &(ByteOffset, u32)| {
            start.get().is_multiple_of(SECTOR_BYTES) && u64::from(*bytes).is_multiple_of(SECTOR_BYTES)
        };
        match found {
            [one] => sectors(one).then_some(Place::Guest(one.0)),
            _ if !self.lists => None,
            _ => {
                let whole = |piece: &_| sectors(piece) && piece.1.is_multiple_of(block_bytes);
                if !found.iter().all(whole) {
                    return None;
                }
                let buffer = buffers.alloc(self.lists_bytes(u16::try_from(count).ok()?, length_bytes)?)?;
                pieces.clear();
                pieces.extend(found.iter().map(|&(start, bytes)| Segment { start, bytes }));
                Some(Place::Guests(buffer))
            }
        }
    }
}

impl<M: Memory> Disk<M> {
    /// A buffer that is kept for a bad day: for reads whose buffers a backend may still fill of which nothing is known.
    pub(super) fn spare(&mut self) -> Option<Buffer> {
        let bytes = self.spare_bytes();
        self.buffers.alloc(u32::try_from(bytes).ok()?)
    }

    /// How long such a buffer is.
    pub(super) fn spare_bytes(&self) -> u64 {
        REQUEST_BYTES_MAX.min(self.buffers.total_bytes() / 4)
    }

    /// Whether a backend has filled a buffer with zeros.
    pub(super) fn is_filled_with_zeros(&self, buffer: Buffer, length_bytes: u64) -> bool {
        self.memory.invalidate(buffer.start(), length_bytes);
        self.memory.full_fence();
        let mut bytes = [0; 4096];
        let mut at = 0;
        while at < length_bytes {
            let step = bytes.len().min(usize::try_from(length_bytes - at).unwrap_or(usize::MAX));
            self.memory.read(buffer.start().saturating_add(at), &mut bytes[..step]);
            if bytes[..step].iter().any(|&byte| byte != 0) {
                return false;
            }
            at += step as u64;
        }
        true
    }

    /// A backend of an earlier version knows no lists: it refused the request without a look at its data.
    pub(super) fn copy_instead(&mut self, index: u16) {
        if std::mem::replace(&mut self.finder.lists, false) {
            debug!(lease = %self.object.lease, "the backend knows no lists: data in several pieces is copied");
        }
        let slot = self.slots.get_mut(index);
        if let Some(buffer) = std::mem::replace(&mut slot.place, Place::Nowhere).buffer() {
            self.buffers.free(buffer);
        }
        self.slots.set_state(index, State::Queued);
        self.queued.push_back(index);
    }

    /// Gives the data of a request a buffer if it lost the place that it had. Whether it has one.
    pub(super) fn place_again(&mut self, index: u16) -> Result<bool, CopyError> {
        let any_under_way = self.slots.with_backend() > 0;
        let slot = self.slots.get_mut(index);
        if !slot.operation.has_data() || slot.place != Place::Nowhere {
            return Ok(true);
        }
        let Some(buffer) = room_for_step(&mut self.buffers, slot.length_bytes, any_under_way) else {
            return Ok(false);
        };
        // A request of one step may have several then. It is kept apart from others all the same: disks that leave this to whoever
        // carries requests out give each one a place at the beginning.
        slot.place_in(buffer);
        // Only now: what is admitted is counted, and without a buffer it would not move.
        if slot.done_bytes > 0
            && let Some(pacer) = &mut self.pacer
            && !pacer.admit(Way::Asked, slot.length_bytes)
        {
            slot.place = Place::Nowhere;
            self.buffers.free(buffer);
            return Ok(false);
        }
        match &self.rings[usize::from(slot.ring)] {
            Some(served) if slot.operation == Operation::Write => {
                self.budget.copied(slot.length_bytes);
                copy_in(&self.memory, &served.ring, slot, buffer).map(|()| true)
            }
            _ => Ok(true),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use cxl_pool::simulated::SimulatedPool;
    use cxl_pool::{Area, HostId, LineCount, LineOffset};
    use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId, VolumeId};
    use pod_protocol::objects::{DiskObject, MchannelObject, Route};
    use vhost_frontend::pacing::Meter;

    use super::*;

    const STEP_BYTES: u64 = 64 << 10;

    pub(in super::super) fn object() -> DiskObject {
        DiskObject {
            lease: LeaseId::new(7).unwrap(),
            instance: InstanceId::new(1),
            instance_name: String::new(),
            device: String::new(),
            socket: String::new(),
            vmm_listens: false,
            volume: VolumeId::new(1),
            serial: String::new(),
            size_bytes: 1 << 30,
            block_bytes: 512,
            discard_granularity_bytes: None,
            read_only: false,
            queues: 1,
            data_area: Area::new(LineOffset::new(4096), LineCount::covering(2 * STEP_BYTES)),
            ram_area: None,
            route: Route { channel: ChannelId::new(1), generation: LeaseGeneration::new(1) },
            replicas: Vec::new(),
            stripe_bytes: None,
            beside: None,
            number: None,
            epoch: 0,
            failed: false,
            write_through: false,
            untold: false,
            incoming: false,
        }
    }

    #[test]
    fn a_step_that_waits_for_a_buffer_is_counted_once_it_has_one() {
        let memory = SimulatedPool::new(1, 1 << 20).host(HostId::new(1));
        let mut disk = Disk::new(memory.clone(), object(), Arc::default(), Arc::default(), None);
        let mut meter = Meter::new(memory);
        let DiskObject { lease, instance, .. } = object();
        let pacing = meter.measure(MchannelObject {
            lease,
            instance,
            name: String::new(),
            weight: 1,
            tenant: 0,
            path: vec![1],
        });
        disk.pace(Some(pacing));
        // The second of two steps of a read.
        let index = disk.slots.candidate().unwrap();
        disk.slots.take();
        let slot = disk.slots.get_mut(index);
        (slot.operation, slot.done_bytes, slot.length_bytes) = (Operation::Read, STEP_BYTES, STEP_BYTES);
        let others = disk.buffers.alloc(u32::try_from(2 * STEP_BYTES).unwrap()).unwrap();
        for _ in 0..5 {
            assert!(matches!(disk.place_again(index), Ok(false)), "others have all buffers");
        }
        disk.buffers.free(others);
        assert!(matches!(disk.place_again(index), Ok(true)));
        assert!(matches!(disk.place_again(index), Ok(true)), "it has one");
        let moved = &meter.telemetry()[0];
        assert_eq!((moved.bytes, moved.messages), (STEP_BYTES, 1));
    }
}
