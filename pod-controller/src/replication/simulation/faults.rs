//! What goes wrong with replicas and with what is between them, and how it is mended.

use std::collections::BTreeSet;

use openraft::ServerState;

use super::group::Group;

/// What is going to be mended.
#[derive(Debug)]
pub(super) enum Mend {
    Ways,
    Weather,
    Full(usize),
    Slow(usize),
    /// Nothing is: this one stands still for so many ms, and hears of nobody for a while after that.
    Stall(usize, u64),
}

impl Group {
    fn plan(&mut self, after_ms: u64, mend: Mend) {
        self.numbered += 1;
        self.agenda.insert((self.now_ms + after_ms, self.numbered), mend);
    }

    pub(super) fn mend(&mut self, mend: &Mend) {
        self.say(&format!("mended: {mend:?}"));
        match mend {
            Mend::Ways => self.around.net.mend(),
            Mend::Weather => self.around.net.set_weather(0, 3),
            Mend::Full(number) => self.nodes[*number].disk.set_full(false),
            Mend::Slow(number) => self.nodes[*number].disk.set_slow(0),
            Mend::Stall(number, away_ms) => self.stall(*number, *away_ms),
        }
    }

    /// Whoever leads stands still, as if its host did, and hears of nobody for a while after that: it does not know that others may have
    /// elected another one.
    fn stall(&mut self, number: usize, away_ms: u64) {
        let me = self.nodes[number].replica;
        self.nodes[number].still_until_ms = self.now_ms + away_ms;
        for other in (0..self.size.replicas).filter(|other| *other != me) {
            self.around.net.cut(other, me);
        }
        self.plan(away_ms + 300, Mend::Ways);
    }

    /// Notices who is elected.
    pub(super) fn watch_elections(&mut self) {
        let elected = self.nodes.iter().enumerate().map(|(number, node)| (number, node.elected()));
        let Some(newest) = elected.max_by_key(|(_, term)| *term).filter(|it| it.1 > self.elected.1) else {
            return;
        };
        self.elected = newest;
        if std::mem::take(&mut self.stalls_next) {
            let (after_ms, away_ms) = (5 + self.dice.below(60), 500 + self.dice.below(2500));
            self.plan(after_ms, Mend::Stall(newest.0, away_ms));
        }
    }

    /// Whoever leads, half of the time.
    fn whom(&mut self) -> usize {
        let leader = self.nodes.iter().position(|node| node.elected() != 0);
        let any = usize::try_from(self.dice.below(self.nodes.len() as u64)).unwrap_or(0);
        if self.dice.one_in(2) { leader.unwrap_or(any) } else { any }
    }

    pub(super) fn fault(&mut self) {
        let whom = self.whom();
        let long = self.dice.one_in(4);
        let away_ms = if long { 500 + self.dice.below(3000) } else { 1 + self.dice.below(400) };
        let (kind, away_ms) =
            if self.size.restless { (0, 1 + self.dice.below(10)) } else { (self.dice.below(18), away_ms) };
        self.say(&format!("fault {kind} of replica {whom} for {away_ms} ms"));
        let others: Vec<u16> = (0..self.size.replicas).filter(|other| usize::from(*other) != whom).collect();
        let me = self.nodes[whom].replica;
        match kind {
            0 | 1 => {
                self.nodes[whom].kill(&self.around, kind == 1);
                self.said[whom].clear();
                self.nodes[whom].starts_at_ms = self.now_ms + away_ms;
            }
            2 | 3 => {
                let writes = self.dice.below(60);
                self.nodes[whom].disk.fail_in(writes);
            }
            4 => {
                for other in others {
                    self.around.net.cut(me, other);
                    self.around.net.cut(other, me);
                }
                self.plan(away_ms, Mend::Ways);
            }
            5 => {
                // It hears the others, and they do not hear it, or the other way round.
                let hears = self.dice.one_in(2);
                for other in others {
                    if hears { self.around.net.cut(me, other) } else { self.around.net.cut(other, me) }
                }
                self.plan(away_ms, Mend::Ways);
            }
            6 => {
                let other = others[usize::try_from(self.dice.below(others.len() as u64)).unwrap_or(0)];
                self.around.net.cut(me, other);
                self.plan(away_ms, Mend::Ways);
            }
            7 | 8 => {
                let (lost, late) = (3 + self.dice.below(20), 3 + self.dice.below(200));
                self.around.net.set_weather(lost, late);
                self.plan(away_ms, Mend::Weather);
            }
            9 => {
                let one_in = 1 + self.dice.below(4);
                self.nodes[whom].disk.set_slow(one_in);
                self.plan(away_ms, Mend::Slow(whom));
            }
            10 => {
                self.nodes[whom].disk.set_full(true);
                self.plan(away_ms, Mend::Full(whom));
            }
            11 | 12 => self.nodes[whom].still_until_ms = self.now_ms + away_ms,
            13 => self.nodes[whom].pace_permille = 700 + self.dice.below(600),
            14 => {
                let asked = usize::try_from(self.dice.below(self.nodes.len() as u64)).unwrap_or(0);
                if let Some(life) = &self.nodes[asked].life {
                    life.dismiss(me);
                }
            }
            15 => {
                if self.can_do_without(whom) {
                    self.nodes[whom].lose_log(&self.around);
                    self.said[whom].clear();
                    self.nodes[whom].starts_at_ms = self.now_ms + away_ms;
                    self.say(&format!("the log of replica {whom} is lost"));
                }
            }
            // Until another one is elected, and has done something.
            16 => self.stall(whom, 600 + away_ms),
            _ => {
                // Another one is elected, and stands still.
                self.nodes[whom].kill(&self.around, false);
                self.said[whom].clear();
                self.nodes[whom].starts_at_ms = self.now_ms + away_ms;
                self.stalls_next = true;
            }
        }
    }

    /// Whether the others have a majority of every set of members that anybody counts on, or is about to: a log that is lost is lost for
    /// good.
    fn can_do_without(&self, whom: usize) -> bool {
        let left = self.nodes.iter().enumerate().filter(|(number, _)| *number != whom);
        let left: BTreeSet<u64> = left.map(|(_, node)| node.owner).collect();
        self.nodes.iter().all(|node| {
            // Of whoever is away it is not known what it counts on.
            let Some(life) = node.life.as_ref().filter(|life| !life.register.is_busy()) else { return false };
            let metrics = life.standing.raft.metrics().borrow().clone();
            let members = metrics.membership_config.membership();
            // Before Raft has read its log it says that it counts on nobody; whoever has an empty one is a learner by then.
            let is_known = members.voter_ids().next().is_some() || metrics.state == ServerState::Learner;
            is_known
                && members.get_joint_config().iter().all(|voters| {
                    let there = voters.iter().filter(|voter| left.contains(voter)).count();
                    there * 2 > voters.len()
                })
        })
    }
}
