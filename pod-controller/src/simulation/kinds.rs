//! Which kinds of faults really happened: one that was drawn and met nobody is not counted.

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// A daemon that was alive was killed.
    Died,
    /// A daemon that was alive left in order.
    Left,
    /// A daemon that ran stood still for a while.
    Froze,
    /// A host with daemons that were alive lost its power.
    PowerFailed,
    /// A link that was up went down.
    LinkDown,
    /// A NIC failed, and its backend said so.
    NicFailed,
    /// An SSD failed, and its backend said so.
    SsdFailed,
    /// A backend came without one of its devices.
    DeviceLacking,
    /// A daemon met memory that cannot be read, and ended.
    MemoryFailed,
    /// A frontend said that a replica failed, left, or is in line again.
    ReplicaChanged,
    /// A daemon whose clock is slow was fenced, so that it acts for longer.
    FencedSlow,
    /// A daemon whose clock is fast was fenced.
    FencedFast,
    /// A controller was killed.
    ControllerDied,
    /// It died before what it had done was kept.
    CommitLost,
    /// It died after that, and before it told anybody.
    CommitUntold,
    /// Another controller took over, with the next term.
    TookOver,
}

impl Kind {
    pub(crate) const ALL: [Self; 16] = [
        Self::Died,
        Self::Left,
        Self::Froze,
        Self::PowerFailed,
        Self::LinkDown,
        Self::NicFailed,
        Self::SsdFailed,
        Self::DeviceLacking,
        Self::MemoryFailed,
        Self::ReplicaChanged,
        Self::FencedSlow,
        Self::FencedFast,
        Self::ControllerDied,
        Self::CommitLost,
        Self::CommitUntold,
        Self::TookOver,
    ];
}
