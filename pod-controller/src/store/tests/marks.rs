//! What is left of acknowledged transactions when a controller is killed, when the power fails, and when the disk damages what was
//! written last.

use std::io;
use std::sync::{Mutex, PoisonError};

use cxl_pool::simulated::Random;
use redb::StorageBackend;

use super::*;

const NUMBERS: TableDefinition<u64, &[u8]> = TableDefinition::new("some numbers");
/// So long that what belongs together is soon in several pages.
const VALUE: [u8; 900] = [7; 900];
/// Where the two marks are, and what they take.
const MARKS: [usize; 2] = [1024, 2048];
const MARK_BYTES: usize = 20;
/// What reaches a disk whole or not at all.
const SECTOR: usize = 512;

/// What was done to a disk.
#[derive(Clone, Debug)]
enum Done {
    Length(usize),
    Write(usize, Vec<u8>),
    Flush,
    /// All up to this number was acknowledged.
    Acknowledged(u64),
}

/// A disk that knows how it came to be what it is.
#[derive(Clone, Debug, Default)]
struct Disk(Arc<Mutex<(Vec<u8>, Vec<Done>)>>);

impl Disk {
    fn of(content: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new((content, Vec::new()))))
    }

    fn with<T>(&self, look: impl FnOnce(&mut Vec<u8>, &mut Vec<Done>) -> T) -> T {
        let mut both = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (content, done) = &mut *both;
        look(content, done)
    }

    fn content(&self) -> Vec<u8> {
        self.with(|content, _| content.clone())
    }

    fn done(&self) -> Vec<Done> {
        self.with(|_, done| done.clone())
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.with(|content, _| content.len() as u64))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(offset).expect("an offset");
        self.with(|content, _| {
            let there = content.get(from..from + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            out.copy_from_slice(there);
            Ok(())
        })
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let length = usize::try_from(len).expect("a length");
        self.with(|content, done| {
            content.resize(length, 0);
            done.push(Done::Length(length));
        });
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.with(|_, done| done.push(Done::Flush));
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let from = usize::try_from(offset).expect("an offset");
        self.with(|content, done| {
            content[from..from + data.len()].copy_from_slice(data);
            done.push(Done::Write(from, data.to_vec()));
        });
        Ok(())
    }
}

fn keep(database: &Database, number: u64) {
    let kept = database.write(|transaction| {
        transaction.open_table(NUMBERS)?.insert(number, VALUE.as_slice())?;
        Ok(())
    });
    kept.expect("written");
}

/// The last number of those that are there without a gap.
fn last(database: &Database) -> u64 {
    let last = database.read(|transaction| match transaction.open_table(NUMBERS) {
        Ok(table) => {
            let mut last = 0;
            for entry in table.iter()? {
                let (number, value) = entry?;
                assert_eq!((number.value(), value.value()), (last + 1, VALUE.as_slice()));
                last += 1;
            }
            Ok(last)
        }
        Err(redb::TableError::TableDoesNotExist(_)) => Ok(0),
        Err(error) => Err(error.into()),
    });
    last.expect("readable")
}

/// The life of a disk whose controller kept so many numbers, up to where it was killed.
fn life(numbers: u64) -> Vec<Done> {
    let disk = Disk::default();
    let database = Database::on(disk.clone()).expect("a new one");
    for number in 1..=numbers {
        keep(&database, number);
        disk.with(|_, done| done.push(Done::Acknowledged(number)));
    }
    disk.done()
}

/// How much of it passes until the database has made its file, as which a file is not known before.
fn begun(life: &[Done]) -> usize {
    let flushes = (0..life.len()).filter(|place| matches!(life[*place], Done::Flush));
    flushes.take(2).last().map_or(0, |second| second + 1)
}

/// The disk after this much of its life, and what was acknowledged. Of what was written since the last flush, where the power fails, some
/// sectors are there.
fn after(life: &[Done], mut power: Option<&mut Random>) -> (Vec<u8>, u64) {
    let flushed = life.iter().rposition(|done| matches!(done, Done::Flush)).unwrap_or(0);
    let (mut content, mut acknowledged) = (Vec::new(), 0);
    for (place, done) in life.iter().enumerate() {
        match done {
            Done::Length(length) => content.resize(*length, 0),
            Done::Flush => {}
            Done::Acknowledged(number) => acknowledged = *number,
            Done::Write(from, data) => {
                let mut at = 0;
                while at < data.len() {
                    let end = ((from + at) / SECTOR * SECTOR + SECTOR - from).min(data.len());
                    let power = power.as_deref_mut().filter(|_| place > flushed);
                    if power.is_none_or(|random| random.one_in(2)) {
                        content[from + at..from + end].copy_from_slice(&data[at..end]);
                    }
                    at = end;
                }
            }
        }
    }
    (content, acknowledged)
}

fn is_opened(content: Vec<u8>) -> Result<u64, StoreError> {
    Database::on(Disk::of(content)).map(|database| last(&database))
}

#[test]
fn who_is_killed_at_any_moment_has_all_that_it_acknowledged() {
    let life = life(12);
    for length in begun(&life)..=life.len() {
        let (content, acknowledged) = after(&life[..length], None);
        let there = is_opened(content).unwrap_or_else(|error| panic!("after {length}: {error}"));
        assert!(
            (acknowledged..=acknowledged + 1).contains(&there),
            "{there} of {acknowledged} after {length}"
        );
    }
}

#[test]
fn where_the_power_fails_at_any_moment_all_that_was_acknowledged_is_there() {
    let life = life(6);
    for length in begun(&life)..=life.len() {
        for seed in 0..8 {
            let (content, acknowledged) = after(&life[..length], Some(&mut Random::new(seed)));
            let there = is_opened(content).unwrap_or_else(|error| panic!("{length}, {seed}: {error}"));
            assert!(
                (acknowledged..=acknowledged + 1).contains(&there),
                "{there} of {acknowledged} after {length}, {seed}"
            );
        }
    }
}

/// The database alone takes it for a write that was cut off.
#[test]
fn damage_to_what_was_acknowledged_last_is_found_and_left_as_it_is() {
    let life = life(12);
    let (whole, _) = after(&life, None);
    let flushes: Vec<usize> = (0..life.len()).filter(|place| matches!(life[*place], Done::Flush)).collect();
    let [.., before, newest] = flushes[..] else { panic!("it was flushed more often") };
    let mut forgotten = 0;
    for done in &life[before..newest] {
        let Done::Write(from, data) = done else { continue };
        // The database uses the first page for its own beginning.
        if *from < 4096 {
            continue;
        }
        let mut bad = whole.clone();
        for byte in &mut bad[*from..from + data.len()] {
            *byte ^= 0x5a;
        }
        let alone = redb::Builder::new().create_with_backend(Disk::of(bad.clone()));
        forgotten += u32::from(alone.is_ok());
        let disk = Disk::of(bad.clone());
        let error = Database::on(disk.clone()).expect_err("it is damaged");
        assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains("from a backup"), "{error}");
        assert!(disk.content() == bad && disk.done().is_empty(), "nobody touched it");
    }
    assert!(forgotten > 0, "the database alone would have noticed");
}

/// Of the two beginnings that a file has the database takes the one that is whole.
#[test]
fn damage_to_the_newest_beginning_is_found() {
    let (whole, _) = after(&life(12), None);
    // Where their checksums are.
    let opened = [176..192, 304..320].map(|checksum: std::ops::Range<usize>| {
        let mut bad = whole.clone();
        for byte in &mut bad[checksum] {
            *byte ^= 0x5a;
        }
        is_opened(bad)
    });
    let (good, bad): (Vec<_>, Vec<_>) = opened.into_iter().partition(Result::is_ok);
    assert!(bad.iter().all(|it| matches!(it, Err(StoreError::Damaged { .. }))), "{bad:?}");
    assert!(good.iter().all(|it| matches!(it, Ok(12))) && good.len() == 1, "{good:?}");
}

#[test]
fn mark_that_is_behind_is_no_damage() {
    let life = life(5);
    let newest = life.iter().rposition(|done| matches!(done, Done::Write(from, _) if MARKS.contains(from)));
    let mut without = life.clone();
    without.remove(newest.expect("a mark"));
    assert_eq!(is_opened(after(&without, None).0).expect("it opens"), 5);
}

#[test]
fn one_of_the_two_marks_is_enough() {
    let (whole, _) = after(&life(5), None);
    for mark in MARKS {
        for wrong in [0, 0x5a] {
            let mut bad = whole.clone();
            bad[mark + 3..mark + MARK_BYTES].fill(wrong);
            assert_eq!(is_opened(bad).expect("it opens"), 5);
        }
    }
}

#[test]
fn file_that_has_lost_both_marks_is_refused() {
    let (whole, _) = after(&life(5), None);
    for wrong in [0, 0x5a] {
        let mut bad = whole.clone();
        for mark in MARKS {
            bad[mark..mark + MARK_BYTES].fill(wrong);
        }
        let error = is_opened(bad).expect_err("it has lost them");
        assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains("which transaction was the last"), "{error}");
    }
}

/// As older versions write.
fn keep_in_two_phases(redb: &redb::Database, number: u64) {
    let mut transaction = redb.begin_write().expect("begun");
    transaction.set_two_phase_commit(true);
    transaction.open_table(NUMBERS).expect("a table").insert(number, VALUE.as_slice()).expect("written");
    transaction.commit().expect("committed");
}

#[test]
fn older_versions_and_this_one_take_turns() {
    let disk = Disk::default();
    let older = |disk: &Disk| redb::Builder::new().create_with_backend(disk.clone()).expect("it opens");
    for round in 0..3 {
        keep_in_two_phases(&older(&disk), round * 3 + 1);
        let database = Database::on(disk.clone()).expect("it opens");
        keep(&database, round * 3 + 2);
        keep(&database, round * 3 + 3);
        if round == 1 {
            // It is killed.
            let left = Disk::of(disk.content());
            drop(database);
            disk.with(|content, _| *content = left.content());
        }
    }
    assert_eq!(last(&Database::on(disk).expect("it opens")), 9);
}

#[test]
fn backup_brings_its_own_mark() {
    let disk = Disk::default();
    let kept = |from: u64, to| {
        let database = Database::on(disk.clone()).expect("it opens");
        for number in from..=to {
            keep(&database, number);
        }
    };
    kept(1, 3);
    let backup = disk.content();
    kept(4, 8);
    disk.with(|content, _| *content = backup);
    kept(4, 5);
    assert_eq!(last(&Database::on(disk).expect("it opens")), 5);
}
