//! The shared bytes, the hosts' caches, and what happens between them by itself.

use std::collections::BTreeMap;

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
    versions: BTreeMap<u64, u64>,
    hosts: BTreeMap<HostId, Cache>,
    /// Something happens by itself once in so many accesses.
    event_one_in: u64,
    pub(super) faults: Faults,
}

impl World {
    pub(super) fn new(seed: u64, lines: u64) -> Self {
        let mut random = Random::new(seed);
        // From a world where something happens all the time to one where hardly anything is visible unless it is
        // forced: different mistakes show in different ones.
        let event_one_in = [2, 4, 16, 64, 512][random.below(5) as usize];
        let shared = vec![0; lines as usize * LINE_BYTES];
        Self {
            random,
            shared,
            versions: BTreeMap::new(),
            hosts: BTreeMap::new(),
            event_one_in,
            faults: Faults::default(),
        }
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.shared.len() as u64
    }

    fn lines(&self) -> u64 {
        (self.shared.len() / LINE_BYTES) as u64
    }

    pub(super) fn process(&mut self, host: HostId) -> u64 {
        self.hosts.entry(host).or_default().process
    }

    /// Ends the host's process. Its cache lives on.
    pub(super) fn crash(&mut self, host: HostId) {
        self.hosts.entry(host).or_default().process += 1;
    }

    /// Ends the host: what was in its cache is lost.
    pub(super) fn power_off(&mut self, host: HostId) {
        let cache = self.hosts.entry(host).or_default();
        *cache = Cache { process: cache.process + 1, ..Cache::default() };
    }

    pub(super) fn shared(&self, at: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.shared[at as usize..][..into.len()]);
    }

    fn cache(&mut self, host: HostId, process: u64) -> &mut Cache {
        let cache = self.hosts.entry(host).or_default();
        assert!(cache.process == process, "a crashed process of {host} accessed the pool");
        cache
    }

    /// Reads up to the end of the line.
    pub(super) fn read(&mut self, host: HostId, process: u64, at: u64, into: &mut [u8]) {
        self.cache(host, process);
        self.happen();
        let line = at / LINE_BYTES as u64;
        let offset = at as usize % LINE_BYTES;
        let data = &self.fetch(host, line).data;
        into.copy_from_slice(&data[offset..offset + into.len()]);
    }

    /// Writes up to the end of the line.
    pub(super) fn write(&mut self, host: HostId, process: u64, at: u64, from: &[u8]) {
        self.cache(host, process);
        // What was fenced comes before this store.
        self.take_effect(host, true);
        self.happen();
        let line = at / LINE_BYTES as u64;
        let offset = at as usize % LINE_BYTES;
        let version = self.version(line);
        let cached = self.fetch(host, line);
        cached.data[offset..offset + from.len()].copy_from_slice(from);
        cached.dirty |= (u64::MAX >> (LINE_BYTES - from.len())) << offset;
        cached.stored_at_version = version;
    }

    pub(super) fn issue(&mut self, host: HostId, process: u64, line: u64, kind: Pending) {
        self.cache(host, process).issue(line, kind);
        self.happen();
    }

    pub(super) fn prefetch(&mut self, host: HostId, process: u64, line: u64) {
        self.cache(host, process);
        // A hint: the CPU may ignore it.
        if !self.random.one_in(4) {
            self.fetch(host, line);
        }
    }

    pub(super) fn store_fence(&mut self, host: HostId, process: u64) {
        // It does not wait: only later stores do.
        self.cache(host, process).fence_stores();
        self.happen();
    }

    pub(super) fn full_fence(&mut self, host: HostId, process: u64) {
        self.cache(host, process);
        self.happen();
        self.take_effect(host, false);
    }

    fn version(&self, line: u64) -> u64 {
        self.versions.get(&line).copied().unwrap_or(0)
    }

    fn fetch(&mut self, host: HostId, line: u64) -> &mut CachedLine {
        let cache = self.hosts.entry(host).or_default();
        cache.recent = line;
        if cache.lines.len() >= CACHE_LINES_LIMIT && !cache.lines.contains_key(&line) {
            self.evict(host);
        }
        let Self { shared, hosts, .. } = self;
        hosts.entry(host).or_default().lines.entry(line).or_insert_with(|| {
            let start = line as usize * LINE_BYTES;
            let mut data = [0; LINE_BYTES];
            data.copy_from_slice(&shared[start..start + LINE_BYTES]);
            CachedLine { data, dirty: 0, stored_at_version: 0 }
        })
    }

    /// Every pending instruction takes effect; or only those before the last store fence.
    fn take_effect(&mut self, host: HostId, only_fenced: bool) {
        let Self { hosts, random, .. } = self;
        let mut all = Vec::new();
        let cache = hosts.entry(host).or_default();
        while let Some(instruction) = cache.take_pending(random, only_fenced) {
            all.push(instruction);
        }
        for instruction in all {
            self.perform(host, instruction);
        }
    }

    fn perform(&mut self, host: HostId, Instruction { line, kind }: Instruction) {
        if kind == Pending::Invalidate && self.is_dirty(host, line) {
            self.faults.dirty_invalidates += 1;
        }
        self.write_line_back(host, line);
        if kind != Pending::WriteBack
            && let Some(cache) = self.hosts.get_mut(&host)
        {
            cache.lines.remove(&line);
        }
    }

    fn is_dirty(&self, host: HostId, line: u64) -> bool {
        self.hosts.get(&host).and_then(|cache| cache.lines.get(&line)).is_some_and(|cached| cached.dirty != 0)
    }

    fn write_line_back(&mut self, host: HostId, line: u64) {
        let version = self.version(line);
        let Some(cached) = self.hosts.get_mut(&host).and_then(|cache| cache.lines.get_mut(&line)) else {
            return;
        };
        if cached.dirty == 0 {
            return;
        }
        let start = line as usize * LINE_BYTES;
        let shared = &mut self.shared[start..start + LINE_BYTES];
        // The whole line goes, also those bytes that this host never wrote.
        let destroyed =
            (0..LINE_BYTES).any(|byte| cached.dirty & (1 << byte) == 0 && shared[byte] != cached.data[byte]);
        if destroyed || cached.stored_at_version != version {
            self.faults.lost_updates += 1;
        }
        shared.copy_from_slice(&cached.data);
        cached.dirty = 0;
        self.versions.insert(line, version + 1);
    }

    fn evict(&mut self, host: HostId) {
        let lines = self.lines();
        let Self { hosts, random, .. } = self;
        if let Some(line) = hosts.entry(host).or_default().any_line(random, lines) {
            self.write_line_back(host, line);
            if let Some(cache) = self.hosts.get_mut(&host) {
                cache.lines.remove(&line);
            }
        }
    }

    /// What may happen at any moment does, or not.
    fn happen(&mut self) {
        while self.random.one_in(self.event_one_in) {
            let nth = self.random.below(self.hosts.len() as u64) as usize;
            let Some(host) = self.hosts.keys().nth(nth).copied() else { return };
            match self.random.below(4) {
                0 => self.evict(host),
                1 => self.prefetch_something(host),
                _ => {
                    let Self { hosts, random, .. } = self;
                    let taken = hosts.get_mut(&host).and_then(|cache| cache.take_pending(random, false));
                    if let Some(instruction) = taken {
                        self.perform(host, instruction);
                    }
                }
            }
        }
    }

    fn prefetch_something(&mut self, host: HostId) {
        let recent = self.hosts.get(&host).map_or(0, |cache| cache.recent);
        // Mostly what a streaming prefetcher would fetch, at times anything.
        let line = if self.random.one_in(4) {
            self.random.below(self.lines())
        } else {
            (recent + self.random.below(24)).saturating_sub(4) % self.lines()
        };
        let resident = self.hosts.get(&host).is_some_and(|cache| cache.lines.contains_key(&line));
        if !resident {
            self.fetch(host, line);
            if let Some(cache) = self.hosts.get_mut(&host) {
                cache.recent = recent;
            }
        }
    }
}
