//! The pool: mapping, coherence, layout, regions and simulated memory.
//!
//! A [`Pool`] is one contiguous shared mapping, a DAX character device or a file, that every host of
//! the pod maps. Hosts do **not** keep each other's CPU caches coherent over it, so all access to
//! shared lines goes through the [`Memory`] trait, which names what has to happen: read, write, write
//! back, invalidate, flush, fence, prefetch. It has three implementations:
//!
//! | type | for | cache control |
//! |---|---|---|
//! | [`SoftwareMemory`] | CXL 2.0 | CLWB (or a flush), CLFLUSHOPT, SFENCE, MFENCE |
//! | [`HardwareMemory`] | CXL 3.0 back-invalidate, one machine | none needed |
//! | [`simulated::SimulatedMemory`] | tests | a private cache per host that misbehaves as much as it may |
//!
//! # Assumptions
//!
//! * Little-endian x86-64. CLWB and CLFLUSHOPT are used where the CPU has them.
//! * One writer per cache line at a time; this crate cannot check that outside the simulation.
//! * Offsets that came from a guest or a peer are checked by the caller ([`Area::contains`],
//!   [`Layout::data`]) before they get here: an offset outside the pool panics.

#![allow(
    clippy::cast_possible_truncation,
    reason = "usize has 64 bits here; narrower casts are not used in this crate"
)]

#[cfg(not(all(target_arch = "x86_64", target_endian = "little")))]
compile_error!("the pool's cache control and layout are written for x86-64");

mod address;
mod endpoint;
mod error;
mod guest_lock;
mod host_words;
mod identity;
mod layout;
pub mod mailbox;
mod mapped;
mod mapping;
mod memory;
#[cfg(test)]
mod omissions;
mod pairs;
pub mod poison;
mod pool;
mod record;
pub mod regions;
pub mod simulated;
mod superblock;
mod wide;

pub use address::{Area, ByteOffset, LINE_BYTES, LineCount, LineOffset};
pub use endpoint::{EndpointId, Generation, HostId, ParseEndpointError, ReplicaId, Role};
pub use error::PoolError;
pub use guest_lock::GuestLock;
pub use host_words::HostWords;
pub use identity::FileIdentity;
pub use layout::{
    CONTROL_RING_SLOTS, DATA_ALIGN_BYTES, Layout, REGION_SLOTS_LEAST, REGION_SLOTS_MOST, usual_region_slots,
};
pub use mapped::{HardwareMemory, MappedMemory, SoftwareMemory, prefetch_front, prefetch_front_to_write};
pub use memory::{LINE_WORDS, LineMark, Memory};
pub use pool::{CreateOptions, Pool};
pub use record::{ControllerHello, FenceLine, Found, Grant, Hello, Record, ReplicaHello, read_beat};
pub use superblock::{CoherenceMode, MAJOR_VERSION, MINOR_VERSION, Superblock};
