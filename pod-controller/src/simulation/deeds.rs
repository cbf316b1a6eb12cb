//! What of all that was asked for was granted: a wish that is always refused would show nothing.

use pod_state::{Command, NicWish};

/// A kind of wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Deed {
    /// An instance came.
    Instance,
    /// One of a kind that somebody had described.
    Typed,
    /// One whose NIC has to be apart from others, or is to be together with them.
    Grouped,
    /// One that uses several NICs of a group at the same time.
    Railed,
    /// A volume came that is sure of something.
    Sure,
    /// A volume in several columns.
    Striped,
    /// A mirrored one.
    Mirrored,
    /// A volume came into groups.
    Regrouped,
    /// A place of a volume was to move.
    Moved,
    /// A volume was to be on one SSD less.
    Reduced,
    /// A device or a host was to be empty, or not any more.
    Drained,
    /// An instance went to another host.
    Migrated,
    /// A device came to an instance that was there.
    Attached,
    /// One left it.
    Detached,
    /// Somebody got another priority.
    Priority,
    /// Somebody got labels, or lost them.
    Labelled,
    /// A kind of instance was described.
    Described,
    /// A kind of instance was given up.
    Undescribed,
    /// A link was trusted again.
    Trusted,
    /// Leases went back to a NIC.
    FailedBack,
    /// An instance got a share of the fabric.
    Shared,
    /// A volume that nobody used was to be copied.
    Copied,
}

impl Deed {
    pub(crate) const ALL: [Self; 22] = [
        Self::Instance,
        Self::Typed,
        Self::Grouped,
        Self::Railed,
        Self::Sure,
        Self::Striped,
        Self::Mirrored,
        Self::Regrouped,
        Self::Moved,
        Self::Reduced,
        Self::Drained,
        Self::Migrated,
        Self::Attached,
        Self::Detached,
        Self::Priority,
        Self::Labelled,
        Self::Described,
        Self::Undescribed,
        Self::Trusted,
        Self::FailedBack,
        Self::Shared,
        Self::Copied,
    ];

    /// What a command that was granted did.
    pub(crate) fn of(command: &Command) -> impl Iterator<Item = Self> {
        let is_sure = matches!(
            command,
            Command::CreateVolume { minimum_iops: Some(_), .. }
                | Command::CreateStriped { minimum_iops: Some(_), .. }
        );
        let any_nic = |is_so: fn(&NicWish) -> bool| match command {
            Command::CreateInstance { nics, .. } => nics.iter().any(is_so),
            Command::AttachDevice { nic: Some(nic), .. } => is_so(nic),
            _ => false,
        };
        let is_typed = matches!(command, Command::CreateInstance { instance_type: Some(_), .. });
        let is_grouped = any_nic(|nic| nic.apart.is_some() || nic.together.is_some());
        let is_railed = any_nic(|nic| nic.rails.is_some());
        let itself = match command {
            Command::CreateInstance { .. } => Some(Self::Instance),
            Command::CreateStriped { .. } => Some(Self::Striped),
            Command::CreateVolume { replicas: 2.., .. } => Some(Self::Mirrored),
            Command::ChangeVolume { groups: Some(_), .. } => Some(Self::Regrouped),
            Command::AddReplica { replaces: Some(_), .. } => Some(Self::Moved),
            Command::RemoveReplica { .. } => Some(Self::Reduced),
            Command::Drain { .. } => Some(Self::Drained),
            Command::ActivateMigration { .. } => Some(Self::Migrated),
            Command::AttachDevice { .. } => Some(Self::Attached),
            Command::DetachDevice { .. } => Some(Self::Detached),
            Command::SetPriority { .. } => Some(Self::Priority),
            Command::SetLabels { .. } => Some(Self::Labelled),
            Command::SetInstanceType { .. } => Some(Self::Described),
            Command::DeleteInstanceType { .. } => Some(Self::Undescribed),
            Command::ReleaseLink { .. } => Some(Self::Trusted),
            Command::FailBack { .. } => Some(Self::FailedBack),
            Command::SetMchannel { .. } => Some(Self::Shared),
            Command::CreateCopier { .. } => Some(Self::Copied),
            _ => None,
        };
        let more = [
            is_sure.then_some(Self::Sure),
            is_typed.then_some(Self::Typed),
            is_grouped.then_some(Self::Grouped),
            is_railed.then_some(Self::Railed),
        ];
        more.into_iter().chain([itself]).flatten()
    }
}
