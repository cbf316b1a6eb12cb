//! Who may write where, as the daemons see it, whatever is on its way.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{EndpointId, Role};
use pod_protocol::ids::LeaseId;

use super::daemon::Daemon;
use super::physical::Physical;

impl Physical {
    /// What a frontend sends to one place of a volume does not land in another one.
    pub(super) fn one_meaning(&mut self, lease: LeaseId) {
        let users: Vec<&Daemon> =
            self.users[&lease].iter().map(|id| &self.daemons[id]).filter(|it| it.alive).collect();
        let served: BTreeMap<_, _> = users.iter().flat_map(|backend| backend.serves(lease)).collect();
        let mut meant = users.iter().flat_map(|frontend| frontend.means(lease));
        let wrong = meant.find_map(|(name, ssd)| {
            served.get(&name).filter(|there| **there != ssd).map(|there| (ssd, there.clone()))
        });
        if let Some((ssd, there)) = wrong {
            self.blame(|| format!("what is sent to {ssd} for {lease} lands on {there}"));
        }
    }

    /// Whatever is on its way: only one frontend's messages are accepted, and only one NIC is the active one. The SSDs of a
    /// mirror learn one after the other that its instance has moved: each has one writer, and nothing is acknowledged to
    /// whom one of them refuses.
    pub(super) fn one_holder(&mut self, lease: LeaseId) {
        let users: Vec<&Daemon> =
            self.users[&lease].iter().map(|id| &self.daemons[id]).filter(|it| it.alive).collect();
        let mut writers: BTreeMap<Option<EndpointId>, BTreeSet<EndpointId>> = BTreeMap::new();
        let mut active = BTreeSet::new();
        for backend in &users {
            let place = (backend.id.role == Role::BlkBackend).then_some(backend.id);
            for (channel, generation, is_active) in backend.accepts(lease) {
                let at = backend.channel(channel);
                for frontend in users.iter().filter(|it| it.writes(lease).contains(&(channel, generation))) {
                    if at.is_some() && frontend.channel(channel) == at {
                        writers.entry(place).or_default().insert(frontend.id);
                    }
                }
                if is_active && !active.insert(generation) {
                    let id = backend.id;
                    self.violation
                        .get_or_insert(format!("{lease} is active twice with {generation:?}, at {id} too"));
                    return;
                }
            }
        }
        if let Some(writers) = writers.into_values().find(|writers| writers.len() > 1) {
            self.blame(|| format!("{lease} has two writers: {writers:?}"));
        }
    }
}
