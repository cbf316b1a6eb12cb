//! The tables of volumes on this host's devices, and the wiping of what was deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use pod_protocol::endpoint::Reporter;
use pod_protocol::ids::VolumeId;
use pod_protocol::objects::TableObject;
use pod_protocol::reports::Report;
use pod_protocol::volume_table::VolumeEntry;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use tracing::{error, info, warn};

use super::allocation::{Allocated, Allocation, Place};
use crate::ssd::Label;

/// Wiped at a time: so often a stop is noticed.
const WIPE_STEP_BYTES: u64 = 64 << 20;
const ZEROS_BYTES: usize = 1 << 20;

/// A device that keeps a table of its volumes.
struct Kept {
    label: Label,
    /// The controller has said what is on the device. What was found there may be older than what the controller did since:
    /// the place of a deleted volume may be another one's by now.
    confirmed: bool,
    /// Deleted volumes whose data is gone.
    wiped: BTreeSet<VolumeId>,
}

/// Something that is being wiped.
struct Wipe {
    device: String,
    volume: VolumeId,
    done: Arc<AtomicBool>,
    thread: JoinHandle<io::Result<()>>,
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
    pub(super) fn add(&mut self, device: String, label: Label) {
        self.kept.insert(device, Kept { label, confirmed: false, wiped: BTreeSet::new() });
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
        let known = kept.label.table().volumes.iter().any(|entry| {
            entry.id == id
                && !entry.deleted
                && entry.start_bytes == start_bytes
                && entry.end_bytes() == end_bytes
        });
        if known { Ok(()) } else { Err(format!("{id} is not in the table of volumes on ssd {device}")) }
    }

    /// Where on the device the write-intent log of a volume begins, if it has one.
    pub(super) fn intent_log(&self, device: &str, id: VolumeId) -> Option<u64> {
        self.kept.get(device)?.label.intent_log(id)
    }

    /// What volumes take up, by device; counted in the background now and then.
    pub(super) fn allocated_bytes(&mut self) -> &Allocated {
        let kept = &self.kept;
        self.allocation.refresh(Instant::now(), || {
            let on = kept.iter().flat_map(|(device, kept)| {
                let there = kept.label.table().volumes.iter().filter(|entry| !entry.deleted);
                there.filter_map(move |entry| {
                    Some(Place {
                        device: device.clone(),
                        volume: entry.id,
                        file: kept.label.file().try_clone().ok()?,
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
        kept.label.write(&object.table).map_err(|error| error.to_string())?;
        kept.confirmed = true;
        self.allocation.places_changed();
        kept.wiped.retain(|id| deleted.contains(id));
        Ok(())
    }

    /// Wipes what is deleted and for which `in_use`, of its device, is false, and reports what was wiped.
    pub(super) fn wipe(&mut self, in_use: impl Fn(&str, VolumeId) -> bool, reporter: Option<&Reporter>) {
        self.collect(reporter);
        for (device, kept) in self.kept.iter().filter(|(_, kept)| kept.confirmed) {
            for entry in kept.label.table().volumes.iter().filter(|entry| entry.deleted) {
                let under_way =
                    self.wipes.iter().any(|wipe| wipe.device == *device && wipe.volume == entry.id);
                if under_way || kept.wiped.contains(&entry.id) || in_use(device, entry.id) {
                    continue;
                }
                match begin(kept.label.file(), device, entry, &self.stop) {
                    Ok(wipe) => self.wipes.push(wipe),
                    Err(error) => warn!(ssd = device, volume = entry.name, %error, "cannot be wiped now"),
                }
            }
        }
    }

    fn collect(&mut self, reporter: Option<&Reporter>) {
        for wipe in self.wipes.extract_if(.., |wipe| wipe.done.load(Ordering::Acquire)) {
            let Wipe { device, volume, thread, .. } = wipe;
            match thread.join() {
                Ok(Ok(())) => {
                    info!(ssd = device, %volume, "wiped");
                    if let Some(kept) = self.kept.get_mut(&device) {
                        kept.wiped.insert(volume);
                    }
                    if let Some(reporter) = reporter {
                        reporter.report(Report::VolumeWiped { device, volume });
                    }
                }
                Ok(Err(error)) => error!(ssd = device, %volume, %error, "wiping failed; it is tried again"),
                Err(_) => error!(ssd = device, %volume, "wiping panicked; it is tried again"),
            }
        }
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for wipe in self.wipes.drain(..) {
            // What was not finished is begun again by the next process.
            let _ = wipe.thread.join();
        }
    }
}

fn begin(file: &File, device: &str, entry: &VolumeEntry, stop: &Arc<AtomicBool>) -> io::Result<Wipe> {
    let (file, stop, done) = (file.try_clone()?, Arc::clone(stop), Arc::new(AtomicBool::new(false)));
    let (start, end, finished) = (entry.start_bytes, entry.end_bytes(), Arc::clone(&done));
    let thread = std::thread::Builder::new().name("wipe".to_owned()).spawn(move || {
        let result = wipe(&file, start, end, &stop);
        finished.store(true, Ordering::Release);
        result
    })?;
    Ok(Wipe { device: device.to_owned(), volume: entry.id, done, thread })
}

/// Makes a range read as zeros, for good. Gives its space back where that can be done.
fn wipe(file: &File, start: u64, end: u64, stop: &AtomicBool) -> io::Result<()> {
    let mut at = start;
    while at < end {
        if stop.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let bytes = WIPE_STEP_BYTES.min(end - at);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(file, punch, at, bytes) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::NODEV) => {
                write_zeros(file, at, bytes)?;
            }
            Err(errno) => return Err(errno.into()),
        }
        at += bytes;
    }
    file.sync_data()
}

fn write_zeros(file: &File, start: u64, bytes: u64) -> io::Result<()> {
    let zeros = vec![0; ZEROS_BYTES];
    let mut done = 0;
    while done < bytes {
        let step = (ZEROS_BYTES as u64).min(bytes - done);
        #[allow(clippy::cast_possible_truncation)] // not longer than the zeros
        file.write_all_at(&zeros[..step as usize], start + done)?;
        done += step;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use pod_protocol::volume_table::VolumeTable;

    use super::*;

    #[test]
    fn a_place_that_is_another_volumes_by_now_is_not_wiped() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("ssd");
        let (start, size) = (2 << 20, 1 << 20);
        File::create(&path).unwrap().set_len(4 << 20).unwrap();
        let entry = |id: u32, deleted| VolumeEntry {
            id: VolumeId::new(id),
            name: format!("vol{id}"),
            start_bytes: start,
            size_bytes: size,
            deleted,
            mirror: None,
            stripe: None,
        };
        let table = |entry| VolumeTable { volumes: vec![entry] };
        Label::open(&path).unwrap().write(&table(entry(1, true))).unwrap();
        // The backend starts again, and the controller has given the place on meanwhile.
        let file = File::options().read(true).write(true).open(&path).unwrap();
        file.write_all_at(&[7; 4096], start).unwrap();
        let mut tables = Tables::default();
        tables.add("ssd0".to_owned(), Label::open(&path).unwrap());
        tables.wipe(|_, _| false, None);
        assert!(tables.wipes.is_empty(), "nobody has said yet that it is still deleted");
        let now = |entry| TableObject { ssd: "ssd0".to_owned(), table: table(entry) };
        tables.apply(&now(entry(2, false))).unwrap();
        tables.wipe(|_, _| false, None);
        assert!(tables.wipes.is_empty());
        // Nor is a place given on while it is being wiped.
        tables.apply(&now(entry(2, true))).unwrap();
        tables.wipe(|_, _| false, None);
        assert_eq!(tables.wipes.len(), 1);
        assert!(tables.apply(&now(entry(3, false))).is_err());
        while !tables.wipes.is_empty() {
            tables.wipe(|_, _| false, None);
        }
        tables.apply(&now(entry(3, false))).unwrap();
    }

    #[test]
    fn a_wiped_range_reads_as_zeros_and_its_neighbours_stay() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(directory.path().join("ssd"))
            .unwrap();
        file.write_all_at(&vec![7; 4 << 20], 0).unwrap();
        wipe(&file, 1 << 20, 3 << 20, &AtomicBool::new(false)).unwrap();
        let mut read = vec![0; 4 << 20];
        file.read_exact_at(&mut read, 0).unwrap();
        assert!(read.iter().enumerate().all(|(at, &byte)| (byte == 0) == (1 << 20..3 << 20).contains(&at)));
        write_zeros(&file, 0, (1 << 20) + 5).unwrap();
        file.read_exact_at(&mut read, 0).unwrap();
        assert!(read[..1 << 20].iter().all(|&byte| byte == 0) && read[3 << 20] == 7);
        assert!(wipe(&file, 0, 4 << 20, &AtomicBool::new(true)).is_err(), "it was told to stop");
    }
}
