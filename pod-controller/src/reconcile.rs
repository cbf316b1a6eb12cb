//! Makes every endpoint have what it should have: compares what the state wants with what was sent and confirmed, and
//! says the difference. It keeps nothing for good: an endpoint that connects, or a controller that starts, begins with
//! everything.
//!
//! Only endpoints that may have to be told something else are looked at, and those that have yet to be told or to answer.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cxl_pool::EndpointId;
use pod_protocol::commands::{Command, Version};
use pod_protocol::controller::CommandFailure;
use pod_protocol::ids::{LeaseId, RegionId};
use pod_protocol::objects::{Object, ObjectId};

use crate::state::{Lease, Objects, Presence, Stale, State};
use crate::view::Waiting;

/// How long to wait before an endpoint is told again what it refused.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// What became of something that was sent. `Ticket` names a command until it is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step<Ticket> {
    Sent(Ticket),
    Done,
    /// Without a time it is not told again before it connects anew.
    Failed {
        reason: String,
        retry_at: Option<Instant>,
    },
}

/// A region to flush, and whether that is to let go of it. A storage backend flushes the same one before it serves it.
type Scrub = (RegionId, bool);

#[derive(Debug)]
struct Known<Ticket> {
    object: Object,
    step: Step<Ticket>,
}

#[derive(Debug)]
struct Remote<Ticket> {
    /// What it should have, once that was looked up.
    wanted: Option<Objects>,
    objects: BTreeMap<ObjectId, Known<Ticket>>,
    leaving: BTreeMap<ObjectId, Step<Ticket>>,
    scrubs: BTreeMap<Scrub, Step<Ticket>>,
    synced: bool,
    /// What it refused and how, so that it is told once.
    complaints: BTreeSet<(String, String)>,
}

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
    /// Frontends of which that may have changed.
    parted: BTreeSet<EndpointId>,
}

impl<Ticket> Default for Reconciler<Ticket> {
    fn default() -> Self {
        Self {
            remotes: BTreeMap::new(),
            unsettled: BTreeSet::new(),
            waiting: BTreeMap::new(),
            parted: BTreeSet::new(),
        }
    }
}

impl<Ticket: Copy + Eq> Reconciler<Ticket> {
    /// An endpoint has joined, or has joined again: it is told everything.
    pub fn connected(&mut self, endpoint: EndpointId) {
        let remote = Remote {
            wanted: None,
            objects: BTreeMap::new(),
            leaving: BTreeMap::new(),
            scrubs: BTreeMap::new(),
            synced: false,
            complaints: BTreeSet::new(),
        };
        self.remotes.insert(endpoint, remote);
        self.unsettled.insert(endpoint);
    }

    /// An endpoint cannot be told anything any more.
    pub fn disconnected(&mut self, endpoint: EndpointId) {
        self.remotes.remove(&endpoint);
        self.unsettled.remove(&endpoint);
        self.parted.insert(endpoint);
    }

    /// Whether an endpoint can be told anything.
    pub fn is_connected(&self, endpoint: EndpointId) -> bool {
        self.remotes.contains_key(&endpoint)
    }

    /// Says to every endpoint what it has yet to be told, where others than these have nothing else to be told than before. Returns
    /// when to come again at the latest.
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
        for endpoint in &order {
            let endpoint = *endpoint;
            let changing: &BTreeSet<LeaseId> = if is_backend(endpoint) {
                &BTreeSet::new()
            } else {
                changing.get_or_insert_with(|| self.changing(state))
            };
            let held = self.held(state, endpoint, changing);
            let Some(remote) = self.remotes.get_mut(&endpoint) else { continue };
            let mut send = |command: &Command| send(endpoint, command);
            remote.apply(&held, version, now, &mut send);
            remote.remove(version, now, &mut send);
            if !remote.synced && held.is_empty() {
                // Whether it is obeyed shows in nothing that anybody waits for, so its answer is not awaited.
                send(&Command::Synced { version });
                remote.synced = true;
            }
            if held.is_empty() && !remote.is_busy() {
                let wanted = state.scrubs(endpoint).into_iter();
                let wanted =
                    wanted.map(|(region, area)| ((region, state.is_retired(region)), area)).collect();
                remote.scrub(&wanted, version, now, &mut send);
            }
            if held.is_empty() && remote.is_settled() {
                self.unsettled.remove(&endpoint);
            }
        }
        self.note_waiting(state, touched, &order);
        #[cfg(test)]
        self.check(state);
        self.unsettled.iter().filter_map(|it| self.remotes.get(it)?.next_retry()).min()
    }

    /// Looks up what endpoints should have that may be something else than before.
    fn look_up(&mut self, state: &State, touched: &Stale) {
        let new =
            self.unsettled.iter().filter(|it| self.remotes.get(it).is_some_and(|it| it.wanted.is_none()));
        let again: BTreeSet<EndpointId> = match touched {
            Stale::Everyone => self.remotes.keys().copied().collect(),
            Stale::These(these) => new.chain(these).copied().collect(),
        };
        for endpoint in again {
            if let Some(remote) = self.remotes.get_mut(&endpoint) {
                remote.wanted = Some(state.desired(endpoint));
                self.unsettled.insert(endpoint);
            }
        }
    }

    /// What an endpoint should have and must not be told yet.
    fn held(&self, state: &State, endpoint: EndpointId, changing: &BTreeSet<LeaseId>) -> BTreeSet<ObjectId> {
        let wanted = self.remotes.get(&endpoint).into_iter().flat_map(Remote::wanted);
        let held = wanted.filter(|(_, object)| {
            let waits_for_others = lease_served(object).is_some_and(|lease| changing.contains(&lease))
                && self.is_first_to_serve(endpoint, object);
            waits_for_others || self.must_wait(state, object)
        });
        held.map(|(id, _)| id.clone()).collect()
    }

    /// Notes what became of a command.
    pub fn answered(
        &mut self,
        endpoint: EndpointId,
        ticket: Ticket,
        result: Result<(), CommandFailure>,
        now: Instant,
    ) -> Answer {
        let Some(remote) = self.remotes.get_mut(&endpoint) else { return Answer::Fine };
        let step = match &result {
            Ok(()) => Step::Done,
            Err(failure) => {
                let may_learn = !matches!(failure, CommandFailure::NotUnderstood(_));
                Step::Failed { reason: failure.to_string(), retry_at: may_learn.then_some(now + RETRY_AFTER) }
            }
        };
        let sent = Step::Sent(ticket);
        let (what, scrubbed) =
            if let Some((id, known)) = remote.objects.iter_mut().find(|(_, known)| known.step == sent) {
                known.step = step;
                (format!("apply {id}"), None)
            } else if let Some(id) =
                remote.leaving.iter().find(|(_, step)| **step == sent).map(|(id, _)| id.clone())
            {
                let what = format!("remove {id}");
                match &result {
                    Ok(()) => remote.leaving.remove(&id),
                    Err(_) => remote.leaving.insert(id, step),
                };
                (what, None)
            } else if let Some(((id, _), known)) = remote.scrubs.iter_mut().find(|(_, step)| **step == sent) {
                *known = step;
                (format!("scrub {id}"), Some(*id))
            } else {
                return Answer::Fine;
            };
        match (result, scrubbed) {
            (Ok(()), Some(region)) => Answer::Scrubbed(region),
            (Ok(()), None) => Answer::Fine,
            (Err(failure), _) => {
                let reason = failure.to_string();
                if remote.complaints.insert((what.clone(), reason.clone())) {
                    Answer::Refused { what, reason }
                } else {
                    Answer::Fine
                }
            }
        }
    }

    /// What keeps leases from being used by VMMs, as of when endpoints were told last.
    pub fn waiting(&self) -> Waiting {
        let mut all = Waiting::default();
        for Waiting { here, incoming } in self.waiting.values() {
            all.here.extend(here.iter().map(|(id, why)| (*id, why.clone())));
            all.incoming.extend(incoming.iter().map(|(id, why)| (*id, why.clone())));
        }
        all
    }

    /// Notes what leases wait for where that may have changed: at frontends that are stale, that have been told something, or that
    /// are gone.
    fn note_waiting(&mut self, state: &State, touched: &Stale, told: &[EndpointId]) {
        let mut concerned = std::mem::take(&mut self.parted);
        concerned.extend(told);
        match touched {
            Stale::Everyone => {
                concerned.extend(self.waiting.keys());
                concerned.extend(state.leases.values().flat_map(|lease| state.frontends_of(lease)));
            }
            Stale::These(these) => concerned.extend(these),
        }
        for frontend in concerned.into_iter().filter(|id| !is_backend(*id)) {
            let waiting = self.waiting_at(state, frontend);
            if waiting == Waiting::default() {
                self.waiting.remove(&frontend);
            } else {
                self.waiting.insert(frontend, waiting);
            }
        }
    }

    fn waiting_at(&self, state: &State, frontend: EndpointId) -> Waiting {
        let mut waiting = Waiting::default();
        for lease in state.leases_served_by(frontend) {
            let Some(why) = self.waiting_for(state, lease, frontend) else { continue };
            if state.incoming_frontend(lease) == Some(frontend) {
                waiting.incoming.insert(lease.id, why.clone());
            }
            if state.frontend_of(lease) == Some(frontend) {
                waiting.here.insert(lease.id, why);
            }
        }
        waiting
    }

    /// What keeps a lease from being used by a VMM at this frontend; nothing if it can be.
    pub fn waiting_for(&self, state: &State, lease: &Lease, frontend: EndpointId) -> Option<String> {
        let name = state.endpoint_name(frontend);
        let Some(remote) = self.remotes.get(&frontend) else {
            return Some(format!("{name} to join"));
        };
        let offer = state.offer(lease);
        let wanted = remote.wanted.as_ref().and_then(|wanted| wanted.get(&offer));
        let object = wanted.filter(|_| state.is_reachable(lease));
        let Some(object) = object else {
            let backend = state.backends_of(lease).next().map(|backend| state.endpoint_name(backend));
            return Some(format!("a channel from {name} to {}", backend.unwrap_or_default()));
        };
        match remote.objects.get(&offer) {
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

    /// Whether a frontend must not be told yet: the backend that serves the lease is there and is being told, and
    /// until it has heard it would refuse what the frontend sends.
    fn must_wait(&self, state: &State, object: &Object) -> bool {
        let Some(lease) = lease_served(object) else { return false };
        state.services(lease).iter().any(|(backend, id)| self.is_being_told(state, *backend, id))
    }

    /// Leases of which some backend that hears may still accept what it should not. Somebody else may send it that.
    fn changing(&self, state: &State) -> BTreeSet<LeaseId> {
        let silent = |id| state.endpoints.get(id).is_some_and(|known| known.presence == Presence::Silent);
        let mut changing = BTreeSet::new();
        // The others have answered, and have what they should.
        for id in self.unsettled.iter().filter(|id| is_backend(**id) && !silent(id)) {
            let Some(remote) = self.remotes.get(id) else { continue };
            let Some(wanted) = &remote.wanted else { continue };
            for (object, known) in &remote.objects {
                if matches!(known.step, Step::Sent(_)) || wanted.get(object) != Some(&known.object) {
                    changing.extend(lease_accepted(object));
                }
            }
            let leaving = remote.leaving.iter().filter(|(_, step)| matches!(step, Step::Sent(_)));
            changing.extend(leaving.filter_map(|(object, _)| lease_accepted(object)));
        }
        changing
    }

    /// Whether a frontend would serve a lease that it does not serve yet, as far as is known. It may not be the only one
    /// that thinks so.
    fn is_first_to_serve(&self, frontend: EndpointId, object: &Object) -> bool {
        let known = self.remotes.get(&frontend).and_then(|remote| remote.objects.get(&object.id()));
        match known.map(|known| &known.object) {
            Some(Object::Port(port)) => port.incoming,
            Some(Object::Disk(disk)) => disk.incoming,
            _ => true,
        }
    }

    fn is_being_told(&self, state: &State, backend: EndpointId, id: &ObjectId) -> bool {
        if state.endpoints.get(&backend).is_some_and(|known| known.presence == Presence::Silent) {
            // It hears nothing, and a VMM that reconnects does not wait for ever.
            return false;
        }
        let Some(remote) = self.remotes.get(&backend) else { return false };
        let Some(object) = remote.wanted.as_ref().and_then(|wanted| wanted.get(id)) else { return false };
        match remote.objects.get(id) {
            Some(known) => known.object != *object || matches!(known.step, Step::Sent(_)),
            None => true,
        }
    }

    /// What was kept is what is there: whoever was not looked at had nothing else to be told.
    #[cfg(test)]
    fn check(&self, state: &State) {
        // A copy looks nothing up: it searches all of the pod.
        let copy = state.clone();
        for (endpoint, remote) in &self.remotes {
            assert_eq!(
                remote.wanted.as_ref(),
                Some(&copy.desired(*endpoint)),
                "{endpoint} was not looked at"
            );
            if !self.unsettled.contains(endpoint) {
                let scrubs = copy.scrubs(*endpoint).into_keys();
                let missing = scrubs.filter(|id| !remote.scrubs.keys().any(|(region, _)| region == id));
                assert_eq!(missing.count(), 0, "{endpoint} was not asked to flush");
            }
        }
        for lease in copy.leases.values() {
            for frontend in copy.frontends_of(lease) {
                let known = self.waiting.get(&frontend).and_then(|waiting| {
                    let here = copy.frontend_of(lease) == Some(frontend);
                    if here { waiting.here.get(&lease.id) } else { waiting.incoming.get(&lease.id) }
                });
                assert_eq!(known, self.waiting_for(&copy, lease, frontend).as_ref(), "{frontend}");
            }
        }
        let known = self.waiting.values().flat_map(|it| it.here.keys().chain(it.incoming.keys()));
        assert!(known.into_iter().all(|lease| copy.leases.contains_key(lease)), "a lease that is gone waits");
    }
}

impl<Ticket: Copy + Eq> Remote<Ticket> {
    fn wanted(&self) -> impl Iterator<Item = (&ObjectId, &Object)> {
        self.wanted.iter().flatten()
    }

    /// Tells it what it should have, but for what is held back.
    fn apply(
        &mut self,
        held: &BTreeSet<ObjectId>,
        version: Version,
        now: Instant,
        send: &mut impl FnMut(&Command) -> Ticket,
    ) {
        for (id, object) in self.wanted.iter().flatten().filter(|(id, _)| !held.contains(*id)) {
            let told =
                self.objects.get(id).is_some_and(|known| known.object == *object && !known.step.is_due(now));
            if !told {
                let object = object.clone();
                let ticket = send(&Command::Apply { version, object: object.clone() });
                self.objects.insert(id.clone(), Known { object, step: Step::Sent(ticket) });
            }
        }
    }

    /// Users before what they stand on: the reverse of the order in which things are applied.
    fn remove(&mut self, version: Version, now: Instant, send: &mut impl FnMut(&Command) -> Ticket) {
        let Some(wanted) = &self.wanted else { return };
        let unwanted: Vec<ObjectId> =
            self.objects.keys().filter(|id| !wanted.contains_key(id)).cloned().collect();
        for id in unwanted.into_iter().rev() {
            self.objects.remove(&id);
            let ticket = send(&Command::Remove { version, id: id.clone() });
            self.leaving.insert(id, Step::Sent(ticket));
        }
        self.leaving.retain(|id, _| !wanted.contains_key(id));
        for (id, step) in self.leaving.iter_mut().rev().filter(|(_, step)| step.is_due(now)) {
            *step = Step::Sent(send(&Command::Remove { version, id: id.clone() }));
        }
    }

    fn scrub(
        &mut self,
        wanted: &BTreeMap<Scrub, cxl_pool::Area>,
        version: Version,
        now: Instant,
        send: &mut impl FnMut(&Command) -> Ticket,
    ) {
        self.scrubs.retain(|scrub, _| wanted.contains_key(scrub));
        for (scrub, area) in wanted {
            if self.scrubs.get(scrub).is_none_or(|step| step.is_due(now)) {
                let ticket = send(&Command::Scrub { version, region: scrub.0, area: *area });
                self.scrubs.insert(*scrub, Step::Sent(ticket));
            }
        }
    }

    /// Whether it has yet to answer what came before a scrub.
    fn is_busy(&self) -> bool {
        let sent = |step: &Step<Ticket>| matches!(step, Step::Sent(_));
        self.objects.values().any(|known| sent(&known.step)) || self.leaving.values().any(sent)
    }

    /// Whether it has answered everything, and has nothing to be told again after a while.
    fn is_settled(&self) -> bool {
        let over = |step: &Step<Ticket>| matches!(step, Step::Done | Step::Failed { retry_at: None, .. });
        self.synced && self.steps().all(over)
    }

    fn steps(&self) -> impl Iterator<Item = &Step<Ticket>> {
        let objects = self.objects.values().map(|known| &known.step);
        objects.chain(self.leaving.values()).chain(self.scrubs.values())
    }

    fn next_retry(&self) -> Option<Instant> {
        self.steps()
            .filter_map(|step| if let Step::Failed { retry_at, .. } = step { *retry_at } else { None })
            .min()
    }
}

impl<Ticket> Step<Ticket> {
    fn is_due(&self, now: Instant) -> bool {
        matches!(self, Self::Failed { retry_at: Some(retry_at), .. } if *retry_at <= now)
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

/// The lease of which a backend's object makes it accept requests.
const fn lease_accepted(id: &ObjectId) -> Option<LeaseId> {
    match id {
        ObjectId::Registration { lease, .. } | ObjectId::Volume(lease) => Some(*lease),
        _ => None,
    }
}

const fn is_backend(endpoint: EndpointId) -> bool {
    matches!(endpoint.role, cxl_pool::Role::NetBackend | cxl_pool::Role::BlkBackend)
}

#[cfg(test)]
mod tests;
