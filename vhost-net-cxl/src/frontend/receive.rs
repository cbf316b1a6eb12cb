//! From a backend's receive buffers into a guest's.
//!
//! A frame for which the guest has posted no buffers is dropped at once: nobody waits for a guest. The receive buffers
//! go back to the backend as soon as they were copied; they hold other instances' frames as well, which is why they
//! are copied at all.

use std::time::Instant;

use cxl_pool::{LINE_BYTES, Memory};
use pod_protocol::ids::LeaseId;
use vhost_frontend::Chain;

use super::Frontend;
use super::delivering::{Part, deliver, frame_bytes};
use super::origins::Origins;
use super::port::Port;
use crate::channel_end::ChannelEnd;
use crate::counters::DropReason;
use crate::message::{NetMessage, Opcode, Run, Status};

/// Receive buffers of a guest that one packet may take: the longest packet in buffers of half a page.
pub(super) const CHAINS_MAX: usize = 64;
/// Filled buffers that a guest does not see yet, at most.
const FILLED_MAX: usize = 64;
/// So many lines are asked for ahead of the packet that is looked at: as many as a CPU fetches at a time. More would hold it up.
const AHEAD_LINES: u64 = 24;
/// Pieces of one packet; a backend uses at most one per page.
const PIECES_MAX: usize = 32;

/// A channel and the packet that is just arriving over it.
pub(super) struct Channel<M: Memory> {
    pub(super) end: ChannelEnd<M>,
    /// The port that is served first: each has its turn.
    pub(super) first: usize,
    /// Room for requests that is kept for guests that have sent less than they are promised.
    pub(super) kept: u32,
    /// The pieces that have arrived of a packet that has more.
    pub(super) pieces: Vec<NetMessage>,
    /// Why that packet is no good, if it is not; the rest of it is awaited all the same.
    broken: Option<DropReason>,
    /// Where its packets lie.
    pub(super) origins: Origins,
}

impl<M: Memory> Channel<M> {
    pub(super) fn new(end: ChannelEnd<M>, origins: Origins) -> Self {
        Self { end, first: 0, kept: 0, pieces: Vec::with_capacity(PIECES_MAX), broken: None, origins }
    }

    /// Its packets lie elsewhere from now on. The rings stay, and what has come over them.
    pub(super) fn change_origins(&mut self, origins: Origins) {
        self.origins = origins;
        self.broken = self.broken.or(self.pieces.iter().find_map(|piece| self.origins.check(piece).err()));
    }
}

impl<M: Memory> Channel<M> {
    /// How much of its room a guest has to leave, that has sent less than it is promised or not.
    #[inline]
    pub(super) fn kept_from(&self, below_minimum: bool) -> u32 {
        if below_minimum { 0 } else { self.kept }
    }
}

/// How far ahead packets are asked for.
#[derive(Default)]
pub(super) struct Ahead {
    /// The first message whose packet was not asked for.
    next: usize,
    /// The first one whose lines still count.
    done: usize,
    /// Lines that were asked for, of packets from there on.
    lines: u64,
}

impl Ahead {
    /// Asks for what arrives in messages from `place` on, as far ahead as is good.
    #[inline]
    pub(super) fn fetch<M: Memory>(
        &mut self,
        (memory, origins): (&M, &Origins),
        held: &[LeaseId],
        inbox: &[[u64; 2]],
        place: usize,
    ) {
        if M::COHERENT {
            return;
        }
        while self.done < place {
            let message = inbox.get(self.done).and_then(|words| arrival(origins, words));
            self.lines -= message.map_or(0, |message| lines(&message)).min(self.lines);
            self.done += 1;
        }
        while self.lines < AHEAD_LINES
            && let Some(words) = inbox.get(self.next)
        {
            self.next += 1;
            // What waits for its share of the fabric moves nothing yet.
            let message = arrival(origins, words).filter(|message| !held.contains(&message.lease));
            let Some(message) = message else { continue };
            for at in (0..u64::from(message.bytes)).step_by(LINE_BYTES) {
                memory.prefetch(message.line.bytes().saturating_add(at));
            }
            self.lines += lines(&message);
        }
    }
}

/// A message about a packet that has arrived, if it is one.
#[inline]
fn arrival(origins: &Origins, words: &[u64; 2]) -> Option<NetMessage> {
    NetMessage::decode(*words).filter(|it| it.opcode == Opcode::Receive && origins.check(it).is_ok())
}

#[inline]
fn lines(message: &NetMessage) -> u64 {
    u64::from(message.bytes).div_ceil(LINE_BYTES as u64)
}

/// Storage that is reused for every packet.
pub(super) struct Scratch {
    pub(super) chains: Vec<Chain>,
    pub(super) filled: Filled,
    /// The queue that was found empty in this look at a channel: asking its guest again for each frame would slow it down.
    pub(super) dry: Option<(usize, usize)>,
    /// Counts the looks at channels.
    pub(super) look: u64,
    /// The pieces of a frame that waited.
    pub(super) frame: Vec<NetMessage>,
    /// The time of this look, once somebody has asked for it.
    pub(super) now: Option<Instant>,
}

/// Buffers of one guest's receive queue that were filled and that the guest does not see yet.
pub(super) struct Filled {
    /// Which port's, and which of its rings.
    queue: Option<(usize, usize)>,
    pub(super) used: Vec<(u16, u32)>,
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self {
            chains: (0..CHAINS_MAX).map(|_| Chain::with_capacity(4)).collect(),
            filled: Filled { queue: None, used: Vec::with_capacity(FILLED_MAX + CHAINS_MAX) },
            dry: None,
            look: 0,
            frame: Vec::with_capacity(PIECES_MAX),
            now: None,
        }
    }

    /// Begins to look at what has arrived.
    pub(super) fn begin_look(&mut self) {
        self.dry = None;
        self.look += 1;
        self.now = None;
    }
}

impl Filled {
    /// Lets the guest see them, before those of another queue are filled.
    pub(super) fn show_unless(&mut self, queue: Option<(usize, usize)>, ports: &mut [Port]) {
        if self.queue == queue && self.used.len() < FILLED_MAX {
            return;
        }
        if let Some((port, ring)) = self.queue
            && let Some(Some(ring)) = ports.get_mut(port).and_then(|port| port.rings.get_mut(ring))
        {
            // A ring that cannot be written was parked; its guest gets nothing more.
            let _ = ring.complete_together(&self.used);
        }
        self.used.clear();
        self.queue = queue;
    }
}

impl<M: Memory> Frontend<M> {
    /// Takes what a backend sent. Returns whether that was anything.
    pub(super) fn serve_channel(&mut self, place: usize) -> bool {
        let channel = &mut self.channels[place];
        if !channel.end.ready() {
            return false;
        }
        let mut inbox = std::mem::take(&mut self.inbox);
        let count = channel.end.receive(&mut inbox);
        self.invalidate_arrivals(place, &inbox[..count]);
        self.receive_scratch.begin_look();
        let (all, mut next) = (&inbox[..count], 0);
        let mut ahead = Ahead::default();
        while let Some(words) = all.get(next) {
            let together = self.receive_together(place, all, next, &mut ahead);
            next += together;
            if together > 0 {
                continue;
            }
            ahead.fetch((&self.memory, &self.channels[place].origins), &self.held, all, next);
            next += 1;
            let Some(message) = NetMessage::decode(*words) else {
                self.channels[place].end.counters().unreadable.add(1);
                continue;
            };
            match message.opcode {
                Opcode::Receive => self.receive(place, message),
                Opcode::TransmitDone => {
                    let run = Run::from_code(message.bytes);
                    self.channels[place].end.completed(run.packets.into());
                    if let Some(port) = self.by_lease.get(&message.lease) {
                        self.ports[*port].transmit_done(&self.channels[place], &message, run);
                    }
                }
                Opcode::Transmit | Opcode::ReceiveDone | Opcode::Offloads => {}
            }
        }
        self.inbox = inbox;
        self.receive_scratch.filled.show_unless(None, &mut self.ports);
        count > 0
    }

    /// What is about to be read may have been brought into our cache by a prefetch since its last use.
    fn invalidate_arrivals(&self, place: usize, inbox: &[[u64; 2]]) {
        if M::COHERENT {
            return;
        }
        let mut any = false;
        let origins = &self.channels[place].origins;
        for message in inbox.iter().filter_map(|words| arrival(origins, words)) {
            self.memory.invalidate(message.line.bytes(), u64::from(message.bytes));
            any = true;
        }
        if any {
            self.memory.full_fence();
        }
    }

    /// Takes one piece, and delivers the packet with its last one.
    #[inline]
    fn receive(&mut self, place: usize, message: NetMessage) {
        let channel = &mut self.channels[place];
        let lies = channel.origins.check(&message);
        if channel.pieces.is_empty() && !message.more && lies.is_ok() {
            self.finish(place, &[message], Ok(()));
            return;
        }
        let belongs = |first: &NetMessage| (first.lease, first.sequence) == (message.lease, message.sequence);
        if channel.pieces.first().is_some_and(|first| !belongs(first)) {
            // The rest of the packet before was never sent.
            channel.broken.get_or_insert(DropReason::BadMessage);
            self.finish_pieces(place);
        }
        let channel = &mut self.channels[place];
        channel.broken = channel.broken.or(lies.err());
        if channel.pieces.len() < PIECES_MAX {
            channel.pieces.push(message);
        } else {
            channel.broken.get_or_insert(DropReason::BadMessage);
        }
        if !message.more {
            self.finish_pieces(place);
        }
    }

    fn finish_pieces(&mut self, place: usize) {
        let channel = &mut self.channels[place];
        let broken = channel.broken.take();
        let mut pieces = std::mem::take(&mut channel.pieces);
        self.finish(place, &pieces, broken.map_or(Ok(()), Err));
        pieces.clear();
        self.channels[place].pieces = pieces;
    }

    /// Delivers or drops the packet that has arrived, and gives its buffers back.
    #[inline]
    fn finish(&mut self, place: usize, pieces: &[NetMessage], whole: Result<(), DropReason>) {
        let Some(first) = pieces.first() else { return };
        let id = self.channels[place].end.object().id;
        if let Some(index) = self.by_lease.get(&first.lease).copied() {
            let (port, frame_bytes) = (&mut self.ports[index], frame_bytes(pieces));
            let generation = port.object.active.generation;
            let now = &mut self.receive_scratch.now;
            let outcome = match whole {
                Ok(()) if !port.hears_of(id, first.generation) => Err(DropReason::Stale),
                Ok(()) if !port.may_receive(now) => Err(DropReason::RateLimit),
                Ok(()) if port.doubles.have_had(&self.memory, (first, frame_bytes), generation, now) => {
                    Err(DropReason::Doubled)
                }
                Ok(()) if !port.may_take(frame_bytes) => {
                    self.let_wait(place, index, pieces);
                    return;
                }
                Ok(()) => {
                    let (all, scratch) = (Part { from: 0, to: frame_bytes }, &mut self.receive_scratch);
                    deliver(&self.memory, &mut self.ports, index, pieces, all, scratch)
                }
                Err(reason) => Err(reason),
            };
            let port = &mut self.ports[index];
            match outcome {
                Ok(()) => {
                    port.counters.count_rx(frame_bytes);
                    port.charge_received(&self.memory, first, frame_bytes);
                }
                Err(reason) => port.counters.count_drop(reason),
            }
        } else {
            self.channels[place].end.counters().strays.add(1);
        }
        let done = NetMessage { opcode: Opcode::ReceiveDone, more: false, ..*first };
        self.channels[place].end.complete(done, Status::Sent);
    }
}
