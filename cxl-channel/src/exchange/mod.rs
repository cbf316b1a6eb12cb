//! Requests, responses and notifications over a pair of channels.

mod assembly;
mod fragment;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use cxl_pool::Memory;
use thiserror::Error;

use self::assembly::Assembly;
use self::fragment::{FRAGMENT_BYTES, Header, Kind, WORDS};
use crate::{Receiver, Sender, Wake};

/// The longest payload: the tables of all the volumes of a host with many SSDs, which its backend says when it joins.
pub const PAYLOAD_BYTES_LIMIT: usize = 4 << 20;

/// More than this does not wait to be sent: a peer that takes nothing must not cost more memory than this.
const QUEUED_BYTES_LIMIT: usize = 8 << 20;
/// More requests than this are not outstanding at once.
const OUTSTANDING_LIMIT: usize = 16 << 10;
/// How many fragments one `poll` looks at, at most: a peer must not keep it from returning.
const FRAGMENTS_PER_POLL: usize = 8 << 10;

/// A request, as its sender numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u32);

/// What came in, or failed to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// The peer asks: answer with [`Exchange::respond`].
    Request {
        /// To be given with the response.
        id: RequestId,
        /// What it asks.
        payload: Vec<u8>,
    },
    /// The peer answers.
    Response {
        /// The request that it answers.
        id: RequestId,
        /// Its answer.
        payload: Vec<u8>,
    },
    /// The peer tells.
    Notification {
        /// What it tells.
        payload: Vec<u8>,
    },
    /// No answer came before the deadline. Should one come later, it is dropped.
    Expired {
        /// The request.
        id: RequestId,
    },
}

/// Why something cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// The payload is too long.
    #[error(
        "a message of {bytes} bytes is longer than the {PAYLOAD_BYTES_LIMIT} that a channel carries: split it"
    )]
    TooLong {
        /// How long it is.
        bytes: usize,
    },
    /// Too much waits to be sent, or to be answered.
    #[error("the peer takes or answers nothing, and too much waits for it: try again later, or give it up")]
    Backlog,
}

/// What was dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Fragments that made no sense.
    pub malformed: u64,
    /// Responses to nothing that was asked, or that came after the deadline.
    pub unexpected_responses: u64,
    /// Requests that were not answered in time.
    pub expired: u64,
}

/// A symmetric exchange of requests, responses and notifications over a pair of 64 B rings.
///
/// Nothing blocks: what does not fit the ring waits here for the next [`flush`](Self::flush). Messages arrive in the order
/// in which they were queued.
pub struct Exchange<M: Memory> {
    sender: Sender<M, WORDS>,
    receiver: Receiver<M, WORDS>,
    queue: VecDeque<Queued>,
    queued_bytes: usize,
    assembly: Assembly,
    outstanding: BTreeMap<RequestId, Instant>,
    deadlines: BTreeSet<(Instant, RequestId)>,
    next_id: u32,
    /// What the peer knew to be consumed at the last flush.
    acknowledged: u64,
    counters: Counters,
}

struct Queued {
    kind: Kind,
    id: RequestId,
    payload: Vec<u8>,
    sent_bytes: usize,
}

impl<M: Memory> Exchange<M> {
    /// An exchange over these two channels.
    pub fn new(sender: Sender<M, WORDS>, receiver: Receiver<M, WORDS>) -> Self {
        Self {
            sender,
            receiver,
            queue: VecDeque::new(),
            queued_bytes: 0,
            assembly: Assembly::default(),
            outstanding: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            next_id: 0,
            acknowledged: 0,
            counters: Counters::default(),
        }
    }

    /// Whether both channels are set up. Until then, messages wait.
    pub fn ready(&mut self) -> bool {
        let (sending, receiving) = (self.sender.ready(), self.receiver.ready());
        sending && receiving
    }

    /// Whether to look if the peer sleeps; see [`Sender::set_wakeups`].
    pub fn set_wakeups(&mut self, wakeups: bool) {
        self.sender.set_wakeups(wakeups);
    }

    /// Asks the peer. [`poll`](Self::poll) gives the response, or says that none came before the deadline.
    pub fn request(&mut self, payload: &[u8], deadline: Instant) -> Result<RequestId, ExchangeError> {
        if self.outstanding.len() >= OUTSTANDING_LIMIT {
            return Err(ExchangeError::Backlog);
        }
        // The limit is far below the number of ids, so a free one comes soon.
        let id = loop {
            let id = RequestId(self.next_id);
            self.next_id = self.next_id.wrapping_add(1);
            if !self.outstanding.contains_key(&id) {
                break id;
            }
        };
        self.enqueue(Kind::Request, id, payload)?;
        self.outstanding.insert(id, deadline);
        self.deadlines.insert((deadline, id));
        Ok(id)
    }

    /// Tells the peer.
    pub fn notify(&mut self, payload: &[u8]) -> Result<(), ExchangeError> {
        self.enqueue(Kind::Notification, RequestId(0), payload)
    }

    /// Answers the peer.
    pub fn respond(&mut self, id: RequestId, payload: &[u8]) -> Result<(), ExchangeError> {
        self.enqueue(Kind::Response, id, payload)
    }

    /// What has come in; nothing if nothing has.
    pub fn poll(&mut self, now: Instant) -> Option<Incoming> {
        if let Some(&(deadline, id)) = self.deadlines.first()
            && deadline <= now
        {
            self.deadlines.pop_first();
            self.outstanding.remove(&id);
            self.counters.expired += 1;
            return Some(Incoming::Expired { id });
        }
        for _ in 0..FRAGMENTS_PER_POLL {
            let words = self.receiver.receive()?;
            let Some((header, payload)) = fragment::unpack(&words) else {
                self.counters.malformed += 1;
                // It may have been a part of what is on its way, which would not be whole without.
                self.assembly.give_up();
                continue;
            };
            match self.assembly.add(header, &payload) {
                Err(assembly::Malformed) => self.counters.malformed += 1,
                Ok(None) => {}
                Ok(Some(message)) => {
                    if let Some(incoming) = self.accept(message) {
                        return Some(incoming);
                    }
                }
            }
        }
        None
    }

    /// Sends what is queued, as far as there is room, and says whether the peer's doorbell must be rung. To be called
    /// each turn.
    pub fn flush(&mut self) -> Wake {
        while let Some(message) = self.queue.front_mut() {
            let rest = &message.payload[message.sent_bytes..];
            let bytes = rest.len().min(FRAGMENT_BYTES);
            let header = Header {
                kind: message.kind,
                id: message.id,
                first: message.sent_bytes == 0,
                last: bytes == rest.len(),
                bytes,
            };
            if self.sender.send(fragment::pack(header, &rest[..bytes])).is_err() {
                break;
            }
            message.sent_bytes += bytes;
            if header.last {
                self.queued_bytes -= message.payload.len();
                self.queue.pop_front();
            }
        }
        let wake = self.sender.publish();
        // A peer with more to send than the ring holds may sleep until there is room: it hears of that by its doorbell,
        // too.
        let acknowledged = self.receiver.acknowledged();
        let made_room = acknowledged != self.acknowledged;
        self.acknowledged = acknowledged;
        if !made_room {
            return wake;
        }
        self.receiver.settle();
        Wake::Needed
    }

    /// Whether something waits to be sent.
    pub fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// When the next request expires.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// As [`Receiver::announce_sleep`].
    pub fn announce_sleep(&mut self) -> bool {
        self.receiver.announce_sleep()
    }

    /// As [`Receiver::wake`].
    pub fn wake(&mut self) {
        self.receiver.wake();
    }

    /// What was dropped so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    fn enqueue(&mut self, kind: Kind, id: RequestId, payload: &[u8]) -> Result<(), ExchangeError> {
        if payload.len() > PAYLOAD_BYTES_LIMIT {
            return Err(ExchangeError::TooLong { bytes: payload.len() });
        }
        // Each counts for one fragment at least, so that empty ones are limited too.
        if self.queued_bytes + self.queue.len() * FRAGMENT_BYTES + payload.len() > QUEUED_BYTES_LIMIT {
            return Err(ExchangeError::Backlog);
        }
        self.queued_bytes += payload.len();
        self.queue.push_back(Queued { kind, id, payload: payload.to_vec(), sent_bytes: 0 });
        Ok(())
    }

    fn accept(&mut self, message: assembly::Message) -> Option<Incoming> {
        let assembly::Message { kind, id, payload } = message;
        match kind {
            Kind::Request => Some(Incoming::Request { id, payload }),
            Kind::Notification => Some(Incoming::Notification { payload }),
            Kind::Response => {
                let Some(deadline) = self.outstanding.remove(&id) else {
                    self.counters.unexpected_responses += 1;
                    return None;
                };
                self.deadlines.remove(&(deadline, id));
                Some(Incoming::Response { id, payload })
            }
        }
    }
}
