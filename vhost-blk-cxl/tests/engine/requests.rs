//! What a guest may ask of its disk, and what it may not, over simulated memory that is as incoherent as it may be:
//! a missing write-back, invalidation or fence shows as wrong data.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use cxl_pool::{CreateOptions, Memory, Pool};
use pod_protocol::reports::Report;
use proptest::prelude::*;
use vhost::vhost_user::VhostUserFrontend;
use vhost_blk_cxl::message::Operation;
use vhost_frontend::mock::Piece;

use crate::pod::mirror::MirrorPod;
use crate::pod::ram::{Control, RamSsd, pod};
use crate::pod::*;

const POOL_BYTES: u64 = 32 << 20;

#[test]
fn the_configuration_space_describes_the_disk() {
    let (pod, _control) = pod(1);
    let mut driver = Driver::connected(&pod);
    let config = driver.guest.config(60);
    let word = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    for (name, bit) in [("SIZE_MAX", 1), ("SEG_MAX", 2), ("TOPOLOGY", 10)] {
        assert!(
            driver.guest.features() & 1 << bit != 0,
            "{name}: without it the driver does not look at these"
        );
    }
    assert_eq!(u64::from_le_bytes(config[..8].try_into().unwrap()), VOLUME_BYTES / SECTOR);
    assert_eq!((word(8), word(12)), (32 << 10, 126), "bytes of a segment, and segments");
    assert_eq!(word(20), 512, "block size");
    // 4096 bytes are written at once, 8 blocks from the first one on, and shorter requests than that cost no more than as long a one.
    assert_eq!(config[24..26], [3, 0], "physical block's exponent, and where the first one begins");
    assert_eq!(u16::from_le_bytes([config[26], config[27]]), 1, "the shortest request that pays, in blocks");
    assert_eq!(word(28), 0, "no length is better than others");
    assert_eq!(config[32], 1, "write cache");
    assert_eq!(u16::from_le_bytes([config[34], config[35]]), 2, "queues");
    assert!(word(36) > 0 && word(48) > 0, "discard and write zeroes");
    // Beyond what we know there are zeros, for VMMs that know more.
    assert_eq!(driver.guest.config(200)[60..], [0; 140]);
}

/// The disk gets a MiB more.
pub(crate) fn grow<M: Memory>(pod: &mut Pod<M>) {
    // The backend first: nothing that the guest may ask for is refused there.
    pod.volume.size_bytes += 1 << 20;
    pod.disk.size_bytes += 1 << 20;
    pod.apply_volume();
    pod.apply_disk();
}

#[test]
fn a_disk_grows_under_its_guest() {
    let (mut pod, _control) = pod(13);
    let mut driver = Driver::connected(&pod);
    let (mut heard, given) = UnixStream::pair().unwrap();
    driver.guest.frontend().set_backend_request_fd(&given).unwrap();
    let before = VOLUME_BYTES / SECTOR;
    assert_eq!(driver.request(T_IN, before, 512).0, IOERR);
    driver.guest.set_config(32, &[0]);
    grow(&mut pod);
    let mut notice = [0; 12];
    heard.read_exact(&mut notice).unwrap();
    assert_eq!(notice[..4], 2_u32.to_ne_bytes(), "VHOST_USER_BACKEND_CONFIG_CHANGE_MSG");
    let config = driver.guest.config(60);
    assert_eq!(u64::from_le_bytes(config[..8].try_into().unwrap()), before + 2048);
    assert_eq!(config[32], 0, "the driver's choice stays");
    assert_eq!(driver.write_sectors(before + 2047, &pattern(9, 512)), OK);
    assert_eq!(driver.read_sectors(before + 2047, 512), pattern(9, 512));
    // What the driver changes later does not bring the old size back.
    driver.guest.set_config(32, &[1]);
    assert_eq!(driver.guest.config(60)[..8], (before + 2048).to_le_bytes());
}

/// A VMM heeds no notice of a disk that it has not started, and answers its guest by what it read before.
#[test]
fn a_vmm_that_starts_a_disk_hears_that_it_grew_meanwhile() {
    let (mut pod, _control) = pod(17);
    let mut driver = Driver::connected(&pod);
    let (mut heard, given) = UnixStream::pair().unwrap();
    heard.set_read_timeout(Some(PATIENCE)).unwrap();
    driver.guest.frontend().set_backend_request_fd(&given).unwrap();
    for ring in 0..2 {
        driver.guest.stop_ring(ring);
    }
    grow(&mut pod);
    let mut notice = [0; 12];
    heard.read_exact(&mut notice).unwrap();
    driver.guest.start_rings();
    heard.read_exact(&mut notice).unwrap();
    assert_eq!(notice[..4], 2_u32.to_ne_bytes(), "VHOST_USER_BACKEND_CONFIG_CHANGE_MSG");
    // Once.
    for ring in 0..2 {
        driver.guest.stop_ring(ring);
    }
    driver.guest.start_rings();
    heard.set_nonblocking(true).unwrap();
    assert!(heard.read_exact(&mut notice).is_err());
}

/// A VMM that lost its connection neither says again what its driver chose, nor does it look what holds now.
#[test]
fn the_driver_s_choice_of_no_cache_outlasts_its_vmm_s_connection() {
    let (pod, control) = pod(15);
    let mut driver = Driver::connected(&pod);
    driver.guest.set_config(32, &[0]);
    driver.guest.disconnect();
    driver.guest.connect(&pod.socket(), ALL_FEATURES);
    assert_eq!(driver.write_sectors(0, &pattern(1, 512)), OK);
    assert!(control.log().iter().all(|command| command.force_unit_access));
    // A VMM that begins anew sees it.
    assert_eq!(driver.guest.config(60)[32], 0);
}

/// Whatever the controller hears, it writes down.
#[test]
fn a_driver_that_changes_its_mind_all_the_time_is_spoken_of_now_and_then() {
    let mut pod = MirrorPod::alone(17, 1);
    let mut driver = pod.driver();
    driver.guest.set_config(32, &[1]);
    pod.dirty_bytes();
    pod.reports();
    for round in 0..1000_u32 {
        driver.guest.set_config(32, &[(round % 2) as u8]);
    }
    driver.guest.set_config(32, &[0]);
    assert_eq!(driver.guest.config(60)[32], 0);
    assert!(pod.reports().is_empty());
    // With telemetry.
    pod.dirty_bytes();
    let said = pod.reports();
    let holds = |it: &Report| {
        matches!(it, Report::Attachment { connected: true, running: true, write_through: true, .. })
    };
    assert!(said.len() == 1 && holds(&said[0]), "{said:?}");
    pod.dirty_bytes();
    assert!(pod.reports().is_empty());
}

/// Else its successor would not know that what the driver wrote before is to be flushed, nor that it will not ask for that.
#[test]
fn a_frontend_says_that_the_cache_is_off_before_it_has_flushed() {
    let mut pod = MirrorPod::alone(18, 1);
    let mut driver = pod.driver();
    assert_eq!(driver.write_sectors(0, &pattern(1, 512)), OK);
    pod.dirty_bytes();
    pod.reports();
    let control = Arc::clone(&pod.controls[0]);
    control.hold(true);
    std::thread::scope(|scope| {
        scope.spawn(|| driver.guest.set_config(32, &[0]));
        eventually(|| control.waiting() == 1);
        // With telemetry.
        pod.dirty_bytes();
        let said = pod.reports();
        control.hold(false);
        let holds = |it: &Report| matches!(it, Report::Attachment { running: true, write_through: true, .. });
        assert!(said.len() == 1 && holds(&said[0]), "{said:?}");
    });
    assert_eq!(control.log().last().map(|command| command.operation), Some(Operation::Flush));
}

/// It may switch the cache, but could never have it flushed.
#[test]
fn a_driver_that_cannot_flush_has_no_cache() {
    let (pod, control) = pod(16);
    let mut driver = Driver::new(2, 128);
    driver.guest.connect(&pod.socket(), !(1 << 9));
    assert_eq!(driver.write_sectors(0, &pattern(1, 512)), OK);
    assert!(control.log().iter().all(|command| command.force_unit_access));
}

#[test]
fn a_device_that_cannot_flush_says_so_to_the_guest() {
    let (mut pod, control) = pod(14);
    let mut driver = Driver::connected(&pod);
    assert_eq!(driver.write_sectors(0, &pattern(1, 512)), OK);
    control.fail(true);
    assert_eq!(driver.request(T_FLUSH, 0, 0), (IOERR, 1));
    // A write that must be on the medium when it ends fails as well.
    driver.guest.set_config(32, &[0]);
    assert_eq!(driver.write_sectors(0, &pattern(2, 512)), IOERR);
    assert_eq!(pod.frontend_lease().errors, 2);
}

#[test]
fn what_was_written_is_read() {
    let (mut pod, control) = pod(2);
    let mut driver = Driver::connected(&pod);
    let data = pattern(1, 128 << 10);
    assert_eq!(driver.write_sectors(8, &data), OK);
    assert_eq!(driver.read_sectors(8, 128 << 10), data);
    assert_eq!(driver.read_sectors(9, 512), data[512..1024]);
    assert_eq!(control.bytes(VOLUME_START + 4096, data.len()), data);
    assert_eq!(driver.read_sectors(8 + 256, 512), [0; 512]);
    let lease = pod.frontend_lease();
    assert_eq!((lease.reads, lease.writes, lease.read_bytes, lease.write_bytes), (3, 1, 132_096, 131_072));
    assert_eq!(pod.backend_lease().writes, 1);
}

#[test]
fn flush_discard_zeroes_and_id() {
    let (pod, control) = pod(3);
    let mut driver = Driver::connected(&pod);
    let data = pattern(2, 8192);
    assert_eq!(driver.write_sectors(0, &data), OK);
    assert_eq!(driver.request(T_FLUSH, 0, 0), (OK, 1));
    assert_eq!(driver.range_request(T_DISCARD, 0, 8, 0), OK);
    assert_eq!(driver.range_request(T_WRITE_ZEROES, 8, 4, 1), OK);
    assert_eq!(driver.range_request(T_WRITE_ZEROES, 12, 1, 0), OK);
    let mut expected = data.clone();
    expected[..13 * 512].fill(0);
    assert_eq!(driver.read_sectors(0, 8192), expected);
    assert_eq!(driver.request(T_GET_ID, 0, 20), (OK, 21));
    assert_eq!(driver.read(driver.place(0).data, 20), b"wadi-volume-0001-of-");
    let zeroes = control.log().into_iter().filter(|command| command.may_unmap).count();
    assert_eq!(zeroes, 1);
}

#[test]
fn what_is_out_of_bounds_is_refused_and_never_reaches_the_backend() {
    let (mut pod, control) = pod(4);
    let mut driver = Driver::connected(&pod);
    let sectors = VOLUME_BYTES / SECTOR;
    for (kind, sector, bytes) in [
        (T_IN, sectors, 512),
        (T_IN, sectors - 1, 1024),
        (T_OUT, sectors, 512),
        (T_IN, u64::MAX / SECTOR, 512),
        (T_IN, u64::MAX, 512),
        (T_OUT, u64::MAX / SECTOR + 1, 512),
        (T_IN, 0, 511),
        (T_OUT, 0, 513),
        (T_IN, 0, 0),
        (T_OUT, 0, 0),
    ] {
        assert_eq!(driver.request(kind, sector, bytes), (IOERR, 1), "{kind} {sector} {bytes}");
    }
    for (kind, sector, count, flags, expected) in [
        (T_DISCARD, sectors, 1, 0, IOERR),
        (T_DISCARD, sectors - 1, 2, 0, IOERR),
        (T_DISCARD, u64::MAX, u32::MAX, 0, IOERR),
        (T_DISCARD, 0, 0, 0, IOERR),
        (T_DISCARD, 0, 8, 1, UNSUPP),
        (T_WRITE_ZEROES, u64::MAX / 2, u32::MAX, 0, IOERR),
        (T_WRITE_ZEROES, 0, u32::MAX, 0, IOERR),
        (T_WRITE_ZEROES, 0, 8, 2, UNSUPP),
    ] {
        assert_eq!(
            driver.range_request(kind, sector, count, flags),
            expected,
            "{kind} {sector} {count} {flags}"
        );
    }
    assert_eq!(driver.request(99, 0, 512).0, UNSUPP);
    assert_eq!(control.log(), []);
    assert_eq!(pod.frontend_lease().drops["refused"], 19);
    assert_eq!(driver.read_sectors(0, 512), [0; 512]);
}

#[test]
fn a_request_may_be_cut_into_descriptors_anywhere() {
    let (pod, _control) = pod(5);
    let mut driver = Driver::connected(&pod);
    let data = pattern(3, 4096);
    let place = driver.place(0);
    driver.write_header(place, T_OUT, 16);
    driver.write(place.data, &data);
    // Header in three pieces, the last of which holds data as well: both lie side by side in memory.
    driver.write(place.data - 6, &driver.read(place.header + 10, 6));
    let piece = |address, bytes, writable| Piece { address, bytes, writable };
    let out = [
        piece(place.header, 1, false),
        piece(place.header + 1, 9, false),
        piece(place.data - 6, 6 + 100, false),
        piece(place.data + 100, 3996, false),
        piece(place.status, 1, true),
    ];
    for table in [None, Some(place.header + 256)] {
        driver.write(place.status, &[UNTOUCHED]);
        let head = driver.guest.offer(0, &out, table);
        assert_eq!(driver.answer(0, 0, head), (OK, 1));
    }
    // The status behind the data in one descriptor, and data in odd pieces.
    driver.write_header(place, T_IN, 16);
    let into =
        [piece(place.header, 16, false), piece(place.data + 9000, 1001, true), piece(place.data, 3096, true)];
    for table in [None, Some(place.header + 256)] {
        let head = driver.guest.offer(0, &into, table);
        let used = driver.guest.wait_used(0, PATIENCE).unwrap();
        assert_eq!((used.head, used.written), (head, 4097));
        assert_eq!(driver.read(place.data + 9000, 1001), data[..1001]);
        assert_eq!(driver.read(place.data, 3096)[..3095], data[1001..]);
        assert_eq!(driver.read(place.data + 3095, 1), [OK]);
    }
}

#[test]
fn a_read_only_disk_refuses_writes() {
    let (mut pod, control) = pod(8);
    pod.disk.read_only = true;
    pod.disk.socket = "ro.sock".to_owned();
    pod.apply_disk();
    let mut driver = Driver::connected(&pod);
    assert_ne!(driver.guest.features() & 1 << 5, 0, "VIRTIO_BLK_F_RO");
    assert_eq!(driver.guest.features() & 1 << 13, 0, "VIRTIO_BLK_F_DISCARD");
    assert_eq!(driver.write_sectors(0, &pattern(5, 512)), IOERR);
    assert_eq!(driver.range_request(T_WRITE_ZEROES, 0, 1, 0), IOERR);
    assert_eq!(driver.read_sectors(0, 512), [0; 512]);
    assert!(control.log().iter().all(|command| !command.operation.writes()));
}

#[test]
fn writes_reach_the_medium_at_once_where_the_driver_wants_no_cache() {
    let (pod, control) = pod(9);
    let mut driver = Driver::connected(&pod);
    let data = pattern(6, 512);
    driver.write_sectors(0, &data);
    driver.guest.set_config(32, &[0]);
    assert_eq!(driver.guest.config(60)[32], 0);
    driver.write_sectors(1, &data);
    driver.guest.set_config(32, &[1]);
    driver.write_sectors(2, &data);
    // What may not be written is ignored, and costs nothing.
    driver.guest.set_config(0, &[1, 2, 3, 4]);
    driver.write_sectors(3, &data);
    let (writes, others): (Vec<_>, Vec<_>) =
        control.log().into_iter().partition(|command| command.operation.writes());
    let through: Vec<bool> = writes.iter().map(|command| command.force_unit_access).collect();
    assert_eq!(through, [false, true, false, false]);
    // Of what came before.
    assert!(matches!(others.as_slice(), [flush] if flush.operation == Operation::Flush), "{others:?}");
    // A driver that cannot flush never needs to.
    drop(driver);
    let mut driver = Driver::new(2, 128);
    driver.guest.connect(&pod.socket(), !(1 << 9 | 1 << 11));
    driver.write_sectors(4, &data);
    assert!(control.log().last().unwrap().force_unit_access);
}

#[test]
fn a_device_that_fails_gives_io_errors() {
    let (mut pod, control) = pod(10);
    let mut driver = Driver::connected(&pod);
    control.fail(true);
    assert_eq!(driver.write_sectors(0, &pattern(7, 4096)), IOERR);
    assert_eq!(driver.request(T_IN, 0, 4096), (IOERR, 1));
    assert_eq!(driver.request(T_FLUSH, 0, 0), (IOERR, 1));
    control.fail(false);
    assert_eq!(driver.read_sectors(0, 512), [0; 512]);
    assert_eq!((pod.frontend_lease().errors, pod.backend_lease().errors), (3, 3));
}

#[test]
fn more_than_fits_waits_in_the_ring() {
    // Over a real pool: simulating megabytes takes minutes.
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = CreateOptions { size_bytes: Some(POOL_BYTES), ..CreateOptions::default() };
    let pool = Pool::create(&directory.path().join("pool"), &options).unwrap();
    let mut pod = Pod::new(pool.software(), pool.software(), pool.layout().data().start);
    let control = Control::new();
    let ssd = RamSsd { memory: pod.backend_memory.clone(), control: Arc::clone(&control) };
    pod.start(Box::new(ssd));
    let mut driver = Driver::connected(&pod);
    control.hold(true);
    control.set_depth(3);
    // 40 requests of 1 MiB: eight fill the data area, three the device.
    let bytes = (1 << 20) - 4096;
    for index in 0..40 {
        // They meet, and only read.
        driver.offer((index % 2) as usize, index, T_IN, index * 8, bytes - (bytes % 512));
    }
    eventually(|| control.waiting() == 3);
    std::thread::sleep(QUIET);
    assert_eq!(control.waiting(), 3);
    control.hold(false);
    for _ in 0..20 {
        assert!(driver.guest.wait_used(0, PATIENCE).is_some());
        assert!(driver.guest.wait_used(1, PATIENCE).is_some());
    }
    assert!((0..40).all(|index| driver.status(index) == OK));
    // More small ones than the channel has slots. Of the 40 before, the backend has acknowledged 32 so far, and the others at some point
    // of what follows. Never is more under way than the slots that answers will need.
    control.set_depth(usize::MAX);
    control.hold(true);
    let unacknowledged = 40 % (SLOTS as usize / 2);
    for index in 0..72 {
        driver.offer((index % 2) as usize, index % PLACES, T_FLUSH, 0, 0);
    }
    eventually(|| control.waiting() >= SLOTS as usize - unacknowledged);
    std::thread::sleep(QUIET);
    assert!(control.waiting() <= SLOTS as usize, "{} are under way", control.waiting());
    control.finish_backwards();
    control.hold(false);
    for _ in 0..36 {
        assert!(driver.guest.wait_used(0, PATIENCE).is_some());
        assert!(driver.guest.wait_used(1, PATIENCE).is_some());
    }
}

#[test]
fn a_driver_without_any_feature_works() {
    let (pod, _control) = pod(12);
    let mut driver = Driver::new(1, 4);
    driver.guest.connect(&pod.socket(), 0);
    let data = pattern(8, 2048);
    for round in 0..20 {
        assert_eq!(driver.write_sectors(round, &data), OK);
        assert_eq!(driver.read_sectors(round, 2048), data);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Reads and writes of any size, many in flight, on memory that does everything it may: the disk is the model.
    #[test]
    fn the_disk_is_the_model(
        seed: u64,
        steps in prop::collection::vec((0u8..10, 0u64..512, 1u32..64, any::<u64>()), 10..60),
    ) {
        let (pod, control) = pod(seed);
        control.finish_backwards();
        let mut driver = Driver::connected(&pod);
        let mut model = vec![0u8; 1 << 20];
        for batch in steps.chunks(8) {
            // No two requests of a batch touch the same sectors: their order would be anybody's.
            let mut taken = Vec::new();
            let mut offered = Vec::new();
            for (index, &(kind, sector, sectors, content)) in (0u64..).zip(batch) {
                let range = sector..sector + u64::from(sectors);
                if taken.iter().any(|other: &std::ops::Range<u64>| other.start < range.end && range.start < other.end) {
                    continue;
                }
                taken.push(range.clone());
                let (start, bytes) = ((range.start * SECTOR) as usize, sectors as usize * 512);
                let place = driver.place(index);
                let kind = if kind < 5 { T_OUT } else { T_IN };
                if kind == T_OUT {
                    let data = pattern(content, bytes);
                    driver.write(place.data, &data);
                    model[start..start + bytes].copy_from_slice(&data);
                } else {
                    driver.write(place.data, &vec![0x77; bytes]);
                }
                driver.offer((index % 2) as usize, index, kind, sector, bytes as u32);
                offered.push((index, kind, start, bytes));
            }
            for &(index, ..) in &offered {
                prop_assert!(driver.guest.wait_used((index % 2) as usize, PATIENCE).is_some());
            }
            for &(index, kind, start, bytes) in &offered {
                prop_assert_eq!(driver.status(index), OK);
                if kind == T_IN {
                    prop_assert!(driver.read(driver.place(index).data, bytes) == model[start..start + bytes]);
                }
            }
        }
        let disk = control.bytes(VOLUME_START, model.len());
        prop_assert!(disk == model);
    }
}
