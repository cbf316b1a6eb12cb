//! What a controller sees and touches of its pod, its store and its clients.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use cxl_pool::EndpointId;
use pod_protocol::commands::{Command as Order, Version};
use pod_protocol::controller::{PortError, PortEvent};
use pod_protocol::ids::RegionId;
use pod_protocol::protocol::Protocol;
use pod_state::{Command, Effect, Refusal, Regions, State};

use super::handle::Sample;
use crate::balance::{BalancePolicy, LoadPicture};
use crate::reconcile::Reconciler;

/// Something that can be done once, by whoever only waits. With what it is given, as with [`World::send`], it queues what endpoints are to be
/// told; they must not hear of it before what was decided is kept.
pub type Meanwhile<'a, Ticket> = &'a mut dyn FnMut(&mut dyn FnMut(EndpointId, &Order) -> Ticket);

/// Everything around the [conductor](super::conductor::Conductor).
pub trait World {
    /// Names an order to an endpoint until it is answered.
    type Ticket: Copy + Ord;
    /// Names a join until it is answered.
    type Request;
    /// Where to answer a wish.
    type Reply;
    /// Why nothing can be kept any more.
    type Error;

    /// What happened at an endpoint next.
    fn poll(&mut self, now: Instant) -> Option<PortEvent<Self::Ticket, Self::Request>>;
    /// The lowest version that any member of the pod speaks: this controller, those that vote with it, the daemons. None where
    /// that cannot be told now.
    fn lowest_protocol(&self, _state: &State) -> Option<Protocol> {
        None
    }
    /// Lets an endpoint join.
    fn grant(&mut self, endpoint: EndpointId) -> Result<(), PortError>;
    /// Queues something that an endpoint is told to do.
    fn send(&mut self, to: EndpointId, order: &Order) -> Self::Ticket;
    /// Has an endpoint hear what was queued for it.
    fn let_hear(&mut self, to: EndpointId);
    /// Answers a join.
    fn answer(&mut self, request: Self::Request, answer: Result<(), String>);
    /// Takes back everything from this life of an endpoint, and nothing from a newer one. Says since when it can be seen there.
    fn fence(&mut self, endpoint: EndpointId, incarnation: u64) -> Result<Instant, PortError>;
    /// Clears new rings, then keeps commands and events for good. There may be something that would take long afterwards.
    fn commit(
        &mut self,
        commands: &[(u64, &Command)],
        effects: &[Effect],
        state: &State,
        meanwhile: Option<Meanwhile<'_, Self::Ticket>>,
    ) -> Result<(), Self::Error>;
    /// Shows the regions to whoever looks at the pool without a controller.
    /// These may have changed since it was asked to before; without that, all.
    fn publish_regions(&mut self, version: Version, regions: &Regions, changed: Option<BTreeSet<RegionId>>);
    /// Shows the state to whoever asks, after all who are concerned were told: what takes long is done now.
    fn show(&mut self, state: Arc<State>, reconciler: &Reconciler<Self::Ticket>);
    /// Answers a wish.
    fn reply(&mut self, to: Self::Reply, answer: Result<(), Refusal>);
    /// Answers a wish that could not be kept.
    fn reply_lost(&mut self, _to: Self::Reply, _error: &Self::Error) {}
    /// What is to be done about loads from now on, if somebody has said so.
    fn balance_policy(&self) -> Option<BalancePolicy> {
        None
    }
    /// What passes through NICs.
    fn load(&mut self, _picture: LoadPicture) {}
    /// An endpoint's last telemetry, or that it has none any more.
    fn sample(&mut self, endpoint: EndpointId, sample: Option<Sample>);
}
