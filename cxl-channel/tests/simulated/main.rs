//! Channels on simulated non-coherent memory.
//!
//! Each check runs with many seeds. A failure prints the command that replays it. `WADI_ROUNDS` multiplies the number of seeds.

mod broken;
mod exchange;
mod ring;
mod schedule;
