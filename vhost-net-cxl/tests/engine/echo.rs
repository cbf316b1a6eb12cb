//! What a guest sends comes back from an echoing NIC: complete, unaltered, in order.

use std::fs::File;

use cxl_pool::simulated::{SimulatedPool, check_seeds};
use cxl_pool::{CoherenceMode, CreateOptions, HostId, Memory, Pool};
use pod_protocol::objects::{Object, PortObject, RegistrationObject, RegistrationState};

use crate::guest::{Guest, ram_area};
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, all_features, area, channel, mac, port, registration, route,
    settle,
};

pub(crate) const BUFFER_BYTES: u32 = 2048;
pub(crate) const QUEUE_SIZE: u16 = 128;

pub(crate) struct Pair<M: Memory> {
    pub(crate) frontend: TestFrontend<M>,
    pub(crate) backend: TestBackend<M>,
    pub(crate) guest: Guest,
}

pub(crate) fn pair<M: Memory>(here: &M, there: &M, slots: u32, features: u64, transmit_mib: u64) -> Pair<M> {
    pair_of(Guest::new(QUEUE_SIZE), here, there, slots, features, transmit_mib)
}

/// The same twice: with a guest whose memory lies elsewhere, so that what it sends is copied, and one whose memory lies in the pool.
pub(crate) fn pairs<M: Memory>(
    here: &M,
    there: &M,
    slots: u32,
    features: u64,
    transmit_mib: u64,
) -> impl Iterator<Item = Pair<M>> {
    // One after the other: they have the same places in the pool.
    [false, true].into_iter().map(move |in_pool| {
        let guest = if in_pool { Guest::in_simulated_pool(here, QUEUE_SIZE) } else { Guest::new(QUEUE_SIZE) };
        pair_of(guest, here, there, slots, features, transmit_mib)
    })
}

/// The same with a guest whose memory may lie in the pool.
pub(crate) fn pair_of<M: Memory>(
    mut guest: Guest,
    here: &M,
    there: &M,
    slots: u32,
    features: u64,
    transmit_mib: u64,
) -> Pair<M> {
    let transmit_area = area(8, transmit_mib);
    let ram_area = guest.pool_file.map(|_| ram_area());
    let mut frontend = TestFrontend::new(here).with_pool_file(guest.pool_file);
    let mut backend = TestBackend::new(there, "mode = 'echo'", area(32, 16));
    backend.apply(Object::Channel(channel(1, 1, slots, false)));
    let registration = registration(1, 1, 1, RegistrationState::Active, transmit_area);
    backend.apply(Object::Registration(RegistrationObject { ram_area, ..registration }));
    frontend.apply(Object::Channel(channel(1, 1, slots, true)));
    frontend.apply(Object::Port(PortObject { ram_area, ..port(1, transmit_area, route(1, 1), None) }));
    guest.post(QUEUE_SIZE, BUFFER_BYTES);
    frontend.start(1, &guest, features);
    settle(&mut [&mut frontend, &mut backend]);
    Pair { frontend, backend, guest }
}

/// Frame `number`: from us to an address outside, filled with bytes that only it has.
pub(crate) fn frame(number: u32, bytes: usize) -> Vec<u8> {
    let mut frame = vec![0; bytes];
    frame[..6].copy_from_slice(&mac(200).bytes());
    frame[6..12].copy_from_slice(&mac(1).bytes());
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame[14..18].copy_from_slice(&number.to_le_bytes());
    for (place, byte) in frame[18..].iter_mut().enumerate() {
        *byte = place.to_le_bytes()[0].wrapping_mul(31).wrapping_add(number.to_le_bytes()[0]);
    }
    frame
}

pub(crate) fn returned(frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame[..12].rotate_left(6);
    frame
}

fn length(number: u32, longest: usize) -> usize {
    60 + (number as usize).wrapping_mul(2_654_435_761) % (longest - 60)
}

/// Sends `count` frames through the pair and checks all of it.
pub(crate) fn echo<M: Memory>(pair: &mut Pair<M>, count: u32, longest: usize) {
    let Pair { frontend, backend, guest } = pair;
    let (mut sent, mut arrived, mut freed) = (0, 0, 0);
    for _ in 0..200_000 {
        if sent < count && guest.send(&[0; 12], &frame(sent, length(sent, longest))) {
            sent += 1;
        }
        crate::pod::Turn::turn_once(frontend);
        crate::pod::Turn::turn_once(backend);
        for (header, got) in guest.received(BUFFER_BYTES) {
            assert_eq!(header[..10], [0; 10], "no offload was used");
            assert_eq!(got, returned(&frame(arrived, length(arrived, longest))), "frame {arrived}");
            arrived += 1;
        }
        freed += guest.transmit.reclaim_pairs().len();
        if arrived == count && freed == count as usize {
            break;
        }
    }
    assert_eq!((sent, arrived, freed), (count, count, count as usize));
    settle(&mut [frontend, backend]);
    assert_eq!(frontend.lease(1).drops, [].into());
    assert_eq!(backend.lease(1).drops, [].into());
}

pub(crate) fn mapped_pool(directory: &tempfile::TempDir, mode: CoherenceMode) -> Pool {
    let options = CreateOptions { size_bytes: Some(POOL_BYTES), mode, ..CreateOptions::default() };
    Pool::create(&directory.path().join("pool"), &options).expect("a pool")
}

#[test]
fn frames_cross_non_coherent_memory_unaltered() {
    check_seeds("-p vhost-net-cxl --test engine", 12, |seed| {
        let pool = SimulatedPool::new(seed, POOL_BYTES);
        let (here, there) = (pool.host(HostId::new(1)), pool.host(HostId::new(2)));
        for in_pool in [false, true] {
            let guest =
                if in_pool { Guest::in_simulated_pool(&here, QUEUE_SIZE) } else { Guest::new(QUEUE_SIZE) };
            let mut pair = pair_of(guest, &here, &there, 512, all_features(), 8);
            echo(&mut pair, 300, 1514);
            assert_eq!(pool.faults(), cxl_pool::simulated::Faults::default(), "seed {seed}");
        }
        Ok(())
    });
}

#[test]
fn frames_cross_a_pool_file_in_either_mode() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    for mode in [CoherenceMode::Software, CoherenceMode::Hardware] {
        let options = CreateOptions { force: true, ..CreateOptions::default() };
        let options = CreateOptions { size_bytes: Some(POOL_BYTES), mode, ..options };
        let path = directory.path().join("pool");
        let pool = Pool::create(&path, &options).expect("a pool");
        let file = File::options().read(true).write(true).open(&path).expect("the pool's file");
        for guest in [Guest::new(QUEUE_SIZE), Guest::in_pool_file(&file, QUEUE_SIZE)] {
            match mode {
                CoherenceMode::Software => {
                    let memory = pool.software();
                    echo(&mut pair_of(guest, &memory, &memory, 8192, all_features(), 8), 20_000, 1514);
                }
                CoherenceMode::Hardware => {
                    let memory = pool.hardware();
                    echo(&mut pair_of(guest, &memory, &memory, 8192, all_features(), 8), 20_000, 1514);
                }
            }
        }
    }
}

#[test]
fn full_rings_and_a_small_area_push_back_and_lose_nothing() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let memory = mapped_pool(&directory, CoherenceMode::Hardware).hardware();
    // Ten packets may be under way, and the area holds few.
    for mut pair in pairs(&memory, &memory, 64, all_features(), 1) {
        echo(&mut pair, 5000, 1514);
    }
}

#[test]
fn large_frames_spread_over_merged_buffers() {
    let pool = SimulatedPool::new(7, POOL_BYTES);
    let (here, there) = (pool.host(HostId::new(1)), pool.host(HostId::new(2)));
    for guest in [Guest::new(QUEUE_SIZE), Guest::in_simulated_pool(&here, QUEUE_SIZE)] {
        echo_large(&mut pair_of(guest, &here, &there, 512, all_features(), 8));
        assert_eq!(pool.faults(), cxl_pool::simulated::Faults::default());
    }
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let memory = mapped_pool(&directory, CoherenceMode::Software).software();
    echo_large(&mut pair(&memory, &memory, 512, all_features(), 8));
}

/// A frame that is still to be segmented, in one piece of the guest's memory and in two.
fn echo_large<M: Memory>(pair: &mut Pair<M>) {
    for number in [3, 4] {
        let frame = frame(number, 60_000);
        // NEEDS_CSUM, TCPV4, headers of 54 bytes, segments of 1448, checksum at 34 + 16.
        let header = [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0];
        assert!(pair.guest.send(&header, &frame));
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        let got = pair.guest.received(BUFFER_BYTES);
        assert_eq!(got.len(), 1);
        assert_eq!(got[0].0[..10], header[..10]);
        assert_eq!(got[0].0[10], 30, "as many buffers as 60012 bytes fill");
        assert_eq!(got[0].1, returned(&frame));
    }
}

#[test]
fn long_frames_are_taken_a_few_at_a_time_and_all_leave() {
    let pool = SimulatedPool::new(8, POOL_BYTES);
    let (here, there) = (pool.host(HostId::new(1)), pool.host(HostId::new(2)));
    let mut pair = pair(&here, &there, 512, all_features(), 8);
    let header = [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0];
    for number in 0..12 {
        assert!(pair.guest.send(&header, &frame(number, 60_000)));
    }
    let before = pair.frontend.lease(1).tx_packets;
    crate::pod::Turn::turn_once(&mut pair.frontend);
    let taken = pair.frontend.lease(1).tx_packets - before;
    assert!((1..12).contains(&taken), "{taken} in a turn");
    settle(&mut [&mut pair.frontend, &mut pair.backend]);
    assert_eq!(pair.frontend.lease(1).tx_packets - before, 12);
    assert_eq!(pair.backend.lease(1).tx_packets, 12);
    assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 12);
}

#[test]
fn without_posted_buffers_frames_are_dropped_at_once_and_counted() {
    let pool = SimulatedPool::new(9, POOL_BYTES);
    let (here, there) = (pool.host(HostId::new(1)), pool.host(HostId::new(2)));
    for mut pair in pairs(&here, &there, 512, all_features(), 8) {
        // Twice as many as there are buffers, without ever looking at what arrived.
        let mut freed = 0;
        for number in 0..u32::from(QUEUE_SIZE) * 2 {
            assert!(pair.guest.send(&[0; 12], &frame(number, 100)));
            settle(&mut [&mut pair.frontend, &mut pair.backend]);
            freed += pair.guest.transmit.reclaim_pairs().len();
        }
        assert_eq!(freed, usize::from(QUEUE_SIZE) * 2);
        let telemetry = pair.frontend.lease(1);
        assert_eq!(telemetry.rx_packets, u64::from(QUEUE_SIZE));
        assert_eq!(telemetry.drops, [("no-guest-buffers".to_owned(), u64::from(QUEUE_SIZE))].into());
        // Once there are buffers again, frames arrive again: none was lost on the way back.
        assert_eq!(pair.guest.received(BUFFER_BYTES).len(), usize::from(QUEUE_SIZE));
        assert!(pair.guest.send(&[0; 12], &frame(9, 100)));
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        assert_eq!(pair.guest.received(BUFFER_BYTES).len(), 1);
    }
}

#[test]
fn a_frame_too_long_for_a_driver_that_does_not_merge_is_dropped() {
    let pool = SimulatedPool::new(11, POOL_BYTES);
    let (here, there) = (pool.host(HostId::new(1)), pool.host(HostId::new(2)));
    let plain = 1 << virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
    for mut pair in pairs(&here, &there, 512, plain, 8) {
        echo(&mut pair, 50, 1514);
        // An offload that the driver did not negotiate is refused on the way out.
        assert!(pair.guest.send(&[1, 0, 0, 0, 0, 0, 34, 0, 16, 0, 0, 0], &frame(1, 100)));
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        assert_eq!(pair.frontend.lease(1).drops, [("bad-header".to_owned(), 1)].into());
        assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 1);
        assert!(pair.guest.received(BUFFER_BYTES).is_empty());
    }
}
