//! A guest that writes, has zeros written, discards, flushes and reads, and keeps a log of what it was told, to compare a disk with.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use vhost_frontend::mock::Piece;

use super::{Driver, IOERR, OK, PATIENCE, SECTOR, T_DISCARD, T_FLUSH, T_IN, T_OUT, T_WRITE_ZEROES, pattern};

/// Few, so that writes meet.
const SECTORS: u64 = 160;
const SECTORS_MAX: u64 = 24;
const IN_FLIGHT_MAX: usize = 24;
/// How far the beginning of data lies behind the rest of it, where that lies in two pieces.
const APART: u64 = 64 << 10;

/// What was asked for.
enum Asked {
    Write {
        sector: u64,
        version: u64,
        sectors: u64,
        /// A flush failed while it was under way. It may have ended before that, and be lost: what two queues tell
        /// is seen in any order. No flush vouches for it, the guest would have to write it again.
        suspect: bool,
    },
    /// Nothing is promised of the range, until it is written anew.
    Discard { sector: u64, sectors: u64 },
    /// With what each sector had been acknowledged to hold before.
    Flush(Vec<u64>),
    /// With what each sector of the range must hold at least.
    Read { sector: u64, least: Vec<u64> },
}

/// The guest and its log. A version of a sector is the number of the write that made it; zero is before any.
pub struct Witness {
    pub driver: Driver,
    queues: usize,
    random: u64,
    in_flight: HashMap<(usize, u16), (u64, Asked)>,
    issued: Vec<u64>,
    acknowledged: Vec<u64>,
    durable: Vec<u64>,
    /// Which versions of each sector are zeros, but for the first one.
    zeros: Vec<Vec<u64>>,
    versions: u64,
    /// Data lies in two pieces.
    pub in_pieces: bool,
    /// Writes are durable when they are acknowledged.
    pub write_through: bool,
    /// A flush may fail, once the device has lost power.
    pub may_fail: bool,
    pub failed_flushes: u64,
    pub flushes: u64,
    pub lost: u64,
}

impl Witness {
    pub fn new(driver: Driver, queues: u16, seed: u64) -> Self {
        let zeros = vec![0; SECTORS as usize];
        Self {
            driver,
            queues: queues.into(),
            random: seed | 1,
            in_flight: HashMap::new(),
            issued: zeros.clone(),
            acknowledged: zeros.clone(),
            durable: zeros,
            zeros: vec![Vec::new(); SECTORS as usize],
            versions: 0,
            in_pieces: false,
            write_through: false,
            may_fail: false,
            failed_flushes: 0,
            flushes: 0,
            lost: 0,
        }
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
        bytes.extend(pattern(sector << 40 | version, SECTOR as usize - 8));
        bytes
    }

    /// Which version these bytes are: of zeros, the newest that may be meant, of which it says nothing when it was written.
    fn version(&self, sector: u64, bytes: &[u8]) -> Result<u64, String> {
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(self.zeros[sector as usize].last().copied().unwrap_or(0));
        }
        let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        if bytes == Self::content(sector, version) {
            Ok(version)
        } else {
            Err(format!("sector {sector} holds nothing that was ever written"))
        }
    }

    fn is_being_written(&self, sector: u64, sectors: u64) -> bool {
        self.in_flight.values().any(|(_, asked)| match asked {
            Asked::Write { sector: other, sectors: length, .. }
            | Asked::Discard { sector: other, sectors: length } => {
                *other < sector + sectors && sector < *other + *length
            }
            _ => false,
        })
    }

    fn offer(&mut self) {
        let used: Vec<u64> = self.in_flight.values().map(|(place, _)| *place).collect();
        let place = (0..super::PLACES).find(|place| !used.contains(place)).unwrap();
        let sector = self.below(SECTORS);
        let sectors = (1 + self.below(SECTORS_MAX)).min(SECTORS - sector);
        match self.below(10) {
            0 => self.ask(place, T_FLUSH, 0, 0, Asked::Flush(self.acknowledged.clone())),
            1..=2 => {
                let bytes = (sectors * SECTOR) as u32;
                self.put(place, &vec![0x33; bytes as usize]);
                let least = self.durable[sector as usize..(sector + sectors) as usize].to_vec();
                self.ask(place, T_IN, sector, bytes, Asked::Read { sector, least });
            }
            // One write at a time to a sector: the order of two would be anybody's.
            _ if self.is_being_written(sector, sectors) => {}
            _ if self.below(5) == 0 => self.write_zeros(place, sector, sectors),
            _ if self.below(8) == 0 => self.discard(place, sector, sectors),
            _ => self.write(place, sector, sectors),
        }
    }

    /// How much of so many bytes lies apart.
    fn beginning(&self, bytes: usize) -> usize {
        if self.in_pieces { bytes / SECTOR as usize / 2 * SECTOR as usize } else { 0 }
    }

    fn put(&self, place: u64, bytes: &[u8]) {
        let (at, (beginning, rest)) =
            (self.driver.place(place).data, bytes.split_at(self.beginning(bytes.len())));
        self.driver.write(at + APART, beginning);
        self.driver.write(at, rest);
    }

    fn got(&self, place: u64, bytes: usize) -> Vec<u8> {
        let (at, beginning) = (self.driver.place(place).data, self.beginning(bytes));
        let mut read = self.driver.read(at + APART, beginning);
        read.extend(self.driver.read(at, bytes - beginning));
        read
    }

    fn ask(&mut self, place: u64, kind: u32, sector: u64, bytes: u32, asked: Asked) {
        let queue = self.below(self.queues as u64) as usize;
        let head = match self.beginning(bytes as usize) {
            beginning if matches!(kind, T_IN | T_OUT) && beginning > 0 => {
                let at = self.driver.place(place);
                self.driver.write_header(at, kind, sector);
                let mut pieces = Driver::pieces(at, kind, bytes - beginning as u32);
                let piece = Piece { address: at.data + APART, bytes: beginning as u32, ..pieces[1] };
                pieces.insert(1, piece);
                self.driver.guest.offer(queue, &pieces, None)
            }
            _ => self.driver.offer(queue, place, kind, sector, bytes),
        };
        assert!(self.in_flight.insert((queue, head), (place, asked)).is_none());
    }

    /// Writes everything and has it flushed, with nothing else in flight. More than a drive brings to its medium unasked, so whatever
    /// the threads did before, there is something that only the flush can have saved.
    pub fn flush(&mut self) -> Result<(), String> {
        self.settle()?;
        // The first flush may tell of a loss: then nothing of before counts.
        for _ in 0..2 {
            for (place, sector) in (0..).zip((0..SECTORS).step_by(SECTORS_MAX as usize)) {
                self.write(place, sector, SECTORS_MAX.min(SECTORS - sector));
            }
            self.settle()?;
            let before = self.flushes;
            self.ask(0, T_FLUSH, 0, 0, Asked::Flush(self.acknowledged.clone()));
            self.settle()?;
            if self.flushes > before {
                return Ok(());
            }
        }
        Err("two flushes failed, one after the other".to_owned())
    }

    fn write(&mut self, place: u64, sector: u64, sectors: u64) {
        self.versions += 1;
        let version = self.versions;
        self.issued[sector as usize..(sector + sectors) as usize].fill(version);
        let bytes: Vec<u8> =
            (sector..sector + sectors).flat_map(|sector| Self::content(sector, version)).collect();
        self.put(place, &bytes);
        let asked = Asked::Write { sector, version, sectors, suspect: false };
        self.ask(place, T_OUT, sector, bytes.len() as u32, asked);
    }

    fn write_zeros(&mut self, place: u64, sector: u64, sectors: u64) {
        self.versions += 1;
        let version = self.versions;
        for sector in sector as usize..(sector + sectors) as usize {
            self.issued[sector] = version;
            self.zeros[sector].push(version);
        }
        let mut range = sector.to_le_bytes().to_vec();
        range.extend((sectors as u32).to_le_bytes());
        // With and without leave to give the room back.
        range.extend((self.below(2) as u32).to_le_bytes());
        self.driver.write(self.driver.place(place).data, &range);
        let asked = Asked::Write { sector, version, sectors, suspect: false };
        self.ask(place, T_WRITE_ZEROES, 0, range.len() as u32, asked);
    }

    /// From here on the sectors may be zeros, or whatever they ever were.
    fn discard(&mut self, place: u64, sector: u64, sectors: u64) {
        self.versions += 1;
        let range = sector as usize..(sector + sectors) as usize;
        for at in range.clone() {
            self.issued[at] = self.versions;
            self.zeros[at].push(self.versions);
        }
        self.acknowledged[range.clone()].fill(0);
        self.durable[range.clone()].fill(0);
        for (_, asked) in self.in_flight.values_mut() {
            match asked {
                Asked::Flush(vouched) => vouched[range.clone()].fill(0),
                Asked::Read { sector: from, least } => {
                    for (at, least) in (*from as usize..).zip(least) {
                        *least = if range.contains(&at) { 0 } else { *least };
                    }
                }
                Asked::Write { .. } | Asked::Discard { .. } => {}
            }
        }
        let mut bytes = sector.to_le_bytes().to_vec();
        bytes.extend((sectors as u32).to_le_bytes());
        bytes.extend(0_u32.to_le_bytes());
        self.driver.write(self.driver.place(place).data, &bytes);
        self.ask(place, T_DISCARD, 0, bytes.len() as u32, Asked::Discard { sector, sectors });
    }

    fn answered(&mut self, queue: usize, head: u16) -> Result<(), String> {
        let (place, asked) = self.in_flight.remove(&(queue, head)).expect("each request is answered once");
        let status = self.driver.status(place);
        match asked {
            Asked::Flush(_) if status == IOERR && self.may_fail => {
                // It says that what was acknowledged until now may be gone; other flushes need not say it again.
                self.failed_flushes += 1;
                self.acknowledged.clone_from(&self.durable);
                for (_, asked) in self.in_flight.values_mut() {
                    match asked {
                        Asked::Flush(vouched) => vouched.clone_from(&self.durable),
                        Asked::Write { suspect, .. } => *suspect = true,
                        Asked::Discard { .. } | Asked::Read { .. } => {}
                    }
                }
            }
            _ if status != OK => return Err(format!("status {status}")),
            Asked::Write { suspect: true, .. } | Asked::Discard { .. } => {}
            Asked::Write { sector, version, sectors, .. } => {
                for sector in sector as usize..(sector + sectors) as usize {
                    self.acknowledged[sector] = version;
                    if self.write_through {
                        self.durable[sector] = version;
                    }
                }
            }
            Asked::Flush(vouched) => {
                self.flushes += 1;
                for (sector, version) in vouched.into_iter().enumerate() {
                    if self.acknowledged[sector] < version {
                        return Err(format!(
                            "a flush vouched for version {version} of sector {sector}, lost before"
                        ));
                    }
                    self.durable[sector] = self.durable[sector].max(version);
                }
            }
            Asked::Read { sector, least } => {
                let bytes = self.got(place, least.len() * SECTOR as usize);
                for ((sector, least), bytes) in (sector..).zip(least).zip(bytes.chunks(SECTOR as usize)) {
                    self.check(sector, least, bytes)?;
                }
            }
        }
        Ok(())
    }

    fn check(&self, sector: u64, least: u64, bytes: &[u8]) -> Result<u64, String> {
        let version = self.version(sector, bytes)?;
        if version < least || version > self.issued[sector as usize] {
            return Err(format!(
                "sector {sector} holds version {version}, not {least} to {}",
                self.issued[sector as usize]
            ));
        }
        Ok(version)
    }

    /// Takes what was answered.
    ///
    /// Answers of two queues are seen in any order, and a flush may have been made when another had failed already, unseen:
    /// what it vouched for is what the guest knew then. So all is gathered, until there is nothing more, and failed flushes
    /// count as seen first.
    pub fn collect(&mut self) -> Result<(), String> {
        let mut answered = Vec::new();
        loop {
            let before = answered.len();
            for queue in 0..self.queues {
                while let Some(used) = self.driver.guest.used(queue) {
                    answered.push((queue, used.head));
                }
            }
            if answered.len() == before {
                break;
            }
        }
        let failed_flush = |(queue, head): &(usize, u16)| {
            let (place, asked) = &self.in_flight[&(*queue, *head)];
            matches!(asked, Asked::Flush(_)) && self.driver.status(*place) == IOERR
        };
        let (first, rest): (Vec<_>, Vec<_>) = answered.into_iter().partition(failed_flush);
        for (queue, head) in first.into_iter().chain(rest) {
            self.answered(queue, head)?;
        }
        Ok(())
    }

    /// Works until so many more requests were offered.
    pub fn work(&mut self, requests: u64) -> Result<(), String> {
        let began = Instant::now();
        let mut left = requests;
        while left > 0 {
            assert!(began.elapsed() < PATIENCE, "stuck with {} in flight", self.in_flight.len());
            if self.in_flight.len() < IN_FLIGHT_MAX {
                self.offer();
                left -= 1;
            } else {
                self.driver.guest.wait(0, Duration::from_millis(1));
                self.collect()?;
            }
            if self.below(4) == 0 {
                self.collect()?;
            }
        }
        Ok(())
    }

    /// Waits until nothing is in flight.
    pub fn settle(&mut self) -> Result<(), String> {
        let began = Instant::now();
        while !self.in_flight.is_empty() {
            assert!(began.elapsed() < PATIENCE, "stuck with {} in flight", self.in_flight.len());
            self.collect()?;
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// The device lost its power: compares what is left of it, and goes on from there.
    pub fn power_failed(&mut self, device: &File, start: u64) -> Result<(), String> {
        self.may_fail = true;
        self.collect()?;
        for sector in 0..SECTORS {
            let mut bytes = vec![0; SECTOR as usize];
            device.read_exact_at(&mut bytes, start + sector * SECTOR).unwrap();
            let version = self.check(sector, self.durable[sector as usize], &bytes)?;
            let acknowledged = &mut self.acknowledged[sector as usize];
            self.lost += u64::from(version < *acknowledged);
            *acknowledged = version;
        }
        Ok(())
    }
}
