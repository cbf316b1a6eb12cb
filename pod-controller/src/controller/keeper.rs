//! Where the controller's commits go.

use std::sync::Arc;

use pod_api::Event;
use pod_state::{Command, State};

use super::ControllerError;
use crate::replication::{Member, Proposer};
use crate::store::Store;
use crate::store::etcd::EtcdStore;

/// Keeps what is decided for good.
pub(crate) enum Keeper {
    /// In a file: there is one controller.
    File(Store),
    /// With a majority of several.
    Replicas(Proposer),
    /// In an etcd: there is one controller.
    Etcd(Box<EtcdStore>),
}

impl Keeper {
    /// Keeps commands and events for good, together. `first_event` and later ones are kept, older ones forgotten. What can be done
    /// `meanwhile` is done while others are waited for, where that is possible.
    pub(super) fn commit(
        &mut self,
        commands: &[(u64, &Command)],
        events: &[Event],
        first_event: u64,
        state: &State,
        meanwhile: Option<&mut dyn FnMut()>,
    ) -> Result<(), ControllerError> {
        match self {
            Self::File(store) => store.commit(commands, events, first_event, state, meanwhile)?,
            Self::Replicas(proposer) => proposer.commit(commands, events, state, meanwhile)?,
            Self::Etcd(store) => store.commit(commands, events, state)?,
        }
        Ok(())
    }

    /// Does what takes long and nobody waits for. All that follows from the state was done.
    pub(super) fn tidy(&mut self, state: &Arc<State>) {
        match self {
            Self::File(store) => store.tidy(state),
            // Each sees to its log itself.
            Self::Replicas(_) => {}
            Self::Etcd(store) => store.tidy(state),
        }
    }

    /// Makes certain that no other controller has taken over, or takes over now.
    pub(super) fn confirm(&self) -> Result<(), ControllerError> {
        match self {
            // Whoever has the file is the only one.
            Self::File(_) => {}
            Self::Replicas(proposer) => proposer.confirm()?,
            Self::Etcd(store) => store.confirm()?,
        }
        Ok(())
    }

    /// The replicas that have to understand what is kept.
    pub(super) fn voters(&self) -> Vec<Member> {
        match self {
            Self::Replicas(proposer) => proposer.voters(),
            Self::File(_) | Self::Etcd(_) => Vec::new(),
        }
    }

    /// Keeps the state that a pod begins with.
    pub(super) fn begin(&mut self, state: &State) -> Result<(), ControllerError> {
        match self {
            Self::File(store) => store.keep_snapshot(state)?,
            // They have begun before one of them leads.
            Self::Replicas(_) | Self::Etcd(_) => {}
        }
        Ok(())
    }

    /// Keeps the state that follows from other options.
    pub(super) fn configured(&mut self, command: &Command, state: &State) -> Result<(), ControllerError> {
        match self {
            Self::File(store) => store.keep_snapshot(state)?,
            Self::Replicas(proposer) => proposer.commit(&[(state.index, command)], &[], state, None)?,
            Self::Etcd(store) => store.commit(&[(state.index, command)], &[], state)?,
        }
        Ok(())
    }
}
