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
//! which slot stands beside the table in the JSON, and so does a number by which the device is told from others of its name.
//!
//! All numbers are little-endian. The checksum (CRC-32) covers everything from the sequence number to the JSON's end. Of
//! the copies that are whole, the one with the higher sequence number counts.

mod copies;

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pod_protocol::ids::VolumeId;
use pod_protocol::volume_table::{VolumeEntry, VolumeTable};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use self::copies::{Chosen, VERSION, choose, format};
use super::vhost_user::Scratch;
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

/// A device's table, and the way to write it.
#[derive(Debug)]
pub struct Label {
    path: PathBuf,
    beginning: Beginning,
    /// What tables are written to.
    store: Arc<dyn Store>,
    sequence: u64,
    stored: Stored,
    missing: Option<io::Error>,
}

/// The place of tables on a device.
#[derive(Debug)]
enum Beginning {
    /// The device is a file or a block device.
    File(File),
    /// It is another program's, which reads and writes by commands. What it had there when it was opened: [`LABEL_BYTES`].
    Commands {
        /// The bytes.
        found: Vec<u8>,
        /// Memory that the program shares, through which it is told what to write.
        scratch: Arc<Scratch>,
    },
}

impl Beginning {
    fn read(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        match self {
            Self::File(file) => file.read_exact_at(into, at),
            Self::Commands { found, .. } => {
                let start = usize::try_from(at).unwrap_or(usize::MAX);
                let range = start..start.saturating_add(into.len());
                into.copy_from_slice(found.get(range).ok_or(io::ErrorKind::UnexpectedEof)?);
                Ok(())
            }
        }
    }
}

/// Of a device for which nobody carries out commands yet.
#[derive(Debug)]
struct NobodyYet;

impl Store for NobodyYet {
    fn write(&self, _bytes: &[u8], _at: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// What a table is written to.
pub(crate) trait Store: std::fmt::Debug + Send + Sync {
    /// Writes bytes that may stay in a cache.
    fn write(&self, bytes: &[u8], at: u64) -> io::Result<()>;

    /// Brings what was written to the medium.
    fn sync(&self) -> io::Result<()>;
}

impl Store for File {
    fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}

/// A table that is to be written.
#[derive(Debug)]
pub(crate) struct NewTable {
    path: PathBuf,
    store: Arc<dyn Store>,
    sequence: u64,
    stored: Stored,
    copy: Vec<u8>,
    /// Where write-intent logs begin that are another volume's now.
    cleared: Vec<u64>,
}

impl NewTable {
    /// Writes it, and returns when it is on the medium. A device that hangs keeps the caller for as long.
    pub(crate) fn write(&self) -> Result<(), LabelError> {
        let failed = |what| move |source| LabelError::Io { what, path: self.path.clone(), source };
        // What another volume's frontend wrote there is nothing that this one's may rely on.
        for &start_bytes in &self.cleared {
            let zeros = [0; intent_log::LENGTH];
            self.store.write(&zeros, start_bytes).map_err(failed("clear a log beside"))?;
            self.store.sync().map_err(failed("flush"))?;
        }
        self.store.write(&self.copy, self.sequence % 2 * COPY_BYTES).map_err(failed("write"))?;
        self.store.sync().map_err(failed("flush"))
    }
}

/// What a copy holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Stored {
    #[serde(flatten)]
    table: VolumeTable,
    /// Who has a place for a write-intent log.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    intent_logs: Vec<LogPlace>,
    /// A number of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    identity: Option<u64>,
}

impl Stored {
    /// Whether each log has a slot that there is, and none another one's: outside of those volumes lie.
    fn has_places_for_logs(&self) -> bool {
        let mut slots: Vec<u16> = self.intent_logs.iter().map(|place| place.slot).collect();
        slots.sort_unstable();
        slots.iter().all(|&slot| slot < SLOTS) && slots.windows(2).all(|two| two[0] != two[1])
    }
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
        "{} begins with data that is no table of volumes: if nothing on it is needed, clear all of it, or new volumes show what \
         was there (blkdiscard -z {}; of a file, truncate -s 0 and then to its size again)",
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
        let store = file.try_clone().map_err(failed("open"))?;
        Self::find(path, Beginning::File(file), Arc::new(store))
    }

    /// Finds the table of another program's disk, whose socket is at `path`. It can be written once a backend has it.
    pub fn of_commands(path: &Path, found: Vec<u8>, scratch: Arc<Scratch>) -> Result<Self, LabelError> {
        Self::find(path, Beginning::Commands { found, scratch }, Arc::new(NobodyYet))
    }

    fn find(path: &Path, beginning: Beginning, store: Arc<dyn Store>) -> Result<Self, LabelError> {
        let copies = [0, COPY_BYTES].map(|at| {
            let mut copy = vec![0; usize::try_from(COPY_BYTES).unwrap_or(usize::MAX)];
            beginning.read(&mut copy, at).map(|()| copy)
        });
        let Chosen { sequence, stored, missing } = choose(path, copies)?;
        Ok(Self { path: path.to_owned(), beginning, store, sequence, stored, missing })
    }

    /// What is on the device.
    pub fn table(&self) -> &VolumeTable {
        &self.stored.table
    }

    /// Why one of the two copies could not be read, if so: the other one counts then, which may be the older one.
    pub fn missing_copy(&self) -> Option<&io::Error> {
        self.missing.as_ref()
    }

    /// Where the write-intent log of a volume begins, if it has one.
    pub fn intent_log(&self, volume: VolumeId) -> Option<u64> {
        let mut places = self.stored.intent_logs.iter();
        places.find(|place| place.volume == volume).map(|place| place.start_bytes())
    }

    /// Its file, for those who work on the volumes' places. None if it is another program's.
    pub fn file(&self) -> Option<&File> {
        match &self.beginning {
            Beginning::File(file) => Some(file),
            Beginning::Commands { .. } => None,
        }
    }

    /// The memory that another program shares whose disk it is.
    pub(crate) fn scratch(&self) -> Option<&Arc<Scratch>> {
        match &self.beginning {
            Beginning::File(_) => None,
            Beginning::Commands { scratch, .. } => Some(scratch),
        }
    }

    /// What the write-intent log of a volume says, if it has one and that says anything.
    pub fn read_intent_log(&self, volume: VolumeId) -> Result<Option<IntentLog>, LabelError> {
        let Some(start_bytes) = self.intent_log(volume) else { return Ok(None) };
        let mut bytes = [0; intent_log::LENGTH];
        self.beginning.read(&mut bytes, start_bytes).map_err(|source| LabelError::Io {
            what: "read a log beside",
            path: self.path.clone(),
            source,
        })?;
        Ok(IntentLog::decode(&bytes, volume).map(|(log, _)| log))
    }

    /// Writes another table, and returns when it is on the medium. The one before counts until then.
    pub fn write(&mut self, table: &VolumeTable) -> Result<(), LabelError> {
        self.write_with(table, self.stored.identity)
    }

    /// The number by which the device is told from others of its name, if it was given one.
    pub fn identity(&self) -> Option<u64> {
        self.stored.identity
    }

    /// Gives it one if it has none, and returns when that is on the medium.
    pub fn identify(&mut self) -> Result<(), LabelError> {
        if self.stored.identity.is_some() {
            return Ok(());
        }
        self.write_with(&self.stored.table.clone(), Some(self.new_identity()))
    }

    /// Of the kernel's random numbers, by way of what keeps hash tables apart.
    fn new_identity(&self) -> u64 {
        RandomState::new().hash_one(&self.path)
    }

    fn write_with(&mut self, table: &VolumeTable, identity: Option<u64>) -> Result<(), LabelError> {
        if let Some(new) = self.prepare_with(table, identity)? {
            new.write()?;
            self.adopt(&new);
        }
        Ok(())
    }

    /// What is to be written so that the device has this table; none if it has. Another program's gets a number of its own with it.
    pub(crate) fn prepare(&self, table: &VolumeTable) -> Result<Option<NewTable>, LabelError> {
        let identity = match (&self.beginning, self.stored.identity) {
            (Beginning::Commands { .. }, None) => Some(self.new_identity()),
            (_, identity) => identity,
        };
        self.prepare_with(table, identity)
    }

    fn prepare_with(
        &self,
        table: &VolumeTable,
        identity: Option<u64>,
    ) -> Result<Option<NewTable>, LabelError> {
        let intent_logs = places_for(table, &self.stored.intent_logs);
        let stored = Stored { table: table.clone(), intent_logs, identity };
        if stored == self.stored {
            return Ok(None);
        }
        let sequence = self.sequence + 1;
        let copy = format(sequence, &stored)
            .ok_or_else(|| LabelError::TooLong { path: self.path.clone(), volumes: table.volumes.len() })?;
        let others = |place: &&LogPlace| !self.stored.intent_logs.contains(place);
        let cleared = stored.intent_logs.iter().filter(others).map(|place| place.start_bytes()).collect();
        let (path, store) = (self.path.clone(), Arc::clone(&self.store));
        Ok(Some(NewTable { path, store, sequence, stored, copy, cleared }))
    }

    /// A table that was prepared is on the medium.
    pub(crate) fn adopt(&mut self, new: &NewTable) {
        self.sequence = new.sequence;
        self.stored = new.stored.clone();
    }

    /// From now on tables are written there.
    pub(crate) fn write_to(&mut self, store: Arc<dyn Store>) {
        self.store = store;
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

#[cfg(test)]
mod tests;
