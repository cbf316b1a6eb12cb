//! Disks whose volume lies in several places.

use std::time::Instant;

use cxl_pool::Memory;
use pod_protocol::endpoint::Reporter;
use pod_protocol::ids::ChannelId;
use pod_protocol::objects::DiskObject;

use super::Pace;
use super::disk::Disk;
use super::mirrored::MirroredDisk;
use super::striped::StripedDisk;
use crate::message::{Completion, Words};

/// A disk in several places. The worker turns all of them alike.
pub(super) enum SpreadDisk<M: Memory> {
    /// Each place holds all of it.
    Mirrored(Box<MirroredDisk<M>>),
    /// Each place holds a share of it.
    Striped(Box<StripedDisk<M>>),
}

/// Calls what both have.
macro_rules! either {
    ($disk:expr, $it:ident => $call:expr) => {
        match $disk {
            Self::Mirrored($it) => $call,
            Self::Striped($it) => $call,
        }
    };
}

impl<M: Memory> SpreadDisk<M> {
    pub(super) fn new(disk: Disk<M>, reporter: Option<Reporter>) -> Self {
        match disk.object().stripe_bytes {
            Some(unit_bytes) => Self::Striped(Box::new(StripedDisk::new(disk, unit_bytes, reporter))),
            None => Self::Mirrored(Box::new(MirroredDisk::new(disk, reporter))),
        }
    }

    pub(super) fn disk(&self) -> &Disk<M> {
        either!(self, it => &it.disk)
    }

    pub(super) fn disk_mut(&mut self) -> &mut Disk<M> {
        either!(self, it => &mut it.disk)
    }

    pub(super) fn into_disk(self) -> Disk<M> {
        either!(self, it => it.disk)
    }

    /// Takes requests from the guest. True if anything moved.
    pub(super) fn take(&mut self) -> bool {
        either!(self, it => it.take())
    }

    /// A ring has started. If it inherits something, a predecessor served the guest: some of what it wrote may lie in the caches of all
    /// places.
    pub(super) fn begins(&mut self, inherits: bool) {
        either!(self, it => it.begins(inherits));
    }

    pub(super) fn with_backend(&self, channel: ChannelId) -> u32 {
        either!(self, it => it.with_backend(channel))
    }

    pub(super) fn send(&mut self, channel: ChannelId, room: u32, outbox: &mut Vec<Words>) -> u32 {
        either!(self, it => it.send(channel, room, outbox))
    }

    pub(super) fn complete(&mut self, channel: ChannelId, completion: &Completion) {
        either!(self, it => it.complete(channel, completion));
    }

    pub(super) fn settle(&mut self) -> bool {
        either!(self, it => it.settle())
    }

    /// See [`Disk::leaves_untold`].
    pub(super) fn leaves_untold(&self) -> bool {
        let losses = either!(self, it => &it.guest.losses);
        self.disk().leaves_untold() || !self.disk().object().incoming && losses.is_telling()
    }

    pub(super) fn is_stirred(&mut self) -> bool {
        either!(self, it => it.is_stirred())
    }

    pub(super) fn tick(&mut self, now: Instant, pace: Pace) {
        either!(self, it => it.tick(now, pace));
    }

    pub(super) fn update(&mut self, object: DiskObject) {
        either!(self, it => it.update(object));
    }

    pub(super) fn channel_restarts(&mut self, channel: ChannelId) {
        either!(self, it => it.channel_restarts(channel));
    }

    /// A channel can be used, to a backend that is on our own host or on another one.
    pub(super) fn channel_ready(&mut self, channel: ChannelId, near: bool) {
        match self {
            Self::Mirrored(it) => it.channel_ready(channel, near),
            Self::Striped(it) => it.channel_ready(channel),
        }
    }

    pub(super) fn channel_is_ready(&mut self, channel: ChannelId, near: bool) {
        match self {
            Self::Mirrored(it) => it.channel_is_ready(channel, near),
            Self::Striped(it) => it.channel_is_ready(channel),
        }
    }

    pub(super) fn channel_removed(&mut self, channel: ChannelId) {
        either!(self, it => it.channel_removed(channel));
    }

    pub(super) fn uses(&self, channel: ChannelId) -> bool {
        either!(self, it => it.uses(channel))
    }

    pub(super) fn channels(&self) -> Vec<ChannelId> {
        either!(self, it => it.channels().collect())
    }

    /// Whether it may be an ordinary disk from here on.
    pub(super) fn may_be_alone(&self) -> bool {
        matches!(self, Self::Mirrored(disk) if disk.may_be_alone())
    }

    /// The ordinary disk that it is then.
    pub(super) fn alone(self) -> Disk<M> {
        match self {
            Self::Mirrored(disk) => disk.alone(),
            Self::Striped(disk) => disk.disk,
        }
    }
}
