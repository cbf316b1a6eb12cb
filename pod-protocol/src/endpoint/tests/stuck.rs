//! A daemon whose worker does not come round.

use std::sync::mpsc;

use super::*;
use crate::config::Wakeup;
use crate::liveness::read_beat;
use crate::worker::{Progress, Sources, Task, Token, Worker, WorkerConfig};

/// Does nothing but, when told to, wait for what never comes: as a driver may that lost its device.
struct Waits;

impl Task for Waits {
    type Message = mpsc::Receiver<()>;

    fn message(&mut self, never: mpsc::Receiver<()>, _: &mut Sources) {
        // The error says that the test is over.
        let _ = never.recv();
    }

    fn turn(&mut self) -> Progress {
        Progress::Idle
    }

    fn ready(&mut self, _: Token) {}

    fn prepare_sleep(&mut self) -> bool {
        true
    }

    fn resume(&mut self) {}
}

#[test]
fn daemon_whose_worker_is_stuck_does_not_seem_alive_and_one_whose_worker_sleeps_does() {
    for wakeup in [Wakeup::Socket, Wakeup::Poll] {
        let pod = TestPod::real();
        let mut config = pod.config(BACKEND.host, "socket");
        config.run.worker_timeout_ms = 500;
        let (endpoint, _, fence) = pod.try_join(&config, BACKEND.role, &Calls::default()).expect("a slot");
        let worker = WorkerConfig {
            wakeup,
            busy_poll: Duration::ZERO,
            poll_in_flight: Duration::ZERO,
            cpu: None,
            fence: Some(fence),
        };
        let worker = Worker::spawn("waits", worker, None, Waits).expect("started");
        let (memory, at) = (pod.memory(OTHER_CONTROLLER_HOST), pod.layout.heartbeat(BACKEND));
        let deadline = Instant::now() + PATIENCE;
        // For longer than a worker may take for one thing.
        let first = read_beat(&memory, at);
        while read_beat(&memory, at) < first + 100 {
            assert!(Instant::now() < deadline, "it does not beat while its worker sleeps");
            thread::sleep(Duration::from_millis(10));
        }
        let (over, never) = mpsc::channel();
        worker.send(never).expect("it lives");
        let mut last = (0, 0);
        while last.1 < 50 {
            assert!(Instant::now() < deadline, "it goes on beating while its worker is stuck");
            thread::sleep(Duration::from_millis(10));
            let beat = read_beat(&memory, at);
            last = if beat == last.0 { (beat, last.1 + 1) } else { (beat, 0) };
        }
        drop(over);
        worker.stop();
        drop(endpoint);
    }
}
