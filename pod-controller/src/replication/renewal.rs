//! When a log is cut off: when it has become long, and, so that nothing is left of it, when an older version may have to read it. Then
//! what a replica of an older version does not know is in a snapshot, which says what came of it.

use std::time::Duration;

use tokio::sync::watch;

use super::change::Raft;
use super::machine::Machine;

/// How long a snapshot may take before another one is asked for: one that was under way already may be of before.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Has a snapshot made whenever the log has outgrown the one before, until Raft ends.
pub(super) async fn trim_log(raft: Raft, machine: Machine) {
    let mut changes = machine.changes();
    while changes.changed().await.is_ok() {
        if machine.take_outgrown() && raft.trigger().snapshot().await.is_err() {
            return;
        }
    }
}

/// Whenever the log is to begin anew after an entry, sees to it, until Raft ends.
pub(super) async fn renew_log(raft: Raft, mut renewals: watch::Receiver<u64>) {
    while renewals.changed().await.is_ok() {
        let entry = *renewals.borrow_and_update();
        loop {
            if raft.trigger().snapshot().await.is_err() {
                return;
            }
            let has_it =
                |metrics: &openraft::RaftMetrics<_, _>| metrics.snapshot.is_some_and(|id| id.index >= entry);
            if raft.wait(Some(ASK_AGAIN)).metrics(has_it, "a snapshot").await.is_ok() {
                break;
            }
        }
        if raft.trigger().purge_log(entry).await.is_err() {
            return;
        }
        tracing::info!(entry, "the log begins anew: the pod may speak an older version of the protocol");
    }
}
