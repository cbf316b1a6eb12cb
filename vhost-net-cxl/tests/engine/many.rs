//! A NIC that many instances lean on, such as the backup of a whole pod.

use cxl_pool::HostId;
use cxl_pool::simulated::SimulatedPool;
use pod_protocol::ids::{LeaseGeneration, MacAddress};
use pod_protocol::objects::{Object, ObjectId, REGISTRATIONS_MAX, RegistrationObject, RegistrationState};
use vhost_net_cxl::offloads::Offloads;

use crate::echo::{BUFFER_BYTES, Pair, QUEUE_SIZE, echo};
use crate::guest::Guest;
use crate::pod::{
    NIC, POOL_BYTES, TestBackend, TestFrontend, Turn, all_features, area, channel, lease, port, registration,
    route, settle,
};
use crate::recording::recording_backend;

/// Instance `number` of those for which the NIC stands by.
fn other(number: u32) -> RegistrationObject {
    let [_, high, middle, low] = number.to_be_bytes();
    RegistrationObject {
        lease: lease(number),
        mac: MacAddress::new([2, 9, 9, high, middle, low]),
        ..registration(1, 1, 1, RegistrationState::Standby, area(8, 8))
    }
}

#[test]
fn thousands_may_lean_on_a_nic_and_the_last_one_works_as_the_first() {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    let (here, there) = (pool.host(HostId::new(1)), pool.host(HostId::new(2)));
    let mut backend = TestBackend::new(&there, "mode = 'echo'", area(32, 16));
    backend.apply(Object::Channel(channel(1, 1, 512, false)));
    let last = u32::try_from(REGISTRATIONS_MAX).expect("a few thousand");
    for number in 2..=last {
        backend.apply(Object::Registration(other(number)));
    }
    let mut guest = Guest::new(QUEUE_SIZE);
    let mut frontend = TestFrontend::new(&here);
    let transmit_area = area(8, 8);
    backend.apply(Object::Registration(registration(1, 1, 1, RegistrationState::Active, transmit_area)));
    frontend.apply(Object::Channel(channel(1, 1, 512, true)));
    frontend.apply(Object::Port(port(1, transmit_area, route(1, 1), None)));
    guest.post(QUEUE_SIZE, BUFFER_BYTES);
    frontend.start(1, &guest, all_features());
    settle(&mut [&mut frontend, &mut backend]);
    let mut pair = Pair { frontend, backend, guest };
    echo(&mut pair, 200, 1514);

    // There is no room for another one, until one goes.
    let one_more = || Object::Registration(other(last + 1));
    let refused = pair.backend.task.apply(one_more(), None).expect_err("there is no room");
    assert!(refused.contains("4096 registrations"), "{refused}");
    pair.backend.task.remove(&ObjectId::Registration { lease: lease(77), nic: NIC.into() });
    pair.backend.apply(one_more());
    echo(&mut pair, 200, 1514);
}

#[test]
fn a_backend_that_many_instances_move_to_looks_them_over_once() {
    const INSTANCES: u32 = 200;
    let pool = SimulatedPool::new(6, POOL_BYTES);
    let (mut backend, wire) =
        recording_backend(&pool.host(HostId::new(2)), Offloads::ALL, usize::MAX, area(32, 16));
    backend.apply(Object::Channel(channel(1, 1, 512, false)));
    let tellings = || {
        let wire = wire.lock().expect("unpoisoned");
        (wire.tellings, wire.flow_tellings)
    };
    let before = tellings();
    for (generation, state) in [(1, RegistrationState::Standby), (2, RegistrationState::Active)] {
        for number in 1..=INSTANCES {
            let generation = LeaseGeneration::new(generation);
            backend.apply(Object::Registration(RegistrationObject { generation, state, ..other(number) }));
        }
    }
    backend.turn_once();
    assert_eq!(tellings(), (before.0 + 1, before.1 + 1));
    assert_eq!(wire.lock().expect("unpoisoned").flows, INSTANCES as usize);
    backend.turn_once();
    assert_eq!(tellings(), (before.0 + 1, before.1 + 1), "nothing has changed since");
}
