use cxl_channel::RingPlacement;
use cxl_pool::EndpointId;
use pod_api::EventKind;

/// What has to happen outside once a command is committed. What endpoints should have is not among it: that is read
/// off the state, so that it does not matter whether an effect was lost with a controller that died.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Before the command is committed: clear a place that becomes a ring, so that leftovers of whoever had it before
    /// do not look like a generation. Nobody uses it yet, so nothing is lost if the commit fails. That is so for as long as whoever
    /// does it is the controller.
    Clear(RingPlacement),
    /// Tell a life of an endpoint, through the endpoint's fence line, that its grant is over.
    Fence {
        /// Which endpoint.
        endpoint: EndpointId,
        /// Which life. A newer one is not meant.
        incarnation: u64,
    },
    /// Tell whoever listens.
    Event {
        /// What happened.
        kind: EventKind,
        /// To what.
        subject: String,
        /// In words.
        message: String,
    },
}

impl Effect {
    /// The ring that is to be cleared, if that is it.
    pub const fn cleared(&self) -> Option<&RingPlacement> {
        if let Self::Clear(ring) = self { Some(ring) } else { None }
    }

    /// The endpoint that is to be fenced, if that is it.
    pub const fn fenced(&self) -> Option<EndpointId> {
        if let Self::Fence { endpoint, .. } = self { Some(*endpoint) } else { None }
    }

    pub(super) fn event(kind: EventKind, subject: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Event { kind, subject: subject.into(), message: message.into() }
    }
}
