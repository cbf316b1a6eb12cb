//! The virtio-net header as drivers of different features see it.

use cxl_pool::HostId;
use cxl_pool::simulated::SimulatedPool;
use vhost_net_cxl::offloads::Offloads;

use crate::echo::{BUFFER_BYTES, frame, pairs, returned};
use crate::guest::Guest;
use crate::pod::{POOL_BYTES, TestFrontend, all_features, area, serve, settle};
use crate::recording::recording_backend;

#[test]
fn a_driver_of_before_the_standard_that_merges_nothing_has_a_header_of_ten_bytes() {
    let pool = SimulatedPool::new(13, POOL_BYTES);
    for mut pair in pairs(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)), 512, 0, 8) {
        for (number, bytes) in [(1, 100), (2, 1514), (3, 60)] {
            // In one descriptor and in two, by turns.
            assert!(pair.guest.send(&[0; 10], &frame(number, bytes)));
            settle(&mut [&mut pair.frontend, &mut pair.backend]);
            assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 1);
            let used = pair.guest.receive.used();
            let [(head, length)] = used[..] else { panic!("{used:?}") };
            let packet = pair.guest.receive.content(head, BUFFER_BYTES, length);
            assert_eq!(packet[..10], [0; 10]);
            assert_eq!(packet[10..], returned(&frame(number, bytes)));
        }
        assert_eq!((pair.frontend.lease(1).drops, pair.backend.lease(1).drops), ([].into(), [].into()));
    }
}

#[test]
fn that_a_checksum_was_found_valid_is_told_to_who_may_be_told() {
    const VALID: u8 = 2;
    let checksum = Offloads::CHECKSUM.features();
    for (features, flags) in [(all_features(), VALID), (all_features() & !Offloads::ALL.features(), 0)] {
        let pool = SimulatedPool::new(14, POOL_BYTES);
        let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
        let there = pool.host(HostId::new(2));
        let (mut backend, wire) = recording_backend(&there, Offloads::ALL, usize::MAX, area(32, 16));
        serve(&mut frontend, &mut backend);
        let mut guest = Guest::new(64);
        guest.post(64, BUFFER_BYTES);
        frontend.start(1, &guest, features);
        settle(&mut [&mut frontend, &mut backend]);
        let mut header = [0; 12];
        // And what nobody has agreed on.
        header[0] = VALID | 0x80;
        let arrives = returned(&frame(1, 100));
        wire.lock().expect("unpoisoned").arriving.push_back([&header[..], &arrives].concat());
        settle(&mut [&mut frontend, &mut backend]);
        let mut expected = [0; 12];
        (expected[0], expected[10]) = (flags, 1);
        assert_eq!(guest.received(BUFFER_BYTES), [(expected.to_vec(), arrives)]);
        assert_eq!(features & checksum != 0, flags == VALID);
    }
}
