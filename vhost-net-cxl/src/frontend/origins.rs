//! Where the frames lie that a backend may speak of.
//!
//! A backend says of each frame where in the pool it is. It is believed as far as its NICs receive there, which the controller
//! says: one that is wrong, or that somebody has taken over, could have anything of the pool copied into a guest otherwise.

use std::cell::Cell;

use cxl_pool::{Area, Memory};
use pod_protocol::objects::ChannelObject;

use crate::channel_end::whole_pool;
use crate::counters::DropReason;
use crate::message::NetMessage;

/// Bytes of the pool, from the first to the one behind the last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Span {
    start: u64,
    end: u64,
}

impl Span {
    fn of(area: &Area) -> Self {
        Self { start: area.start_byte().get(), end: area.end().bytes().get() }
    }

    #[inline]
    fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }
}

/// The parts of the pool in which the frames of one backend lie.
#[derive(Debug)]
pub(super) struct Origins {
    /// In order.
    all: Vec<Span>,
    /// Where the last one lay: the next one mostly does, too.
    last: Cell<Span>,
}

impl Origins {
    /// What the controller says of a channel.
    pub(super) fn of<M: Memory>(memory: &M, channel: &ChannelObject) -> Result<Self, String> {
        let pool = whole_pool(memory);
        let areas = channel.receives.as_deref().unwrap_or(std::slice::from_ref(&pool));
        if let Some(area) = areas.iter().find(|area| !pool.contains_area(area)) {
            return Err(format!("{area}, where {} receives, lie outside of the pool", channel.peer));
        }
        let mut all: Vec<Span> = areas.iter().map(Span::of).collect();
        all.sort_unstable();
        Ok(Self { last: Cell::new(all.first().copied().unwrap_or_default()), all })
    }

    /// Whether a piece of a frame lies where it may; otherwise why it is not to be looked at.
    #[inline]
    pub(super) fn check(&self, piece: &NetMessage) -> Result<(), DropReason> {
        if piece.bytes == 0 {
            return Err(DropReason::BadMessage);
        }
        let start = piece.line.bytes().get();
        let span = Span { start, end: start.saturating_add(piece.bytes.into()) };
        if self.last.get().contains(span) || self.find(span) { Ok(()) } else { Err(DropReason::OutsideArea) }
    }

    fn find(&self, span: Span) -> bool {
        let behind = self.all.partition_point(|it| it.start <= span.start);
        let found = self.all[..behind].last().copied().filter(|it| it.contains(span));
        if let Some(found) = found {
            self.last.set(found);
        }
        found.is_some()
    }
}

#[cfg(test)]
mod tests {
    use cxl_channel::RingPlacement;
    use cxl_pool::simulated::SimulatedPool;
    use cxl_pool::{EndpointId, Generation, HostId, LINE_BYTES, LineCount, LineOffset, Role};
    use pod_protocol::ids::{ChannelId, LeaseGeneration, LeaseId};
    use pod_protocol::objects::Engine;
    use proptest::prelude::*;

    use super::*;
    use crate::message::Opcode;

    const POOL_LINES: u64 = 1024;

    fn piece(line: u64, bytes: u32) -> NetMessage {
        NetMessage {
            opcode: Opcode::Receive,
            lease: LeaseId::new(1).expect("small"),
            generation: LeaseGeneration::new(1),
            sequence: 0,
            line: LineOffset::new(line),
            bytes,
            more: false,
        }
    }

    fn origins(areas: Option<&[(u64, u64)]>) -> Result<Origins, String> {
        let area = |(start, lines): &(u64, u64)| Area::new(LineOffset::new(*start), LineCount::new(*lines));
        let ring = RingPlacement { start: LineOffset::new(0), slots: 64 };
        let channel = ChannelObject {
            id: ChannelId::new(1),
            engine: Engine::Net,
            peer: EndpointId::new(HostId::new(2), Role::NetBackend),
            generation: Generation::new(1),
            outgoing: ring,
            incoming: ring,
            receives: areas.map(|all| all.iter().map(area).collect()),
        };
        let pool = SimulatedPool::new(1, POOL_LINES * LINE_BYTES as u64);
        Origins::of(&pool.host(HostId::new(1)), &channel)
    }

    #[test]
    fn frames_lie_in_one_of_the_areas_as_a_whole() {
        let origins = origins(Some(&[(500, 10), (100, 10), (110, 5)])).expect("in the pool");
        for fine in [(100, 640), (109, 64), (110, 320), (500, 1), (509, 64), (100, 1)] {
            assert_eq!(origins.check(&piece(fine.0, fine.1)), Ok(()), "{fine:?}");
        }
        for outside in
            [(99, 1), (99, 64), (109, 65), (115, 1), (509, 65), (510, 1), (0, 1), (1 << 41, 1 << 19)]
        {
            let refused = origins.check(&piece(outside.0, outside.1));
            assert_eq!(refused, Err(DropReason::OutsideArea), "{outside:?}");
        }
        assert_eq!(origins.check(&piece(100, 0)), Err(DropReason::BadMessage));
    }

    #[test]
    fn who_receives_nowhere_speaks_of_nothing_and_who_is_not_limited_of_all() {
        let nowhere = origins(Some(&[])).expect("nothing wrong");
        assert_eq!(nowhere.check(&piece(0, 1)), Err(DropReason::OutsideArea));
        let anywhere = origins(None).expect("nothing wrong");
        assert_eq!(anywhere.check(&piece(POOL_LINES - 1, 64)), Ok(()));
        assert_eq!(anywhere.check(&piece(POOL_LINES - 1, 65)), Err(DropReason::OutsideArea));
        assert!(origins(Some(&[(POOL_LINES - 1, 2)])).is_err());
    }

    proptest! {
        #[test]
        fn what_was_asked_before_changes_nothing(
            asked in prop::collection::vec((0..POOL_LINES, 0..2000_u32), 1..100),
        ) {
            let areas = [(20, 30), (50, 1), (400, 200), (900, 100)];
            let known = origins(Some(&areas)).expect("in the pool");
            for (line, bytes) in asked {
                let lines = u64::from(bytes).div_ceil(LINE_BYTES as u64);
                let inside = areas.iter().any(|(start, all)| line >= *start && line + lines <= start + all);
                prop_assert_eq!(known.check(&piece(line, bytes)).is_ok(), inside && bytes > 0);
            }
        }
    }
}
