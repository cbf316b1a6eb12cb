//! Two hosts' caches, a pool, and two clocks that only memory accesses and the traffic move.

use std::collections::VecDeque;

use super::link::Link;

pub(crate) const SENDING: usize = 0;
pub(crate) const RECEIVING: usize = 1;

pub(crate) type Words = [u64; 8];

/// What a host's cache knows of a line.
#[derive(Clone, Copy, Default)]
struct Cached {
    present: bool,
    words: Words,
    /// When a fetch that is under way brings it.
    arrives: f64,
    /// When an invalidate has done its work; it can be fetched again from then on.
    leaves: f64,
    /// When the last store reached the cache.
    stored: f64,
    /// When the last write-back ends; an invalidate comes after it.
    settled: f64,
}

/// A host: one core, its cache, its link.
struct Host {
    now: f64,
    cache: Vec<Cached>,
    /// When each fill buffer is free again.
    fills: Vec<f64>,
    /// When each store that waits reaches the cache, oldest first.
    stores: VecDeque<f64>,
    last_store: f64,
    /// When the last invalidate has done its work.
    last_leaves: f64,
    /// When everything that a full fence waits for is done.
    pending: f64,
    /// Until when the link is busy: towards the host, and towards the pool.
    inbound: f64,
    outbound: f64,
    /// What it will yet write is seen later than this.
    certain_until: f64,
}

impl Host {
    fn new(lines: usize, link: &Link) -> Self {
        Self {
            now: 0.0,
            cache: vec![Cached::default(); lines],
            fills: vec![0.0; buffers(link.fill_buffers)],
            stores: VecDeque::new(),
            last_store: 0.0,
            last_leaves: 0.0,
            pending: 0.0,
            inbound: 0.0,
            outbound: 0.0,
            certain_until: 0.0,
        }
    }

    /// The fill buffer that is free first.
    fn fill(&mut self) -> &mut f64 {
        let first =
            self.fills.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(first, _)| first);
        &mut self.fills[first]
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive number")]
fn buffers(count: f64) -> usize {
    count.round() as usize
}

/// Bytes that went over a host's link.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moved {
    pub(crate) lines_in: u64,
    pub(crate) lines_out: u64,
}

/// All there is.
pub(crate) struct World {
    link: Link,
    hosts: [Host; 2],
    /// Of each line what the pool holds, and from when on, oldest first.
    pool: Vec<VecDeque<(f64, Words)>>,
    /// The host that goes on.
    pub(crate) turn: usize,
    pub(crate) moved: [Moved; 2],
}

impl World {
    pub(crate) fn new(link: Link, lines: usize) -> Self {
        Self {
            hosts: [Host::new(lines, &link), Host::new(lines, &link)],
            link,
            pool: vec![VecDeque::from([(f64::NEG_INFINITY, [0; 8])]); lines],
            turn: SENDING,
            moved: [Moved::default(); 2],
        }
    }

    pub(crate) fn lines(&self) -> usize {
        self.pool.len()
    }

    pub(crate) fn now(&self, host: usize) -> f64 {
        self.hosts[host].now
    }

    pub(crate) fn wait_until(&mut self, host: usize, time: f64) {
        let now = &mut self.hosts[host].now;
        *now = now.max(time);
    }

    pub(crate) fn pass(&mut self, host: usize, time: f64) {
        self.hosts[host].now += time;
    }

    /// When a load of this line would look at the pool; nothing if it would not.
    pub(crate) fn looks_at(&mut self, host: usize, line: usize) -> Option<f64> {
        let half = self.link.load_ns() / 2.0;
        let host = &mut self.hosts[host];
        let (now, cached) = (host.now, host.cache[line]);
        (!cached.present).then(|| now.max(cached.leaves).max(*host.fill()) + half)
    }

    pub(crate) fn load(&mut self, host: usize, line: usize) -> &Words {
        self.fetch(host, line);
        let host = &mut self.hosts[host];
        let cached = &host.cache[line];
        host.now = host.now.max(cached.arrives);
        &cached.words
    }

    /// A prefetcher ignores what the cache holds, however old.
    pub(crate) fn prefetch(&mut self, host: usize, line: usize) {
        self.hosts[host].now += self.link.prefetch_ns;
        self.fetch(host, line);
    }

    /// Whether the other host may yet change what this one would fetch.
    pub(crate) fn must_wait(&mut self, host: usize, line: usize) -> bool {
        let Some(looks) = self.looks_at(host, line) else { return false };
        let half = self.link.load_ns() / 2.0;
        let this = &mut self.hosts[host];
        // While it waits for the line it writes nothing, and what it writes then is seen later still.
        this.certain_until = looks + half + self.link.write_ns;
        looks > self.hosts[1 - host].certain_until.max(self.hosts[1 - host].now + self.link.write_ns)
    }

    /// The host writes nothing any more.
    pub(crate) fn finish(&mut self, host: usize) {
        self.hosts[host].certain_until = f64::INFINITY;
    }

    /// Begins to bring a line in, if the cache does not have it.
    fn fetch(&mut self, host: usize, line: usize) {
        let Some(looks) = self.looks_at(host, line) else { return };
        let half = self.link.load_ns() / 2.0;
        let held = &mut self.pool[line];
        // Loads of a host look in the order of their fetches, so what is older than this will not be wanted again.
        while held.get(1).is_some_and(|(from, _)| *from <= looks) {
            held.pop_front();
        }
        let words = held[0].1;
        self.moved[host].lines_in += 1;
        let transfer = self.link.transfer_ns();
        let host = &mut self.hosts[host];
        let arrives = (looks + half).max(host.inbound + transfer);
        host.inbound = arrives;
        *host.fill() = arrives;
        host.cache[line] = Cached { present: true, words, arrives, ..host.cache[line] };
    }

    /// A store goes into the store buffer, and from there in order to the cache, once that has the line.
    /// It does not wait for a write-back that is under way. On an EPYC it does; but then the paper's sender, which writes a
    /// line back after each message and never waits, would pile up stores for 7 µs where the paper measured 0.6 µs.
    pub(crate) fn store(&mut self, host: usize, line: usize, from: usize, words: &[u64]) {
        self.fetch(host, line);
        let waiting = buffers(self.link.store_buffer);
        let host = &mut self.hosts[host];
        let cached = &mut host.cache[line];
        for (word, value) in cached.words[from..].iter_mut().zip(words) {
            *word = *value;
            host.last_store = host.last_store.max(host.now).max(cached.arrives);
            cached.stored = host.last_store;
            host.stores.push_back(host.last_store);
            if host.stores.len() > waiting
                && let Some(oldest) = host.stores.pop_front()
            {
                host.now = host.now.max(oldest);
            }
        }
        host.pending = host.pending.max(host.last_store);
    }

    /// CLWB: the cache keeps the line.
    pub(crate) fn write_back(&mut self, host: usize, line: usize) {
        let (transfer, lasts) = (self.link.transfer_ns(), self.link.load_ns() * self.link.write_back_ratio);
        self.moved[host].lines_out += 1;
        let host = &mut self.hosts[host];
        host.now += self.link.issue_ns;
        let begins = host.now.max(host.cache[line].stored).max(*host.fill());
        host.outbound = begins.max(host.outbound) + transfer;
        let seen = host.outbound + self.link.write_ns;
        let ends = seen.max(begins + lasts);
        *host.fill() = ends;
        let cached = &mut host.cache[line];
        cached.settled = ends;
        host.pending = host.pending.max(ends);
        self.pool[line].push_back((seen, cached.words));
    }

    /// CLFLUSHOPT of a line that was not written to.
    pub(crate) fn invalidate(&mut self, host: usize, line: usize) {
        let host = &mut self.hosts[host];
        host.now += self.link.issue_ns;
        let cached = &mut host.cache[line];
        // What is just being fetched has to come first.
        let leaves = host.now.max(cached.arrives).max(cached.settled) + self.link.invalidate_ns;
        cached.leaves = leaves.max(host.last_leaves + self.link.streamed_ns);
        cached.present = false;
        host.last_leaves = cached.leaves;
        host.pending = host.pending.max(cached.leaves);
    }

    pub(crate) fn full_fence(&mut self, host: usize) {
        let host = &mut self.hosts[host];
        host.now = (host.now + self.link.fence_ns).max(host.pending);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: Link = Link { invalidate_ns: 80.0, write_ns: 250.0, ..Link::SOURCED };

    #[test]
    fn a_line_is_seen_once_its_write_back_arrived_and_the_cached_copy_is_gone() {
        let mut world = World::new(LINK, 1);
        assert_eq!(world.load(RECEIVING, 0)[0], 0);
        assert!((world.now(RECEIVING) - LINK.load_ns()).abs() < 1e-9, "a miss costs one load");
        world.store(SENDING, 0, 0, &[7]);
        world.write_back(SENDING, 0);
        world.wait_until(RECEIVING, 10_000.0);
        world.prefetch(RECEIVING, 0);
        assert_eq!(world.load(RECEIVING, 0)[0], 0, "a prefetch does not replace what is cached");
        world.invalidate(RECEIVING, 0);
        world.full_fence(RECEIVING);
        assert_eq!(world.load(RECEIVING, 0)[0], 7);
    }

    #[test]
    fn a_load_that_looks_too_early_sees_the_old_line() {
        let mut world = World::new(LINK, 1);
        world.store(SENDING, 0, 0, &[7]);
        world.write_back(SENDING, 0);
        assert_eq!(world.load(RECEIVING, 0)[0], 0);
    }

    #[test]
    fn a_prefetch_of_a_cached_line_only_costs_the_instruction() {
        let mut world = World::new(LINK, 1);
        world.load(RECEIVING, 0);
        let (before, moved) = (world.now(RECEIVING), world.moved[RECEIVING].lines_in);
        world.prefetch(RECEIVING, 0);
        assert!((world.now(RECEIVING) - before - LINK.prefetch_ns).abs() < 1e-9);
        assert_eq!(world.moved[RECEIVING].lines_in, moved, "nothing is fetched");
    }

    #[test]
    fn fetches_beyond_the_fill_buffers_wait() {
        let mut world = World::new(Link { fill_buffers: 2.0, prefetch_ns: 0.0, ..LINK }, 3);
        for line in 0..3 {
            world.prefetch(RECEIVING, line);
        }
        world.load(RECEIVING, 1);
        assert!(world.now(RECEIVING) < 1.1 * LINK.load_ns(), "two come together");
        world.load(RECEIVING, 2);
        assert!(world.now(RECEIVING) >= 2.0 * LINK.load_ns(), "the third one comes after them");
    }

    #[test]
    fn a_fence_waits_for_write_backs_and_invalidates() {
        let mut world = World::new(LINK, 1);
        world.store(SENDING, 0, 0, &[7]);
        world.write_back(SENDING, 0);
        world.full_fence(SENDING);
        assert!(world.now(SENDING) >= LINK.load_ns() + LINK.write_ns, "the line is fetched, then written");
        world.load(RECEIVING, 0);
        let before = world.now(RECEIVING);
        world.invalidate(RECEIVING, 0);
        world.full_fence(RECEIVING);
        assert!(world.now(RECEIVING) >= before + LINK.invalidate_ns);
    }
}
