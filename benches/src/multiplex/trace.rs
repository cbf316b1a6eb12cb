//! Bursty traffic, made of a seed: what a host gets, and when.

/// One packet on its way to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    /// When its last bit would be here if nothing else were on the wire, in ns from the beginning.
    pub(super) at_ns: u64,
    /// Length of its frame.
    pub(super) bytes: u32,
}

/// Mean time between two bursts.
const BETWEEN_NS: f64 = 180_000.0;
/// Packets of a burst: Pareto with this exponent, from one on.
const BURST_EXPONENT: f64 = 1.2;
const BURST_MAX: f64 = 64.0;
/// Within a burst, packets follow one another as fast as a sender with this rate sends.
const SENDER_BITS_PER_NS: f64 = 10.0;
/// Lengths, and how many of a hundred packets have them: small ones and full ones mostly, as in data centres.
const LENGTHS: [(u32, u64); 3] = [(64, 45), (576, 15), (1514, 40)];

/// The packets to a host, in order. The same for the same seed.
#[derive(Clone, Debug)]
pub(super) struct Trace {
    random: u64,
    at_ns: f64,
    left: u64,
}

impl Trace {
    pub(super) fn new(seed: u64) -> Self {
        Self { random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, at_ns: 0.0, left: 0 }
    }

    /// Between 0 and 1, neither included (xorshift64*).
    #[allow(clippy::cast_precision_loss, reason = "53 bits")]
    fn uniform(&mut self) -> f64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        let bits = self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11;
        (bits as f64 + 0.5) / (1_u64 << 53) as f64
    }
}

impl Iterator for Trace {
    type Item = Arrival;

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small and positive")]
    fn next(&mut self) -> Option<Arrival> {
        if self.left == 0 {
            self.at_ns -= BETWEEN_NS * self.uniform().ln();
            self.left = self.uniform().powf(-1.0 / BURST_EXPONENT).min(BURST_MAX) as u64;
        }
        self.left -= 1;
        let mut lot = (self.uniform() * 100.0) as u64;
        let mut bytes = LENGTHS[0].0;
        for (length, share) in LENGTHS {
            bytes = length;
            if lot < share {
                break;
            }
            lot -= share;
        }
        self.at_ns += f64::from(bytes) * 8.0 / SENDER_BITS_PER_NS;
        Some(Arrival { at_ns: self.at_ns as u64, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_bursty_ordered_and_repeats_with_its_seed() {
        let arrivals: Vec<Arrival> = Trace::new(7).take(20_000).collect();
        assert_eq!(arrivals, Trace::new(7).take(20_000).collect::<Vec<_>>());
        assert_ne!(arrivals, Trace::new(8).take(20_000).collect::<Vec<_>>());
        assert!(arrivals.is_sorted_by_key(|it| it.at_ns));
        let gaps = arrivals.windows(2).map(|pair| pair[1].at_ns - pair[0].at_ns);
        let close = gaps.filter(|gap| *gap < 2_000).count();
        assert!((8_000..19_000).contains(&close), "{close} of them follow closely");
        assert!(arrivals.iter().any(|it| it.bytes == 64) && arrivals.iter().any(|it| it.bytes == 1514));
    }
}
