//! The table of volumes on the device itself, which tells what is on it without a controller.
//!
//! The first megabyte of a device holds two copies, in halves. A new table replaces the older copy, so that a crash while
//! it is written leaves the newer one:
//!
//! ```text
//! byte  0   8        12       16         24       28        64
//!       | magic | version | checksum | sequence | length | zeros | JSON ...
//! ```
//!
//! The second half of each copy's place is for write-intent logs: 64 slots of 4 KiB behind each copy. Which volume has
//! which slot stands beside the table in the JSON.
//!
//! All numbers are little-endian. The checksum (CRC-32) covers everything from the sequence number to the JSON's end. Of
//! the copies that are whole, the one with the higher sequence number counts.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use pod_protocol::ids::VolumeId;
use pod_protocol::volume_table::{VolumeEntry, VolumeTable};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::intent_log::{self, IntentLog};

/// What volumes must leave free at a device's beginning.
pub const LABEL_BYTES: u64 = 1 << 20;
const COPY_BYTES: u64 = LABEL_BYTES / 2;
/// Of a copy; the rest of its place has logs.
const TABLE_BYTES_MAX: u64 = COPY_BYTES / 2;
/// Write-intent logs behind each copy.
const SLOTS_PER_COPY: u64 = 64;
const SLOTS: u16 = 128;
const _: () = assert!(TABLE_BYTES_MAX + SLOTS_PER_COPY * intent_log::BYTES == COPY_BYTES);
const HEADER_BYTES: usize = 64;
const MAGIC: &[u8; 8] = b"WADIVOLS";
const VERSION: u32 = 1;
const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 8;
const CHECKSUM_AT: usize = 12;
const SEQUENCE_AT: usize = 16;
const LENGTH_AT: usize = 24;

/// A device's table, and the way to write it.
#[derive(Debug)]
pub struct Label {
    path: PathBuf,
    file: File,
    sequence: u64,
    stored: Stored,
}

/// What a copy holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Stored {
    #[serde(flatten)]
    table: VolumeTable,
    /// Who has a place for a write-intent log.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    intent_logs: Vec<LogPlace>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct LogPlace {
    volume: VolumeId,
    slot: u16,
}

impl LogPlace {
    /// Where it begins on the device.
    fn start_bytes(self) -> u64 {
        let (copy, at) = (u64::from(self.slot) / SLOTS_PER_COPY, u64::from(self.slot) % SLOTS_PER_COPY);
        copy * COPY_BYTES + TABLE_BYTES_MAX + at * intent_log::BYTES
    }
}

/// A table that cannot be read or written.
#[derive(Debug, Error)]
pub enum LabelError {
    /// The device failed.
    #[error("cannot {what} the table of volumes on {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which device.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It holds something else.
    #[error(
        "{} begins with data that is no table of volumes: if nothing on it is needed, clear its first megabyte (dd \
         if=/dev/zero of={} bs=1M count=1 conv=notrunc)",
        path.display(), path.display()
    )]
    Foreign {
        /// Which device.
        path: PathBuf,
    },
    /// A newer version wrote it.
    #[error("{} has a table of volumes of version {found}, and this program knows {VERSION}: use the program that wrote it", path.display())]
    Version {
        /// Which device.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// It is too small to hold one.
    #[error("{} has no room for a table of volumes: {LABEL_BYTES} bytes", path.display())]
    TooSmall {
        /// Which device.
        path: PathBuf,
    },
    /// The table is too long for a device.
    #[error("a table of {volumes} volumes does not fit {}: delete some", path.display())]
    TooLong {
        /// Which device.
        path: PathBuf,
        /// How many there are.
        volumes: usize,
    },
}

/// A copy as it was found.
enum Copy {
    Whole { sequence: u64, stored: Stored },
    Newer(u32),
    None,
}

impl Label {
    /// Finds the table of a device; a device that begins with zeros has an empty one.
    pub fn open(path: &Path) -> Result<Self, LabelError> {
        Self::open_as(path, true)
    }

    /// The same, of a device that is only looked at, and that a daemon may be using.
    pub fn inspect(path: &Path) -> Result<Self, LabelError> {
        Self::open_as(path, false)
    }

    fn open_as(path: &Path, write: bool) -> Result<Self, LabelError> {
        let failed = |what| move |source| LabelError::Io { what, path: path.to_owned(), source };
        let file = File::options().read(true).write(write).open(path).map_err(failed("open"))?;
        let mut bytes = vec![0; usize::try_from(LABEL_BYTES).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut bytes, 0).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => LabelError::TooSmall { path: path.to_owned() },
            _ => failed("read")(source),
        })?;
        let mut newest = None;
        let mut version = None;
        for half in bytes.chunks_exact(bytes.len() / 2) {
            match parse(half) {
                Copy::Whole { sequence, stored } => {
                    if newest.as_ref().is_none_or(|(known, _)| *known < sequence) {
                        newest = Some((sequence, stored));
                    }
                }
                Copy::Newer(found) => version = Some(found),
                Copy::None => {}
            }
        }
        let path = path.to_owned();
        if let Some(found) = version {
            return Err(LabelError::Version { path, found });
        }
        let (sequence, stored) = match newest {
            Some(newest) => newest,
            // The first copy ever may have been torn; nothing was entrusted to it.
            None if bytes.iter().all(|&byte| byte == 0) || is_torn_first(&bytes) => (0, Stored::default()),
            None => return Err(LabelError::Foreign { path }),
        };
        Ok(Self { path, file, sequence, stored })
    }

    /// What is on the device.
    pub fn table(&self) -> &VolumeTable {
        &self.stored.table
    }

    /// Where the write-intent log of a volume begins, if it has one.
    pub fn intent_log(&self, volume: VolumeId) -> Option<u64> {
        let mut places = self.stored.intent_logs.iter();
        places.find(|place| place.volume == volume).map(|place| place.start_bytes())
    }

    /// Its file, for those who work on the volumes' places.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// What the write-intent log of a volume says, if it has one and that says anything.
    pub fn read_intent_log(&self, volume: VolumeId) -> Result<Option<IntentLog>, LabelError> {
        let Some(start_bytes) = self.intent_log(volume) else { return Ok(None) };
        let mut bytes = [0; intent_log::LENGTH];
        self.file.read_exact_at(&mut bytes, start_bytes).map_err(|source| LabelError::Io {
            what: "read a log beside",
            path: self.path.clone(),
            source,
        })?;
        Ok(IntentLog::decode(&bytes, volume).map(|(log, _)| log))
    }

    /// Writes another table, and returns when it is on the medium. The one before counts until then.
    pub fn write(&mut self, table: &VolumeTable) -> Result<(), LabelError> {
        let failed = |what| {
            let path = self.path.clone();
            move |source| LabelError::Io { what, path, source }
        };
        let intent_logs = places_for(table, &self.stored.intent_logs);
        let stored = Stored { table: table.clone(), intent_logs };
        if stored == self.stored {
            return Ok(());
        }
        let sequence = self.sequence + 1;
        let copy = format(sequence, &stored)
            .ok_or_else(|| LabelError::TooLong { path: self.path.clone(), volumes: table.volumes.len() })?;
        // What another volume's frontend wrote there is nothing that this one's may rely on.
        for place in stored.intent_logs.iter().filter(|place| !self.stored.intent_logs.contains(place)) {
            let zeros = [0; intent_log::LENGTH];
            self.file.write_all_at(&zeros, place.start_bytes()).map_err(failed("clear a log beside"))?;
            self.file.sync_data().map_err(failed("flush"))?;
        }
        self.file.write_all_at(&copy, sequence % 2 * COPY_BYTES).map_err(failed("write"))?;
        self.file.sync_data().map_err(failed("flush"))?;
        self.sequence = sequence;
        self.stored = stored;
        Ok(())
    }
}

/// Who has a log where: whoever has one keeps it until its place is another volume's. Where there are more volumes than
/// slots, those that are mirrored have them.
fn places_for(table: &VolumeTable, before: &[LogPlace]) -> Vec<LogPlace> {
    let entry = |id: VolumeId| table.volumes.iter().find(|entry| entry.id == id);
    let mut places: Vec<LogPlace> =
        before.iter().filter(|place| entry(place.volume).is_some()).copied().collect();
    let may = |entry: &&VolumeEntry| !entry.deleted && entry.stripe.is_none();
    let (mirrored, others): (Vec<_>, Vec<_>) =
        table.volumes.iter().filter(may).partition(|entry| entry.mirror.is_some());
    for entry in mirrored.iter().chain(&others) {
        if places.iter().any(|place| place.volume == entry.id) {
            continue;
        }
        let free = (0..SLOTS).find(|&slot| places.iter().all(|place| place.slot != slot));
        let slot = match free {
            Some(slot) => slot,
            None if entry.mirror.is_some() => {
                let spare = |place: &LogPlace| others.iter().any(|other| other.id == place.volume);
                let Some(at) = places.iter().position(spare) else { break };
                places.swap_remove(at).slot
            }
            None => break,
        };
        places.push(LogPlace { volume: entry.id, slot });
    }
    places.sort_unstable_by_key(|place| place.slot);
    places
}

fn format(sequence: u64, stored: &Stored) -> Option<Vec<u8>> {
    let mut copy = vec![0; HEADER_BYTES];
    serde_json::to_writer(&mut copy, stored).ok()?;
    let length = u32::try_from(copy.len() - HEADER_BYTES).ok()?;
    copy[MAGIC_AT..VERSION_AT].copy_from_slice(MAGIC);
    copy[VERSION_AT..CHECKSUM_AT].copy_from_slice(&VERSION.to_le_bytes());
    copy[SEQUENCE_AT..LENGTH_AT].copy_from_slice(&sequence.to_le_bytes());
    copy[LENGTH_AT..LENGTH_AT + 4].copy_from_slice(&length.to_le_bytes());
    let checksum = crc32fast::hash(&copy[SEQUENCE_AT..]);
    copy[CHECKSUM_AT..SEQUENCE_AT].copy_from_slice(&checksum.to_le_bytes());
    (copy.len() as u64 <= TABLE_BYTES_MAX).then_some(copy)
}

fn parse(copy: &[u8]) -> Copy {
    let word = |at: usize| {
        let mut word = [0; 4];
        word.copy_from_slice(&copy[at..at + 4]);
        u32::from_le_bytes(word)
    };
    if copy[MAGIC_AT..VERSION_AT] != MAGIC[..] {
        return Copy::None;
    }
    let length = word(LENGTH_AT) as usize;
    let Some(covered) = copy.get(SEQUENCE_AT..HEADER_BYTES.saturating_add(length)) else { return Copy::None };
    if crc32fast::hash(covered) != word(CHECKSUM_AT) {
        return Copy::None;
    }
    if word(VERSION_AT) != VERSION {
        return Copy::Newer(word(VERSION_AT));
    }
    let sequence = u64::from(word(SEQUENCE_AT)) | u64::from(word(SEQUENCE_AT + 4)) << 32;
    match serde_json::from_slice(&copy[HEADER_BYTES..HEADER_BYTES + length]) {
        Ok(stored) => Copy::Whole { sequence, stored },
        Err(_) => Copy::None,
    }
}

/// Whether this is what a crash left of the first table: nothing in the first half, and in the second one the beginning
/// of a copy, or of one whose beginning did not arrive.
fn is_torn_first(bytes: &[u8]) -> bool {
    let (first, second) = bytes.split_at(bytes.len() / 2);
    first.iter().all(|&byte| byte == 0)
        && (second.starts_with(MAGIC) || second[..512].iter().all(|&byte| byte == 0))
}

#[cfg(test)]
mod tests {
    use pod_protocol::volume_table::MirrorEntry;
    use proptest::prelude::*;

    use super::*;

    fn device() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("ssd");
        File::create(&path).unwrap().set_len(4 << 20).unwrap();
        (directory, path)
    }

    fn table(count: u32) -> VolumeTable {
        let entry = |id: u32| VolumeEntry {
            id: VolumeId::new(id),
            name: format!("vol{id}"),
            start_bytes: u64::from(id) << 20,
            size_bytes: 1 << 20,
            deleted: id.is_multiple_of(3),
            mirror: None,
            stripe: None,
        };
        VolumeTable { volumes: (1..=count).map(entry).collect() }
    }

    #[test]
    fn what_was_written_is_found_again() {
        let (_directory, path) = device();
        for count in [0, 1, 7, 3, 300, 0, 2] {
            let mut label = Label::open(&path).unwrap();
            label.write(&table(count)).unwrap();
            assert_eq!(*Label::inspect(&path).unwrap().table(), table(count));
        }
        let mut label = Label::open(&path).unwrap();
        assert!(matches!(label.write(&table(20_000)), Err(LabelError::TooLong { .. })));
        assert_eq!(*Label::inspect(&path).unwrap().table(), table(2), "what does not fit changes nothing");
    }

    #[test]
    fn what_is_somebody_elses_is_left_alone() {
        let (_directory, path) = device();
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"precious", 1000).unwrap();
        assert!(matches!(Label::open(&path), Err(LabelError::Foreign { .. })));
        file.set_len(4096).unwrap();
        assert!(matches!(Label::open(&path), Err(LabelError::TooSmall { .. })));
        assert!(matches!(Label::open(&path.join("x")), Err(LabelError::Io { .. })));
        let (_directory, path) = device();
        let mut newer = format(1, &Stored { table: table(1), intent_logs: Vec::new() }).unwrap();
        newer[VERSION_AT] = 9;
        File::options().write(true).open(&path).unwrap().write_all_at(&newer, COPY_BYTES).unwrap();
        assert!(matches!(Label::open(&path), Err(LabelError::Version { found: 9, .. })));
    }

    #[test]
    fn a_log_of_intents_stays_where_it_is_and_begins_empty() {
        let (_directory, path) = device();
        let mut label = Label::open(&path).unwrap();
        label.write(&table(400)).unwrap();
        let given = |label: &Label| (1..=400).filter_map(|id| label.intent_log(VolumeId::new(id))).collect();
        let starts: std::collections::BTreeSet<u64> = given(&label);
        assert_eq!(starts.len(), usize::from(SLOTS));
        let in_label = |start: &u64| *start % COPY_BYTES >= TABLE_BYTES_MAX && *start < LABEL_BYTES;
        assert!(starts.iter().all(|start| in_label(start) && start % intent_log::BYTES == 0), "{starts:?}");
        // One that has none becomes mirrored: it gets another one's, and finds nothing there.
        for start in &starts {
            label.file().write_all_at(&[7; intent_log::LENGTH], *start).unwrap();
        }
        let without = |entry: &&mut VolumeEntry| !entry.deleted && label.intent_log(entry.id).is_none();
        let mut mirrored = table(400);
        let entry = mirrored.volumes.iter_mut().find(without).unwrap();
        entry.mirror = Some(MirrorEntry { epoch: 1, number: 0, replicas: Vec::new() });
        let id = entry.id;
        label.write(&mirrored).unwrap();
        let start = label.intent_log(id).unwrap();
        let read = |label: &Label| {
            let mut bytes = [1; intent_log::LENGTH];
            label.file().read_exact_at(&mut bytes, start).unwrap();
            bytes
        };
        assert_eq!(read(&label), [0; intent_log::LENGTH]);
        // It is kept while the volume is there, and by another process too.
        label.file().write_all_at(&[9; intent_log::LENGTH], start).unwrap();
        let entry = mirrored.volumes.iter_mut().find(|entry| entry.id == id).unwrap();
        (entry.deleted, entry.mirror) = (true, None);
        label.write(&mirrored).unwrap();
        let mut label = Label::open(&path).unwrap();
        assert_eq!((label.intent_log(id), read(&label)), (Some(start), [9; intent_log::LENGTH]));
        mirrored.volumes.retain(|entry| entry.id != id);
        label.write(&mirrored).unwrap();
        assert_eq!(label.intent_log(id), None);
        assert_eq!(given(&label).len(), usize::from(SLOTS));
    }

    proptest! {
        /// Any sectors of the new table may be missing after a crash: the device has the new table or the old one.
        #[test]
        fn a_crash_leaves_one_table_or_the_other(
            counts in prop::collection::vec(0_u32..120, 1..5), kept in prop::collection::vec(any::<bool>(), 64),
        ) {
            let (_directory, path) = device();
            let mut label = Label::open(&path).unwrap();
            let (last, earlier) = counts.split_last().unwrap();
            for &count in earlier {
                label.write(&table(count)).unwrap();
            }
            let before = std::fs::read(&path).unwrap();
            let old = label.table().clone();
            label.write(&table(*last)).unwrap();
            let mut after = std::fs::read(&path).unwrap();
            for (index, sector) in after.chunks_mut(512).enumerate() {
                if !kept[index % kept.len()] {
                    sector.copy_from_slice(&before[index * 512..][..512]);
                }
            }
            std::fs::write(&path, &after).unwrap();
            let mut found = Label::open(&path).unwrap();
            prop_assert!(*found.table() == old || *found.table() == table(*last));
            found.write(&table(99)).unwrap();
            let found = Label::inspect(&path).unwrap();
            prop_assert_eq!(found.table(), &table(99));
        }
    }
}
