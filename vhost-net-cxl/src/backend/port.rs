//! A NIC, who is registered with it, and what waits for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cxl_pool::{Area, ByteOffset};
use pod_protocol::objects::RegistrationState;

use super::Tell;
use super::backlog::Backlog;
use super::given_back::GivenBack;
use super::receive_buffers::{BUFFER_BYTES, ReceiveBuffers};
use super::registration::{Registration, RegistrationIndex};
use super::switch::Switch;
use super::tagging::tagged_announcement;
use super::wire::Outgoing;
use crate::counters::{DropReason, NicCounters};
use crate::ethernet::announcement;
use crate::message::{NetMessage, Status};
use crate::nic::{Nic, Piece, Taken};
use crate::offloads::Offloads;
use crate::vnet_header::VnetHeader;

/// How long packets wait for a link that is down. By then the controller has moved the instance, if it can: its
/// frontend sends the same packets again elsewhere. If it cannot, they are lost as on any cable.
const LINK_DOWN_HOLD: Duration = Duration::from_secs(1);

/// A NIC and everything that belongs to it.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct Port {
    pub(super) nic: Box<dyn Nic>,
    /// Where the fronts of frames are put together that are given a tag, for as long as the NIC takes them over.
    pub(super) tagging: Option<ByteOffset>,
    /// Where it receives, once it was started.
    pub(super) buffers: Option<ReceiveBuffers>,
    pub(super) area: Option<Area>,
    /// By their numbers, as many as there have been at a time.
    pub(super) registrations: Vec<Option<Registration>>,
    /// One of them may have to be announced.
    pub(super) announcing: bool,
    /// Its link is back, and something waited for that.
    pub(super) gives_waiting_back: bool,
    /// The NIC has to be told which flows there are.
    pub(super) flows_changed: bool,
    pub(super) switch: Switch,
    /// Packets that wait for the wire.
    pub(super) backlog: Backlog,
    pub(super) counters: Arc<NicCounters>,
    /// Counts the tags that were given away.
    pub(super) tags: u32,
    /// As much had gone wrong for its device when it was looked at last.
    refused: u64,
    pub(super) failed: bool,
    /// It failed, and whoever opens it again has yet to hear of it.
    pub(super) to_reopen: bool,
    pub(super) was_up: bool,
    /// Since when its link is down, or packets wait for it to start.
    pub(super) down_since: Option<Instant>,
}

impl Port {
    pub(super) fn new(nic: Box<dyn Nic>, counters: Arc<NicCounters>) -> Self {
        let was_up = nic.link().is_up();
        counters.up.store(was_up, Ordering::Relaxed);
        Self {
            nic,
            buffers: None,
            tagging: None,
            area: None,
            registrations: Vec::new(),
            announcing: false,
            gives_waiting_back: false,
            flows_changed: false,
            switch: Switch::new(),
            backlog: Backlog::new(),
            counters,
            tags: 0,
            refused: 0,
            failed: false,
            to_reopen: false,
            was_up,
            down_since: None,
        }
    }

    /// Counts a packet that went out for the lease that it is of.
    #[inline]
    pub(super) fn count_sent(&self, packet: &Outgoing) {
        if let Some(registration) = &self.registrations[packet.registration.get()] {
            registration.count_sent(1, packet.frame_bytes());
        }
    }

    /// Counts a packet with which its driver found fault for the lease that it is of.
    pub(super) fn count_refused_packet(&self, packet: &Outgoing) {
        if let Some(registration) = &self.registrations[packet.registration.get()] {
            registration.counters.count_drop(DropReason::Refused);
        }
    }

    /// Whether it can send.
    #[inline]
    pub(super) fn is_able(&self) -> bool {
        self.was_up && self.area.is_some() && !self.failed
    }

    /// Whether a receiver takes a packet with what its header leaves undone.
    pub(super) fn accepts(&self, index: RegistrationIndex, header: VnetHeader) -> bool {
        let required = header.required();
        required == Offloads::NONE
            || self.registrations[index.get()].as_ref().is_some_and(|it| it.accepts().contains(required))
    }

    /// Takes receive buffers for a packet of `bytes` bytes; none, and false, if too few are free.
    pub(super) fn take_buffers(&mut self, bytes: u32, pieces: &mut Vec<Piece>) -> bool {
        pieces.clear();
        let Some(buffers) = &mut self.buffers else { return false };
        if buffers.free_count() < bytes.div_ceil(BUFFER_BYTES) as usize {
            return false;
        }
        let mut left = bytes;
        while left > 0
            && let Some(buffer) = buffers.take()
        {
            let here = left.min(BUFFER_BYTES);
            pieces.push(Piece { at: buffers.offset(buffer), bytes: here });
            left -= here;
        }
        true
    }

    /// Takes back what a registration's frontend holds, and says how much that was: it is gone.
    pub(super) fn take_back(&mut self, index: usize) -> usize {
        let Some(registration) = &mut self.registrations[index] else { return 0 };
        let held = registration.held.len();
        registration.held.clear();
        registration.told = None;
        registration.given_back = GivenBack::default();
        let index = u16::try_from(index).ok().and_then(RegistrationIndex::new);
        if let (Some(buffers), Some(index)) = (&mut self.buffers, index) {
            buffers.release_all(index);
        }
        held
    }

    /// Borrows the addresses of registrations that have become active: one broadcast each makes the switches send
    /// their frames here from now on.
    pub(super) fn announce(&mut self, tell: &Tell) {
        if !self.announcing {
            return;
        }
        for registration in self.registrations.iter_mut().flatten().filter(|it| it.announce) {
            let frame = announcement(registration.object.mac);
            let sent = match registration.object.policy.vlan {
                Some(vlan) => self.nic.transmit_frame(&tagged_announcement(&frame, vlan)),
                None => self.nic.transmit_frame(&frame),
            };
            match sent {
                Ok(Taken::Whole) => registration.announce = false,
                Ok(Taken::Refused) => {
                    registration.announce = false;
                    // It was made here.
                    self.counters.errors.add(1);
                }
                Ok(Taken::NoRoom) => return,
                outcome => {
                    self.check(outcome.map(drop), tell);
                    return;
                }
            }
        }
        self.announcing = false;
    }

    pub(super) fn announces(&self) -> bool {
        self.was_up && self.area.is_some() && self.announcing
    }

    /// Whether a packet of this registration to the wire is given back for now, and notes it if so. The link is down, and what is lent is
    /// not kept until it comes back: by then it may be the guest's again. Or something that comes before it was given back.
    #[inline]
    pub(super) fn gives_back(&mut self, index: RegistrationIndex, message: &NetMessage) -> bool {
        let lends = self.registrations[index.get()].as_ref().is_some_and(Registration::lends);
        let keeps_nothing = lends && !self.has_wire() && !self.is_given_up();
        let Some(registration) = &mut self.registrations[index.get()] else { return false };
        let gives_back = registration.given_back.is_before(message) || keeps_nothing;
        if gives_back {
            registration.given_back.note(message);
        }
        gives_back
    }

    /// Gives back what has waited for the link, now that it is back. The instance may have another route, over which its frontend has sent the same
    /// again, and we may not have heard of it; if it has none, it is offered once more. The rest of a packet follows of which a part went out.
    pub(super) fn give_back_waiting(&mut self, mut given_back: impl FnMut(&Outgoing)) {
        let Self { backlog, registrations, .. } = self;
        backlog.retain(|packet| {
            let registration = registrations[packet.registration.get()].as_mut();
            let waits = |it: &&mut Registration| {
                it.object.generation == packet.message.generation && packet.frames_sent == 0
            };
            let Some(registration) = registration.filter(waits) else { return true };
            registration.given_back.note(&packet.message);
            given_back(packet);
            false
        });
    }

    /// Whether a packet of this registration that goes to neighbours only is given back for now, and notes it if so: something that comes
    /// before it was, wherever that goes to.
    #[inline]
    pub(super) fn gives_back_local(&mut self, index: RegistrationIndex, message: &NetMessage) -> bool {
        let Some(registration) = &mut self.registrations[index.get()] else { return false };
        let gives_back = registration.given_back.is_before_local(message);
        if gives_back {
            registration.given_back.note(message);
        }
        gives_back
    }

    /// Whether it takes packets, or at least did so when it was looked at last.
    #[inline]
    pub(super) fn has_wire(&self) -> bool {
        self.was_up && self.area.is_some()
    }

    /// Whether packets that found no wire have been waited for long enough.
    pub(super) fn is_given_up(&mut self) -> bool {
        self.down_since.get_or_insert_with(Instant::now).elapsed() > LINK_DOWN_HOLD
    }

    /// Counts what has gone wrong for its device since the last look.
    pub(super) fn count_refused(&mut self) {
        let refused = self.nic.errors();
        if refused != self.refused {
            self.counters.errors.add(refused.saturating_sub(self.refused));
            self.refused = refused;
        }
    }

    /// Has this NIC in the place of the one that failed.
    pub(super) fn replace(&mut self, nic: Box<dyn Nic>) {
        self.counters.driver.set(nic.troubles());
        self.nic = nic;
        self.refused = 0;
    }

    /// How a packet has to be answered whose sender may not send it any more; nothing if it still may.
    #[inline]
    pub(super) fn status_before_sending(&self, packet: &Outgoing) -> Option<Status> {
        match &self.registrations[packet.registration.get()] {
            Some(it) if it.object.generation != packet.message.generation => Some(Status::Stale),
            Some(it) if it.object.state == RegistrationState::Standby => Some(Status::Stale),
            Some(_) => None,
            None => Some(Status::Stale),
        }
    }
}
