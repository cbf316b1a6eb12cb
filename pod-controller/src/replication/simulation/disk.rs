//! A disk with a cache: what is not flushed may be lost with the power, some of it or all.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cxl_pool::simulated::Random;

/// What reaches the medium whole or not at all.
const SECTOR: usize = 512;
/// How many flushes a disk forgets that says something is kept when it is not.
const FORGOTTEN: usize = 6;

/// One disk, through all lives of its replica.
#[derive(Clone, Debug)]
pub(super) struct Disk(Arc<Mutex<Content>>);

#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is by itself: a disk may be full and lose its power")]
struct Content {
    /// What reads see.
    now: Vec<u8>,
    /// What a power failure leaves for certain.
    kept: Vec<u8>,
    /// Written since the last flush: where, and how much.
    unflushed: Vec<(usize, usize)>,
    /// What it held at earlier flushes; only of one that forgets.
    earlier: Vec<Vec<u8>>,
    forgets: bool,
    /// Nothing can be written.
    full: bool,
    /// One flush in so many takes its time; 0 for none.
    slow_one_in: u64,
    /// For how long somebody has to wait for it, in ms.
    busy_ms: u64,
    /// The power fails when so many more writes have come.
    fails_in: Option<u64>,
    failed: bool,
    /// The process that has it could not write something.
    refused: bool,
    /// Which process has it.
    life: u64,
    random: Random,
}

impl Disk {
    pub(super) fn new(seed: u64, forgets: bool) -> Self {
        Self(Arc::new(Mutex::new(Content {
            now: Vec::new(),
            kept: Vec::new(),
            unflushed: Vec::new(),
            earlier: Vec::new(),
            forgets,
            full: false,
            slow_one_in: 0,
            busy_ms: 0,
            fails_in: None,
            failed: false,
            refused: false,
            life: 0,
            random: Random::new(seed),
        })))
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        // Whoever panicked has failed the test already.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For a process that begins. Those before cannot use it any more.
    pub(super) fn mount(&self) -> Mounted {
        let mut content = self.content();
        content.life += 1;
        content.failed = false;
        content.refused = false;
        Mounted { disk: self.clone(), life: content.life }
    }

    /// Takes it away from the process that has it: what that wrote is there.
    pub(super) fn unmount(&self) {
        let mut content = self.content();
        content.life += 1;
        content.fails_in = None;
    }

    /// The same, and the power fails. What was not flushed is there or not, sector by sector.
    pub(super) fn lose_power(&self) {
        self.unmount();
        let mut content = self.content();
        let content = &mut *content;
        if content.forgets
            && let Some(earlier) = content.earlier.first().cloned()
        {
            content.kept = earlier;
            content.unflushed.clear();
            content.earlier.clear();
        }
        for (at, bytes) in std::mem::take(&mut content.unflushed) {
            let mut from = at;
            while from < at + bytes {
                let to = (from / SECTOR + 1) * SECTOR;
                let to = to.min(at + bytes).min(content.now.len());
                if from < to && content.random.one_in(2) {
                    if content.kept.len() < to {
                        content.kept.resize(to, 0);
                    }
                    content.kept[from..to].copy_from_slice(&content.now[from..to]);
                }
                from = (from / SECTOR + 1) * SECTOR;
            }
        }
        content.now = content.kept.clone();
    }

    /// Another one takes its place.
    pub(super) fn replace(&self) {
        self.unmount();
        let mut content = self.content();
        content.now.clear();
        content.kept.clear();
        content.unflushed.clear();
        content.earlier.clear();
    }

    pub(super) fn set_full(&self, full: bool) {
        self.content().full = full;
    }

    /// Whether its process has a reason to end: the power has failed, or something could not be written.
    pub(super) fn is_faulty(&self) -> bool {
        let content = self.content();
        content.failed || content.refused
    }

    /// One flush in so many takes its time from now on.
    pub(super) fn set_slow(&self, one_in: u64) {
        self.content().slow_one_in = one_in;
    }

    /// The power will fail in the middle of what is written next.
    pub(super) fn fail_in(&self, writes: u64) {
        self.content().fails_in = Some(writes);
    }

    /// Whether the power has failed meanwhile.
    pub(super) fn has_failed(&self) -> bool {
        self.content().failed
    }

    /// How long whoever wrote waits for it, in ms.
    pub(super) fn take_busy_ms(&self) -> u64 {
        std::mem::take(&mut self.content().busy_ms)
    }
}

/// A disk as one process has it.
#[derive(Debug)]
pub(super) struct Mounted {
    disk: Disk,
    life: u64,
}

impl Mounted {
    fn content(&self) -> io::Result<MutexGuard<'_, Content>> {
        let content = self.disk.content();
        if content.life == self.life && !content.failed {
            Ok(content)
        } else {
            Err(io::Error::other("the process was killed"))
        }
    }

    fn to_write(&self) -> io::Result<MutexGuard<'_, Content>> {
        let mut content = self.content()?;
        if let Some(writes) = content.fails_in {
            content.fails_in = writes.checked_sub(1);
            if content.fails_in.is_none() {
                content.failed = true;
                return Err(io::Error::other("the power failed"));
            }
        }
        if content.full {
            content.refused = true;
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        Ok(content)
    }
}

fn place(offset: u64, bytes: usize) -> io::Result<std::ops::Range<usize>> {
    let from = usize::try_from(offset).map_err(io::Error::other)?;
    Ok(from..from + bytes)
}

impl redb::StorageBackend for Mounted {
    fn len(&self) -> io::Result<u64> {
        Ok(self.content()?.now.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let content = self.content()?;
        let there = content.now.get(place(offset, out.len())?);
        out.copy_from_slice(there.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut content = self.to_write()?;
        let len = place(len, 0)?.start;
        content.now.resize(len, 0);
        // A file system keeps its sizes in order.
        content.kept.resize(len, 0);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut content = self.to_write()?;
        let content = &mut *content;
        for (at, bytes) in std::mem::take(&mut content.unflushed) {
            let to = (at + bytes).min(content.now.len());
            if at < to {
                content.kept[at..to].copy_from_slice(&content.now[at..to]);
            }
        }
        if content.forgets {
            content.earlier.push(content.kept.clone());
            let excess = content.earlier.len().saturating_sub(FORGOTTEN);
            content.earlier.drain(..excess);
        }
        if content.slow_one_in > 0 && content.random.one_in(content.slow_one_in) {
            content.busy_ms += 1 + content.random.below(400);
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut content = self.to_write()?;
        let place = place(offset, data.len())?;
        if content.now.len() < place.end {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        content.unflushed.push((place.start, data.len()));
        content.now[place].copy_from_slice(data);
        Ok(())
    }
}
