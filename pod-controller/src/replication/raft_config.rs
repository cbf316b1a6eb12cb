//! How Raft is configured.

use std::ops::Range;
use std::time::Duration;

use openraft::SnapshotPolicy;

use super::replica::ReplicationError;
use crate::config::ReplicationSection;

/// How many entries are kept that a snapshot has too, for replicas that lag.
const LOG_ENTRIES: u64 = 256;

/// How often Raft looks whether it is time to stand for election, in ms. It says so nowhere.
const fn tick_ms(section: &ReplicationSection) -> u64 {
    section.heartbeat_ms * 3 / 2
}

/// Between which times after a vote, in ms, a replica stands for election. It does at one of its looks, and each replica does one
/// look later than the one before it. Two that stood for election at once vote for themselves; if they had the same number of looks to
/// wait, they would again and again, as long as they look at the same moments.
fn election_timeout_ms(section: &ReplicationSection) -> Range<u64> {
    // One outside of the pod waits for nobody before it votes.
    let number = if section.outside { 0 } else { u64::from(section.replica) };
    election_timeout_of_ms(section, number)
}

fn election_timeout_of_ms(section: &ReplicationSection, number: u64) -> Range<u64> {
    let tick = tick_ms(section);
    let looks = (section.election_ms / 2 / tick).max(2) + number;
    // Well before that look, and well after the one before it.
    let latest = looks * tick - tick / 2;
    latest - (tick / 4).max(1)..latest
}

/// For how long whoever leads may rely on what a majority said. Whoever has heard of a leader promises nobody its vote for as long as an
/// election takes at most, which is the shortest for the first replica. It is half of that, for clocks that differ.
pub(super) fn trusted_for(section: &ReplicationSection) -> Duration {
    Duration::from_millis(election_timeout_of_ms(section, 0).end) / 2
}

/// The configuration that follows from the section `[replication]`.
pub(super) fn raft_config(section: &ReplicationSection) -> Result<openraft::Config, ReplicationError> {
    // A follower waits for the larger one, while the leader's word holds, and then for a time between both.
    let Range { start: soonest, end: latest } = election_timeout_ms(section);
    let config = openraft::Config {
        cluster_name: "wadi".to_owned(),
        heartbeat_interval: section.heartbeat_ms,
        election_timeout_min: soonest,
        election_timeout_max: latest,
        // Who cannot lead stands for election only in place of others.
        enable_elect: !section.outside,
        install_snapshot_timeout: 5000,
        max_payload_entries: 64,
        // They are made by the size of the log.
        snapshot_policy: SnapshotPolicy::Never,
        max_in_snapshot_log_to_keep: LOG_ENTRIES,
        // JSON writes a byte as up to four.
        snapshot_max_chunk_size: 32 << 10,
        ..openraft::Config::default()
    };
    config.validate().map_err(|error| ReplicationError::Config(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(replica: u16, outside: bool, (heartbeat_ms, election_ms): (u64, u64)) -> ReplicationSection {
        ReplicationSection { replica, log: None, outside, heartbeat_ms, election_ms, tcp: None }
    }

    /// Times between heartbeats and for elections, in ms.
    const TIMES_MS: [(u64, u64); 5] = [(10, 40), (25, 120), (25, 1000), (100, 400), (1000, 60_000)];

    #[test]
    fn whoever_leads_relies_on_others_for_half_of_what_any_of_them_promises_at_most() {
        for times in TIMES_MS {
            let all: Vec<_> =
                (0..7).flat_map(|it| [false, true].map(|out| section(it, out, times))).collect();
            let promised = all.iter().map(|it| raft_config(it).expect("Raft takes it").election_timeout_max);
            let promised = Duration::from_millis(promised.min().expect("some"));
            for leader in &all {
                assert!(trusted_for(leader) <= promised / 2, "replica {}: {promised:?}", leader.replica);
            }
        }
    }

    #[test]
    fn no_two_replicas_stand_for_election_at_the_same_look() {
        for times in TIMES_MS {
            let mut looks = std::collections::BTreeSet::new();
            for replica in 0..7 {
                let section = section(replica, false, times);
                raft_config(&section).expect("Raft takes it");
                let (tick, wait) = (tick_ms(&section), election_timeout_ms(&section));
                assert_eq!(
                    wait.start / tick,
                    (wait.end - 1) / tick,
                    "one look, whatever Raft draws: {wait:?}"
                );
                assert!(looks.insert(wait.start / tick), "replica {replica} stands with another one");
            }
        }
    }
}
