//! Moving to another route: what was not acknowledged is sent again, first and in order.

use cxl_pool::HostId;
use cxl_pool::simulated::{Faults, SimulatedPool};
use pod_protocol::objects::{Object, RegistrationState};

use crate::echo::{BUFFER_BYTES, frame, pair, returned};
use crate::pod::{POOL_BYTES, TestBackend, all_features, area, channel, port, registration, route, settle};
use RegistrationState::{Active, Standby};

const SLOTS: u32 = 512;

#[test]
fn packets_that_a_dead_link_holds_go_through_the_backup_nic() {
    for seed in 0..8 {
        let pool = SimulatedPool::new(seed, POOL_BYTES);
        let host = |number| pool.host(HostId::new(number));
        let transmit_area = area(8, 8);
        let mut pair = pair(&host(1), &host(2), SLOTS, all_features(), 8);
        let mut backup = TestBackend::new(&host(3), "mode = 'echo'", area(48, 8));
        backup.apply(Object::Channel(channel(2, 1, SLOTS, false)));
        backup.apply(Object::Registration(registration(1, 2, 1, Standby, transmit_area)));
        pair.frontend.apply(Object::Channel(channel(2, 1, SLOTS, true)));
        pair.frontend.apply(Object::Port(port(1, transmit_area, route(1, 1), Some(route(2, 1)))));

        assert!(pair.guest.send(&[0; 12], &frame(0, 100)));
        settle(&mut [&mut pair.frontend, &mut pair.backend, &mut backup]);
        assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 1);

        // The cable is pulled: what the guest sends from now on is neither lost nor acknowledged.
        pair.backend.link.set(false);
        for number in 1..20 {
            assert!(pair.guest.send(&[0; 12], &frame(number, 500)));
        }
        settle(&mut [&mut pair.frontend, &mut pair.backend, &mut backup]);
        assert!(pair.guest.transmit.reclaim_pairs().is_empty());
        assert_eq!(pair.guest.received(BUFFER_BYTES).len(), 1);

        // The controller moves the instance.
        backup.apply(Object::Registration(registration(1, 2, 2, Active, transmit_area)));
        pair.backend.apply(Object::Registration(registration(1, 1, 2, Standby, transmit_area)));
        pair.frontend.apply(Object::Port(port(1, transmit_area, route(2, 2), Some(route(1, 2)))));
        assert!(pair.guest.send(&[0; 12], &frame(20, 500)));
        settle(&mut [&mut pair.frontend, &mut pair.backend, &mut backup]);
        let arrived = pair.guest.received(BUFFER_BYTES);
        assert_eq!(arrived.len(), 20, "seed {seed}");
        for (number, (_, got)) in (1..).zip(&arrived) {
            assert_eq!(*got, returned(&frame(number, 500)), "frame {number}, seed {seed}");
        }
        assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 20);
        assert_eq!(pool.faults(), Faults::default());
        assert_eq!(backup.lease(1).drops, [].into());
        assert!(backup.reports.lock().expect("unpoisoned").is_empty(), "no NIC failed");

        // The cable is back: nothing that was parked comes out late.
        let before = pair.backend.counters.tx_packets.get();
        pair.backend.link.set(true);
        settle(&mut [&mut pair.frontend, &mut pair.backend, &mut backup]);
        assert_eq!(pair.backend.counters.tx_packets.get(), before);
        assert!(pair.guest.received(BUFFER_BYTES).is_empty());
    }
}

#[test]
fn a_packet_that_is_ahead_of_its_registration_waits_for_it() {
    let pool = SimulatedPool::new(3, POOL_BYTES);
    let mut pair = pair(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)), SLOTS, all_features(), 8);
    let transmit_area = area(8, 8);
    pair.frontend.apply(Object::Port(port(1, transmit_area, route(1, 2), None)));
    assert!(pair.guest.send(&[0; 12], &frame(1, 100)));
    settle(&mut [&mut pair.frontend, &mut pair.backend]);
    assert!(pair.guest.transmit.reclaim_pairs().is_empty());
    pair.backend.apply(Object::Registration(registration(1, 1, 2, Active, transmit_area)));
    // Its timer, which nobody watches here, would have fired.
    pair.frontend.task.retry();
    settle(&mut [&mut pair.frontend, &mut pair.backend]);
    assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 1);
    assert_eq!(pair.guest.received(BUFFER_BYTES).len(), 1);
}

#[test]
fn a_restarted_backend_gets_what_its_predecessor_did_not_acknowledge() {
    for seed in 0..8 {
        let pool = SimulatedPool::new(seed, POOL_BYTES);
        let transmit_area = area(8, 8);
        let mut pair = pair(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)), SLOTS, all_features(), 8);
        for number in 0..10 {
            assert!(pair.guest.send(&[0; 12], &frame(number, 300)));
        }
        // The frontend has announced them; the backend dies before it looks.
        settle(&mut [&mut pair.frontend]);
        pool.crash(HostId::new(2));
        let memory = pool.host(HostId::new(2));
        let mut successor = TestBackend::new(&memory, "mode = 'echo'", area(48, 8));
        successor.apply(Object::Channel(channel(1, 2, SLOTS, false)));
        pair.frontend.apply(Object::Channel(channel(1, 2, SLOTS, true)));
        successor.apply(Object::Registration(registration(1, 1, 1, Active, transmit_area)));
        settle(&mut [&mut pair.frontend, &mut successor]);
        let arrived = pair.guest.received(BUFFER_BYTES);
        assert_eq!(arrived.len(), 10, "seed {seed}");
        for (number, (_, got)) in (0..).zip(&arrived) {
            assert_eq!(*got, returned(&frame(number, 300)), "frame {number}, seed {seed}");
        }
        assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 10);
    }
}

#[test]
fn a_queue_that_stops_gets_its_descriptors_back_and_its_packets_go_on() {
    let pool = SimulatedPool::new(5, POOL_BYTES);
    let mut pair = pair(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)), SLOTS, all_features(), 8);
    pair.backend.link.set(false);
    for number in 0..5 {
        assert!(pair.guest.send(&[0; 12], &frame(number, 100)));
    }
    settle(&mut [&mut pair.frontend, &mut pair.backend]);
    let next = pair.frontend.task.stop_ring(crate::pod::lease(1), 1, None);
    assert_eq!(next, 5);
    assert_eq!(pair.guest.transmit.reclaim_pairs(), [0, 2, 4, 6, 8], "in the order of offering");
    // A successor resumes at the used index and finds nothing to do twice.
    let ring = pair.guest.transmit.ring(all_features(), next);
    pair.frontend.task.start_ring(crate::pod::lease(1), ring, None);
    pair.backend.link.set(true);
    settle(&mut [&mut pair.frontend, &mut pair.backend]);
    assert_eq!(pair.guest.received(BUFFER_BYTES).len(), 5);
    assert!(pair.guest.transmit.reclaim_pairs().is_empty());
}
