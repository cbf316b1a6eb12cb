//! How much room each volume takes up: less than its size where it lies in a file with holes.
//!
//! The file system is asked, range by range, by a thread that does little else: of a file in many pieces that takes a while.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pod_protocol::ids::VolumeId;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use tracing::warn;

/// From the end of one count to the next.
const PAUSE: Duration = Duration::from_secs(5);
/// Or this many times as long as the count took, if that is longer: it never takes more than one part in so many of a core.
const PAUSE_FACTOR: u32 = 100;

/// Of each device, what its volumes take up there, in bytes.
pub(super) type Allocated = BTreeMap<String, Vec<(VolumeId, u64)>>;

/// A volume's place on a device.
pub(super) struct Place {
    pub(super) device: String,
    pub(super) volume: VolumeId,
    pub(super) file: File,
    pub(super) start_bytes: u64,
    pub(super) end_bytes: u64,
}

/// What was counted, and the thread that counts.
#[derive(Default)]
pub(super) struct Allocation {
    counted: Allocated,
    running: Option<(Instant, JoinHandle<Allocated>)>,
    due: Option<Instant>,
    /// There are other places than those that are being counted.
    outdated: bool,
    stop: Arc<AtomicBool>,
}

impl Allocation {
    /// What was counted last.
    pub(super) fn counted(&self) -> &Allocated {
        &self.counted
    }

    /// There are other places by now: they are counted without a pause.
    pub(super) fn places_changed(&mut self) {
        self.due = None;
        self.outdated = self.running.is_some();
    }

    /// Counts anew in the background, if it is time for that. `places` are asked for only then.
    pub(super) fn refresh(&mut self, now: Instant, places: impl FnOnce() -> Vec<Place>) {
        if let Some((began, thread)) = self.running.take_if(|(_, thread)| thread.is_finished()) {
            if let Ok(counted) = thread.join() {
                self.counted = counted;
            } else {
                warn!("counting what volumes take up panicked; it is tried again");
            }
            let took = now.saturating_duration_since(began);
            let pause = PAUSE.max(took.saturating_mul(PAUSE_FACTOR));
            self.due = now.checked_add(pause).filter(|_| !std::mem::take(&mut self.outdated));
        }
        if self.running.is_some() || self.due.is_some_and(|due| now < due) {
            return;
        }
        let (places, stop) = (places(), Arc::clone(&self.stop));
        let thread =
            std::thread::Builder::new().name("allocation".to_owned()).spawn(move || count(&places, &stop));
        match thread {
            Ok(thread) => self.running = Some((now, thread)),
            Err(error) => {
                warn!(%error, "what volumes take up cannot be counted now");
                self.due = now.checked_add(PAUSE);
            }
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some((_, thread)) = self.running.take() {
            // What it counted is of interest to nobody.
            let _ = thread.join();
        }
    }
}

fn count(places: &[Place], stop: &AtomicBool) -> Allocated {
    let mut counted = Allocated::new();
    for place in places {
        // A device that is no file, or a file system that does not tell, has no figure.
        if let Ok(bytes) = allocated_bytes(&place.file, place.start_bytes, place.end_bytes, stop) {
            counted.entry(place.device.clone()).or_default().push((place.volume, bytes));
        }
    }
    counted
}

/// How much of a range of a file is no hole.
fn allocated_bytes(file: &File, start_bytes: u64, end_bytes: u64, stop: &AtomicBool) -> io::Result<u64> {
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let (mut at, mut bytes) = (start_bytes, 0);
    while at < end_bytes {
        if stop.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        // The position that this leaves is used by nobody: everybody else says where.
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data,
            // A hole up to the end of the file.
            Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno.into()),
        };
        if data >= end_bytes {
            break;
        }
        at = seek(file, SeekFrom::Hole(data))?.min(end_bytes);
        bytes += at - data;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn file() -> File {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(16 * MIB).unwrap();
        for (at, bytes) in [(MIB, MIB), (4 * MIB, 2 * MIB), (9 * MIB, MIB)] {
            file.write_all_at(&vec![7; usize::try_from(bytes).unwrap()], at).unwrap();
        }
        file
    }

    #[test]
    fn holes_take_up_nothing_and_ranges_end_where_they_end() {
        let file = file();
        let of = |start, end| {
            allocated_bytes(&file, start * MIB, end * MIB, &AtomicBool::new(false)).map(|bytes| bytes / MIB)
        };
        for (range, expected) in
            [((0, 16), 4), ((0, 1), 0), ((5, 10), 2), ((4, 5), 1), ((10, 16), 0), ((20, 30), 0)]
        {
            assert_eq!(of(range.0, range.1).unwrap(), expected, "{range:?}");
        }
        assert!(allocated_bytes(&file, 0, MIB, &AtomicBool::new(true)).is_err(), "it was told to stop");
        let device = File::open("/dev/zero").unwrap();
        assert!(allocated_bytes(&device, 0, MIB, &AtomicBool::new(false)).is_err());
    }

    #[test]
    fn it_is_counted_in_the_background_and_not_too_often() {
        let volume = VolumeId::new(3);
        let place =
            || Place { device: "ssd0".to_owned(), volume, file: file(), start_bytes: 0, end_bytes: 16 * MIB };
        let mut allocation = Allocation::default();
        let began = Instant::now();
        let mut asked = 0;
        let deadline = Instant::now() + Duration::from_secs(20);
        while allocation.counted().is_empty() {
            assert!(Instant::now() < deadline, "nothing was ever counted");
            allocation.refresh(began, || {
                asked += 1;
                vec![place()]
            });
            std::thread::yield_now();
        }
        assert_eq!(allocation.counted()["ssd0"], [(volume, 4 * MIB)]);
        // By this clock no time has passed since.
        allocation.refresh(began, || unreachable!("it was counted just now"));
        allocation.refresh(began + PAUSE, || {
            asked += 1;
            Vec::new()
        });
        assert_eq!(asked, 2);
    }
}
