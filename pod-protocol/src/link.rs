//! One end of the control connection between an endpoint and a controller: JSON in an exchange over two rings.

use std::time::Instant;

use cxl_channel::doorbell::Doorbell;
use cxl_channel::{Exchange, ExchangeError, Incoming, Receiver, RequestId, RingPlacement, Sender, Wake};
use cxl_pool::{Area, CONTROL_RING_SLOTS, Generation, Memory};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::answer::Answer;
use crate::protocol::Protocol;

/// Words of a control message.
const WORDS: usize = 8;

pub(crate) struct Link<M: Memory> {
    exchange: Exchange<M>,
    doorbell: Doorbell,
    protocol: Protocol,
}

impl<M: Memory> Link<M> {
    /// Begins a generation of our ring, and opens the peer's, with whom this version is spoken.
    pub(crate) fn open(
        memory: &M,
        outgoing: Area,
        incoming: Area,
        generation: Generation,
        doorbell: Doorbell,
        protocol: Protocol,
    ) -> Self {
        let ring = |area: Area| RingPlacement { start: area.start, slots: CONTROL_RING_SLOTS };
        let sender = Sender::<M, WORDS>::begin(memory.clone(), ring(outgoing), generation);
        let receiver = Receiver::<M, WORDS>::open(memory.clone(), ring(incoming), generation);
        Self { exchange: Exchange::new(sender, receiver), doorbell, protocol }
    }

    /// The latest generation that was begun in either direction; 0 if none was.
    pub(crate) fn generation(memory: &M, outgoing: Area, incoming: Area) -> Generation {
        let begun =
            |area: Area| RingPlacement { start: area.start, slots: CONTROL_RING_SLOTS }.generation(memory);
        begun(outgoing).max(begun(incoming))
    }

    /// The version that both ends know.
    pub(crate) fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Whether both directions work.
    pub(crate) fn ready(&mut self) -> bool {
        self.exchange.ready()
    }

    pub(crate) fn request(&mut self, body: &impl Serialize, deadline: Instant) -> Result<RequestId, String> {
        self.exchange.request(&encode(body)?, deadline).map_err(|error| error.to_string())
    }

    pub(crate) fn notify(&mut self, body: &impl Serialize) -> Result<(), String> {
        self.exchange.notify(&encode(body)?).map_err(|error| error.to_string())
    }

    /// Tells the peer something that is not JSON.
    pub(crate) fn notify_bytes(&mut self, bytes: &[u8]) -> Result<(), ExchangeError> {
        self.exchange.notify(bytes)
    }

    pub(crate) fn respond(&mut self, id: RequestId, answer: Answer) {
        let answer = answer.map_err(|refusal| refusal.spoken(self.protocol));
        // The peer gives up at its deadline and asks again; it learns nothing from an error of ours.
        let outcome = encode(&answer)
            .and_then(|payload| self.exchange.respond(id, &payload).map_err(|error| error.to_string()));
        if let Err(error) = outcome {
            tracing::warn!(%error, "a request stays unanswered");
        }
    }

    /// Asks for something that need not even be JSON.
    #[cfg(test)]
    pub(crate) fn request_bytes(&mut self, bytes: &[u8], deadline: Instant) -> RequestId {
        self.exchange.request(bytes, deadline).expect("room")
    }

    pub(crate) fn poll(&mut self, now: Instant) -> Option<Incoming> {
        self.exchange.poll(now)
    }

    /// Sends what fits into the ring.
    pub(crate) fn flush(&mut self) {
        if self.exchange.flush() == Wake::Needed {
            self.ring();
        }
    }

    /// Wakes the peer, whatever it announced.
    pub(crate) fn ring(&mut self) {
        self.doorbell.ring();
    }

    /// Whether it is safe to sleep.
    pub(crate) fn announce_sleep(&mut self) -> bool {
        self.exchange.announce_sleep()
    }

    pub(crate) fn wake(&mut self) {
        self.exchange.wake();
    }
}

fn encode(body: &impl Serialize) -> Result<Vec<u8>, String> {
    serde_json::to_vec(body).map_err(|error| format!("cannot be written as JSON: {error}"))
}

/// What the peer said, or why it cannot be understood. The pool's bytes may be anything.
pub(crate) fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, String> {
    serde_json::from_slice(payload).map_err(|error| format!("not understood: {error}"))
}
