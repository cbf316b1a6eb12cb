//! Messages among replicas: late, lost, overtaking each other, and held up by partitions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cxl_pool::ReplicaId;
use cxl_pool::simulated::Random;
use pod_protocol::replicas::ReplicaPortError;

use super::super::exchange::Exchange;

/// What is between all replicas.
#[derive(Clone, Debug)]
pub(super) struct Net(Arc<Mutex<Ways>>);

#[derive(Debug)]
struct Ways {
    now_ms: u64,
    /// By when they arrive; of those that arrive together, the first that was sent.
    under_way: BTreeMap<(u64, u64), Message>,
    sent: u64,
    /// One message in so many is lost; 0 for none.
    lost_one_in: u64,
    /// How late a message is at most, in ms.
    late_ms: u64,
    /// Which ways are cut: from whom, to whom.
    cut: BTreeSet<(u16, u16)>,
    /// Who is there to be connected to.
    there: BTreeSet<u16>,
    /// How often each began to be there.
    lives: BTreeMap<u16, u64>,
    seen: Seen,
    random: Random,
}

#[derive(Debug)]
struct Message {
    from: u16,
    to: u16,
    number: u64,
    bytes: Vec<u8>,
}

/// What became of messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Seen {
    pub(super) sent: u64,
    pub(super) arrived: u64,
    pub(super) lost: u64,
    pub(super) overtook: u64,
}

impl Net {
    pub(super) fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(Ways {
            now_ms: 0,
            under_way: BTreeMap::new(),
            sent: 0,
            lost_one_in: 0,
            late_ms: 3,
            cut: BTreeSet::new(),
            there: BTreeSet::new(),
            lives: BTreeMap::new(),
            seen: Seen::default(),
            random: Random::new(seed),
        })))
    }

    fn ways(&self) -> MutexGuard<'_, Ways> {
        // Whoever panicked has failed the test already.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn pass(&self, now_ms: u64) {
        self.ways().now_ms = now_ms;
    }

    /// From now on one message in so many is lost, and messages are up to so late.
    pub(super) fn set_weather(&self, lost_one_in: u64, late_ms: u64) {
        let mut ways = self.ways();
        ways.lost_one_in = lost_one_in;
        ways.late_ms = late_ms;
    }

    /// Nothing gets from one to the other any more.
    pub(super) fn cut(&self, from: u16, to: u16) {
        self.ways().cut.insert((from, to));
    }

    pub(super) fn mend(&self) {
        self.ways().cut.clear();
    }

    /// A replica began or ended to be there.
    pub(super) fn set_there(&self, replica: u16, there: bool) {
        let mut ways = self.ways();
        if there {
            ways.there.insert(replica);
            *ways.lives.entry(replica).or_default() += 1;
        } else {
            ways.there.remove(&replica);
        }
    }

    pub(super) fn seen(&self) -> Seen {
        self.ways().seen
    }
}

/// A replica's end of it.
pub(super) struct Wire {
    pub(super) net: Net,
    pub(super) me: u16,
}

impl Exchange for Wire {
    fn check(&self) -> Result<(), ReplicaPortError> {
        Ok(())
    }

    fn poll(&mut self, _now: Instant) -> Option<(ReplicaId, Vec<u8>)> {
        let mut ways = self.net.ways();
        let now = (ways.now_ms, u64::MAX);
        let due = ways.under_way.range(..=now).find(|(_, message)| message.to == self.me)?;
        let due = *due.0;
        let message = ways.under_way.remove(&due)?;
        let is_overtaken =
            |it: &Message| it.to == message.to && it.from == message.from && it.number < message.number;
        ways.seen.overtook += u64::from(ways.under_way.values().any(is_overtaken));
        ways.seen.arrived += 1;
        Some((ReplicaId::new(message.from), message.bytes))
    }

    fn send(&mut self, to: ReplicaId, bytes: Vec<u8>) -> Result<(), ReplicaPortError> {
        let mut ways = self.net.ways();
        let ways = &mut *ways;
        let to = to.get();
        // Sometimes it is known that nobody is there; sometimes that is not known yet.
        if !ways.there.contains(&to) && !ways.random.one_in(3) {
            return Err(ReplicaPortError::NotConnected { replica: ReplicaId::new(to) });
        }
        ways.sent += 1;
        ways.seen.sent += 1;
        let is_lost = ways.lost_one_in > 0 && ways.random.one_in(ways.lost_one_in);
        if is_lost || ways.cut.contains(&(self.me, to)) {
            ways.seen.lost += 1;
            return Ok(());
        }
        // Most are as quick as can be.
        let most = if ways.random.one_in(4) { ways.late_ms } else { 2 };
        let due = ways.now_ms + 1 + ways.random.below(most.max(1));
        let message = Message { from: self.me, to, number: ways.sent, bytes };
        ways.under_way.insert((due, ways.sent), message);
        Ok(())
    }

    fn losses(&self, to: ReplicaId) -> u64 {
        self.net.ways().lives.get(&to.get()).copied().unwrap_or(0)
    }

    fn wait(&mut self, _at_most: Duration) {}
}
