//! Guests and frontends that do what they must not.

use cxl_pool::simulated::SimulatedPool;
use cxl_pool::{HostId, LineOffset, Memory};
use pod_protocol::ids::LeaseGeneration;
use pod_protocol::objects::{Object, RegistrationObject, RegistrationState};
use vhost_net_cxl::channel_counters::ChannelBook;
use vhost_net_cxl::channel_end::{ChannelEnd, MESSAGES_PER_LOOK};
use vhost_net_cxl::message::{NetMessage, Opcode, Run, Status};
use vhost_net_cxl::offloads::Offloads;
use vm_memory::{Bytes, GuestAddress};

use crate::echo::{BUFFER_BYTES, frame, pairs, returned};
use crate::guest::{Guest, INDIRECT, NEXT, WRITE};
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, Turn, all_features, area, channel, lease, open, registration,
    serve, settle,
};
use crate::recording::recording_backend;

#[test]
fn malformed_chains_cost_a_guest_that_packet_and_come_back_in_order() {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    for mut pair in pairs(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)), 512, all_features(), 8) {
        let queue = &mut pair.guest.transmit;
        let at = queue.buffer(0, 4096);
        queue.offer(&[(0, at, 4, 0)]); // shorter than a header
        queue.offer(&[(2, at, 12, 0)]); // no frame
        queue.offer(&[(4, 1 << 40, 100, 0)]); // outside of memory
        queue.offer(&[(6, at, 100, WRITE)]); // the wrong direction
        queue.offer(&[(8, at, 30_000, NEXT), (10, at, 30_000, NEXT), (12, at, 30_000, 0)]); // too long
        queue.offer(&[(14, at, 50, NEXT), (16, at, 50, NEXT)]);
        queue.lead(16, 14); // a circle
        assert!(pair.guest.send(&[0; 12], &frame(1, 100)));
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        let heads: Vec<u16> = pair.guest.transmit.used().into_iter().map(|(head, _)| head).collect();
        assert_eq!(heads[..6], [0, 2, 4, 6, 8, 14]);
        assert_eq!(heads.len(), 7);
        assert_eq!(pair.guest.received(BUFFER_BYTES).len(), 1, "the good one arrived");
        assert_eq!(pair.frontend.lease(1).drops, [("bad-chain".to_owned(), 6)].into());
    }
}

#[test]
fn receive_buffers_come_back_in_order_and_so_do_bad_ones() {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
    let there = pool.host(HostId::new(2));
    let (mut backend, wire) = recording_backend(&there, Offloads::NONE, usize::MAX, area(32, 16));
    serve(&mut frontend, &mut backend);
    let mut guest = Guest::new(64);
    // The second is too short for a header, the fourth cannot be written.
    for (slot, bytes, flags) in
        [(0, 2048, WRITE), (1, 4, WRITE), (2, 2048, WRITE), (3, 2048, 0), (4, 2048, WRITE)]
    {
        let at = guest.receive.buffer(slot, bytes);
        guest.receive.offer(&[(slot, at, bytes, flags)]);
    }
    frontend.start(1, &guest, all_features());
    settle(&mut [&mut frontend, &mut backend]);
    for number in 0..5 {
        let packet = [vec![0; 12], returned(&frame(number, 100))].concat();
        wire.lock().expect("unpoisoned").arriving.push_back(packet);
    }
    settle(&mut [&mut frontend, &mut backend]);
    // A successor would begin at the used index: what lies before it must be what was used.
    assert_eq!(guest.receive.used(), [(0, 112), (1, 0), (2, 112), (3, 0), (4, 112)]);
    assert_eq!(frontend.lease(1).drops, [("bad-chain".to_owned(), 2)].into());
}

#[test]
fn a_guest_that_posts_empty_descriptors_has_few_of_them_looked_at() {
    const DESCRIPTORS: u64 = 256;
    let pool = SimulatedPool::new(2, POOL_BYTES);
    let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
    let there = pool.host(HostId::new(2));
    let (mut backend, wire) = recording_backend(&there, Offloads::NONE, usize::MAX, area(32, 16));
    serve(&mut frontend, &mut backend);
    let mut guest = Guest::new(64);
    // As many chains as a packet may take, of a header's length each: too little for a frame of 1500 bytes.
    for slot in 0..64 {
        let table = guest.receive.buffer(slot, 8192);
        for number in 0..DESCRIPTORS {
            let (bytes, flags) = if number + 1 < DESCRIPTORS { (0_u32, WRITE | NEXT) } else { (12, WRITE) };
            let next = u16::try_from(number + 1).expect("small");
            let descriptor = [
                &(table + 4096).to_le_bytes()[..],
                &bytes.to_le_bytes(),
                &flags.to_le_bytes(),
                &next.to_le_bytes(),
            ];
            let at = GuestAddress(table + 16 * number);
            guest.memory.write_slice(&descriptor.concat(), at).expect("in memory");
        }
        guest.receive.offer(&[(slot, table, 16 * 256, INDIRECT)]);
    }
    frontend.start(1, &guest, all_features());
    settle(&mut [&mut frontend, &mut backend]);
    let arrive = |bytes| {
        let packet = [vec![0; 12], returned(&frame(1, bytes))].concat();
        wire.lock().expect("unpoisoned").arriving.push_back(packet);
    };
    (0..50).for_each(|_| arrive(1500));
    // This one would fit. After so much in vain nobody looks.
    arrive(100);
    for _ in 0..10 {
        backend.turn_once();
    }
    settle(&mut [&mut frontend, &mut backend]);
    assert_eq!(frontend.lease(1).drops, [("no-guest-buffers".to_owned(), 51)].into());
    // The next look begins anew.
    arrive(100);
    settle(&mut [&mut frontend, &mut backend]);
    assert_eq!((frontend.lease(1).rx_packets, guest.receive.used().len()), (1, 10));
}

#[test]
fn contradictory_headers_are_dropped() {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    for mut pair in pairs(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)), 512, all_features(), 8) {
        for header in [
            [1, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0], // a checksum outside
            [1, 1, 54, 0, 0, 0, 34, 0, 16, 0, 0, 0],          // segments of no size
            [0, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0],       // segments without a checksum
            [0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0],             // fragmented UDP, never offered
        ] {
            assert!(pair.guest.send(&header, &frame(1, 100)));
        }
        let tiny_segments = [1, 1, 54, 0, 1, 0, 34, 0, 16, 0, 0, 0];
        assert!(pair.guest.send(&tiny_segments, &frame(1, 60_000)), "more segments than anybody needs");
        assert!(pair.guest.send(&[0; 12], &frame(2, 9000)), "longer than the MTU");
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 6);
        assert_eq!(pair.frontend.lease(1).drops, [("bad-header".to_owned(), 6)].into());
        assert!(pair.guest.received(BUFFER_BYTES).is_empty());
    }
}

#[test]
fn a_broken_queue_stays_silent() {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    for mut pair in pairs(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)), 512, all_features(), 8) {
        let at = pair.guest.transmit.buffer(0, 100);
        pair.guest.transmit.offer(&[(9999 % 128, at, 100, 0)]);
        // More available than the queue is long.
        for _ in 0..300 {
            pair.guest.transmit.offer(&[(0, at, 100, 0)]);
        }
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        let taken = pair.frontend.lease(1).tx_packets;
        pair.guest.transmit.reclaim_pairs();
        assert!(pair.guest.send(&[0; 12], &frame(1, 100)));
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        assert!(pair.guest.transmit.reclaim_pairs().is_empty());
        assert_eq!(pair.frontend.lease(1).tx_packets, taken);
    }
}

#[test]
fn nobody_holds_more_receive_buffers_than_its_quota() {
    let pool = SimulatedPool::new(4, POOL_BYTES);
    let (mut end, mut backend) = with_bare_end(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)));
    let registration = registration(1, 1, 5, RegistrationState::Active, area(8, 1));
    backend.apply(Object::Registration(RegistrationObject { rx_quota_buffers: 16, ..registration }));
    while !end.ready() {
        backend.turn_once();
    }
    let mut held = Vec::new();
    for _ in 0..20 {
        backend.turn_once();
        held.extend(heard(&mut end));
    }
    assert_eq!(held.len(), 16);
    let drops = backend.lease(1).drops;
    assert!(drops.keys().all(|reason| reason == "receive-quota" || reason == "channel-full"), "{drops:?}");
    // What it gives back, it may get again.
    let done = NetMessage { opcode: Opcode::ReceiveDone, ..held[0] };
    end.complete(done, Status::Sent);
    end.publish();
    let mut again = 0;
    for _ in 0..20 {
        backend.turn_once();
        again += heard(&mut end).len();
    }
    assert_eq!(again, 1);
}

/// What has arrived.
fn heard<M: Memory>(end: &mut ChannelEnd<M>) -> Vec<NetMessage> {
    let mut inbox = [[0; 2]; MESSAGES_PER_LOOK];
    let count = end.receive(&mut inbox);
    inbox[..count].iter().map(|words| NetMessage::decode(*words).expect("a message")).collect()
}

/// A backend and a frontend of our own making.
fn with_bare_end<M: Memory>(here: &M, there: &M) -> (ChannelEnd<M>, TestBackend<M>) {
    let mut backend =
        TestBackend::new(there, "mode = 'source'\ndestination = '02:00:00:00:00:01'", area(32, 1));
    backend.apply(Object::Channel(channel(1, 1, 512, false)));
    backend.apply(Object::Registration(registration(1, 1, 5, RegistrationState::Active, area(8, 1))));
    let end = open(here, &ChannelBook::default())(&channel(1, 1, 512, true)).expect("a channel");
    (end, backend)
}

#[test]
fn a_backend_refuses_what_is_not_the_instances_own() {
    let pool = SimulatedPool::new(2, POOL_BYTES);
    let (mut end, mut backend) = with_bare_end(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)));
    while !end.ready() {
        backend.turn_once();
    }
    let own = NetMessage {
        opcode: Opcode::Transmit,
        lease: lease(1),
        generation: LeaseGeneration::new(5),
        sequence: 0,
        line: area(8, 1).start,
        bytes: 100,
        more: false,
    };
    let past_its_end = LineOffset::new(area(9, 1).start.get() - 1);
    let cases = [
        (NetMessage { line: area(9, 1).start, ..own }, Status::Dropped),
        (NetMessage { line: past_its_end, ..own }, Status::Dropped),
        (NetMessage { line: LineOffset::new((1 << 42) - 1), ..own }, Status::Dropped),
        (NetMessage { bytes: 0, ..own }, Status::Dropped),
        (NetMessage { bytes: 0xf_ffff, ..own }, Status::Dropped),
        (NetMessage { generation: LeaseGeneration::new(4), ..own }, Status::Stale),
        (NetMessage { generation: LeaseGeneration::new(6), ..own }, Status::NotYet),
        (NetMessage { lease: lease(77), ..own }, Status::NotYet),
    ];
    for (sequence, (message, _)) in (0..).zip(&cases) {
        assert!(end.request(&NetMessage { sequence, ..*message }));
    }
    end.publish();
    let mut answers = Vec::new();
    for _ in 0..100 {
        backend.turn_once();
        for message in heard(&mut end).into_iter().filter(|it| it.opcode == Opcode::TransmitDone) {
            let run = Run::from_code(message.bytes);
            answers.extend((0..run.packets).map(|after| (message.sequence + after, run.status)));
        }
    }
    let expected: Vec<(u16, Status)> = (0..).zip(cases.iter().map(|case| case.1)).collect();
    assert_eq!(answers, expected);
    assert_eq!(backend.lease(1).drops.get("outside-area"), Some(&5));
}
