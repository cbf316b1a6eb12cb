//! A NIC whose driver fails at work.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cxl_pool::HostId;
use cxl_pool::simulated::SimulatedPool;
use pod_protocol::ids::MacAddress;
use pod_protocol::reports::{DeviceReport, Report};
use pod_protocol::worker::{Progress, Task};
use vhost_net_cxl::backend::receive_buffers::ReceiveBuffers;
use vhost_net_cxl::nic::{Batch, Driver, Identity, LinkState, Nic, NicError, OnLinkChange, Taken};
use vhost_net_cxl::offloads::Offloads;

use crate::echo::frame;
use crate::guest::Guest;
use crate::pod::{NIC, POOL_BYTES, TestBackend, TestFrontend, all_features, area, serve, settle};
use crate::recording::RecordingNic;

/// Works until it is told to break, and then has an error for every call and always something to do.
struct BreakableNic {
    identity: Identity,
    link: LinkState,
    broken: Arc<AtomicBool>,
}

impl BreakableNic {
    fn open(broken: &Arc<AtomicBool>, mtu: u16) -> Box<dyn Nic> {
        let identity = Identity {
            name: NIC.into(),
            driver: Driver::Null,
            mac: Some(MacAddress::new([2, 0, 0, 0, 0, 9])),
            mtu,
            speed_mbps: 10_000,
            backup: false,
            lag: None,
            offloads: Offloads::ALL,
            cache_bypassing: false,
        };
        Box::new(Self { identity, link: LinkState::new(true), broken: Arc::clone(broken) })
    }

    fn outcome<T>(&self, good: T) -> Result<T, NicError> {
        if !self.broken.load(Ordering::Relaxed) {
            return Ok(good);
        }
        let source = io::Error::from(io::ErrorKind::BrokenPipe);
        Err(NicError::System { nic: NIC.into(), doing: "work", hint: "", source })
    }
}

impl Nic for BreakableNic {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn link(&self) -> &LinkState {
        &self.link
    }

    fn watch_link(&mut self, _on_change: OnLinkChange) -> Result<(), NicError> {
        self.outcome(())
    }

    fn start(&mut self, _buffers: &mut ReceiveBuffers) -> Result<(), NicError> {
        self.outcome(())
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn set_receiver_offloads(&mut self, _offloads: Offloads) -> Result<(), NicError> {
        self.outcome(())
    }

    fn receive(&mut self, _buffers: &mut ReceiveBuffers, _batch: &mut Batch) -> Result<(), NicError> {
        self.outcome(())
    }

    fn transmit(&mut self, packets: &Batch) -> Result<usize, NicError> {
        self.outcome(packets.len())
    }

    fn transmit_frame(&mut self, _frame: &[u8]) -> Result<Taken, NicError> {
        self.outcome(Taken::Whole)
    }

    fn has_work(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    fn flush(&mut self) -> Result<(), NicError> {
        self.outcome(())
    }
}

#[test]
fn a_failed_nic_is_closed_reported_once_and_waited_for_no_longer() {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    let broken = Arc::new(AtomicBool::new(false));
    let nic = BreakableNic::open(&broken, 1500);
    let mut backend = TestBackend::with_nic(&pool.host(HostId::new(2)), nic, area(32, 16));
    assert_eq!(backend.task.turn(), Progress::Idle);
    assert!(backend.task.prepare_sleep());
    backend.task.resume();
    assert!(backend.link.is_up());

    broken.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        assert_eq!(backend.task.turn(), Progress::Idle);
        assert!(backend.task.prepare_sleep(), "a failed NIC keeps the worker awake");
        backend.task.resume();
    }
    let reports = backend.reports.lock().unwrap();
    assert!(matches!(&reports[..], [Report::DeviceFailed { device, .. }] if device == NIC), "{reports:?}");
    assert!(!backend.link.is_up());
    // Only this test still has a hand on it: the driver is closed, with everything it held open.
    assert_eq!(Arc::strong_count(&broken), 1);
    assert_eq!(backend.counters.errors.get(), 1);
}

/// If it lost its carrier now, nobody would hear of it.
#[test]
fn a_nic_whose_carrier_cannot_be_watched_any_more_has_failed() {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    let memory = pool.host(HostId::new(2));
    let (nic, _wire) = RecordingNic::new(&memory, Offloads::NONE, usize::MAX);
    let mut backend = TestBackend::with_nic(&memory, Box::new(nic), area(32, 16));
    backend.task.turn();
    assert!(backend.link.is_up() && backend.reports.lock().unwrap().is_empty());
    backend.link.set_unwatched("the kernel went away");
    for _ in 0..3 {
        backend.task.turn();
    }
    let (nic, _wire) = RecordingNic::new(&memory, Offloads::NONE, usize::MAX);
    backend.task.reopened(Box::new(nic), None);
    backend.task.turn();
    let reports = backend.reports.lock().unwrap();
    let [Report::DeviceFailed { device, reason }, Report::DeviceBack { .. }] = &reports[..] else {
        panic!("{reports:?}")
    };
    assert!(device == NIC && reason.contains("the kernel went away"), "{reason}");
    assert!(!backend.link.is_up());
    assert_eq!((backend.counters.errors.get(), backend.counters.up.load(Ordering::Relaxed)), (1, true));
}

#[test]
fn a_nic_that_was_opened_again_takes_over_and_gets_what_waits() {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    let broken = Arc::new(AtomicBool::new(false));
    let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
    let mut backend =
        TestBackend::with_nic(&pool.host(HostId::new(2)), BreakableNic::open(&broken, 1500), area(32, 16));
    serve(&mut frontend, &mut backend);
    let mut guest = Guest::new(64);
    frontend.start(1, &guest, all_features());
    settle(&mut [&mut frontend, &mut backend]);
    broken.store(true, Ordering::Relaxed);
    settle(&mut [&mut frontend, &mut backend]);
    for number in 0..5 {
        assert!(guest.send(&[0; 12], &frame(number, 100)));
    }
    settle(&mut [&mut frontend, &mut backend]);
    assert!(guest.transmit.reclaim_pairs().is_empty());
    assert!(!backend.counters.up.load(Ordering::Relaxed));

    // One with a smaller MTU would not do.
    let working = Arc::new(AtomicBool::new(false));
    backend.task.reopened(BreakableNic::open(&working, 1400), None);
    settle(&mut [&mut frontend, &mut backend]);
    assert!(guest.transmit.reclaim_pairs().is_empty());
    assert_eq!(Arc::strong_count(&working), 1, "it is closed");

    let memory = pool.host(HostId::new(2));
    let (nic, wire) = RecordingNic::new(&memory, Offloads::NONE, usize::MAX);
    backend.task.reopened(Box::new(nic), None);
    settle(&mut [&mut frontend, &mut backend]);
    // It was given back, and the timer fires, which nobody watches here.
    frontend.task.retry();
    settle(&mut [&mut frontend, &mut backend]);
    assert_eq!(guest.transmit.reclaim_pairs().len(), 5);
    {
        let wire = wire.lock().unwrap();
        let (announced, sent): (Vec<_>, Vec<_>) =
            wire.frames.iter().partition(|frame| frame[12..14] == [0x80, 0x35]);
        assert_eq!(announced.len(), 1, "the switches learn where the address is");
        assert_eq!(
            sent,
            (0..5).map(|number| frame(number, 100)).collect::<Vec<_>>().iter().collect::<Vec<_>>()
        );
    }
    assert_eq!((backend.counters.reopened.get(), backend.counters.up.load(Ordering::Relaxed)), (1, true));
    let reports = backend.reports.lock().unwrap();
    let [Report::DeviceFailed { .. }, Report::DeviceBack { device }] = &reports[..] else {
        panic!("{reports:?}")
    };
    let DeviceReport::Nic { up, features, .. } = device else { panic!("{device:?}") };
    assert_eq!((*up, *features), (true, 0));
}

#[test]
fn a_nic_that_cannot_be_started_has_failed_and_comes_back() {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    let memory = pool.host(HostId::new(2));
    let (nic, wire) = RecordingNic::new(&memory, Offloads::ALL, usize::MAX);
    {
        // More than half of all buffers: the next one needs them back.
        let mut state = wire.lock().expect("unpoisoned");
        (state.hoards, state.broken) = (3000, true);
    }
    let mut backend = TestBackend::with_nic(&memory, Box::new(nic), area(32, 16));
    let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
    serve(&mut frontend, &mut backend);
    let mut guest = Guest::new(64);
    frontend.start(1, &guest, all_features());
    assert!(guest.send(&[0; 12], &frame(1, 100)));
    settle(&mut [&mut frontend, &mut backend]);
    {
        let reports = backend.reports.lock().expect("unpoisoned");
        assert!(
            matches!(&reports[..], [Report::DeviceFailed { device, .. }] if device == NIC),
            "{reports:?}"
        );
    }
    let (nic, wire) = RecordingNic::new(&memory, Offloads::ALL, usize::MAX);
    wire.lock().expect("unpoisoned").hoards = 3000;
    backend.task.reopened(Box::new(nic), None);
    settle(&mut [&mut frontend, &mut backend]);
    frontend.task.retry();
    settle(&mut [&mut frontend, &mut backend]);
    assert!(wire.lock().expect("unpoisoned").frames.contains(&frame(1, 100)));
    let reports = backend.reports.lock().expect("unpoisoned");
    assert!(matches!(&reports[..], [Report::DeviceFailed { .. }, Report::DeviceBack { .. }]), "{reports:?}");
}

#[test]
fn what_a_failed_driver_had_is_there_for_the_next_one() {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    let memory = pool.host(HostId::new(2));
    // More than half of all buffers.
    let open = |broken| {
        let (nic, wire) = RecordingNic::new(&memory, Offloads::ALL, usize::MAX);
        let mut state = wire.lock().expect("unpoisoned");
        (state.hoards, state.broken) = (3000, broken);
        drop(state);
        (Box::new(nic), wire)
    };
    let (nic, mut wire) = open(false);
    let mut backend = TestBackend::with_nic(&memory, nic, area(32, 16));
    let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
    serve(&mut frontend, &mut backend);
    let guest = Guest::new(64);
    frontend.start(1, &guest, all_features());
    settle(&mut [&mut frontend, &mut backend]);
    assert_eq!(wire.lock().expect("unpoisoned").told, Some(Offloads::ALL));
    for _ in 0..3 {
        wire.lock().expect("unpoisoned").broken = true;
        settle(&mut [&mut frontend, &mut backend]);
        // One that cannot be started has taken some too.
        backend.task.reopened(open(true).0, None);
        let (nic, next) = open(false);
        backend.task.reopened(nic, None);
        wire = next;
        settle(&mut [&mut frontend, &mut backend]);
        assert_eq!(wire.lock().expect("unpoisoned").told, Some(Offloads::ALL), "as its predecessor was");
    }
}
