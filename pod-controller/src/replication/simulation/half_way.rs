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
    pub(super) fn counts_on(&self, number: usize) -> Vec<Vec<u64>> {
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
    pub(super) fn end_change(&mut self) -> Result<(), String> {
        self.agree(|members| members.len() == 5).map(|_| ())
    }

    /// Waits until all that live count on the same ones, of whom this is true, and says on whom.
    pub(super) fn agree(&mut self, fits: impl Fn(&[u64]) -> bool) -> Result<Vec<u64>, String> {
        let until = self.now_ms + PATIENCE_MS;
        loop {
            self.step()?;
            let alive = (0..self.nodes.len()).filter(|number| self.nodes[*number].life.is_some());
            let sets: Vec<_> = alive.map(|number| self.counts_on(number)).collect();
            if let Some([all]) = sets.first().map(Vec::as_slice)
                && fits(all)
                && sets.iter().all(|other| other == &sets[0])
            {
                return Ok(all.clone());
            }
            if self.now_ms > until {
                return Err(format!("they count on {sets:?}"));
            }
        }
    }
}

/// What came of it in so many worlds.
pub(super) fn in_worlds<T>(count: u64, size: Size, run: impl Fn(&mut Group) -> Result<T, String>) -> Vec<T> {
    let world = |seed| {
        let mut group = Group::new(seed, size, None);
        run(&mut group).unwrap_or_else(|wrong| {
            let last = group.trace.len().saturating_sub(40);
            group.trace[last..].iter().for_each(|line| println!("{line}"));
            panic!("seed {seed}: {wrong}")
        })
    };
    (0..count).map(world).collect()
}

/// Nothing may go wrong in six worlds, and `run` says of at least half of them that the worst moment was met.
fn worlds_survive(what: &str, run: impl Fn(&mut Group) -> Result<bool, String>) {
    let met = in_worlds(6, CALM, run).into_iter().filter(|was_met| *was_met).count();
    assert!(met >= 3, "{what} half-way in {met} of 6 worlds");
}

#[test]
fn whoever_leads_next_ends_a_change_of_members() {
    worlds_survive("a leader died", |group| {
        let lost = group.lose_leader_half_way()?;
        if lost {
            group.end_change()?;
        }
        Ok(lost)
    });
}

impl Group {
    /// Whether the log of a replica is about to take the place of one that it had before, for all that this replica knows.
    fn is_replacing(&self, number: usize, lost: u64) -> bool {
        let sets = self.counts_on(number);
        matches!(sets.as_slice(), [before, after] if before.contains(&lost) && !after.contains(&lost))
    }

    pub(super) fn leader(&self) -> Option<usize> {
        (0..self.nodes.len()).find(|number| self.nodes[*number].elected() != 0)
    }

    /// A replica loses its log, and whoever takes it in again dies half-way. Whoever leads next is asked to do without the dead one before
    /// it has ended that. Returns the log that is lost and that of the dead one, if all of this happened.
    fn dismiss_half_way(&mut self) -> Result<Option<(u64, u64)>, String> {
        self.end_change()?;
        let numbers = 0..self.nodes.len();
        let leader = self.leader().ok_or("nobody leads")?;
        let loser = numbers.clone().find(|number| *number != leader).ok_or("there is one only")?;
        let lost = self.nodes[loser].owner;
        self.nodes[loser].lose_log(&self.around);
        self.nodes[loser].starts_at_ms = self.now_ms + 1;
        let until = self.now_ms + PATIENCE_MS;
        loop {
            self.step()?;
            if self.now_ms > until {
                return Err("nobody takes it in again".to_owned());
            }
            let counts_on_lost = |number| self.counts_on(number).iter().any(|set| set.contains(&lost));
            if self.nodes[leader].elected() == 0 || !counts_on_lost(leader) {
                return Ok(None);
            }
            let mut others = numbers.clone().filter(|number| ![loser, leader].contains(number));
            if self.is_replacing(leader, lost) && others.any(|number| self.is_replacing(number, lost)) {
                break;
            }
        }
        let dead = self.nodes[leader].replica;
        let owner = self.nodes[leader].owner;
        self.end(leader, u64::MAX / 2);
        let mut asked = false;
        while self.now_ms < until {
            self.step()?;
            let Some(next) = self.leader() else { continue };
            if !self.is_replacing(next, lost) {
                return Ok(asked.then_some((lost, owner)));
            }
            // Before it is known that a majority has the change no other one begins.
            if let Some(life) = &self.nodes[next].life {
                life.dismiss(dead);
                asked = true;
            }
        }
        Err("that is never ended".to_owned())
    }
}

/// One that leads until those without it have agreed to that changes nothing more: Raft takes what it is asked then for what only a leader asks.
#[test]
fn whoever_dismisses_itself_dismisses_nobody_after_that() {
    let calm = Size { replicas: 3, ..CALM };
    in_worlds(6, calm, |group| {
        group.agree(|members| members.len() == 3)?;
        let leader = group.leader().ok_or("nobody leads")?;
        let other = (leader + 1) % 3;
        // It is waited for, and meanwhile somebody asks for the next change.
        group.nodes[other].still_until_ms = group.now_ms + 150;
        for number in [leader, other] {
            let asked = &group.nodes[(leader + 2) % 3];
            asked.life.as_ref().ok_or("it is not there")?.dismiss(group.nodes[number].replica);
            for _ in 0..100 {
                group.step()?;
            }
        }
        for _ in 0..500 {
            group.step()?;
        }
        // Whoever lives and was dismissed becomes a member again.
        group.agree(|members| members.len() == 3)
    });
}

/// Otherwise a log that is lost would be counted on for good: its replica is a member, and asks for nothing.
#[test]
fn a_dismissal_ends_a_change_of_members_as_it_was_meant() {
    worlds_survive("a member was dismissed", |group| {
        let Some((lost, dead)) = group.dismiss_half_way()? else { return Ok(false) };
        let members = group.agree(|_| true)?;
        if members.contains(&lost) {
            return Err(format!("{lost} is lost, and a member"));
        }
        Ok(!members.contains(&dead))
    });
}
