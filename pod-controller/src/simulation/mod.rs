//! The controller from end to end, in a world that follows from one number: the real state machine, reconciler and
//! conduct, and simulated daemons, messages, clocks and crashes.
//!
//! `WADI_SIMULATION_SEED=7 cargo test -p pod-controller simulation` runs one seed again.

pub(crate) mod alternatives;
mod caches;
mod chores;
mod daemon;
mod deeds;
mod devices;
pub(crate) mod faults;
mod happening;
mod holders;
mod kinds;
mod lines;
pub(crate) mod loads;
pub(crate) mod memory;
pub(crate) mod physical;
mod pod;
pub(crate) mod port;
pub(crate) mod random;
pub(crate) mod relief;
mod seen;
mod size;
mod tally;
mod tests;
mod wishes;
mod world;

/// What is wrong with a controller, on purpose, to see that it is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    /// It believes that whoever was fenced stops at once.
    DoesNotWaitForFences,
    /// It gives regions on before everybody has let go of them.
    DoesNotWaitForScrubs,
    /// The same, where only the lines themselves can tell.
    GivesDirtyRegionsOn,
    /// Daemons say that they have scrubbed a region, and have not.
    ScrubsNothing,
    /// It answers before what it did is kept.
    ForgetsTheLastCommand,
    /// It does not hear that a link went down.
    DeafToLinks,
    /// It does not hear that a storage backend fell silent.
    DeafToSilence,
    /// It does not hear of memory that failed.
    DeafToMemory,
    /// A lease that changes hands keeps its generation.
    KeepsGenerations,
    /// It moves whatever may move, as often as it likes.
    MovesTooMuch,
    /// It does not know what the one before it has moved.
    ForgetsWhatMoved,
}
