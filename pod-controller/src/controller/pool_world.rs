//! The world as it is: a pool, a state file, and clients of the API.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use cxl_pool::regions::TableVersion;
use cxl_pool::{EndpointId, Layout, Memory, Record, ReplicaHello};
use pod_api::Event;
use pod_protocol::commands::{Command as Order, Version};
use pod_protocol::controller::{CommandId, ControllerPort, JoinRequest, PortError, PortEvent};
use pod_protocol::ids::RegionId;
use pod_protocol::protocol::Protocol;
use pod_state::{Command, Effect, Refusal, Regions, State};

use super::ControllerError;
use super::handle::{Reply, Sample, Shared, SubmitError};
use super::keeper::Keeper;
use super::region_table::RegionTable;
use super::world::{Meanwhile, World};
use crate::balance::{BalancePolicy, LoadPicture};
use crate::journal::told_of;
use crate::reconcile::Reconciler;
use crate::store::StoreError;
use crate::store::etcd::EtcdError;

pub(super) struct PoolWorld<M: Memory> {
    pub(super) port: ControllerPort<M>,
    pub(super) memory: M,
    pub(super) layout: Layout,
    pub(super) keeper: Keeper,
    pub(super) table: RegionTable,
    pub(super) shared: Arc<Shared>,
    /// Committed events whose outcome is not in the view yet: whoever hears of one finds it there.
    pub(super) unseen: Vec<Event>,
}

/// The time of day.
pub(super) fn time_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl<M: Memory> World for PoolWorld<M> {
    type Ticket = CommandId;
    type Request = JoinRequest;
    type Reply = Reply;
    type Error = ControllerError;

    fn poll(&mut self, now: Instant) -> Option<PortEvent> {
        self.port.poll(now)
    }

    /// A daemon that died counts until it is fenced, since it may come back as it was; so does a replica that votes.
    fn lowest_protocol(&self, state: &State) -> Option<Protocol> {
        let takes_part = |endpoint: EndpointId| {
            state.endpoints.get(&endpoint).is_some_and(|known| !known.presence.is_over())
        };
        let daemons = self.port.spoken().filter(|(endpoint, _, alive)| *alive || takes_part(*endpoint));
        let daemons = daemons.map(|(_, protocol, _)| protocol);
        let replicas = self.keeper.voters().into_iter().map(|voter| {
            if let Some(minor) = voter.outside {
                return Protocol::of_minor(minor);
            }
            let hello = ReplicaHello::look(&self.memory, self.layout.replica_hello(voter.replica));
            // One that has not been there since the pool was made: it may know as little as any.
            hello.map_or(Protocol::of_minor(0), |hello| hello.protocol.into())
        });
        // Of another major nobody takes part.
        let ours = self.port.protocol();
        daemons.chain(replicas).chain([ours]).filter(|it| it.major == ours.major).min()
    }

    fn grant(&mut self, endpoint: EndpointId) -> Result<(), PortError> {
        self.port.grant(endpoint)
    }

    fn send(&mut self, to: EndpointId, order: &Order) -> CommandId {
        self.port.send(to, order)
    }

    fn let_hear(&mut self, to: EndpointId) {
        self.port.let_hear(to);
    }

    fn answer(&mut self, request: JoinRequest, answer: Result<(), String>) {
        self.port.answer(request, answer);
    }

    fn fence(&mut self, endpoint: EndpointId, incarnation: u64) -> Result<Instant, PortError> {
        self.port.fence(endpoint, incarnation).map(|_| Instant::now())
    }

    /// Rings are cleared before the commit: nobody has them yet, and once it stands they count as made. Whoever was deposed and does
    /// not know it must not: where it would make a ring, its successor may have made something else that is in use.
    fn commit(
        &mut self,
        commands: &[(u64, &Command)],
        effects: &[Effect],
        state: &State,
        meanwhile: Option<Meanwhile<'_, CommandId>>,
    ) -> Result<(), ControllerError> {
        // Whoever has its slot of the pool instead decides instead.
        self.port.check()?;
        let time_ms = time_ms();
        let last = self.unseen.last().map_or_else(|| self.shared.journal.last(), |event| event.sequence);
        let mut events = told_of(effects, last, time_ms);
        let rings: Vec<_> = effects.iter().filter_map(Effect::cleared).collect();
        if !rings.is_empty() {
            self.keeper.confirm()?;
        }
        for ring in rings {
            ring.clear(&self.memory);
        }
        let first = self.shared.journal.first_after(self.unseen.len() + events.len());
        let port = &mut self.port;
        let mut meanwhile = meanwhile.map(|queue| || queue(&mut |to, order| port.send(to, order)));
        let meanwhile = meanwhile.as_mut().map(|it| it as &mut dyn FnMut());
        self.keeper.commit(commands, &events, first, state, meanwhile)?;
        self.unseen.append(&mut events);
        Ok(())
    }

    fn publish_regions(&mut self, version: Version, regions: &Regions, changed: Option<BTreeSet<RegionId>>) {
        let version = TableVersion { term: version.term, index: version.index };
        self.table.publish(&self.memory, version, regions, changed);
    }

    fn show(&mut self, state: Arc<State>, reconciler: &Reconciler<CommandId>) {
        // Whoever is concerned was told: the log can wait, and they could not.
        for event in &self.unseen {
            tracing::info!(subject = event.subject, "{}: {}", event.kind.word(), event.message);
        }
        self.shared.show(Arc::clone(&state), reconciler.waiting(), std::mem::take(&mut self.unseen));
        self.keeper.tidy(&state);
    }

    fn reply(&mut self, to: Self::Reply, answer: Result<(), Refusal>) {
        // A client that went away needs no answer.
        let _ = to.send(answer.map_err(SubmitError::Refused));
    }

    fn reply_lost(&mut self, to: Self::Reply, error: &ControllerError) {
        if let ControllerError::Store(StoreError::Etcd(error @ EtcdError::Away { open: false, .. })) = error {
            // A client that went away needs no answer.
            let _ = to.send(Err(SubmitError::StoreAway(error.to_string())));
        }
    }

    fn balance_policy(&self) -> Option<BalancePolicy> {
        Some(*self.shared.balance())
    }

    fn load(&mut self, picture: LoadPicture) {
        *self.shared.load() = picture;
    }

    fn sample(&mut self, endpoint: EndpointId, sample: Option<Sample>) {
        self.shared.not_understood.store(self.port.not_understood(), Ordering::Relaxed);
        let mut samples = self.shared.telemetry();
        match sample {
            Some(sample) => samples.insert(endpoint, sample),
            None => samples.remove(&endpoint),
        };
    }
}
