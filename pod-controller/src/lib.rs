//! The pod-wide allocator: who uses which device, over which regions and channels of the pool, and what happens when a
//! device or a host fails.
//!
//! [`pod_api`] is what the controller says over HTTP, and how to ask it; [`pod_state`] the deterministic state machine that decides:
//! commands in, state and effects out. The rest is here:
//!
//! | module | what |
//! |---|---|
//! | [`store`] | what survives a restart |
//! | [`replication`] | several controllers that know the same |
//! | [`reconcile`] | makes endpoints have what the state wants |
//! | [`controller`] | the thread around these: endpoints' reports in, commits, effects out |
//! | [`copiers`] | has what no instance uses copied |
//! | [`rest`], [`view`], [`metrics`] | what is shown of it |
//! | [`reload`] | what is read anew while it runs |

#![forbid(unsafe_code)]

pub mod balance;
pub mod config;
pub mod controller;
pub mod copiers;
mod file_stamp;
pub mod journal;
pub mod link_policy;
pub mod metrics;
pub mod reconcile;
pub mod reload;
pub mod replication;
pub mod rest;
#[cfg(test)]
mod simulation;
pub mod store;
mod tls;
pub mod view;
