//! Channels on simulated non-coherent memory.
//!
//! Each check runs with many seeds. A failure prints its seed; `WADI_SEED=… cargo test -p cxl-channel --test
//! simulated` replays it. `WADI_ROUNDS` multiplies the number of seeds.

mod broken;
mod exchange;
mod ring;
mod schedule;
