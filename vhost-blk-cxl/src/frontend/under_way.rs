//! Which parts of a disk requests are under way at, so that one that meets another waits for it.
//!
//! What is under way when a backend or a frontend dies is carried out once more. Two requests that meet have an order by then, if
//! anybody has seen it: a read that shows the older write, and later ones that show the newer write, which is acknowledged. Were the
//! older one repeated after that, the guest would see it come back. So no request begins before those that it meets have ended:
//! nobody sees anything of what may be repeated.
//!
//! Guests seldom have such requests, but each one has to be looked at. So parts of the disk are counted, many of them by one
//! number, and ranges are compared only where a number says that they might meet.

use std::ops::Range;

/// What is counted together: more than most requests touch, so that few of them are counted twice.
const PART_BYTES: u64 = 128 << 10;
const COUNTS: usize = 512;
/// Requests that touch more parts are compared with everything.
const PARTS_MAX: u64 = 64;

/// Requests of one kind.
#[derive(Debug)]
struct Kind {
    counts: Vec<u16>,
    /// How many touch too many parts to be counted.
    wide: u32,
    ranges: Vec<Request>,
}

/// A request that is under way.
#[derive(Debug)]
struct Request {
    range: Range<u64>,
    slot: u16,
    /// It is carried out in several steps.
    in_steps: bool,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct UnderWay {
    reads: Kind,
    writes: Kind,
    /// Where each request is found, and whether it is among those that write.
    at: Vec<Option<(bool, usize)>>,
    /// Those that meet are kept apart here, and not by whoever carries them out.
    keeps_apart: bool,
    /// How many have several steps.
    in_steps: u32,
}

impl UnderWay {
    /// None, of so many at most.
    pub(super) fn none(requests_max: u16) -> Self {
        let most = usize::from(requests_max);
        let kind = || Kind { counts: vec![0; COUNTS], wide: 0, ranges: Vec::with_capacity(most) };
        Self { reads: kind(), writes: kind(), at: vec![None; most], keeps_apart: true, in_steps: 0 }
    }

    /// Whether requests that meet are kept apart here; they are, unless something else is said. Those that are carried out in several
    /// steps always are: whoever carries them out sees nothing of the other steps.
    pub(super) fn keep_apart(&mut self, apart: bool) {
        self.keeps_apart = apart;
    }

    /// Whether a request, which may be one of several steps, has to wait: two of which one writes meet.
    pub(super) fn has_to_wait(&self, writes: bool, range: &Range<u64>, in_steps: bool) -> bool {
        if self.keeps_apart || in_steps {
            return self.writes.meets(range) || writes && self.reads.meets(range);
        }
        self.in_steps > 0 && (self.writes.meets_in_steps(range) || writes && self.reads.meets_in_steps(range))
    }

    /// A request is under way from here on.
    pub(super) fn begin(&mut self, slot: u16, writes: bool, range: Range<u64>, in_steps: bool) {
        let kind = if writes { &mut self.writes } else { &mut self.reads };
        self.at[usize::from(slot)] = Some((writes, kind.ranges.len()));
        self.in_steps += u32::from(in_steps);
        kind.count(&range, |count| *count += 1, |wide| *wide += 1);
        kind.ranges.push(Request { range, slot, in_steps });
    }

    /// It is over, if it was.
    pub(super) fn end(&mut self, slot: u16) {
        let Some((writes, at)) = self.at[usize::from(slot)].take() else { return };
        let kind = if writes { &mut self.writes } else { &mut self.reads };
        let over = kind.ranges.swap_remove(at);
        self.in_steps -= u32::from(over.in_steps);
        kind.count(&over.range, |count| *count -= 1, |wide| *wide -= 1);
        if let Some(moved) = kind.ranges.get(at) {
            self.at[usize::from(moved.slot)] = Some((writes, at));
        }
    }
}

impl Kind {
    fn meets(&self, range: &Range<u64>) -> bool {
        if self.ranges.is_empty() {
            return false;
        }
        let may_meet =
            self.wide > 0 || parts(range).is_none_or(|mut parts| parts.any(|part| self.counts[part] > 0));
        may_meet && self.ranges.iter().any(|other| meet(&other.range, range))
    }

    fn meets_in_steps(&self, range: &Range<u64>) -> bool {
        self.ranges.iter().any(|other| other.in_steps && meet(&other.range, range))
    }

    fn count(&mut self, range: &Range<u64>, each: impl Fn(&mut u16), wide: impl Fn(&mut u32)) {
        match parts(range) {
            Some(parts) => parts.for_each(|part| each(&mut self.counts[part])),
            None => wide(&mut self.wide),
        }
    }
}

fn meet(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Under which numbers a range is counted. None if it is wide.
fn parts(range: &Range<u64>) -> Option<impl Iterator<Item = usize>> {
    let parts = range.start / PART_BYTES..range.end.div_ceil(PART_BYTES);
    // Below the number of counts.
    #[expect(clippy::cast_possible_truncation, reason = "it is below the number of counts")]
    (parts.end.saturating_sub(parts.start) <= PARTS_MAX)
        .then(|| parts.map(|part| (part % COUNTS as u64) as usize))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const REQUESTS: u16 = 16;

    fn range() -> impl Strategy<Value = Range<u64>> {
        let start = prop_oneof![0..4 * PART_BYTES, (0..3 * COUNTS as u64).prop_map(|part| part * PART_BYTES)];
        let bytes =
            prop_oneof![1..3 * PART_BYTES, (PARTS_MAX - 1) * PART_BYTES..2 * COUNTS as u64 * PART_BYTES];
        (start, bytes).prop_map(|(start, bytes)| start..start + bytes)
    }

    proptest! {
        #[test]
        fn those_wait_that_meet_another_of_which_one_writes(
            apart in any::<bool>(),
            steps in prop::collection::vec((0..REQUESTS, any::<bool>(), range(), prop::bool::weighted(0.2)), 1..100),
        ) {
            let mut under_way = UnderWay::none(REQUESTS);
            under_way.keep_apart(apart);
            let mut known: Vec<Option<(bool, Range<u64>, bool)>> = vec![None; usize::from(REQUESTS)];
            for (request, writes, range, in_steps) in steps {
                let conflicts = |(other, at, other_in_steps): &(bool, Range<u64>, bool)| {
                    let here = apart || in_steps || *other_in_steps;
                    here && (writes || *other) && at.start < range.end && range.start < at.end
                };
                let expected = known.iter().flatten().any(conflicts);
                prop_assert_eq!(under_way.has_to_wait(writes, &range, in_steps), expected);
                let slot = &mut known[usize::from(request)];
                if slot.take().is_some() {
                    under_way.end(request);
                } else {
                    under_way.begin(request, writes, range.clone(), in_steps);
                    *slot = Some((writes, range, in_steps));
                }
            }
            (0..REQUESTS).for_each(|request| under_way.end(request));
            prop_assert_eq!(under_way.in_steps, 0);
            for kind in [&under_way.reads, &under_way.writes] {
                prop_assert!(kind.ranges.is_empty() && kind.wide == 0);
                prop_assert!(kind.counts.iter().all(|count| *count == 0));
            }
        }
    }
}
