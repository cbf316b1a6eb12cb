//! Packets that a frontend was given back with [`Status::NotYet`](crate::message::Status::NotYet), and what follows them.
//!
//! What follows was announced before the frontend heard of that. If the reason is gone by then, it would overtake: so it goes the
//! same way, until the first of them is offered again. A frontend offers all of them again, in order, before anything new, and its
//! packets are numbered in order; so that is as soon as a number comes that is no newer than the last one given back.

use pod_protocol::ids::LeaseGeneration;

use crate::message::NetMessage;

/// What was given back, and not offered again since.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GivenBack(Option<(LeaseGeneration, u16)>);

impl GivenBack {
    /// Whether there is anything.
    #[inline]
    pub(super) fn is_any(self) -> bool {
        self.0.is_some()
    }

    /// Notes that a packet is given back.
    pub(super) fn note(&mut self, message: &NetMessage) {
        let newest = match self.0 {
            Some((generation, last))
                if generation == message.generation && !is_newer(message.sequence, last) =>
            {
                last
            }
            _ => message.sequence,
        };
        self.0 = Some((message.generation, newest));
    }

    /// Whether something that was given back has to be sent before this packet. One that has not is the first of those that are
    /// offered again.
    #[inline]
    pub(super) fn is_before(&mut self, message: &NetMessage) -> bool {
        let Some((generation, last)) = self.0 else { return false };
        // Another route was given the lease meanwhile, and everything over that.
        let before = generation == message.generation && is_newer(message.sequence, last);
        if !before {
            self.0 = None;
        }
        before
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
}
