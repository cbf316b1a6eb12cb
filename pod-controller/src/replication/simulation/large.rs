//! Pods of more than a hundred hosts, with many instances before anything goes wrong.
//!
//! To write down all of such a state takes as long as hundreds of entries. So what an entry changed is compared after each, at
//! each replica, and all of it now and then, and at the end: a difference that nobody mends is found late, and not missed.

use pod_state::model::check;

use super::super::log::Sizes;
use super::group::{Group, Size};
use super::tests::THREE;
use crate::simulation::faults::Around;

/// As large as can be tried whenever something was changed.
pub(super) const LARGE: Size = Size {
    hosts: 100,
    names: 1100,
    filled: 1100,
    rough_ms: 1500,
    fault_every_ms: 150,
    pod_fault_every_ms: 20,
    wish_every_ms: 8,
    pool_mib: 60 * 1100,
    asking_max: 64,
    gathered_max: 32,
    compare_every_ms: 500,
    check_every_ms: 5000,
    sizes: Sizes { part_bytes: 256 << 10, purged: 128, log_least: 128 },
    chunk_bytes: 64 << 10,
    ..THREE
};
/// Hundreds of hosts, and thousands of instances.
pub(super) const HUGE: Size =
    Size { hosts: 250, names: 3000, filled: 3000, rough_ms: 4000, pool_mib: 60 * 3000, ..LARGE };

/// How many lines are kept of what happened.
const LINES_MAX: usize = 20_000;

impl Group {
    /// Whether no more ask for something.
    pub(super) fn is_busy(&self) -> bool {
        self.clients.waiting() >= self.size.asking_max
    }

    /// Has the pod get many instances in little time.
    pub(super) fn fill(&mut self) -> Result<(), String> {
        if self.size.filled == 0 {
            return Ok(());
        }
        let until = self.now_ms + self.size.calm_ms;
        while !self.around.pod.physical().daemons.values().all(|daemon| daemon.joined) {
            self.step()?;
            if self.now_ms > until {
                return Err("not all daemons join".to_owned());
            }
        }
        for with_volumes in [true, false] {
            for number in 0..self.size.filled {
                while self.is_busy() {
                    self.step()?;
                }
                let Size { hosts, names, .. } = self.size;
                let physical = &mut self.around.pod.physical();
                let dice = &mut self.pod_dice;
                let mut around = Around { dice, physical, state: None, hosts, names, grouped: true };
                let host = around.random_daemon().host;
                let asked = if with_volumes {
                    around.create_volume(number)
                } else {
                    around.create_instance(number, host)
                };
                self.clients.ask(asked, true);
            }
            while self.clients.waiting() > 0 {
                self.step()?;
            }
        }
        Ok(())
    }

    /// Compares all that replicas know and show, where that is not done after each entry. Whoever is behind has its turn later. In the
    /// end all of the state is looked at, too.
    pub(super) fn compare(&mut self, at_once: bool) -> Result<(), String> {
        let every_ms = self.size.compare_every_ms;
        if every_ms == 0 {
            return Ok(());
        }
        let oracle = self.around.witness.oracle();
        for (node, compared_ms) in self.nodes.iter().zip(&mut self.compared_ms) {
            let Some(life) = node.life.as_ref().filter(|_| at_once || *compared_ms + every_ms <= self.now_ms)
            else {
                continue;
            };
            let knows = life.standing.machine.look(|known| {
                known.state.as_ref().map_or(Ok(false), |state| oracle.is_the_same(node.replica, state))
            })?;
            if knows && oracle.is_the_same(node.replica, &life.handle.view().state)? {
                *compared_ms = self.now_ms;
                self.compared += 1;
            }
        }
        if let Some(state) = oracle.known.state.as_ref().filter(|_| at_once) {
            check(state);
        }
        drop(oracle);
        let excess = self.trace.len().saturating_sub(LINES_MAX);
        if excess > LINES_MAX {
            self.trace.drain(..excess);
        }
        Ok(())
    }
}
