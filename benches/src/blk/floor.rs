//! What software coherence costs however well it is done: the flushing of each line of guest memory that nobody copies.

use std::time::Instant;

use anyhow::{Context, Result};
use cxl_pool::{CoherenceMode, CreateOptions, LINE_BYTES, Memory, Pool};
use wadi_tests::runner::memory_tempdir;

use super::Job;
use crate::report::median;

/// As much as the longest request has.
const BYTES: u32 = 128 << 10;
#[allow(clippy::cast_precision_loss, reason = "both are far below 2^53")]
const LINES: f64 = BYTES as f64 / LINE_BYTES as f64;
const ROUNDS: usize = 200;

/// Nanoseconds for each line that is flushed, one of many that are followed by one fence, if no cache holds it. Lines that one does take longer.
pub(super) fn flush_ns() -> Result<f64> {
    let directory = memory_tempdir().context("cannot make a directory in /dev/shm")?;
    let options = CreateOptions {
        size_bytes: Some(64 << 20),
        mode: CoherenceMode::Software,
        host_slots: 1,
        replica_slots: 1,
        ..CreateOptions::default()
    };
    let pool = Pool::create(&directory.path().join("pool"), &options)?;
    let (memory, start) = (pool.software(), pool.layout().data().start_byte());
    // Its pages are there then.
    memory.zero(start, BYTES.into());
    let once = || {
        let began = Instant::now();
        memory.flush(start, BYTES.into());
        memory.full_fence();
        began.elapsed().as_secs_f64() * 1e9
    };
    once();
    let round_ns = median(std::iter::repeat_with(once).take(ROUNDS)).unwrap_or_default();
    Ok(round_ns / LINES)
}

/// The part of the rate with hardware coherence that is left at most, zero-copy: the one thread of its frontend has to flush what a read
/// will fill, and to drop it when that is back; what is written it has to write back.
pub(super) fn share_at_most(job: Job, hardware_per_second: f64, flush_ns: f64) -> f64 {
    let passes = if job.writes { 1.0 } else { 2.0 };
    let lines = LINES * f64::from(job.bytes) / f64::from(BYTES);
    (1e9 / hardware_per_second / (passes * lines * flush_ns)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_half_as_long_as_its_flushes_is_left_with_half() {
        let job = Job { writes: true, bytes: 4096, depth: 1, queues: 1 };
        let share = |job, ns| share_at_most(job, 1e6, ns);
        assert!((share(job, 2000.0 / 64.0) - 0.5).abs() < 1e-9);
        assert!((share(Job { writes: false, ..job }, 1000.0 / 64.0) - 0.5).abs() < 1e-9);
        assert!((share(job, 1.0) - 1.0).abs() < 1e-9, "they may be made while others are carried out");
    }
}
