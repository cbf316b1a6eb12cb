//! Where a controller is one of several.

use std::path::PathBuf;

use serde::Deserialize;

/// What only one of several controllers has.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct ReplicationSection {
    /// Which one this is, from 0; the pool has a slot for each.
    pub replica: u16,
    /// The file with its log; beside the state file, and named like it with `.replica`, unless given.
    #[serde(default)]
    pub log: Option<PathBuf>,
    /// How often the leader tells the others that it lives.
    #[serde(default = "default_heartbeat_ms")]
    pub heartbeat_ms: u64,
    /// How long it is waited for before another one is elected; a quarter longer with each number of a replica.
    #[serde(default = "default_election_ms")]
    pub election_ms: u64,
}

impl ReplicationSection {
    pub(super) fn check(&self) -> Result<(), String> {
        let (heartbeat, election) = (self.heartbeat_ms, self.election_ms);
        if !(10..=10_000).contains(&heartbeat) || !(4 * heartbeat..=60_000).contains(&election) {
            return Err(format!(
                "replication.heartbeat-ms = {heartbeat}, election-ms = {election}: use 10 to 10000, and at least four \
                 times as much for the other"
            ));
        }
        Ok(())
    }
}

const fn default_heartbeat_ms() -> u64 {
    25
}

const fn default_election_ms() -> u64 {
    120
}
