//! The wiping of what was deleted, before its place is given on.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use pod_protocol::ids::VolumeId;
use pod_protocol::volume_table::VolumeEntry;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

/// Wiped at a time: so often a stop is noticed.
pub(super) const WIPE_STEP_BYTES: u64 = 64 << 20;
const ZEROS_BYTES: usize = 1 << 20;

/// Makes ranges of a device read as zeros.
pub(super) trait Eraser: Send + Sync {
    /// Of this range, for good. Gives its space back where that can be done.
    fn wipe(&self, start: u64, end: u64, stop: &AtomicBool) -> io::Result<()>;
}

/// Something that is being wiped.
pub(super) struct Wipe {
    pub(super) device: String,
    pub(super) volume: VolumeId,
    done: Arc<AtomicBool>,
    thread: JoinHandle<io::Result<()>>,
}

/// What became of it.
pub(super) struct Wiped {
    pub(super) device: String,
    pub(super) volume: VolumeId,
    pub(super) result: io::Result<()>,
}

impl Wipe {
    pub(super) fn begin(
        eraser: Arc<dyn Eraser>,
        device: &str,
        entry: &VolumeEntry,
        stop: &Arc<AtomicBool>,
    ) -> io::Result<Self> {
        let (stop, done) = (Arc::clone(stop), Arc::new(AtomicBool::new(false)));
        let (start, end, finished) = (entry.start_bytes, entry.end_bytes(), Arc::clone(&done));
        let thread = std::thread::Builder::new().name("wipe".to_owned()).spawn(move || {
            let result = eraser.wipe(start, end, &stop);
            finished.store(true, Ordering::Release);
            result
        })?;
        Ok(Self { device: device.to_owned(), volume: entry.id, done, thread })
    }

    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Waits for its end.
    pub(super) fn end(self) -> Wiped {
        let Self { device, volume, thread, .. } = self;
        let result = thread.join().unwrap_or_else(|_| Err(io::Error::other("it panicked")));
        Wiped { device, volume, result }
    }
}

impl Eraser for File {
    fn wipe(&self, start: u64, end: u64, stop: &AtomicBool) -> io::Result<()> {
        wipe(self, start, end, stop)
    }
}

/// Makes a range read as zeros, for good. Gives its space back where that can be done.
fn wipe(file: &File, start: u64, end: u64, stop: &AtomicBool) -> io::Result<()> {
    let mut at = start;
    while at < end {
        if stop.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let bytes = WIPE_STEP_BYTES.min(end - at);
        // Whichever the device can do; what it cannot, it says at once. Of a block device both make zeros, and do not merely have it
        // forget.
        let ways = [FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE];
        let mut results =
            ways.into_iter().map(|way| fallocate(file, way | FallocateFlags::KEEP_SIZE, at, bytes));
        let cannot = [Errno::OPNOTSUPP, Errno::NOSYS, Errno::INVAL, Errno::NODEV, Errno::BUSY];
        match results.find(|result| !result.is_err_and(|errno| cannot.contains(&errno))) {
            Some(result) => result?,
            None => write_zeros(file, at, bytes)?,
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
    use super::*;

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
