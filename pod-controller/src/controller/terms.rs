//! The terms of office that a pool has seen.

use cxl_pool::regions::TableVersion;
use cxl_pool::{
    CoherenceMode, ControllerHello, FenceLine, Grant, Layout, Memory, Pool, Record, ReplicaId, regions,
};

/// The highest terms of office that controllers wrote into a pool; 0 in a new one. Daemons obey none with a lower one, and readers of the
/// region table believe none. What a controller kept may say less than that: it may have been restored from a backup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SeenTerms {
    /// Of this replica's slots.
    mine: u64,
    /// Of those of other replicas.
    others: u64,
    /// Of the newest region table.
    table: TableVersion,
}

impl SeenTerms {
    /// Looks into the pool, as the controller with these slots.
    pub(crate) fn of_pool(pool: &Pool, me: ReplicaId) -> Self {
        match pool.superblock().mode {
            CoherenceMode::Software => Self::look(&pool.software(), pool.layout(), me),
            CoherenceMode::Hardware => Self::look(&pool.hardware(), pool.layout(), me),
        }
    }

    /// As [`SeenTerms::of_pool`].
    pub(crate) fn look<M: Memory>(memory: &M, layout: &Layout, me: ReplicaId) -> Self {
        let of_replica = |replica| {
            let hello = ControllerHello::look(memory, layout.controller(replica)).map(|it| it.term);
            let of_endpoints = layout.endpoints().filter_map(|endpoint| {
                let grant = Grant::look(memory, layout.grant(replica, endpoint)).map(|it| it.term);
                let fence = FenceLine::look(memory, layout.fence(replica, endpoint)).map(|it| it.term);
                grant.max(fence)
            });
            of_endpoints.chain(hello).max().unwrap_or(0)
        };
        let others = layout.replicas().filter(|replica| *replica != me).map(of_replica).max();
        let table = regions::newest(memory, layout).map(|(_, version)| version);
        Self { mine: of_replica(me), others: others.unwrap_or(0), table: table.unwrap_or_default() }
    }

    /// The highest of all.
    pub(crate) fn highest(&self) -> u64 {
        self.mine.max(self.others).max(self.table.term)
    }

    /// The term of a single controller whose store would give it this one: each life has one of its own, above all before.
    pub(crate) fn above(&self, kept: u64) -> u64 {
        let seen = self.highest();
        if kept > seen {
            return kept;
        }
        say_older(kept, seen);
        seen.saturating_add(1)
    }

    /// Whether somebody would not listen to this replica in this term, with a state of this index. It may have led in that term before.
    pub(crate) fn outrank(&self, term: u64, index: u64) -> bool {
        let outrank = self.mine > term || self.others >= term || self.table > TableVersion { term, index };
        if outrank {
            say_older(term, self.highest());
        }
        outrank
    }
}

fn say_older(kept: u64, seen: u64) {
    tracing::warn!(
        "what this controller kept is older than what the pool has seen, as after a restore from a backup: its term of office would be \
         {kept}, and one of {seen} was obeyed; it goes on in a higher one"
    );
}
