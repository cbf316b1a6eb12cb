mod changes;
mod pending;

use std::collections::BTreeMap;
#[cfg(any(test, feature = "model"))]
use std::ops::Bound;

use cxl_pool::{Area, EndpointId, HostId, LineCount, LineOffset};
use pod_protocol::ids::{ChannelId, InstanceId, LeaseId, RegionId};
use serde::{Deserialize, Serialize, Serializer};

use self::changes::{Changes, Step};
use self::pending::Pending;
use super::{DeviceId, REGIONS_MAX, Sorted};

/// Areas for payload begin at multiples of this, so that they can be mapped by huge pages.
const LARGE_ALIGN_LINES: u64 = (2 << 20) / 64;
/// Smaller regions begin at multiples of this.
const SMALL_ALIGN_LINES: u64 = 4096 / 64;

/// A leased range of the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// Its number. Never used again, so that a late confirmation cannot mean another region.
    pub id: RegionId,
    /// Where it lies.
    pub area: Area,
    /// What it is for.
    pub purpose: Purpose,
    /// The endpoint that writes it first.
    pub writer: EndpointId,
    /// In use: everybody who was ever given it. Quarantined: those who have not confirmed that they let go.
    pub holders: Sorted<EndpointId>,
    /// Whether it may be used.
    pub usage: RegionUse,
}

/// What a region is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// One ring of a channel.
    Ring(ChannelId),
    /// What an instance's packets are sent from.
    Transmit(LeaseId),
    /// What a NIC receives into.
    Receive(DeviceId),
    /// What an instance's block requests read and write.
    Data(LeaseId),
    /// The RAM of an instance's guest.
    Ram(InstanceId),
    /// Where a frontend tells others what it uses of the fabric.
    Board(EndpointId),
    /// Nothing: it was free when it failed.
    Nothing,
}

/// Whether a region may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RegionUse {
    /// Yes.
    InUse,
    /// No: a cache or a device may still write to it.
    Quarantined,
    /// No, for good: some of its lines cannot be read. Nobody holds it, and nobody is asked to flush it.
    Failed,
}

/// Who uses which part of the pool's data area.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Kept")]
pub struct Regions {
    data: Area,
    last: u32,
    by_id: BTreeMap<RegionId, Region>,
    /// Starts of all regions, to find gaps.
    #[serde(serialize_with = "starts")]
    by_start: BTreeMap<LineOffset, Placed>,
    /// How many there may be.
    max: usize,
    #[serde(skip)]
    pending: Pending,
    #[serde(skip)]
    hints: Hints,
    #[serde(skip)]
    changes: Changes,
}

/// Which region begins at a line, and where it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Placed {
    id: RegionId,
    end: u64,
}

/// What is kept of it.
#[derive(Deserialize)]
struct Kept {
    data: Area,
    last: u32,
    by_id: BTreeMap<RegionId, Region>,
    #[serde(default = "most")]
    max: usize,
}

impl From<Kept> for Regions {
    fn from(Kept { data, last, by_id, max }: Kept) -> Self {
        let by_start = by_id.values().map(|region| (region.area.start, region.placed())).collect();
        let pending = Pending::of(by_id.values());
        let (hints, changes) = (Hints::default(), Changes::default());
        Self { data, last, by_id, by_start, max, pending, hints, changes }
    }
}

/// For programs that do not make it from the regions, as this one does.
fn starts<S: Serializer>(by_start: &BTreeMap<LineOffset, Placed>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(by_start.iter().map(|(start, placed)| (start, placed.id)))
}

impl Region {
    fn placed(&self) -> Placed {
        Placed { id: self.id, end: self.area.start.get() + self.area.lines.get() }
    }
}

const fn most() -> usize {
    REGIONS_MAX
}

/// Of regions of each length and alignment: the line before which there is no room for one. They only save time, so two states
/// are alike whatever their hints.
#[derive(Clone, Debug, Default)]
struct Hints(BTreeMap<(u64, u64), u64>);

impl PartialEq for Hints {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl Eq for Hints {}

impl Regions {
    pub(super) fn new(data: Area, max: usize) -> Self {
        let (by_id, by_start, pending) = (BTreeMap::new(), BTreeMap::new(), Pending::default());
        let changes = Changes::all();
        Self { data, last: 0, by_id, by_start, max, pending, hints: Hints::default(), changes }
    }

    /// How many there may be from now on.
    pub(super) fn limit(&mut self, max: usize) {
        self.changes.changed |= self.max != max;
        self.max = max;
    }

    /// None in another pool; numbers go on.
    pub(super) fn after(old: &Self, data: Area) -> Self {
        Self { last: old.last, ..Self::new(data, old.max) }
    }

    /// A region by its number.
    pub fn get(&self, id: RegionId) -> Option<&Region> {
        self.by_id.get(&id)
    }

    /// All regions, by number.
    pub fn iter(&self) -> impl Iterator<Item = &Region> {
        self.by_id.values()
    }

    /// All regions, by place.
    pub fn by_place(&self) -> impl Iterator<Item = &Region> {
        self.by_start.values().filter_map(|placed| self.by_id.get(&placed.id))
    }

    /// The region that begins there.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn at(&self, start: LineOffset) -> Option<&Region> {
        self.by_start.get(&start).and_then(|placed| self.by_id.get(&placed.id))
    }

    /// The regions before and after this line, but for one that begins there.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn beside(&self, start: LineOffset) -> (Option<&Region>, Option<&Region>) {
        let before = self.by_start.range(..start).next_back();
        let after = self.by_start.range((Bound::Excluded(start), Bound::Unbounded)).next();
        let region = |(_, placed): (_, &Placed)| self.by_id.get(&placed.id);
        (before.and_then(region), after.and_then(region))
    }

    /// Where regions may lie.
    pub fn data(&self) -> Area {
        self.data
    }

    /// The ranges that no region covers.
    pub fn gaps(&self) -> Vec<Area> {
        let mut gaps = Vec::new();
        let mut start = self.data.start.get();
        let end = start + self.data.lines.get();
        let mut push = |from: u64, to: u64| {
            if from < to {
                gaps.push(Area { start: LineOffset::new(from), lines: LineCount::new(to - from) });
            }
        };
        for region in self.by_place() {
            push(start, region.area.start.get());
            start = region.area.start.get() + region.area.lines.get();
        }
        push(start, end);
        gaps
    }

    /// Whether there are so many that what needs more than one finds no room, however large the gaps.
    pub(super) fn is_full(&self) -> bool {
        self.by_start.len() + 1 >= self.max
    }

    /// Takes the first place that is free and long enough.
    pub(super) fn allocate(
        &mut self,
        lines: LineCount,
        purpose: Purpose,
        writer: EndpointId,
    ) -> Option<&mut Region> {
        if self.by_start.len() >= self.max {
            return None;
        }
        let align = if lines.get() >= LARGE_ALIGN_LINES { LARGE_ALIGN_LINES } else { SMALL_ALIGN_LINES };
        let lines = LineCount::new(lines.get().max(1).checked_next_multiple_of(SMALL_ALIGN_LINES)?);
        let place = self.first_place(lines.get(), align);
        let hint = place.map_or(u64::MAX, |start| start.saturating_add(lines.get()));
        self.hints.0.insert((lines.get(), align), hint);
        let start = LineOffset::new(place?);
        self.last = self.last.checked_add(1)?;
        let id = RegionId::new(self.last);
        let area = Area { start, lines };
        let holders = Sorted::from_iter([writer]);
        let region = Region { id, area, purpose, writer, holders, usage: RegionUse::InUse };
        self.by_start.insert(start, region.placed());
        self.changes.note(Step::Came(id));
        Some(self.by_id.entry(id).or_insert(region))
    }

    /// The first place for a region of this length.
    fn first_place(&self, lines: u64, align: u64) -> Option<u64> {
        let data_start = self.data.start.get();
        // No region lies across it: where it was put a region ended, and when that one goes it is put where the one before ends.
        let mut start = self.hints.0.get(&(lines, align)).copied().unwrap_or(0).max(data_start);
        let begin = LineOffset::new(start);
        let fits = |start: u64, end: u64| {
            let start = start.checked_next_multiple_of(align)?;
            (start.checked_add(lines)? <= end).then_some(start)
        };
        for (next, placed) in self.by_start.range(begin..) {
            if let Some(place) = fits(start, next.get()) {
                return Some(place);
            }
            start = placed.end;
        }
        fits(start, data_start + self.data.lines.get())
    }

    /// Where the last region ends that begins at this line or before.
    fn end_of_last_before(&self, line: u64) -> Option<u64> {
        self.by_start.range(..=LineOffset::new(line)).next_back().map(|(_, placed)| placed.end)
    }

    /// Notes that endpoints are given a region.
    pub(super) fn hold(&mut self, id: RegionId, holders: impl Iterator<Item = EndpointId>) {
        let known = self.by_id.get_mut(&id).filter(|region| region.usage == RegionUse::InUse);
        let Some(region) = known else { return };
        for holder in holders.filter(|holder| region.holders.insert(*holder)) {
            self.changes.note(Step::Held(id, holder));
        }
    }

    /// Gives a region up. It is free once every holder has confirmed.
    pub(super) fn retire(&mut self, id: RegionId) {
        if let Some(region) = self.by_id.get_mut(&id).filter(|region| region.usage != RegionUse::Failed) {
            self.changes.note(Step::Was(Box::new(region.clone())));
            region.usage = RegionUse::Quarantined;
            self.pending.add(region);
            if region.holders.is_empty() {
                self.cancel(id);
            }
        }
    }

    /// Notes that an area cannot be read. Returns the regions that fail by that, as they were before; nothing if the area is not
    /// one for regions.
    pub(super) fn fail(&mut self, area: Area, finder: EndpointId) -> Option<Vec<Region>> {
        // Pages of the kernel, which takes away no less.
        let start = area.start.get() / SMALL_ALIGN_LINES * SMALL_ALIGN_LINES;
        let end =
            area.start.get().checked_add(area.lines.get())?.checked_next_multiple_of(SMALL_ALIGN_LINES)?;
        let area = Area::new(LineOffset::new(start), LineCount::new(end - start));
        if !self.data.contains_area(&area) {
            return None;
        }
        let hit = self.iter().filter(|region| region.area.overlaps(&area));
        let before: Vec<Region> = hit.filter(|region| region.usage != RegionUse::Failed).cloned().collect();
        for region in &before {
            self.pending.remove(region);
            self.changes.note_for_good(region.id);
            if let Some(region) = self.by_id.get_mut(&region.id) {
                region.usage = RegionUse::Failed;
                region.holders.clear();
            }
        }
        let mut failed = before;
        for gap in self.gaps() {
            let from = gap.start.get().max(start);
            let to = (gap.start.get() + gap.lines.get()).min(end);
            if from < to && self.by_start.len() < self.max {
                self.last = self.last.checked_add(1)?;
                self.changes.note_for_good(RegionId::new(self.last));
                let region = Region {
                    id: RegionId::new(self.last),
                    area: Area::new(LineOffset::new(from), LineCount::new(to - from)),
                    purpose: Purpose::Nothing,
                    writer: finder,
                    holders: Sorted::default(),
                    usage: RegionUse::Failed,
                };
                self.by_start.insert(region.area.start, region.placed());
                self.by_id.insert(region.id, region.clone());
                failed.push(region);
            }
        }
        Some(failed)
    }

    /// Notes that a whole host has let go of everything. Returns how many quarantined regions are free by that.
    pub(super) fn forget(&mut self, host: HostId) -> usize {
        self.changes.changed = true;
        self.pending.forget(host);
        let mut freed = Vec::new();
        for (id, region) in &mut self.by_id {
            let before = region.holders.len();
            region.holders.retain(|holder| holder.host != host);
            if region.holders.len() != before {
                self.changes.note_for_good(*id);
            }
            if region.usage == RegionUse::Quarantined && region.holders.is_empty() {
                freed.push(*id);
            }
        }
        for id in &freed {
            self.cancel(*id);
        }
        freed.len()
    }

    /// Takes back the region that came last, which nobody was told of: to try in vain changes nothing.
    pub(super) fn withdraw(&mut self, id: RegionId) {
        self.cancel(id);
        if id == RegionId::new(self.last) {
            self.last -= 1;
        }
    }

    /// Frees a region.
    fn cancel(&mut self, id: RegionId) {
        let Some(region) = self.by_id.remove(&id) else { return };
        self.pending.remove(&region);
        self.changes.note(Step::Was(Box::new(region.clone())));
        self.by_start.remove(&region.area.start);
        // The gap that there is now may begin earlier.
        let gap = self.end_of_last_before(region.area.start.get()).unwrap_or(0);
        for hint in self.hints.0.values_mut() {
            *hint = gap.min(*hint);
        }
    }

    /// Notes that an endpoint has let go of a quarantined region; frees it if it was the last.
    pub(super) fn confirm(&mut self, id: RegionId, holder: EndpointId) {
        let Some(region) = self.by_id.get_mut(&id).filter(|region| region.usage == RegionUse::Quarantined)
        else {
            return;
        };
        if region.holders.remove(&holder) {
            self.pending.let_go(holder, id);
            self.changes.note_for_good(id);
        }
        if region.holders.is_empty() {
            self.cancel(id);
        }
    }

    /// The quarantined regions that an endpoint has yet to confirm.
    pub(super) fn pending(&self, holder: EndpointId) -> impl Iterator<Item = &Region> {
        self.pending.of_holder(holder).filter_map(|id| self.by_id.get(&id))
    }

    /// Whether what is kept of the regions is what they are.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn finds_all(&self) -> bool {
        self.pending == Pending::of(self.by_id.values())
    }

    /// Whether an area given anew by a changed configuration still covers every region.
    pub(super) fn move_to(&mut self, data: Area) -> bool {
        let end = |area: Area| area.start.get() + area.lines.get();
        let fits = self.iter().all(|region| region.area.start >= data.start && end(region.area) <= end(data));
        if fits {
            self.hints = Hints::default();
            self.changes.changed |= self.data != data;
            self.data = data;
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use cxl_pool::Role;

    use super::*;

    const OWNER: EndpointId = EndpointId::new(HostId::new(1), Role::NetFrontend);
    const OTHER: EndpointId = EndpointId::new(HostId::new(2), Role::NetBackend);

    fn regions(lines: u64) -> Regions {
        let data = Area { start: LineOffset::new(LARGE_ALIGN_LINES), lines: LineCount::new(lines) };
        Regions::new(data, REGIONS_MAX)
    }

    fn purpose() -> Purpose {
        Purpose::Ring(ChannelId::new(1))
    }

    #[test]
    fn large_regions_are_aligned_to_huge_pages() {
        let mut regions = regions(LARGE_ALIGN_LINES * 4);
        let small = regions.allocate(LineCount::new(3), purpose(), OWNER).expect("room").id;
        let large = regions.allocate(LineCount::new(LARGE_ALIGN_LINES), purpose(), OWNER).expect("room").id;
        assert_eq!(regions.get(small).expect("there").area.start.get(), LARGE_ALIGN_LINES);
        assert_eq!(regions.get(large).expect("there").area.start.get(), LARGE_ALIGN_LINES * 2);
    }

    #[test]
    fn region_is_free_only_after_every_holder_confirmed() {
        let mut regions = regions(SMALL_ALIGN_LINES);
        let region = regions.allocate(LineCount::new(1), purpose(), OWNER).expect("room").id;
        regions.hold(region, [OTHER].into_iter());
        regions.confirm(region, OTHER);
        assert_eq!(
            regions.get(region).expect("in use").holders.len(),
            2,
            "no confirmation counts before the end"
        );
        regions.retire(region);
        regions.confirm(region, OWNER);
        assert_eq!(regions.allocate(LineCount::new(1), purpose(), OWNER), None);
        assert_eq!(regions.pending(OTHER).count(), 1);
        regions.confirm(region, OTHER);
        let next = regions.allocate(LineCount::new(1), purpose(), OWNER).expect("room again").id;
        assert_ne!(next, region, "numbers are not used again");
    }

    #[test]
    fn what_is_too_large_is_not_allocated() {
        let mut regions = regions(SMALL_ALIGN_LINES);
        assert_eq!(regions.allocate(LineCount::new(SMALL_ALIGN_LINES + 1), purpose(), OWNER), None);
        assert_eq!(regions.allocate(LineCount::new(u64::MAX), purpose(), OWNER), None);
    }
}
