//! Descriptor chains, walked once and checked whole.
//!
//! Every descriptor is read from guest memory exactly once, into a [`Chain`] of ours; nothing that was checked can be
//! changed by the guest afterwards. A walk ends in a whole chain or an error, never in a chain cut short.

use cxl_pool::LINE_BYTES;
use thiserror::Error;
use virtio_bindings::bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, VolatileMemory};

use crate::view::GuestView;

/// The size of a descriptor in a table.
const DESCRIPTOR_BYTES: u64 = 16;
const _: () = assert!(size_of::<Descriptor>() as u64 == DESCRIPTOR_BYTES);

/// A range of guest memory that a descriptor names. It was inside guest memory when the chain was walked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Guest physical address.
    pub address: GuestAddress,
    /// Length in bytes, not 0.
    pub bytes: u32,
}

/// What an engine accepts of a chain.
#[derive(Debug, Clone, Copy)]
pub struct ChainLimits {
    /// Descriptors in all, those of an indirect table and empty ones included.
    pub segments: u16,
    /// Bytes in all, both directions together.
    pub bytes: u64,
}

impl Default for ChainLimits {
    /// What Linux and QEMU use at most: 1024 descriptors, and 2^32 bytes as the specification says.
    fn default() -> Self {
        Self { segments: 1024, bytes: 1 << 32 }
    }
}

/// A chain that breaks the rules. It costs the guest this request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ChainError {
    /// The next descriptor lies beyond the table.
    #[error("a descriptor names {index} as the next one in a table of {size}")]
    OutOfTable {
        /// The index.
        index: u16,
        /// The table's size.
        size: u16,
    },
    /// More descriptors than the table has: the chain runs in a circle.
    #[error("the chain runs in a circle")]
    Loop,
    /// More descriptors than allowed.
    #[error("the chain has more than {limit} descriptors")]
    TooManySegments {
        /// As many as are allowed.
        limit: u16,
    },
    /// More bytes than allowed.
    #[error("the chain describes more than {limit} bytes")]
    TooManyBytes {
        /// As many as are allowed.
        limit: u64,
    },
    /// A descriptor or table is not in guest memory.
    #[error("{bytes} bytes at {address:#x} are not guest memory")]
    OutOfMemory {
        /// Guest physical address.
        address: u64,
        /// Length.
        bytes: u32,
    },
    /// An indirect descriptor where none may be.
    #[error("an indirect descriptor {0}")]
    Indirect(&'static str),
    /// A readable descriptor after a writable one.
    #[error("a device-readable descriptor follows a writable one")]
    Direction,
}

/// A descriptor chain, copied out of guest memory: first the readable segments, then the writable ones.
///
/// Keep and reuse it: its storage grows to the longest chain seen and stays.
#[derive(Debug, Clone, Default)]
pub struct Chain {
    head: u16,
    segments: Vec<Segment>,
    readable: usize,
    readable_bytes: u64,
    writable_bytes: u64,
    walked: u16,
    fault: Option<ChainError>,
}

impl Chain {
    /// An empty chain with room for `segments` before it allocates.
    pub fn with_capacity(segments: usize) -> Self {
        Self { segments: Vec::with_capacity(segments), ..Self::default() }
    }

    /// The index of its first descriptor: its name in the used ring.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// What the guest lets the device read.
    pub fn readable(&self) -> &[Segment] {
        &self.segments[..self.readable]
    }

    /// What the guest lets the device write.
    pub fn writable(&self) -> &[Segment] {
        &self.segments[self.readable..]
    }

    /// Length of the readable part.
    pub fn readable_bytes(&self) -> u64 {
        self.readable_bytes
    }

    /// Length of the writable part.
    pub fn writable_bytes(&self) -> u64 {
        self.writable_bytes
    }

    /// How many descriptors were looked at for it, those of an indirect table and empty ones included.
    #[inline]
    pub fn walked(&self) -> u16 {
        self.walked
    }

    /// Which rule it breaks, if any; then it is good for nothing but to be given back.
    pub fn fault(&self) -> Option<ChainError> {
        self.fault
    }

    pub(crate) fn set_fault(&mut self, fault: Option<ChainError>) {
        self.fault = fault;
    }

    #[inline]
    pub(crate) fn restart(&mut self, head: u16) {
        self.head = head;
        self.segments.clear();
        self.readable = 0;
        self.readable_bytes = 0;
        self.writable_bytes = 0;
        self.walked = 0;
        self.fault = None;
    }

    #[inline]
    fn push(&mut self, descriptor: &Walked, limits: ChainLimits) -> Result<(), ChainError> {
        if descriptor.bytes == 0 {
            // Useless but legal.
            return Ok(());
        }
        let bytes = u64::from(descriptor.bytes);
        if self.readable_bytes + self.writable_bytes + bytes > limits.bytes {
            return Err(ChainError::TooManyBytes { limit: limits.bytes });
        }
        if descriptor.has(VRING_DESC_F_WRITE) {
            self.writable_bytes += bytes;
        } else if self.readable < self.segments.len() {
            return Err(ChainError::Direction);
        } else {
            self.readable += 1;
            self.readable_bytes += bytes;
        }
        self.segments.push(Segment { address: descriptor.address, bytes: descriptor.bytes });
        Ok(())
    }
}

/// How many descriptors are looked at for the end of a chain that breaks the rules.
const SOUGHT_MAX: u16 = 4096;

/// Where and how a chain is looked up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Table {
    pub(crate) address: GuestAddress,
    pub(crate) size: u16,
    /// VIRTIO_F_INDIRECT_DESC was negotiated.
    pub(crate) indirect: bool,
    pub(crate) limits: ChainLimits,
}

impl Table {
    /// Asks for the descriptors of these chains, which another core has written most likely.
    #[inline]
    pub(crate) fn prefetch(&self, view: &GuestView<'_>, heads: impl Iterator<Item = u16>) {
        let mut asked_for = None;
        for head in heads {
            let line = u64::from(head) * DESCRIPTOR_BYTES / LINE_BYTES as u64;
            // Most of them follow each other.
            if asked_for.replace(line) == Some(line) {
                continue;
            }
            let at = self.address.0.checked_add(line * LINE_BYTES as u64).map(GuestAddress);
            if let Some(slice) = at.and_then(|at| view.slice(at, size_of::<Descriptor>())) {
                cxl_pool::prefetch_front(&slice);
            }
        }
    }

    /// Walks the chain that begins at `head`, which must be inside the table.
    #[inline]
    pub(crate) fn walk(&self, view: &GuestView<'_>, head: u16, chain: &mut Chain) -> Result<(), ChainError> {
        chain.restart(head);
        let mut table = self.address;
        let mut size = self.size;
        let mut inside_indirect = false;
        let mut index = head;
        let mut left = size;
        // Empty ones count too: a table holds 65535 of them, and to walk all of those for each chain would hold up everybody else.
        let mut allowed = self.limits.segments;
        loop {
            if index >= size {
                return Err(ChainError::OutOfTable { index, size });
            }
            if left == 0 {
                return Err(ChainError::Loop);
            }
            left -= 1;
            let descriptor = Walked::read(view, table, index)?;
            chain.walked = chain.walked.saturating_add(1);
            if descriptor.has(VRING_DESC_F_INDIRECT) {
                if inside_indirect {
                    return Err(ChainError::Indirect("lies in an indirect table"));
                }
                size = self.indirect_size(&descriptor)?;
                table = descriptor.address;
                inside_indirect = true;
                index = 0;
                left = size;
                continue;
            }
            allowed =
                allowed.checked_sub(1).ok_or(ChainError::TooManySegments { limit: self.limits.segments })?;
            if descriptor.bytes > 0 && !view.contains(descriptor.address, descriptor.bytes) {
                return Err(ChainError::OutOfMemory {
                    address: descriptor.address.0,
                    bytes: descriptor.bytes,
                });
            }
            chain.push(&descriptor, self.limits)?;
            if !descriptor.has(VRING_DESC_F_NEXT) {
                return Ok(());
            }
            index = descriptor.next;
        }
    }

    /// The last byte that the device may write of a chain that breaks the rules, if the chain has an end and the byte is guest
    /// memory. Much of what makes a chain useless leaves that to be found: segments that are no guest memory, in the wrong
    /// order, too many or too long.
    #[cold]
    pub(crate) fn last_writable(&self, view: &GuestView<'_>, head: u16) -> Option<Segment> {
        let (mut table, mut size) = (self.address, self.size);
        let (mut inside_indirect, mut index) = (false, head);
        let mut last = None;
        let mut left = size;
        for _ in 0..SOUGHT_MAX {
            if index >= size || left == 0 {
                return None;
            }
            left -= 1;
            let descriptor = Walked::read(view, table, index).ok()?;
            if descriptor.has(VRING_DESC_F_INDIRECT) {
                if inside_indirect {
                    return None;
                }
                size = self.indirect_size(&descriptor).ok()?;
                table = descriptor.address;
                (inside_indirect, index, left) = (true, 0, size);
                continue;
            }
            if descriptor.bytes > 0 && descriptor.has(VRING_DESC_F_WRITE) {
                last = descriptor.address.0.checked_add(u64::from(descriptor.bytes) - 1);
            }
            if !descriptor.has(VRING_DESC_F_NEXT) {
                let address = GuestAddress(last?);
                return view.contains(address, 1).then_some(Segment { address, bytes: 1 });
            }
            index = descriptor.next;
        }
        None
    }

    fn indirect_size(&self, descriptor: &Walked) -> Result<u16, ChainError> {
        if !self.indirect {
            return Err(ChainError::Indirect("was not negotiated"));
        }
        if descriptor.has(VRING_DESC_F_NEXT) {
            return Err(ChainError::Indirect("has a successor"));
        }
        let bytes = u64::from(descriptor.bytes);
        if bytes == 0 || !bytes.is_multiple_of(DESCRIPTOR_BYTES) {
            return Err(ChainError::Indirect("is not a whole number of descriptors long"));
        }
        u16::try_from(bytes / DESCRIPTOR_BYTES)
            .map_err(|_| ChainError::Indirect("has more than 65535 entries"))
    }
}

/// A descriptor as it was when it was read.
struct Walked {
    address: GuestAddress,
    bytes: u32,
    flags: u16,
    next: u16,
}

impl Walked {
    #[inline]
    fn read(view: &GuestView<'_>, table: GuestAddress, index: u16) -> Result<Self, ChainError> {
        let out = |address| ChainError::OutOfMemory { address, bytes: 16 };
        let at = table.0.checked_add(u64::from(index) * DESCRIPTOR_BYTES).ok_or(out(table.0))?;
        let descriptor = match view.slice(GuestAddress(at), size_of::<Descriptor>()) {
            Some(slice) => slice.get_ref::<Descriptor>(0).map_err(|_| out(at))?.load(),
            // Perhaps half of it lies in the next region.
            None => view.memory().read_obj(GuestAddress(at)).map_err(|_| out(at))?,
        };
        Ok(Self {
            address: descriptor.addr(),
            bytes: descriptor.len(),
            flags: descriptor.flags(),
            next: descriptor.next(),
        })
    }

    #[inline]
    fn has(&self, flag: u32) -> bool {
        u32::from(self.flags) & flag != 0
    }
}
