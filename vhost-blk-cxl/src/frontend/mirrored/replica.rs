//! One replica of a mirrored disk, as its frontend sees it.

use std::collections::VecDeque;
use std::time::Duration;

use pod_protocol::ids::{ChannelId, LeaseGeneration, LeaseId, PlaceNumber};
use pod_protocol::objects::{ReplicaObject, Route};
use vhost_frontend::Buffer;

use super::super::last_look::Throttled;
use super::super::regions::Regions;
use super::super::unflushed::Unflushed;
use crate::message::{Holder, Tag};

/// So many more requests than others a replica on the frontend's own host has before reads go to those.
const NEAR_REQUESTS: usize = 4;

/// How far a stale replica has come on its way back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resync {
    /// It gets nothing: it is not there, or was not asked yet.
    Idle,
    /// It failed on its way; it is tried again with the next tick.
    Resting,
    /// It is being asked whether it still has what it had.
    Probing,
    /// It gets every write, and region by region what it missed.
    Copying,
    /// It has everything, and is bringing it to its medium.
    Flushing,
    /// It has everything, and gets the log of intents in this content or a later one.
    Joining(u64),
    /// It is like the others, and the controller was told so in this epoch. No write ends without it from here on.
    Told(u64),
}

/// A request that the replica may still be carrying out, although nobody waits for its answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Orphan {
    pub(super) tag: Tag,
    pub(super) sent_as: Holder,
    /// What it may still be filling.
    pub(super) buffer: Option<Buffer>,
}

/// A replica.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "they come and go independently of each other")]
pub(super) struct Replica {
    pub(super) number: u32,
    pub(super) ssd: String,
    pub(super) route: Route,
    /// Which of the lease's places it is where that leads.
    pub(super) place: PlaceNumber,
    /// The controller counts on it: it has every write that was acknowledged.
    pub(super) in_sync: bool,
    /// The controller says that it cannot be reached.
    pub(super) away: bool,
    /// It is to go.
    pub(super) leaving: bool,
    /// Its channel can be used.
    pub(super) ready: bool,
    /// Its SSD is on the frontend's own host.
    pub(super) near: bool,
    /// Its backend refused the lease's current generation: wait until the controller says something new.
    pub(super) refused: bool,
    /// What is to be sent to it.
    pub(super) queue: VecDeque<u16>,
    /// How many requests it has, orphans included.
    pub(super) sent: u32,
    pub(super) orphans: Vec<Orphan>,
    /// Where it differs, or may differ, from the source.
    pub(super) dirty: Regions,
    pub(super) unflushed: Unflushed,
    pub(super) resync: Resync,
    /// Its SSD has a place for the log of intents, as far as is known.
    pub(super) keeps_log: bool,
    /// The last content of the log that it has.
    pub(super) log_version: u64,
    /// It missed a write, and why. The controller has yet to confirm that nobody counts on it any more.
    pub(super) failing: Option<String>,
    /// It is failing because it lost writes that others have: what it reads until it is dropped may be older than they are.
    pub(super) lost: bool,
    /// The request that it has had for the longest time.
    pub(super) oldest: Option<Oldest>,
    /// How long that may wait for the volume's rates.
    pub(super) throttled: Throttled,
}

/// A request as it was seen with a replica.
#[derive(Debug, Clone, Copy)]
pub(super) struct Oldest {
    pub(super) sequence: u64,
    pub(super) generation: LeaseGeneration,
    /// For how long it has been there.
    pub(super) waited: Duration,
}

impl Replica {
    pub(super) fn new(object: &ReplicaObject, size_bytes: u64) -> Self {
        Self {
            number: object.number,
            ssd: object.ssd.clone(),
            route: object.route,
            place: object.place,
            in_sync: object.in_sync,
            away: object.away,
            leaving: object.leaving,
            ready: false,
            near: false,
            refused: false,
            queue: VecDeque::new(),
            sent: 0,
            orphans: Vec::new(),
            dirty: Regions::none_of(size_bytes),
            unflushed: Unflushed::default(),
            resync: Resync::Idle,
            keeps_log: true,
            log_version: 0,
            failing: None,
            lost: false,
            oldest: None,
            throttled: Throttled::default(),
        }
    }

    /// As what requests are sent to it.
    pub(super) fn holder(&self, lease: LeaseId) -> Holder {
        Holder { lease, place: self.place, generation: self.route.generation }
    }

    /// Whether it is reached over this channel; another one may be as well.
    pub(super) fn is_on(&self, channel: ChannelId) -> bool {
        self.route.channel == channel
    }

    /// Whether no write may be acknowledged without it.
    pub(super) fn counts(&self) -> bool {
        self.in_sync || matches!(self.resync, Resync::Told(_))
    }

    /// Whether it gets what changes the medium.
    pub(super) fn gets_writes(&self) -> bool {
        let joins = matches!(self.resync, Resync::Copying | Resync::Flushing | Resync::Joining(_));
        self.failing.is_none() && (self.counts() || joins)
    }

    /// Whether reads may go to it: it is known to the controller as good, and answers.
    pub(super) fn gets_reads(&self) -> bool {
        self.in_sync && self.failing.is_none() && self.is_there()
    }

    /// How far it is from answering a read, in requests. Those of another host pass the fabric twice, which is worth waiting for a few
    /// of one that is near.
    pub(super) fn distance(&self) -> (usize, bool) {
        let requests = self.queue.len() + self.sent as usize;
        (requests.saturating_sub(if self.near { NEAR_REQUESTS } else { 0 }), !self.near)
    }

    /// Whether it can be asked anything.
    pub(super) fn is_there(&self) -> bool {
        self.ready && !self.refused && !self.away
    }

    /// Takes note of an answer to an orphan. Its buffer is free now.
    pub(super) fn orphan_answered(&mut self, tag: Tag, sent_as: Holder) -> Option<Orphan> {
        let at = self.orphans.iter().position(|orphan| orphan.tag == tag && orphan.sent_as == sent_as)?;
        self.sent -= 1;
        Some(self.orphans.swap_remove(at))
    }
}
