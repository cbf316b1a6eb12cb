//! A guest that has much to do while a pod changes.

use std::thread;
use std::time::{Duration, Instant};

use super::PATIENCE;
use super::history::History;
use super::mirror::MirrorPod;

impl MirrorPod {
    /// The guest asks for something, one of the devices becomes slow or quick again, and up to so many µs pass.
    pub fn stir(&mut self, history: &mut History, within_us: u64) {
        let requests = 1 + history.below(8);
        history.work(requests);
        let (slow, held) = (history.below(self.controls.len() as u64) as usize, history.below(2) == 0);
        self.controls[slow].hold(held);
        thread::sleep(Duration::from_micros(history.below(within_us)));
        history.collect();
        self.control();
    }

    /// Lets guest and controller work until something holds.
    pub fn work_until(
        &mut self,
        history: &mut History,
        what: &str,
        holds: impl Fn(&MirrorPod, &History) -> bool,
    ) {
        let began = Instant::now();
        while !holds(self, history) {
            assert!(began.elapsed() < PATIENCE, "{what}: {:?}", self.disk.replicas);
            history.collect();
            self.control();
            thread::yield_now();
        }
    }

    /// The same until the guest has all answers.
    pub fn until_idle(&mut self, history: &mut History) {
        self.work_until(history, "requests are never answered", |_, history| history.is_idle());
    }
}
