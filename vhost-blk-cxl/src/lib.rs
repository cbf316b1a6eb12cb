//! Storage engine: frontend, backend and SSD drivers.
//!
//! The [`frontend`] runs on hosts with VMs, the [`backend`] on hosts with SSDs. What they say to each other is defined
//! in [`message`]; the data itself lies in an area of the pool that is leased to the instance.

#![deny(unsafe_code)]

pub mod backend;
mod counters;
pub mod frontend;
pub mod intent_log;
pub mod message;
#[cfg(test)]
mod older_backend;
#[cfg(test)]
mod omissions;
pub mod segments;
pub mod ssd;
