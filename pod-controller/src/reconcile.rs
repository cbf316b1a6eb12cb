//! Makes every endpoint have what it should have: compares what the state wants with what was sent and confirmed, and
//! says the difference. It keeps nothing for good: an endpoint that connects, or a controller that starts, begins with
//! everything.
//!
//! Only what endpoints may have to be told otherwise is looked at, and what they have yet to be told or to answer.

mod remote;
mod waiting;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use cxl_pool::EndpointId;
use pod_protocol::commands::{Command, Version};
use pod_protocol::controller::CommandFailure;
use pod_protocol::ids::{LeaseId, PlaceId, RegionId};
use pod_protocol::objects::{Object, ObjectId, RegistrationState};
use pod_state::{Part, Parts, Presence, Stale, State};

use self::remote::{Known, Remote, Step};
use crate::view::Waiting;

/// What an answer meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// As hoped for.
    Fine,
    /// The endpoint has let go of this region.
    Scrubbed(RegionId),
    /// It refused, for the first time with these words.
    Refused {
        /// What it was told to do.
        what: String,
        /// What it says.
        reason: String,
    },
}

/// See the [module](self).
#[derive(Debug)]
pub struct Reconciler<Ticket> {
    remotes: BTreeMap<EndpointId, Remote<Ticket>>,
    /// Those that have yet to be told something, or to answer.
    unsettled: BTreeSet<EndpointId>,
    /// By frontend: what keeps VMMs from its leases.
    waiting: BTreeMap<EndpointId, Waiting>,
    /// Of which leases of which frontends that may have changed.
    parted: BTreeMap<EndpointId, Parts>,
}

impl<Ticket> Default for Reconciler<Ticket> {
    fn default() -> Self {
        Self {
            remotes: BTreeMap::new(),
            unsettled: BTreeSet::new(),
            waiting: BTreeMap::new(),
            parted: BTreeMap::new(),
        }
    }
}

impl<Ticket: Copy + Ord> Reconciler<Ticket> {
    /// An endpoint has joined, or has joined again: it is told everything.
    pub fn connected(&mut self, endpoint: EndpointId) {
        self.remotes.insert(endpoint, Remote::new());
        self.unsettled.insert(endpoint);
        self.parted.insert(endpoint, Parts::All);
    }

    /// An endpoint cannot be told anything any more.
    pub fn disconnected(&mut self, endpoint: EndpointId) {
        self.remotes.remove(&endpoint);
        self.unsettled.remove(&endpoint);
        self.parted.insert(endpoint, Parts::All);
    }

    /// Whether an endpoint can be told anything.
    pub fn is_connected(&self, endpoint: EndpointId) -> bool {
        self.remotes.contains_key(&endpoint)
    }

    /// Says to every endpoint what it has yet to be told, where only what is stale may have to be told otherwise than before.
    /// Returns when to come again at the latest.
    pub fn pump(
        &mut self,
        state: &State,
        touched: &Stale,
        version: Version,
        now: Instant,
        send: &mut impl FnMut(EndpointId, &Command) -> Ticket,
    ) -> Option<Instant> {
        self.look_up(state, touched);
        // Backends first: what a frontend is told may have to wait for them.
        let mut order: Vec<EndpointId> = self.unsettled.iter().copied().collect();
        order.sort_by_key(|endpoint| !is_backend(*endpoint));
        let mut changing = None;
        for endpoint in order {
            let held = if is_backend(endpoint) {
                self.still_needed(state, endpoint)
            } else {
                self.held(state, endpoint, &mut changing)
            };
            let Some(remote) = self.remotes.get_mut(&endpoint) else { continue };
            if !is_backend(endpoint) {
                let parted = self.parted.entry(endpoint).or_default();
                remote.open().iter().filter_map(lease_offered).for_each(|it| parted.add(Part::Lease(it)));
            }
            remote.tell(state, endpoint, &held, (version, now), &mut |command| send(endpoint, command));
            if held.is_empty() && remote.is_settled() {
                self.unsettled.remove(&endpoint);
            }
        }
        self.note_waiting(state, touched);
        #[cfg(test)]
        self.check(state);
        self.unsettled.iter().filter_map(|it| self.remotes.get(it)?.next_retry()).min()
    }

    /// Looks up what endpoints should have that may be something else than before.
    fn look_up(&mut self, state: &State, touched: &Stale) {
        let everyone;
        let parts = match touched {
            Stale::Everyone => {
                everyone = self.remotes.keys().map(|id| (*id, Parts::All)).collect();
                &everyone
            }
            Stale::These(these) => these,
        };
        for (endpoint, parts) in parts {
            if let Some(remote) = self.remotes.get_mut(endpoint) {
                remote.look_up(state, *endpoint, parts);
                self.unsettled.insert(*endpoint);
            }
        }
        for endpoint in &self.unsettled {
            if let Some(remote) = self.remotes.get_mut(endpoint).filter(|remote| remote.wanted.is_none()) {
                remote.look_up(state, *endpoint, &Parts::All);
            }
        }
    }

    /// What an endpoint should have, does not have yet, and must not be told yet.
    ///
    /// `changing` are the leases that are [changing](Self::changing), once they were asked for. Mostly nobody does: of what is moved from
    /// one NIC to another the frontend stays.
    fn held(
        &self,
        state: &State,
        endpoint: EndpointId,
        changing: &mut Option<BTreeSet<LeaseId>>,
    ) -> BTreeSet<ObjectId> {
        let missing = self.remotes.get(&endpoint).into_iter().flat_map(Remote::missing);
        let held = missing.filter(|(id, object)| {
            let new = lease_served(object).filter(|_| self.is_first_to_serve(endpoint, id));
            let waits_for_others =
                new.is_some_and(|it| changing.get_or_insert_with(|| self.changing(state)).contains(&it));
            waits_for_others || self.must_wait(state, object) && !self.takes_over(endpoint, object)
        });
        held.map(|(id, _)| id.clone()).collect()
    }

    /// What a backend must not be told yet: that a lease leaves one of its NICs, as long as what it moves to may not serve it. Whoever hears
    /// first would decide otherwise whether the instance gets the broadcast and multicast frames of that moment: twice, of which its
    /// frontend drops one, or not at all.
    fn still_needed(&self, state: &State, endpoint: EndpointId) -> BTreeSet<ObjectId> {
        let missing = self.remotes.get(&endpoint).into_iter().flat_map(Remote::missing);
        let left = missing.filter_map(|(id, object)| Some((id, lease_left(object)?)));
        let needed = left.filter(|(_, lease)| {
            self.is_yet_to_be_served(state, *lease) || self.is_yet_to_be_received(state, *lease)
        });
        needed.map(|(id, _)| id.clone()).collect()
    }

    /// Notes what became of a command.
    pub fn answered(
        &mut self,
        endpoint: EndpointId,
        ticket: Ticket,
        result: Result<(), CommandFailure>,
        now: Instant,
    ) -> Answer {
        self.remotes.get_mut(&endpoint).map_or(Answer::Fine, |remote| remote.answered(ticket, result, now))
    }

    /// Whether a frontend had better not be told yet: the backend that serves the lease is there and is being told, and
    /// until it has heard it would refuse what the frontend sends.
    fn must_wait(&self, state: &State, object: &Object) -> bool {
        lease_served(object).is_some_and(|lease| self.is_yet_to_be_served(state, lease))
    }

    /// Whether a backend that is to serve a lease is there and is being told.
    fn is_yet_to_be_served(&self, state: &State, lease: LeaseId) -> bool {
        state.services(lease).iter().any(|(backend, id)| self.is_being_told(state, *backend, id))
    }

    /// Whether the frontend that serves a NIC's lease is there and is being told of a change of it. Of a channel that is new with that,
    /// nothing comes out before it has heard: the backend at its other end drops what it would send.
    ///
    /// One that does not serve it yet may itself wait until others have left it, and nobody awaits frames there.
    fn is_yet_to_be_received(&self, state: &State, lease: LeaseId) -> bool {
        let frontend = state.leases.get(&lease).and_then(|lease| state.frontend_of(lease));
        let port = ObjectId::Port(lease);
        frontend.is_some_and(|frontend| {
            !self.is_first_to_serve(frontend, &port) && self.is_being_told(state, frontend, &port)
        })
    }

    /// Whether a frontend is to go on over the NIC that stood by, since the one in use is lost. Each round trip until it hears of that is one
    /// more in which nothing passes. The backend there has the lease already, and gives back what comes before it has heard that the lease
    /// has moved: the frontend sends that again. Where a lease moves although its NIC works, nothing is lost by waiting; and where it uses
    /// several NICs, the others carry it.
    fn takes_over(&self, frontend: EndpointId, object: &Object) -> bool {
        let told = self.remotes.get(&frontend).and_then(|remote| remote.told.get(&object.id()));
        let Some((Object::Port(before), Object::Port(port))) = told.map(|it| (&it.object, object)) else {
            return false;
        };
        let is_served = !before.incoming && !port.incoming;
        let stood_by = before.standby.is_some_and(|standby| standby.channel == port.active.channel);
        is_served
            && stood_by
            && port.active.generation != before.active.generation
            && port.draining.is_none()
            && before.rails.is_empty()
            && port.rails.is_empty()
    }

    /// Leases of which some backend that hears may still accept what it should not. Somebody else may send it that.
    fn changing(&self, state: &State) -> BTreeSet<LeaseId> {
        let silent = |id| state.endpoints.get(id).is_some_and(|known| known.presence == Presence::Silent);
        // The others have answered, and have what they should.
        let backends = self.unsettled.iter().filter(|id| is_backend(**id) && !silent(id));
        let outdated = backends.filter_map(|id| self.remotes.get(id)).flat_map(Remote::outdated);
        outdated.filter_map(lease_accepted).collect()
    }

    /// Whether a frontend would serve a lease that it does not serve yet, as far as is known. It may not be the only one
    /// that thinks so.
    fn is_first_to_serve(&self, frontend: EndpointId, id: &ObjectId) -> bool {
        let known = self.remotes.get(&frontend).and_then(|remote| remote.told.get(id));
        match known.map(|known| &known.object) {
            Some(Object::Port(port)) => port.incoming,
            Some(Object::Disk(disk)) => disk.incoming,
            _ => true,
        }
    }

    fn is_being_told(&self, state: &State, endpoint: EndpointId, id: &ObjectId) -> bool {
        if state.endpoints.get(&endpoint).is_some_and(|known| known.presence == Presence::Silent) {
            // It hears nothing, and a VMM that reconnects does not wait for ever.
            return false;
        }
        let Some(remote) = self.remotes.get(&endpoint) else { return false };
        let Some(object) = remote.wanted.as_ref().and_then(|wanted| wanted.get(id)) else { return false };
        match remote.told.get(id) {
            Some(known) => known.object != *object || known.is_sent(),
            None => true,
        }
    }

    /// What was kept is what is there. In a large pod not all of it is looked at each time, which would take as long as there are
    /// endpoints times leases: a few endpoints are, after every so many turns, the fewer the more there is of both.
    #[cfg(test)]
    fn check(&self, state: &State) {
        let parts = (self.remotes.len() + state.leases.len() / 4).div_ceil(24).max(1) as u64;
        if !state.index.is_multiple_of(parts) {
            return;
        }
        let part = state.index / parts % parts;
        // A copy looks nothing up: it searches all of the pod.
        let copy = state.clone();
        for (endpoint, remote) in
            (0..).zip(&self.remotes).filter(|(number, _)| number % parts == part).map(|it| it.1)
        {
            let wanted = copy.desired(*endpoint);
            assert_eq!(remote.wanted.as_ref(), Some(&wanted), "{endpoint} was not looked at");
            let open = |id: &ObjectId| remote.open().contains(id);
            let missing = wanted.iter().filter(|(id, object)| {
                !open(id)
                    && remote.told.get(*id).is_none_or(|known| known.object != **object || known.is_sent())
            });
            assert_eq!(missing.count(), 0, "{endpoint} has yet to be told, and nobody knows");
            let unwanted = remote.told.keys().filter(|id| !open(id) && !wanted.contains_key(*id));
            assert_eq!(unwanted.count(), 0, "{endpoint} has what it should not, and nobody knows");
            if !self.unsettled.contains(endpoint) {
                let missing = copy.scrubs(*endpoint).into_keys().filter(|id| !remote.scrubs(*id));
                assert_eq!(missing.count(), 0, "{endpoint} was not asked to flush");
            }
        }
        self.check_waiting(&copy);
    }
}

/// The lease that a frontend's object lets it serve.
const fn lease_served(object: &Object) -> Option<LeaseId> {
    match object {
        Object::Port(port) => Some(port.lease),
        Object::Disk(disk) => Some(disk.lease),
        _ => None,
    }
}

/// The lease that leaves a NIC in order, of which this is its backend's object.
fn lease_left(object: &Object) -> Option<LeaseId> {
    match object {
        Object::Registration(it) if it.state == RegistrationState::Draining => Some(it.lease),
        _ => None,
    }
}

/// The lease of which a backend's object makes it accept requests.
const fn lease_accepted(id: &ObjectId) -> Option<LeaseId> {
    match id {
        ObjectId::Registration { lease, .. } | ObjectId::Volume(PlaceId { lease, .. }) => Some(*lease),
        _ => None,
    }
}

/// The lease that a frontend's object offers to VMMs.
const fn lease_offered(id: &ObjectId) -> Option<LeaseId> {
    match id {
        ObjectId::Port(lease) | ObjectId::Disk(lease) => Some(*lease),
        _ => None,
    }
}

const fn is_backend(endpoint: EndpointId) -> bool {
    matches!(endpoint.role, cxl_pool::Role::NetBackend | cxl_pool::Role::BlkBackend)
}

#[cfg(test)]
mod tests;
