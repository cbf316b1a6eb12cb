//! Joining the pod, leases, telemetry and commands over the pool.
//!
//! Every daemon embeds an [`Endpoint`](endpoint::Endpoint): it takes a slot in the pool, and its control thread holds
//! what the controller gives it. The controller has a [`ControllerPort`](controller::ControllerPort) to all of them.
//!
//! * What is said: [`commands`], [`objects`], [`reports`], [`telemetry`], as JSON over a pair of rings per endpoint.
//! * In which version it is said: [`protocol`].
//! * What guards the data path: [`fence`].
//! * What the data path runs on: [`worker`], [`data_channel`]; who comes first at a device: [`turns`].
//! * How hosts tell each other what they use of the fabric: [`mchannel`].
//! * How the vCPUs of a VM are held to its share of it: [`vcpus`].
//! * What every binary needs once: [`config`], [`daemon`], [`run_directory`].

#![forbid(unsafe_code)]

pub mod answer;
pub mod commands;
pub mod config;
pub mod controller;
pub mod daemon;
pub mod data_channel;
pub mod endpoint;
pub mod fence;
pub mod ids;
mod link;
mod liveness;
pub mod mchannel;
pub mod memory_failures;
mod naps;
pub mod objects;
#[cfg(test)]
mod omissions;
pub mod protocol;
pub mod replicas;
pub mod reports;
pub mod run_directory;
pub mod telemetry;
#[cfg(test)]
mod testing;
pub mod turns;
pub mod vcpus;
pub mod volume_table;
pub mod worker;
