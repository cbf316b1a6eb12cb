//! Frontends and backends of a volume in several places that end and come back, and channels that begin anew.

use cxl_pool::HostId;
use pod_protocol::endpoint::Handler;
use pod_protocol::objects::Object;

use super::mirror::{MirrorPod, obeyed};

impl MirrorPod {
    /// A frontend is killed, and another one begins: its lease has a new generation.
    pub fn restart_frontend(&mut self) {
        self.frontend = None;
        // A controller hears nothing of a life that is over: a replica that was in line with it may not be with its successor.
        drop(self.side.reporter.take());
        self.pool.crash(HostId::new(self.side.host));
        for replica in &mut self.disk.replicas {
            replica.route.generation = replica.route.generation.next();
        }
        self.start_frontend();
        for index in 0..self.controls.len() {
            if self.backends[index].is_none() {
                continue;
            }
            self.new_rings(index, false);
            let (at_backend, at_frontend) =
                (Self::channel(&self.side, index, false), Self::channel(&self.side, index, true));
            let volumes: Vec<_> = self.served_by(index).into_iter().map(|place| self.volume(place)).collect();
            let backend = self.backends[index].as_mut().unwrap();
            obeyed(|| backend.apply(at_backend.clone()));
            for volume in volumes {
                backend.apply(Object::Volume(volume)).unwrap();
            }
            self.frontend.as_mut().unwrap().apply(at_frontend).unwrap();
        }
        self.apply_disk();
    }

    /// The lease gets a new generation, as when one of two places on a host has gone. Both ends go on.
    pub fn renew_lease(&mut self) {
        for replica in &mut self.disk.replicas {
            replica.route.generation = replica.route.generation.next();
        }
        for index in 0..self.controls.len() {
            let volume = Object::Volume(self.volume(index));
            if let Some(backend) = &mut self.backends[index] {
                backend.apply(volume).unwrap();
            }
        }
        self.apply_disk();
    }

    /// Kills a backend. Of what its device was doing, some is finished, and nobody is told.
    pub fn kill(&mut self, index: usize, finishes: impl FnMut() -> bool) {
        self.backends[index] = None;
        let mut finishes = finishes;
        for ssd in (0..self.hosts.len()).filter(|&ssd| self.hosts[ssd] == index) {
            self.controls[ssd].orphaned(&self.memory(index), &mut finishes);
        }
    }

    /// The controller notices that a backend is gone.
    pub fn notice(&mut self, index: usize) {
        self.disk.replicas[index].away = true;
        self.drop_replica(index);
        self.apply_disk();
    }

    /// The controller notices that a backend is back.
    pub fn revive(&mut self, index: usize) {
        self.start_backend(index);
        self.disk.replicas[index].away = false;
        self.apply_disk();
    }

    /// The frontend is told of a new generation of a channel; the backend goes on with what came over the last one.
    pub fn renew_channel_at_frontend(&mut self, index: usize) {
        self.new_rings(index, false);
        self.frontend.as_mut().unwrap().apply(Self::channel(&self.side, index, true)).unwrap();
    }

    /// So is the backend.
    pub fn renew_channel_at_backend(&mut self, index: usize) {
        let backend = self.backends[index].as_mut().unwrap();
        obeyed(|| backend.apply(Self::channel(&self.side, index, false)));
    }
}
