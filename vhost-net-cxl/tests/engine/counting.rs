//! What is counted of channels, and of frames that nobody gets.

use cxl_pool::HostId;
use cxl_pool::simulated::SimulatedPool;
use pod_protocol::telemetry::ChannelTelemetry;
use vhost_net_cxl::channel_counters::ChannelBook;
use vhost_net_cxl::message::{NetMessage, Opcode};
use vhost_net_cxl::offloads::Offloads;

use pod_protocol::objects::{Object, RegistrationState};

use crate::echo::{QUEUE_SIZE, frame, pairs};
use crate::guest::Guest;
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, Turn, all_features, area, channel, lease, mac, open, registration,
    route, serve, settle,
};
use crate::recording::{RecordingNic, recording_backend};

fn only(book: &ChannelBook) -> ChannelTelemetry {
    let [channel] = book.telemetry().try_into().expect("one channel");
    channel
}

#[test]
fn both_ends_of_a_channel_count_the_same_messages_and_how_full_it_is() {
    let pool = SimulatedPool::new(5, POOL_BYTES);
    for mut pair in pairs(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)), 128, all_features(), 8) {
        let before = only(&pair.frontend.channels);
        assert_eq!((before.depth, before.stalls), (0, 0));
        for number in 0..60 {
            assert!(pair.guest.send(&[0; 12], &frame(number, 100)));
        }
        pair.frontend.turn_once();
        pair.frontend.turn_once();
        let full = only(&pair.frontend.channels);
        assert_eq!(full.depth, full.depth_max, "as many are under way as may be");
        assert_eq!(full.sent - before.sent, full.depth);
        assert!(full.depth_max < 60 && full.stalls == 1, "{full:?}");
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 60);
        let (here, there) = (only(&pair.frontend.channels), only(&pair.backend.channels));
        assert_eq!((here.depth, there.depth), (0, 0));
        assert_eq!((here.sent, here.received), (there.received, there.sent));
        assert!(here.sent - before.sent > 60, "packets, and runs that were taken: {here:?}");
        assert_eq!((here.unreadable, here.strays, here.lost), (0, 0, 0));
        assert_eq!((there.unreadable, there.strays, there.lost), (0, 0, 0));
    }
}

#[test]
fn counts_go_on_when_rings_begin_anew() {
    let pool = SimulatedPool::new(6, POOL_BYTES);
    for mut pair in pairs(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)), 128, all_features(), 8) {
        assert!(pair.guest.send(&[0; 12], &frame(1, 100)));
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        let before = only(&pair.frontend.channels);
        pair.backend.apply(Object::Channel(channel(1, 2, 128, false)));
        pair.frontend.apply(Object::Channel(channel(1, 2, 128, true)));
        assert!(pair.guest.send(&[0; 12], &frame(2, 100)));
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        let after = only(&pair.frontend.channels);
        assert!(after.sent > before.sent && after.received > before.received, "{before:?} {after:?}");
        assert_eq!(after.depth, 0);
    }
}

#[test]
fn messages_that_come_to_nothing_are_counted() {
    let pool = SimulatedPool::new(7, POOL_BYTES);
    let (here, there) = (pool.host(HostId::new(1)), pool.host(HostId::new(2)));
    let mut backend = TestBackend::new(&there, "", area(32, 1));
    backend.apply(Object::Channel(channel(1, 1, 512, false)));
    let mut end = open(&here, &ChannelBook::default())(&channel(1, 1, 512, true)).expect("a channel");
    while !end.ready() {
        backend.turn_once();
    }
    let packet = NetMessage {
        opcode: Opcode::Transmit,
        lease: lease(9),
        generation: route(1, 1).generation,
        sequence: 0,
        line: area(8, 1).start,
        bytes: 100,
        more: false,
    };
    assert!(end.request(&packet), "of a lease that nobody has heard of");
    assert_eq!(end.request_all(&[[u64::MAX >> 1; 2]; 3]), 3, "of no kind that there is");
    end.publish();
    settle(&mut [&mut backend]);
    let counted = only(&backend.channels);
    assert_eq!((counted.strays, counted.unreadable, counted.received), (1, 3, 4), "{counted:?}");
}

#[test]
fn frames_for_nobody_are_counted_by_reason() {
    let pool = SimulatedPool::new(8, POOL_BYTES);
    let memory = pool.host(HostId::new(2));
    let (mut backend, wire) = recording_backend(&memory, Offloads::ALL, usize::MAX, area(32, 16));
    backend.apply(Object::Channel(channel(1, 1, 512, false)));
    let registration = registration(1, 1, 1, RegistrationState::Active, area(8, 1));
    backend.apply(Object::Registration(registration));
    let mut for_other = frame(1, 100);
    for_other[..6].copy_from_slice(&mac(77).bytes());
    let arriving = [[vec![0; 12], for_other].concat(), vec![0; 20], vec![0; 12]];
    wire.lock().expect("unpoisoned").arriving.extend(arriving);
    settle(&mut [&mut backend]);
    let expected = [("no-receiver".to_owned(), 1), ("too-short".to_owned(), 2)].into();
    assert_eq!(backend.counters.dropped(), expected);
    assert_eq!(backend.counters.rx_packets.get(), 3);
}

#[test]
fn what_goes_wrong_for_a_device_is_counted_also_after_it_was_opened_again() {
    let pool = SimulatedPool::new(9, POOL_BYTES);
    let memory = pool.host(HostId::new(2));
    let (mut backend, wire) = recording_backend(&memory, Offloads::ALL, usize::MAX, area(32, 16));
    for errors in [3, 3, 5] {
        wire.lock().expect("unpoisoned").errors = errors;
        settle(&mut [&mut backend]);
        assert_eq!(backend.counters.errors.get(), errors);
    }
    wire.lock().expect("unpoisoned").broken = true;
    settle(&mut [&mut backend]);
    assert_eq!(backend.counters.errors.get(), 6, "and what it failed by");
    let (nic, wire) = RecordingNic::new(&memory, Offloads::ALL, usize::MAX);
    wire.lock().expect("unpoisoned").errors = 1;
    backend.task.reopened(Box::new(nic), None);
    settle(&mut [&mut backend]);
    wire.lock().expect("unpoisoned").errors = 2;
    settle(&mut [&mut backend]);
    assert_eq!(backend.counters.errors.get(), 8);
}

#[test]
fn a_packet_with_which_a_nic_finds_fault_is_its_instances_drop() {
    for waits in [false, true] {
        let pool = SimulatedPool::new(10, POOL_BYTES);
        let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
        let memory = pool.host(HostId::new(2));
        let (mut backend, wire) = recording_backend(&memory, Offloads::ALL, usize::MAX, area(32, 16));
        let mut guest = Guest::new(QUEUE_SIZE);
        serve(&mut frontend, &mut backend);
        frontend.start(1, &guest, all_features());
        settle(&mut [&mut frontend, &mut backend]);
        let before = backend.counters.tx_packets.get();
        wire.lock().expect("unpoisoned").frames.clear();
        wire.lock().expect("unpoisoned").faulty = vec![3, 4, 9];
        if waits {
            wire.lock().expect("unpoisoned").room = 0;
        }
        for number in 0..10 {
            assert!(guest.send(&[0; 12], &frame(number, 100)));
        }
        settle(&mut [&mut frontend, &mut backend]);
        wire.lock().expect("unpoisoned").room = usize::MAX;
        settle(&mut [&mut frontend, &mut backend]);
        assert_eq!(guest.transmit.reclaim_pairs().len(), 10);
        let telemetry = backend.lease(1);
        assert_eq!(telemetry.drops, [("nic-refused".to_owned(), 3)].into());
        assert_eq!((telemetry.tx_packets, telemetry.tx_bytes), (7, 700));
        assert_eq!(backend.counters.tx_packets.get() - before, 7);
        assert_eq!(backend.counters.errors.get(), 0, "the NIC is not to blame");
        let frames = std::mem::take(&mut wire.lock().expect("unpoisoned").frames);
        let numbers = frames.iter().map(|it| u32::from_le_bytes(it[14..18].try_into().expect("four")));
        assert_eq!(numbers.collect::<Vec<_>>(), [0, 1, 2, 5, 6, 7, 8]);
    }
}
