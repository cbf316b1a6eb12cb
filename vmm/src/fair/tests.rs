use std::fs;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use pod_protocol::vcpus::LinkListener;
use vmm::slicing::{Actuator, Resctrl, VcpuUse};
use vmm::{MonitorAddress, Origin, Process, VmmError};

use super::*;

const LONG: Duration = Duration::from_secs(20);
/// For so long nobody comes who is not to come.
const QUIET: Duration = Duration::from_millis(500);

/// Tells what it was ordered.
struct Told(Sender<Duty>);

impl Actuator for Told {
    fn name(&self) -> &'static str {
        "told"
    }

    fn set(&mut self, duty: Duty) -> Result<Duration, VmmError> {
        // Whoever has heard enough is gone.
        let _ = self.0.send(duty);
        Ok(Duration::from_nanos(duty.window_ns))
    }

    fn exact_over(&self) -> Duration {
        Duration::ZERO
    }

    fn follow(&mut self, _: &[u32]) -> Result<(), VmmError> {
        Ok(())
    }

    fn usage(&self) -> Result<Vec<VcpuUse>, VmmError> {
        Ok(Vec::new())
    }
}

/// Stops an agent, also when the test fails.
struct Stops(StopSignal);

impl Drop for Stops {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// A host with an agent for a machine that is this process, and a frontend that this test plays.
struct Scene {
    directory: tempfile::TempDir,
    machine: RunningVm,
    orders: Receiver<Duty>,
    actuator: Option<Told>,
}

impl Scene {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let machine = RunningVm {
            name: "vm1".to_owned(),
            process: Process::with_id(std::process::id()).unwrap(),
            origin: Origin::Attached,
            monitor: MonitorAddress::Socket { path: directory.path().join("monitor") },
            vcpu_control: None,
            files: Vec::new(),
        };
        let (tell, orders) = channel();
        let scene = Self { directory, machine, orders, actuator: Some(Told(tell)) };
        fs::create_dir_all(scene.group().join("mon_data/mon_L3_00")).unwrap();
        fs::write(scene.group().join("tasks"), "").unwrap();
        scene.count("100");
        scene
    }

    fn group(&self) -> PathBuf {
        self.directory.path().join("mon_groups/wadi-vm1")
    }

    /// What the processor says.
    fn count(&self, text: &str) {
        fs::write(self.group().join("mon_data/mon_L3_00/mbm_total_bytes"), text).unwrap();
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("frontend")
    }

    /// Has an agent at work that has found the frontend, for as long as `play` plays that.
    fn run(mut self, play: impl FnOnce(&Self, LinkListener, Link)) {
        let listener = LinkListener::bind(&self.socket()).unwrap();
        let actuator = self.actuator.take().unwrap();
        let frontends = Frontends::new(vec![self.socket()], &self.machine.name, actuator.holds());
        let own = vec![std::process::id()];
        let counter = Resctrl::open(self.directory.path()).unwrap().count(&self.machine.name, &own).unwrap();
        let alone = LockFile::acquire(&self.directory.path().join("lock")).unwrap();
        let stop = StopSignal::manual().unwrap();
        let (machine, told) = (self.machine.clone(), stop.clone());
        thread::scope(|scope| {
            let running = scope.spawn(move || {
                let connected = frontends.connect().unwrap();
                let choice = Choice { actuator: Box::new(actuator), reason: String::new() };
                let found = Found { frontends, connected, choice, counter, threads: own, ram: None };
                let cost = WakeUp { cost: Duration::from_micros(1) };
                Agent::new(&machine, found, cost, None, alone).unwrap().run(&told, None).unwrap();
            });
            let stops = Stops(stop);
            let link = welcome(&listener);
            play(&self, listener, link);
            drop(stops);
            running.join().unwrap();
        });
    }
}

/// Waits for what comes next from something that polls.
#[track_caller]
fn next<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < LONG, "never: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn welcome(listener: &LinkListener) -> Link {
    let link = next("an agent", || listener.accept().unwrap());
    assert!(matches!(next("who it is", || link.receive().unwrap()), FromAgent::Hello(_)));
    assert!(link.send(&ToAgent::Welcome).unwrap());
    link
}

/// The next report; nothing once the agent has left.
fn report(link: &Link) -> Option<Report> {
    next("a report", || match link.receive() {
        Ok(None) => None,
        Ok(Some(FromAgent::Report(report))) => Some(Some(report)),
        Err(LinkError::Closed) => Some(None),
        other => panic!("{other:?}"),
    })
}

/// A quarter of a window, with this K.
fn quarter(link: &Link, sample: Duration) {
    let order =
        Order { sample_us: us(sample), run_ns: 2_500_000, window_ns: 10_000_000, share: Some(1), demand: 4 };
    assert!(link.send(&ToAgent::Order(order)).unwrap());
}

#[test]
fn an_order_is_renewed_while_a_frontend_has_yet_to_answer() {
    Scene::new().run(|scene, listener, link| {
        report(&link).unwrap();
        quarter(&link, Duration::from_millis(100));
        next("the order", || scene.orders.try_recv().ok());
        // Another one takes its place: it listens, and says nothing.
        drop((link, listener));
        let _silent = LinkListener::bind(&scene.socket()).unwrap();
        let mut renewed = 0;
        while !scene.orders.recv_timeout(LONG).unwrap().is_full() {
            renewed += 1;
        }
        // Ten times as often as it would have to be, had this process a processor for itself.
        assert!(renewed >= 4, "{renewed} times");
    });
}

#[test]
fn an_agent_without_a_count_stays_for_a_while_then_leaves_and_comes_back_with_one() {
    Scene::new().run(|scene, listener, link| {
        assert_eq!(report(&link).unwrap().bytes, 0);
        quarter(&link, Duration::from_millis(20));
        scene.count("Unassigned");
        let nothing = |report: &Report| {
            let Report { elapsed_us, bytes, run_us, slept_us, .. } = *report;
            (elapsed_us, bytes, run_us, slept_us) == (0, 0, 0, 0)
        };
        // One may be on its way.
        let first = next("nothing to tell", || report(&link).filter(nothing));
        assert_eq!(first.window_us, 10_000, "its window is still known");
        // What is in the next answer is told then.
        scene.count("700");
        let counted = next("an answer", || report(&link).filter(|report| report.bytes > 0));
        assert_eq!(counted.bytes, 600);
        scene.count("Unavailable");
        next("nothing again", || report(&link).filter(nothing));
        quarter(&link, Duration::from_millis(20));
        let mut heard = 0;
        while let Some(report) = report(&link) {
            assert!(nothing(&report), "{report:?}");
            heard += 1;
            // As a frontend does that hears of an agent in each K.
            quarter(&link, Duration::from_millis(20));
        }
        assert!(heard > 10, "{heard} times");
        next("the vCPUs to run freely", || scene.orders.try_recv().ok().filter(|duty| duty.is_full()));
        let quiet = Timespec::try_from(QUIET).unwrap();
        let came = poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&quiet)).unwrap();
        assert_eq!(came, 0, "it has nothing to tell");
        scene.count("9000");
        let link = welcome(&listener);
        // What they did meanwhile was beside all shares, and is none of this K's.
        scene.count("9050");
        let counted = next("an answer", || report(&link).filter(|report| report.bytes > 0));
        assert_eq!(counted.bytes, 50);
        quarter(&link, Duration::from_millis(20));
        next("to be held again", || scene.orders.try_recv().ok().filter(|duty| !duty.is_full()));
    });
}
