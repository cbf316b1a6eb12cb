//! Elections beside one whose log is shorter, which cannot be elected. If it asks as often as those whose logs are longer, it must not keep
//! them from being elected for good; and if it knows nothing yet, it does not ask at all.

use pod_state::{Command, InstanceType};

use super::group::{Group, Size};
use super::half_way::in_worlds;
use super::tests::{FIVE, WITH_ONE_OUTSIDE};

/// Nothing goes wrong by itself.
const CALM: Size = Size { rough_ms: 0, ..FIVE };
const CALM_OUTSIDE: Size = Size { rough_ms: 0, ..WITH_ONE_OUTSIDE };
/// Longer than it takes to decide something.
const DECIDED_MAX_MS: u64 = 10_000;
/// Many elections.
const ELECTED_MAX_MS: u64 = 5000;

impl Group {
    /// Has the first replica miss what is decided last, and of the others only the two of the highest numbers live: without the first one
    /// they are no majority. It waits for the least time before it stands for election, and they for the most. Returns who is elected.
    fn elect_beside_a_shorter_log(&mut self) -> Result<usize, String> {
        self.end_change()?;
        // It began them, and leads.
        self.end(0, 1000);
        let leader = self.elected_within(DECIDED_MAX_MS)?;
        while self.nodes[0].life.is_none() {
            self.step()?;
        }
        self.end_change()?;
        for other in 1..self.size.replicas {
            self.around.net.cut(0, other);
            self.around.net.cut(other, 0);
        }
        let instance_type = InstanceType::default();
        self.clients.ask(Command::SetInstanceType { name: "late".to_owned(), instance_type }, true);
        let until = self.now_ms + DECIDED_MAX_MS;
        while self.clients.waits() {
            self.step()?;
            if self.now_ms > until {
                return Err("nothing is decided".to_owned());
            }
        }
        for _ in 0..self.dice.below(1000) {
            self.step()?;
        }
        let mut others: Vec<usize> = (1..self.nodes.len()).filter(|other| *other != leader).collect();
        self.end(leader, u64::MAX / 2);
        for dead in others.drain(..others.len() - 2) {
            self.end(dead, u64::MAX / 2);
        }
        self.around.net.mend();
        self.elected_within(ELECTED_MAX_MS)
    }

    /// Of two replicas in the pod and one outside, has the one in the pod that follows lose its log, and the other one die as soon as it
    /// has taken it in again. Whether the one that is left knew nothing by then, and leads since.
    fn elect_who_knows_nothing(&mut self) -> Result<bool, String> {
        self.agree(|members| members.len() == 3)?;
        let leader = self.leader().ok_or("nobody leads")?;
        let other = 1 - leader;
        self.nodes[other].lose_log(&self.around);
        self.nodes[other].starts_at_ms = self.now_ms + 1;
        let until = self.now_ms + DECIDED_MAX_MS;
        while self.now_ms < until {
            self.step()?;
            let owner = self.nodes[other].owner;
            // For the one outside the change of members has ended as well: before, what is left is no majority of those before it.
            let is_taken_in =
                |number| matches!(self.counts_on(number).as_slice(), [all] if all.contains(&owner));
            if ![leader, 2].into_iter().all(is_taken_in) {
                continue;
            }
            let Some(life) = &self.nodes[other].life else { continue };
            if life.standing.raft.metrics().borrow().last_log_index.is_some() {
                return Ok(false);
            }
            self.end(leader, u64::MAX / 2);
            return match self.elected_within(ELECTED_MAX_MS)? {
                who if who == other => Ok(true),
                who => Err(format!("{who} leads")),
            };
        }
        Err("it is not taken in again".to_owned())
    }

    /// Who is elected within so many ms.
    fn elected_within(&mut self, most_ms: u64) -> Result<usize, String> {
        let until = self.now_ms + most_ms;
        while self.now_ms < until {
            self.step()?;
            if let Some(leader) = self.leader() {
                return Ok(leader);
            }
        }
        Err("nobody is elected".to_owned())
    }
}

#[test]
fn one_with_less_does_not_keep_others_from_being_elected() {
    let elected = in_worlds(6, CALM, Group::elect_beside_a_shorter_log);
    assert!(!elected.contains(&0), "whoever has less is elected: {elected:?}");
}

#[test]
fn one_outside_stands_for_election_where_nobody_knows_to_ask() {
    let met = in_worlds(6, CALM_OUTSIDE, Group::elect_who_knows_nothing);
    assert!(met.contains(&true), "whoever was left knew something each time");
}
