//! Instances in VLANs: tags on the wire, none at the guests, and nobody hears what is not for its VLAN.

use std::sync::{Arc, Mutex};

use cxl_pool::HostId;
use cxl_pool::simulated::{Faults, SimulatedMemory, SimulatedPool, check_seeds};
use pod_protocol::ids::MacAddress;
use pod_protocol::objects::{NicPolicy, Object, PortObject, RegistrationObject, RegistrationState};
use vhost_net_cxl::offloads::Offloads;

use crate::guest::{Guest, ram_area};
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, all_features, area, connect, mac, port, registration, route,
    settle,
};
use crate::recording::{Wire, recording_backend};
use crate::switching::transmit_area;

const BUFFER_BYTES: u32 = 2048;
const TYPE: [u8; 2] = [0x88, 0xb5];
const BROADCAST: MacAddress = MacAddress::BROADCAST;

/// Guests 1 and 2 in VLAN 10, 3 in VLAN 20, 4 in none. The memory of the first lies in the pool.
struct Pod {
    pool: SimulatedPool,
    frontend: TestFrontend<SimulatedMemory>,
    backend: TestBackend<SimulatedMemory>,
    guests: Vec<Guest>,
    wire: Arc<Mutex<Wire>>,
}

const VLANS: [Option<u16>; 4] = [Some(10), Some(10), Some(20), None];

fn registered(number: u32, vlan: Option<u16>) -> Object {
    let registration = registration(number, 1, 1, RegistrationState::Active, transmit_area(number));
    let policy = NicPolicy { vlan, ..NicPolicy::default() };
    let ram_area = (number == 1).then(ram_area);
    Object::Registration(RegistrationObject { policy, ram_area, ..registration })
}

fn pod(seed: u64, offloads: Offloads, features: u64) -> Pod {
    let pool = SimulatedPool::new(seed, POOL_BYTES);
    let here = pool.host(HostId::new(1));
    let mut guests = vec![Guest::in_simulated_pool(&here, 64)];
    guests.extend((1..VLANS.len()).map(|_| Guest::new(64)));
    let mut frontend = TestFrontend::new(&here).with_pool_file(guests[0].pool_file);
    let memory = pool.host(HostId::new(2));
    let (mut backend, wire) = recording_backend(&memory, offloads, usize::MAX, area(32, 8));
    connect(&mut frontend, &mut backend, 1);
    for (number, (guest, vlan)) in (1..).zip(guests.iter_mut().zip(VLANS)) {
        backend.apply(registered(number, vlan));
        let ram_area = (number == 1).then(ram_area);
        let port = port(number, transmit_area(number), route(1, 1), None);
        frontend.apply(Object::Port(PortObject { ram_area, ..port }));
        guest.post(64, BUFFER_BYTES);
        frontend.start(number, guest, features);
    }
    settle(&mut [&mut frontend, &mut backend]);
    Pod { pool, frontend, backend, guests, wire }
}

fn frame(from: MacAddress, to: MacAddress, tag: &[u8], bytes: usize) -> Vec<u8> {
    let mut frame = Vec::new();
    frame.extend(to.bytes());
    frame.extend(from.bytes());
    frame.extend(tag);
    frame.extend(TYPE);
    frame.extend((0..bytes - 14).map(|place| (place % 241).to_le_bytes()[0]));
    frame
}

impl Pod {
    fn settle(&mut self) {
        settle(&mut [&mut self.frontend, &mut self.backend]);
        assert_eq!(self.pool.faults(), Faults::default());
    }

    /// What the NIC has sent, but for announcements.
    fn sent(&self) -> Vec<Vec<u8>> {
        let mut frames = std::mem::take(&mut self.wire.lock().expect("unpoisoned").frames);
        frames.retain(|frame| frame[12..14] == TYPE || frame[16..18] == TYPE);
        frames
    }

    fn arrives(&mut self, header: [u8; 12], frame: &[u8]) {
        let packet = [&header[..], frame].concat();
        self.wire.lock().expect("unpoisoned").arriving.push_back(packet);
        self.settle();
    }

    /// What each guest has received.
    fn heard(&mut self) -> Vec<Vec<Vec<u8>>> {
        let frames =
            |guest: &mut Guest| guest.received(BUFFER_BYTES).into_iter().map(|(_, frame)| frame).collect();
        self.guests.iter_mut().map(frames).collect()
    }
}

const TAG_10: [u8; 4] = [0x81, 0, 0, 10];
const TAG_20: [u8; 4] = [0x81, 0, 0x60, 20];

#[test]
fn frames_bear_the_tag_on_the_wire_and_none_at_the_guests() {
    check_seeds("-p vhost-net-cxl --test engine", 12, |seed| {
        let mut pod = pod(seed, Offloads::ALL, all_features());
        // Announced with its tag.
        let announced = std::mem::take(&mut pod.wire.lock().expect("unpoisoned").frames);
        let tags: Vec<&[u8]> = announced.iter().map(|frame| &frame[12..16]).collect();
        assert_eq!(tags, [&[0x81, 0, 0, 10], &[0x81, 0, 0, 10], &[0x81, 0, 0, 20], &[0x80, 0x35, 0, 1]]);
        // Copied, and lent where the guest's memory lies in the pool.
        for bytes in [60, 400, 1514] {
            for (number, vlan) in (1..).zip(VLANS) {
                let plain = frame(mac(number), mac(99), &[], bytes);
                assert!(pod.guests[usize::from(number) - 1].send(&[0; 12], &plain));
                pod.settle();
                let tag = vlan.map_or(vec![], |vlan| vec![0x81, 0, 0, vlan.to_le_bytes()[0]]);
                assert!(pod.sent() == [frame(mac(number), mac(99), &tag, bytes)], "{number}, {bytes} bytes");
            }
            for (tag, number) in [(TAG_10, 1), (TAG_10, 2), (TAG_20, 3)] {
                pod.arrives([0; 12], &frame(mac(99), mac(number), &tag, bytes));
                let mut heard = pod.heard();
                assert!(heard[usize::from(number) - 1] == [frame(mac(99), mac(number), &[], bytes)]);
                heard.remove(usize::from(number) - 1);
                assert!(heard.iter().all(Vec::is_empty));
            }
        }
        for number in 1..=4 {
            assert_eq!(pod.backend.lease(number).drops, [].into());
            pod.guests[number as usize - 1].transmit.reclaim_pairs();
        }
        Ok(())
    });
}

#[test]
fn nobody_hears_what_is_for_another_vlan() {
    let mut pod = pod(1, Offloads::ALL, all_features());
    // From the wire: with the tag of another VLAN, or without one.
    for (tag, to) in [(&TAG_20[..], 1), (&TAG_10[..], 3), (&[][..], 1), (&[][..], 3), (&TAG_10[..], 9)] {
        pod.arrives([0; 12], &frame(mac(99), mac(to), tag, 100));
        assert!(pod.heard().iter().all(Vec::is_empty), "{tag:?} to {to}");
    }
    // Flooded: to all of one VLAN, and as it is to who is in none.
    pod.arrives([0; 12], &frame(mac(99), BROADCAST, &TAG_10, 100));
    let (plain, whole) = (frame(mac(99), BROADCAST, &[], 100), frame(mac(99), BROADCAST, &TAG_10, 100));
    assert!(pod.heard() == [vec![plain.clone()], vec![plain.clone()], vec![], vec![whole]]);
    pod.arrives([0; 12], &plain);
    assert!(pod.heard() == [vec![], vec![], vec![], vec![plain]]);
    // Between guests of one NIC.
    let local = frame(mac(1), BROADCAST, &[], 1000);
    assert!(pod.guests[0].send(&[0; 12], &local));
    pod.settle();
    assert!(pod.heard() == [vec![], vec![local], vec![], vec![]]);
    assert!(pod.sent() == [frame(mac(1), BROADCAST, &TAG_10, 1000)]);
    for to in [3, 4] {
        assert!(pod.guests[0].send(&[0; 12], &frame(mac(1), mac(to), &[], 100)));
        pod.settle();
        assert!(pod.heard().iter().all(Vec::is_empty));
        assert!(pod.sent() == [frame(mac(1), mac(to), &TAG_10, 100)], "the wire may know where {to} is");
    }
}

#[test]
fn a_guest_in_a_vlan_cannot_send_a_tag_of_its_own() {
    let mut pod = pod(1, Offloads::ALL, all_features());
    for tag in [[0x81, 0, 0, 20], [0x81, 0, 0, 10], [0x88, 0xa8, 0, 20]] {
        assert!(pod.guests[0].send(&[0; 12], &frame(mac(1), mac(3), &tag, 100)));
    }
    pod.settle();
    assert!(pod.sent().is_empty() && pod.heard().iter().all(Vec::is_empty));
    assert_eq!(pod.backend.lease(1).drops, [("vlan-tag".to_owned(), 3)].into());
    // Who is in none may: its tags are carried.
    assert!(pod.guests[3].send(&[0; 12], &frame(mac(4), mac(99), &TAG_20, 100)));
    pod.settle();
    assert_eq!(pod.sent().len(), 1);
}

#[test]
fn large_packets_cross_a_vlan() {
    // NEEDS_CSUM, TCPV4, headers of 54 bytes, segments of 1448, checksum at 34 + 16.
    const PLAIN: [u8; 12] = [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0];
    const TAGGED: [u8; 12] = [1, 1, 58, 0, 0xa8, 5, 38, 0, 16, 0, 0, 0];
    let tcp = |tag: &[u8], from, to| {
        let mut frame = frame(from, to, tag, 54 + 3 * 1448);
        let at = 12 + tag.len();
        let total = u16::try_from(frame.len() - 14 - tag.len()).expect("short").to_be_bytes();
        frame[at..at + 2].copy_from_slice(&[8, 0]);
        frame[at + 2..at + 22].copy_from_slice(&[
            0x45, 0, total[0], total[1], 0, 5, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ]);
        frame[at + 22..at + 42]
            .copy_from_slice(&[0x30, 0x39, 0, 80, 0, 0, 0, 100, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
        frame
    };
    let mut able = pod(2, Offloads::ALL, all_features());
    assert!(able.guests[0].send(&PLAIN, &tcp(&[], mac(1), mac(99))));
    able.settle();
    let whole = std::mem::take(&mut able.wire.lock().expect("unpoisoned").unfinished);
    assert!(whole == [[&TAGGED[..], &tcp(&TAG_10, mac(1), mac(99))].concat()]);
    able.arrives(TAGGED, &tcp(&TAG_10, mac(99), mac(2)));
    let mut got = able.guests[1].received(BUFFER_BYTES);
    assert_eq!(got.len(), 1);
    let (header, got) = got.remove(0);
    assert_eq!(header[..10], PLAIN[..10]);
    assert!(got == tcp(&[], mac(99), mac(2)));

    // Cut in software for a NIC that cannot do it, and for a guest that takes none.
    let mut unable = pod(3, Offloads::NONE, all_features() & !Offloads::ALL.features());
    unable.frontend.task.retry();
    unable.arrives(TAGGED, &tcp(&TAG_10, mac(99), mac(2)));
    let got: Vec<Vec<u8>> =
        unable.guests[1].received(BUFFER_BYTES).into_iter().map(|(_, frame)| frame).collect();
    let payload: Vec<u8> = got.iter().flat_map(|frame| frame[54..].to_vec()).collect();
    assert!(payload == tcp(&[], mac(99), mac(2))[54..], "{} frames", got.len());
    let mut cutting = pod(4, Offloads::NONE, all_features());
    cutting.wire.lock().expect("unpoisoned").frames.clear();
    assert!(cutting.guests[0].send(&PLAIN, &tcp(&[], mac(1), mac(99))));
    cutting.settle();
    let frames = std::mem::take(&mut cutting.wire.lock().expect("unpoisoned").frames);
    assert_eq!(frames.len(), 3);
    assert!(frames.iter().all(|frame| frame[12..16] == TAG_10 && frame.len() == 58 + 1448));
    let payload: Vec<u8> = frames.iter().flat_map(|frame| frame[58..].to_vec()).collect();
    assert!(payload == tcp(&[], mac(1), mac(99))[54..]);
}

#[test]
fn an_instance_changes_its_vlan_while_it_runs() {
    let mut pod = pod(1, Offloads::ALL, all_features());
    pod.wire.lock().expect("unpoisoned").frames.clear();
    pod.backend.apply(registered(2, Some(20)));
    pod.settle();
    let announced = std::mem::take(&mut pod.wire.lock().expect("unpoisoned").frames);
    assert_eq!(announced.len(), 1);
    assert_eq!(announced[0][12..18], [0x81, 0, 0, 20, 0x80, 0x35]);
    pod.arrives([0; 12], &frame(mac(99), mac(2), &TAG_10, 100));
    assert!(pod.heard().iter().all(Vec::is_empty));
    pod.arrives([0; 12], &frame(mac(99), mac(2), &TAG_20, 100));
    assert!(pod.heard()[1] == [frame(mac(99), mac(2), &[], 100)]);
    pod.backend.apply(registered(2, None));
    assert!(pod.guests[1].send(&[0; 12], &frame(mac(2), mac(99), &[], 100)));
    pod.settle();
    assert!(pod.sent() == [frame(mac(2), mac(99), &[], 100)]);
}
