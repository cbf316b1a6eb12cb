//! An ordinary disk, whose backend and frontend die at moments that the seed chooses: one order explains what its guest sees, with
//! data that are copied and with data in the guest's own memory.

use std::fs::File;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cxl_pool::simulated::{check_seeds, seeds};
use cxl_pool::{Area, CreateOptions, LineCount, Memory, Pool};
use pod_protocol::endpoint::Handler;
use vhost_frontend::mock::MockGuest;

use crate::TARGET;
use crate::pod::history::History;
use crate::pod::ram::{Control, RamSsd, idle_pod};
use crate::pod::*;

const ROUNDS: u64 = 24;

/// What a device does with writes that a backend which died gave it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Device {
    /// It has carried them out, or never will, before the next backend begins.
    Obeys,
    /// It goes on with them while the next one is at work: nobody holds the device for the dead one.
    GoesOn,
}

/// How often who died.
#[derive(Debug, Default)]
struct Died {
    backends: u64,
    frontends: u64,
}

struct Scene<M: Memory> {
    pod: Pod<M>,
    control: Arc<Control>,
    history: History,
    died: Died,
    device: Device,
    /// What the device has yet to do for a backend that is gone.
    late: Vec<(u64, Vec<u8>)>,
}

impl<M: Memory> Scene<M> {
    fn new(pod: Pod<M>, control: Arc<Control>, driver: Driver, seed: u64, device: Device) -> Self {
        // What comes last is done first, so that what meets does not stay in its order by chance.
        control.finish_backwards();
        let history = History::new(driver, seed);
        Self { pod, control, history, died: Died::default(), device, late: Vec::new() }
    }

    fn kill_backend(&mut self) {
        self.pod.backend = None;
        if self.device == Device::GoesOn {
            self.late = self.control.going_on(&self.pod.backend_memory);
        } else {
            let finishes = self.history.below(2) == 0;
            self.control.orphaned(&self.pod.backend_memory, || finishes);
        }
        self.history.work(3);
        let ssd = RamSsd { memory: self.pod.backend_memory.clone(), control: Arc::clone(&self.control) };
        self.pod.start_backend(Box::new(ssd));
        self.pod.apply_volume();
        self.pod.new_channel();
        self.died.backends += 1;
    }

    fn until_idle(&mut self) {
        let began = Instant::now();
        while !self.history.is_idle() {
            assert!(began.elapsed() < PATIENCE, "requests are never answered");
            self.history.collect();
            thread::yield_now();
        }
    }

    fn run(mut self) -> Result<Died, String> {
        for _ in 0..ROUNDS {
            let requests = 1 + self.history.below(8);
            self.history.work(requests);
            let held = self.history.below(2) == 0;
            self.control.hold(held);
            // Nothing is waited for: whoever dies does so at any moment of what is under way.
            thread::sleep(Duration::from_micros(self.history.below(300)));
            self.history.collect();
            match self.history.below(10) {
                0..=2 => self.kill_backend(),
                3 => {
                    // Of what it had sent, the device does some before it has gone, and some after.
                    self.control.let_pass(1);
                    self.pod.restart_frontend(&mut self.history.driver.guest);
                    self.died.frontends += 1;
                }
                _ => {}
            }
            if !self.late.is_empty() {
                self.control.hold(false);
                // Those writes are repeated, and newer ones follow them.
                self.until_idle();
                self.history.work(12);
                self.until_idle();
                for (at, bytes) in self.late.drain(..) {
                    self.control.set_bytes(at, &bytes);
                }
            }
        }
        self.control.hold(false);
        self.until_idle();
        self.history.read_all();
        self.history.check()?;
        Ok(self.died)
    }
}

fn copied(seed: u64, device: Device) -> Result<Died, String> {
    let (mut pod, ssd, control) = idle_pod(seed);
    pod.start(ssd);
    let driver = Driver::connected(&pod);
    Scene::new(pod, control, driver, seed, device).run()
}

fn zero_copy(seed: u64) -> Result<Died, String> {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = CreateOptions { size_bytes: Some(96 << 20), ..CreateOptions::default() };
    let pool = Pool::create(&directory.path().join("pool"), &options).unwrap();
    let memory = pool.software();
    let mut pod = Pod::new(memory.clone(), memory.clone(), pool.layout().data().start);
    let bytes = Driver::ram_bytes(pod.disk.queues);
    let ram = Area::new(pod.data.end(), LineCount::covering(bytes));
    (pod.disk.ram_area, pod.volume.ram_area) = (Some(ram), Some(ram));
    pod.pool_file = Some(pool.file_identity());
    let control = Control::new();
    pod.start(Box::new(RamSsd { memory, control: Arc::clone(&control) }));
    let file = File::from(pool.fd().try_clone_to_owned().unwrap());
    let guest = MockGuest::in_file(file, ram.start_byte().get(), bytes, pod.disk.queues, 128);
    let mut driver = Driver { guest };
    driver.guest.connect(&pod.socket(), ALL_FEATURES);
    assert_eq!(driver.write_sectors(0, &pattern(seed, 4096)), OK);
    let counters = pod.frontend.as_mut().unwrap().telemetry().counters;
    assert_eq!(counters["zero-copy-requests"], 1);
    Scene::new(pod, control, driver, seed, Device::Obeys).run()
}

fn check(count: u64, mut run: impl FnMut(u64) -> Result<Died, String>) {
    let mut died = Died::default();
    check_seeds(TARGET, count, |seed| {
        let Died { backends, frontends } = run(seed + 1)?;
        died.backends += backends;
        died.frontends += frontends;
        Ok(())
    });
    assert!(died.backends > 0 && died.frontends > 0 || seeds(count).count() == 1, "{died:?}");
}

#[test]
fn one_order_explains_what_the_guest_sees_while_both_sides_die() {
    check(10, |seed| copied(seed, Device::Obeys));
}

#[test]
fn so_it_does_without_copies() {
    check(10, zero_copy);
}

#[test]
fn a_device_that_goes_on_for_a_dead_backend_is_caught() {
    let caught = (1..=10).filter(|&seed| copied(seed, Device::GoesOn).is_err()).count();
    assert!(caught >= 5, "of ten runs {caught}");
}
