//! Several controllers that know the same, by Raft: one leads, and what it answers is in the log of a majority. The
//! leader is a [`Controller`](crate::controller::Controller) like a single one, whose commits go to the others; who
//! follows has the same state, answers questions from it, and hands changes on to the leader.
//!
//! | module | what |
//! |---|---|
//! | `change` | what stands in the log |
//! | `log` | the log in a file |
//! | `machine` | what the log leads to |
//! | `post` | questions and answers among replicas |
//! | `exchange` | what carries them: rings in the pool, or |
//! | `tcp` | connections over the network |
//! | `network` | Raft's messages as such questions |
//! | `proposer` | the leader's commits |
//! | `forwarding` | what followers are asked for |
//! | `renewal` | a log of which nothing is left |
//! | `beginning` | how a pod gets replicas |
//! | `roll` | who answers the leader |
//! | `admission` | how replicas become members |
//! | `clerk` | what a replica answers others |
//! | `colleagues` | what is shown of the replicas |
//! | `elections` | what Raft is told of terms, and when a replica stands for election in place of another one |
//! | `outside` | one that does not reach the pool |
//! | `replica` | the life of one replica |

mod admission;
mod beginning;
mod change;
mod clerk;
mod colleagues;
mod elections;
mod exchange;
mod forwarding;
mod log;
mod machine;
mod network;
mod outside;
mod post;
mod proposer;
mod raft_config;
mod renewal;
mod replica;
mod roll;
mod tcp;

pub(crate) use change::{Change, Member, Outcome};
pub(crate) use forwarding::FORWARDED_MAX;
pub(crate) use machine::{Knowledge, Known, Sight};
pub(crate) use proposer::Proposer;
pub use replica::{Replica, ReplicationError};
pub use tcp::TcpError;

#[cfg(test)]
pub(crate) mod simulation;
#[cfg(test)]
mod tests;
