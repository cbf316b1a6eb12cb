//! What keeps leases from being used by VMMs.

#[cfg(test)]
use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::EndpointId;
use pod_state::{Lease, Part, Parts, Stale, State};

use super::{Known, Reconciler, Step, is_backend};
use crate::view::Waiting;

impl<Ticket: Copy + Ord> Reconciler<Ticket> {
    /// What keeps leases from being used by VMMs, as of when endpoints were told last.
    pub fn waiting(&self) -> Waiting {
        let mut all = Waiting::default();
        for Waiting { here, incoming } in self.waiting.values() {
            all.here.extend(here.iter().map(|(id, why)| (*id, why.clone())));
            all.incoming.extend(incoming.iter().map(|(id, why)| (*id, why.clone())));
        }
        all
    }

    /// Notes what leases wait for where that may have changed: what is stale at their frontends, what these have been told or have
    /// answered, and all of those that came or went.
    pub(super) fn note_waiting(&mut self, state: &State, touched: &Stale) {
        let mut parted = std::mem::take(&mut self.parted);
        match touched {
            Stale::Everyone => {
                let served = state.leases.values().flat_map(|lease| state.frontends_of(lease));
                parted.extend(self.waiting.keys().copied().chain(served).map(|id| (id, Parts::All)));
            }
            Stale::These(these) => {
                for (frontend, parts) in these.iter().filter(|(id, _)| !is_backend(**id)) {
                    parted.entry(*frontend).or_default().join(parts);
                }
            }
        }
        for (frontend, parts) in parted.into_iter().filter(|(id, _)| !is_backend(*id)) {
            let mut waiting = self.waiting.remove(&frontend).unwrap_or_default();
            match parts {
                Parts::All => {
                    waiting = Waiting::default();
                    for lease in state.leases_served_by(frontend) {
                        self.note(state, frontend, lease, &mut waiting);
                    }
                }
                Parts::These(parts) => {
                    for lease in parts.iter().filter_map(Part::lease) {
                        waiting.here.remove(&lease);
                        waiting.incoming.remove(&lease);
                        if let Some(lease) = state.leases.get(&lease) {
                            self.note(state, frontend, lease, &mut waiting);
                        }
                    }
                }
            }
            if waiting != Waiting::default() {
                self.waiting.insert(frontend, waiting);
            }
        }
    }

    /// Notes what a lease waits for at a frontend, if it is served there.
    fn note(&self, state: &State, frontend: EndpointId, lease: &Lease, waiting: &mut Waiting) {
        let (here, incoming) = (state.frontend_of(lease), state.incoming_frontend(lease));
        if ![here, incoming].contains(&Some(frontend)) {
            return;
        }
        let Some(why) = self.waiting_for(state, lease, frontend) else { return };
        if incoming == Some(frontend) {
            waiting.incoming.insert(lease.id, why.clone());
        }
        if here == Some(frontend) {
            waiting.here.insert(lease.id, why);
        }
    }

    /// What keeps a lease from being used by a VMM at this frontend; nothing if it can be.
    pub fn waiting_for(&self, state: &State, lease: &Lease, frontend: EndpointId) -> Option<String> {
        let name = state.endpoint_name(frontend);
        let Some(remote) = self.remotes.get(&frontend) else {
            return Some(format!("{name} to join"));
        };
        let offer = state.offer(lease);
        let wanted = remote.wanted.as_ref().and_then(|wanted| wanted.get(&offer));
        let object = wanted.filter(|_| state.is_reachable(lease, frontend));
        let Some(object) = object else {
            let backend = state.backends_of(lease).next().map(|backend| state.endpoint_name(backend));
            return Some(format!("a channel from {name} to {}", backend.unwrap_or_default()));
        };
        match remote.told.get(&offer) {
            Some(Known { object: known, step }) if known == object => match step {
                Step::Done => None,
                Step::Sent(_) => Some(format!("{name} to answer")),
                Step::Failed { reason, .. } => Some(format!("{name}, which says: {reason}")),
            },
            _ => match state.services(lease.id).first() {
                Some((backend, _)) => Some(format!("{} to answer", state.endpoint_name(*backend))),
                None => Some(format!("{name} to be told")),
            },
        }
    }

    /// What was kept is what is there.
    #[cfg(test)]
    pub(super) fn check_waiting(&self, state: &State) {
        let mut all: BTreeMap<EndpointId, Waiting> = BTreeMap::new();
        for lease in state.leases.values() {
            for frontend in state.frontends_of(lease) {
                self.note(state, frontend, lease, all.entry(frontend).or_default());
            }
        }
        all.retain(|_, waiting| *waiting != Waiting::default());
        let ids: BTreeSet<EndpointId> = self.waiting.keys().chain(all.keys()).copied().collect();
        for id in ids {
            assert_eq!(
                self.waiting.get(&id),
                all.get(&id),
                "it was not looked at what leases at {id} wait for"
            );
        }
    }
}
