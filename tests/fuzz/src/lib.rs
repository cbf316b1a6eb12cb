//! One function per parser that takes bytes from someone who is not trusted. It panics if the parser does, or if what was
//! accepted breaks the promise that the code behind it relies on.
//!
//! The fuzz targets call these functions, and so does an ordinary test of the workspace, over the corpus.

mod blk;
mod channel;
mod configuration;
mod control;
mod device;
mod guest;
mod input;
mod net;
mod net_channel;
mod pool;

pub use blk::{blk_chain, blk_message};
pub use channel::exchange;
pub use configuration::{configuration, rest};
pub use control::{control, vcpus};
pub use device::{intent_log, label};
pub use guest::chain;
pub use net::{finish, net_message, scattered, source_guard, switch, tag};
pub use net_channel::net_channel;
pub use pool::{regions, superblock};

/// A target.
pub type Target = fn(&[u8]);

/// Every target, by the name of its corpus.
pub const TARGETS: [(&str, Target); 19] = [
    ("blk_chain", blk_chain),
    ("blk_message", blk_message),
    ("chain", chain),
    ("configuration", configuration),
    ("control", control),
    ("exchange", exchange),
    ("finish", finish),
    ("intent_log", intent_log),
    ("label", label),
    ("net_channel", net_channel),
    ("net_message", net_message),
    ("regions", regions),
    ("rest", rest),
    ("scattered", scattered),
    ("source_guard", source_guard),
    ("superblock", superblock),
    ("switch", switch),
    ("tag", tag),
    ("vcpus", vcpus),
];
