//! Guest memory during a batch of accesses.

use std::cell::Cell;

use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, VolatileMemory,
    VolatileSlice,
};

/// Guest memory, with the region that was used last at hand: most of what a ring names lies in one.
#[derive(Clone, Debug)]
pub struct GuestView<'a> {
    memory: &'a GuestMemoryMmap<()>,
    last: Cell<Option<&'a GuestRegionMmap<()>>>,
}

impl<'a> GuestView<'a> {
    /// A view that knows no region yet.
    pub fn new(memory: &'a GuestMemoryMmap<()>) -> Self {
        Self { memory, last: Cell::new(None) }
    }

    /// `bytes` bytes from `at`. Nothing if they do not lie in one region: they may still be guest memory.
    #[inline]
    pub fn slice(&self, at: GuestAddress, bytes: usize) -> Option<VolatileSlice<'a>> {
        if let Some(region) = self.last.get()
            && let Some(slice) = within(region, at, bytes)
        {
            return Some(slice);
        }
        let region = self.memory.find_region(at)?;
        self.last.set(Some(region));
        within(region, at, bytes)
    }

    pub(crate) fn memory(&self) -> &'a GuestMemoryMmap<()> {
        self.memory
    }

    /// Whether `bytes` bytes from `at` are guest memory, regions that touch each other included.
    #[inline]
    pub(crate) fn contains(&self, at: GuestAddress, bytes: u32) -> bool {
        self.slice(at, bytes as usize).is_some() || self.memory.check_range(at, bytes as usize)
    }
}

#[inline]
fn within(region: &GuestRegionMmap<()>, at: GuestAddress, bytes: usize) -> Option<VolatileSlice<'_>> {
    let offset = usize::try_from(at.0.checked_sub(region.start_addr().0)?).ok()?;
    VolatileMemory::get_slice(&**region, offset, bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    #[test]
    fn a_view_finds_what_lies_in_one_region_and_only_that() {
        let ranges =
            [(GuestAddress(0x1000), 0x1000), (GuestAddress(0x2000), 0x1000), (GuestAddress(0x8000), 0x100)];
        let memory: GuestMemoryMmap<()> = GuestMemoryMmap::from_ranges(&ranges).unwrap();
        let view = GuestView::new(&memory);
        memory.write_obj(7u64, GuestAddress(0x8010)).unwrap();
        for _ in 0..2 {
            assert_eq!(view.slice(GuestAddress(0x8010), 8).unwrap().read_obj::<u64>(0).unwrap(), 7);
            assert_eq!(view.slice(GuestAddress(0x1ff8), 8).unwrap().len(), 8);
            assert!(view.slice(GuestAddress(0x1ff8), 9).is_none(), "in two regions");
            assert!(view.contains(GuestAddress(0x1ff8), 9), "but guest memory");
            assert!(!view.contains(GuestAddress(0x2ff8), 9));
            assert!(view.slice(GuestAddress(0x80f8), 9).is_none());
            assert!(view.slice(GuestAddress(0xfff), 1).is_none());
            assert!(view.slice(GuestAddress(u64::MAX), 2).is_none());
        }
    }
}
