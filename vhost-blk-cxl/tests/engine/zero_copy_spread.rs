//! Guests whose memory lies in the pool, with disks in several places: what is not copied of striped ones, and that mirrors copy.

use cxl_pool::simulated::Random;
use cxl_pool::{Memory, Pool};
use pod_protocol::endpoint::Handler;
use pod_protocol::ids::ChannelId;
use pod_protocol::objects::{ObjectId, ReplicaObject};
use pod_protocol::reports::Report;
use vhost_blk_cxl::message::Operation;
use vhost_frontend::mock::Piece;

use crate::pod::in_pool::SpreadPod;
use crate::pod::*;
use crate::zero_copy::{pool, with_both_memories};

const UNIT: u64 = 64 << 10;
fn striped<M: Memory>(memory: &M, pool: Pool) -> SpreadPod<M> {
    SpreadPod::new(pool, memory, (2, 2), Some(UNIT))
}

with_both_memories! {
    parts_of_what_lies_in_one_piece_are_not_copied => one_piece;
    each_part_has_a_list_of_its_own => lists;
    there_is_room_for_the_lists_of_all_parts => many_lists;
    memory_that_one_column_may_still_fill_is_not_given_back => failed;
    what_no_column_has_is_given_back => not_begun;
    nor_is_it_while_one_of_the_channels_begins_anew => failed_anew;
    a_vmm_that_comes_back_waits_for_each_column => reconnected;
    while_a_column_moves_all_is_copied => moved;
    what_was_taken_before_a_column_moves_goes_to_the_column_only => moved_meanwhile;
    a_read_begins_anew_when_nobody_fills_its_memory_any_more => let_go;
    a_mirror_copies_and_the_disk_that_it_becomes_does_not => mirrored;
}

fn one_piece<M: Memory>(memory: &M, pool: Pool) {
    let setup = striped(memory, pool);
    let mut driver = setup.connected();
    for (round, (sector, bytes)) in
        [(0, 512), (1, 4608), (127, 1024), (100, 128 << 10), (0, 512 << 10)].into_iter().enumerate()
    {
        let data = pattern(round as u64, bytes);
        assert_eq!(driver.write_sectors(sector, &data), OK);
        assert!(setup.stored(sector * SECTOR, bytes) == data);
        assert!(driver.read_sectors(sector, bytes as u32) == data);
    }
    assert_eq!(setup.direct_listed_and_bounced(), (2 * (1 + 1 + 2 + 3 + 8), 0, 0));
    setup.controls[1].fail(true);
    assert_eq!(driver.request(T_IN, 0, 2 * UNIT as u32).0, IOERR);
    assert_eq!(driver.request(T_IN, 0, UNIT as u32).0, OK);
}

fn lists<M: Memory>(memory: &M, pool: Pool) {
    const PIECE_BYTES: u64 = 64 << 10;
    let setup = striped(memory, pool);
    let mut driver = setup.connected();
    let mut random = Random::new(17);
    let place = driver.place(0);
    for round in 0..150 {
        let mut places: Vec<u64> = (0..14).collect();
        let pieces: Vec<(u64, u32)> = (0..=random.below(12))
            .map(|_| {
                let at = places.swap_remove(random.below(places.len() as u64) as usize) * PIECE_BYTES;
                (at + random.below(64) * SECTOR, (1 + random.below(64)) as u32 * SECTOR as u32)
            })
            .collect();
        let bytes: u32 = pieces.iter().map(|it| it.1).sum();
        let sector = random.below((VOLUME_BYTES - u64::from(bytes)) / SECTOR);
        let data = pattern(round, bytes as usize);
        for kind in [T_OUT, T_IN] {
            let mut around = pattern(1000 + round, 15 * PIECE_BYTES as usize);
            driver.write(place.data, &around);
            let mut left = &data[..];
            for &(at, bytes) in &pieces {
                let (piece, rest) = left.split_at(bytes as usize);
                around[at as usize..][..piece.len()].copy_from_slice(piece);
                left = rest;
            }
            if kind == T_OUT {
                driver.write(place.data, &around);
            }
            driver.write_header(place, kind, sector);
            let writable = kind == T_IN;
            let mut chain = vec![Piece { address: place.header, bytes: 16, writable: false }];
            chain.extend(pieces.iter().map(|&(at, bytes)| Piece {
                address: place.data + at,
                bytes,
                writable,
            }));
            chain.push(Piece { address: place.status, bytes: 1, writable: true });
            let head = driver.guest.offer(0, &chain, None);
            assert_eq!(driver.answer(0, 0, head).0, OK, "round {round}");
            assert!(setup.stored(sector * SECTOR, data.len()) == data, "round {round}: written elsewhere");
            assert!(driver.read(place.data, around.len()) == around, "round {round}: something else is read");
        }
    }
    let (direct, listed, bounced) = setup.direct_listed_and_bounced();
    assert!(direct > 100 && listed > 500 && bounced == 0, "{direct} {listed} {bounced}");
}

/// The lists of many small parts take up more room than one list of all would.
fn many_lists<M: Memory>(memory: &M, pool: Pool) {
    const PIECE_BYTES: u32 = 4096 - 512;
    const PIECES: u64 = 120;
    let mut setup = SpreadPod::new(pool, memory, (2, 2), Some(4096));
    let mut driver = setup.connected();
    // Those of the second column are written before any of them is read.
    setup.channel_at_frontend(1);
    let heads = [0, 1].map(|index| {
        let place = driver.place(index);
        let bytes = PIECES * u64::from(PIECE_BYTES);
        driver.write(place.data, &pattern(index, PIECES as usize * 4096));
        driver.write_header(place, T_OUT, index * 2 * bytes.next_multiple_of(4096) / SECTOR);
        let mut chain = vec![Piece { address: place.header, bytes: 16, writable: false }];
        let piece =
            |number| Piece { address: place.data + number * 4096, bytes: PIECE_BYTES, writable: false };
        chain.extend((0..PIECES).map(piece));
        chain.push(Piece { address: place.status, bytes: 1, writable: true });
        driver.guest.offer(index as usize, &chain, None)
    });
    eventually(|| setup.not_copied() == 2);
    setup.channel_at_backend(1);
    for (index, head) in (0..).zip(heads) {
        assert_eq!(driver.answer(index, index as u64, head), (OK, 1), "request {index}");
    }
    assert_eq!(setup.bounced(), 0);
}

/// Each column has a part of a read of the first queue's, and the second one a write.
fn holding<M: Memory>(memory: &M, pool: Pool) -> (SpreadPod<M>, Driver, [u16; 2]) {
    let setup = striped(memory, pool);
    let mut driver = setup.connected();
    setup.hold(true);
    let read = driver.offer(0, 1, T_IN, 0, 2 * UNIT as u32);
    let write = driver.offer(1, 2, T_OUT, 3 * UNIT / SECTOR, 4096);
    eventually(|| setup.waiting() == 3);
    (setup, driver, [read, write])
}

fn failed<M: Memory>(memory: &M, pool: Pool) {
    let (mut setup, mut driver, [read, write]) = holding(memory, pool);
    setup.pod.disk.failed = true;
    setup.pod.apply_disk();
    assert_eq!(driver.answer(1, 2, write), (IOERR, 1));
    assert_eq!(driver.guest.wait_used(0, QUIET), None, "the devices may write there at any time");
    setup.controls[0].hold(false);
    assert_eq!(driver.guest.wait_used(0, QUIET), None, "one of them still may");
    setup.controls[1].hold(false);
    assert_eq!(driver.answer(0, 1, read), (OK, 2 * UNIT as u32 + 1));
    // The hosts are written off while they have one.
    setup.pod.disk.failed = false;
    setup.pod.apply_disk();
    setup.hold(true);
    let lost = driver.offer(0, 1, T_IN, 0, 2 * UNIT as u32);
    eventually(|| setup.waiting() == 2);
    setup.pod.disk.failed = true;
    setup.pod.apply_disk();
    for channel in 1..=2 {
        assert_eq!(driver.guest.wait_used(0, QUIET), None);
        let channel = ObjectId::Channel(ChannelId::new(channel));
        setup.pod.frontend.as_mut().unwrap().remove(channel).unwrap();
    }
    assert_eq!(driver.answer(0, 1, lost), (IOERR, 1));
    setup.hold(false);
}

fn not_begun<M: Memory>(memory: &M, pool: Pool) {
    let mut setup = striped(memory, pool);
    let mut driver = setup.connected();
    assert_eq!(driver.request(T_IN, 0, 512).0, OK);
    // The backend of the second column is away.
    setup.channel_at_frontend(1);
    let read = driver.offer(0, 1, T_IN, 0, 2 * UNIT as u32);
    assert_eq!(driver.guest.wait_used(0, QUIET), None);
    setup.pod.disk.failed = true;
    setup.pod.apply_disk();
    assert_eq!(driver.answer(0, 1, read), (IOERR, 1));
}

#[test]
fn a_vmm_that_stops_a_disk_waits_for_no_column_that_has_nothing_of_it() {
    let pool = pool();
    let memory = pool.hardware();
    let mut setup = striped(&memory, pool);
    let mut driver = setup.connected();
    setup.channel_at_frontend(1);
    driver.offer(0, 1, T_IN, 0, 2 * UNIT as u32);
    eventually(|| !setup.controls[0].log().is_empty());
    // As long as it has patience it does.
    driver.guest.stop_ring(0);
    assert_eq!(driver.status(1), IOERR);
}

fn failed_anew<M: Memory>(memory: &M, pool: Pool) {
    let (mut setup, mut driver, [read, write]) = holding(memory, pool);
    // Both of the second column are to be sent again, and the device still has them.
    setup.channel_at_frontend(1);
    setup.pod.disk.failed = true;
    setup.pod.apply_disk();
    assert_eq!(driver.answer(1, 2, write), (IOERR, 1));
    setup.controls[0].hold(false);
    assert_eq!(driver.guest.wait_used(0, QUIET), None, "the device may write there at any time");
    setup.channel_at_backend(1);
    assert_eq!(driver.guest.wait_used(0, QUIET), None, "the device may still write there");
    setup.controls[1].hold(false);
    assert_eq!(driver.answer(0, 1, read), (IOERR, 1));
    let commands = setup.controls.iter().map(|control| control.log().len()).sum::<usize>();
    assert_eq!(commands, 3, "nothing is done again that was given up");
}

fn reconnected<M: Memory>(memory: &M, pool: Pool) {
    let setup = striped(memory, pool);
    let mut driver = setup.connected();
    let data = pattern(9, 2 * UNIT as usize);
    assert_eq!(driver.write_sectors(0, &data), OK);
    setup.hold(true);
    let head = driver.offer(0, 1, T_IN, 0, 2 * UNIT as u32);
    eventually(|| setup.waiting() == 2);
    driver.guest.disconnect();
    driver.guest.connect(&setup.pod.socket(), ALL_FEATURES);
    setup.controls[0].hold(false);
    assert_eq!(driver.guest.wait_used(0, QUIET), None);
    assert_eq!(setup.waiting(), 1, "it is not asked for again while a part is under way");
    setup.controls[1].hold(false);
    assert_eq!(driver.answer(0, 1, head), (OK, 2 * UNIT as u32 + 1));
    assert!(driver.read(driver.place(1).data, data.len()) == data);
    let log = setup.controls.iter().flat_map(|control| control.log());
    let reads = log.filter(|command| command.operation == Operation::Read).count();
    assert_eq!(reads, 4, "the in-flight region had it done again");
}

fn moved<M: Memory>(memory: &M, pool: Pool) {
    let mut setup = SpreadPod::new(pool, memory, (2, 3), Some(UNIT));
    let mut driver = setup.connected();
    let data = pattern(4, 4 * UNIT as usize);
    assert_eq!(driver.write_sectors(0, &data), OK);
    setup.controls[0].keep_reads_at(Some(VOLUME_START + 4096));
    let read = driver.offer(1, 1, T_IN, 8, 4096);
    eventually(|| setup.controls[0].keeps_any());
    assert_eq!(setup.bounced(), 0);
    let place = ReplicaObject { in_sync: false, ..SpreadPod::place(&setup.pod, 0, 2) };
    (setup.pod.disk.beside, setup.pod.disk.epoch) = (Some(place.clone()), 1);
    setup.pod.apply_disk();
    eventually(|| setup.dirty_bytes() == 0);
    assert!(setup.bounced() > 0, "it is copied from device to device");
    // In the place that comes as in the column, whatever the guest does with its memory meanwhile.
    let (direct, listed, bounced) = setup.direct_listed_and_bounced();
    let newer = pattern(5, UNIT as usize);
    let sector = 2 * UNIT / SECTOR;
    assert_eq!(driver.write_sectors(sector, &newer), OK);
    assert!(driver.read_sectors(sector, UNIT as u32) == newer);
    assert_eq!(setup.direct_listed_and_bounced(), (direct, listed, bounced + 3));
    let is_synced = |report: &Report| matches!(report, Report::ReplicaSynced { replica: 0, .. });
    std::thread::sleep(QUIET);
    assert!(!setup.was_told(is_synced), "a read has the guest's memory, and cannot begin anew elsewhere");
    setup.controls[0].keep_reads_at(None);
    assert_eq!(driver.answer(1, 1, read), (OK, 4097));
    assert!(driver.read(driver.place(1).data, 4096) == data[4096..8192]);
    eventually(|| setup.was_told(is_synced));
    let bytes = VOLUME_BYTES as usize / 2;
    assert!(setup.controls[2].bytes(VOLUME_START, bytes) == setup.controls[0].bytes(VOLUME_START, bytes));
    // It is the column now.
    let left = std::mem::replace(&mut setup.pod.disk.replicas[0], ReplicaObject { in_sync: true, ..place });
    setup.pod.disk.beside = Some(ReplicaObject { leaving: true, in_sync: false, ..left });
    setup.pod.disk.epoch = 2;
    setup.pod.apply_disk();
    eventually(|| setup.was_told(|report| matches!(report, Report::ReplicaLeft { replica: 0, .. })));
    (setup.pod.disk.beside, setup.pod.disk.epoch) = (None, 3);
    setup.pod.apply_disk();
    let (direct, listed, bounced) = setup.direct_listed_and_bounced();
    assert!(driver.read_sectors(sector, 2 * UNIT as u32) == [&newer, &data[3 * UNIT as usize..]].concat());
    assert_eq!(setup.direct_listed_and_bounced(), (direct + 2, listed, bounced));
}

/// The controller has it that the column has moved, of which a predecessor of the frontend had told it.
fn let_go<M: Memory>(memory: &M, pool: Pool) {
    let mut setup = SpreadPod::new(pool, memory, (2, 3), Some(UNIT));
    let mut driver = setup.connected();
    let data = pattern(4, 4 * UNIT as usize);
    assert_eq!(driver.write_sectors(0, &data), OK);
    setup.controls[0].keep_reads_at(Some(VOLUME_START + 4096));
    let read = driver.offer(1, 1, T_IN, 8, 4096);
    eventually(|| setup.controls[0].keeps_any());
    let place = ReplicaObject { in_sync: false, ..SpreadPod::place(&setup.pod, 0, 2) };
    (setup.pod.disk.beside, setup.pod.disk.epoch) = (Some(place.clone()), 1);
    setup.pod.apply_disk();
    eventually(|| setup.dirty_bytes() == 0);
    let left = std::mem::replace(&mut setup.pod.disk.replicas[0], ReplicaObject { in_sync: true, ..place });
    setup.pod.disk.beside = Some(ReplicaObject { leaving: true, in_sync: false, ..left });
    setup.pod.disk.epoch = 2;
    setup.pod.apply_disk();
    (setup.pod.disk.beside, setup.pod.disk.epoch) = (None, 3);
    setup.pod.apply_disk();
    assert_eq!(driver.guest.wait_used(1, QUIET), None, "the device that is none of it may fill its memory");
    let asked =
        |setup: &SpreadPod<M>| setup.controls[2].log().iter().any(|it| it.operation == Operation::Read);
    assert!(!asked(&setup));
    setup.controls[0].keep_reads_at(None);
    assert_eq!(driver.answer(1, 1, read), (OK, 4097));
    assert!(asked(&setup), "the column has it now");
    assert!(driver.read(driver.place(1).data, 4096) == data[4096..8192]);
}

/// Of more parts than there may be at a time, the last ones are sent when the column moves already, and most of it was copied.
fn moved_meanwhile<M: Memory>(memory: &M, pool: Pool) {
    const BYTES: u32 = (1 << 20) - 4096;
    let mut setup = SpreadPod::new(pool, memory, (2, 3), Some(4096));
    let mut driver = setup.connected();
    setup.hold(true);
    let requests = u64::from(2 * 4096 / (BYTES / 4096) + 2);
    for index in 0..requests {
        driver.write(driver.place(index).data, &pattern(index, BYTES as usize));
        let kind = if index + 1 == requests { T_OUT } else { T_IN };
        // Reads may meet.
        let sector = if kind == T_OUT { VOLUME_BYTES / 2 / SECTOR } else { 0 };
        driver.offer(0, index, kind, sector, BYTES);
    }
    eventually(|| setup.not_copied() == requests);
    let place = ReplicaObject { in_sync: false, ..SpreadPod::place(&setup.pod, 0, 2) };
    (setup.pod.disk.beside, setup.pod.disk.epoch) = (Some(place), 1);
    setup.pod.apply_disk();
    // The other column takes up all the room for parts.
    setup.controls[0].hold(false);
    setup.controls[2].hold(false);
    eventually(|| setup.dirty_bytes() == 0);
    setup.hold(false);
    for _ in 0..requests {
        driver.guest.wait_used(0, PATIENCE).expect("an answer");
    }
    assert!((0..requests).all(|index| driver.status(index) == OK));
    eventually(|| setup.was_told(|report| matches!(report, Report::ReplicaSynced { replica: 0, .. })));
    let bytes = VOLUME_BYTES as usize / 2;
    assert!(setup.controls[2].bytes(VOLUME_START, bytes) == setup.controls[0].bytes(VOLUME_START, bytes));
    for given in setup.controls[2].given() {
        let data = given.list.first().map_or(given.command.data, |segment| segment.start);
        assert!(!setup.ram.contains(data, 512), "two places have what the guest may change: {given:?}");
    }
}

fn mirrored<M: Memory>(memory: &M, pool: Pool) {
    let mut setup = SpreadPod::new(pool, memory, (2, 2), None);
    let mut driver = setup.connected();
    let data = pattern(6, 64 << 10);
    assert_eq!(driver.write_sectors(64, &data), OK);
    assert!(driver.read_sectors(64, 64 << 10) == data);
    let (direct, listed, bounced) = setup.direct_listed_and_bounced();
    assert!((direct, listed) == (0, 0) && bounced >= 3);
    eventually(|| setup.dirty_bytes() == 0);
    // One place is left.
    setup.pod.disk.replicas.clear();
    (setup.pod.disk.number, setup.pod.disk.epoch) = (Some(0), 1);
    setup.pod.apply_disk();
    let bounced = setup.bounced();
    assert!(driver.read_sectors(64, 64 << 10) == data);
    assert_eq!(setup.direct_listed_and_bounced(), (1, 0, bounced));
    // And two again.
    setup.pod.disk.replicas = (0..2).map(|number| SpreadPod::place(&setup.pod, number, number)).collect();
    setup.pod.disk.replicas[1].in_sync = false;
    (setup.pod.disk.number, setup.pod.disk.epoch) = (None, 2);
    setup.pod.apply_disk();
    assert!(driver.read_sectors(64, 64 << 10) == data);
    assert_eq!(setup.direct_listed_and_bounced().0, 1);
}
