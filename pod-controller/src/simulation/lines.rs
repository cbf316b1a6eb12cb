//! The lines of regions in memory that is not coherent: what a dead holder left in its host's cache must not come over what the next
//! one has there.
//!
//! One simulated line stands for a page of the pool, the unit in which regions are given out. Whoever is given a region first writes
//! to it what nobody else writes, makes that visible, and then keeps dirty lines of it, until they are scrubbed as daemons do that,
//! or leave its host's cache by themselves. So from then on the pool must show the same as long as the region is its.

use std::collections::BTreeMap;

use cxl_pool::simulated::{Faults, Random, SimulatedPool};
use cxl_pool::{Area, ByteOffset, EndpointId, HostId, LINE_BYTES, LineCount, LineOffset, Memory, regions};
use pod_protocol::ids::RegionId;

/// The lines of a page.
const PAGE_LINES: u64 = 64;
/// Of the pages of a region one in so many is written to, and the first one: caches hold few lines.
const ONE_IN: u64 = 8;
/// How often something else happens in the pool with each message, so that caches have occasion to let go of lines.
const STIRS: u64 = 30;
/// A host that has no region.
const BYSTANDER: HostId = HostId::new(4000);

#[derive(Clone, Copy, Debug)]
struct Use {
    region: RegionId,
    owner: EndpointId,
    pages: Area,
}

/// See the [module](self).
pub(crate) struct Lines {
    pool: SimulatedPool,
    /// By their first page. They do not overlap: one that is over goes when another one begins.
    uses: BTreeMap<u64, Use>,
    random: Random,
    size: u64,
    /// What is scrubbed stays as it is: broken on purpose.
    scrubs_nothing: bool,
    /// How many regions were given out, and how many of them where another host had one before.
    pub(crate) begun: u64,
    pub(crate) reused: u64,
}

impl Lines {
    /// Of a pool that ends there.
    pub(crate) fn new(seed: u64, end: LineOffset, scrubs_nothing: bool) -> Self {
        let size = end.get().div_ceil(PAGE_LINES);
        Self {
            pool: SimulatedPool::new(seed, size * LINE_BYTES as u64),
            uses: BTreeMap::new(),
            random: Random::new(seed),
            size,
            scrubs_nothing,
            begun: 0,
            reused: 0,
        }
    }

    /// An endpoint is given a region.
    pub(crate) fn touch(&mut self, endpoint: EndpointId, region: RegionId, area: Area) -> Result<(), String> {
        let pages = pages(area);
        let memory = self.pool.host(endpoint.host);
        let known = self.uses.get(&pages.start.get()).filter(|known| known.region == region).copied();
        if let Some(known) = known {
            if known.owner.host != endpoint.host {
                for at in written(pages) {
                    memory.invalidate(at, 8);
                    memory.full_fence();
                    memory.load(at);
                }
            }
            return self.is_whole(&known);
        }
        let end = pages.end().get();
        let overlapping = self.uses.range(..end).rev().take_while(|(_, old)| old.pages.end() > pages.start);
        let before: Vec<Use> = overlapping.map(|(_, old)| *old).collect();
        self.begun += 1;
        self.reused += u64::from(before.iter().any(|old| old.owner.host != endpoint.host));
        for old in before {
            self.uses.remove(&old.pages.start.get());
        }
        memory.invalidate(pages.start_byte(), pages.bytes());
        memory.full_fence();
        written(pages).for_each(|at| memory.store(at, region.get().into()));
        memory.flush(pages.start_byte(), pages.bytes());
        memory.full_fence();
        written(pages).for_each(|at| memory.store(at, region.get().into()));
        let new = Use { region, owner: endpoint, pages };
        self.uses.insert(pages.start.get(), new);
        self.is_whole(&new)
    }

    /// An endpoint scrubs an area.
    pub(crate) fn scrub(&self, endpoint: EndpointId, area: Area) {
        if !self.scrubs_nothing {
            regions::scrub(&self.pool.host(endpoint.host), pages(area));
        }
    }

    /// A host lost its power, and its caches with it.
    pub(crate) fn lose(&self, host: HostId) {
        self.pool.power_off(host);
    }

    /// Time passes.
    pub(crate) fn stir(&mut self) -> Result<(), String> {
        let bystander = self.pool.host(BYSTANDER);
        for _ in 0..STIRS {
            bystander.load(LineOffset::new(self.random.below(self.size)).bytes());
        }
        if self.random.one_in(20) { self.are_whole() } else { Ok(()) }
    }

    /// Whether the pool shows of every region what its holder wrote.
    pub(crate) fn are_whole(&self) -> Result<(), String> {
        self.uses.values().try_for_each(|it| self.is_whole(it))
    }

    fn is_whole(&self, it: &Use) -> Result<(), String> {
        for at in written(it.pages) {
            let mut there = [0; 8];
            self.pool.shared(at, &mut there);
            let there = u64::from_le_bytes(there);
            if there != u64::from(it.region.get()) {
                return Err(format!(
                    "at {at} a line of region {there} came over what {} has in {}",
                    it.owner, it.region
                ));
            }
        }
        match self.pool.faults() {
            Faults { dirty_invalidates: 0, lost_updates: 0 } => Ok(()),
            faults => Err(format!("a line came over another host's: {faults:?}")),
        }
    }
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines").field("uses", &self.uses.len()).finish_non_exhaustive()
    }
}

/// The lines that stand for the pages of an area.
fn pages(area: Area) -> Area {
    let start = area.start.get() / PAGE_LINES;
    let end = area.end().get().div_ceil(PAGE_LINES);
    Area::new(LineOffset::new(start), LineCount::new(end - start))
}

fn written(pages: Area) -> impl Iterator<Item = ByteOffset> {
    let (start, end) = (pages.start.get(), pages.end().get());
    let some = (start..end).filter(move |page| *page == start || page.is_multiple_of(ONE_IN));
    some.map(|page| LineOffset::new(page).bytes())
}
