//! A record as one cache line.
//!
//! | word | content, little-endian |
//! |---|---|
//! | 0 | element, bits 0–31; tenant, bits 32–63 (all ones: the root) |
//! | 1–5 | F, ΣD, max(D/w), α, Σw as IEEE 754 binary64 |
//! | 6 | binary32 each: capacity and load of the root, or the tenant's weight and 0 |
//! | 7 | sequence number, bits 0–31; checksum of the rest, bits 32–63, never 0 |

use crate::{ElementId, Node, Record, Sums, TenantId};

/// Words of 8 bytes that a record takes: a cache line.
pub const RECORD_WORDS: usize = 8;

const ROOT: u32 = u32::MAX;

/// The line's words. Each of them may arrive before any other: the checksum tells whether all did.
pub fn encode(record: &Record, sequence: u32) -> [u64; RECORD_WORDS] {
    let Record { element, node, sums } = record;
    let (tenant, extra) = match *node {
        Node::Root { capacity, load } => (ROOT, pair(capacity.to_bits(), load.to_bits())),
        Node::Tenant { tenant, weight } => (tenant.0, pair(weight.to_bits(), 0)),
    };
    let numbers = [sums.rate, sums.demand, sums.max_demand, sums.alpha, sums.weight].map(f64::to_bits);
    let [rate, demand, max_demand, alpha, weight] = numbers;
    let mut words = [pair(element.0, tenant), rate, demand, max_demand, alpha, weight, extra, 0];
    words[7] = pair(sequence, checksum(&words, sequence));
    words
}

/// What a line holds: its sequence number and its record. Nothing if none was ever written, if only parts of it have
/// arrived, or if it holds numbers that cannot be.
pub fn decode(words: &[u64; RECORD_WORDS]) -> Option<(u32, Record)> {
    let sequence = low(words[7]);
    if high(words[7]) != checksum(words, sequence) {
        return None;
    }
    let numbers = [words[1], words[2], words[3], words[4], words[5]].map(f64::from_bits);
    let extra = [f32::from_bits(low(words[6])), f32::from_bits(high(words[6]))];
    let good = |number: f64| number.is_finite() && number >= 0.0;
    if !numbers.into_iter().chain(extra.map(f64::from)).all(good) {
        return None;
    }
    let [rate, demand, max_demand, alpha, weight] = numbers;
    let node = match high(words[0]) {
        ROOT => Node::Root { capacity: extra[0], load: extra[1].min(1.0) },
        tenant if extra[0] > 0.0 => Node::Tenant { tenant: TenantId(tenant), weight: extra[0] },
        _ => return None,
    };
    let sums = Sums { rate, demand, max_demand, alpha, weight };
    Some((sequence, Record { element: ElementId(low(words[0])), node, sums }))
}

/// The sequence number, whatever the rest of the line says.
pub(crate) fn sequence_of(words: &[u64; RECORD_WORDS]) -> u32 {
    low(words[7])
}

/// Against lines that arrived in part, not against malice.
fn checksum(words: &[u64; RECORD_WORDS], sequence: u32) -> u32 {
    let mixed = words[..7].iter().fold(u64::from(sequence) ^ 0x6d65_6d2d_6368_616e, |mixed, word| {
        let product = (mixed ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        product ^ (product >> 29)
    });
    high(mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9)).max(1)
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | (u64::from(high) << 32)
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
fn low(word: u64) -> u32 {
    word as u32
}

fn high(word: u64) -> u32 {
    low(word >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rate: f64, node: Node) -> Record {
        let sums = Sums { rate, demand: 2.0, max_demand: 3.5, alpha: 4.0, weight: 5.0 };
        Record { element: ElementId(7), node, sums }
    }

    #[test]
    fn records_read_back() {
        let root = record(1.0, Node::Root { capacity: 22e9, load: 0.25 });
        let tenant = record(0.0, Node::Tenant { tenant: TenantId(3), weight: 0.5 });
        for (record, sequence) in [(root, 1), (tenant, u32::MAX)] {
            assert_eq!(decode(&encode(&record, sequence)), Some((sequence, record)));
        }
    }

    #[test]
    fn lines_that_arrived_in_part_are_none() {
        let node = Node::Root { capacity: 22e9, load: 0.25 };
        let (old, new) = (encode(&record(1.0, node), 8), encode(&record(2.0, node), 9));
        for arrived in 1..255_u32 {
            let mut mixed = old;
            for word in (0..8).filter(|word| arrived & (1 << word) != 0) {
                mixed[word] = new[word];
            }
            assert!(mixed == old || mixed == new || decode(&mixed).is_none(), "{arrived:#b}");
        }
        assert_eq!(decode(&[0; 8]), None);
        assert_eq!(decode(&[u64::MAX; 8]), None);
    }

    #[test]
    fn numbers_that_cannot_be_are_refused() {
        let node = Node::Tenant { tenant: TenantId(3), weight: 1.0 };
        for rate in [f64::NAN, f64::INFINITY, -1.0] {
            assert_eq!(decode(&encode(&record(rate, node), 1)), None);
        }
        assert_eq!(decode(&encode(&record(1.0, Node::Tenant { tenant: TenantId(3), weight: 0.0 }), 1)), None);
    }
}
