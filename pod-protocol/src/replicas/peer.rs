//! What a replica knows of another one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use cxl_channel::Incoming;
use cxl_channel::doorbell::Doorbell;
use cxl_pool::{Generation, Layout, Memory, Record, ReplicaHello, ReplicaId};

use super::port::ReplicaPortError;
use crate::link::Link;
use crate::liveness::read_beat;
use crate::protocol::Protocol;

/// What one message of the exchange carries of a longer one. A byte before it says whether it is the last.
const PART_BYTES: usize = 64 << 10;
/// The longest message, in bytes: a state of the largest pods.
pub const MESSAGE_BYTES_LIMIT: usize = 256 << 20;
/// More bytes than this do not wait for a replica that takes nothing.
pub const WAITING_BYTES_LIMIT: usize = MESSAGE_BYTES_LIMIT + (64 << 20);

/// How long a replica's heartbeat may stand still before nothing is kept for it any more. It beats a hundred times meanwhile.
const SILENT_AFTER: Duration = Duration::from_secs(2);

struct Connection<M: Memory> {
    link: Link<M>,
    began: Instant,
    /// Of the first waiting message.
    sent_bytes: usize,
    arriving: Vec<u8>,
    /// What arrives is too long: it is dropped up to its end.
    overlong: bool,
}

pub(super) struct Peer<M: Memory> {
    replica: ReplicaId,
    hello: Option<ReplicaHello>,
    connection: Option<Connection<M>>,
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: usize,
    /// How often something that was sent to it was lost, or may have been.
    losses: u64,
    /// Its heartbeat, and when that was seen to have moved.
    pulse: Option<(u64, Instant)>,
    silent: bool,
}

impl<M: Memory> Peer<M> {
    pub(super) fn new(replica: ReplicaId) -> Self {
        Self {
            replica,
            hello: None,
            connection: None,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            losses: 0,
            pulse: None,
            silent: false,
        }
    }

    /// Looks whether it lives, and whether it was restarted.
    pub(super) fn sweep(
        &mut self,
        memory: &M,
        layout: &Layout,
        ((me, life), ours): ((ReplicaId, u32), Protocol),
        doorbell: impl FnOnce() -> Doorbell,
        now: Instant,
    ) {
        self.feel_pulse(read_beat(memory, layout.replica_heartbeat(self.replica)), now);
        let Some(hello) = ReplicaHello::look(memory, layout.replica_hello(self.replica)) else { return };
        if self.hello == Some(hello) {
            return;
        }
        self.hello = Some(hello);
        self.disconnect();
        let protocol = match ours.with(hello.protocol.into()) {
            Ok(protocol) => protocol,
            Err(why) => {
                tracing::error!(replica = %self.replica, "ignored: {why}");
                return;
            }
        };
        let generation = Generation::new(life.wrapping_add(hello.life).max(1));
        let (outgoing, incoming) =
            (layout.ring_between(me, self.replica), layout.ring_between(self.replica, me));
        let mut link = Link::open(memory, outgoing, incoming, generation, doorbell(), protocol);
        // It has to accept the generation that we began.
        link.ring();
        let (arriving, overlong) = (Vec::new(), false);
        self.connection = Some(Connection { link, began: now, sent_bytes: 0, arriving, overlong });
    }

    /// One that is stopped or dead takes nothing: what is asked of it again and again would fill the memory of whoever leads.
    fn feel_pulse(&mut self, beat: u64, now: Instant) {
        let (last, moved) = *self.pulse.get_or_insert((beat, now));
        if beat != last {
            self.pulse = Some((beat, now));
            self.silent = false;
        } else if !self.silent && now.saturating_duration_since(moved) > SILENT_AFTER {
            self.silent = true;
            // Of a message that is half sent it awaits the rest.
            let half_sent = self.connection.as_ref().is_some_and(|connection| connection.sent_bytes > 0);
            self.waiting.truncate(usize::from(half_sent));
            self.waiting_bytes = self.waiting.iter().map(Vec::len).sum();
            self.losses += 1;
        }
    }

    pub(super) const fn losses(&self) -> u64 {
        self.losses
    }

    /// Since when a connection is being made.
    pub(super) fn connecting_since(&mut self) -> Option<Instant> {
        let connection = self.connection.as_mut()?;
        (!connection.link.ready()).then_some(connection.began)
    }

    pub(super) fn send(&mut self, message: Vec<u8>) -> Result<(), ReplicaPortError> {
        let bytes = message.len();
        if bytes > MESSAGE_BYTES_LIMIT {
            return Err(ReplicaPortError::TooLong { bytes });
        }
        if self.silent || !self.connection.as_mut().is_some_and(|connection| connection.link.ready()) {
            return Err(ReplicaPortError::NotConnected { replica: self.replica });
        }
        if self.waiting_bytes + bytes > WAITING_BYTES_LIMIT {
            return Err(ReplicaPortError::Backlog { replica: self.replica });
        }
        self.waiting_bytes += bytes;
        self.waiting.push_back(message);
        Ok(())
    }

    /// Sends what waits, as far as there is room, and takes in the next whole message.
    pub(super) fn converse(&mut self, now: Instant) -> Option<Vec<u8>> {
        let connection = self.connection.as_mut()?;
        let mut arrived = None;
        while arrived.is_none() {
            match connection.link.poll(now) {
                None => break,
                Some(Incoming::Notification { payload }) => arrived = connection.take_in(&payload),
                // Replicas number their requests themselves.
                Some(_) => {}
            }
        }
        while let Some(message) = self.waiting.front() {
            let rest = &message[connection.sent_bytes..];
            let bytes = rest.len().min(PART_BYTES);
            let last = bytes == rest.len();
            let mut part = Vec::with_capacity(bytes + 1);
            part.push(u8::from(last));
            part.extend_from_slice(&rest[..bytes]);
            if connection.link.notify_bytes(&part).is_err() {
                break;
            }
            connection.sent_bytes += bytes;
            if last {
                self.waiting_bytes -= message.len();
                connection.sent_bytes = 0;
                self.waiting.pop_front();
            }
        }
        connection.link.flush();
        arrived
    }

    /// Whether nothing came meanwhile, so that sleeping is safe.
    pub(super) fn announce_sleep(&mut self) -> bool {
        self.connection.as_mut().is_none_or(|connection| connection.link.announce_sleep())
    }

    pub(super) fn wake(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.link.wake();
        }
    }

    fn disconnect(&mut self) {
        self.connection = None;
        self.waiting.clear();
        self.waiting_bytes = 0;
        self.losses += 1;
    }
}

impl<M: Memory> Connection<M> {
    fn take_in(&mut self, part: &[u8]) -> Option<Vec<u8>> {
        let (last, bytes) = part.split_first()?;
        self.overlong |= self.arriving.len() + bytes.len() > MESSAGE_BYTES_LIMIT;
        if self.overlong {
            self.arriving = Vec::new();
        } else {
            self.arriving.extend_from_slice(bytes);
        }
        if *last == 0 {
            return None;
        }
        let message = std::mem::take(&mut self.arriving);
        (!std::mem::take(&mut self.overlong)).then_some(message)
    }
}
