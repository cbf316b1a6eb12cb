//! A guest that reads and writes the same sectors at once, and whether what it saw can be explained by some order in which
//! each request was carried out at one moment between its beginning and its end.
//!
//! Every write has a number of its own, so that a sector is a register whose values are unique. Then it suffices to look at
//! the *zone* of each value: from the first end to the last beginning of the requests that wrote or read it (P. B. Gibbons,
//! E. Korach: Testing Shared Memories, 1997, section 4). Where the first end comes before, the value was there all that
//! time: two such zones must not meet. Where it comes after, the value was there at some moment between: that must not lie
//! within a zone of the first kind.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use super::{Driver, OK, PATIENCE, SECTOR, T_DISCARD, T_FLUSH, T_IN, T_OUT, pattern};

/// Runs of sectors over the borders of regions, so that requests meet, and reach over two.
const RUNS: u64 = 3;
const RUN_SECTORS: u64 = 16;
const REGION_SECTORS: u64 = 512;
const IN_FLIGHT_MAX: usize = 16;
/// Behind all of them: sectors that are written and discarded.
const SCRATCH: u64 = (RUNS + 2) * REGION_SECTORS;
const SCRATCH_SECTORS: u64 = 64;

/// A request in flight.
struct Asked {
    place: u64,
    kind: u32,
    sector: u64,
    sectors: u64,
    version: u64,
    began: u64,
}

/// What was seen of one value of a sector.
#[derive(Debug, Clone, Copy)]
struct Value {
    /// When its write began, and whether it ended.
    written: u64,
    /// The first end and the last beginning of whatever wrote or read it.
    first_end: u64,
    last_beginning: u64,
}

/// The guest, and what it saw.
pub struct History {
    pub driver: Driver,
    /// It discards, too. What is there afterwards is nobody's concern, unless in several places.
    pub discards: bool,
    random: u64,
    clock: u64,
    versions: u64,
    in_flight: HashMap<(usize, u16), Asked>,
    sectors: BTreeMap<u64, BTreeMap<u64, Value>>,
}

impl History {
    pub fn new(driver: Driver, seed: u64) -> Self {
        let zero = Value { written: 0, first_end: 0, last_beginning: 0 };
        let sectors = (0..RUNS).flat_map(|run| (0..RUN_SECTORS).map(move |at| Self::sector(run, at)));
        Self {
            driver,
            discards: false,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            clock: 1,
            versions: 0,
            in_flight: HashMap::new(),
            sectors: sectors.map(|sector| (sector, BTreeMap::from([(0, zero)]))).collect(),
        }
    }

    fn sector(run: u64, at: u64) -> u64 {
        (run + 1) * REGION_SECTORS - RUN_SECTORS / 2 + at
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) % limit
    }

    fn content(sector: u64, version: u64) -> Vec<u8> {
        if version == 0 {
            return vec![0; SECTOR as usize];
        }
        let mut bytes = version.to_le_bytes().to_vec();
        bytes.extend(pattern(sector << 32 | version, SECTOR as usize - 8));
        bytes
    }

    fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn offer(&mut self) {
        let used: Vec<u64> = self.in_flight.values().map(|asked| asked.place).collect();
        let place = (0..super::PLACES).find(|place| !used.contains(place)).unwrap();
        if self.discards && self.below(6) == 0 {
            return self.scratch(place);
        }
        let run = self.below(RUNS);
        let at = self.below(RUN_SECTORS);
        let sectors = 1 + self.below(RUN_SECTORS - at);
        let sector = Self::sector(run, at);
        let kind = match self.below(12) {
            0 => T_FLUSH,
            1..=6 => T_IN,
            _ => T_OUT,
        };
        let (sector, sectors) = if kind == T_FLUSH { (0, 0) } else { (sector, sectors) };
        let bytes = (sectors * SECTOR) as usize;
        let data = self.driver.place(place).data;
        let mut version = 0;
        if kind == T_OUT {
            self.versions += 1;
            version = self.versions;
            let content: Vec<u8> =
                (sector..sector + sectors).flat_map(|sector| Self::content(sector, version)).collect();
            self.driver.write(data, &content);
        } else {
            self.driver.write(data, &vec![0x33; bytes]);
        }
        let began = self.now();
        let queue = self.below(2) as usize;
        let head = self.driver.offer(queue, place, kind, sector, bytes as u32);
        let asked = Asked { place, kind, sector, sectors, version, began };
        assert!(self.in_flight.insert((queue, head), asked).is_none());
    }

    fn scratch(&mut self, place: u64) {
        let sector = SCRATCH + self.below(SCRATCH_SECTORS);
        let sectors = 1 + self.below(SCRATCH_SECTORS);
        let (kind, header, data) = if self.below(2) == 0 {
            (T_OUT, sector, pattern(self.clock, (sectors * SECTOR) as usize))
        } else {
            let mut range = sector.to_le_bytes().to_vec();
            range.extend((sectors as u32).to_le_bytes());
            range.extend(0_u32.to_le_bytes());
            (T_DISCARD, 0, range)
        };
        self.driver.write(self.driver.place(place).data, &data);
        let began = self.now();
        let queue = self.below(2) as usize;
        let head = self.driver.offer(queue, place, kind, header, data.len() as u32);
        let asked = Asked { place, kind, sector, sectors: 0, version: 0, began };
        assert!(self.in_flight.insert((queue, head), asked).is_none());
    }

    /// Takes what was answered.
    pub fn collect(&mut self) {
        for queue in 0..2 {
            while let Some(used) = self.driver.guest.used(queue) {
                let asked = self.in_flight.remove(&(queue, used.head)).expect("each is answered once");
                assert_eq!(self.driver.status(asked.place), OK);
                self.note(&asked);
            }
        }
    }

    fn note(&mut self, asked: &Asked) {
        let end = self.now();
        if asked.kind == T_FLUSH {
            return;
        }
        let data = self.driver.place(asked.place).data;
        let bytes = self.driver.read(data, (asked.sectors * SECTOR) as usize);
        for (sector, bytes) in (asked.sector..).zip(bytes.chunks(SECTOR as usize)) {
            let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            assert!(
                bytes == Self::content(sector, version),
                "sector {sector} holds nothing that was ever written"
            );
            assert!(asked.kind == T_IN || version == asked.version);
            let value = Value { written: u64::MAX, first_end: u64::MAX, last_beginning: 0 };
            let value = self.sectors.get_mut(&sector).unwrap().entry(version).or_insert(value);
            if asked.kind == T_OUT {
                value.written = asked.began;
            }
            value.first_end = value.first_end.min(end);
            value.last_beginning = value.last_beginning.max(asked.began);
        }
    }

    /// Offers so many requests, and takes answers meanwhile.
    pub fn work(&mut self, requests: u64) {
        let began = Instant::now();
        let mut left = requests;
        while left > 0 {
            assert!(began.elapsed() < PATIENCE, "stuck with {} in flight", self.in_flight.len());
            if self.in_flight.len() < IN_FLIGHT_MAX {
                self.offer();
                left -= 1;
            } else {
                // Others need the processor, and the controller may have to say something first.
                std::thread::yield_now();
                self.collect();
                if self.in_flight.len() >= IN_FLIGHT_MAX {
                    return;
                }
            }
            if self.below(3) == 0 {
                self.collect();
            }
        }
    }

    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Reads everything, each sector by itself. Nothing else is in flight.
    pub fn read_all(&mut self) {
        let sectors: Vec<u64> = self.sectors.keys().copied().collect();
        for sector in sectors {
            let began = self.now();
            let bytes = self.driver.read_sectors(sector, SECTOR as u32);
            let place = 0;
            self.driver.write(self.driver.place(place).data, &bytes);
            self.note(&Asked { place, kind: T_IN, sector, sectors: 1, version: 0, began });
        }
    }

    /// Whether some order explains all of it.
    pub fn check(&self) -> Result<(), String> {
        for (sector, values) in &self.sectors {
            let mut whole = Vec::new();
            for (version, value) in values {
                if value.written > value.first_end {
                    return Err(format!("sector {sector} was read as {version} before that was written"));
                }
                if value.first_end < value.last_beginning {
                    whole.push((value.first_end, value.last_beginning, version));
                }
            }
            whole.sort_unstable();
            for pair in whole.windows(2) {
                if pair[1].0 < pair[0].1 {
                    return Err(format!(
                        "sector {sector}: {} and {} were there by turns: {pair:?}",
                        pair[0].2, pair[1].2
                    ));
                }
            }
            for (version, value) in values {
                let within = whole.iter().find(|(from, to, other)| {
                    *other != version && *from < value.last_beginning && value.first_end < *to
                });
                if let (true, Some(within)) = (value.first_end > value.last_beginning, within) {
                    return Err(format!(
                        "sector {sector}: {version} was there while {} was: {value:?} {within:?}",
                        within.2
                    ));
                }
            }
        }
        Ok(())
    }
}
