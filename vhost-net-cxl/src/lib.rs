//! The network engine of Wadi.
//!
//! A [`frontend`] runs on every host with VMs: it offers virtio-net devices and moves packets between guests and the
//! pool. A [`backend`] runs on every host with NICs: it switches packets between instances and its NICs. Between them
//! travel 16-byte [`message`]s over channels in the pool.
//!
//! # Assumptions
//! - Guests are hostile; a frontend checks whatever it takes from one, once, after copying it.
//! - Frontends are trusted as little by backends: offsets, lengths, headers, source addresses and generations are checked
//!   again.
//! - Backends are trusted by frontends with the frames they deliver, but not with their shape.

#![deny(unsafe_code)]

pub mod backend;
pub mod channel_counters;
pub mod channel_end;
mod checksum;
pub mod counters;
pub mod daemon;
pub mod ethernet;
pub mod finish;
pub mod frontend;
mod id_hash;
pub mod message;
pub mod nic;
pub mod offloads;
pub mod rate_limit;
pub mod scattered;
pub mod source_guard;
pub mod vlan;
pub mod vnet_header;
