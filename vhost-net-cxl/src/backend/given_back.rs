//! Packets that a frontend was given back with [`Status::NotYet`](crate::message::Status::NotYet), and what follows them.
//!
//! What follows was announced before the frontend heard of that. If the reason is gone by then, it would overtake: so it goes the
//! same way, until the first of them is offered again. A frontend offers all of them again, in order, before anything new, and its
//! packets are numbered in order; so that is as soon as a number comes that is no newer than the last one given back.
//!
//! The controller tells frontends and backends of a lease at the same time, so a frontend may send before we hear of the lease, of its new
//! generation, or of the frontend that it is with now. No registration is there then that this could be noted in: [`TooEarly`] keeps it until one is.

use std::collections::HashMap;

use pod_protocol::ids::{ChannelId, LeaseGeneration, LeaseId};
use pod_protocol::objects::REGISTRATIONS_MAX;

use crate::message::NetMessage;

/// What was given back, and not offered again since.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GivenBack(Option<Last>);

#[derive(Clone, Copy, Debug)]
struct Last {
    generation: LeaseGeneration,
    /// The newest number.
    number: u16,
    /// What goes to neighbours was given back as well, and not only what goes to the wire.
    all: bool,
}

impl GivenBack {
    /// Whether there is anything.
    #[inline]
    pub(super) fn is_any(self) -> bool {
        self.0.is_some()
    }

    /// Notes that a packet to the wire is given back.
    pub(super) fn note(&mut self, message: &NetMessage) {
        self.note_of(message, false);
    }

    fn note_of(&mut self, message: &NetMessage, all: bool) {
        let before = self.0.filter(|last| last.generation == message.generation);
        let number = before.map_or(message.sequence, |last| {
            if is_newer(message.sequence, last.number) { message.sequence } else { last.number }
        });
        let all = all || before.is_some_and(|last| last.all);
        self.0 = Some(Last { generation: message.generation, number, all });
    }

    /// Whether something that was given back has to be sent before this packet. One that has not is the first of those that are
    /// offered again.
    #[inline]
    pub(super) fn is_before(&mut self, message: &NetMessage) -> bool {
        let Some(last) = self.0 else { return false };
        // Another route was given the lease meanwhile, and everything over that.
        let before = last.generation == message.generation && is_newer(message.sequence, last.number);
        if !before {
            self.0 = None;
        }
        before
    }

    /// The same of a packet that goes to neighbours only.
    #[inline]
    pub(super) fn is_before_local(&mut self, message: &NetMessage) -> bool {
        self.0.is_some_and(|last| last.all) && self.is_before(message)
    }
}

/// Of so many leases of one frontend this is kept at most: it may name any lease, and speaks for none that matters where it names more.
const LEASES_MAX: usize = REGISTRATIONS_MAX;

/// By channel and lease, what was given back before the registration was here that it is for.
#[derive(Debug, Default)]
pub(super) struct TooEarly(HashMap<ChannelId, HashMap<LeaseId, GivenBack>>);

impl TooEarly {
    /// Notes packets that are given back.
    pub(super) fn note(
        &mut self,
        (channel, lease): (ChannelId, LeaseId),
        messages: impl Iterator<Item = NetMessage>,
    ) {
        let of_channel = self.0.entry(channel).or_default();
        if of_channel.len() >= LEASES_MAX && !of_channel.contains_key(&lease) {
            // Nobody but itself has something of this frontend overtaken.
            of_channel.clear();
        }
        let given_back = of_channel.entry(lease).or_default();
        messages.for_each(|message| given_back.note_of(&message, true));
    }

    /// What a registration with this generation begins with, if there is something.
    pub(super) fn take(
        &mut self,
        (channel, lease): (ChannelId, LeaseId),
        generation: LeaseGeneration,
    ) -> Option<GivenBack> {
        let of_channel = self.0.get_mut(&channel)?;
        let last = of_channel.get(&lease)?.0?;
        // What is for a newer generation waits for that.
        if last.generation.is_newer_than(generation) {
            return None;
        }
        let given_back = of_channel.remove(&lease)?;
        (last.generation == generation).then_some(given_back)
    }

    /// A frontend begins anew, or is gone.
    pub(super) fn forget(&mut self, channel: ChannelId) {
        self.0.remove(&channel);
    }

    /// A frontend has heard of everything of a lease that it was given back.
    pub(super) fn reopen(&mut self, (channel, lease): (ChannelId, LeaseId)) {
        if let Some(of_channel) = self.0.get_mut(&channel) {
            of_channel.remove(&lease);
        }
    }
}

/// Whether one number comes after another: far fewer packets are under way than there are numbers.
fn is_newer(number: u16, than: u16) -> bool {
    number.wrapping_sub(than).cast_signed() > 0
}

#[cfg(test)]
mod tests {
    use cxl_pool::LineOffset;
    use pod_protocol::ids::LeaseId;

    use super::*;
    use crate::message::Opcode;

    fn message(generation: u16, sequence: u16) -> NetMessage {
        NetMessage {
            opcode: Opcode::Transmit,
            lease: LeaseId::MAX,
            generation: LeaseGeneration::new(generation),
            sequence,
            line: LineOffset::new(0),
            bytes: 100,
            more: false,
        }
    }

    #[test]
    fn what_follows_comes_after_what_was_given_back() {
        let mut given_back = GivenBack::default();
        assert!(!given_back.is_before(&message(1, 7)));
        // Around the end of the numbers, and not in order.
        for number in [3, u16::MAX, 0] {
            given_back.note(&message(1, number));
        }
        assert!(given_back.is_before(&message(1, 4)));
        given_back.note(&message(1, 4));
        assert!(given_back.is_before(&message(1, 5)));
        assert!(!given_back.is_before(&message(1, u16::MAX)), "the first one, once more");
        assert!(!given_back.is_before(&message(1, 5)), "it was");
    }

    #[test]
    fn what_was_given_back_before_a_move_comes_before_nothing_after_it() {
        let mut given_back = GivenBack::default();
        given_back.note(&message(1, 7));
        assert!(!given_back.is_before(&message(2, 8)));
        given_back.note(&message(2, 100));
        given_back.note(&message(3, 5));
        assert!(given_back.is_before(&message(3, 6)));
    }

    #[test]
    fn a_frontend_that_speaks_of_everything_takes_no_more_room_than_that_and_none_of_others() {
        let lease = |number: usize| u32::try_from(number).ok().and_then(LeaseId::new).expect("24 bits");
        let [here, there] = [1, 2].map(ChannelId::new);
        let mut early = TooEarly::default();
        early.note((there, lease(7)), [message(5, 3)].into_iter());
        for number in 0..3 * LEASES_MAX {
            early.note((here, lease(number)), [message(5, 3)].into_iter());
            assert!(early.0[&here].len() <= LEASES_MAX);
        }
        let of_last = (here, lease(3 * LEASES_MAX - 1));
        assert!(early.take(of_last, LeaseGeneration::new(4)).is_none(), "it is for the next one");
        assert!(early.take(of_last, LeaseGeneration::new(5)).is_some());
        assert!(early.take(of_last, LeaseGeneration::new(5)).is_none(), "once");
        assert!(early.take((there, lease(7)), LeaseGeneration::new(6)).is_none(), "that time is over");
        assert!(early.take((there, lease(7)), LeaseGeneration::new(5)).is_none());
    }
}
