//! An election in which one that cannot be elected, since its log is shorter, asks as often as those whose logs are longer: it must not keep
//! them from being elected for good.

use pod_state::{Command, InstanceType};

use super::group::{Group, Size};
use super::tests::FIVE;

/// Nothing goes wrong by itself.
const CALM: Size = Size { rough_ms: 0, ..FIVE };
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
    for seed in 0..6 {
        let mut group = Group::new(seed, CALM, None);
        match group.elect_beside_a_shorter_log() {
            Ok(leader) => assert_ne!(leader, 0, "seed {seed}: whoever has less is elected"),
            Err(wrong) => {
                let last = group.trace.len().saturating_sub(40);
                group.trace[last..].iter().for_each(|line| println!("{line}"));
                panic!("seed {seed}: {wrong}");
            }
        }
    }
}
