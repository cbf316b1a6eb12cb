//! Whole-pod tests with real virtual machines, and the demo.
