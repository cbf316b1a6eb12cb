//! The region table: who holds which part of the data area.
//!
//! Each controller replica projects its state into two copies, A and B, and writes them in turn, so that
//! one is always whole. A copy carries the version (term, index) of the state that it shows and a
//! checksum; readers take the highest version that is whole.

use serde::{Deserialize, Serialize};
use thiserror::Error;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::layout::REGION_SLOTS;
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
    /// The regions, in the order in which they were published.
    pub entries: Vec<RegionEntry>,
}

/// More regions than a table has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{entries} regions do not fit the pool's region table of {REGION_SLOTS}: delete instances or volumes first"
)]
pub struct TableFull {
    /// How many there were.
    pub entries: usize,
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

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
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

/// Publishes the regions in that copy of the replica's table which does not show the newest state. Only the
/// replica may.
pub fn publish<M: Memory>(
    memory: &M,
    layout: &Layout,
    replica: ReplicaId,
    version: TableVersion,
    entries: &[RegionEntry],
) -> Result<(), TableFull> {
    let too_many = || TableFull { entries: entries.len() };
    let count = u32::try_from(entries.len()).map_err(|_| too_many())?;
    if u64::from(count) > REGION_SLOTS {
        return Err(too_many());
    }
    let copies = layout.region_tables(replica);
    let [a, b] = copies.map(|copy| header(memory, copy).map(|header| header.version()));
    // A copy without a whole header is the lower one: nothing is lost with it.
    let target = if a <= b { copies[0] } else { copies[1] };

    let mut body = Vec::with_capacity(entries.len() * LINE_BYTES);
    for entry in entries {
        body.extend_from_slice(EntryWire::from(entry).as_bytes());
    }
    let mut header = HeaderWire {
        term: version.term.into(),
        index: version.index.into(),
        entries: count.into(),
        reserved: [0; 36],
        entries_crc: crc32fast::hash(&body).into(),
        crc: 0.into(),
    };
    header.crc = header.checksum().into();

    let body_at = target.start_byte().saturating_add(LINE_BYTES as u64);
    memory.write(body_at, &body);
    memory.write_back(body_at, body.len() as u64);
    memory.store_fence();
    memory.write(target.start_byte(), header.as_bytes());
    memory.write_back(target.start_byte(), LINE_BYTES as u64);
    memory.store_fence();
    Ok(())
}

/// Empties this host's cache of an area that it used, or a dead process on it: nothing of that comes over what the next user
/// writes. Nothing may be in flight there any more.
pub fn scrub<M: Memory>(memory: &M, area: Area) {
    memory.flush(area.start_byte(), area.bytes());
    memory.full_fence();
}

/// The newest whole table of any replica; nothing if there is none (yet).
pub fn read<M: Memory>(memory: &M, layout: &Layout) -> Option<RegionTable> {
    layout
        .replicas()
        .flat_map(|replica| layout.region_tables(replica).map(|copy| (replica, copy)))
        .filter_map(|(replica, copy)| read_copy(memory, replica, copy))
        .max_by_key(|table| table.version)
}

/// The region that a line belongs to and who holds it, by the newest table; without allocating, and believing its entries.
pub(crate) fn holding<M: Memory>(memory: &M, layout: &Layout, line: LineOffset) -> Option<(u32, HostId)> {
    let copies = layout.replicas().flat_map(|replica| layout.region_tables(replica));
    let (header, copy) = copies
        .filter_map(|copy| Some((header(memory, copy)?, copy)))
        .max_by_key(|(header, _)| header.version())?;
    (1..=u64::from(header.entries.get())).find_map(|place| {
        let at = copy.start_byte().saturating_add(place * LINE_BYTES as u64);
        let mut entry = EntryWire::new_zeroed();
        memory.invalidate(at, LINE_BYTES as u64);
        memory.full_fence();
        memory.read(at, entry.as_mut_bytes());
        let entry = entry.decode()?;
        let inside = line.get().checked_sub(entry.area.start.get())? < entry.area.lines.get();
        inside.then_some((entry.id, entry.holder))
    })
}

fn header<M: Memory>(memory: &M, copy: Area) -> Option<HeaderWire> {
    let mut header = HeaderWire::new_zeroed();
    memory.invalidate(copy.start_byte(), LINE_BYTES as u64);
    memory.full_fence();
    memory.read(copy.start_byte(), header.as_mut_bytes());
    (header.crc.get() == header.checksum() && u64::from(header.entries.get()) <= REGION_SLOTS)
        .then_some(header)
}

fn read_copy<M: Memory>(memory: &M, replica: ReplicaId, copy: Area) -> Option<RegionTable> {
    let header = header(memory, copy)?;
    let bytes = u64::from(header.entries.get()) * LINE_BYTES as u64;
    let mut entries = vec![EntryWire::new_zeroed(); header.entries.get() as usize];
    let body_at = copy.start_byte().saturating_add(LINE_BYTES as u64);
    memory.invalidate(body_at, bytes);
    memory.full_fence();
    memory.read(body_at, entries.as_mut_bytes());
    if crc32fast::hash(entries.as_bytes()) != header.entries_crc.get() {
        return None;
    }
    let entries = entries.iter().map(EntryWire::decode).collect::<Option<_>>()?;
    Some(RegionTable { replica, version: header.version(), entries })
}
