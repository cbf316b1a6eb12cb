//! What the client asks and measures, and what the server does, the same for everything that is compared.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;

use super::end::End;

/// Fits one slot of a ring.
const PAYLOAD_BYTES: usize = 48;
/// A request that begins like this is the last one.
const LAST: u8 = 0xff;
/// This part of a run's beginning is not measured.
const WARM_UP: u32 = 5;
const PATIENCE: Duration = Duration::from_secs(10);

/// What a run measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    pub(crate) calls_per_s: f64,
    pub(crate) median_ns: f64,
    pub(crate) p99_ns: f64,
}

/// Keeps so many calls under way, for as long.
#[allow(clippy::cast_precision_loss, reason = "counts and times of a run stay far below 2^53")]
pub(crate) fn call(end: &mut impl End, depth: usize, duration: Duration) -> Result<Measured> {
    let mut histogram = Histogram::<u64>::new_with_max(1_000_000_000, 3)?;
    let mut under_way = VecDeque::with_capacity(depth);
    let (mut asked, mut answered) = (0_u64, 0_u64);
    // The first answer may take long: the server's process has yet to start.
    exchange(end, &[0; PAYLOAD_BYTES])?;
    let began = Instant::now();
    let (mut measured_from, mut measured) = (began, 0_u64);
    loop {
        let mut now = Instant::now();
        let ended = now - began >= duration;
        if ended && under_way.is_empty() {
            break;
        }
        let before = asked;
        while !ended && under_way.len() < depth {
            let mut payload = [0; PAYLOAD_BYTES];
            payload[8..16].copy_from_slice(&asked.to_le_bytes());
            under_way.push_back(now);
            end.ask(&payload)?;
            asked += 1;
        }
        if asked > before {
            end.flush()?;
        }
        let mut any = false;
        while let Some(payload) = end.answer()? {
            any = true;
            ensure!(
                payload.len() == PAYLOAD_BYTES && payload[8..16] == answered.to_le_bytes(),
                "answer {answered} is wrong"
            );
            answered += 1;
            now = Instant::now();
            let asked_at = under_way.pop_front().unwrap_or(now);
            if asked_at - began < duration / WARM_UP {
                measured_from = now;
            } else {
                measured += 1;
                histogram.saturating_record((now - asked_at).as_nanos().try_into().unwrap_or(u64::MAX));
            }
        }
        if !any {
            ensure!(now - began < duration + PATIENCE, "no answer comes any more");
            end.wait()?;
        }
    }
    let time = measured_from.elapsed().as_secs_f64();
    exchange(end, &[LAST; PAYLOAD_BYTES])?;
    Ok(Measured {
        calls_per_s: measured as f64 / time,
        median_ns: histogram.value_at_quantile(0.5) as f64,
        p99_ns: histogram.value_at_quantile(0.99) as f64,
    })
}

fn exchange(end: &mut impl End, payload: &[u8]) -> Result<()> {
    end.ask(payload)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        end.flush()?;
        if end.answer()?.is_some() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the other process does not answer");
        end.wait()?;
    }
}

/// Answers until the last request.
pub(crate) fn serve(end: &mut impl End) -> Result<()> {
    let mut last_seen = Instant::now();
    loop {
        let mut any = false;
        while let Some(payload) = end.serve()? {
            any = true;
            if payload.first() == Some(&LAST) {
                return end.flush();
            }
        }
        if any {
            last_seen = Instant::now();
        }
        // Also when nothing was said: what found no room goes now.
        end.flush()?;
        if !any {
            ensure!(last_seen.elapsed() < 2 * PATIENCE, "nobody asks any more");
            end.wait()?;
        }
    }
}
