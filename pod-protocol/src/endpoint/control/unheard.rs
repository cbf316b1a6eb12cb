//! Saying that a controller is not listened to.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cxl_pool::{EndpointId, Grant, Layout, Memory, Record, ReplicaId};

use super::ControlThread;
use crate::liveness::read_beat;

/// Between two looks a controller that was deposed has learned so, and does not beat any more.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// What is seen of controllers that grant something in a lower term than whom is obeyed.
#[derive(Debug)]
pub(super) struct Unheard {
    due: Instant,
    /// Which life of a replica it is, and its heartbeat at the last look; none once it was spoken of.
    seen: BTreeMap<ReplicaId, (u64, Option<u64>)>,
}

impl Unheard {
    pub(super) fn new(now: Instant) -> Self {
        Self { due: now, seen: BTreeMap::new() }
    }

    /// Who lives, and has been granting this life of an endpoint something in vain for a while: each is named once, with its term.
    pub(super) fn look<M: Memory>(
        &mut self,
        memory: &M,
        layout: &Layout,
        (endpoint, incarnation): (EndpointId, u64),
        obeyed: u64,
        now: Instant,
    ) -> Vec<(ReplicaId, u64)> {
        if now < self.due {
            return Vec::new();
        }
        self.due = now + LOOK_EVERY;
        let mut told = Vec::new();
        for replica in layout.replicas() {
            let grant = Grant::look(memory, layout.grant(replica, endpoint))
                .filter(|grant| grant.endpoint_incarnation == incarnation && grant.term < obeyed);
            let Some(grant) = grant else {
                self.seen.remove(&replica);
                continue;
            };
            let (life, beat) =
                (grant.controller_incarnation, read_beat(memory, layout.controller_heartbeat(replica)));
            match self.seen.get(&replica) {
                Some((known, None)) if *known == life => {}
                Some((known, Some(before))) if *known == life && *before != beat => {
                    told.push((replica, grant.term));
                    self.seen.insert(replica, (life, None));
                }
                _ => {
                    self.seen.insert(replica, (life, Some(beat)));
                }
            }
        }
        told
    }
}

impl<M: Memory> ControlThread<M> {
    /// Says who is not listened to, since someone else was obeyed before in a higher term.
    pub(super) fn name_unheard(&mut self, now: Instant) {
        let Some(session) = &self.session else { return };
        let (memory, layout, obeyed) = (&self.parts.memory, &self.parts.layout, session.grant.term);
        let (endpoint, incarnation) = (self.parts.endpoint, self.parts.incarnation);
        for (replica, term) in self.unheard.look(memory, layout, (endpoint, incarnation), obeyed, now) {
            tracing::warn!(
                %endpoint,
                "controller replica {replica} leads in term {term} and is not listened to: one of term {obeyed} was obeyed before. If its \
                 state was restored from a backup, start it again with this version"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use cxl_pool::simulated::SimulatedPool;
    use cxl_pool::{Generation, HostId, REGION_SLOTS_LEAST, Role};

    use super::*;
    use crate::liveness::write_beat;

    #[test]
    fn whoever_grants_in_vain_and_lives_is_named_once() {
        let size_bytes = 64 << 20;
        let pool = SimulatedPool::new(1, size_bytes);
        let layout = Layout::new(size_bytes, 4, 2, REGION_SLOTS_LEAST).expect("large enough");
        let memory = pool.host(HostId::new(1));
        let endpoint = EndpointId { host: HostId::new(1), role: Role::NetBackend };
        let replica = ReplicaId::new(1);
        let grant = |controller_incarnation, term| {
            let grant = Grant {
                endpoint_incarnation: 7,
                controller_incarnation,
                term,
                fence_generation: 0,
                control_generation: Generation::default(),
            };
            grant.publish(&memory, layout.grant(replica, endpoint));
        };
        let mut now = Instant::now();
        let (mut unheard, mut beat) = (Unheard::new(now), 0);
        let mut look = |beats: bool| {
            beat += u64::from(beats);
            write_beat(&memory, layout.controller_heartbeat(replica), beat);
            now += LOOK_EVERY;
            unheard.look(&memory, &layout, (endpoint, 7), 9, now)
        };
        assert_eq!(look(true), []);
        grant(3, 6);
        assert_eq!(look(true), [], "it may have been deposed just now");
        assert_eq!(look(false), [], "it is dead");
        assert_eq!(look(true), [(replica, 6)]);
        assert_eq!(look(true), [], "that was said");
        grant(4, 7);
        assert_eq!(look(true), []);
        assert_eq!(look(true), [(replica, 7)], "another life");
        grant(5, 9);
        assert_eq!(look(true), []);
        assert_eq!(look(true), [], "it is obeyed");
    }
}
