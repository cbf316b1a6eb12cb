//! One grant's worth of conversation with a controller.

use std::time::{Duration, Instant};

use cxl_channel::RequestId;
use cxl_channel::doorbell::Doorbell;
use cxl_pool::{EndpointId, Grant, Layout, Memory, ReplicaId};

use crate::answer::Answer;
use crate::link::Link;
use crate::protocol::Protocol;
use crate::reports::Report;
use crate::run_directory::RunDirectory;

/// How long a join may stay unanswered before it is sent again.
const JOIN_DEADLINE: Duration = Duration::from_secs(5);
/// How long a refused endpoint that holds something waits before it asks again.
const JOIN_AGAIN_AFTER: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Joining {
    /// To be sent at this time.
    Due(Instant),
    Asked(RequestId),
    Done,
}

pub(super) struct Session<M: Memory> {
    pub(super) replica: ReplicaId,
    pub(super) grant: Grant,
    pub(super) link: Link<M>,
    joining: Joining,
    told_all: bool,
}

impl<M: Memory> Session<M> {
    pub(super) fn new(
        memory: &M,
        layout: &Layout,
        endpoint: EndpointId,
        (replica, grant, protocol): (ReplicaId, Grant, Protocol),
        run: &RunDirectory,
        now: Instant,
    ) -> Self {
        let mut link = Link::open(
            memory,
            layout.ring_from_endpoint(replica, endpoint),
            layout.ring_to_endpoint(replica, endpoint),
            grant.control_generation,
            Doorbell::connect(&run.controller_doorbell(replica)),
            protocol,
        );
        // It has to accept the generation that we began.
        link.ring();
        Self { replica, grant, link, joining: Joining::Due(now), told_all: false }
    }

    /// Whether this is still the conversation that the grant is about.
    pub(super) fn belongs_to(&self, replica: ReplicaId, grant: &Grant) -> bool {
        self.replica == replica && self.grant == *grant
    }

    /// Whether the controller has accepted us.
    pub(super) fn joined(&self) -> bool {
        self.joining == Joining::Done
    }

    /// Whether the controller has told everything that is to be held.
    pub(super) fn told_all(&self) -> bool {
        self.told_all
    }

    /// The controller says that it has.
    pub(super) fn was_told_all(&mut self) {
        self.told_all = true;
    }

    /// Sends the join if it is due and both directions work.
    pub(super) fn advance(&mut self, join: &Report, now: Instant) {
        if !matches!(self.joining, Joining::Due(at) if at <= now) || !self.link.ready() {
            return;
        }
        self.joining = match self.link.request(join, now + JOIN_DEADLINE) {
            Ok(id) => Joining::Asked(id),
            Err(error) => {
                tracing::warn!(%error, "cannot ask the controller to join");
                Joining::Due(now + JOIN_AGAIN_AFTER)
            }
        };
    }

    /// An answer came. Returns what the controller says if it is the one to our join.
    pub(super) fn answered(&mut self, id: RequestId, answer: Answer, now: Instant) -> Option<Answer> {
        if self.joining != Joining::Asked(id) {
            return None;
        }
        self.joining = if answer.is_ok() { Joining::Done } else { Joining::Due(now + JOIN_AGAIN_AFTER) };
        Some(answer)
    }

    /// No answer came in time.
    pub(super) fn expired(&mut self, id: RequestId, now: Instant) {
        if self.joining == Joining::Asked(id) {
            tracing::debug!("the controller did not answer; asking again");
            self.joining = Joining::Due(now);
        }
    }
}
