//! What controller replicas say to each other, over rings in the pool: no network between their hosts is needed.
//!
//! Each replica has a ring to each other one. A pair's connection is set up anew whenever one of the two is restarted:
//! both say in a line of their own which life of theirs it is, and the generation of both rings is the sum, which only
//! grows. What was under way then is lost, as it is when a peer does not take it: whoever wants an answer asks again.

mod peer;
mod port;
mod slot;

pub use self::peer::{MESSAGE_BYTES_LIMIT, WAITING_BYTES_LIMIT};
pub use self::port::{ReplicaPort, ReplicaPortError};
pub use self::slot::{ReplicaSlot, lock_replica};

#[cfg(test)]
mod tests;
