//! The controller as its users and its daemons see it: over sockets, with its disks and clocks, and with programs of its own. In one
//! program, for each one would take the whole of it in.

mod access;
mod browser;
mod commands;
mod completion;
mod copiers;
mod crowds;
mod deleted_devices;
mod etcd;
mod etcd_members;
mod fabric;
mod groups;
mod labels;
mod live_migration;
mod lost_answers;
mod metric_values;
mod metrics;
mod outside;
mod page;
mod page_actions;
mod pod;
mod podctl;
mod reload;
mod replica_disks;
mod replica_tcp;
mod replication;
mod rest;
mod restored;
mod schemathesis;
mod state_disk;
mod striped;
mod support;
mod tls;
mod top;
mod usurped;
