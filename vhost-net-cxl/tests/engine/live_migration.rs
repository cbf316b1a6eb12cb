//! A guest moves from one frontend to another, while its NIC stays where it is.

use cxl_pool::HostId;
use cxl_pool::simulated::{Faults, SimulatedPool, check_seeds};
use pod_protocol::objects::{Object, PortObject, RegistrationState, Route};

use crate::echo::{BUFFER_BYTES, frame, returned};
use crate::guest::Guest;
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, all_features, area, channel, lease, port, registration, route,
    settle,
};

const QUEUE_SIZE: u16 = 128;

fn incoming(route: Route) -> PortObject {
    PortObject { incoming: true, ..port(1, area(16, 8), route, None) }
}

fn arrived(guest: &mut Guest) -> Vec<Vec<u8>> {
    guest.received(BUFFER_BYTES).into_iter().map(|(_, frame)| frame).collect()
}

fn echoed(numbers: std::ops::Range<u32>) -> Vec<Vec<u8>> {
    numbers.map(|number| returned(&frame(number, 400))).collect()
}

#[test]
fn the_new_side_sends_nothing_before_its_turn_and_then_all_that_waits() {
    check_seeds("-p vhost-net-cxl --test engine", 8, |seed| {
        let pool = SimulatedPool::new(seed, POOL_BYTES);
        let hosts = [1, 2, 3].map(|id| pool.host(HostId::new(id)));
        let mut here = TestFrontend::new(&hosts[0]);
        let mut backend = TestBackend::new(&hosts[1], "mode = 'echo'", area(32, 16));
        let mut there = TestFrontend::new(&hosts[2]);
        for (number, side) in [(1, &mut here), (2, &mut there)] {
            backend.apply(Object::Channel(channel(number, 1, 512, false)));
            side.apply(Object::Channel(channel(number, 1, 512, true)));
        }
        backend.apply(Object::Registration(registration(1, 1, 1, RegistrationState::Active, area(8, 8))));
        here.apply(Object::Port(port(1, area(8, 8), route(1, 1), None)));
        there.apply(Object::Port(incoming(route(2, 1))));
        let mut guest = Guest::new(QUEUE_SIZE);
        guest.post(QUEUE_SIZE, BUFFER_BYTES);
        here.start(1, &guest, all_features());
        for number in 0..20 {
            assert!(guest.send(&[0; 12], &frame(number, 400)));
        }
        settle(&mut [&mut here, &mut backend, &mut there]);
        assert_eq!(arrived(&mut guest), echoed(0..20));

        // The VMM here stops the guest and drains its queues; the VMM there starts them where they were.
        let bases = [0, 1].map(|ring| here.task.stop_ring(lease(1), ring, None));
        assert_eq!(guest.transmit.reclaim_pairs().len(), 20, "nothing is left behind");
        there.task.start_ring(lease(1), guest.receive.ring(all_features(), bases[0]), None);
        there.task.start_ring(lease(1), guest.transmit.ring(all_features(), bases[1]), None);
        for number in 20..40 {
            assert!(guest.send(&[0; 12], &frame(number, 400)));
        }
        settle(&mut [&mut here, &mut backend, &mut there]);
        assert!(guest.transmit.reclaim_pairs().is_empty(), "not yet");
        assert_eq!(backend.lease(1).drops, [].into(), "the backend has heard nothing of it");

        backend.apply(Object::Registration(registration(1, 2, 2, RegistrationState::Active, area(16, 8))));
        there.apply(Object::Port(PortObject { incoming: false, ..incoming(route(2, 2)) }));
        settle(&mut [&mut here, &mut backend, &mut there]);
        assert_eq!(arrived(&mut guest), echoed(20..40));
        assert_eq!(guest.transmit.reclaim_pairs().len(), 20);
        assert_eq!((backend.lease(1).drops, there.lease(1).drops), ([].into(), [].into()));
        assert_eq!(pool.faults(), Faults::default());
        Ok(())
    });
}

#[test]
fn what_the_old_side_still_sends_is_refused() {
    let pool = SimulatedPool::new(5, POOL_BYTES);
    let hosts = [1, 2, 3].map(|id| pool.host(HostId::new(id)));
    let mut here = TestFrontend::new(&hosts[0]);
    let mut backend = TestBackend::new(&hosts[1], "mode = 'echo'", area(32, 16));
    for number in [1, 2] {
        backend.apply(Object::Channel(channel(number, 1, 512, false)));
    }
    here.apply(Object::Channel(channel(1, 1, 512, true)));
    here.apply(Object::Port(port(1, area(8, 8), route(1, 1), None)));
    let mut guest = Guest::new(QUEUE_SIZE);
    guest.post(QUEUE_SIZE, BUFFER_BYTES);
    here.start(1, &guest, all_features());
    // The lease has changed hands, and this side has yet to hear of it.
    backend.apply(Object::Registration(registration(1, 2, 2, RegistrationState::Active, area(16, 8))));
    for number in 0..5 {
        assert!(guest.send(&[0; 12], &frame(number, 400)));
    }
    settle(&mut [&mut here, &mut backend]);
    assert_eq!(arrived(&mut guest), Vec::<Vec<u8>>::new());
    assert_eq!(backend.lease(1).tx_packets, 0);
}
