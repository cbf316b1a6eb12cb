//! A NIC whose driver fails at work.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cxl_pool::HostId;
use cxl_pool::simulated::SimulatedPool;
use pod_protocol::ids::MacAddress;
use pod_protocol::reports::Report;
use pod_protocol::worker::{Progress, Task};
use vhost_net_cxl::backend::receive_buffers::ReceiveBuffers;
use vhost_net_cxl::nic::{Batch, Driver, Identity, LinkState, Nic, NicError, OnLinkChange, Piece};
use vhost_net_cxl::offloads::Offloads;

use crate::pod::{NIC, POOL_BYTES, TestBackend, area};

/// Works until it is told to break, and then has an error for every call and always something to do.
struct BreakableNic {
    identity: Identity,
    link: LinkState,
    broken: Arc<AtomicBool>,
}

impl BreakableNic {
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

    fn transmit(&mut self, packets: &[Piece]) -> Result<usize, NicError> {
        self.outcome(packets.len())
    }

    fn transmit_frame(&mut self, _frame: &[u8]) -> Result<bool, NicError> {
        self.outcome(true)
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
    let identity = Identity {
        name: NIC.into(),
        driver: Driver::Null,
        mac: Some(MacAddress::new([2, 0, 0, 0, 0, 9])),
        mtu: 1500,
        speed_mbps: 10_000,
        backup: false,
        offloads: Offloads::ALL,
        cache_bypassing: false,
    };
    let nic = BreakableNic { identity, link: LinkState::new(true), broken: Arc::clone(&broken) };
    let mut backend = TestBackend::with_nic(&pool.host(HostId::new(2)), Box::new(nic), area(32, 16));
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
