//! Simulated memory.
