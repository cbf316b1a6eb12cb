//! MemChannel: fair shares of the bandwidth of a CXL fabric, without I/O and without a clock of its own.
//!
//! The transport of *Building A CSFQ-Inspired Transport for Switched CXL Memory Pooling* (NSDI '26), Algorithm 1 and
//! Eqs. 1–7. An **mchannel** is what one VM uses of one path into the pool; a path is a list of **elements** (host port,
//! switches, device). Each host estimates how fast its mchannels go and would like to go, exchanges its sums with the other
//! hosts, and computes for each element the fair share α. The smallest along a path bounds an mchannel: in the time T_R that
//! its vCPUs run of each window T_W, and in the bytes that its queues may move.
//!
//! | symbol | here | unit |
//! |---|---|---|
//! | T_W, T_R | [`Parameters::t_w_us`], [`Decision::t_r_us`] | µs |
//! | K | [`Parameters::k_us`] | µs |
//! | r_c, D_c | [`Decision::rate`], [`Decision::demand`] | bytes/s |
//! | w_c | [`MchannelOptions::weight`] | – |
//! | α_v, F_v, D_v | [`Sums::alpha`], [`Sums::rate`], [`Sums::demand`] | bytes/s (for a weight of 1), bytes/s |
//! | C_v, L, l, g, δ, λ | [`Capacity`], [`Parameters`] | bytes/s; parts of 1; per s |
//!
//! [`Host`] puts it together. A host calls [`Host::schedule`] for each mchannel every T_W (or every K, where something else keeps
//! to T_R within each T_W meanwhile), and every K first [`Host::sample`], whose records it publishes, then [`Host::settle`] with what the others published ([`Peers`]).
//!
//! # Assumptions
//!
//! * What is measured (bytes, times) comes from the caller and is believed. What other hosts published is believed as far as a host can
//!   have it, and no further ([`Host::settle`]).
//! * Clocks of different hosts need not agree; each only measures its own windows.

#![forbid(unsafe_code)]

mod budget;
mod capacity;
mod claims;
mod dev_load;
mod error;
mod estimate;
pub mod fluid;
mod host;
mod mchannel;
mod parameters;
mod peers;
mod run_time;
mod share;
mod vcpus;
mod wire;

pub use budget::ByteBudget;
pub use capacity::Capacity;
pub use claims::MOST_WEIGHT;
pub use dev_load::DevLoad;
pub use error::MemChannelError;
pub use estimate::{Average, measured_demand, measured_rate};
pub use host::{Host, TenantOptions};
pub use mchannel::{Decision, MchannelId, MchannelOptions, Measured, part_among};
pub use parameters::Parameters;
pub use peers::Peers;
pub use run_time::{RunTime, run_part};
pub use share::{Node, Record, Share, Sums, fair_share};
pub use vcpus::VcpuAccount;
pub use wire::{RECORD_WORDS, decode, encode};

/// An element of the fabric that mchannels share: a port, a link, a device. The pod gives the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ElementId(pub u32);

/// Whoever owns VMs. The pod gives the numbers; `u32::MAX` is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);
