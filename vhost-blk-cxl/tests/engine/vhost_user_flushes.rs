//! A target of the `vhost-user` driver that could not write what it has in its cache, says so to one of several volumes, and forgets it.

use cxl_pool::HardwareMemory;
use pod_protocol::endpoint::Handler;
use pod_protocol::objects::Object;
use vhost_blk_cxl::message::Operation;
use vhost_blk_cxl::ssd::{Outcome, Ssd};

use crate::neighbours::second;
use crate::pod::*;
use crate::vhost_user_ssd::{Bench, Target, connect, pool};

const MIB: u64 = 1 << 20;
const WRITABLE: &str = ",writable=on";

#[test]
fn a_flush_that_failed_is_a_loss_of_all_volumes() {
    let target = Target::start_failing_a_flush(VOLUME_START + VOLUME_BYTES, WRITABLE);
    let pool = pool();
    let mut pod: Pod<HardwareMemory> = Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
    pod.start(Box::new(connect(&target, &pool)));
    let (disk, volume) = second(&pod, "ssd0");
    pod.backend.as_mut().unwrap().apply(Object::Volume(volume)).unwrap();
    pod.frontend.as_mut().unwrap().apply(Object::Disk(disk.clone())).unwrap();
    let mut first = Driver::connected(&pod);
    let mut other = Driver::new(2, 128);
    other.guest.connect(&pod.run.sockets().join(&disk.socket), ALL_FEATURES);
    let data = pattern(1, 4096);
    for driver in [&mut first, &mut other] {
        assert_eq!(driver.write_sectors(8, &data), OK);
    }
    assert_eq!(first.request(T_FLUSH, 0, 0).0, IOERR, "it is told");
    assert_eq!(other.request(T_FLUSH, 0, 0).0, IOERR, "what it wrote may be lost, too");
    // They write it once more.
    for driver in [&mut first, &mut other] {
        assert_eq!(driver.write_sectors(8, &data), OK);
    }
    eventually(|| first.request(T_FLUSH, 0, 0).0 == OK);
    assert_eq!(other.request(T_FLUSH, 0, 0).0, OK, "nothing is lost since");
    assert_eq!(other.read_sectors(8, 4096), data);
}

#[test]
fn after_a_flush_that_failed_the_verifier_is_another_one_also_of_a_backend_that_is_restarted() {
    for through in [false, true] {
        let target = Target::start_failing_a_flush(8 * MIB, WRITABLE);
        let noted = target.beside("locks/h1-ssd-ssd0.lost");
        let open = || {
            let mut bench = Bench::connect(&target);
            bench.ssd = bench.ssd.noting_losses_in(noted.clone());
            bench
        };
        let mut bench = open();
        let before = bench.ssd.write_verifier();
        let mut write = bench.command(0, Operation::Write, 0, 4096);
        assert_eq!(bench.run(write), Outcome::Done);
        assert_eq!(bench.ssd.write_verifier(), before);
        write.force_unit_access = through;
        let flush = bench.command(1, Operation::Flush, 0, 0);
        let fails = if through { write } else { flush };
        assert_eq!(bench.run(fails), Outcome::Failed);
        assert_eq!(bench.ssd.write_verifier(), before, "what was reaped with it was written before");
        assert_eq!(bench.run(flush), Outcome::Done, "it is not said twice");
        let after = bench.ssd.write_verifier();
        assert_ne!(after, before, "what was not flushed before may be lost");
        assert_eq!(bench.ssd.failure(), None);
        assert_eq!(bench.run(write), Outcome::Done);
        assert_eq!(bench.ssd.write_verifier(), after, "nothing is lost since");
        drop(bench);
        assert_eq!(open().ssd.write_verifier(), after);
    }
}
