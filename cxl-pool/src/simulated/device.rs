//! A device that accesses the pool past its host's cache.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use super::world::{CacheIndex, World};
use super::{SimulatedPool, words};
use crate::{ByteOffset, HostId, Memory};

/// A simulated pool as a device sees it whose accesses allocate no lines in its host's cache: what is there, and nothing else.
/// Its driver tells it what to do by stores, so whatever the host fenced comes before. Cache control and fences are not for devices
/// and do nothing.
#[derive(Clone)]
pub struct DeviceMemory {
    world: Arc<Mutex<World>>,
    host: CacheIndex,
    size_bytes: u64,
}

impl SimulatedPool {
    /// Access of a device of this host past its cache.
    pub fn device(&self, host: HostId) -> DeviceMemory {
        let mut world = self.world();
        let ((host, _), size_bytes) = (world.process(host), world.size_bytes());
        DeviceMemory { world: Arc::clone(&self.world), host, size_bytes }
    }
}

impl DeviceMemory {
    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory for DeviceMemory {
    const COHERENT: bool = false;

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn load(&self, at: ByteOffset) -> u64 {
        let mut bytes = [0; 8];
        self.read(at, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    fn store(&self, at: ByteOffset, value: u64) {
        self.write(at, &value.to_le_bytes());
    }

    fn read(&self, at: ByteOffset, into: &mut [u8]) {
        let mut world = self.world();
        for (offset, bytes) in words(at, into.len()) {
            world.device_read(self.host, at.get() + offset as u64, &mut into[offset..offset + bytes]);
        }
    }

    fn write(&self, at: ByteOffset, from: &[u8]) {
        let mut world = self.world();
        for (offset, bytes) in words(at, from.len()) {
            world.device_write(self.host, at.get() + offset as u64, &from[offset..offset + bytes]);
        }
    }

    fn zero(&self, at: ByteOffset, bytes: u64) {
        self.write(at, &vec![0; bytes as usize]);
    }

    fn copy_to<B: BitmapSlice>(&self, at: ByteOffset, into: &VolatileSlice<'_, B>) {
        let mut bytes = vec![0; into.len()];
        self.read(at, &mut bytes);
        into.copy_from(&bytes);
    }

    fn copy_from<B: BitmapSlice>(&self, at: ByteOffset, from: &VolatileSlice<'_, B>) {
        let mut bytes = vec![0; from.len()];
        from.copy_to(&mut bytes);
        self.write(at, &bytes);
    }

    fn write_streaming(&self, at: ByteOffset, from: &[u8]) {
        self.write(at, from);
    }

    fn write_back(&self, _: ByteOffset, _: u64) {}

    fn invalidate(&self, _: ByteOffset, _: u64) {}

    fn flush(&self, _: ByteOffset, _: u64) {}

    fn prefetch(&self, _: ByteOffset) {}

    fn store_fence(&self) {}

    fn full_fence(&self) {}
}
