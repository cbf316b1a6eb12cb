//! The pod-wide allocator: who uses which device, over which regions and channels of the pool, and what happens when a
//! device or a host fails.
//!
//! [`api`] is what the controller says over HTTP, and [`client`] how to ask it. The rest is the controller itself: a
//! deterministic state machine and the I/O around it.

pub mod api;
pub mod client;
