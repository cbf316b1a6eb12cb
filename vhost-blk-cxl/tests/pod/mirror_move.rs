//! A guest with a mirrored volume that moves to another host.

use std::path::PathBuf;

use pod_protocol::endpoint::Handler;
use pod_protocol::ids::RegionId;
use pod_protocol::objects::{Object, ObjectId};

use super::mirror::{MirrorPod, obeyed};
use super::side::Side;

impl MirrorPod {
    /// The other host's frontend has the disk as incoming.
    pub fn prepare_move(&mut self) {
        assert!(self.incoming.is_none());
        let (host, place) = if self.side.host == 1 { (20, 1) } else { (1, 0) };
        let side = Side::new(host, place, self.controls.len());
        let frontend = side.start(&self.pool, &self.drives, &self.run);
        self.incoming = Some((side, frontend));
        for index in 0..self.controls.len() {
            self.connect_incoming(index);
        }
        self.apply_disk();
    }

    /// Where the guest's VMM connects on the other host.
    pub fn incoming_socket(&self) -> PathBuf {
        let (side, _) = self.incoming.as_ref().expect("a move was prepared");
        self.run.sockets().join(&side.socket)
    }

    /// The guest has left its rings here: the lease gets a new generation, for the other host. What this host's frontend still
    /// has at the devices, copies from replica to replica, may not have ended.
    pub fn hand_over(&mut self) {
        let (side, frontend) = self.incoming.take().expect("a move was prepared");
        let left = std::mem::replace(&mut self.side, side);
        let mut old = self.frontend.replace(frontend).expect("it served the guest");
        (self.disk.socket, self.disk.data_area) = (self.side.socket.clone(), self.side.data_area);
        for (index, replica) in self.disk.replicas.iter_mut().enumerate() {
            replica.route.generation = replica.route.generation.next();
            replica.route.channel = self.side.channel(index);
        }
        for index in 0..self.controls.len() {
            let volume = Object::Volume(self.volume(index));
            if let Some(backend) = &mut self.backends[index] {
                backend.apply(volume).unwrap();
            }
        }
        self.apply_disk();
        obeyed(|| old.remove(ObjectId::Disk(self.disk.lease)));
        drop(old);
        self.left_areas.push(left.data_area);
    }

    /// Devices have ended what the host that the guest left had asked for: its area may be used again.
    pub fn scrub_left(&mut self) {
        for area in std::mem::take(&mut self.left_areas) {
            for backend in self.backends.iter_mut().flatten() {
                obeyed(|| backend.scrub(RegionId::new(1), area));
            }
        }
    }
}
