//! A VMM lets go of its guest's queues, as before the guest goes on elsewhere, while the NIC has yet to send what the guest sent.

use std::time::{Duration, Instant};

use cxl_pool::Role;
use pod_protocol::objects::{Object, PortObject, RegistrationState};
use vhost_frontend::mock::{MockGuest, Piece};
use vm_memory::{Bytes, GuestAddress};

use crate::pod::{Controller, MAC, endpoint, null_nic, port, registration, run_directory};

const PACKETS: u32 = 5;
const PACKET_BYTES: usize = 112;
/// For so long a frontend waits for what is under way. A machine on which what is done meanwhile takes longer shows nothing.
const PATIENCE: Duration = Duration::from_secs(1);

fn send(guest: &mut MockGuest) {
    for number in 0..PACKETS {
        let mut packet = [0; PACKET_BYTES];
        packet[12..18].copy_from_slice(&[2, 0, 0, 0, 0, 200]);
        packet[18..24].copy_from_slice(&MAC.bytes());
        packet[24..26].copy_from_slice(&[0x88, 0xb5]);
        let address = guest.data_start() + u64::from(number) * 2048;
        guest.memory().write_slice(&packet, GuestAddress(address)).expect("in memory");
        let bytes = u32::try_from(PACKET_BYTES).expect("short");
        guest.offer(1, &[Piece { address, bytes, writable: false }], None);
    }
}

/// What was taken from the guest and is kept back by a backend that has yet to hear that the lease is its own. The VMM has the queues
/// back at once in either case: that is the time that is given.
fn let_go(then: impl FnOnce(&mut Controller, &mut MockGuest, Instant)) {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let directory = directory.path();
    let (mut controller, _daemons) = null_nic(directory, "sink", RegistrationState::Standby);
    let frontend = endpoint(1, Role::NetFrontend);
    controller.apply(frontend, Object::Port(PortObject { standby: None, ..port((2, 1), (2, 1)) }));
    let mut guest = MockGuest::new(8 << 20, 2, 128);
    guest.connect(&run_directory(directory).sockets().join("vm-net0.sock"), 1 << 29);
    controller.serve_until("the start of its queues", |it| it.running.last() == Some(&true));
    send(&mut guest);
    controller.serve_until("taking all packets", |it| {
        it.leases.get(&frontend).is_some_and(|lease| lease.tx_packets == u64::from(PACKETS))
    });
    let began = Instant::now();
    assert_eq!(guest.stop_ring(0), 0);
    assert_eq!(guest.stop_ring(1), PACKETS);
    then(&mut controller, &mut guest, began);
}

fn is_let_go(controller: &Controller) -> bool {
    controller.running.last() == Some(&false)
}

#[test]
fn the_controller_hears_that_queues_were_let_go_of_once_all_is_sent_that_came_from_them() {
    let_go(|controller, _guest, began| {
        let (frontend, backend) = (endpoint(1, Role::NetFrontend), endpoint(2, Role::NetBackend));
        // What it says comes in order.
        controller.leases.clear();
        controller.serve_until("telemetry", |it| it.leases.contains_key(&frontend));
        let lets_go = is_let_go(controller);
        controller.apply(backend, registration(2, 1, RegistrationState::Active));
        if began.elapsed() >= PATIENCE {
            return;
        }
        assert!(!lets_go, "its lease would change hands, and the packets be refused");
        controller.serve_until("the release of its queues", is_let_go);
        controller.serve_until("sending all packets", |it| {
            it.leases.get(&backend).is_some_and(|lease| lease.tx_packets == u64::from(PACKETS))
        });
        assert_eq!(controller.leases[&backend].drops, [].into());
    });
}

#[test]
fn nobody_waits_for_ever_for_what_no_nic_takes_and_it_is_counted() {
    let_go(|controller, _guest, _began| {
        controller.serve_until("the release of its queues", is_let_go);
        let frontend = endpoint(1, Role::NetFrontend);
        controller.leases.clear();
        controller.serve_until("telemetry", |it| it.leases.contains_key(&frontend));
        let dropped = [("queue-stopped".to_owned(), u64::from(PACKETS))].into();
        assert_eq!(controller.leases[&frontend].drops, dropped);
    });
}

#[test]
fn queues_that_start_again_meanwhile_were_not_let_go_of() {
    let_go(|controller, guest, began| {
        guest.start_rings();
        controller.apply(endpoint(2, Role::NetBackend), registration(2, 1, RegistrationState::Active));
        if began.elapsed() >= PATIENCE {
            return;
        }
        controller.leases.clear();
        controller.serve_until("telemetry", |it| it.leases.len() == 2);
        assert!(!is_let_go(controller));
    });
}
