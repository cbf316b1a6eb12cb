//! Requests that meet on a striped disk while a column of it moves: what a guest has seen of them stays, whatever has to be repeated.

use crate::column_moves::{UNIT, full, settled, wait_until_told};
use crate::pod::mirror::MirrorPod;
use crate::pod::*;

const SECTOR_MET: u64 = 8;
const AT: u64 = VOLUME_START + SECTOR_MET * SECTOR;

/// The guest has read the older of two writes to the first column, though that has not ended, then it has seen the newer one end. The
/// column's backend dies, and what has not ended is repeated.
fn a_write_that_was_seen_stays(pod: &mut MirrorPod, driver: &mut Driver) {
    pod.controls[0].finish_backwards();
    pod.controls[0].hold(true);
    driver.write(driver.place(0).data, &pattern(1, 4096));
    let older = driver.offer(0, 0, T_OUT, SECTOR_MET, 4096);
    eventually(|| pod.controls[0].waiting() == 1);
    // The device has carried it out, and has not said so.
    pod.controls[0].set_bytes(AT, &pattern(1, 4096));
    driver.write(driver.place(2).data, &pattern(2, 4096));
    let mut told = 0;
    for (index, kind) in [(1, T_IN), (2, T_OUT)] {
        let head = driver.offer(1, index, kind, SECTOR_MET, 4096);
        assert!(driver.guest.wait_used(1, QUIET).is_none(), "the device does nothing");
        if pod.controls[0].waiting() == 2 {
            pod.controls[0].let_pass(1);
            assert_eq!(driver.guest.wait_used(1, PATIENCE).map(|used| used.head), Some(head));
            told += 1;
        }
    }
    pod.kill(0, || false);
    pod.controls[0].hold(false);
    pod.start_backend(0);
    assert_eq!(driver.answer(0, 0, older), (OK, 1));
    for _ in told..2 {
        assert!(driver.guest.wait_used(1, PATIENCE).is_some());
    }
    assert!(driver.read_sectors(SECTOR_MET, 4096) == pattern(2, 4096), "{told} were told before");
}

#[test]
fn a_write_that_was_seen_does_not_come_back_while_another_column_moves() {
    let (mut pod, mut driver, _) = full(61);
    pod.controls[2].hold(true);
    pod.move_column(1, 2);
    eventually(|| pod.controls[2].waiting() > 0);
    a_write_that_was_seen_stays(&mut pod, &mut driver);
    pod.controls[2].hold(false);
    pod.until(|pod| settled(pod));
    assert_eq!(pod.columns().arrived, 1);
}

#[test]
fn a_write_that_was_seen_does_not_come_back_while_the_place_that_a_column_left_lets_go() {
    let (mut pod, mut driver, _) = full(62);
    pod.move_column(1, 2);
    wait_until_told(&mut pod, 2);
    pod.controls[1].hold(true);
    let read = driver.offer(0, 3, T_IN, UNIT / SECTOR, 4096);
    eventually(|| pod.controls[1].waiting() == 1);
    pod.until(|pod| pod.columns().arrived == 1);
    assert!(!settled(&pod), "it has a read");
    a_write_that_was_seen_stays(&mut pod, &mut driver);
    pod.controls[1].hold(false);
    assert_eq!(driver.answer(0, 3, read), (OK, 4097));
    pod.until(|pod| settled(pod));
}
