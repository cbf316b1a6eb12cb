//! A replica that is killed and started again.

use pod_state::{Command, InstanceType};

use super::group::{Group, Size};
use super::half_way::in_worlds;
use super::tests::FIVE;

/// Nothing goes wrong by itself.
const CALM: Size = Size { replicas: 3, rough_ms: 0, ..FIVE };
/// Longer than the leader would wait for an answer to what it said last.
const WATCHED_MS: u64 = 8000;

impl Group {
    /// Kills a replica that follows while something is under way to it, starts it again, and says by how much the term has grown since.
    fn restart_follower(&mut self) -> Result<u64, String> {
        self.agree(|members| members.len() == 3)?;
        let leader = self.leader().ok_or("nobody leads")?;
        let term = self.nodes[leader].elected();
        let instance_type = InstanceType::default();
        self.clients.ask(Command::SetInstanceType { name: "new".to_owned(), instance_type }, true);
        // A moment in which the leader has sent that, as in one of a few worlds.
        for _ in 0..2 + self.dice.below(6) {
            self.step()?;
        }
        let follower = (leader + 1) % 3;
        self.end(follower, 300);
        for _ in 0..WATCHED_MS {
            self.step()?;
        }
        let leader = self.leader().ok_or("nobody leads any more")?;
        Ok(self.nodes[leader].elected() - term)
    }
}

/// What was said to it before it died it never answers. Who waits for that leaves it alone for so long that it stands for election.
#[test]
fn one_that_is_started_again_deposes_nobody() {
    let grown = in_worlds(12, CALM, Group::restart_follower);
    assert!(grown.iter().all(|terms| *terms == 0), "{grown:?}");
}
