//! As many queues as there may be, and segments from one byte to megabytes.

use std::collections::BTreeSet;
use std::sync::Arc;

use cxl_pool::{Area, CreateOptions, LineCount, LineOffset, Pool};
use pod_protocol::endpoint::Handler;
use pod_protocol::objects::{
    DiskObject, ElementObject, FabricObject, MchannelObject, Object, Signal, TenantObject,
};
use vhost_frontend::mock::Piece;

use crate::pod::ram::{Control, RamSsd, idle_pod};
use crate::pod::*;

const POOL_BYTES: u64 = 32 << 20;
const QUEUES: u16 = 16;
/// What a guest that keeps to the limits in the configuration space sends at most.
const REQUEST_BYTES_MAX: u32 = 126 * (32 << 10);

#[test]
fn sixteen_queues_get_their_own_answers() {
    const EACH: u64 = PLACES / QUEUES as u64;
    let (mut pod, ssd, control) = idle_pod(31);
    pod.disk.queues = QUEUES;
    pod.start(ssd);
    control.finish_backwards();
    let mut driver = Driver::connected(&pod);
    let config = driver.guest.config(60);
    assert_eq!(u16::from_le_bytes([config[34], config[35]]), QUEUES);
    for round in 0..3 {
        for kind in [T_OUT, T_IN] {
            let mut heads = vec![BTreeSet::new(); QUEUES.into()];
            for place in 0..PLACES {
                let data = driver.place(place).data;
                let content =
                    if kind == T_OUT { pattern(round << 8 | place, 2048) } else { vec![0x55; 2048] };
                driver.write(data, &content);
                let queue = (place / EACH) as usize;
                assert!(heads[queue].insert(driver.offer(queue, place, kind, place * 4, 2048)));
            }
            for (queue, heads) in heads.iter_mut().enumerate() {
                for _ in 0..EACH {
                    let used = driver.guest.wait_used(queue, PATIENCE).expect("an answer");
                    assert!(heads.remove(&used.head), "it is of another queue");
                }
            }
            for place in 0..PLACES {
                assert_eq!(driver.status(place), OK);
                assert_eq!(driver.read(driver.place(place).data, 2048), pattern(round << 8 | place, 2048));
            }
        }
    }
}

#[test]
fn segments_have_any_length_from_one_byte_to_the_whole_request() {
    // Over a real pool: simulating megabytes takes minutes.
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = CreateOptions { size_bytes: Some(POOL_BYTES), ..CreateOptions::default() };
    let pool = Pool::create(&directory.path().join("pool"), &options).unwrap();
    let mut pod = crate::pod::Pod::new(pool.software(), pool.software(), pool.layout().data().start);
    let control = Control::new();
    pod.start(Box::new(RamSsd { memory: pod.backend_memory.clone(), control: Arc::clone(&control) }));
    let mut driver = Driver::connected(&pod);
    let piece = |address, bytes, writable| Piece { address, bytes, writable };
    let place = driver.place(0);
    // Lengths of the data's segments: the last one is as long as the rest.
    let one_by_one: Vec<u32> = vec![1; 120];
    let odd: Vec<u32> = (0..110).map(|index| 1 + index * 337).collect();
    for (segments, bytes) in [
        (&[][..], REQUEST_BYTES_MAX),
        (&[1], REQUEST_BYTES_MAX),
        (&[3 << 20, 513], REQUEST_BYTES_MAX),
        (&one_by_one[..], 512),
        (&one_by_one[..], REQUEST_BYTES_MAX),
        (&odd[..], REQUEST_BYTES_MAX),
    ] {
        let data = pattern(u64::from(bytes) + segments.len() as u64, bytes as usize);
        for kind in [T_OUT, T_IN] {
            let writable = kind == T_IN;
            let mut pieces = vec![piece(place.header, 16, false)];
            let mut at = place.data;
            let rest = bytes - segments.iter().sum::<u32>();
            for &length in segments.iter().chain(&[rest]) {
                pieces.push(piece(at, length, writable));
                at += u64::from(length);
            }
            pieces.push(piece(place.status, 1, true));
            driver.write_header(place, kind, 3);
            driver.write(place.data, &if writable { vec![0x55; bytes as usize] } else { data.clone() });
            let head = driver.guest.offer(0, &pieces, None);
            let written = if writable { bytes + 1 } else { 1 };
            assert_eq!(driver.answer(0, 0, head), (OK, written), "{} segments", segments.len() + 1);
            assert!(driver.read(place.data, bytes as usize) == data, "{} segments", segments.len() + 1);
        }
        assert!(control.bytes(VOLUME_START + 3 * SECTOR, bytes as usize) == data);
    }
    // Firmware does not keep to what was offered.
    let longer = [REQUEST_BYTES_MAX + 512, REQUEST_BYTES_MAX * 2 - 512, VOLUME_BYTES as u32];
    for (round, bytes) in longer.into_iter().enumerate() {
        let sector = (VOLUME_BYTES - u64::from(bytes)) / SECTOR;
        let data = pattern(round as u64, bytes as usize);
        for kind in [T_OUT, T_IN] {
            let writable = kind == T_IN;
            driver.write_header(place, kind, sector);
            driver.write(place.data, &if writable { vec![0x55; bytes as usize] } else { data.clone() });
            let head = driver.guest.offer(0, &Driver::pieces(place, kind, bytes), None);
            let written = if writable { bytes + 1 } else { 1 };
            assert_eq!(driver.answer(0, 0, head), (OK, written), "{bytes} bytes");
            assert!(driver.read(place.data, bytes as usize) == data, "{bytes} bytes");
        }
        assert!(control.bytes(VOLUME_START + sector * SECTOR, bytes as usize) == data);
        // Beyond the end nothing is done at all.
        driver.write_header(place, T_OUT, sector + 1);
        let head = driver.guest.offer(0, &Driver::pieces(place, T_OUT, bytes), None);
        assert_eq!(driver.answer(0, 0, head), (IOERR, 1));
        assert!(control.bytes(VOLUME_START + sector * SECTOR, bytes as usize) == data);
    }
    // One that fails on its way is an error, and the queue goes on.
    control.fail(true);
    driver.write_header(place, T_IN, 0);
    let head = driver.guest.offer(0, &Driver::pieces(place, T_IN, VOLUME_BYTES as u32), None);
    assert_eq!(driver.answer(0, 0, head).0, IOERR);
    control.fail(false);
    assert_eq!(driver.read_sectors(3, 512).len(), 512);
}

/// The bound of §4.5 holds for what a disk moves in any K, whatever its guest asks for at once.
#[test]
fn a_disk_with_a_share_of_the_fabric_moves_long_requests_a_window_at_a_time() {
    // In a T_W of 1 ms that is 100 kB.
    const BYTES_PER_SECOND: u64 = 100_000_000;
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = CreateOptions { size_bytes: Some(POOL_BYTES), ..CreateOptions::default() };
    let pool = Pool::create(&directory.path().join("pool"), &options).unwrap();
    let mut pod = crate::pod::Pod::new(pool.software(), pool.software(), pool.layout().data().start);
    let control = Control::new();
    pod.start(Box::new(RamSsd { memory: pod.backend_memory.clone(), control: Arc::clone(&control) }));
    let board =
        |number: u64| Area::new(LineOffset::new(pod.data.start.get() - 64 + 16 * number), LineCount::new(16));
    let fabric = FabricObject {
        window_us: 1000,
        sample_us: 10_000,
        sums: board(0),
        vms: board(1),
        peers: Vec::new(),
        sibling: None,
        elements: vec![ElementObject { element: 1, bytes_per_second: BYTES_PER_SECOND, signal: Signal::Off }],
        tenants: vec![TenantObject { tenant: 0, weight: 1 }],
    };
    let DiskObject { lease, instance, .. } = pod.disk;
    let share =
        MchannelObject { lease, instance, name: "vm0".to_owned(), weight: 1, tenant: 0, path: vec![1] };
    let mut driver = Driver::connected(&pod);
    let place = driver.place(0);
    for (paced, longest) in [(false, REQUEST_BYTES_MAX.into()), (true, 24 << 12)] {
        if paced {
            let frontend = pod.frontend.as_mut().unwrap();
            frontend.apply(Object::Fabric(fabric.clone())).unwrap();
            frontend.apply(Object::Mchannel(share.clone())).unwrap();
        }
        let data = pattern(u64::from(paced), REQUEST_BYTES_MAX as usize);
        for kind in [T_OUT, T_IN] {
            let writable = kind == T_IN;
            driver.write_header(place, kind, 0);
            driver.write(place.data, &if writable { vec![0x55; data.len()] } else { data.clone() });
            let before = control.log().len();
            let head = driver.guest.offer(0, &Driver::pieces(place, kind, REQUEST_BYTES_MAX), None);
            assert_eq!(driver.answer(0, 0, head).0, OK);
            assert!(driver.read(place.data, data.len()) == data);
            let lengths: Vec<u64> = control.log()[before..].iter().map(|it| it.length_bytes).collect();
            assert_eq!(lengths.iter().max(), Some(&longest), "{lengths:?}");
            assert_eq!(lengths.iter().sum::<u64>(), u64::from(REQUEST_BYTES_MAX));
        }
    }
}

#[test]
fn long_requests_go_on_after_a_backend_died_among_their_steps() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = CreateOptions { size_bytes: Some(POOL_BYTES), ..CreateOptions::default() };
    let pool = Pool::create(&directory.path().join("pool"), &options).unwrap();
    let mut pod = crate::pod::Pod::new(pool.software(), pool.software(), pool.layout().data().start);
    let control = Control::new();
    let ssd = RamSsd { memory: pod.backend_memory.clone(), control: Arc::clone(&control) };
    pod.start(Box::new(ssd));
    let mut driver = Driver::connected(&pod);
    let place = driver.place(0);
    let bytes = VOLUME_BYTES as u32;
    let data = pattern(9, bytes as usize);
    for kind in [T_OUT, T_IN] {
        let writable = kind == T_IN;
        driver.write_header(place, kind, 0);
        driver.write(place.data, &if writable { vec![0x55; bytes as usize] } else { data.clone() });
        let before = control.log().len();
        control.let_pass(1);
        let head = driver.guest.offer(0, &Driver::pieces(place, kind, bytes), None);
        eventually(|| control.log().len() == before + 2);
        // The second step is under way.
        pod.backend = None;
        control.orphaned(&pod.backend_memory, || false);
        control.hold(false);
        let ssd = RamSsd { memory: pod.backend_memory.clone(), control: Arc::clone(&control) };
        pod.start_backend(Box::new(ssd));
        pod.apply_volume();
        pod.new_channel();
        assert_eq!(driver.answer(0, 0, head).0, OK);
        assert!(driver.read(place.data, bytes as usize) == data);
        let offsets: Vec<u64> = control.log()[before..].iter().map(|command| command.offset_bytes).collect();
        let [first, second, again, ..] = offsets[..] else { panic!("{offsets:?}") };
        assert!(first < second && second == again, "the first step is not done twice: {offsets:?}");
    }
    assert!(control.bytes(VOLUME_START, bytes as usize) == data);
}
