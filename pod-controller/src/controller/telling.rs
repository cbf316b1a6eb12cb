//! Keeping what was decided, and telling whoever is concerned.
//!
//! Nobody may hear of anything that is not kept. But to find out what everybody is to be told takes as long as a disk, or a majority, takes
//! to keep it; so that is done meanwhile, and what was kept is heard of at once.

use std::time::Instant;

use cxl_pool::EndpointId;
use pod_protocol::commands::Command as Order;
use pod_state::{Command, Effect, Stale};

use super::conductor::Conductor;
use super::inbox::{Decided, Waiting};
use super::world::{Meanwhile, World};

/// Of how many parts of endpoints' objects it takes about as long to look them up as to start a thread: each takes somewhat less than
/// a microsecond.
const PARTS_AHEAD_LEAST: usize = 32;

/// Those for whom something is queued, in the order in which they are to hear it.
#[derive(Debug, Default)]
pub(super) struct Told(Vec<EndpointId>);

impl Told {
    /// Something was queued for this one. Returns who has been told everything, therefore.
    fn note(&mut self, to: EndpointId) -> Option<EndpointId> {
        let before = self.0.last().copied();
        if before == Some(to) {
            return None;
        }
        self.0.push(to);
        before
    }
}

impl<W: World> Decided<W> {
    /// Whether all that is told of it follows from the state alone: not from who comes, or has to go, once it is kept.
    fn can_be_told_ahead(&self) -> bool {
        let fences = self.effects.iter().any(|effect| matches!(effect, Effect::Fence { .. }));
        let joins = self.answers.iter().any(|(waiting, _)| matches!(waiting, Waiting::Join { .. }));
        !fences && !joins
    }
}

/// Says of a closure that it is one for [`Meanwhile`], which the compiler does not find out in an `Option`.
fn queuing<Ticket, F: FnMut(&mut dyn FnMut(EndpointId, &Order) -> Ticket)>(tell: F) -> F {
    tell
}

impl<W: World> Conductor<W> {
    /// Commits what was decided, and queues what is to be told, if that is much. Where it cannot be kept, this life of the controller is over: it
    /// knows more than is kept, and what is queued is never sent.
    pub(crate) fn keep(&mut self, decided: &mut Decided<W>, now: Instant) -> Result<(), W::Error> {
        // Of what was kept when this life began, before there was anybody to tell, nothing is let out.
        self.told_ahead = None;
        if !decided.is_worth_a_commit() {
            return Ok(());
        }
        let commands: Vec<(u64, &Command)> =
            decided.logged.iter().map(|(index, command)| (*index, command)).collect();
        let version = self.version();
        let (state, reconciler, ahead) = (&self.state, &mut self.reconciler, &mut self.told_ahead);
        let touched = state.stale().filter(|touched| {
            decided.can_be_told_ahead() && touched.parts().is_none_or(|parts| parts >= PARTS_AHEAD_LEAST)
        });
        let mut tell = touched.map(|touched| {
            queuing(move |queue| {
                let told = ahead.insert(Told::default());
                reconciler.pump(state, touched, version, now, &mut |to, order| {
                    told.note(to);
                    queue(to, order)
                });
            })
        });
        let meanwhile = tell.as_mut().map(|it| it as Meanwhile<'_, W::Ticket>);
        self.world.commit(&commands, &decided.effects, state, meanwhile).inspect_err(|error| {
            for (waiting, _) in std::mem::take(&mut decided.answers) {
                if let Waiting::Api(reply) = waiting {
                    self.world.reply_lost(reply, error);
                }
            }
        })
    }

    /// Lets out what was decided and is kept. Returns when something is due next.
    pub(crate) fn let_out(&mut self, decided: Decided<W>, now: Instant) -> Option<Instant> {
        if decided.is_worth_a_commit() {
            self.stale = true;
            if decided.regions_changed {
                self.publish_regions();
            }
            for to in self.told_ahead.iter().flat_map(|told| &told.0) {
                self.world.let_hear(*to);
            }
            for effect in &decided.effects {
                self.act(effect);
            }
        }
        for (waiting, answer) in decided.answers {
            self.answer(waiting, answer, now);
        }
        self.show(now);
        self.watch_absent(now);
        self.watch_drains(now);
        let dues = self.fences.values().chain(self.graces.values()).map(|(_, due)| *due);
        // Backups are chosen as soon as the failover before has been told.
        let backups = self.state.lacks_backups().then_some(now);
        dues.chain(backups).chain(self.retry_at).chain(self.next_of_links()).min()
    }

    /// Tells endpoints what they should have and have not been told yet, and others what is known.
    pub(super) fn show(&mut self, now: Instant) {
        if !std::mem::take(&mut self.stale) {
            return;
        }
        let (version, mut touched) = (self.version(), self.state.take_stale());
        if self.told_ahead.take().is_some() {
            touched = Stale::default();
        }
        let (world, mut told) = (&mut self.world, Told::default());
        // Each hears of it as soon as it has been told everything, and not when all have.
        self.retry_at = self.reconciler.pump(&self.state, &touched, version, now, &mut |to, order| {
            if let Some(before) = told.note(to) {
                world.let_hear(before);
            }
            world.send(to, order)
        });
        if let Some(last) = told.0.last() {
            world.let_hear(*last);
        }
        let shown = self.shadow.of(&mut self.state);
        self.world.show(shown, &self.reconciler);
    }
}
