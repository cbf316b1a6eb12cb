//! A disk that gets a second place, and one that has one only in the end.

use cxl_pool::Memory;
use pod_protocol::endpoint::Reporter;
use pod_protocol::ids::PlaceNumber;
use pod_protocol::objects::{DiskObject, ReplicaObject};

use super::super::disk::Disk;
use super::{MirroredDisk, Replica};

impl<M: Memory> MirroredDisk<M> {
    /// Takes the place of a disk that has nothing in flight. What its SSD has yet to flush is not forgotten.
    pub(crate) fn instead_of(mut disk: Disk<M>, object: DiskObject, reporter: Option<Reporter>) -> Self {
        debug_assert!(disk.is_quiet());
        let channel = disk.object().route.channel;
        let (mut unflushed, next) = (std::mem::take(&mut disk.unflushed), disk.slots.next_sequence());
        disk.hold(false);
        disk.update(object);
        let mut mirrored = Self::new(disk, reporter);
        mirrored.works.count_from(next);
        mirrored.guest.losses.take_losses(&mut unflushed);
        let same = |replica: &&mut Replica| replica.is_on(channel) && replica.place.is_first();
        if let Some(replica) = mirrored.replicas.iter_mut().find(same) {
            replica.unflushed = unflushed;
            // It has another number here.
            replica.unflushed.forget_noted();
        }
        mirrored
    }

    /// A disk with one place, as one of a single replica.
    pub(super) fn with_one_place(&self, object: DiskObject) -> DiskObject {
        // Of two with one backend, the number tells which one stays. A controller that does not say it has no such volumes.
        let same = |it: &&Replica| {
            object.number.map_or(it.is_on(object.route.channel), |number| it.number == number)
        };
        let known = self.replicas.iter().find(same);
        let place = ReplicaObject {
            number: known.map_or(object.number.unwrap_or(u32::MAX), |replica| replica.number),
            ssd: known.map_or_else(String::new, |replica| replica.ssd.clone()),
            route: object.route,
            place: PlaceNumber::FIRST,
            in_sync: true,
            away: false,
            leaving: false,
        };
        // The epoch was of the mirror.
        DiskObject { replicas: vec![place], epoch: self.epoch, ..object }
    }

    /// Whether it may be an ordinary disk from here on.
    pub(crate) fn may_be_alone(&self) -> bool {
        self.alone.is_some() && self.works.is_empty() && self.guest.is_settled() && self.departed.is_empty()
    }

    /// The ordinary disk that it is then.
    pub(crate) fn alone(mut self) -> Disk<M> {
        self.disk.counters.dirty_bytes.set(0);
        self.intent.give_up(&mut self.disk.buffers);
        self.copy_buffers.give_up(&mut self.disk.buffers);
        self.disk.keep_of_area(0, 0);
        for spare in self.spares.drain(..) {
            self.disk.buffers.free(spare);
        }
        self.disk.slots.count_from(self.works.next_sequence());
        if let Some(replica) = self.replicas.pop() {
            self.disk.unflushed = replica.unflushed;
            // What it lost while others had it was no loss.
            self.disk.unflushed.tells();
            self.disk.unflushed.forget_noted();
        }
        self.disk.unflushed.take_losses(&mut self.guest.losses);
        if let Some(object) = self.alone.take() {
            self.disk.update(object);
        }
        self.disk.under_way.keep_apart(true);
        self.disk.finder.copies_all = false;
        self.disk.unblock();
        self.disk
    }
}
