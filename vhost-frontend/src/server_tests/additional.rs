//! Requests that crate `vhost` does not know.

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;

#[test]
fn a_status_is_told_and_kept_and_zero_resets_the_device() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    let mut requests = 0;
    for _ in 0..3 {
        works(&mut guest);
        assert_eq!(guest.status(), Some(0xf));
        // The driver gave up, which is for it to know: the rings run until they are stopped.
        assert!(guest.set_status(0x8f));
        assert_eq!(guest.status(), Some(0x8f));
        works(&mut guest);
        assert!(guest.set_status(0));
        assert_eq!(guest.status(), Some(0));
        assert!(device.state.lock().rings.iter().all(Option::is_none), "all rings were stopped");
        // QEMU 7.2 asks only now how far they are.
        requests += 2;
        assert_eq!([0, 1].map(|ring| guest.stop_ring(ring)), [requests; 2]);
        guest.start_rings();
    }
    works(&mut guest);
    // A device that is reset otherwise has no status either, nor has one for the next VMM.
    guest.frontend().reset_device().unwrap();
    assert_eq!(guest.status(), Some(0));
    guest.start_rings();
    guest.disconnect();
    guest.negotiate(&device.socket(), u64::MAX);
    assert_eq!(guest.status(), Some(0xb));
    guest.start_rings();
    works(&mut guest);
}

/// VMMs hand it over once per connection, and drivers reset devices as often as they like.
#[test]
fn a_vmm_hears_of_a_broken_ring_also_after_a_reset() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    let broken = EventFd::new(EFD_NONBLOCK).unwrap();
    guest.frontend().set_vring_err(0, &broken).unwrap();
    assert!(guest.set_status(0));
    guest.start_rings();
    works(&mut guest);
    assert!(broken.read().is_err());
    let memory = guest.memory().clone();
    guest.ring(0).set_available_index(&memory, 5000);
    guest.ring(0).kick();
    device.eventually(|state| state.rings[0].as_ref().is_some_and(Ring::is_broken));
    assert_eq!(broken.read().unwrap(), 1);
}

#[test]
fn a_status_that_is_none_costs_the_connection() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    assert!(!guest.set_status(0x100));
    device.eventually(|state| state.disconnected == 1);
    assert_eq!(guest.status(), None);
    works(&mut connected(&device.socket()));
}

#[test]
fn an_address_is_announced_for_who_asks() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    for last in 0..5 {
        assert!(guest.send_rarp([2, 0, 0, 0, 0, last]));
    }
    assert_eq!(device.state.lock().announced, [0, 1, 2, 3, 4].map(|last| [2, 0, 0, 0, 0, last]));
    works(&mut guest);
}

#[test]
fn a_ring_without_kicks_is_looked_at_again_and_again() {
    let device = Device::start();
    let mut guest = connected(&device.socket());
    works(&mut guest);
    assert!(guest.poll_ring(0));
    {
        let state = device.state.lock();
        let ring = state.rings[0].as_ref().unwrap();
        let patience = Timespec { tv_sec: i64::try_from(PATIENCE.as_secs()).unwrap(), tv_nsec: 0 };
        for _ in 0..3 {
            let kick = ring.kick().expect("a worker that sleeps has something to wake it");
            assert_eq!(poll(&mut [PollFd::from_borrowed_fd(kick, PollFlags::IN)], Some(&patience)), Ok(1));
            ring.drain_kick();
        }
    }
    works(&mut guest);
}

#[test]
fn what_was_not_agreed_on_is_not_done() {
    let device = Device::start();
    let mut guest = MockGuest::new(1 << 20, QUEUES, 64);
    guest.negotiate(&device.socket(), u64::MAX);
    let protocol = guest.frontend().get_protocol_features().unwrap();
    let without = protocol - VhostUserProtocolFeatures::STATUS - VhostUserProtocolFeatures::RARP;
    guest.frontend().set_protocol_features(without).unwrap();
    assert!(!guest.send_rarp([2, 0, 0, 0, 0, 1]));
    device.eventually(|state| state.disconnected == 1);
    assert_eq!(device.state.lock().announced, Vec::<[u8; 6]>::new());
    guest.negotiate(&device.socket(), u64::MAX);
    guest.frontend().set_protocol_features(without).unwrap();
    assert!(!guest.set_status(1));
    device.eventually(|state| state.disconnected == 2);
    works(&mut connected(&device.socket()));
}
