//! Finding out why no controller grants anything: it may speak another version.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cxl_pool::{ControllerHello, Layout, Memory, Record, ReplicaId};

use crate::liveness::read_beat;
use crate::protocol::{Incompatible, Protocol};

/// Between two looks a controller that lives beats many times.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// What is seen of controllers while none has granted anything.
#[derive(Debug)]
pub(super) struct Strangers {
    due: Instant,
    beats: BTreeMap<ReplicaId, u64>,
}

impl Strangers {
    pub(super) fn new(now: Instant) -> Self {
        Self { due: now, beats: BTreeMap::new() }
    }

    /// Why the controller that lives, and has the highest term of those, cannot be spoken to.
    pub(super) fn look<M: Memory>(
        &mut self,
        memory: &M,
        layout: &Layout,
        ours: Protocol,
        now: Instant,
    ) -> Option<Incompatible> {
        if now < self.due {
            return None;
        }
        self.due = now + LOOK_EVERY;
        let mut alive = Vec::new();
        for replica in layout.replicas() {
            let Some(hello) = ControllerHello::look(memory, layout.controller(replica)) else { continue };
            let beat = read_beat(memory, layout.controller_heartbeat(replica));
            if self.beats.insert(replica, beat).is_some_and(|before| before != beat) {
                alive.push(hello);
            }
        }
        let leader = alive.iter().max_by_key(|hello| hello.term)?;
        ours.with(leader.protocol.into()).err()
    }
}

#[cfg(test)]
mod tests;
