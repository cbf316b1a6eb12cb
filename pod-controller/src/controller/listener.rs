//! A world in which nothing happens but what a test says.

use std::collections::{BTreeSet, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use cxl_pool::EndpointId;
use pod_api::EventKind;
use pod_protocol::commands::{Command as Order, Version};
use pod_protocol::controller::{PortError, PortEvent};
use pod_protocol::ids::RegionId;
use pod_state::{Command, Effect, Refusal, Regions, State};

use super::handle::Sample;
use super::world::{Meanwhile, World};
use crate::balance::{BalancePolicy, LoadPicture};
use crate::reconcile::Reconciler;

/// Keeps what is told, and says what it was given.
#[derive(Default)]
pub(super) struct Listener {
    /// What happens at endpoints next.
    pub(super) events: VecDeque<PortEvent<u64, ()>>,
    pub(super) told: Vec<(EventKind, String, String)>,
    /// What somebody has said that is to be done.
    pub(super) policy: Option<BalancePolicy>,
    /// What is said that is done.
    pub(super) shown: Option<BalancePolicy>,
}

impl World for Listener {
    type Ticket = u64;
    type Request = ();
    type Reply = ();
    type Error = Infallible;

    fn poll(&mut self, _: Instant) -> Option<PortEvent<u64, ()>> {
        self.events.pop_front()
    }

    fn grant(&mut self, _: EndpointId) -> Result<(), PortError> {
        Ok(())
    }

    fn send(&mut self, _: EndpointId, _: &Order) -> u64 {
        0
    }

    fn let_hear(&mut self, _: EndpointId) {}

    fn answer(&mut self, (): (), _: Result<(), String>) {}

    fn fence(&mut self, _: EndpointId, _: u64) -> Result<Instant, PortError> {
        Ok(Instant::now())
    }

    fn commit(
        &mut self,
        _: &[(u64, &Command)],
        effects: &[Effect],
        _: &State,
        meanwhile: Option<Meanwhile<'_, u64>>,
    ) -> Result<(), Infallible> {
        if let Some(meanwhile) = meanwhile {
            meanwhile(&mut |_, _| 0);
        }
        for effect in effects {
            if let Effect::Event { kind, subject, message } = effect {
                self.told.push((*kind, subject.clone(), message.clone()));
            }
        }
        Ok(())
    }

    fn publish_regions(&mut self, _: Version, _: &Regions, _: Option<BTreeSet<RegionId>>) {}

    fn show(&mut self, _: Arc<State>, _: &Reconciler<u64>) {}

    fn reply(&mut self, (): (), answer: Result<(), Refusal>) {
        // Only tests are built with this world, and none of them wishes for what is refused.
        answer.expect("a wish that can be granted");
    }

    fn balance_policy(&self) -> Option<BalancePolicy> {
        self.policy
    }

    fn load(&mut self, picture: LoadPicture) {
        self.shown = Some(picture.policy);
    }

    fn sample(&mut self, _: EndpointId, _: Option<Sample>) {}
}
