//! A split virtqueue in memory that the target shares, and what belongs to its requests.
//!
//! Each request has descriptors and a place for header, range and status of its own, so nothing is searched for.

use std::fs::File;
use std::io;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::bindings::virtio_blk::VIRTIO_BLK_T_GET_ID;
use virtio_bindings::bindings::virtio_ring::{
    VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_USED_F_NO_NOTIFY,
};
use vm_memory::{Bytes, MmapRegion, VolatileMemory, VolatileSlice};

use super::identity::ID_BYTES;
use super::requests::{DEPTH, Outgoing, Part, ZEROS_BYTES};
use super::scratch::shared_memory;
use crate::segments::{Segment, after};

pub(super) const QUEUE_SIZE: u16 = 256;
const DESCRIPTORS_AT: usize = 0;
const AVAILABLE_AT: usize = 0x1000;
const USED_AT: usize = 0x2000;
/// Header, range and status of each request.
const PLACES_AT: usize = 0x4000;
const PLACE_BYTES: usize = 64;
const RANGE_AT: usize = 16;
const STATUS_AT: usize = 32;
/// What a disk calls itself.
const ID_AT: usize = 36;
const ZEROS_AT: usize = 0x10000;
/// An indirect table for each request whose data lies in several places.
const TABLES_AT: usize = ZEROS_AT + ZEROS_BYTES as usize;
const TABLE_ENTRIES: u16 = 128;
const TABLE_BYTES: usize = TABLE_ENTRIES as usize * DESCRIPTOR_BYTES;
const DESCRIPTOR_BYTES_SHORT: u32 = 16;
const DESCRIPTOR_BYTES: usize = DESCRIPTOR_BYTES_SHORT as usize;
/// Places of one request: header and status have descriptors, too.
pub(super) const SEGMENTS_MAX: u16 = TABLE_ENTRIES - 2;
pub(super) const RING_BYTES: usize = TABLES_AT + TABLE_BYTES * DEPTH as usize;
/// Header, part, status.
const DESCRIPTORS_EACH: u16 = 3;
/// What no target answers.
const NO_STATUS: u8 = 0xff;

const _: () = assert!(DEPTH * DESCRIPTORS_EACH <= QUEUE_SIZE);
const _: () = assert!(ID_AT + ID_BYTES as usize <= PLACE_BYTES);
const _: () = assert!(PLACES_AT + PLACE_BYTES * DEPTH as usize <= ZEROS_AT);

/// The ring, at an address of the target's view of memory.
pub(super) struct SharedRing {
    file: File,
    region: MmapRegion<()>,
    address: u64,
    available: u16,
    /// Of it, what the target was not told yet.
    unpublished: bool,
    used: u16,
}

impl SharedRing {
    pub(super) fn new(address: u64) -> io::Result<Self> {
        let (file, region) = shared_memory("wadi-vhost-user", RING_BYTES)?;
        Ok(Self { file, region, address, available: 0, unpublished: false, used: 0 })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Descriptor table, available ring and used ring.
    pub(super) fn addresses(&self) -> [u64; 3] {
        [DESCRIPTORS_AT, AVAILABLE_AT, USED_AT].map(|at| self.address + at as u64)
    }

    fn memory(&self) -> VolatileSlice<'_> {
        self.region.as_volatile_slice()
    }

    /// Places inside the region are constants and small multiples: an access cannot fail.
    fn write(&self, at: usize, bytes: &[u8]) {
        let written = self.memory().write_slice(bytes, at);
        debug_assert!(written.is_ok());
    }

    fn place(slot: u16) -> usize {
        PLACES_AT + PLACE_BYTES * usize::from(slot)
    }

    /// Puts a request into the ring. The target learns of it by [`SharedRing::publish`].
    /// What belongs to it of a list is in `list`.
    pub(super) fn put(&mut self, request: &Outgoing, list: &[Segment]) {
        let place = Self::place(request.slot);
        let at = |offset: usize| self.address + (place + offset) as u64;
        let mut header = request.kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(request.sector.to_le_bytes());
        self.write(place, &header);
        self.write(place + STATUS_AT, &[NO_STATUS]);
        let part = match request.part {
            Part::Nothing => None,
            Part::List { done, segments, writable } => {
                self.describe_list(request.slot, after(list, done).take(segments.into()), writable);
                return self.offer(request.slot * DESCRIPTORS_EACH);
            }
            Part::Pool { at, bytes, writable } => Some((at.get(), bytes, writable)),
            Part::Zeros { bytes } => Some((self.address + ZEROS_AT as u64, bytes, false)),
            Part::Range { sector, sectors, unmap } => {
                let mut range = sector.to_le_bytes().to_vec();
                range.extend(sectors.to_le_bytes());
                range.extend(u32::from(unmap).to_le_bytes());
                self.write(place + RANGE_AT, &range);
                Some((at(RANGE_AT), 16, false))
            }
        };
        self.describe_parts(request.slot, part);
    }

    /// Asks for what the disk calls itself, in the first slot: nothing else is under way.
    pub(super) fn put_id_request(&mut self) {
        let place = Self::place(0);
        let mut header = VIRTIO_BLK_T_GET_ID.to_le_bytes().to_vec();
        header.extend([0; 12]);
        self.write(place, &header);
        self.write(place + STATUS_AT, &[NO_STATUS]);
        self.describe_parts(0, Some((self.address + (place + ID_AT) as u64, ID_BYTES, true)));
    }

    /// What was answered to that.
    pub(super) fn id(&self) -> [u8; ID_BYTES as usize] {
        self.memory().read_obj(Self::place(0) + ID_AT).unwrap_or_default()
    }

    /// Describes a request whose header is in its place, and what belongs to it, and offers it.
    fn describe_parts(&mut self, slot: u16, part: Option<(u64, u32, bool)>) {
        let first = slot * DESCRIPTORS_EACH;
        let at = |offset: usize| self.address + (Self::place(slot) + offset) as u64;
        let next = if part.is_some() { first + 1 } else { first + 2 };
        self.describe(DESCRIPTORS_AT, first, at(0), 16, VRING_DESC_F_NEXT, next);
        if let Some((address, bytes, writable)) = part {
            let flags = VRING_DESC_F_NEXT | if writable { VRING_DESC_F_WRITE } else { 0 };
            self.describe(DESCRIPTORS_AT, first + 1, address, bytes, flags, first + 2);
        }
        self.describe(DESCRIPTORS_AT, first + 2, at(STATUS_AT), 1, VRING_DESC_F_WRITE, 0);
        self.offer(first);
    }

    /// Describes a request whose data lies in several places: by a table of its own.
    fn describe_list(&self, slot: u16, segments: impl Iterator<Item = Segment>, writable: bool) {
        let place = self.address + Self::place(slot) as u64;
        let table = TABLES_AT + TABLE_BYTES * usize::from(slot);
        self.describe(table, 0, place, 16, VRING_DESC_F_NEXT, 1);
        let flags = VRING_DESC_F_NEXT | if writable { VRING_DESC_F_WRITE } else { 0 };
        let mut entry = 1;
        for Segment { start, bytes } in segments {
            self.describe(table, entry, start.get(), bytes, flags, entry + 1);
            entry += 1;
        }
        self.describe(table, entry, place + STATUS_AT as u64, 1, VRING_DESC_F_WRITE, 0);
        let bytes = (u32::from(entry) + 1) * DESCRIPTOR_BYTES_SHORT;
        let first = slot * DESCRIPTORS_EACH;
        self.describe(DESCRIPTORS_AT, first, self.address + table as u64, bytes, VRING_DESC_F_INDIRECT, 0);
    }

    /// Makes a chain available.
    fn offer(&mut self, first: u16) {
        let entry = AVAILABLE_AT + 4 + 2 * usize::from(self.available % QUEUE_SIZE);
        self.write(entry, &first.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.unpublished = true;
    }

    /// Writes a descriptor of the table that begins there.
    fn describe(&self, table: usize, index: u16, address: u64, bytes: u32, flags: u32, next: u16) {
        let mut descriptor = address.to_le_bytes().to_vec();
        descriptor.extend(bytes.to_le_bytes());
        descriptor.extend(&flags.to_le_bytes()[..2]);
        descriptor.extend(next.to_le_bytes());
        self.write(table + DESCRIPTOR_BYTES * usize::from(index), &descriptor);
    }

    /// Tells the target what was put. True if it wants to be kicked.
    pub(super) fn publish(&mut self) -> bool {
        if !std::mem::take(&mut self.unpublished) {
            return false;
        }
        let memory = self.memory();
        let stored = memory.store(self.available.to_le(), AVAILABLE_AT + 2, Ordering::Release);
        debug_assert!(stored.is_ok());
        // The index before the look at the flag, or both sides may sleep.
        fence(Ordering::SeqCst);
        let flags = memory.load::<u16>(USED_AT, Ordering::Acquire).map_or(0, u16::from_le);
        u32::from(flags) & VRING_USED_F_NO_NOTIFY == 0
    }

    /// The next answer: whose, and its status. A target that answers nonsense answers something that nobody asked.
    pub(super) fn answer(&mut self) -> Option<(u16, u8)> {
        let memory = self.memory();
        let index = memory.load::<u16>(USED_AT + 2, Ordering::Acquire).map_or(self.used, u16::from_le);
        if index == self.used {
            return None;
        }
        let entry = USED_AT + 4 + 8 * usize::from(self.used % QUEUE_SIZE);
        let head = memory.read_obj::<u32>(entry).map_or(u32::MAX, u32::from_le);
        self.used = self.used.wrapping_add(1);
        let slot = u16::try_from(head).unwrap_or(u16::MAX) / DESCRIPTORS_EACH;
        let known = slot < DEPTH && head == u32::from(slot * DESCRIPTORS_EACH);
        let status = if known { memory_status(&self.memory(), slot) } else { NO_STATUS };
        Some((if known { slot } else { u16::MAX }, status))
    }
}

fn memory_status(memory: &VolatileSlice<'_>, slot: u16) -> u8 {
    memory.read_obj(SharedRing::place(slot) + STATUS_AT).unwrap_or(NO_STATUS)
}
