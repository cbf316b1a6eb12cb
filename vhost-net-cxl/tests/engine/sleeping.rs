//! A backend sleeps also while packets wait for its NIC.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cxl_pool::HostId;
use cxl_pool::simulated::SimulatedPool;
use pod_protocol::config::Wakeup;
use pod_protocol::objects::{Object, RegistrationState};
use pod_protocol::worker::{Progress, Sources, Task, Token, Worker, WorkerConfig};
use vhost_net_cxl::backend::Order;
use vhost_net_cxl::offloads::Offloads;

use crate::echo::{QUEUE_SIZE, frame};
use crate::guest::Guest;
use crate::pod::{POOL_BYTES, TestFrontend, all_features, area, channel, port, registration, route, settle};
use crate::recording::recording_backend;

const SLOTS: u32 = 512;
const PATIENCE: Duration = Duration::from_secs(20);

/// A task, and how often it said that it may sleep.
struct Watched<T> {
    task: T,
    slept: Arc<AtomicUsize>,
}

impl<T: Task> Task for Watched<T> {
    type Message = T::Message;

    fn message(&mut self, message: Self::Message, sources: &mut Sources) {
        self.task.message(message, sources);
    }

    fn turn(&mut self) -> Progress {
        self.task.turn()
    }

    fn ready(&mut self, token: Token) {
        self.task.ready(token);
    }

    fn prepare_sleep(&mut self) -> bool {
        let sleeps = self.task.prepare_sleep();
        self.slept.fetch_add(usize::from(sleeps), Ordering::Relaxed);
        sleeps
    }

    fn resume(&mut self) {
        self.task.resume();
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_waits_for_a_nic_is_looked_at_by_a_backend_that_sleeps() {
    for pulled in [false, true] {
        let pool = SimulatedPool::new(1, POOL_BYTES);
        let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
        let (mut backend, wire) =
            recording_backend(&pool.host(HostId::new(2)), Offloads::ALL, usize::MAX, area(32, 16));
        backend.apply(Object::Channel(channel(1, 1, SLOTS, false)));
        backend.apply(Object::Registration(registration(1, 1, 1, RegistrationState::Active, area(8, 8))));
        frontend.apply(Object::Channel(channel(1, 1, SLOTS, true)));
        frontend.apply(Object::Port(port(1, area(8, 8), route(1, 1), None)));
        let mut guest = Guest::new(QUEUE_SIZE);
        frontend.start(1, &guest, all_features());
        settle(&mut [&mut frontend, &mut backend]);
        if pulled {
            backend.link.set(false);
        } else {
            wire.lock().expect("unpoisoned").room = 0;
        }
        assert!(guest.send(&[0; 12], &frame(1, 100)));
        settle(&mut [&mut frontend, &mut backend]);
        let sent =
            || wire.lock().expect("unpoisoned").frames.iter().filter(|it| it[12..14] == [0x88, 0xb5]).count();
        assert_eq!((sent(), backend.lease(1).tx_packets), (0, 0));

        let slept = Arc::<AtomicUsize>::default();
        let book = backend.book.clone();
        let task = Watched { task: backend.task, slept: Arc::clone(&slept) };
        let config = WorkerConfig {
            wakeup: Wakeup::Socket,
            busy_poll: Duration::ZERO,
            poll_in_flight: Duration::ZERO,
            cpu: None,
            fence: None,
        };
        let worker = Worker::spawn("backend", config, None, task).expect("a worker");
        worker.send(Order::LinkChanged).expect("it runs");
        // Nobody tells it anything from here on.
        until("it does not sleep, or for ever", || slept.load(Ordering::Relaxed) > 3);
        if pulled {
            until("it does not look how long the link has been down", || {
                crate::pod::find(&book, 1).drops.contains_key("link-down")
            });
        } else {
            wire.lock().expect("unpoisoned").room = usize::MAX;
            until("it does not look whether there is room", || sent() == 1);
        }
        worker.stop();
    }
}
