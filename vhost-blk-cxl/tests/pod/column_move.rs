//! A striped volume whose columns move from device to device.

use pod_protocol::endpoint::Handler;
use pod_protocol::ids::{PlaceId, RegionId};
use pod_protocol::objects::{DiskObject, Object, ObjectId, ReplicaObject};
use pod_protocol::reports::Report;

use super::VOLUME_START;
use super::mirror::{MIRROR_BYTES, MirrorPod, obeyed};

/// Where the columns lie, by the numbers of their devices.
pub struct Columns {
    pub at: Vec<usize>,
    pub beside: Option<Place>,
    /// How often a column arrived, and how often it could not.
    pub arrived: u64,
    pub failed: u64,
}

/// A place beside a column.
pub struct Place {
    pub at: usize,
    pub column: usize,
    pub leaving: bool,
}

impl Columns {
    pub fn new(count: u16) -> Self {
        Self { at: (0..usize::from(count)).collect(), beside: None, arrived: 0, failed: 0 }
    }

    pub fn count(&self) -> u64 {
        self.at.len() as u64
    }

    /// What the frontend is told of them, made of what it would be told of all devices.
    pub fn put(&self, disk: &mut DiskObject) {
        let all = std::mem::take(&mut disk.replicas);
        let place = |number: usize, at: usize| ReplicaObject { number: number as u32, ..all[at].clone() };
        disk.replicas = self.at.iter().enumerate().map(|(number, &at)| place(number, at)).collect();
        disk.route = disk.replicas[0].route;
        disk.beside = self.beside.as_ref().map(|it| ReplicaObject {
            in_sync: false,
            leaving: it.leaving,
            ..place(it.column, it.at)
        });
    }
}

impl MirrorPod {
    pub fn columns(&self) -> &Columns {
        self.columns.as_ref().unwrap()
    }

    fn columns_mut(&mut self) -> &mut Columns {
        self.columns.as_mut().unwrap()
    }

    /// Has a column move to another device.
    pub fn move_column(&mut self, column: usize, to: usize) {
        assert!(self.columns().beside.is_none() && !self.columns().at.contains(&to));
        self.columns_mut().beside = Some(Place { at: to, column, leaving: false });
        self.disk.epoch += 1;
        if self.shares_host(to) {
            self.add_beside(to);
        } else if self.backends[to].is_some() {
            let (volume, lease, area) = (self.volume(to), self.disk.lease, self.disk.data_area);
            let backend = self.backends[to].as_mut().unwrap();
            obeyed(|| backend.remove(ObjectId::Volume(PlaceId::first(lease))));
            obeyed(|| backend.scrub(RegionId::new(1), area));
            backend.apply(Object::Volume(volume)).unwrap();
        }
        self.apply_disk();
    }

    /// The controller does not have the place beside a column any more: somebody has let go of it, or it is lost.
    pub fn end_place(&mut self) {
        let Some(place) = self.columns_mut().beside.take() else { return };
        self.disk.epoch += 1;
        if self.shares_host(place.at) {
            self.leave_other(place.at);
        } else if let Some(backend) = &mut self.backends[place.at] {
            let lease = self.disk.lease;
            obeyed(|| backend.remove(ObjectId::Volume(PlaceId::first(lease))));
        }
        self.controls[place.at].set_bytes(VOLUME_START, &vec![0xdd; MIRROR_BYTES as usize]);
    }

    /// What the controller does with what it is told.
    pub(super) fn control_columns(&mut self, report: &Report) {
        let now = self.disk.epoch;
        let Some(Columns { at, beside: Some(place), arrived, failed }) = &mut self.columns else { return };
        let is_it = |replica: u32, epoch: u64| replica as usize == place.column && epoch == now;
        match *report {
            Report::ReplicaSynced { replica, epoch, .. } if is_it(replica, epoch) && !place.leaving => {
                std::mem::swap(&mut at[place.column], &mut place.at);
                place.leaving = true;
                *arrived += 1;
            }
            Report::ReplicaFailed { replica, epoch, .. } if is_it(replica, epoch) && !place.leaving => {
                place.leaving = true;
                *failed += 1;
            }
            Report::ReplicaLeft { replica, epoch, .. } if is_it(replica, epoch) => {
                assert!(place.leaving, "it was not told to go");
                return self.end_place();
            }
            _ => return,
        }
        self.disk.epoch += 1;
    }

    /// What the columns hold, put together.
    pub fn striped_bytes(&self) -> Vec<u8> {
        let (unit, columns) = (self.disk.stripe_bytes.unwrap(), self.columns());
        let of_unit = |number: u64| {
            let at = VOLUME_START + number / columns.count() * unit;
            self.controls[columns.at[(number % columns.count()) as usize]].bytes(at, unit as usize)
        };
        (0..MIRROR_BYTES / unit).flat_map(of_unit).collect()
    }
}
