//! The shared bytes, the hosts' caches, and what happens between them by itself.

use super::Faults;
use super::cache::{Cache, CachedLine, Instruction, Pending};
use super::random::Random;
use crate::{HostId, LINE_BYTES};

/// More lines than this a cache does not hold. Small against a pool, so that capacity evictions happen.
const CACHE_LINES_LIMIT: usize = 4096;

pub(super) struct World {
    random: Random,
    shared: Vec<u8>,
    /// How often each shared line changed.
    versions: Vec<u32>,
    caches: Vec<Cache>,
    /// Something happens by itself once in so many accesses.
    event_one_in: u64,
    /// Lines enter and leave caches by themselves. Where they do not, what is stale stays so until it is invalidated.
    caches_stir: bool,
    pub(super) faults: Faults,
}

/// Which of the caches belongs to a host.
pub(super) type CacheIndex = usize;

impl World {
    pub(super) fn new(seed: u64, lines: u64) -> Self {
        let mut random = Random::new(seed);
        // From a world where something happens all the time to one where hardly anything is visible unless it is
        // forced: different mistakes show in different ones.
        let (event_one_in, caches_stir) =
            [(2, true), (4, true), (16, true), (64, true), (512, true), (16, false)]
                [random.below(6) as usize];
        Self {
            random,
            shared: vec![0; lines as usize * LINE_BYTES],
            versions: vec![0; lines as usize],
            caches: Vec::new(),
            event_one_in,
            caches_stir,
            faults: Faults::default(),
        }
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.shared.len() as u64
    }

    fn lines(&self) -> u64 {
        self.versions.len() as u64
    }

    /// The host's cache, and the process that uses it now.
    pub(super) fn process(&mut self, host: HostId) -> (CacheIndex, u64) {
        let index = self.index(host);
        (index, self.caches[index].process)
    }

    fn index(&mut self, host: HostId) -> CacheIndex {
        self.caches.iter().position(|cache| cache.host == host).unwrap_or_else(|| {
            self.caches.push(Cache::new(host, 0, self.versions.len()));
            self.caches.len() - 1
        })
    }

    /// Ends the host's process. Its cache lives on.
    pub(super) fn crash(&mut self, host: HostId) {
        let index = self.index(host);
        self.caches[index].process += 1;
    }

    /// Ends the host: what was in its cache is lost.
    pub(super) fn power_off(&mut self, host: HostId) {
        let index = self.index(host);
        let process = self.caches[index].process + 1;
        self.caches[index] = Cache::new(host, process, self.versions.len());
    }

    pub(super) fn shared(&self, at: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.shared[at as usize..][..into.len()]);
    }

    /// A device reads up to the end of the line.
    pub(super) fn device_read(&mut self, host: CacheIndex, at: u64, into: &mut [u8]) {
        self.take_effect(host, true);
        self.happen();
        self.shared(at, into);
    }

    /// A device writes up to the end of the line.
    pub(super) fn device_write(&mut self, host: CacheIndex, at: u64, from: &[u8]) {
        self.take_effect(host, true);
        self.happen();
        self.shared[at as usize..][..from.len()].copy_from_slice(from);
        // Whoever has the line in its cache, and changed, has no right to.
        self.versions[at as usize / LINE_BYTES] += 1;
    }

    fn expect_alive(&self, host: CacheIndex, process: u64) {
        let cache = &self.caches[host];
        assert!(cache.process == process, "a crashed process of {} accessed the pool", cache.host);
    }

    /// Reads up to the end of the line.
    pub(super) fn read(&mut self, host: CacheIndex, process: u64, at: u64, into: &mut [u8]) {
        self.expect_alive(host, process);
        self.happen();
        let line = at / LINE_BYTES as u64;
        let offset = at as usize % LINE_BYTES;
        let data = &self.fetch(host, line).data;
        into.copy_from_slice(&data[offset..offset + into.len()]);
    }

    /// Writes up to the end of the line.
    pub(super) fn write(&mut self, host: CacheIndex, process: u64, at: u64, from: &[u8]) {
        self.expect_alive(host, process);
        // What was fenced comes before this store.
        self.take_effect(host, true);
        self.happen();
        let line = at / LINE_BYTES as u64;
        let offset = at as usize % LINE_BYTES;
        let version = self.versions[line as usize];
        let cached = self.fetch(host, line);
        cached.data[offset..offset + from.len()].copy_from_slice(from);
        cached.dirty |= (u64::MAX >> (LINE_BYTES - from.len())) << offset;
        cached.stored_at_version = version;
    }

    pub(super) fn issue(&mut self, host: CacheIndex, process: u64, line: u64, kind: Pending) {
        self.expect_alive(host, process);
        self.caches[host].issue(line, kind);
        self.happen();
    }

    pub(super) fn prefetch(&mut self, host: CacheIndex, process: u64, line: u64) {
        self.expect_alive(host, process);
        // A hint: the CPU may ignore it.
        if !self.random.one_in(4) {
            self.fetch(host, line);
        }
    }

    pub(super) fn store_fence(&mut self, host: CacheIndex, process: u64) {
        // It does not wait: only later stores do.
        self.expect_alive(host, process);
        self.caches[host].fence_stores();
        self.happen();
    }

    pub(super) fn full_fence(&mut self, host: CacheIndex, process: u64) {
        self.expect_alive(host, process);
        self.happen();
        self.take_effect(host, false);
    }

    fn fetch(&mut self, host: CacheIndex, line: u64) -> &mut CachedLine {
        let cache = &mut self.caches[host];
        cache.recent = line;
        if cache.len() >= CACHE_LINES_LIMIT && !cache.holds(line) {
            self.evict(host);
        }
        let Self { shared, caches, .. } = self;
        caches[host].get_or_fetch(line, || {
            let start = line as usize * LINE_BYTES;
            let mut data = [0; LINE_BYTES];
            data.copy_from_slice(&shared[start..start + LINE_BYTES]);
            data
        })
    }

    /// Every pending instruction takes effect; or only those before the last store fence.
    fn take_effect(&mut self, host: CacheIndex, only_fenced: bool) {
        while let Some(instruction) = self.caches[host].take_pending(&mut self.random, only_fenced) {
            self.perform(host, instruction);
        }
    }

    fn perform(&mut self, host: CacheIndex, Instruction { line, kind }: Instruction) {
        let was_dirty = self.write_line_back(host, line);
        if kind == Pending::Invalidate && was_dirty {
            self.faults.dirty_invalidates += 1;
        }
        if kind != Pending::WriteBack {
            self.caches[host].remove(line);
        }
    }

    /// Says whether there was anything to write back.
    fn write_line_back(&mut self, host: CacheIndex, line: u64) -> bool {
        let Some(cached) = self.caches[host].get(line).filter(|cached| cached.dirty != 0) else {
            return false;
        };
        let version = &mut self.versions[line as usize];
        let start = line as usize * LINE_BYTES;
        let shared = &mut self.shared[start..start + LINE_BYTES];
        // The whole line goes, also those bytes that this host never wrote. A change that it saw is none that gets lost.
        let destroyed = shared != cached.data
            && (0..LINE_BYTES)
                .any(|byte| cached.dirty & (1 << byte) == 0 && shared[byte] != cached.data[byte]);
        if destroyed || cached.stored_at_version != *version {
            self.faults.lost_updates += 1;
        }
        shared.copy_from_slice(&cached.data);
        cached.dirty = 0;
        *version += 1;
        true
    }

    fn evict(&mut self, host: CacheIndex) {
        if let Some(line) = self.caches[host].any_line(&mut self.random) {
            self.write_line_back(host, line);
            self.caches[host].remove(line);
        }
    }

    /// What may happen at any moment does, or not.
    fn happen(&mut self) {
        // A power of two, since a division for each access would take a third of all time.
        while self.random.bits() & (self.event_one_in - 1) == 0 {
            let host = self.random.below(self.caches.len() as u64) as usize;
            match self.random.below(4) {
                0 | 1 if !self.caches_stir => {}
                0 => self.evict(host),
                1 => self.prefetch_something(host),
                _ => {
                    if let Some(instruction) = self.caches[host].take_pending(&mut self.random, false) {
                        self.perform(host, instruction);
                    }
                }
            }
        }
    }

    fn prefetch_something(&mut self, host: CacheIndex) {
        let recent = self.caches[host].recent;
        // Mostly what a streaming prefetcher would fetch, at times anything.
        let line = if self.random.one_in(4) {
            self.random.below(self.lines())
        } else {
            (recent + self.random.below(24)).saturating_sub(4) % self.lines()
        };
        if !self.caches[host].holds(line) {
            self.fetch(host, line);
            self.caches[host].recent = recent;
        }
    }
}
