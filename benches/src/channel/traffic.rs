//! What the sender sends and the receiver measures, the same for everything that is compared.
//!
//! The first word of a message is the time at which it was due, in ns; the last one its number. Latency counts from
//! when a message was due, so that a sender that is held up does not hide it.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;
use rustix::time::{ClockId, clock_gettime};

use super::ends::{Inlet, Outlet};

/// The number of the message after which none comes.
const LAST: u64 = u64::MAX >> 1;
/// How many messages are handed over at a time at full speed.
const BATCH: usize = 32;
/// Messages in this part of a run's beginning are not measured.
const WARM_UP: u32 = 5;
const PATIENCE: Duration = Duration::from_secs(20);

/// What a run sends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Traffic {
    /// Messages per second; nothing for as fast as it goes.
    pub(crate) rate: Option<f64>,
    pub(crate) duration: Duration,
}

/// What a run measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    /// Millions of messages per second that arrived.
    pub(crate) rate_m: f64,
    /// One-way latency; at full speed there is none to speak of.
    pub(crate) latency: Option<Latency>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Latency {
    pub(crate) median_ns: f64,
    pub(crate) p99_ns: f64,
}

/// Both processes read the same clock.
fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // Neither is ever negative on this clock.
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

fn message<const WORDS: usize>(due_ns: u64, number: u64) -> [u64; WORDS] {
    let mut message = [number; WORDS];
    message[0] = due_ns;
    message
}

/// Sends.
pub(crate) fn send<const WORDS: usize>(outlet: &mut impl Outlet<WORDS>, traffic: Traffic) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !outlet.ready() {
        ensure!(Instant::now() < deadline, "the receiver did not come");
    }
    match traffic.rate {
        Some(rate) => send_paced(outlet, rate, traffic.duration),
        None => send_flat_out(outlet, traffic.duration),
    }
    while outlet.offer(&[message(0, LAST)]) == 0 {
        ensure!(Instant::now() < deadline, "the receiver took nothing any more");
    }
    outlet.publish();
    Ok(())
}

fn send_flat_out<const WORDS: usize>(outlet: &mut impl Outlet<WORDS>, duration: Duration) {
    let start = Instant::now();
    let mut batch: [[u64; WORDS]; BATCH] = std::array::from_fn(|index| message(0, index as u64));
    while start.elapsed() < duration {
        for _ in 0..64 {
            let sent = outlet.offer(&batch);
            if sent < BATCH {
                outlet.publish();
            }
            // Not made anew: that would take as long as to send them.
            for message in &mut batch {
                message[WORDS - 1] += sent as u64;
            }
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "counts and times of a run stay far below 2^53")]
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a time in a run, in ns, is small"
)]
fn send_paced<const WORDS: usize>(outlet: &mut impl Outlet<WORDS>, rate: f64, duration: Duration) {
    let gap_ns = 1e9 / rate;
    let (start, duration) = (now_ns(), duration.as_nanos() as u64);
    let due = |number: u64| (number as f64 * gap_ns) as u64;
    let mut number = 0;
    loop {
        let passed = now_ns() - start;
        if passed >= duration {
            return;
        }
        if due(number) > passed {
            continue;
        }
        // As the engines do it: asks for room, gathers what is there by then, and publishes once there is nothing more to send.
        if outlet.room() == 0 {
            continue;
        }
        let passed = now_ns() - start;
        let mut unpublished = false;
        while due(number) <= passed && outlet.offer(&[message(start + due(number), number)]) > 0 {
            number += 1;
            unpublished = true;
        }
        if unpublished {
            outlet.publish();
        }
    }
}

/// Whether the messages have the numbers from `expected` on. All at once, and several at a time: to check them one by one
/// would take longer than the channels do.
fn are_in_order<const WORDS: usize>(messages: &[[u64; WORDS]], expected: u64) -> bool {
    let differs = |messages: &[[u64; WORDS]], expected: u64| {
        messages
            .iter()
            .zip(0..)
            .fold(0, |differing, (message, index)| differing | (message[WORDS - 1] ^ (expected + index)))
    };
    let (fours, rest) = messages.as_chunks::<4>();
    let mut number = expected;
    let mut differing = 0;
    for four in fours {
        differing |= differs(four, number);
        number += 4;
    }
    differing | differs(rest, number) == 0
}

/// Receives and measures.
#[allow(clippy::cast_precision_loss, reason = "counts and times of a run stay far below 2^53")]
pub(crate) fn receive<const WORDS: usize>(
    inlet: &mut impl Inlet<WORDS>,
    traffic: Traffic,
) -> Result<Measured> {
    let deadline = Instant::now() + PATIENCE;
    while !inlet.ready() {
        ensure!(Instant::now() < deadline, "the sender did not come");
    }
    let began = Instant::now();
    let mut histogram = Histogram::<u64>::new_with_max(1_000_000_000, 3)?;
    let mut batch = [[0; WORDS]; BATCH];
    let mut expected = 0_u64;
    let (mut counted_from, mut start) = (0, None);
    let mut empty_polls = 0_u64;
    loop {
        let count = inlet.take(&mut batch);
        if count == 0 {
            empty_polls += 1;
            // As the workers do it. Without, looks that are made ahead of their turn slow down the sender's stores.
            fence(Ordering::SeqCst);
            // Rarely: a look at the clock costs as much as an empty poll.
            if empty_polls.is_multiple_of(4096) {
                ensure!(Instant::now() < deadline, "the sender sent nothing any more");
            }
            continue;
        }
        let now = traffic.rate.map(|_| now_ns());
        let came = &batch[..count];
        let in_order = if are_in_order(came, expected) {
            count
        } else {
            let numbers = came.iter().map(|message| message[WORDS - 1]);
            numbers.zip(expected..).take_while(|(number, expected)| number == expected).count()
        };
        if let (Some(now), Some(_)) = (now, start) {
            for message in &came[..in_order] {
                histogram.saturating_record(now.saturating_sub(message[0]));
            }
        }
        expected += in_order as u64;
        if let Some(message) = came.get(in_order) {
            let number = message[WORDS - 1];
            ensure!(number == LAST, "message {number} came instead of {expected}");
            let start: Instant = start.ok_or_else(|| anyhow::anyhow!("the run ended in its warm-up"))?;
            let rate_m = (expected - counted_from) as f64 / start.elapsed().as_secs_f64() / 1e6;
            let latency = traffic.rate.map(|_| Latency {
                median_ns: histogram.value_at_quantile(0.5) as f64,
                p99_ns: histogram.value_at_quantile(0.99) as f64,
            });
            return Ok(Measured { rate_m, latency });
        }
        if start.is_none() && began.elapsed() > traffic.duration / WARM_UP {
            (counted_from, start) = (expected, Some(Instant::now()));
        }
    }
}
