//! Disks that are told something new: one with a single place may get several while its guest goes on, and the other way round.

use cxl_pool::Memory;
use pod_protocol::ids::LeaseId;
use pod_protocol::objects::DiskObject;
use tracing::info;

use super::disk::Disk;
use super::mirrored::MirroredDisk;
use super::spread::SpreadDisk;
use super::task::FrontendTask;

impl<M: Memory> FrontendTask<M> {
    pub(super) fn update(&mut self, object: DiskObject) {
        if let Some(disk) = self.spread.get_mut(&object.lease) {
            let lease = object.lease;
            disk.update(object);
            self.tell_ready_channels(lease);
            return;
        }
        let Some(disk) = self.disks.get_mut(&object.lease) else { return };
        let mut object = object;
        self.becoming.remove(&object.lease);
        disk.hold(!object.replicas.is_empty());
        if !object.replicas.is_empty() {
            // Until then it goes where it went.
            let channel = disk.object().route.channel;
            let same = object.replicas.iter().find(|it| it.route.channel == channel && it.place.is_first());
            let route = same.map_or(object.route, |replica| replica.route);
            let alone = DiskObject { route, replicas: Vec::new(), ..object.clone() };
            self.becoming.insert(object.lease, std::mem::replace(&mut object, alone));
        }
        if disk.object().route.channel != object.route.channel {
            disk.changes_channel();
        }
        disk.update(object);
    }

    /// Makes disks mirrored, or lets them be so no longer, once nothing of theirs is in flight. True if there were any.
    pub(super) fn transform(&mut self) -> bool {
        let Self { becoming, disks, spread, reporter, .. } = self;
        if becoming.is_empty() && spread.is_empty() {
            return false;
        }
        let quiet = |lease: &LeaseId| disks.get(lease).is_none_or(Disk::is_quiet);
        let ready = becoming.keys().copied().find(quiet);
        let alone: Vec<LeaseId> =
            spread.iter().filter(|(_, disk)| disk.may_be_alone()).map(|(&lease, _)| lease).collect();
        let any = ready.is_some() || !alone.is_empty();
        for lease in alone {
            if let Some(disk) = spread.remove(&lease) {
                info!(%lease, "the disk has one place now");
                disks.insert(lease, disk.alone());
            }
        }
        if let Some(lease) = ready
            && let (Some(object), Some(disk)) = (becoming.remove(&lease), disks.remove(&lease))
        {
            info!(%lease, places = object.replicas.len(), "the disk has several places now");
            let disk = MirroredDisk::instead_of(disk, object, reporter.clone());
            spread.insert(lease, SpreadDisk::Mirrored(Box::new(disk)));
            self.tell_ready_channels(lease);
        }
        any
    }

    /// Tells a disk in several places which of its channels can be used already.
    pub(super) fn tell_ready_channels(&mut self, lease: LeaseId) {
        let Some(disk) = self.spread.get_mut(&lease) else { return };
        for id in disk.channels() {
            if let Some(channel) = self.channels.get(&id).filter(|channel| channel.ready) {
                disk.channel_is_ready(id, self.host == Some(channel.data.peer.host));
            }
        }
    }
}
