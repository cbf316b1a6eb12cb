//! Builds pods of any shape on one machine, with real virtual machines, for tests and the demo.

#![forbid(unsafe_code)]

pub mod announcements;
pub mod arrivals;
pub mod bare_vm;
pub mod boards;
pub mod conversation;
pub mod counting_vm;
pub mod disk_guest;
pub mod etcd;
pub mod fair_vcpus;
pub mod fake_resctrl;
pub mod files;
pub mod fio;
pub mod foreign_disk;
pub mod frame_guest;
pub mod held_vcpus;
pub mod iperf;
pub mod loads;
pub mod looks;
pub mod monitor;
pub mod namespace;
pub mod newer_qemu;
pub mod pod;
pub mod probe;
pub mod process;
pub mod replicas;
pub mod runner;
pub mod stage;
pub mod steady;
pub mod storm;
pub mod stuck_thread;
pub mod waiting;
