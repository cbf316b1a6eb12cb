//! Frontends and backends over one pool, with drivers of our own in place of guests and the `null` NIC in place of a
//! wire. Everything is turned by hand, so a failure replays.

mod accepting;
mod announcing;
mod contention;
mod counting;
mod disabling;
mod echo;
mod failing;
mod failover;
mod finishing;
mod flapping;
mod flooding;
mod guest;
mod headers;
mod hostile;
mod killed;
mod lending;
mod live_migration;
mod logging;
mod many;
mod misled;
mod omissions;
mod pacing;
mod pod;
mod policy;
mod promises;
mod rails;
mod recording;
mod room;
mod sharing;
mod steering;
mod stopped;
mod strangers;
mod switching;
mod vlan;
mod zero_copy;
