//! A control thread that has much to do, one thing after the other.

use std::sync::mpsc;
use std::thread::JoinHandle;

use cxl_pool::SoftwareMemory;

use super::*;
use crate::objects::{Object, ObjectId};
use crate::telemetry::Telemetry;
use crate::testing::TestController;

/// Has devices that take as long as this does.
struct Slow<F> {
    take_long: F,
    noting: Box<dyn Handler>,
}

impl<F: FnMut() + Send> Handler for Slow<F> {
    fn apply(&mut self, object: Object) -> Result<(), String> {
        (self.take_long)();
        self.noting.apply(object)
    }

    fn remove(&mut self, id: ObjectId) -> Result<(), String> {
        self.noting.remove(id)
    }

    fn synced(&mut self) {
        self.noting.synced();
    }

    fn scrub(&mut self, region: RegionId, area: Area) -> Result<(), String> {
        self.noting.scrub(region, area)
    }

    fn telemetry(&mut self) -> Telemetry {
        self.noting.telemetry()
    }

    fn fenced(&mut self) {
        self.noting.fenced();
    }
}

/// A daemon in the middle of the first of two commands; the second one is in its ring.
struct Busy {
    controller: TestController<SoftwareMemory>,
    running: JoinHandle<Result<Exit, RunError>>,
    stop: StopSignal,
    calls: Calls,
    fence: Fence,
    incarnation: u64,
    /// Says with each command whether the daemon seems to be stuck when that begins.
    begins: mpsc::Receiver<bool>,
    /// Dropped, it lets commands end.
    hold: mpsc::Sender<()>,
}

/// Each command takes longer than a daemon is forgiven.
fn busy(pod: &TestPod<SoftwareMemory>) -> Busy {
    let mut controller = pod.controller(1);
    let calls = Calls::default();
    let (tell, begins) = mpsc::channel();
    let (hold, go_on) = mpsc::channel::<()>();
    let (give, given) = mpsc::channel::<Rounds>();
    let mut fence_of_it = None;
    let make_handler = |_, fence| {
        fence_of_it = Some(fence);
        let mut rounds = None;
        let take_long = move || {
            let rounds = rounds.get_or_insert_with(|| given.recv().expect("it was given"));
            tell.send(rounds.stuck()).expect("the test waits");
            // The error says that nothing is held up any more.
            let _ = go_on.recv();
            rounds.let_time_pass();
        };
        Ok::<Box<dyn Handler>, Infallible>(Box::new(Slow { take_long, noting: calls.handler() }))
    };
    let (config, join) = (pod.config(BACKEND.host, "socket"), crate::testing::join());
    let memory = pod.memory(BACKEND.host);
    let daemon = Endpoint::join_layout(&pod.layout, memory, &config, BACKEND.role, join, make_handler);
    let daemon = daemon.expect("a free slot");
    give.send(daemon.control.rounds().clone()).expect("the handler waits");
    let (fence, incarnation) = (fence_of_it.expect("the handler was made"), daemon.incarnation());
    let stop = StopSignal::manual().expect("a pair");
    let running = thread::spawn({
        let stop = stop.clone();
        move || daemon.run_until(&stop)
    });
    controller.admit(BACKEND);
    controller.port.send(BACKEND, &apply(nic("first", 1)));
    while controller.port.poll(Instant::now()).is_some() {}
    assert!(!begins.recv().expect("the first command"));
    controller.port.send(BACKEND, &apply(nic("second", 1)));
    while controller.port.poll(Instant::now()).is_some() {}
    Busy { controller, running, stop, calls, fence, incarnation, begins, hold }
}

#[test]
fn daemon_that_gets_on_with_its_work_is_not_taken_for_stuck() {
    let pod = TestPod::real();
    let Busy { controller: _controller, running, stop, begins, hold, .. } = busy(&pod);
    drop(hold);
    assert!(!begins.recv().expect("the second command"), "it has just done the first one");
    stop.stop();
    assert_eq!(running.join().expect("no panic").expect("no error"), Exit::Stopped);
}

#[test]
fn fenced_daemon_does_not_go_on_with_what_it_was_told_before() {
    let pod = TestPod::real();
    let Busy { mut controller, running, calls, fence, incarnation, hold, .. } = busy(&pod);
    controller.port.fence(BACKEND, incarnation).expect("a slot");
    assert!(fence.look().is_err());
    drop(hold);
    assert_eq!(running.join().expect("no panic").expect("no error"), Exit::Fenced);
    assert_eq!(calls.take(), [Call::Apply(nic("first", 1)), Call::Fenced, Call::Dropped]);
}
