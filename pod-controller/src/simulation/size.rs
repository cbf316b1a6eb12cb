//! How much there is in a world, and how much happens.

use super::loads::Busy;

/// How large a pod is, and what happens in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) hosts: u16,
    pub(super) names: u64,
    /// Whether volumes are in groups.
    pub(super) grouped: bool,
    /// How small the pool may be, in MiB for each name.
    pub(super) least_mib: u64,
    pub(super) seconds: u64,
    /// What comes in so much time is heard in one turn.
    pub(super) slice_us: u64,
    /// How often delays are doubled on the slowest ways.
    pub(super) doublings_max: u32,
    /// Whether memory of the pool fails now and then.
    pub(super) memory_fails: bool,
    /// A fault about every so many slices.
    pub(super) fault_every: u64,
    /// Of faults of the controller, one in so many kills it; one at a commit does twice as often.
    pub(super) crash_every: u64,
    /// How long there is no controller then, at most.
    pub(super) orphaned_us: u64,
    /// So many volumes and instances are asked for before anything goes wrong.
    pub(super) filled: u64,
    /// Wishes about every so many slices.
    pub(super) wish_every: u64,
    /// How many come at once.
    pub(super) wishes: u64,
    /// All of the state is looked at after every so many turns. What commands touched is after each.
    pub(super) check_every: u64,
    /// Whether it is seen to the lines of regions: a large pool has too many.
    pub(super) has_lines: bool,
    /// How rarely guests are busy, if daemons tell it and the controller does something about it.
    pub(super) busy: Option<Busy>,
}
