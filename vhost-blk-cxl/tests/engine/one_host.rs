//! Volumes that move between two SSDs of one host, whose backend serves both meanwhile.

use cxl_pool::simulated::check_seeds;
use pod_protocol::endpoint::Handler;
use pod_protocol::ids::PlaceId;
use pod_protocol::objects::ObjectId;
use vhost_blk_cxl::message::Operation;

use crate::TARGET;
use crate::pod::history::History;
use crate::pod::mirror::{MIRROR_BYTES, MirrorPod};
use crate::pod::*;

const UNIT: u64 = 64 << 10;

/// Has a volume move about, while its guest writes and reads, SSDs are slow, and their backend dies, at moments that the seed chooses.
fn run(
    mut pod: MirrorPod,
    seed: u64,
    begin: impl Fn(&mut MirrorPod, usize),
    settled: fn(&MirrorPod) -> bool,
) -> Result<(), String> {
    let mut history = History::new(pod.driver(), seed);
    pod.controls.iter().for_each(|control| control.finish_backwards());
    for round in 0..4 {
        history.work(8);
        begin(&mut pod, round);
        let interrupted = history.below(2);
        for turn in 0..6 {
            pod.stir(&mut history, 300);
            if turn == 3 && interrupted == 0 {
                // The backend of both SSDs dies in the middle.
                let finishes = history.below(2) == 0;
                pod.kill(0, || finishes);
                history.work(4);
                pod.start_backend(0);
                pod.apply_disk();
            }
        }
        pod.controls.iter().for_each(|control| control.hold(false));
        pod.work_until(&mut history, "it never arrived", |pod, _| settled(pod));
        history.work(8);
    }
    pod.until_idle(&mut history);
    history.read_all();
    history.check()
}

#[test]
fn one_order_explains_what_the_guest_sees_while_its_volume_moves_on_its_host() {
    check_seeds(TARGET, 8, |seed| {
        let begin = |pod: &mut MirrorPod, round: usize| {
            let from = pod.places()[0];
            pod.add((from + 1 + round % 2) % 3, Some(from));
        };
        run(MirrorPod::on_one_host(seed + 1, 3), seed, begin, |pod| pod.places().len() == 1)
    });
}

#[test]
fn one_order_explains_what_the_guest_sees_while_a_replica_moves_on_its_host() {
    check_seeds(TARGET, 6, |seed| {
        let begin = |pod: &mut MirrorPod, round: usize| pod.add((round + 1) % 2, Some(round % 2));
        run(MirrorPod::mirrored_on_shared_host(seed + 1), seed, begin, |pod| pod.places().len() == 2)
    });
}

#[test]
fn one_order_explains_what_the_guest_sees_while_a_column_moves_on_its_host() {
    check_seeds(TARGET, 6, |seed| {
        let begin = |pod: &mut MirrorPod, round: usize| pod.move_column(0, (round + 1) % 2);
        run(MirrorPod::striped_on_shared_host(seed + 1, UNIT), seed, begin, |pod| {
            pod.columns().beside.is_none()
        })
    });
}

#[test]
fn a_volume_moves_on_its_host_and_nothing_of_it_is_used_where_it_was() {
    let mut pod = MirrorPod::on_one_host(61, 2);
    let mut driver = pod.driver();
    let places = [0, 600, 1300, MIRROR_BYTES / SECTOR - 8];
    for (seed, sector) in (1..).zip(places) {
        assert_eq!(driver.write_sectors(sector, &pattern(seed, 4096)), OK);
    }
    for (from, to) in [(0, 1), (1, 0)] {
        pod.add(to, Some(from));
        pod.until(|pod| pod.places() == [to]);
        for (seed, sector) in (1..).zip(places) {
            assert_eq!(driver.read_sectors(sector, 4096), pattern(seed, 4096));
            assert_eq!(pod.controls[to].bytes(VOLUME_START + sector * SECTOR, 4096), pattern(seed, 4096));
        }
        eventually(|| pod.dirty_bytes() == 0);
        let before = pod.controls[from].log().len();
        for round in 0..20 {
            let sector = 100 + 8 * round;
            assert_eq!(driver.write_sectors(sector, &pattern(round, 4096)), OK);
            assert_eq!(driver.read_sectors(sector, 4096), pattern(round, 4096));
        }
        assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
        assert_eq!(pod.controls[from].log().len(), before);
    }
}

#[test]
fn a_move_on_a_host_that_is_called_off_leaves_the_volume_where_it_is() {
    let mut pod = MirrorPod::on_one_host(62, 3);
    let mut driver = pod.driver();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    for to in [1, 2, 1] {
        // It has got some of it.
        pod.controls[to].let_pass(3);
        pod.add(to, Some(0));
        eventually(|| pod.controls[to].waiting() > 0);
        (pod.disk.replicas[to].leaving, pod.replaced) = (true, None);
        pod.disk.epoch += 1;
        pod.apply_disk();
        pod.controls[to].hold(false);
        pod.until(|pod| pod.places() == [0]);
        assert_eq!(driver.read_sectors(8, 4096), pattern(1, 4096));
        let before = pod.controls[to].log().len();
        assert_eq!(driver.write_sectors(16, &pattern(to as u64, 4096)), OK);
        assert_eq!(driver.read_sectors(16, 4096), pattern(to as u64, 4096));
        assert_eq!(pod.controls[to].log().len(), before);
    }
}

/// The controller gives the old SSD up as lost when the new one has everything: the guest does not wait for it, and what it still does
/// lands nowhere else.
#[test]
fn what_an_ssd_still_does_keeps_nobody_from_the_other_of_its_host() {
    let mut pod = MirrorPod::on_one_host(63, 2);
    let mut driver = pod.driver();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.add(1, Some(0));
    pod.until(|pod| pod.synced == 1);
    let told = pod.controls[1].log().len();
    // A write that the new one has carried out, and a copy of which the old one keeps.
    pod.controls[0].hold(true);
    driver.write(driver.place(0).data, &pattern(2, 4096));
    let write = driver.offer(0, 0, T_OUT, 8, 4096);
    eventually(|| pod.controls[0].waiting() > 0 && pod.controls[1].log().len() > told);
    pod.lose(0);
    assert_eq!(driver.answer(0, 0, write), (OK, 1));
    for round in 0..10 {
        assert_eq!(driver.write_sectors(8, &pattern(10 + round, 4096)), OK);
        assert_eq!(driver.read_sectors(8, 4096), pattern(10 + round, 4096));
    }
    pod.controls[0].hold(false);
    assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
    assert_eq!(driver.read_sectors(8, 4096), pattern(19, 4096));
}

/// The new place of a volume bears another name when the old one is gone. What its device got before, it got by the name that nobody
/// has now.
#[test]
fn a_place_is_not_given_on_before_its_device_has_ended_what_it_got_by_another_name() {
    let mut pod = MirrorPod::on_one_host(65, 2);
    let mut driver = pod.driver();
    assert_eq!(driver.write_sectors(8, &pattern(1, 4096)), OK);
    pod.add(1, Some(0));
    pod.until(|pod| pod.synced == 1);
    pod.controls[1].hold(true);
    driver.write(driver.place(0).data, &pattern(2, 4096));
    driver.offer(0, 0, T_OUT, 8, 4096);
    eventually(|| pod.controls[1].waiting() == 1);
    pod.until(|pod| pod.places() == [1]);
    // The instance is deleted.
    let volume = ObjectId::Volume(PlaceId::first(pod.disk.lease));
    pod.frontend.as_mut().unwrap().remove(ObjectId::Disk(pod.disk.lease)).unwrap();
    let backend = pod.backends[0].as_mut().unwrap();
    assert!(backend.remove(volume.clone()).is_err(), "a write is still under way there");
    pod.controls[1].hold(false);
    eventually(|| backend.remove(volume.clone()).is_ok());
}

/// A frontend that has not heard yet which of both places is the column has what is under way answered, by whichever is asked.
#[test]
fn a_column_that_moves_on_its_host_is_where_its_data_is() {
    let mut pod = MirrorPod::striped_on_shared_host(64, UNIT);
    let mut driver = pod.driver();
    let model = pattern(64, MIRROR_BYTES as usize);
    for (sector, part) in (0..).step_by(1024).zip(model.chunks(512 << 10)) {
        assert_eq!(driver.write_sectors(sector, part), OK);
    }
    for (to, left) in [(1, 0), (0, 1)] {
        pod.move_column(0, to);
        pod.until(|pod| pod.columns().beside.is_none());
        assert_eq!(pod.columns().at, [to, 2]);
        assert!(pod.striped_bytes() == model);
        let before = pod.controls[left].log().len();
        for sector in (0..MIRROR_BYTES / SECTOR).step_by(1024) {
            let at = (sector * SECTOR) as usize;
            assert!(driver.read_sectors(sector, 512 << 10) == model[at..at + (512 << 10)]);
        }
        assert_eq!(driver.request(T_FLUSH, 0, 0).0, OK);
        assert_eq!(pod.controls[left].log().len(), before);
        assert!(pod.controls[to].log().iter().any(|it| it.operation == Operation::Flush));
    }
}
