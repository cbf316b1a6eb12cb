//! Drives that lose their power under load, by seed, and frontends that begin anew between: whatever the guest was told is on the medium must be there, and no
//! flush may vouch for what is gone.

use std::fs::File;
use std::path::Path;

use cxl_pool::simulated::{check_seeds, seeds};
use cxl_pool::{Area, HardwareMemory, LineCount, Pool};
use pod_protocol::endpoint::Handler;
use vhost_blk_cxl::message::Operation;
use vhost_blk_cxl::ssd::{FileSsd, Ssd, VolatileCacheOptions};
use vhost_frontend::mock::MockGuest;

use crate::TARGET;
use crate::pod::ram::{Control, RamSsd, idle_pod};
use crate::pod::witness::Witness;
use crate::pod::*;
use crate::zero_copy::pool;

const POWER_FAILURES: u64 = 4;

/// Where the guest has its memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ram {
    Elsewhere,
    /// Nothing is copied, and data lies in several pieces.
    InPool,
}

fn ssd(pool: &Pool, path: &Path, cache: VolatileCacheOptions) -> Box<dyn Ssd> {
    let bytes = VOLUME_START + VOLUME_BYTES;
    Box::new(FileSsd::open_volatile("ssd0", path, Some(bytes), pool, cache).unwrap())
}

/// What a run saw.
struct Seen {
    lost: u64,
    flushes: u64,
    failed_flushes: u64,
    restarts: u64,
}

fn run(seed: u64, ram: Ram, obeys_flush: bool, write_through: bool) -> Result<Seen, String> {
    let pool = pool();
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("ssd.img");
    let options = |turn| VolatileCacheOptions { seed: seed << 8 | turn, obeys_flush };
    let mut pod: Pod<HardwareMemory> = Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
    if ram == Ram::InPool {
        let lines = LineCount::covering(Driver::ram_bytes(pod.disk.queues));
        let area = Area::new(pod.data.start.saturating_add(pod.data.lines), lines);
        (pod.disk.ram_area, pod.volume.ram_area) = (Some(area), Some(area));
        pod.pool_file = Some(pool.file_identity());
    }
    pod.start(ssd(&pool, &path, options(0)));
    let mut driver = match pod.disk.ram_area {
        Some(area) => {
            let (file, queues) = (File::from(pool.fd().try_clone_to_owned().unwrap()), pod.disk.queues);
            let start = area.start_byte().get();
            let mut guest = MockGuest::in_file(file, start, Driver::ram_bytes(queues), queues, 128);
            guest.connect(&pod.socket(), ALL_FEATURES);
            Driver { guest }
        }
        None => Driver::connected(&pod),
    };
    if write_through {
        driver.guest.set_config(32, &[0]);
        assert_eq!(driver.guest.config(60)[32], 0);
        // The controller was told, and tells the next frontend.
        pod.disk.write_through = true;
    }
    let mut witness = Witness::new(driver, pod.disk.queues, seed.wrapping_mul(0x9e37_79b9));
    witness.write_through = write_through;
    witness.in_pieces = ram == Ram::InPool;
    let file = File::open(&path).unwrap();
    let mut restarts = 0;
    for turn in 1..=POWER_FAILURES {
        let requests = 20 + witness.below(150);
        witness.work(requests)?;
        if witness.below(3) == 0 {
            if witness.below(2) == 0 {
                // Then what is not flushed is the earlier one's, all of it.
                witness.settle()?;
            }
            pod.restart_frontend(&mut witness.driver.guest);
            // It knows the drive by its answers, or by what its predecessor has noted of it only. Without a write cache it flushes what that
            // may have left, and until then it would tell of a loss that is none.
            if write_through {
                witness.flush()?;
            } else if witness.below(2) == 0 {
                witness.settle()?;
                witness.driver.read_sectors(0, 512);
            }
            restarts += 1;
        }
        if turn == 1 + seed % POWER_FAILURES {
            // Whatever the threads did until now, there is something that a flush has vouched for.
            witness.flush()?;
        }
        pod.backend = None;
        witness.power_failed(&file, VOLUME_START)?;
        pod.start_backend(ssd(&pool, &path, options(turn)));
        pod.apply_volume();
        pod.new_channel();
    }
    witness.work(50)?;
    witness.settle()?;
    let not_copied = pod.frontend.as_mut().unwrap().telemetry().counters["zero-copy-requests"];
    assert_eq!(not_copied > 0, ram == Ram::InPool);
    Ok(Seen {
        lost: witness.lost,
        flushes: witness.flushes,
        failed_flushes: witness.failed_flushes,
        restarts,
    })
}

#[test]
fn what_was_flushed_outlives_a_power_failure() {
    const COUNT: u64 = 60;
    let (mut lost, mut flushes, mut failed_flushes, mut restarts) = (0, 0, 0, 0);
    check_seeds(TARGET, COUNT, |seed| {
        let seen = run(seed, Ram::Elsewhere, true, false)?;
        lost += seen.lost;
        flushes += seen.flushes;
        failed_flushes += seen.failed_flushes;
        restarts += seen.restarts;
        Ok(())
    });
    // The drive did lose what it may lose, and guests heard of it, also of frontends that had just begun.
    assert!(lost > 0 && flushes > 0 && failed_flushes > 0 && restarts > 0 || seeds(COUNT).count() == 1);
}

#[test]
fn without_a_write_cache_every_acknowledged_write_outlives_it() {
    check_seeds(TARGET, 20, |seed| {
        let seen = run(seed, Ram::Elsewhere, true, true)?;
        assert_eq!((seen.lost, seen.failed_flushes), (0, 0));
        Ok(())
    });
}

#[test]
fn what_a_guest_in_the_pool_flushed_outlives_a_power_failure() {
    const COUNT: u64 = 20;
    let (mut lost, mut flushes, mut failed_flushes) = (0, 0, 0);
    check_seeds(TARGET, COUNT, |seed| {
        let seen = run(seed, Ram::InPool, true, false)?;
        lost += seen.lost;
        flushes += seen.flushes;
        failed_flushes += seen.failed_flushes;
        Ok(())
    });
    assert!(lost > 0 && flushes > 0 && failed_flushes > 0 || seeds(COUNT).count() == 1);
}

#[test]
fn a_drive_whose_flushes_do_nothing_is_caught() {
    for (seed, ram) in (0..10).flat_map(|seed| [(seed, Ram::Elsewhere), (seed, Ram::InPool)]) {
        match run(seed, ram, false, false) {
            Err(_) => {}
            Ok(seen) => panic!("seed {seed}: it went unnoticed, after {} flushes", seen.flushes),
        }
    }
}

/// Reads of this length fill the disk's buffers, so that what comes after them stays in its ring.
const READ_BYTES: u32 = 1 << 19;

#[test]
fn a_flush_that_waited_in_its_ring_when_the_power_failed_fails_too() {
    check_seeds(TARGET, 8, |seed| {
        let pool = pool();
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("ssd.img");
        let options = |turn| VolatileCacheOptions { seed: seed << 8 | turn, obeys_flush: true };
        let mut pod: Pod<HardwareMemory> =
            Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
        pod.start(ssd(&pool, &path, options(0)));
        let mut driver = Driver::connected(&pod);
        assert_eq!(driver.write_sectors(0, &pattern(1, 4096)), OK);
        pod.backend = None;
        // None of these can know that the write is lost. The last one is not even taken before others are answered.
        let mut heads = vec![driver.offer(0, 1, T_FLUSH, 0, 0)];
        let reads = DATA_BYTES / u64::from(READ_BYTES) + 4;
        heads.extend((2..2 + reads).map(|place| driver.offer(0, place, T_IN, 0, READ_BYTES)));
        heads.push(driver.offer(0, 2 + reads, T_FLUSH, 0, 0));
        pod.start_backend(ssd(&pool, &path, options(1)));
        pod.apply_volume();
        pod.new_channel();
        for _ in &heads {
            assert!(driver.guest.wait_used(0, PATIENCE).is_some(), "an answer");
        }
        let statuses: Vec<u8> = (1..3 + reads).map(|place| driver.status(place)).collect();
        assert_eq!((statuses[0], statuses[statuses.len() - 1]), (IOERR, IOERR), "{statuses:?}");
        // The guest knows.
        assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
        Ok(())
    });
}

#[test]
fn a_late_write_of_a_dead_frontend_does_not_land_on_a_newer_one() {
    let pool = pool();
    let mut pod: Pod<HardwareMemory> = Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
    let control = Control::new();
    let device = RamSsd { memory: pod.backend_memory.clone(), control: std::sync::Arc::clone(&control) };
    pod.start(Box::new(device));
    let mut driver = Driver::connected(&pod);
    control.hold(true);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    let old = driver.offer(0, 0, T_OUT, 0, 4096);
    eventually(|| control.waiting() == 1);
    // The process dies: nothing of it takes an answer any more.
    std::mem::forget(pod.frontend.take());
    std::fs::remove_file(pod.socket()).unwrap();
    for bell in std::fs::read_dir(pod.run.doorbells()).unwrap().map(|bell| bell.unwrap().path()) {
        if bell.to_string_lossy().contains("frontend") {
            std::fs::remove_file(bell).unwrap();
        }
    }
    driver.guest.disconnect();
    pod.start_frontend();
    pod.new_lease_generation();
    pod.apply_volume();
    pod.new_channel();
    pod.apply_disk();
    driver.guest.connect(&pod.socket(), ALL_FEATURES);
    std::thread::sleep(QUIET);
    // The device still has the old write: nothing of that volume begins before it has ended.
    assert_eq!(control.log().len(), 1);
    control.hold(false);
    assert_eq!(driver.answer(0, 0, old), (OK, 1));
    assert_eq!(driver.write_sectors(0, &pattern(2, 4096)), OK);
    assert_eq!(driver.read_sectors(0, 4096), pattern(2, 4096));
    assert_eq!(control.bytes(VOLUME_START, 4096), pattern(2, 4096));
}

/// The driver of a disk whose frontend began anew after these data were written, and not flushed.
fn written_before(pod: &mut Pod<HardwareMemory>, data: &[u8]) -> Driver {
    let mut driver = Driver::connected(pod);
    assert_eq!(driver.write_sectors(8, data), OK);
    pod.restart_frontend(&mut driver.guest);
    driver
}

/// Has these data written by a driver that then switches the write cache off, and the drive's host lose its power: they are on the medium.
fn outlive_once_the_cache_is_off(write: impl Fn(&mut Pod<HardwareMemory>, &[u8]) -> Driver) {
    for seed in 0..8 {
        let (pool, directory) = (pool(), tempfile::tempdir_in("/dev/shm").unwrap());
        let path = directory.path().join("ssd.img");
        let mut pod: Pod<HardwareMemory> =
            Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
        pod.start(ssd(&pool, &path, VolatileCacheOptions::new(seed)));
        let data = pattern(seed, 64 << 10);
        let mut driver = write(&mut pod, &data);
        driver.guest.set_config(32, &[0]);
        // It is answered after that.
        assert_eq!(driver.guest.config(60)[32], 0);
        pod.backend = None;
        let mut found = vec![0; data.len()];
        let file = File::open(&path).unwrap();
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut found, VOLUME_START + 8 * SECTOR).unwrap();
        assert!(found == data, "{seed}");
    }
}

#[test]
fn what_an_earlier_frontend_wrote_is_flushed_when_the_cache_is_switched_off() {
    outlive_once_the_cache_is_off(written_before);
}

#[test]
fn the_guest_hears_that_the_drive_lost_what_an_earlier_frontend_wrote() {
    let (pool, directory) = (pool(), tempfile::tempdir_in("/dev/shm").unwrap());
    let path = directory.path().join("ssd.img");
    let mut pod: Pod<HardwareMemory> = Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
    pod.start(ssd(&pool, &path, VolatileCacheOptions::new(1)));
    let mut driver = written_before(&mut pod, &pattern(1, 64 << 10));
    // By this answer it knows the drive.
    driver.read_sectors(0, 512);
    for (turn, told) in [(2, IOERR), (3, OK)] {
        pod.backend = None;
        pod.start_backend(ssd(&pool, &path, VolatileCacheOptions::new(turn)));
        pod.apply_volume();
        pod.new_channel();
        assert_eq!(driver.request(T_FLUSH, 0, 0).0, told);
        // The second time nothing was lost, for all of it was flushed.
        assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
    }
}

#[test]
fn switching_the_cache_off_flushes_also_when_the_disk_has_as_many_requests_as_it_may() {
    const REQUESTS_MAX: usize = 512;
    let (mut pod, ssd, control) = idle_pod(71);
    (pod.disk.queues, pod.slots) = (4, 1024);
    pod.start(ssd);
    let mut driver = Driver::new(pod.disk.queues, 512);
    driver.guest.connect(&pod.socket(), ALL_FEATURES);
    assert_eq!(driver.write_sectors(0, &pattern(1, 4096)), OK);
    control.hold(true);
    let before = control.log().len();
    // They read the same, so that they may all be where one is.
    for index in 0..REQUESTS_MAX {
        driver.offer(index % 4, 1, T_IN, 0, 512);
    }
    eventually(|| control.log().len() == before + REQUESTS_MAX);
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| {
            driver.guest.set_config(32, &[0]);
            driver.guest.config(60)[32]
        });
        std::thread::sleep(QUIET);
        assert!(!answer.is_finished(), "nothing is flushed yet");
        control.hold(false);
        assert_eq!(answer.join().unwrap(), 0);
    });
    let flushes = control.log().iter().filter(|command| command.operation == Operation::Flush).count();
    assert_eq!(flushes, 1);
}

/// From then on the driver flushes no more.
#[test]
fn what_was_written_before_the_cache_was_switched_off_outlives_a_power_failure() {
    outlive_once_the_cache_is_off(|pod, data| {
        let mut driver = Driver::connected(pod);
        assert_eq!(driver.write_sectors(8, data), OK);
        driver
    });
}
