//! What two replicas say to each other before anything else.

use cxl_pool::ReplicaId;
use pod_protocol::protocol::Protocol;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Longer than any greeting, in bytes.
pub(super) const GREETING_BYTES_LIMIT: usize = 4 << 10;

/// What the one says first that has made the connection. Later minor versions may say more.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    /// The version of what replicas say to each other: (major, minor).
    protocol: (u16, u16),
    pool: Uuid,
    pub(super) from: u16,
    to: u16,
}

/// What it is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    /// Messages follow.
    Welcome {
        /// As in the other's hello.
        protocol: (u16, u16),
    },
    /// Nothing follows.
    Refused {
        /// What is wrong, and what to do.
        reason: String,
    },
}

impl Hello {
    pub(super) fn new(protocol: Protocol, pool: Uuid, from: ReplicaId, to: ReplicaId) -> Self {
        Self { protocol: protocol.into(), pool, from: from.get(), to: to.get() }
    }

    /// Whether the replica with this number, of this pool, is meant, by one that it understands.
    pub(super) fn check(&self, ours: Protocol, pool: Uuid, me: ReplicaId) -> Result<ReplicaId, String> {
        let from = ReplicaId::new(self.from);
        ours.with(self.protocol.into()).map_err(|why| why.to_string())?;
        if self.to != me.get() {
            return Err(format!(
                "it looks for replica {} here, and this is replica {me}: are replication.tcp.addresses the same everywhere?",
                self.to
            ));
        }
        // One outside of the pod may not know yet which one it is.
        if self.pool != pool && !self.pool.is_nil() && !pool.is_nil() {
            return Err(format!("it belongs to pool {}, and this one to pool {pool}", self.pool));
        }
        if from <= me {
            return Err(format!(
                "it says that it is replica {from}, and this is replica {me}: each needs a number of its own (replication.replica)"
            ));
        }
        Ok(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_means_another_one_is_told() {
        let (pool, me) = (Uuid::from_u128(7), ReplicaId::new(1));
        let ours = Protocol { major: 1, minor: 1 };
        let hello = Hello { protocol: (1, 2), pool, from: 2, to: 1 };
        assert_eq!(hello.check(ours, pool, me), Ok(ReplicaId::new(2)), "the next minor version");
        let nobody_knows = Hello { pool: Uuid::nil(), ..hello };
        assert_eq!(nobody_knows.check(ours, pool, me), Ok(ReplicaId::new(2)), "one outside that is new");
        assert_eq!(hello.check(ours, Uuid::nil(), me), Ok(ReplicaId::new(2)), "and is asked");
        for (wrong, word) in [
            (Hello { protocol: (2, 0), ..hello }, "version"),
            (Hello { protocol: (1, 3), ..hello }, "upgrade this side"),
            (Hello { to: 0, ..hello }, "addresses"),
            (Hello { pool: Uuid::from_u128(8), ..hello }, "pool"),
            (Hello { from: 1, ..hello }, "number of its own"),
            (Hello { from: 0, ..hello }, "number of its own"),
        ] {
            let reason = wrong.check(ours, pool, me).expect_err(word);
            assert!(reason.contains(word), "{word}: {reason}");
        }
    }
}
