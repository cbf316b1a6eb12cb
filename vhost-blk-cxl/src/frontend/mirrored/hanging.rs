//! Replicas that neither answer nor fail. Time in which the volume's rates have a replica's backend wait does not count.

use std::time::{Duration, Instant};

use cxl_pool::Memory;
use tracing::warn;

use super::MirroredDisk;
use super::replica::{Oldest, Resync};

impl<M: Memory> MirroredDisk<M> {
    /// Goes on without replicas that have kept a request for too long. The last one in sync is waited for: nobody else has what
    /// it has.
    pub(super) fn drop_hanging(&mut self, now: Instant, timeout: Duration) {
        let passed = self.last_look.passed(now);
        for index in 0..self.replicas.len() {
            let passed = self.replicas[index].throttled.accounts_for(passed);
            let oldest = self.oldest_at(index, passed);
            self.replicas[index].oldest = oldest;
            if oldest.is_none_or(|oldest| oldest.waited < timeout) {
                continue;
            }
            if self.replicas[index].counts() {
                self.fail(index, "it kept a request for longer than replica-timeout-ms");
                continue;
            }
            // Nobody counts on it. What it has is an orphan from here on, and it is not tried again before it has answered.
            let replica = &mut self.replicas[index];
            warn!(lease = %self.disk.object().lease, ssd = replica.ssd,
                "the replica does not answer while it is brought in line");
            replica.resync = Resync::Idle;
            replica.oldest = None;
            self.detach(index);
            self.advance_all();
        }
    }

    /// The oldest request that a replica has, which had it before too if it is known.
    fn oldest_at(&self, index: usize, passed: Duration) -> Option<Oldest> {
        let replica = &self.replicas[index];
        if !replica.is_there() {
            return None;
        }
        let sequence = self.works.oldest_where(|work| work.legs[index].is_open())?;
        let generation = replica.route.generation;
        let same = |known: &Oldest| known.sequence == sequence && known.generation == generation;
        let waited = replica.oldest.filter(same).map_or(Duration::ZERO, |known| known.waited + passed);
        Some(Oldest { sequence, generation, waited })
    }
}
