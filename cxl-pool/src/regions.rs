//! The region table: who holds which part of the data area.
//!
//! Each controller replica projects its state into two copies, A and B, and writes them in turn, so that
//! one is always whole. A copy carries the version (term, index) of the state that it shows and a
//! checksum; readers take the highest version that is whole.

mod writer;

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use self::writer::TableWriter;
use self::writer::entry_at;
use crate::{Area, HostId, LINE_BYTES, Layout, LineCount, LineOffset, Memory, ReplicaId};

/// What a region is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Purpose {
    /// The ring of a channel.
    Ring,
    /// What an instance's packets are sent from.
    TxArea,
    /// What a NIC receives packets into.
    RxArea,
    /// What an instance's block requests read and write.
    DataArea,
}

/// Whether a region may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RegionState {
    /// Its holder uses it.
    Leased,
    /// Its holder is gone or fenced, and its host's cache may still write to it.
    Quarantined,
}

/// One region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionEntry {
    /// Its number.
    pub id: u32,
    /// Where it lies.
    pub area: Area,
    /// The host that writes its lines, except where a message hands them over.
    pub holder: HostId,
    /// What it is for.
    pub purpose: Purpose,
    /// Whether it may be used.
    pub state: RegionState,
}

/// The version of the state that a table shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TableVersion {
    /// The controller's term.
    pub term: u64,
    /// The last command that went into it.
    pub index: u64,
}

/// A table that was read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RegionTable {
    /// Who wrote it.
    pub replica: ReplicaId,
    /// What state it shows.
    pub version: TableVersion,
    /// The regions, in no order.
    pub entries: Vec<RegionEntry>,
}

/// More regions than a table has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "the pool's region table has room for {slots} regions, and is full: delete instances or volumes first"
)]
pub struct TableFull {
    /// For how many there is room.
    pub slots: usize,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct HeaderWire {
    term: U64,
    index: U64,
    entries: U32,
    reserved: [u8; 36],
    entries_crc: U32,
    /// Over all of the header that precedes it.
    crc: U32,
}

#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct EntryWire {
    start_line: U64,
    lines: U64,
    id: U32,
    holder: U16,
    purpose: u8,
    state: u8,
    reserved: [u8; 40],
}

const _: () = assert!(size_of::<HeaderWire>() == LINE_BYTES && size_of::<EntryWire>() == LINE_BYTES);

impl HeaderWire {
    fn checksum(&self) -> u32 {
        let bytes = self.as_bytes();
        crc32fast::hash(&bytes[..bytes.len() - size_of::<U32>()]).max(1)
    }

    fn version(&self) -> TableVersion {
        TableVersion { term: self.term.get(), index: self.index.get() }
    }
}

impl From<&RegionEntry> for EntryWire {
    fn from(entry: &RegionEntry) -> Self {
        Self {
            start_line: entry.area.start.get().into(),
            lines: entry.area.lines.get().into(),
            id: entry.id.into(),
            holder: entry.holder.get().into(),
            purpose: match entry.purpose {
                Purpose::Ring => 1,
                Purpose::TxArea => 2,
                Purpose::RxArea => 3,
                Purpose::DataArea => 4,
            },
            state: match entry.state {
                RegionState::Leased => 1,
                RegionState::Quarantined => 2,
            },
            reserved: [0; 40],
        }
    }
}

impl EntryWire {
    fn decode(&self) -> Option<RegionEntry> {
        Some(RegionEntry {
            id: self.id.get(),
            area: Area::new(LineOffset::new(self.start_line.get()), LineCount::new(self.lines.get())),
            holder: HostId::new(self.holder.get()),
            purpose: match self.purpose {
                1 => Purpose::Ring,
                2 => Purpose::TxArea,
                3 => Purpose::RxArea,
                4 => Purpose::DataArea,
                _ => return None,
            },
            state: match self.state {
                1 => RegionState::Leased,
                2 => RegionState::Quarantined,
                _ => return None,
            },
        })
    }
}

/// Empties this host's cache of an area that it used, or a dead process on it: nothing of that comes over what the next user
/// writes. Nothing may be in flight there any more.
pub fn scrub<M: Memory>(memory: &M, area: Area) {
    memory.flush(area.start_byte(), area.bytes());
    memory.full_fence();
}

/// The newest whole table of any replica; nothing if there is none (yet).
pub fn read<M: Memory>(memory: &M, layout: &Layout) -> Option<RegionTable> {
    let mut copies: Vec<_> = copies(memory, layout).collect();
    copies.sort_by_key(|(_, _, header)| Reverse(header.version()));
    copies.into_iter().find_map(|(replica, copy, header)| read_entries(memory, replica, copy, &header))
}

/// Who wrote the newest table, and what state that shows, without a look at its entries: those of a table that is changed all the time
/// may be found to be of no version.
pub fn newest<M: Memory>(memory: &M, layout: &Layout) -> Option<(ReplicaId, TableVersion)> {
    copies(memory, layout)
        .map(|(replica, _, header)| (replica, header.version()))
        .max_by_key(|(_, version)| *version)
}

/// The region that a line belongs to and who holds it, by the newest table; without allocating, and believing its entries.
pub(crate) fn holding<M: Memory>(memory: &M, layout: &Layout, line: LineOffset) -> Option<(u32, HostId)> {
    let (_, copy, header) = copies(memory, layout).max_by_key(|(_, _, header)| header.version())?;
    (0..header.entries.get() as usize).find_map(|place| {
        let at = entry_at(copy, place);
        let mut entry = EntryWire::new_zeroed();
        memory.invalidate(at, LINE_BYTES as u64);
        memory.full_fence();
        memory.read(at, entry.as_mut_bytes());
        let entry = entry.decode()?;
        let inside = line.get().checked_sub(entry.area.start.get())? < entry.area.lines.get();
        inside.then_some((entry.id, entry.holder))
    })
}

/// All copies of all replicas whose header is whole.
fn copies<M: Memory>(memory: &M, layout: &Layout) -> impl Iterator<Item = (ReplicaId, Area, HeaderWire)> {
    let slots = layout.region_slots() as usize;
    let copies = layout.replicas().flat_map(|it| layout.region_tables(it).map(|copy| (it, copy)));
    copies.filter_map(move |(replica, copy)| Some((replica, copy, header(memory, copy, slots)?)))
}

/// The header of a copy with room for so many entries, if it is whole.
fn header<M: Memory>(memory: &M, copy: Area, slots: usize) -> Option<HeaderWire> {
    let mut header = HeaderWire::new_zeroed();
    memory.invalidate(copy.start_byte(), LINE_BYTES as u64);
    memory.full_fence();
    memory.read(copy.start_byte(), header.as_mut_bytes());
    (header.crc.get() == header.checksum() && header.entries.get() as usize <= slots).then_some(header)
}

fn read_entries<M: Memory>(
    memory: &M,
    replica: ReplicaId,
    copy: Area,
    header: &HeaderWire,
) -> Option<RegionTable> {
    let mut entries = vec![EntryWire::new_zeroed(); header.entries.get() as usize];
    let at = entry_at(copy, 0);
    memory.invalidate(at, entries.as_bytes().len() as u64);
    memory.full_fence();
    memory.read(at, entries.as_mut_bytes());
    if crc32fast::hash(entries.as_bytes()) != header.entries_crc.get() {
        return None;
    }
    let entries = entries.iter().map(EntryWire::decode).collect::<Option<_>>()?;
    Some(RegionTable { replica, version: header.version(), entries })
}
