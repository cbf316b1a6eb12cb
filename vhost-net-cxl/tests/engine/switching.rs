//! Two instances of one NIC, and what they may not do to each other.

use cxl_pool::simulated::{Faults, SimulatedMemory, SimulatedPool};
use cxl_pool::{Area, HostId};
use pod_protocol::ids::MacAddress;
use pod_protocol::objects::{Object, PortObject, RegistrationObject, RegistrationState};

use crate::guest::{Guest, ram_area};
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, all_features, area, connect, mac, port, registration, route,
    settle,
};

const BUFFER_BYTES: u32 = 2048;

pub(crate) struct Neighbours {
    pool: SimulatedPool,
    pub(crate) frontend: TestFrontend<SimulatedMemory>,
    pub(crate) backend: TestBackend<SimulatedMemory>,
    pub(crate) guests: Vec<Guest>,
}

pub(crate) fn transmit_area(number: u32) -> Area {
    area(8 + 4 * u64::from(number), 4)
}

fn two(nic: &str, features: [u64; 2]) -> [Neighbours; 2] {
    neighbours(nic, &features)
}

/// Instances 1, 2… on one NIC, with drivers that acknowledge these features; once with the memory of the first one elsewhere, so that what it sends
/// is copied, and once in the pool.
pub(crate) fn neighbours(nic: &str, features: &[u64]) -> [Neighbours; 2] {
    [false, true].map(|first_in_pool| neighbours_of(nic, features, first_in_pool))
}

fn neighbours_of(nic: &str, features: &[u64], first_in_pool: bool) -> Neighbours {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    let here = pool.host(HostId::new(1));
    let mut guests: Vec<Guest> = features.iter().map(|_| Guest::new(64)).collect();
    if first_in_pool {
        guests[0] = Guest::in_simulated_pool(&here, 64);
    }
    let mut frontend = TestFrontend::new(&here).with_pool_file(guests[0].pool_file);
    let mut backend = TestBackend::new(&pool.host(HostId::new(2)), nic, area(32, 16));
    connect(&mut frontend, &mut backend, 1);
    for (number, guest) in (1..).zip(&mut guests) {
        let ram_area = guest.pool_file.map(|_| ram_area());
        let registration = registration(number, 1, 1, RegistrationState::Active, transmit_area(number));
        backend.apply(Object::Registration(RegistrationObject { ram_area, ..registration }));
        let port = port(number, transmit_area(number), route(1, 1), None);
        frontend.apply(Object::Port(PortObject { ram_area, ..port }));
        guest.post(64, BUFFER_BYTES);
        frontend.start(number, guest, features[number as usize - 1]);
    }
    settle(&mut [&mut frontend, &mut backend]);
    Neighbours { pool, frontend, backend, guests }
}

fn frame(from: MacAddress, to: MacAddress, bytes: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..bytes).map(|place| (place % 251).to_le_bytes()[0]).collect();
    frame[..6].copy_from_slice(&to.bytes());
    frame[6..12].copy_from_slice(&from.bytes());
    frame
}

impl Neighbours {
    /// The pool as a host has it.
    pub(crate) fn memory_of(&self, host: HostId) -> SimulatedMemory {
        self.pool.host(host)
    }

    pub(crate) fn settle(&mut self) {
        settle(&mut [&mut self.frontend, &mut self.backend]);
        assert_eq!(self.pool.faults(), Faults::default());
    }
}

#[test]
fn a_frame_between_two_instances_never_leaves_the_host() {
    for mut two in two("", [all_features(); 2]) {
        let sent = frame(mac(1), mac(2), 1000);
        assert!(two.guests[0].send(&[0; 12], &sent));
        two.settle();
        assert_eq!(
            two.guests[1].received(BUFFER_BYTES).into_iter().map(|it| it.1).collect::<Vec<_>>(),
            [sent]
        );
        assert!(two.guests[0].received(BUFFER_BYTES).is_empty());
        assert_eq!(two.backend.counters.tx_packets.get(), 0);
    }
}

#[test]
fn a_broadcast_reaches_the_others_and_the_wire_and_does_not_return() {
    for mut two in two("mode = 'echo'", [all_features(); 2]) {
        let sent = frame(mac(1), MacAddress::BROADCAST, 60);
        assert!(two.guests[0].send(&[0; 12], &sent));
        two.settle();
        assert_eq!(two.guests[1].received(BUFFER_BYTES).len(), 1);
        // The echo exchanges the addresses, so what comes back is for the first guest alone, from nobody's address.
        let back = two.guests[0].received(BUFFER_BYTES);
        assert_eq!(back.len(), 1);
        assert_eq!(back[0].1[..6], mac(1).bytes());
        assert_eq!(two.backend.counters.tx_packets.get(), 1);
        assert_eq!(two.guests[0].transmit.reclaim_pairs().len(), 1);
    }
}

#[test]
fn a_guest_cannot_send_from_another_address() {
    for mut two in two("", [all_features(); 2]) {
        assert!(two.guests[0].send(&[0; 12], &frame(mac(2), mac(9), 60)));
        two.settle();
        assert_eq!(two.backend.counters.tx_packets.get(), 0);
        assert_eq!(two.backend.lease(1).drops, [("spoofed-source".to_owned(), 1)].into());
        assert_eq!(two.guests[0].transmit.reclaim_pairs().len(), 1);
    }
}

#[test]
fn a_guest_does_not_speak_to_the_switch_itself() {
    for mut two in two("", [all_features(); 2]) {
        // Spanning tree, pause, LACP, LLDP, and the last one.
        for last in [0, 1, 2, 0x0e, 0x0f] {
            let reserved = MacAddress::new([1, 0x80, 0xc2, 0, 0, last]);
            assert!(two.guests[0].send(&[0; 12], &frame(mac(1), reserved, 60)));
        }
        two.settle();
        assert_eq!(two.backend.counters.tx_packets.get(), 0);
        assert!(two.guests[1].received(BUFFER_BYTES).is_empty());
        assert_eq!(two.backend.lease(1).drops, [("reserved-address".to_owned(), 5)].into());
        assert_eq!(two.guests[0].transmit.reclaim_pairs().len(), 5);
        // Other groups are everybody's.
        for group in [[1, 0x80, 0xc2, 0, 0, 0x10], [1, 0, 0x5e, 0, 0, 1]] {
            assert!(two.guests[0].send(&[0; 12], &frame(mac(1), MacAddress::new(group), 60)));
        }
        two.settle();
        assert_eq!(two.backend.counters.tx_packets.get(), 2);
        assert_eq!(two.guests[1].received(BUFFER_BYTES).len(), 2);
    }
}

#[test]
fn a_checksum_is_completed_for_a_guest_that_wants_it_whole() {
    let plain = all_features() & !vhost_net_cxl::offloads::Offloads::ALL.features();
    for mut two in two("", [all_features(), plain]) {
        // UDP over IPv4 from 10.0.0.1 to 10.0.0.2, 5 bytes of payload.
        let mut sent = frame(mac(1), mac(2), 14 + 20 + 8 + 5);
        sent[12..14].copy_from_slice(&[8, 0]);
        let udp = [0x30, 0x39, 0, 53, 0, 13, 0, 0, b'h', b'e', b'l', b'l', b'o'];
        sent[34..].copy_from_slice(&udp);
        // The sum of the pseudo header: addresses, protocol, length.
        let pseudo: u32 = 0x0a00 + 1 + 0x0a00 + 2 + 17 + 13;
        sent[40..42].copy_from_slice(&u16::try_from(pseudo).expect("small").to_be_bytes());
        assert!(two.guests[0].send(&[1, 0, 0, 0, 0, 0, 34, 0, 6, 0, 0, 0], &sent));
        two.settle();
        let got = two.guests[1].received(BUFFER_BYTES);
        assert_eq!(got.len(), 1);
        assert_eq!(got[0].0[0], 0, "nothing is left to do");
        let mut sum = pseudo;
        for pair in got[0].1[34..].chunks(2) {
            sum += u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low));
        }
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        assert_eq!(sum, 0xffff, "the receiver's check succeeds");
    }
}
