//! VMMs that have forgotten what the driver acknowledged.

use std::sync::atomic::Ordering;

use vhost::vhost_user::message::VhostUserVirtioFeatures;
use virtio_bindings::bindings::virtio_ring::{VRING_AVAIL_F_NO_INTERRUPT, VRING_USED_F_NO_NOTIFY};

use super::*;

/// A guest that has used the device, and whose VMM has come back and forgotten its driver's features.
fn forgotten(device: &Device) -> MockGuest {
    let mut guest = connected(&device.socket());
    works(&mut guest);
    guest.negotiate(&device.socket(), u64::MAX);
    guest.frontend().set_features(VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()).unwrap();
    guest
}

fn set_flags(guest: &MockGuest, ring: u64, flags: u32) {
    guest.memory().store(u16::try_from(flags).unwrap(), GuestAddress(ring), Ordering::SeqCst).unwrap();
}

#[test]
fn a_driver_that_uses_what_it_acknowledged_is_served() {
    let device = Device::start();
    let mut guest = forgotten(&device);
    // A predecessor that served it by flags died while it polled.
    let used = guest.ring(0).used_ring();
    set_flags(&guest, used, VRING_USED_F_NO_NOTIFY);
    guest.start_rings();
    for _ in 0..200 {
        // An indirect table, and the signal comes although it is asked for by an event index.
        let address = guest.data_start();
        let pieces = [0, 512].map(|at| Piece { address: address + at, bytes: 512, writable: true });
        guest.offer(0, &pieces, Some(address + 4096));
        assert_eq!(guest.wait_used(0, PATIENCE).map(|used| used.written), Some(1024));
    }
    assert_eq!(device.state.lock().malformed, 0);
}

#[test]
fn such_a_driver_is_asked_for_kicks_in_both_ways() {
    let device = Device::start();
    let mut guest = forgotten(&device);
    let used = guest.ring(0).used_ring();
    set_flags(&guest, used, VRING_USED_F_NO_NOTIFY);
    guest.start_rings();
    works(&mut guest);
    let next = {
        let mut state = device.state.lock();
        let ring = state.rings[0].as_mut().unwrap();
        ring.disable_notifications();
        assert!(!ring.enable_notifications());
        ring.next_available()
    };
    let word = |at: u64| guest.memory().load::<u16>(GuestAddress(at), Ordering::SeqCst).unwrap();
    assert_eq!((word(used), word(used + 4 + 8 * 64)), (0, next), "flags, and the event index");
}

#[test]
fn such_a_driver_is_not_signalled_when_its_flags_say_so() {
    let device = Device::start();
    let mut guest = forgotten(&device);
    guest.start_rings();
    works(&mut guest);
    while guest.ring(0).signalled() {}
    let available = guest.ring(0).available_ring();
    set_flags(&guest, available, VRING_AVAIL_F_NO_INTERRUPT);
    let before = device.state.lock().rings[0].as_ref().unwrap().next_available();
    guest.offer(0, &[Piece { address: guest.data_start(), bytes: 512, writable: true }], None);
    // Taken, completed and, if at all, signalled while nobody else looks.
    device.eventually(|state| state.rings[0].as_ref().unwrap().next_available() != before);
    assert!(!guest.ring(0).signalled());
    set_flags(&guest, available, 0);
    guest.offer(0, &[Piece { address: guest.data_start(), bytes: 512, writable: true }], None);
    device.eventually(|state| state.rings[0].as_ref().unwrap().next_available() == before.wrapping_add(2));
    assert!(guest.ring(0).signalled());
}
