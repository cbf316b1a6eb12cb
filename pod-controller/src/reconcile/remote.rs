//! What one endpoint should have, what it was told, and what became of that.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cxl_pool::{Area, EndpointId};
use pod_protocol::commands::{Command, Version};
use pod_protocol::controller::CommandFailure;
use pod_protocol::ids::RegionId;
use pod_protocol::objects::{Object, ObjectId};
use pod_state::{Objects, Parts, State};

use super::Answer;

/// How long to wait before an endpoint is told again what it refused.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// What became of something that was sent. `Ticket` names a command until it is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step<Ticket> {
    Sent(Ticket),
    Done,
    /// Without a time it is not told again before it connects anew.
    Failed {
        reason: String,
        retry_at: Option<Instant>,
    },
}

/// A region to flush, and whether that is to let go of it. A storage backend flushes the same one before it serves it.
pub(super) type Scrub = (RegionId, bool);

#[derive(Debug)]
pub(super) struct Known<Ticket> {
    pub(super) object: Object,
    pub(super) step: Step<Ticket>,
}

/// What a command was about.
#[derive(Clone, Debug)]
enum About {
    Apply(ObjectId),
    Remove(ObjectId),
    Scrub(Scrub),
    Synced,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Remote<Ticket> {
    /// What it should have, once that was looked up.
    pub(super) wanted: Option<Objects>,
    /// What it was told to have.
    pub(super) told: BTreeMap<ObjectId, Known<Ticket>>,
    /// What it was told to let go of, and may still have.
    leaving: BTreeMap<ObjectId, Step<Ticket>>,
    /// Of which it may not have what it should, or has yet to say that it does.
    open: BTreeSet<ObjectId>,
    /// What it should flush, unless that may be something else by now.
    flushes: Option<BTreeMap<Scrub, Area>>,
    scrubs: BTreeMap<Scrub, Step<Ticket>>,
    /// What has yet to be answered.
    sent: BTreeMap<Ticket, About>,
    /// Whether it was told that it has been told everything, upon which it lets go of what it was not told of.
    synced: Option<Step<Ticket>>,
    /// What it refused and how, so that it is told once.
    complaints: BTreeSet<(String, String)>,
}

impl<Ticket: Copy + Ord> Remote<Ticket> {
    /// One that has been told nothing.
    pub(super) const fn new() -> Self {
        Self {
            wanted: None,
            told: BTreeMap::new(),
            leaving: BTreeMap::new(),
            open: BTreeSet::new(),
            flushes: None,
            scrubs: BTreeMap::new(),
            sent: BTreeMap::new(),
            synced: None,
            complaints: BTreeSet::new(),
        }
    }

    /// Looks up what it should have now, where only these parts of it may be other ones than before.
    pub(super) fn look_up(&mut self, state: &State, endpoint: EndpointId, parts: &Parts) {
        self.flushes = None;
        match (&mut self.wanted, parts) {
            (Some(wanted), Parts::These(parts)) => {
                for part in parts {
                    self.open.extend(state.renew(endpoint, part, wanted));
                }
            }
            (wanted, _) => {
                let now = state.desired(endpoint);
                let before = wanted.take().unwrap_or_default();
                let other = now.iter().filter(|(id, object)| before.get(*id) != Some(*object));
                let gone = before.keys().filter(|id| !now.contains_key(*id));
                self.open.extend(other.map(|(id, _)| id).chain(gone).cloned());
                *wanted = Some(now);
            }
        }
    }

    /// Of which it may not have what it should, or has yet to say that it does.
    pub(super) const fn open(&self) -> &BTreeSet<ObjectId> {
        &self.open
    }

    /// What of that it should have.
    pub(super) fn missing(&self) -> impl Iterator<Item = (&ObjectId, &Object)> {
        self.wanted.iter().flat_map(|wanted| self.open.iter().filter_map(|id| wanted.get_key_value(id)))
    }

    /// What it may still have and should not have, or not like this.
    pub(super) fn outdated(&self) -> impl Iterator<Item = &ObjectId> {
        let wanted = |id| self.wanted.as_ref().and_then(|wanted| wanted.get(id));
        let told = self.open.iter().filter(move |id| {
            self.told.get(*id).is_some_and(|known| known.is_sent() || wanted(*id) != Some(&known.object))
        });
        told.chain(self.leaving.iter().filter(|(_, step)| step.is_sent()).map(|(id, _)| id))
    }

    /// Tells it what it has yet to be told, but for what is held back.
    pub(super) fn tell(
        &mut self,
        state: &State,
        endpoint: EndpointId,
        held: &BTreeSet<ObjectId>,
        (version, now): (Version, Instant),
        send: &mut impl FnMut(&Command) -> Ticket,
    ) {
        self.apply(held, version, now, send);
        self.remove(version, now, send);
        self.close();
        if !held.is_empty() {
            return;
        }
        // Nothing waits for its answer, but what is refused is tried again: it would be held for ever.
        if self.synced.as_ref().is_none_or(|step| step.is_due(now)) {
            let ticket = send(&Command::Synced { version });
            self.sent.insert(ticket, About::Synced);
            self.synced = Some(Step::Sent(ticket));
        }
        if !self.is_busy() {
            self.scrub(state, endpoint, version, now, send);
        }
    }

    fn apply(
        &mut self,
        held: &BTreeSet<ObjectId>,
        version: Version,
        now: Instant,
        send: &mut impl FnMut(&Command) -> Ticket,
    ) {
        let Some(wanted) = &self.wanted else { return };
        for id in self.open.iter().filter(|id| !held.contains(*id)) {
            let Some(object) = wanted.get(id) else { continue };
            let is_told =
                self.told.get(id).is_some_and(|known| known.object == *object && !known.step.is_due(now));
            if !is_told {
                let command = Command::Apply { version, object: object.clone() };
                let ticket = send(&command);
                self.sent.insert(ticket, About::Apply(id.clone()));
                let known = Known { object: object.clone(), step: Step::Sent(ticket) };
                self.told.insert(id.clone(), known);
            }
        }
    }

    /// Users before what they stand on: the reverse of the order in which things are applied.
    fn remove(&mut self, version: Version, now: Instant, send: &mut impl FnMut(&Command) -> Ticket) {
        let Some(wanted) = &self.wanted else { return };
        let (told, leaving) = (&mut self.told, &mut self.leaving);
        let mut remove = |id: &ObjectId| {
            let ticket = send(&Command::Remove { version, id: id.clone() });
            self.sent.insert(ticket, About::Remove(id.clone()));
            Step::Sent(ticket)
        };
        for id in self.open.iter().rev() {
            if wanted.contains_key(id) {
                leaving.remove(id);
            } else if told.remove(id).is_some() {
                leaving.insert(id.clone(), remove(id));
            }
        }
        for (id, step) in leaving.iter_mut().rev().filter(|(_, step)| step.is_due(now)) {
            *step = remove(id);
        }
    }

    /// Forgets of what is open what it has as it should, or will not take.
    fn close(&mut self) {
        let (wanted, told, leaving) = (self.wanted.as_ref(), &self.told, &self.leaving);
        self.open.retain(|id| match wanted.and_then(|wanted| wanted.get(id)) {
            Some(object) => told.get(id).is_none_or(|it| it.object != *object || !it.step.is_over()),
            None => told.contains_key(id) || leaving.get(id).is_some_and(|step| !step.is_over()),
        });
    }

    fn scrub(
        &mut self,
        state: &State,
        endpoint: EndpointId,
        version: Version,
        now: Instant,
        send: &mut impl FnMut(&Command) -> Ticket,
    ) {
        let flushes = self.flushes.get_or_insert_with(|| {
            let scrubs = state.scrubs(endpoint).into_iter();
            scrubs.map(|(region, area)| ((region, state.is_retired(region)), area)).collect()
        });
        self.scrubs.retain(|scrub, _| flushes.contains_key(scrub));
        for (scrub, area) in flushes {
            if self.scrubs.get(scrub).is_none_or(|step| step.is_due(now)) {
                let ticket = send(&Command::Scrub { version, region: scrub.0, area: *area });
                self.sent.insert(ticket, About::Scrub(*scrub));
                self.scrubs.insert(*scrub, Step::Sent(ticket));
            }
        }
    }

    /// Notes what became of a command.
    pub(super) fn answered(
        &mut self,
        ticket: Ticket,
        result: Result<(), CommandFailure>,
        now: Instant,
    ) -> Answer {
        let step = match &result {
            Ok(()) => Step::Done,
            Err(failure) => {
                let may_learn = !matches!(failure, CommandFailure::NotUnderstood(_));
                Step::Failed { reason: failure.to_string(), retry_at: may_learn.then_some(now + RETRY_AFTER) }
            }
        };
        let Some(about) = self.sent.remove(&ticket) else { return Answer::Fine };
        // It may have been told something else since, which has yet to be answered.
        let awaited = |known: &&mut Step<Ticket>| **known == Step::Sent(ticket);
        let (what, scrubbed) = match about {
            About::Apply(id) => {
                let known = self.told.get_mut(&id).map(|known| &mut known.step);
                let Some(known) = known.filter(awaited) else { return Answer::Fine };
                *known = step;
                (format!("apply {id}"), None)
            }
            About::Remove(id) => {
                let Some(known) = self.leaving.get_mut(&id).filter(awaited) else {
                    return Answer::Fine;
                };
                *known = step;
                if result.is_ok() {
                    self.leaving.remove(&id);
                }
                (format!("remove {id}"), None)
            }
            About::Scrub(scrub) => {
                let Some(known) = self.scrubs.get_mut(&scrub).filter(awaited) else {
                    return Answer::Fine;
                };
                *known = step;
                (format!("scrub {}", scrub.0), Some(scrub.0))
            }
            About::Synced => {
                let Some(known) = self.synced.as_mut().filter(awaited) else { return Answer::Fine };
                *known = step;
                ("remove what is not its own any more".to_owned(), None)
            }
        };
        match (result, scrubbed) {
            (Ok(()), Some(region)) => Answer::Scrubbed(region),
            (Ok(()), None) => Answer::Fine,
            (Err(failure), _) => {
                let reason = failure.to_string();
                if self.complaints.insert((what.clone(), reason.clone())) {
                    Answer::Refused { what, reason }
                } else {
                    Answer::Fine
                }
            }
        }
    }

    /// Whether it has yet to answer what came before a scrub.
    fn is_busy(&self) -> bool {
        let told = self.open.iter().filter_map(|id| self.told.get(id));
        told.map(|known| &known.step).chain(self.leaving.values()).any(Step::is_sent)
    }

    /// Whether it has answered everything, and has nothing to be told again after a while.
    pub(super) fn is_settled(&self) -> bool {
        self.synced.as_ref().is_some_and(Step::is_over)
            && self.open.is_empty()
            && self.flushes.is_some()
            && self.scrubs.values().chain(self.leaving.values()).all(Step::is_over)
    }

    /// When it is to be told something again.
    pub(super) fn next_retry(&self) -> Option<Instant> {
        let told = self.open.iter().filter_map(|id| self.told.get(id)).map(|known| &known.step);
        let steps = told.chain(self.leaving.values()).chain(self.scrubs.values()).chain(&self.synced);
        steps.filter_map(|step| if let Step::Failed { retry_at, .. } = step { *retry_at } else { None }).min()
    }

    /// Whether it was told to flush a region.
    #[cfg(test)]
    pub(super) fn scrubs(&self, region: RegionId) -> bool {
        self.scrubs.keys().any(|(known, _)| *known == region)
    }
}

impl<Ticket> Known<Ticket> {
    pub(super) const fn is_sent(&self) -> bool {
        self.step.is_sent()
    }
}

impl<Ticket> Step<Ticket> {
    const fn is_sent(&self) -> bool {
        matches!(self, Self::Sent(_))
    }

    /// Whether nothing more comes of it.
    const fn is_over(&self) -> bool {
        matches!(self, Self::Done | Self::Failed { retry_at: None, .. })
    }

    fn is_due(&self, now: Instant) -> bool {
        matches!(self, Self::Failed { retry_at: Some(retry_at), .. } if *retry_at <= now)
    }
}
