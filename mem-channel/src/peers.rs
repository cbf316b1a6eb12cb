//! What other hosts published, as far as it can be believed.

use std::collections::BTreeMap;

use crate::wire::sequence_of;
use crate::{RECORD_WORDS, Record, decode};

/// The newest record of every line of every other host.
///
/// A line may be read while it is written, or be an old copy of itself: then the record of before stays. A line that no
/// longer changes belongs to a host that no longer moves anything, and stops counting.
#[derive(Clone, Debug)]
pub struct Peers {
    stale_after_us: f64,
    hosts: BTreeMap<u16, Vec<Option<Line>>>,
}

#[derive(Clone, Copy, Debug)]
struct Line {
    sequence: u32,
    changed_us: f64,
    record: Record,
}

impl Peers {
    /// Nothing known yet. Lines count until they have not changed for this long, some K.
    pub fn new(stale_after_us: f64) -> Self {
        Self { stale_after_us, hosts: BTreeMap::new() }
    }

    /// Lines count until they have not changed for this long from now on.
    pub fn set_stale_after(&mut self, stale_after_us: f64) {
        self.stale_after_us = stale_after_us;
    }

    /// Takes what was read of a host's line at a time of the caller's clock, in µs. Returns whether it was news.
    pub fn take(&mut self, host: u16, line: u32, words: &[u64; RECORD_WORDS], now_us: f64) -> bool {
        let lines = self.hosts.entry(host).or_default();
        let place = line as usize;
        if let Some(Some(known)) = lines.get(place)
            && known.sequence == sequence_of(words)
        {
            return false;
        }
        let Some((sequence, record)) = decode(words) else { return false };
        if lines.len() <= place {
            lines.resize(place + 1, None);
        }
        let new = Line { sequence, changed_us: now_us, record };
        let Some(known) = &mut lines[place] else {
            lines[place] = Some(new);
            return true;
        };
        // Sequence numbers wrap: the nearer way round is taken (RFC 1982). One that is older may be believed once what is
        // known is stale: its writer began anew.
        let ahead = sequence.wrapping_sub(known.sequence);
        let stale = now_us - known.changed_us > self.stale_after_us;
        let news = ahead != 0 && (ahead < 1 << 31 || stale);
        if news {
            *known = new;
        }
        news
    }

    /// The records that count at this time, and which host published each: host by host, each in the order of its lines.
    pub fn records(&self, now_us: f64) -> impl Iterator<Item = (u16, &Record)> {
        let live = move |line: &&Line| now_us - line.changed_us <= self.stale_after_us;
        self.hosts.iter().flat_map(move |(&host, lines)| {
            lines.iter().flatten().filter(live).map(move |line| (host, &line.record))
        })
    }

    /// Drops all lines of a host but so many: it publishes no more than those now.
    pub fn truncate(&mut self, host: u16, lines: usize) {
        if let Some(known) = self.hosts.get_mut(&host) {
            known.truncate(lines);
        }
    }

    /// Drops a host that is known to be gone.
    pub fn forget(&mut self, host: u16) {
        self.hosts.remove(&host);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ElementId, Node, Sums, encode};

    fn words(rate: f64, sequence: u32) -> [u64; RECORD_WORDS] {
        let sums = Sums { rate, ..Sums::default() };
        let record = Record { element: ElementId(1), node: Node::Root { capacity: 1.0, load: 0.0 }, sums };
        encode(&record, sequence)
    }

    fn rates(peers: &Peers, now_us: f64) -> Vec<f64> {
        peers.records(now_us).map(|(_, record)| record.sums.rate).collect()
    }

    #[test]
    fn older_torn_and_repeated_lines_change_nothing() {
        let mut peers = Peers::new(1000.0);
        assert!(peers.take(1, 0, &words(5.0, u32::MAX), 0.0));
        assert!(peers.take(1, 0, &words(6.0, 0), 10.0), "the sequence wraps");
        assert!(!peers.take(1, 0, &words(5.0, u32::MAX), 20.0));
        assert!(!peers.take(1, 0, &words(6.0, 0), 30.0));
        let mut torn = words(7.0, 1);
        torn[1] = 0;
        assert!(!peers.take(1, 0, &torn, 40.0));
        assert_eq!(rates(&peers, 50.0), [6.0]);
    }

    #[test]
    fn a_host_that_says_nothing_new_stops_counting() {
        let mut peers = Peers::new(1000.0);
        peers.take(1, 0, &words(5.0, 100), 0.0);
        peers.take(2, 0, &words(7.0, 1), 900.0);
        peers.take(1, 0, &words(5.0, 100), 1100.0);
        assert_eq!(rates(&peers, 1500.0), [7.0]);
        assert!(peers.take(1, 0, &words(3.0, 1), 1600.0), "its line was begun anew");
        assert_eq!(rates(&peers, 1600.0), [3.0, 7.0]);
        peers.forget(2);
        assert_eq!(rates(&peers, 1600.0), [3.0]);
    }
}
