//! A VMM asks that its guest be announced, after it has moved here.

use cxl_pool::HostId;
use cxl_pool::simulated::{Faults, SimulatedPool, check_seeds};
use pod_protocol::objects::{
    NicPolicy, Object, PortObject, RateLimit, RegistrationObject, RegistrationState,
};
use vhost_net_cxl::ethernet::announcement;
use vhost_net_cxl::offloads::Offloads;

use crate::echo::frame;
use crate::guest::Guest;
use crate::pod::{
    POOL_BYTES, TestFrontend, all_features, area, connect, lease, mac, port, registration, route, settle,
};
use crate::recording::recording_backend;

/// May send from one network address only, and three packets at once and then one a second.
fn strict() -> NicPolicy {
    let transmit = RateLimit {
        bytes_per_second: None,
        packets_per_second: Some(1),
        burst_ms: 3000,
        minimum_bytes_per_second: None,
    };
    NicPolicy { transmit, addresses: vec!["10.0.0.1".parse().expect("v4")], ..NicPolicy::default() }
}

#[test]
fn an_address_is_announced_once_its_guest_is_here_and_there_is_room() {
    check_seeds("-p vhost-net-cxl --test engine", 8, |seed| {
        let pool = SimulatedPool::new(seed, POOL_BYTES);
        let hosts = [1, 2].map(|id| pool.host(HostId::new(id)));
        let mut frontend = TestFrontend::new(&hosts[0]);
        let (mut backend, wire) = recording_backend(&hosts[1], Offloads::ALL, 1000, area(32, 16));
        connect(&mut frontend, &mut backend, 1);
        let registered = registration(1, 1, 1, RegistrationState::Active, area(8, 8));
        backend.apply(Object::Registration(RegistrationObject { policy: strict(), ..registered }));
        let here = PortObject { policy: strict(), ..port(1, area(8, 8), route(1, 1), None) };
        frontend.apply(Object::Port(PortObject { incoming: true, ..here.clone() }));
        settle(&mut [&mut frontend, &mut backend]);
        // That of the registration.
        let mut expected = vec![announcement(mac(1)).to_vec()];
        assert_eq!(wire.lock().expect("unpoisoned").frames, expected);

        frontend.task.announce(lease(1), mac(1));
        // Not the lease's.
        frontend.task.announce(lease(1), mac(2));
        frontend.task.announce(lease(2), mac(1));
        settle(&mut [&mut frontend, &mut backend]);
        assert_eq!(wire.lock().expect("unpoisoned").frames, expected, "its guest is not here yet");
        frontend.apply(Object::Port(here));
        settle(&mut [&mut frontend, &mut backend]);
        expected.push(announcement(mac(1)).to_vec());
        assert_eq!(wire.lock().expect("unpoisoned").frames, expected);

        // Behind what the guest has sent, of which the NIC takes one; and with the guest's rate used up.
        wire.lock().expect("unpoisoned").room = 1;
        let mut guest = Guest::new(64);
        frontend.start(1, &guest, all_features());
        let mut own = frame(1, 100);
        own[12..14].copy_from_slice(&[0x08, 0x06]);
        own[14..32].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1]);
        for _ in 0..4 {
            assert!(guest.send(&[0; 12], &own));
        }
        settle(&mut [&mut frontend, &mut backend]);
        for _ in 0..3 {
            frontend.task.announce(lease(1), mac(1));
        }
        settle(&mut [&mut frontend, &mut backend]);
        wire.lock().expect("unpoisoned").room = 1000;
        settle(&mut [&mut frontend, &mut backend]);
        expected.extend([own.clone(), own.clone(), own]);
        expected.push(announcement(mac(1)).to_vec());
        assert_eq!(wire.lock().expect("unpoisoned").frames, expected, "three requests at once are one");
        assert_eq!(guest.transmit.reclaim_pairs().len(), 3, "only what was the guest's is given back");
        assert_eq!((backend.lease(1).drops, frontend.lease(1).drops), ([].into(), [].into()));
        assert_eq!(pool.faults(), Faults::default());
        Ok(())
    });
}
