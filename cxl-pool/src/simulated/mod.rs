//! Simulated non-coherent memory: every host has a private write-back cache over the shared bytes, and
//! whatever the rules allow to go wrong does.
//!
//! * What a host writes is invisible to others until it is written back **or evicted, at any moment**.
//! * A line may be **brought in at any moment** by a prefetcher; then it is stale until it is invalidated.
//! * Write-backs take effect in any order, up to the next store after a `store_fence`, or a `full_fence`.
//! * An invalidate takes effect at any time up to the next `full_fence`; a load before that may still
//!   return the old line. Invalidating a dirty line writes it back first.
//! * A crashed process leaves its cache behind: dirty lines may still be evicted later.
//! * 64 bytes travel at once; a write of several 8-byte words may be seen word by word.
//!
//! Everything follows from one seed as long as the accesses come in the same order, so a failing test that
//! prints its seed can be replayed.

mod cache;
mod device;
mod omission;
mod random;
mod replay;
mod source;
#[cfg(test)]
mod tests;
mod world;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use self::cache::Pending;
pub use self::device::DeviceMemory;
pub use self::omission::{Interruption, Omission, OmittingMemory, Operation, Site};
pub use self::random::Random;
pub use self::replay::{Mutilation, check_seeds, seeds};
pub use self::source::{Call, calls};
use self::world::{CacheIndex, World};
use crate::{ByteOffset, HostId, LINE_BYTES, Memory};

/// A simulated pool.
#[derive(Clone)]
pub struct SimulatedPool {
    world: Arc<Mutex<World>>,
}

/// Broken rules that the simulation saw happen, whether or not they did harm this time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// A host invalidated a line that it had written to and not written back: it would have read its own bytes,
    /// and wrote over somebody else's.
    pub dirty_invalidates: u64,
    /// A host wrote back a line that another host had changed meanwhile: two writers of one line.
    pub lost_updates: u64,
}

impl SimulatedPool {
    /// A pool of zeros. `bytes` must be a multiple of 64 and not 0.
    pub fn new(seed: u64, bytes: u64) -> Self {
        assert!(bytes > 0 && bytes.is_multiple_of(LINE_BYTES as u64), "a pool consists of whole lines");
        Self { world: Arc::new(Mutex::new(World::new(seed, bytes / LINE_BYTES as u64))) }
    }

    /// Access through this host's cache, for the process that runs there now.
    pub fn host(&self, host: HostId) -> SimulatedMemory {
        let mut world = self.world();
        let ((host, process), size_bytes) = (world.process(host), world.size_bytes());
        SimulatedMemory { world: Arc::clone(&self.world), host, process, size_bytes }
    }

    /// Kills the host's process. What it wrote may reach the pool much later, or never. [`host`](Self::host)
    /// starts the next one, with the same cache; to use the old access again panics.
    pub fn crash(&self, host: HostId) {
        self.world().crash(host);
    }

    /// Cuts the host's power: what is in its cache is lost.
    pub fn power_off(&self, host: HostId) {
        self.world().power_off(host);
    }

    /// The bytes as a host that never looked before would see them.
    pub fn shared(&self, at: ByteOffset, into: &mut [u8]) {
        self.world().shared(at.get(), into);
    }

    /// Broken rules so far.
    pub fn faults(&self) -> Faults {
        self.world().faults
    }

    fn world(&self) -> MutexGuard<'_, World> {
        // A test that panicked elsewhere has failed already; its message must not be hidden by this one.
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A simulated pool as one host sees it.
#[derive(Clone)]
pub struct SimulatedMemory {
    world: Arc<Mutex<World>>,
    host: CacheIndex,
    process: u64,
    size_bytes: u64,
}

impl SimulatedMemory {
    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, at: ByteOffset, bytes: u64) {
        let inside = at.get().checked_add(bytes).is_some_and(|end| end <= self.size_bytes);
        assert!(inside, "{bytes} bytes at {at} lie outside the pool of {} bytes", self.size_bytes);
    }

    fn issue(&self, at: ByteOffset, bytes: u64, kind: Pending) {
        self.check(at, bytes);
        if bytes == 0 {
            return;
        }
        let last = at.saturating_add(bytes - 1).line().get();
        let mut world = self.world();
        for line in at.line().get()..=last {
            world.issue(self.host, self.process, line, kind);
        }
    }
}

/// The pieces of a range that can be torn apart: each lies in one aligned word. (offset, length) from `at`.
fn words(at: ByteOffset, bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let first = (8 - at.get() as usize % 8).min(bytes);
    let head = (first > 0).then_some((0, first));
    head.into_iter().chain((first..bytes).step_by(8).map(move |offset| (offset, (bytes - offset).min(8))))
}

impl Memory for SimulatedMemory {
    const COHERENT: bool = false;

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn load(&self, at: ByteOffset) -> u64 {
        self.load_words::<1>(at)[0]
    }

    fn store(&self, at: ByteOffset, value: u64) {
        self.store_words(at, [value]);
    }

    // As the trait has them, word by word, but with the lock taken once.
    fn load_words<const N: usize>(&self, at: ByteOffset) -> [u64; N] {
        assert!(at.get().is_multiple_of(8), "a word at {at} is not aligned to 8 bytes");
        self.check(at, N as u64 * 8);
        let mut world = self.world();
        let mut words = [0; N];
        for (number, word) in words.iter_mut().enumerate().rev() {
            let mut bytes = [0; 8];
            world.read(self.host, self.process, at.get() + number as u64 * 8, &mut bytes);
            *word = u64::from_le_bytes(bytes);
        }
        words
    }

    fn store_words<const N: usize>(&self, at: ByteOffset, words: [u64; N]) {
        assert!(at.get().is_multiple_of(8), "a word at {at} is not aligned to 8 bytes");
        self.check(at, N as u64 * 8);
        let mut world = self.world();
        for (number, word) in words.into_iter().enumerate() {
            world.write(self.host, self.process, at.get() + number as u64 * 8, &word.to_le_bytes());
        }
    }

    fn read(&self, at: ByteOffset, into: &mut [u8]) {
        self.check(at, into.len() as u64);
        let mut world = self.world();
        for (offset, bytes) in words(at, into.len()) {
            let piece = &mut into[offset..offset + bytes];
            world.read(self.host, self.process, at.get() + offset as u64, piece);
        }
    }

    fn write(&self, at: ByteOffset, from: &[u8]) {
        self.check(at, from.len() as u64);
        let mut world = self.world();
        for (offset, bytes) in words(at, from.len()) {
            let piece = &from[offset..offset + bytes];
            world.write(self.host, self.process, at.get() + offset as u64, piece);
        }
    }

    fn zero(&self, at: ByteOffset, bytes: u64) {
        self.check(at, bytes);
        let mut done = 0;
        while done < bytes {
            let piece = (bytes - done).min(4096);
            self.write(at.saturating_add(done), &[0; 4096][..piece as usize]);
            done += piece;
        }
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
        // What lies in a write-combining buffer reaches the pool at any moment up to the fence, like what a
        // pending flush writes back.
        self.write(at, from);
        self.flush(at, from.len() as u64);
    }

    fn write_back(&self, at: ByteOffset, bytes: u64) {
        self.issue(at, bytes, Pending::WriteBack);
    }

    fn invalidate(&self, at: ByteOffset, bytes: u64) {
        self.issue(at, bytes, Pending::Invalidate);
    }

    fn flush(&self, at: ByteOffset, bytes: u64) {
        self.issue(at, bytes, Pending::Flush);
    }

    fn prefetch(&self, at: ByteOffset) {
        self.check(at, 1);
        self.world().prefetch(self.host, self.process, at.line().get());
    }

    fn store_fence(&self) {
        self.world().store_fence(self.host, self.process);
    }

    fn full_fence(&self) {
        self.world().full_fence(self.host, self.process);
    }
}
