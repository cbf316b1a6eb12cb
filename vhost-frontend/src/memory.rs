//! The guest's memory as the VMM shares it.

use std::fs::File;
use std::ops::Deref;
use std::sync::Arc;

use cxl_pool::FileIdentity;
use thiserror::Error;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion};

use crate::dirty_log::DirtyLog;
use crate::pool_ram::PoolRam;

/// A snapshot of a guest's memory, and of whether what is written there is logged. Cloning is cheap; the mapping lives as
/// long as a clone of it.
#[derive(Debug, Clone, Default)]
pub struct GuestMemory {
    map: Arc<GuestMemoryMmap<()>>,
    log: Option<DirtyLog>,
}

impl GuestMemory {
    /// The same memory, with what is written there logged, or not.
    #[must_use]
    pub fn with_log(&self, log: Option<DirtyLog>) -> Self {
        Self { map: Arc::clone(&self.map), log }
    }

    /// Where to note what was written, if it is to be noted. Not needed for what [`ChainWriter`](crate::ChainWriter) and
    /// [`Ring`](crate::Ring) write: they do it themselves.
    #[inline]
    pub fn log(&self) -> Option<&DirtyLog> {
        self.log.as_ref()
    }
}

impl Deref for GuestMemory {
    type Target = GuestMemoryMmap<()>;

    fn deref(&self) -> &Self::Target {
        &self.map
    }
}

impl From<GuestMemoryMmap<()>> for GuestMemory {
    fn from(map: GuestMemoryMmap<()>) -> Self {
        Self { map: Arc::new(map), log: None }
    }
}

/// A memory region that cannot be used.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// mmap refused it.
    #[error(
        "cannot map {bytes} bytes of guest memory at {guest_address:#x}; the VMM must share its memory (memory-backend-memfd,share=on)"
    )]
    Map {
        /// Guest physical address.
        guest_address: u64,
        /// Length.
        bytes: u64,
        /// Why.
        source: vm_memory::mmap::MmapRegionError,
    },
    /// It overlaps another one, or wraps around.
    #[error(
        "guest memory of {bytes} bytes at {guest_address:#x} overlaps another region or ends beyond the address space"
    )]
    Overlap {
        /// Guest physical address.
        guest_address: u64,
        /// Length.
        bytes: u64,
    },
    /// It is not there.
    #[error("there is no guest memory of {bytes} bytes at {guest_address:#x}")]
    Unknown {
        /// Guest physical address.
        guest_address: u64,
        /// Length.
        bytes: u64,
    },
    /// The file ends before it does: touching it would kill us.
    #[error("guest memory of {bytes} bytes at {guest_address:#x} reaches beyond the end of its file")]
    BeyondFile {
        /// Guest physical address.
        guest_address: u64,
        /// Length.
        bytes: u64,
    },
    /// It is a part of the pool that is not the guest's.
    #[error(
        "guest memory of {bytes} bytes at {guest_address:#x} is the pool's from {file_offset:#x} on, which is not leased to \
         this guest as memory; say where its part begins (memory-backend-file,offset=, which QEMU knows since 8.1)"
    )]
    NotLeased {
        /// Guest physical address.
        guest_address: u64,
        /// Length.
        bytes: u64,
        /// Where in the pool it begins.
        file_offset: u64,
    },
    /// More regions than slots.
    #[error("the VMM shares more than {MAX_SLOTS} memory regions")]
    TooMany,
}

/// As many as QEMU ever asks for: one for each of its memory slots.
pub(crate) const MAX_SLOTS: usize = 509;

/// One region as the VMM describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegionSpec {
    pub(crate) guest_address: u64,
    pub(crate) bytes: u64,
    /// Where the VMM has mapped it: vring addresses arrive in these terms.
    pub(crate) vmm_address: u64,
    pub(crate) file_offset: u64,
}

#[derive(Debug, Clone)]
struct Region {
    spec: RegionSpec,
    mapping: Arc<GuestRegionMmap<()>>,
    /// How often it was shared: QEMU before 8.1 shares, and takes back, each region once per pair of a NIC's queues.
    shared: u32,
}

impl Region {
    fn is(&self, spec: RegionSpec, file: &File) -> bool {
        let of = |file: &File| FileIdentity::of(file).ok();
        let own = self.mapping.file_offset().and_then(|own| of(own.file()));
        self.spec == spec && own.is_some() && own == of(file)
    }
}

/// The regions that the VMM has shared so far.
#[derive(Debug, Clone, Default)]
pub struct MemoryTable {
    regions: Vec<Region>,
    snapshot: GuestMemory,
}

impl MemoryTable {
    /// The memory as it is now.
    pub fn snapshot(&self) -> GuestMemory {
        self.snapshot.clone()
    }

    /// Where the guest's memory ends.
    pub(crate) fn end(&self) -> u64 {
        self.regions.iter().map(|Region { spec, .. }| spec.guest_address + spec.bytes).max().unwrap_or(0)
    }

    /// Translates an address of the VMM into one of the guest.
    pub fn to_guest(&self, vmm_address: u64) -> Option<GuestAddress> {
        self.regions.iter().find_map(|Region { spec, .. }| {
            let offset = vmm_address.checked_sub(spec.vmm_address)?;
            (offset < spec.bytes).then(|| GuestAddress(spec.guest_address + offset))
        })
    }

    /// Maps a region, or refuses it. Of the pool, a guest may have what `pool` says.
    pub(crate) fn add(
        &mut self,
        spec: RegionSpec,
        file: File,
        pool: Option<&PoolRam>,
    ) -> Result<(), MemoryError> {
        if let Some(region) = self.regions.iter_mut().find(|region| region.is(spec, &file)) {
            region.shared = region.shared.saturating_add(1);
            return Ok(());
        }
        if self.regions.len() >= MAX_SLOTS {
            return Err(MemoryError::TooMany);
        }
        let RegionSpec { guest_address, bytes, file_offset, .. } = spec;
        if pool.is_some_and(|pool| !pool.allows(&file, file_offset, bytes)) {
            return Err(MemoryError::NotLeased { guest_address, bytes, file_offset });
        }
        let overlap = || MemoryError::Overlap { guest_address, bytes };
        if !file_holds(&file, spec.file_offset, bytes) {
            return Err(MemoryError::BeyondFile { guest_address, bytes });
        }
        let size = usize::try_from(bytes).map_err(|_| overlap())?;
        let mapping = MmapRegion::from_file(FileOffset::new(file, spec.file_offset), size)
            .map_err(|source| MemoryError::Map { guest_address, bytes, source })?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(guest_address)).ok_or_else(overlap)?;
        let region = Arc::new(region);
        self.snapshot = self.snapshot.insert_region(Arc::clone(&region)).map_err(|_| overlap())?.into();
        self.regions.push(Region { spec, mapping: region, shared: 1 });
        Ok(())
    }

    pub(crate) fn remove(
        &mut self,
        guest_address: u64,
        bytes: u64,
        vmm_address: u64,
    ) -> Result<(), MemoryError> {
        let unknown = || MemoryError::Unknown { guest_address, bytes };
        let at = self
            .regions
            .iter()
            .position(|Region { spec, .. }| {
                (spec.guest_address, spec.bytes, spec.vmm_address) == (guest_address, bytes, vmm_address)
            })
            .ok_or_else(unknown)?;
        let shared = &mut self.regions[at].shared;
        *shared -= 1;
        if *shared > 0 {
            return Ok(());
        }
        let (snapshot, _) =
            self.snapshot.remove_region(GuestAddress(guest_address), bytes).map_err(|_| unknown())?;
        self.regions.remove(at);
        self.snapshot = snapshot.into();
        Ok(())
    }
}

/// Whether a file is long enough to be mapped so. Devices do not say how long they are; their mmap does.
pub(crate) fn file_holds(file: &File, offset: u64, bytes: u64) -> bool {
    file.metadata().is_ok_and(|metadata| {
        !metadata.is_file() || offset.checked_add(bytes).is_some_and(|end| end <= metadata.len())
    })
}
