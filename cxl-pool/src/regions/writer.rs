//! Writes a replica's region table: of each copy what changed since that one was written, and little else.

mod checksums;

use std::collections::{BTreeSet, HashMap};

use zerocopy::IntoBytes;

use self::checksums::Checksums;
use super::{EntryWire, HeaderWire, RegionEntry, TableFull, TableVersion, header};
use crate::{Area, ByteOffset, LINE_BYTES, Layout, Memory, ReplicaId};

/// So many entries are written with each publication although they have not changed: a line that somebody destroyed is whole
/// again once their turn has come.
const REPEATED: usize = 16;

/// What a replica shows of the regions, and which part of that is in the pool already. Only the replica itself may have one.
///
/// Changes are collected by [`set`](Self::set) and [`remove`](Self::remove) and shown by [`publish`](Self::publish), which costs as
/// much as there are changes, however many regions there are.
#[derive(Debug)]
pub struct TableWriter {
    copies: [Area; 2],
    slots: usize,
    entries: Vec<EntryWire>,
    /// Which entry shows a region.
    places: HashMap<u32, usize>,
    checksums: Checksums,
    /// Of each copy the entries that it may not show as they are.
    stale: [BTreeSet<usize>; 2],
    /// The next entry to be written although it has not changed.
    next_repeated: usize,
}

impl TableWriter {
    /// A writer that shows no regions yet. Both copies are written as a whole once.
    pub fn new(layout: &Layout, replica: ReplicaId) -> Self {
        Self {
            copies: layout.region_tables(replica),
            slots: layout.region_slots() as usize,
            entries: Vec::new(),
            places: HashMap::new(),
            checksums: Checksums::default(),
            stale: [BTreeSet::new(), BTreeSet::new()],
            next_repeated: 0,
        }
    }

    /// Shows no region from the next publication on.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.places.clear();
        self.checksums = Checksums::default();
        self.stale = [BTreeSet::new(), BTreeSet::new()];
    }

    /// Shows a region as it is now, from the next publication on. Fails if it is a new one and there is no room: the table stays as it is.
    pub fn set(&mut self, entry: &RegionEntry) -> Result<(), TableFull> {
        let wire = EntryWire::from(entry);
        if let Some(place) = self.places.get(&entry.id).copied() {
            if self.entries[place].as_bytes() != wire.as_bytes() {
                self.entries[place] = wire;
                self.note(place);
            }
            return Ok(());
        }
        let place = self.entries.len();
        if place >= self.slots {
            return Err(TableFull { slots: self.slots });
        }
        self.entries.push(wire);
        self.places.insert(entry.id, place);
        self.note(place);
        Ok(())
    }

    /// Shows a region no more, from the next publication on. The last entry takes its place, so that there are no gaps.
    pub fn remove(&mut self, id: u32) {
        let Some(place) = self.places.remove(&id) else { return };
        self.entries.swap_remove(place);
        if let Some(moved) = self.entries.get(place) {
            self.places.insert(moved.id.get(), place);
            self.note(place);
        }
        self.checksums.note(self.entries.len());
    }

    fn note(&mut self, place: usize) {
        self.checksums.note(place);
        for stale in &mut self.stale {
            stale.insert(place);
        }
    }

    /// Writes that copy of the table which does not show the newest state: what changed, then the header.
    pub fn publish<M: Memory>(&mut self, memory: &M, version: TableVersion) {
        let [a, b] = self.copies.map(|copy| header(memory, copy, self.slots).map(|header| header.version()));
        // A copy without a whole header is the lower one: nothing is lost with it.
        let which = usize::from(a > b);
        let target = self.copies[which];

        let mut stale = std::mem::take(&mut self.stale[which]);
        stale.extend(self.repeated());
        let mut stale = stale.into_iter().take_while(|place| *place < self.entries.len()).peekable();
        while let Some(first) = stale.next() {
            let mut end = first + 1;
            while stale.next_if_eq(&end).is_some() {
                end += 1;
            }
            let at = entry_at(target, first);
            let bytes = self.entries[first..end].as_bytes();
            memory.write(at, bytes);
            memory.write_back(at, bytes.len() as u64);
        }
        let mut header = HeaderWire {
            term: version.term.into(),
            index: version.index.into(),
            // There is no room for more.
            entries: u32::try_from(self.entries.len()).unwrap_or(u32::MAX).into(),
            reserved: [0; 36],
            entries_crc: self.checksums.of(&self.entries).into(),
            crc: 0.into(),
        };
        header.crc = header.checksum().into();
        memory.store_fence();
        memory.write(target.start_byte(), header.as_bytes());
        memory.write_back(target.start_byte(), LINE_BYTES as u64);
        memory.store_fence();
    }

    /// Whose turn it is to be written although it has not changed.
    fn repeated(&mut self) -> std::ops::Range<usize> {
        let first = if self.next_repeated < self.entries.len() { self.next_repeated } else { 0 };
        self.next_repeated = first + REPEATED;
        first..self.next_repeated
    }
}

/// Where an entry lies in a copy: behind its header.
pub(super) fn entry_at(copy: Area, place: usize) -> ByteOffset {
    copy.start_byte().saturating_add((1 + place as u64) * LINE_BYTES as u64)
}
