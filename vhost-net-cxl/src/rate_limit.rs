//! Keeping an instance to its rate: token buckets, refilled once per turn and never per packet.

use std::time::{Duration, Instant};

use pod_protocol::objects::RateLimit;

use crate::vnet_header::WireCost;

const NS_PER_SECOND: u128 = 1_000_000_000;
/// A packet of the usual length, by which the bytes that are left are turned into packets that may be taken.
const USUAL_PACKET_BYTES: i64 = 1514;
/// Of how many milliseconds a sender's share may be saved up at least. Who has used it up is asked again after two, or a little
/// later: what came in by then must not be lost.
const SENDER_BURST_MS_MIN: u32 = 4;
/// Of how long a promised minimum may be saved up at most.
const MINIMUM_BURST: Duration = Duration::from_millis(10);

/// Tokens that come at a steady rate. What is taken beyond them is owed, so that on average the rate holds however
/// large packets are.
#[derive(Clone, Debug)]
struct Bucket {
    per_second: u64,
    capacity: i64,
    level: i64,
    /// What is owed beyond this is forgiven before more is taken.
    least: i64,
    /// Up to when tokens were handed out; behind the clock by less than one token.
    filled: Instant,
}

impl Bucket {
    fn new(per_second: u64, burst: Duration, now: Instant) -> Self {
        let capacity = u128::from(per_second) * burst.as_nanos() / NS_PER_SECOND;
        let capacity = i64::try_from(capacity).unwrap_or(i64::MAX).max(1);
        Self { per_second: per_second.max(1), capacity, level: capacity, least: i64::MIN, filled: now }
    }

    fn refill(&mut self, now: Instant) {
        let ns = now.saturating_duration_since(self.filled).as_nanos();
        let tokens = ns * u128::from(self.per_second) / NS_PER_SECOND;
        if tokens == 0 {
            return;
        }
        let used_ns = tokens * NS_PER_SECOND / u128::from(self.per_second);
        let level = self.level.saturating_add(i64::try_from(tokens).unwrap_or(i64::MAX));
        if level >= self.capacity {
            self.level = self.capacity;
            self.filled = now;
        } else {
            self.level = level;
            self.filled += Duration::from_nanos(u64::try_from(used_ns).unwrap_or(u64::MAX));
        }
    }

    fn take(&mut self, tokens: u64) {
        let level = self.level.max(self.least);
        self.level = level.saturating_sub(i64::try_from(tokens).unwrap_or(i64::MAX));
    }
}

/// The limits of one direction.
#[derive(Clone, Debug)]
pub struct RateLimiter {
    bytes: Option<Bucket>,
    packets: Option<Bucket>,
}

impl RateLimiter {
    /// A limiter with everything saved up that may be; nothing if nothing is limited.
    pub fn new(limit: &RateLimit, now: Instant) -> Option<Self> {
        let burst = Duration::from_millis(u64::from(limit.burst_ms));
        let bucket = |per_second: Option<u64>| per_second.map(|rate| Bucket::new(rate, burst, now));
        let limiter =
            Self { bytes: bucket(limit.bytes_per_second), packets: bucket(limit.packets_per_second) };
        (limiter.bytes.is_some() || limiter.packets.is_some()).then_some(limiter)
    }

    /// The same for a sender, who is looked at now and then and not at each packet: a shorter burst than 4 ms counts as that.
    pub fn of_sender(limit: &RateLimit, now: Instant) -> Option<Self> {
        Self::new(&RateLimit { burst_ms: limit.burst_ms.max(SENDER_BURST_MS_MIN), ..*limit }, now)
    }

    /// What counts how far somebody is below the minimum that is promised; nothing if nothing is. Little of it may be saved up:
    /// others wait while it is used.
    pub fn minimum(limit: &RateLimit, now: Instant) -> Option<Self> {
        let burst = MINIMUM_BURST.min(Duration::from_millis(u64::from(limit.burst_ms)));
        let bytes = limit.minimum_bytes_per_second.map(|rate| Bucket::new(rate, burst, now));
        let mut bytes = bytes?;
        // Whoever had more than that while there was enough for all has not forfeited it. The last packet counts whole: so a promise is
        // kept on average, whatever packets come to.
        bytes.least = -bytes.capacity;
        Some(Self { bytes: Some(bytes), packets: None })
    }

    /// Adds what has come in since the last time.
    pub fn refill(&mut self, now: Instant) {
        for bucket in [&mut self.bytes, &mut self.packets].into_iter().flatten() {
            bucket.refill(now);
        }
    }

    /// How many packets may be taken now.
    pub fn allowed(&self) -> usize {
        let count = |level: i64| usize::try_from(level).unwrap_or(0);
        let by_packets = self.packets.as_ref().map_or(usize::MAX, |bucket| count(bucket.level));
        let by_bytes = self.bytes.as_ref().map_or(usize::MAX, |bucket| {
            if bucket.level > 0 { count(bucket.level / USUAL_PACKET_BYTES) + 1 } else { 0 }
        });
        by_packets.min(by_bytes)
    }

    /// How many frames packets may come to that are taken now: packets until that is used up, the last one of them whole.
    pub fn allowed_frames(&self) -> u64 {
        self.packets.as_ref().map_or(u64::MAX, |bucket| u64::try_from(bucket.level).unwrap_or(0))
    }

    /// How many bytes may be taken now: packets until that is used up, the last one of them whole.
    pub fn allowed_bytes(&self) -> u64 {
        self.bytes.as_ref().map_or(u64::MAX, |bucket| u64::try_from(bucket.level).unwrap_or(0))
    }

    /// Of how long bytes are saved up, in nanoseconds; nothing if none are.
    pub fn saved_ns(&self) -> Option<u128> {
        let bucket = self.bytes.as_ref()?;
        let level = u128::try_from(bucket.level).ok().filter(|level| *level > 0)?;
        Some(level * NS_PER_SECOND / u128::from(bucket.per_second))
    }

    /// Of a promised minimum: whether less than that was had by now.
    pub fn is_below(&mut self, now: Instant) -> bool {
        self.refill(now);
        self.allowed() > 0
    }

    /// Notes what was taken, by what it comes to on a wire: a large frame may be many there, and each of them has headers.
    pub fn charge(&mut self, cost: WireCost) {
        if let Some(bucket) = &mut self.packets {
            bucket.take(cost.frames);
        }
        if let Some(bucket) = &mut self.bytes {
            bucket.take(cost.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn limit(bytes: Option<u64>, packets: Option<u64>, burst_ms: u32) -> RateLimit {
        RateLimit { bytes_per_second: bytes, packets_per_second: packets, burst_ms, ..RateLimit::default() }
    }

    fn cost(frames: u64, bytes: u64) -> WireCost {
        WireCost { frames, bytes }
    }

    #[test]
    fn nothing_limited_is_no_limiter() {
        assert!(RateLimiter::new(&RateLimit::default(), Instant::now()).is_none());
    }

    #[test]
    fn a_burst_may_be_saved_up_and_no_more() {
        let now = Instant::now();
        let mut limiter = RateLimiter::new(&limit(None, Some(1000), 50), now).expect("a limit");
        assert_eq!(limiter.allowed(), 50);
        limiter.charge(cost(50, 0));
        assert_eq!(limiter.allowed(), 0);
        limiter.refill(now + Duration::from_micros(999));
        assert_eq!(limiter.allowed(), 0);
        limiter.refill(now + Duration::from_millis(1));
        assert_eq!(limiter.allowed(), 1);
        limiter.refill(now + Duration::from_secs(9));
        assert_eq!(limiter.allowed(), 50);
    }

    #[test]
    fn a_large_packet_is_owed() {
        let now = Instant::now();
        let mut limiter = RateLimiter::new(&limit(Some(1_000_000), None, 1), now).expect("a limit");
        assert_eq!(limiter.allowed(), 1, "a thousand bytes");
        limiter.charge(cost(1, 65_000));
        limiter.refill(now + Duration::from_millis(64));
        assert_eq!(limiter.allowed(), 0);
        limiter.refill(now + Duration::from_millis(65));
        assert_eq!(limiter.allowed(), 1);
    }

    #[test]
    fn a_minimum_is_not_forfeited_by_having_had_more() {
        let now = Instant::now();
        let promise = RateLimit { minimum_bytes_per_second: Some(100_000_000), ..RateLimit::default() };
        let mut minimum = RateLimiter::minimum(&promise, now).expect("a promise");
        assert!(minimum.is_below(now));
        minimum.charge(cost(0, 1_000_000));
        assert!(!minimum.is_below(now), "ten milliseconds of it were saved up");
        (0..1000).for_each(|_| minimum.charge(cost(0, 65_000)));
        assert!(!minimum.is_below(now + Duration::from_millis(10)));
        assert!(minimum.is_below(now + Duration::from_millis(11)));
        assert!(RateLimiter::minimum(&limit(Some(5), Some(5), 9), now).is_none());
    }

    #[test]
    fn a_minimum_is_kept_on_average_whatever_packets_come_to() {
        let start = Instant::now();
        let promise = RateLimit { minimum_bytes_per_second: Some(1_000_000), ..RateLimit::default() };
        for bytes in [100, 65_000, 208_856, 3_000_000] {
            let mut minimum = RateLimiter::minimum(&promise, start).expect("a promise");
            let mut had = 0;
            for ms in 0..10_000 {
                while minimum.is_below(start + Duration::from_millis(ms)) {
                    minimum.charge(cost(1, bytes));
                    had += bytes;
                }
            }
            assert!((9_900_000..=10_020_000 + bytes).contains(&had), "{had} in packets of {bytes}");
        }
    }

    #[test]
    fn a_sender_with_the_shortest_burst_gets_its_rate_though_it_is_asked_every_two_milliseconds() {
        let start = Instant::now();
        for (bytes, packets) in [(Some(1_000_000_000), None), (None, Some(1_000_000))] {
            let mut limiter = RateLimiter::of_sender(&limit(bytes, packets, 1), start).expect("a limit");
            let (mut now, mut sent) = (start, 0);
            while now < start + Duration::from_secs(1) {
                limiter.refill(now);
                let (count, of_bytes) = (limiter.allowed() as u64, limiter.allowed_bytes());
                let (count, of_bytes) = if bytes.is_some() { (0, of_bytes) } else { (count, 0) };
                limiter.charge(cost(count, of_bytes));
                sent += count + of_bytes;
                // The timer is late at times.
                now += Duration::from_micros(2_000 + sent % 7 * 150);
            }
            let rate = bytes.or(packets).expect("one of them");
            assert!(sent >= rate / 100 * 95, "{sent} of {rate}");
        }
    }

    proptest! {
        #[test]
        fn the_rate_holds_over_any_time_however_it_is_cut(
            rate in 1..5_000_000_u64, burst_ms in 1..500_u32, steps in prop::collection::vec(1..20_000_000_u64, 1..200),
        ) {
            let start = Instant::now();
            let mut limiter = RateLimiter::new(&limit(None, Some(rate), burst_ms), start).expect("a limit");
            let (mut now, mut taken) = (start, 0_u128);
            for step in steps {
                let allowed = limiter.allowed();
                limiter.charge(cost(allowed as u64, 0));
                taken += allowed as u128;
                now += Duration::from_nanos(step);
                limiter.refill(now);
            }
            let burst = (u128::from(rate) * u128::from(burst_ms) / 1000).max(1);
            let most = u128::from(rate) * now.duration_since(start).as_nanos() / NS_PER_SECOND + burst;
            prop_assert!(taken <= most, "{taken} of {most}");
        }

        #[test]
        fn a_sender_that_always_wants_more_gets_its_rate(rate in 1_000..5_000_000_u64, step_us in 100..5_000_u64) {
            let start = Instant::now();
            let mut limiter = RateLimiter::new(&limit(None, Some(rate), 100), start).expect("a limit");
            let (mut now, mut taken) = (start, 0_u128);
            while now < start + Duration::from_secs(2) {
                let allowed = limiter.allowed();
                limiter.charge(cost(allowed as u64, 0));
                taken += allowed as u128;
                now += Duration::from_micros(step_us);
                limiter.refill(now);
            }
            // Not a token is lost to rounding but the last one.
            let least = u128::from(rate) * (now.duration_since(start).as_nanos() - u128::from(step_us) * 1000) / NS_PER_SECOND;
            prop_assert!(taken + 1 >= least, "{taken} of {least}");
        }
    }
}
