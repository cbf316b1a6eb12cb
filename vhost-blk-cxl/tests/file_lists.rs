//! The `file` driver with data in several places of the pool.

#![allow(clippy::cast_possible_truncation, reason = "small numbers, chosen by the test")]

mod pod;

use std::fs;

use cxl_pool::Memory;
use cxl_pool::simulated::Random;
use pod::file_bench::{Bench, MIB, directories};
use pod::pattern;
use vhost_blk_cxl::message::Operation;
use vhost_blk_cxl::segments::Segment;
use vhost_blk_cxl::ssd::{FileSsd, Outcome, Ssd, VolatileCacheOptions};

/// Reads and writes whose data lies here and there, among others, on files past the page cache, in memory, and below a cache that
/// forgets. On the file in memory some are too long to be carried out by system calls.
#[test]
fn data_in_several_places_is_the_model() {
    const LENGTH_MAX: u64 = 512 << 10;
    for kind in 0..3 {
        let directory = &directories()[usize::from(kind == 1)];
        let path = directory.path().join("ssd.img");
        let mut bench = Bench::open(&path, 8 * MIB);
        if kind == 2 {
            let pool = bench.pool.clone();
            drop(bench);
            fs::remove_file(&path).unwrap();
            let cache = VolatileCacheOptions::new(7);
            bench = Bench::with(
                FileSsd::open_volatile("ssd0", &path, Some(8 * MIB), &pool, cache).unwrap(),
                pool,
            );
        }
        let block = u64::from(bench.ssd.geometry().block_bytes);
        let mut model = vec![0; 8 << 20];
        let mut random = Random::new(kind);
        for round in 0..24 {
            // Places in the pool that follow each other, dealt to segments in any order; each command has its part of the device.
            let mut places: Vec<u64> = (0..16 * MIB / (64 << 10)).collect();
            let mut given = Vec::new();
            for id in 0..8 {
                let mut segments = Vec::new();
                let mut length = 0;
                let count = if random.one_in(4) { 30 } else { 4 };
                for _ in 0..=random.below(count) {
                    let place =
                        places.swap_remove(usize::try_from(random.below(places.len() as u64)).unwrap());
                    let most = (if random.one_in(3) { 64 << 10 } else { 4096 }) / block;
                    let bytes = block * (1 + random.below(most));
                    if length + bytes > LENGTH_MAX {
                        break;
                    }
                    let start = bench.data.start_byte().saturating_add(place * (64 << 10));
                    segments.push(Segment { start, bytes: bytes as u32 });
                    length += bytes;
                }
                let operation = if random.one_in(2) { Operation::Write } else { Operation::Read };
                let at = u64::from(id) * MIB + block * random.below((MIB - length) / block);
                let mut command = bench.command(id, operation, at, length);
                command.force_unit_access = operation == Operation::Write && random.one_in(4);
                let data = pattern(round << 8 | u64::from(id), length as usize);
                let here = &mut model[at as usize..(at + length) as usize];
                let mut left = &data[..];
                for segment in &segments {
                    let (piece, rest) = left.split_at(segment.bytes as usize);
                    bench.memory.write(segment.start, piece);
                    left = rest;
                }
                let expected = if operation == Operation::Write {
                    here.copy_from_slice(&data);
                    data
                } else {
                    here.to_vec()
                };
                bench.ssd.submit_list(command, &segments).unwrap();
                given.push((segments, expected));
            }
            // Some without.
            let plain = bench.command(40, Operation::Flush, 0, 0);
            bench.ssd.submit(plain).unwrap();
            let finished = bench.finish(9);
            assert!(finished.iter().all(|done| done.outcome == Outcome::Done), "{finished:?}");
            for (segments, expected) in given {
                let mut found = Vec::new();
                for segment in segments {
                    let mut piece = vec![0; segment.bytes as usize];
                    bench.memory.read(segment.start, &mut piece);
                    found.extend(piece);
                }
                assert!(found == expected, "kind {kind}, round {round}");
            }
        }
        for at in (0..8 * MIB).step_by(MIB as usize) {
            assert_eq!(bench.read(at, 1 << 20), model[at as usize..][..1 << 20]);
        }
        // Beyond the end.
        let segments = [Segment { start: bench.data.start_byte(), bytes: 4096 }; 2];
        let beyond = bench.command(0, Operation::Read, 8 * MIB - 4096, 8192);
        if kind < 2 {
            bench.ssd.submit_list(beyond, &segments).unwrap();
            assert_eq!(bench.finish(1)[0].outcome, Outcome::Failed);
        }
    }
}
