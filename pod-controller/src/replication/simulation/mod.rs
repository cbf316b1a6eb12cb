//! Several controllers in a world that follows from one number: the real Raft, logs, machines, post, forwarding, admission and
//! conduct, and made-up disks, messages, clocks, crashes, and [daemons](crate::simulation) that whoever leads tells what to do. Each replica has a runtime of its own whose time stands still but for what the
//! simulation lets pass, so that clocks may go at their own pace, and to drop it is to kill the process.
//!
//! `WADI_SEED=7 cargo test -p pod-controller --lib replication::simulation` runs one seed again.
//!
//! | module | what |
//! |---|---|
//! | `disk` | what a power failure leaves of what was written |
//! | `net` | messages that are lost, late, and overtake each other |
//! | `storage` | the log and the machine, which may be broken on purpose |
//! | `node` | one replica: its disk, its clock, its lives |
//! | `office` | what its thread does: follow and lead |
//! | `leader` | what a leader sees and touches |
//! | `group` | all of them |
//! | `faults` | what goes wrong |
//! | `clients` | what is asked of them, and answered |
//! | `oracle` | what must hold after every step |
//! | `half_way` | changes of members whose leader dies |
//! | `large` | pods of hundreds of hosts |

mod clients;
mod disk;
mod faults;
mod group;
mod half_way;
mod large;
mod leader;
mod net;
mod node;
mod office;
mod oracle;
mod restart;
mod shorter_log;
mod storage;
mod tests;

/// What is wrong with a replica, on purpose, to see that it is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// Its disk says that something is on it which a power failure takes away.
    ForgetsWhatItKept,
    /// It promises its vote and does not write it down.
    ForgetsItsVote,
    /// It makes changes whatever state they were decided upon.
    TakesAnyBase,
    /// Its leader takes a void change for one that was made.
    AnswersWhatIsVoid,
    /// Its leader shows what it decided before a majority has it.
    ShowsTooEarly,
    /// Its leader lets out what it decided before a majority has it.
    TellsTooEarly,
    /// Its machine does the first two things that were decided together in the other order.
    SwapsCommands,
}
