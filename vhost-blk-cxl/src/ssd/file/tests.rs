//! Of the driver without a kernel, and with one that failed.

use super::*;

fn slot(operation: Operation, stage: Stage, force_unit_access: bool) -> Slot {
    let command = Command {
        id: CommandId(0),
        operation,
        force_unit_access,
        may_unmap: false,
        offset_bytes: 0,
        length_bytes: 8192,
        data: ByteOffset::new(0),
    };
    Slot { command, stage, retries: 0 }
}

#[track_caller]
fn expect(slot: Slot, result: i32, expected: Result<Stage, Outcome>) {
    let next = match follow(&slot, result, 512) {
        Next::Step(stage) => Ok(stage),
        Next::End(outcome) => Err(outcome),
    };
    assert_eq!(next, expected);
}

#[test]
fn a_short_transfer_goes_on_at_a_block() {
    let read = |done| slot(Operation::Read, Stage::Move { done }, false);
    expect(read(0), 8192, Err(Outcome::Done));
    expect(read(0), 4096, Ok(Stage::Move { done: 4096 }));
    expect(read(4096), 1000, Ok(Stage::Move { done: 4608 }));
    expect(read(4096), 4096, Err(Outcome::Done));
    for nothing in [0, 511, -libc::EIO, -libc::ENOSPC] {
        expect(read(4096), nothing, Err(Outcome::Failed));
    }
}

#[test]
fn what_a_file_system_cannot_do_is_done_otherwise() {
    let discard = slot(Operation::Discard, Stage::Punch, false);
    expect(discard, -libc::EOPNOTSUPP, Err(Outcome::Done));
    expect(discard, -libc::EIO, Err(Outcome::Failed));
    let forget = slot(Operation::Discard, Stage::Forget, false);
    for cannot in [libc::EOPNOTSUPP, libc::EBUSY, libc::EREMOTEIO] {
        expect(forget, -cannot, Err(Outcome::Done));
    }
    expect(forget, -libc::EIO, Err(Outcome::Failed));
    for (stage, otherwise) in [(Stage::Punch, Stage::Zero), (Stage::Zero, Stage::Move { done: 0 })] {
        let zeroes = slot(Operation::WriteZeroes, stage, true);
        expect(zeroes, -libc::EOPNOTSUPP, Ok(otherwise));
        expect(zeroes, 0, Ok(Stage::Sync));
        expect(zeroes, -libc::ENOSPC, Err(Outcome::Failed));
    }
    assert!(matches!(
        step(&slot(Operation::WriteZeroes, Stage::Move { done: 4096 }, true)),
        Step::WriteZeros { at: 4096, bytes: 4096, force_unit_access: true }
    ));
}

/// A device of which this command is under way, and the directory that it lies in.
fn working_on(slot: Slot) -> (FileSsd, tempfile::TempDir) {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = cxl_pool::CreateOptions { size_bytes: Some(32 << 20), ..Default::default() };
    let pool = Pool::create(&directory.path().join("pool"), &options).unwrap();
    let mut ssd = FileSsd::open("ssd0", &directory.path().join("ssd"), Some(1 << 20), &pool).unwrap();
    ssd.slots = vec![Some(slot)];
    ssd.lists = vec![Vec::new()];
    ssd.in_flight = 1;
    (ssd, directory)
}

#[test]
fn a_device_that_cannot_make_holes_of_zeros_says_so_from_then_on() {
    for (result, writes) in [(-libc::EBUSY, false), (-libc::EOPNOTSUPP, true)] {
        let (mut ssd, _directory) = working_on(slot(Operation::WriteZeroes, Stage::Punch, false));
        assert!(!ssd.writes_zeroes());
        assert_eq!(ssd.ended(0, result), None, "it is done otherwise");
        assert_eq!(ssd.writes_zeroes(), writes);
    }
}

const FAILED: Finished = Finished { id: CommandId(0), outcome: Outcome::Failed };

#[test]
fn a_device_that_could_not_flush_is_given_up() {
    let flush = slot(Operation::Flush, Stage::Sync, false);
    let (mut ssd, _directory) = working_on(flush);
    assert_eq!(ssd.ended(0, -libc::EIO), Some(FAILED));
    assert!(ssd.failure().is_some_and(|reason| reason.contains("flush")));
    let mut finished = Vec::new();
    ssd.submit(flush.command).unwrap();
    ssd.reap(&mut finished);
    assert_eq!(finished, [FAILED]);
}

/// The kernel says nothing about what it could not write to whoever opens the file next.
#[test]
fn what_it_lost_is_known_when_it_is_opened_again() {
    let flush = slot(Operation::Flush, Stage::Sync, false);
    let (ssd, directory) = working_on(flush);
    let (path, pool) = (directory.path().join("ssd"), directory.path().join("pool"));
    let pool = Pool::open(&pool).unwrap();
    let losses = directory.path().join("locks/h1-ssd-ssd0.lost");
    drop(ssd);
    let open = || FileSsd::open("ssd0", &path, None, &pool).unwrap().noting_losses_in(losses.clone());
    let before = open().write_verifier();
    let mut ssd = open();
    assert_eq!(ssd.write_verifier(), before, "nothing happened");
    (ssd.slots, ssd.lists, ssd.in_flight) = (vec![Some(flush)], vec![Vec::new()], 1);
    assert_eq!(ssd.ended(0, -libc::EIO), Some(FAILED));
    drop(ssd);
    let after = open().write_verifier();
    assert_ne!(after, before);
    assert_eq!(open().write_verifier(), after, "nothing happened since");
}

/// It may have collected the error of what others wrote, of which no later flush hears.
#[test]
fn so_is_one_that_failed_a_write_through_its_cache() {
    for operation in [Operation::Write, Operation::WriteZeroes] {
        for (cached, through) in [(true, true), (true, false), (false, true)] {
            let (mut ssd, _directory) = working_on(slot(operation, Stage::Move { done: 0 }, through));
            ssd.cached = cached;
            assert_eq!(ssd.ended(0, -libc::EIO), Some(FAILED));
            assert_eq!(ssd.failure().is_some(), cached && through, "{operation:?}, {cached}, {through}");
        }
    }
}
