//! What both engines' frontends share: vhost-user connections, vrings, descriptor chains, the in-flight region
//! and buffer areas.
//!
//! A [`Server`] owns one guest device's socket, on which a VMM connects or to which it connects itself. It speaks vhost-user with the VMM on a thread of its own and hands
//! finished [`Ring`]s to the engine through a [`DeviceSink`]; from then on the ring belongs to the engine's worker
//! until the sink is asked to give it up. Nothing of vhost-user is on the fast path.
//!
//! # Assumptions
//! - The *guest* is hostile: everything read from its memory is checked once, after it was copied out of it.
//! - The *VMM* is trusted to keep the memory it shares as large as it said: truncating a shared file under a mapping
//!   raises SIGBUS here, as it does in every vhost-user backend.
//! - Queues are split rings; there is no vIOMMU and no postcopy. Neither is offered.

#![forbid(unsafe_code)]

mod additional;
mod area;
mod chain;
#[cfg(test)]
mod chain_tests;
mod config;
mod connection;
mod connector;
pub mod copy;
mod dirty_log;
mod early;
mod event;
mod expected_rings;
mod inflight;
mod memory;
#[cfg(any(test, feature = "mock"))]
pub mod mock;
mod notes;
mod notice;
pub mod pacing;
mod pool_ram;
mod request;
mod ring;
mod server;
#[cfg(test)]
mod server_tests;
mod socket;
mod view;

pub use area::{Buffer, BufferArea};
pub use chain::{Chain, ChainError, ChainLimits, Segment};
pub use config::ConfigSpace;
pub use copy::{ChainReader, ChainWriter, CopyError};
pub use dirty_log::{DirtyLog, DirtyLogError, LOG_PAGE_BYTES};
pub use inflight::{InflightError, InflightQueue, Resubmission, region_bytes};
pub use memory::{GuestMemory, MemoryError, MemoryTable};
pub use notes::Notes;
pub use pool_ram::{PoolMap, PoolRam};
pub use ring::{Next, OthersOwe, Ring, RingBroken, RingParts};
pub use server::{ConfigRefused, DeviceSink, DeviceSpec, Server, StopReason, VMM_PATIENCE};
pub use socket::ListenError;
pub use view::GuestView;
