//! A frontend and a backend over one pool, with a mock guest on top and a test in place of the controller: in one process, over
//! simulated memory wherever what is tested is not the memory itself. In one program, for each one would compile the engine for
//! that memory again.

#![allow(clippy::cast_possible_truncation, reason = "small numbers, chosen by tests")]

#[path = "../pod/mod.rs"]
mod pod;

mod block_device;
mod column_moves;
mod column_order;
mod crash;
mod discards;
mod failover;
mod forged;
mod forgotten;
mod generations;
mod hanging;
mod intent_log;
mod live_migration;
mod malformed;
mod mirror;
mod mirror_limits;
mod mirror_losses;
mod mirror_moves;
mod mirror_order;
mod mirror_room;
mod moves;
mod near;
mod neighbours;
mod one_host;
mod order;
mod queues;
mod requests;
mod restarts;
mod striped;
mod striped_power;
mod untold;
mod vhost_user_flushes;
mod vhost_user_return;
mod vhost_user_ssd;
mod vhost_user_tables;
mod zero_copy;
mod zero_copy_spread;

/// What follows `cargo test` to run one again.
const TARGET: &str = "-p vhost-blk-cxl --test engine";
