//! The tables of volumes on this host's devices, and the wiping of what was deleted.
//!
//! Devices are written to by threads of their own. The control thread, which has other devices to look after and tells the pod that
//! the daemon lives, does not wait for one that hangs.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use pod_protocol::endpoint::Reporter;
use pod_protocol::ids::VolumeId;
use pod_protocol::objects::TableObject;
use pod_protocol::reports::Report;
use pod_protocol::volume_table::{VolumeEntry, VolumeTable};
use tracing::{error, info, warn};

use super::DRAIN_PATIENCE;
use super::allocation::{Allocated, Allocation, Place};
use super::wiping::{Eraser, Wipe, Wiped};
use crate::ssd::{LABEL_BYTES, Label, LabelError, NewTable};

/// Between attempts to wipe something: twice as long after each that failed.
const REST_AT_FIRST: Duration = Duration::from_secs(1);
const REST_MAX: Duration = Duration::from_mins(1);

/// Where a table is.
enum Home {
    /// On its device, which is a file or a block device. It says what was written last, until another table is on the medium.
    Device(Label),
    /// On its device, which is another program's: it is written, and volumes are wiped, by commands.
    Commands(Label, Arc<dyn Eraser>),
    /// Here only. It says what the controller wants wiped, and that says it again to a process that begins. Wiped by what the device
    /// itself can do.
    Memory(VolumeTable, Arc<dyn Eraser>),
}

impl Home {
    fn table(&self) -> &VolumeTable {
        match self {
            Self::Device(label) | Self::Commands(label, _) => label.table(),
            Self::Memory(table, _) => table,
        }
    }

    fn label(&self) -> Option<&Label> {
        match self {
            Self::Device(label) | Self::Commands(label, _) => Some(label),
            Self::Memory(..) => None,
        }
    }

    fn label_mut(&mut self) -> Option<&mut Label> {
        match self {
            Self::Device(label) | Self::Commands(label, _) => Some(label),
            Self::Memory(..) => None,
        }
    }

    fn eraser(&self) -> io::Result<Arc<dyn Eraser>> {
        match self {
            Self::Device(label) => {
                let file = label.file().ok_or(io::ErrorKind::Unsupported)?;
                Ok(Arc::new(file.try_clone()?))
            }
            Self::Commands(_, eraser) | Self::Memory(_, eraser) => Ok(Arc::clone(eraser)),
        }
    }
}

/// A device of whose volumes there is a table.
struct Kept {
    home: Home,
    writing: Option<Writing>,
    /// The controller has said what is on the device. What was found there may be older than what the controller did since:
    /// the place of a deleted volume may be another one's by now.
    confirmed: bool,
    /// Deleted volumes whose data is gone.
    wiped: BTreeSet<VolumeId>,
    /// Those that could not be wiped.
    resting: BTreeMap<VolumeId, Rest>,
}

/// A table that is being written.
struct Writing {
    table: Arc<NewTable>,
    answer: Receiver<Result<(), LabelError>>,
}

/// What failed is not tried again before that.
#[derive(Clone, Copy)]
struct Rest {
    until: Instant,
    pause: Duration,
}

impl Kept {
    fn new(home: Home) -> Self {
        Self { home, writing: None, confirmed: false, wiped: BTreeSet::new(), resting: BTreeMap::new() }
    }

    /// Has the table on the medium, or says why it is not. Whoever is told that it is still being written asks again.
    fn put(&mut self, ssd: &str, table: &VolumeTable) -> Result<(), String> {
        if self.writing.is_some() {
            self.written(Duration::ZERO)?;
        }
        // Of a pod that began before there were tables on such disks: they have no room for one.
        if let Home::Commands(_, eraser) = &self.home
            && table.volumes.iter().any(|entry| entry.start_bytes < LABEL_BYTES)
        {
            warn!(
                ssd,
                "no table of volumes is kept on it, for one of them begins where that would lie: move that one to another SSD and restart \
                 the backend"
            );
            self.home = Home::Memory(VolumeTable::default(), Arc::clone(eraser));
        }
        let label = match &mut self.home {
            Home::Device(label) | Home::Commands(label, _) => label,
            Home::Memory(known, _) => {
                known.clone_from(table);
                return Ok(());
            }
        };
        let prepared = label.prepare(table).map_err(|error| error.to_string())?;
        let Some(new) = prepared else { return Ok(()) };
        let table = Arc::new(new);
        let (written, answer) = sync_channel(1);
        let new = Arc::clone(&table);
        // Nobody waits for it in the end: while the kernel has something of it the process does not end, and the device stays locked.
        let thread = std::thread::Builder::new().name("table".to_owned()).spawn(move || {
            // Nobody may want to hear it any more.
            let _ = written.send(new.write());
        });
        thread.map_err(|error| format!("the table cannot be written now: {error}"))?;
        self.writing = Some(Writing { table, answer });
        self.written(DRAIN_PATIENCE)
    }

    /// Waits until what is being written has been, but not for longer than that.
    fn written(&mut self, patience: Duration) -> Result<(), String> {
        let Some(writing) = self.writing.take() else { return Ok(()) };
        match writing.answer.recv_timeout(patience) {
            Ok(Ok(())) => {
                if let Some(label) = self.home.label_mut() {
                    label.adopt(&writing.table);
                }
                Ok(())
            }
            Ok(Err(error)) => Err(error.to_string()),
            Err(RecvTimeoutError::Timeout) => {
                self.writing = Some(writing);
                Err("the table is still being written".to_owned())
            }
            Err(RecvTimeoutError::Disconnected) => Err("writing the table panicked".to_owned()),
        }
    }

    /// Something could not be wiped. Says for how long it is left alone.
    fn rest(&mut self, volume: VolumeId, now: Instant) -> Duration {
        let doubled = |rest: &Rest| (rest.pause * 2).min(REST_MAX);
        let pause = self.resting.get(&volume).map_or(REST_AT_FIRST, doubled);
        self.resting.insert(volume, Rest { until: now + pause, pause });
        pause
    }
}

/// All tables of a host.
#[derive(Default)]
pub(super) struct Tables {
    kept: BTreeMap<String, Kept>,
    wipes: Vec<Wipe>,
    stop: Arc<AtomicBool>,
    allocation: Allocation,
}

impl Tables {
    /// The table lies on its device, a file or a block device.
    pub(super) fn add(&mut self, device: String, label: Label) {
        self.kept.insert(device, Kept::new(Home::Device(label)));
    }

    /// The table lies on its device, which is another program's.
    pub(super) fn add_by_commands(&mut self, device: String, label: Label, eraser: Arc<dyn Eraser>) {
        self.kept.insert(device, Kept::new(Home::Commands(label, eraser)));
    }

    /// There is no place for a table on the device: it is kept here, so that what is deleted is wiped.
    pub(super) fn add_unwritten(&mut self, device: String, eraser: Arc<dyn Eraser>) {
        self.kept.insert(device, Kept::new(Home::Memory(VolumeTable::default(), eraser)));
    }

    /// Refuses a volume that its device's table does not know: nobody would find it again.
    pub(super) fn check(
        &self,
        device: &str,
        id: VolumeId,
        start_bytes: u64,
        end_bytes: u64,
    ) -> Result<(), String> {
        let Some(kept) = self.kept.get(device) else { return Ok(()) };
        let known = kept.home.table().volumes.iter().any(|entry| {
            entry.id == id
                && !entry.deleted
                && entry.start_bytes == start_bytes
                && entry.end_bytes() == end_bytes
        });
        if known { Ok(()) } else { Err(format!("{id} is not in the table of volumes on ssd {device}")) }
    }

    /// Where on the device the write-intent log of a volume begins, if it has one.
    pub(super) fn intent_log(&self, device: &str, id: VolumeId) -> Option<u64> {
        self.kept.get(device)?.home.label()?.intent_log(id)
    }

    /// What volumes take up, by device; counted in the background now and then.
    pub(super) fn allocated_bytes(&mut self) -> &Allocated {
        let kept = &self.kept;
        self.allocation.refresh(Instant::now(), || {
            let on = kept.iter().flat_map(|(device, kept)| {
                let label = kept.home.label();
                let there = kept.home.table().volumes.iter().filter(|entry| !entry.deleted);
                there.filter_map(move |entry| {
                    Some(Place {
                        device: device.clone(),
                        volume: entry.id,
                        file: label?.file()?.try_clone().ok()?,
                        start_bytes: entry.start_bytes,
                        end_bytes: entry.end_bytes(),
                    })
                })
            });
            on.collect()
        });
        self.allocation.counted()
    }

    /// Keeps a table, and begins to wipe what is deleted in it and not in use.
    pub(super) fn apply(&mut self, object: &TableObject) -> Result<(), String> {
        let Some(kept) = self.kept.get_mut(&object.ssd) else {
            return Err(format!("ssd {} cannot keep a table of volumes", object.ssd));
        };
        let deleted: BTreeSet<VolumeId> =
            object.table.volumes.iter().filter(|entry| entry.deleted).map(|entry| entry.id).collect();
        let unexpected =
            self.wipes.iter().find(|wipe| wipe.device == object.ssd && !deleted.contains(&wipe.volume));
        if let Some(wipe) = unexpected {
            return Err(format!("{} on ssd {} is still being wiped", wipe.volume, object.ssd));
        }
        kept.put(&object.ssd, &object.table)?;
        kept.confirmed = true;
        self.allocation.places_changed();
        kept.wiped.retain(|id| deleted.contains(id));
        kept.resting.retain(|id, _| deleted.contains(id));
        Ok(())
    }

    /// Wipes what is deleted and for which `in_use`, of its device, is false, and reports what was wiped.
    pub(super) fn wipe(
        &mut self,
        now: Instant,
        in_use: impl Fn(&str, VolumeId) -> bool,
        reporter: Option<&Reporter>,
    ) {
        self.collect(now, reporter);
        // What a table says that is being written may be another one's place already.
        let known = |kept: &Kept| kept.confirmed && kept.writing.is_none();
        for (device, kept) in self.kept.iter_mut().filter(|(_, kept)| known(kept)) {
            let wanted = |entry: &&VolumeEntry| {
                let mut wipes = self.wipes.iter();
                let under_way = wipes.any(|wipe| wipe.device == *device && wipe.volume == entry.id);
                let rests = kept.resting.get(&entry.id).is_some_and(|rest| now < rest.until);
                entry.deleted
                    && !under_way
                    && !rests
                    && !kept.wiped.contains(&entry.id)
                    && !in_use(device, entry.id)
            };
            let wanted: Vec<VolumeEntry> = kept.home.table().volumes.iter().filter(wanted).cloned().collect();
            for entry in wanted {
                let eraser = kept.home.eraser();
                match eraser.and_then(|eraser| Wipe::begin(eraser, device, &entry, &self.stop)) {
                    Ok(wipe) => self.wipes.push(wipe),
                    Err(error) => {
                        let pause = kept.rest(entry.id, now);
                        warn!(ssd = device, volume = entry.name, %error, ?pause, "it cannot be wiped now");
                    }
                }
            }
        }
    }

    fn collect(&mut self, now: Instant, reporter: Option<&Reporter>) {
        for wipe in self.wipes.extract_if(.., |wipe| wipe.is_done()) {
            let Wiped { device, volume, result } = wipe.end();
            let Some(kept) = self.kept.get_mut(&device) else { continue };
            match result {
                Ok(()) => {
                    info!(ssd = device, %volume, "wiped");
                    kept.wiped.insert(volume);
                    kept.resting.remove(&volume);
                    if let Some(reporter) = reporter {
                        reporter.report(Report::VolumeWiped { device, volume });
                    }
                }
                Err(error) => {
                    let pause = kept.rest(volume, now);
                    error!(ssd = device, %volume, %error, ?pause, "wiping failed; it is tried again");
                }
            }
        }
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for wipe in self.wipes.drain(..) {
            // What was not finished is begun again by the next process.
            drop(wipe.end());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;
    use std::sync::{Condvar, Mutex};

    use super::*;
    use crate::ssd::Store;

    const START: u64 = 2 << 20;
    const SIZE: u64 = 1 << 20;

    fn device(directory: &tempfile::TempDir) -> PathBuf {
        let path = directory.path().join("ssd");
        File::create(&path).unwrap().set_len(4 << 20).unwrap();
        path
    }

    fn entry(id: u32, deleted: bool) -> VolumeEntry {
        VolumeEntry {
            id: VolumeId::new(id),
            name: format!("vol{id}"),
            start_bytes: START,
            size_bytes: SIZE,
            deleted,
            mirror: None,
            stripe: None,
        }
    }

    fn table(entry: VolumeEntry) -> VolumeTable {
        VolumeTable { volumes: vec![entry] }
    }

    fn object(ssd: &str, entry: VolumeEntry) -> TableObject {
        TableObject { ssd: ssd.to_owned(), table: table(entry) }
    }

    fn eventually(mut holds: impl FnMut() -> bool) {
        while !holds() {
            std::thread::yield_now();
        }
    }

    /// A device that keeps whoever flushes it, as long as it is closed.
    #[derive(Debug, Default)]
    struct Hanging {
        open: Mutex<bool>,
        opened: Condvar,
    }

    impl Hanging {
        fn open(&self) {
            *self.open.lock().unwrap() = true;
            self.opened.notify_all();
        }
    }

    impl Store for Hanging {
        fn write(&self, _: &[u8], _: u64) -> io::Result<()> {
            Ok(())
        }

        fn sync(&self) -> io::Result<()> {
            drop(self.opened.wait_while(self.open.lock().unwrap(), |open| !*open).unwrap());
            Ok(())
        }
    }

    #[test]
    fn a_device_that_hangs_keeps_nobody_from_writing_to_others() {
        let directories = [(); 2].map(|()| tempfile::tempdir_in("/dev/shm").unwrap());
        let hanging = Arc::new(Hanging::default());
        let mut label = Label::open(&device(&directories[0])).unwrap();
        label.write_to(Arc::clone(&hanging) as Arc<dyn Store>);
        let mut tables = Tables::default();
        tables.add("ssd0".to_owned(), label);
        tables.add("ssd1".to_owned(), Label::open(&device(&directories[1])).unwrap());
        let known = |tables: &Tables, ssd| tables.check(ssd, VolumeId::new(1), START, START + SIZE).is_ok();
        for _ in 0..2 {
            let refused = tables.apply(&object("ssd0", entry(1, false))).unwrap_err();
            assert!(refused.contains("still being written"), "{refused}");
            tables.apply(&object("ssd1", entry(1, false))).unwrap();
        }
        assert!(!known(&tables, "ssd0") && known(&tables, "ssd1"));
        // What the controller wants meanwhile is written after that.
        assert!(tables.apply(&object("ssd0", entry(2, false))).is_err());
        hanging.open();
        eventually(|| tables.apply(&object("ssd0", entry(1, false))).is_ok());
        assert!(known(&tables, "ssd0"));
        // Nor does anybody wait for it in the end.
        *hanging.open.lock().unwrap() = false;
        assert!(tables.apply(&object("ssd0", entry(2, false))).is_err());
        drop(tables);
        hanging.open();
    }

    #[test]
    fn what_cannot_be_wiped_is_tried_again_less_and_less_often() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = device(&directory);
        Label::open(&path).unwrap().write(&table(entry(1, true))).unwrap();
        let mut tables = Tables::default();
        // Nothing can be written to what is only looked at.
        tables.add("ssd0".to_owned(), Label::inspect(&path).unwrap());
        tables.apply(&object("ssd0", entry(1, true))).unwrap();
        let mut now = Instant::now();
        let mut pauses = Vec::new();
        for _ in 0..8 {
            tables.wipe(now, |_, _| false, None);
            assert_eq!(tables.wipes.len(), 1);
            eventually(|| tables.wipes[0].is_done());
            tables.wipe(now, |_, _| false, None);
            assert!(tables.wipes.is_empty(), "it rests");
            let rest = tables.kept["ssd0"].resting[&VolumeId::new(1)];
            tables.wipe(now + rest.pause / 2, |_, _| false, None);
            assert!(tables.wipes.is_empty(), "it still rests");
            pauses.push(rest.pause.as_secs());
            now = rest.until;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        // A device that is opened again begins anew.
        tables.apply(&object("ssd0", entry(1, false))).unwrap_err();
        tables.add("ssd0".to_owned(), Label::open(&path).unwrap());
        tables.apply(&object("ssd0", entry(1, true))).unwrap();
        eventually(|| {
            tables.wipe(now, |_, _| false, None);
            tables.kept["ssd0"].wiped.len() == 1
        });
    }

    #[test]
    fn a_place_that_is_another_volumes_by_now_is_not_wiped() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = device(&directory);
        Label::open(&path).unwrap().write(&table(entry(1, true))).unwrap();
        // The backend starts again, and the controller has given the place on meanwhile.
        let file = File::options().read(true).write(true).open(&path).unwrap();
        file.write_all_at(&[7; 4096], START).unwrap();
        let mut tables = Tables::default();
        tables.add("ssd0".to_owned(), Label::open(&path).unwrap());
        tables.wipe(Instant::now(), |_, _| false, None);
        assert!(tables.wipes.is_empty(), "nobody has said yet that it is still deleted");
        tables.apply(&object("ssd0", entry(2, false))).unwrap();
        tables.wipe(Instant::now(), |_, _| false, None);
        assert!(tables.wipes.is_empty());
        // Nor is a place given on while it is being wiped.
        tables.apply(&object("ssd0", entry(2, true))).unwrap();
        tables.wipe(Instant::now(), |_, _| false, None);
        assert_eq!(tables.wipes.len(), 1);
        assert!(tables.apply(&object("ssd0", entry(3, false))).is_err());
        while !tables.wipes.is_empty() {
            tables.wipe(Instant::now(), |_, _| false, None);
        }
        tables.apply(&object("ssd0", entry(3, false))).unwrap();
    }
}
