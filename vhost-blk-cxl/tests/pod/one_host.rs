//! Several SSDs of one host, between which a volume moves.

use pod_protocol::endpoint::Handler;
use pod_protocol::ids::{PlaceId, PlaceNumber};
use pod_protocol::objects::{Object, ObjectId};

use super::column_move::Columns;
use super::mirror::MirrorPod;

impl MirrorPod {
    /// A volume on the first SSD of a host that has so many.
    pub fn on_one_host(seed: u64, ssds: u16) -> Self {
        let mut pod = Self::with_shared_host(seed, ssds, ssds);
        pod.begin_with(&[0]);
        pod
    }

    /// A mirror on the first SSD of a host with two, and on another host.
    pub fn mirrored_on_shared_host(seed: u64) -> Self {
        let mut pod = Self::with_shared_host(seed, 3, 2);
        pod.begin_with(&[0, 2]);
        pod
    }

    /// A striped volume on the first SSD of a host with two, and on another host.
    pub fn striped_on_shared_host(seed: u64, unit_bytes: u64) -> Self {
        let mut pod = Self::with_shared_host(seed, 3, 2);
        pod.disk.stripe_bytes = Some(unit_bytes);
        pod.columns = Some(Columns { at: vec![0, 2], ..Columns::new(2) });
        pod.begin_with(&[0, 2]);
        pod
    }

    fn with_shared_host(seed: u64, ssds: u16, shared: u16) -> Self {
        let mut pod = Self::new(seed, ssds);
        for index in 0..usize::from(shared) {
            pod.hosts[index] = 0;
            let channel = pod.side.channel(0);
            let replica = &mut pod.disk.replicas[index];
            (replica.ssd, replica.route.channel) = (format!("h2/ssd{index}"), channel);
        }
        pod
    }

    fn begin_with(&mut self, places: &[usize]) {
        for index in 0..self.hosts.len() {
            self.present[index] = places.contains(&index);
            self.disk.replicas[index].in_sync = self.present[index];
        }
        self.start_frontend();
        for index in 0..self.hosts.len() {
            if self.hosts[index] == index {
                self.start_backend(index);
            }
        }
        self.apply_disk();
    }

    /// The name of an SSD at its host.
    pub(super) fn ssd_name(&self, index: usize) -> String {
        format!("ssd{}", index - self.hosts[index])
    }

    /// Whether an SSD is one of several of its host.
    pub(super) fn shares_host(&self, index: usize) -> bool {
        self.hosts.iter().filter(|host| **host == self.hosts[index]).count() > 1
    }

    /// The SSDs of a host on which it serves the volume. Where it has one, that is served whether or not the volume is there.
    pub(super) fn served_by(&self, host: usize) -> Vec<usize> {
        if !self.shares_host(host) {
            return vec![host];
        }
        let places: Vec<usize> = match &self.columns {
            Some(columns) => {
                columns.at.iter().copied().chain(columns.beside.iter().map(|it| it.at)).collect()
            }
            None => self.places(),
        };
        places.into_iter().filter(|&place| self.hosts[place] == host).collect()
    }

    /// The controller takes an SSD for lost, and with it the volume's place there, which somebody else has everything of.
    pub fn lose(&mut self, index: usize) {
        self.drop_replica(index);
        self.present[index] = false;
        self.disk.epoch += 1;
        self.leave_other(index);
        self.apply_disk();
    }

    fn serve(&mut self, host: usize) {
        let volumes: Vec<_> = self.served_by(host).into_iter().map(|place| self.volume(place)).collect();
        for volume in volumes {
            if let Some(backend) = &mut self.backends[host] {
                backend.apply(Object::Volume(volume)).unwrap();
            }
        }
    }

    /// A place comes that has another one of the volume on its host.
    pub(super) fn add_beside(&mut self, index: usize) {
        let host = self.hosts[index];
        let is_alone = self.served_by(host) == [index];
        self.names[index] = if is_alone { PlaceNumber::FIRST } else { PlaceNumber::SECOND };
        self.serve(host);
    }

    /// Of two places on a host, this one is gone: the other one is called as one that is alone, in a new generation.
    pub(super) fn leave_other(&mut self, index: usize) {
        let host = self.hosts[index];
        let lease = self.disk.lease;
        let names: Vec<PlaceNumber> = self.names.clone();
        for place in self.served_by(host) {
            self.names[place] = PlaceNumber::FIRST;
        }
        for replica in &mut self.disk.replicas {
            replica.route.generation = replica.route.generation.next();
        }
        for host in 0..self.hosts.len() {
            if self.hosts[host] == host {
                self.serve(host);
            }
        }
        let gone = PlaceId { lease, place: PlaceNumber::SECOND };
        if let Some(backend) = &mut self.backends[host]
            && names.contains(&PlaceNumber::SECOND)
        {
            // It is heard, whether or not all has ended that a slow SSD has of it.
            let _ = backend.remove(ObjectId::Volume(gone));
        }
    }
}
