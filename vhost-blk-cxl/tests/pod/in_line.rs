//! How far replicas have come, and waiting for it.

use pod_protocol::endpoint::Handler as _;

use super::mirror::{MIRROR_BYTES, MirrorPod};
use super::{PATIENCE, VOLUME_START, eventually};

impl MirrorPod {
    pub fn dirty_bytes(&mut self) -> u64 {
        self.frontend.as_mut().unwrap().telemetry().gauges["mirror-dirty-bytes"]
    }

    /// Waits until all replicas are there, in sync, and hold the same.
    pub fn in_line(&mut self) {
        self.until_in_line();
        assert!(self.are_alike(), "the replicas hold different data");
    }

    /// The same, whatever they hold.
    pub fn until_in_line(&mut self) {
        let began = std::time::Instant::now();
        loop {
            self.control();
            if self.disk.replicas.iter().all(|replica| replica.in_sync) && self.dirty_bytes() == 0 {
                break;
            }
            assert!(began.elapsed() < PATIENCE, "the replicas never came in line: {:?}", self.disk.replicas);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Whether all replicas hold the same.
    pub fn are_alike(&self) -> bool {
        let bytes = |index: usize| self.on_drive(index, VOLUME_START, MIRROR_BYTES as usize);
        let first = bytes(0);
        (1..self.controls.len()).all(|index| bytes(index) == first)
    }

    /// Lets the controller work until something holds.
    pub fn until(&mut self, mut holds: impl FnMut(&mut Self) -> bool) {
        eventually(|| {
            self.control();
            holds(self)
        });
    }
}
