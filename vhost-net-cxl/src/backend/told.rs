//! What frontends have said that their guests' drivers accept.
//!
//! A frontend says it once per channel and route. The controller tells frontends and backends of a lease at the same time, so that
//! may be before we hear of the lease, or of the frontend that it is with now.

use std::collections::HashMap;

use pod_protocol::ids::{ChannelId, LeaseId};
use pod_protocol::objects::REGISTRATIONS_MAX;

use crate::offloads::Offloads;

/// So many are remembered: those of all leases that several NICs can have. A frontend may name any lease.
const TOLD_MAX: usize = 4 * REGISTRATIONS_MAX;

/// By channel and lease, what was said last.
#[derive(Debug, Default)]
pub(super) struct Told(HashMap<(ChannelId, LeaseId), Offloads>);

impl Told {
    /// Notes what was said of a lease over a channel. Where there is no room, leases that are not `known` make some.
    pub(super) fn note(
        &mut self,
        of: (ChannelId, LeaseId),
        accepts: Offloads,
        known: impl Fn(LeaseId) -> bool,
    ) {
        if self.0.len() >= TOLD_MAX && !self.0.contains_key(&of) {
            self.0.retain(|(_, lease), _| known(*lease));
            if self.0.len() >= TOLD_MAX {
                return;
            }
        }
        self.0.insert(of, accepts);
    }

    /// What was said, if anything was.
    pub(super) fn get(&self, of: (ChannelId, LeaseId)) -> Option<Offloads> {
        self.0.get(&of).copied()
    }

    /// A frontend begins anew, or is gone.
    pub(super) fn forget(&mut self, channel: ChannelId) {
        self.0.retain(|(other, _), _| *other != channel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(channel: u32, lease: usize) -> (ChannelId, LeaseId) {
        let lease = u32::try_from(lease).ok().and_then(LeaseId::new);
        (ChannelId::new(channel), lease.expect("24 bits"))
    }

    #[test]
    fn what_was_said_last_counts_until_its_channel_begins_anew() {
        let mut told = Told::default();
        told.note(of(1, 7), Offloads::ALL, |_| false);
        told.note(of(2, 7), Offloads::CHECKSUM, |_| false);
        told.note(of(1, 7), Offloads::TSO4.union(Offloads::CHECKSUM), |_| false);
        assert_eq!(told.get(of(1, 7)), Some(Offloads::TSO4.union(Offloads::CHECKSUM)));
        assert_eq!(told.get(of(1, 8)), None);
        told.forget(ChannelId::new(1));
        assert_eq!(told.get(of(1, 7)), None);
        assert_eq!(told.get(of(2, 7)), Some(Offloads::CHECKSUM));
    }

    #[test]
    fn a_frontend_that_speaks_of_everything_takes_no_more_room_than_that() {
        let mut told = Told::default();
        let known = |lease: LeaseId| lease.get() < 10;
        for lease in 0..3 * TOLD_MAX {
            told.note(of(1, lease), Offloads::ALL, known);
            assert!(told.0.len() <= TOLD_MAX);
        }
        assert_eq!(told.get(of(1, 9)), Some(Offloads::ALL), "leases that are here stay");
        assert_eq!(told.get(of(1, 3 * TOLD_MAX - 1)), Some(Offloads::ALL));
        // All of them are known.
        let mut told = Told::default();
        for lease in 0..=TOLD_MAX {
            told.note(of(1, lease), Offloads::ALL, |_| true);
        }
        assert_eq!(told.get(of(1, TOLD_MAX)), None);
        told.note(of(1, 0), Offloads::CHECKSUM, |_| true);
        assert_eq!(told.get(of(1, 0)), Some(Offloads::CHECKSUM));
    }
}
