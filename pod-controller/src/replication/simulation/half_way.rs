//! A change of members whose leader died half-way: it holds from when it is in the log, and until it has ended nothing is decided without a
//! majority of those before it as well. Whoever leads next ends it.

use super::group::{Group, Size};
use super::tests::FIVE;

/// Nothing goes wrong by itself.
const CALM: Size = Size { rough_ms: 0, ..FIVE };
/// Longer than it takes.
const PATIENCE_MS: u64 = 60_000;

impl Group {
    /// The members that a replica counts on, before a change that is under way and after it.
    fn counts_on(&self, number: usize) -> Vec<Vec<u64>> {
        let Some(life) = &self.nodes[number].life else { return Vec::new() };
        let metrics = life.standing.raft.metrics();
        let metrics = metrics.borrow();
        let sets = metrics.membership_config.membership().get_joint_config();
        sets.iter().map(|set| set.iter().copied().collect()).collect()
    }

    /// Whether four members are to become five, for all that this replica knows.
    fn is_half_way(&self, number: usize) -> bool {
        matches!(self.counts_on(number).as_slice(), [before, after] if before.len() == 4 && after.len() == 5)
    }

    /// Has the leader die while it takes in the fifth member, for good. Whether it did so half-way.
    fn lose_leader_half_way(&mut self) -> Result<bool, String> {
        while self.now_ms < PATIENCE_MS {
            self.step()?;
            let numbers = 0..self.nodes.len();
            if numbers
                .clone()
                .any(|number| matches!(self.counts_on(number).as_slice(), [all] if all.len() == 5))
            {
                return Ok(false);
            }
            let leader = numbers.clone().find(|number| self.nodes[*number].elected() != 0);
            let Some(leader) = leader.filter(|leader| self.is_half_way(*leader)) else { continue };
            if numbers.clone().any(|number| number != leader && self.is_half_way(number)) {
                self.end(leader, u64::MAX / 2);
                return Ok(true);
            }
        }
        Err("nobody takes in a fifth member".to_owned())
    }

    /// Waits until all that live count on the same five, and nothing else.
    fn end_change(&mut self) -> Result<(), String> {
        let until = self.now_ms + PATIENCE_MS;
        loop {
            self.step()?;
            let alive = (0..self.nodes.len()).filter(|number| self.nodes[*number].life.is_some());
            let sets: Vec<_> = alive.map(|number| self.counts_on(number)).collect();
            if sets.iter().all(|sets| matches!(sets.as_slice(), [all] if all.len() == 5)) {
                return Ok(());
            }
            if self.now_ms > until {
                return Err(format!("they count on {sets:?}"));
            }
        }
    }
}

#[test]
fn whoever_leads_next_ends_a_change_of_members() {
    let mut half_way = 0;
    for seed in 0..6 {
        let mut group = Group::new(seed, CALM, None);
        let mut run = || {
            let lost = group.lose_leader_half_way()?;
            half_way += u32::from(lost);
            if lost { group.end_change() } else { Ok(()) }
        };
        if let Err(what) = run() {
            let last = group.trace.len().saturating_sub(40);
            group.trace[last..].iter().for_each(|line| println!("{line}"));
            panic!("seed {seed}: {what}");
        }
    }
    assert!(half_way >= 3, "a leader died half-way in {half_way} of 6 worlds");
}
