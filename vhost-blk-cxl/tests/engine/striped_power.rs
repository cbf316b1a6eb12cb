//! Striped volumes whose drives lose their power, all of them together with the guest, or one of them under it: what a flush has
//! vouched for is there, on every column.

use cxl_pool::simulated::{check_seeds, seeds};

use crate::TARGET;
use crate::pod::mirror::{MIRROR_BYTES, MirrorPod};
use crate::pod::*;

/// The unit of the stripes.
const HALF: usize = 4096;
/// Two units, so that each write is cut into one for each column.
const WHOLE: usize = 2 * HALF;
const PLACES: u64 = 8;
const TURNS: u64 = 4;

/// A part of the volume, and which versions of it may be found.
#[derive(Clone, Copy, Default)]
struct Place {
    /// A flush has vouched for it.
    flushed: u64,
    /// The next one will.
    acknowledged: u64,
    begun: u64,
}

fn content(version: u64) -> Vec<u8> {
    if version == 0 { vec![0; WHOLE] } else { pattern(version, WHOLE) }
}

fn sector_of(place: u64) -> u64 {
    place * (MIRROR_BYTES / SECTOR / PLACES)
}

/// Looks at all places. Writes may be torn by sector, and so between the columns.
fn check(driver: &mut Driver, places: &[Place]) -> Result<(), String> {
    for (place, Place { flushed, begun, .. }) in (0..).zip(places) {
        let read = driver.read_sectors(sector_of(place), WHOLE as u32);
        let size = SECTOR as usize;
        for (index, found) in read.chunks(size).enumerate() {
            let is_of = |version| content(version)[index * size..][..size] == *found;
            if !(*flushed..=*begun).any(is_of) {
                return Err(format!(
                    "place {place}, sector {index}: version {flushed} was flushed, and is lost"
                ));
            }
        }
    }
    Ok(())
}

/// Flushes. False if that failed: what came before it may be lost then, and the guest knows.
fn flush(driver: &mut Driver, places: &mut [Place]) -> bool {
    let vouched = driver.request(T_FLUSH, 0, 0).0 == OK;
    for place in places {
        if vouched {
            place.flushed = place.acknowledged;
        } else {
            place.acknowledged = place.flushed;
        }
    }
    vouched
}

/// Returns how many flushes failed because one drive had lost its power.
fn run(seed: u64, obeys_flush: bool) -> Result<u64, String> {
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut below = |limit: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 16) % limit
    };
    let mut pod = MirrorPod::striped_on_volatile_drives(seed, 2, HALF as u64, obeys_flush);
    let mut driver = pod.driver();
    let mut places = [Place::default(); PLACES as usize];
    let (mut version, mut failed) = (0, 0);
    for _ in 0..TURNS {
        for _ in 0..10 + below(40) {
            let place = below(PLACES);
            version += 1;
            let versions = &mut places[place as usize];
            versions.begun = version;
            if driver.write_sectors(sector_of(place), &content(version)) != OK {
                return Err("a write failed".to_owned());
            }
            versions.acknowledged = version;
            if below(8) == 0 && !flush(&mut driver, &mut places) {
                return Err("a flush failed, though nothing was lost".to_owned());
            }
        }
        if below(2) == 0 {
            // Some are under way when it happens, each on one of the columns.
            for place in 0..below(4) {
                version += 1;
                places[place as usize].begun = version;
                driver.write(driver.place(place + 1).data, &content(version)[..HALF]);
                driver.offer(0, place + 1, T_OUT, sector_of(place), HALF as u32);
            }
            drop(driver);
            pod.cut_power();
            pod.restore_power();
            driver = pod.driver();
            for place in &mut places {
                place.acknowledged = place.flushed;
            }
        } else {
            let column = below(2) as usize;
            pod.backends[column] = None;
            pod.start_backend(column);
            // If it ends well, all that was acknowledged is there.
            failed += u64::from(!flush(&mut driver, &mut places));
        }
        check(&mut driver, &places)?;
        // What was found is what is there: from here on nothing of it is lost.
        if !flush(&mut driver, &mut places) {
            return Err("the guest was told twice".to_owned());
        }
    }
    Ok(failed)
}

#[test]
fn what_was_flushed_outlives_the_power_of_every_column_and_of_one() {
    const COUNT: u64 = 60;
    let mut failed = 0;
    check_seeds(TARGET, COUNT, |seed| {
        failed += run(seed, true)?;
        Ok(())
    });
    assert!(failed > 0 || seeds(COUNT).count() == 1, "no guest heard of a loss");
}

#[test]
fn drives_that_do_not_flush_are_caught() {
    let violations = (0..8).filter(|&seed| run(seed, false).is_err()).count();
    assert!(violations >= 6, "{violations} of 8 runs showed it");
}
