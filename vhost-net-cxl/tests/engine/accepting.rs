//! What a guest's driver accepts reaches its backend, whichever of frontend and backend hears of a lease first.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cxl_pool::HostId;
use cxl_pool::simulated::{SimulatedMemory, SimulatedPool};
use pod_protocol::objects::{Object, PortObject, RegistrationState};
use vhost_net_cxl::offloads::Offloads;

use crate::echo::BUFFER_BYTES;
use crate::finishing::{large, payload};
use crate::guest::Guest;
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, all_features, area, channel, connect, lease, mac, port,
    registration, route, settle,
};
use crate::recording::{Wire, recording_backend};
use crate::switching::transmit_area;
use RegistrationState::Active;

/// How long something may take that a loaded machine is late with.
const PATIENCE: Duration = Duration::from_mins(1);

/// One instance on a NIC that hands over large packets whole.
struct Pod {
    pool: SimulatedPool,
    frontend: TestFrontend<SimulatedMemory>,
    backend: TestBackend<SimulatedMemory>,
    guest: Guest,
    wire: Arc<Mutex<Wire>>,
}

/// Its frontend has its port, and its guest runs; its backend has not heard of it.
fn unregistered() -> Pod {
    let pool = SimulatedPool::new(4, POOL_BYTES);
    let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
    let there = pool.host(HostId::new(2));
    let (mut backend, wire) = recording_backend(&there, Offloads::ALL, usize::MAX, area(32, 16));
    connect(&mut frontend, &mut backend, 1);
    frontend.apply(Object::Port(port(1, area(8, 8), route(1, 1), None)));
    let mut guest = Guest::new(64);
    guest.post(64, BUFFER_BYTES);
    frontend.start(1, &guest, all_features());
    settle(&mut [&mut frontend, &mut backend]);
    Pod { pool, frontend, backend, guest, wire }
}

impl Pod {
    /// In how many packets one of 5000 bytes arrives.
    fn packets_of_a_large_one(&mut self) -> usize {
        let (header, frame) = large(mac(9), mac(1), &payload(5000));
        self.wire.lock().expect("unpoisoned").arriving.push_back([&header[..], &frame].concat());
        settle(&mut [&mut self.frontend, &mut self.backend]);
        self.guest.received(BUFFER_BYTES).len()
    }
}

#[test]
fn what_is_said_before_the_lease_is_known_counts() {
    let mut pod = unregistered();
    pod.backend.apply(Object::Registration(registration(1, 1, 1, Active, area(8, 8))));
    assert_eq!(pod.packets_of_a_large_one(), 1);
    // The backend begins anew, and hears of the channel some time before it hears of the lease.
    let there = pod.pool.host(HostId::new(2));
    (pod.backend, pod.wire) = recording_backend(&there, Offloads::ALL, usize::MAX, area(32, 16));
    connect(&mut pod.frontend, &mut pod.backend, 2);
    settle(&mut [&mut pod.frontend, &mut pod.backend]);
    pod.backend.apply(Object::Registration(registration(1, 1, 1, Active, area(8, 8))));
    assert_eq!(pod.packets_of_a_large_one(), 1);
}

#[test]
fn what_a_frontend_of_before_said_does_not_count() {
    let mut pod = unregistered();
    // It begins anew, and has no guest yet.
    pod.frontend = TestFrontend::new(&pod.pool.host(HostId::new(1)));
    connect(&mut pod.frontend, &mut pod.backend, 2);
    pod.backend.apply(Object::Registration(registration(1, 1, 1, Active, area(8, 8))));
    pod.packets_of_a_large_one();
    assert_eq!(pod.backend.lease(1).rx_packets, 4, "in the form that any driver takes");
}

#[test]
fn what_the_frontend_of_another_host_says_early_counts_once_the_lease_is_with_it() {
    let mut pod = unregistered();
    pod.backend.apply(Object::Registration(registration(1, 1, 1, Active, area(8, 8))));
    let mut there = TestFrontend::new(&pod.pool.host(HostId::new(3)));
    pod.backend.apply(Object::Channel(channel(2, 1, 512, false)));
    there.apply(Object::Channel(channel(2, 1, 512, true)));
    let arriving = PortObject { incoming: true, ..port(1, area(16, 8), route(2, 1), None) };
    there.apply(Object::Port(arriving.clone()));
    // The guest moves, and its new frontend hears before the backend that the lease is its own.
    let bases = [0, 1].map(|ring| pod.frontend.task.stop_ring(lease(1), ring, None));
    there.task.start_ring(lease(1), pod.guest.receive.ring(all_features(), bases[0]), None);
    there.task.start_ring(lease(1), pod.guest.transmit.ring(all_features(), bases[1]), None);
    there.apply(Object::Port(PortObject { incoming: false, active: route(2, 2), ..arriving }));
    settle(&mut [&mut pod.frontend, &mut pod.backend, &mut there]);
    pod.backend.apply(Object::Registration(registration(1, 2, 2, Active, area(16, 8))));
    pod.frontend = there;
    assert_eq!(pod.packets_of_a_large_one(), 1);
}

#[test]
fn a_guest_whose_driver_does_not_run_costs_its_neighbours_no_large_packets() {
    let mut pod = unregistered();
    for number in [1, 2, 3] {
        let transmit_area = transmit_area(number);
        pod.backend.apply(Object::Registration(registration(number, 1, 1, Active, transmit_area)));
    }
    pod.frontend.apply(Object::Port(port(2, transmit_area(2), route(1, 1), None)));
    // The third one's frontend says nothing at all.
    let told = |pod: &mut Pod, expected| {
        // A NIC is told at once, or after a moment.
        let began = Instant::now();
        while pod.wire.lock().expect("unpoisoned").told != Some(expected) && began.elapsed() < PATIENCE {
            settle(&mut [&mut pod.frontend, &mut pod.backend]);
        }
        assert_eq!(pod.wire.lock().expect("unpoisoned").told, Some(expected));
    };
    told(&mut pod, Offloads::ALL);
    assert_eq!(pod.packets_of_a_large_one(), 1);
    let mut second = Guest::new(64);
    second.post(64, BUFFER_BYTES);
    let plain = all_features() & !Offloads::ALL.features();
    pod.frontend.start(2, &second, plain);
    told(&mut pod, Offloads::NONE);
    let to_second = |pod: &mut Pod| {
        let (header, frame) = large(mac(9), mac(2), &payload(5000));
        pod.wire.lock().expect("unpoisoned").arriving.push_back([&header[..], &frame].concat());
        settle(&mut [&mut pod.frontend, &mut pod.backend]);
    };
    // What was on its way is cut for it.
    to_second(&mut pod);
    assert_eq!(second.received(BUFFER_BYTES).len(), 4);
    for ring in 0..2 {
        pod.frontend.task.stop_ring(lease(2), ring, None);
    }
    told(&mut pod, Offloads::ALL);
    to_second(&mut pod);
    assert_eq!(pod.frontend.lease(2).drops, [("no-guest-queue".to_owned(), 1)].into());
}
