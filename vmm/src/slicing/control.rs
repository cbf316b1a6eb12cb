//! The file through which the shim in a QEMU is commanded. It is read and written, not mapped: a QEMU that shortens it does no harm.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::offset_of;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use vcpu_slicing::{Control, Duty, Failure, MAGIC, Order, SLOTS, Slot};

use super::{VcpuUse, failed};
use crate::VmmError;

/// Where a slot has its thread.
const THREAD: Range<usize> = offset_of!(Slot, thread)..offset_of!(Slot, thread) + size_of::<u32>();

/// The file, opened.
#[derive(Debug)]
pub struct ControlFile {
    path: PathBuf,
    file: File,
}

impl ControlFile {
    /// Makes it anew, for a QEMU that is about to be started.
    pub fn create(path: &Path) -> io::Result<()> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        // QEMU maps it: where the file system is full, its first write to what has no blocks would end it (SIGBUS).
        let mut bytes = vec![0; size_of::<Control>()];
        bytes[..size_of_val(&MAGIC)].copy_from_slice(&MAGIC.to_ne_bytes());
        file.write_all_at(&bytes, 0)
    }

    /// Opens that of a QEMU.
    pub fn open(path: &Path) -> Result<Self, VmmError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|error| failed(format!("{}: {error}", path.display())))?;
        let opened = Self { path: path.to_owned(), file };
        if opened.long(offset_of!(Control, magic))? != MAGIC {
            let reason = "is of another version of vmm: end the machine and start it again";
            return Err(failed(format!("{} {reason}", path.display())));
        }
        Ok(opened)
    }

    /// The process whose vCPUs the shim slices; none until the first has shown itself.
    pub fn process(&self) -> Result<Option<u32>, VmmError> {
        Ok(Some(self.word(offset_of!(Control, process))?).filter(|process| *process != 0))
    }

    /// Why the shim cannot slice, if it cannot.
    pub fn failure(&self) -> Result<Option<&'static str>, VmmError> {
        let code = self.word(offset_of!(Control, failure))?;
        Ok((code != 0).then(|| Failure::from_code(code).map_or("for an unknown reason", Failure::describe)))
    }

    /// Whether the shim has taken up the newest order.
    pub fn taken(&self) -> Result<bool, VmmError> {
        Ok(self.long(offset_of!(Control, taken))? == self.order(offset_of!(Order, ended))?)
    }

    /// Tells the shim which threads are vCPUs.
    pub fn ask(&self, threads: &[u32]) -> Result<(), VmmError> {
        if threads.len() > SLOTS {
            return Err(failed(format!("{} has room for {SLOTS} vCPUs", self.path.display())));
        }
        let mut list = threads.to_vec();
        list.resize(SLOTS, 0);
        let bytes: Vec<u8> = list.into_iter().flat_map(u32::to_ne_bytes).collect();
        self.write(&bytes, offset_of!(Control, asked))
    }

    /// Orders `duty`, for so long from now.
    pub fn command(&self, duty: Duty, holds_for: Duration) -> Result<(), VmmError> {
        let version = self.order(offset_of!(Order, ended))?.wrapping_add(1).max(1);
        let until = ns_from_now(holds_for);
        let write = |value: u64, offset: usize| self.write_order(value, offset);
        // Who reads it meanwhile sees that it is not finished.
        write(version, offset_of!(Order, begun))?;
        write(duty.run_ns, offset_of!(Order, run_ns))?;
        write(duty.window_ns, offset_of!(Order, window_ns))?;
        write(until, offset_of!(Order, until_ns))?;
        write(version, offset_of!(Order, ended))
    }

    /// Has the last order hold for so long from now: one write, for each may wake the shim's thread.
    pub fn renew(&self, holds_for: Duration) -> Result<(), VmmError> {
        self.write_order(ns_from_now(holds_for), offset_of!(Order, until_ns))
    }

    /// What the vCPUs did.
    pub fn usage(&self) -> Result<Vec<VcpuUse>, VmmError> {
        let mut found = Vec::new();
        // Most are free, which one look at all of them shows.
        let mut slots = vec![0; SLOTS * size_of::<Slot>()];
        self.read(&mut slots, offset_of!(Control, slots))?;
        let used = slots.chunks_exact(size_of::<Slot>()).enumerate();
        for index in used.filter(|(_, slot)| slot[THREAD] != [0; 4]).map(|(index, _)| index) {
            let slot = offset_of!(Control, slots) + index * size_of::<Slot>();
            let thread = self.word(slot + offset_of!(Slot, thread))?;
            let number = |offset: usize| self.long(slot + offset);
            let time = |offset: usize| number(offset).map(Duration::from_nanos);
            // In this order: see `Slot`.
            let sleeps = number(offset_of!(Slot, sleeps))?;
            let slept = time(offset_of!(Slot, slept_ns))?;
            let ran = time(offset_of!(Slot, ran_ns))?;
            let elapsed = time(offset_of!(Slot, elapsed_ns))?;
            let windows = number(offset_of!(Slot, windows))?;
            let squares = number(offset_of!(Slot, squares))?;
            found.push(VcpuUse {
                thread,
                elapsed,
                ran,
                slept,
                sleeps,
                forgiven: time(offset_of!(Slot, forgiven_ns))?,
                retries: number(offset_of!(Slot, retries))?,
                missed: number(offset_of!(Slot, missed))?,
                carry_ns: number(offset_of!(Slot, carry_ns))?.cast_signed(),
                looks: number(offset_of!(Slot, ticks))?,
                windows,
                squares,
            });
        }
        Ok(found)
    }

    fn write_order(&self, value: u64, offset: usize) -> Result<(), VmmError> {
        self.write(&value.to_ne_bytes(), offset_of!(Control, order) + offset)
    }

    fn order(&self, offset: usize) -> Result<u64, VmmError> {
        self.long(offset_of!(Control, order) + offset)
    }

    fn long(&self, offset: usize) -> Result<u64, VmmError> {
        let mut bytes = [0; 8];
        self.read(&mut bytes, offset)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn word(&self, offset: usize) -> Result<u32, VmmError> {
        let mut bytes = [0; 4];
        self.read(&mut bytes, offset)?;
        Ok(u32::from_ne_bytes(bytes))
    }

    fn read(&self, bytes: &mut [u8], offset: usize) -> Result<(), VmmError> {
        let read = self.file.read_exact_at(bytes, offset as u64);
        read.map_err(|error| failed(format!("cannot read {}: {error}", self.path.display())))
    }

    fn write(&self, bytes: &[u8], offset: usize) -> Result<(), VmmError> {
        let written = self.file.write_all_at(bytes, offset as u64);
        written.map_err(|error| failed(format!("cannot write {}: {error}", self.path.display())))
    }
}

/// When so much time will have passed, in ns of the clock that the shim looks at.
fn ns_from_now(time: Duration) -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let now = Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0));
    u64::try_from((now + time).as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_file_says_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vm1-vcpus");
        ControlFile::create(&path).unwrap();
        ControlFile::create(&path).unwrap();
        let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).unwrap());
        assert!(
            blocks * 512 >= size_of::<Control>() as u64,
            "QEMU would end where the file system has none left"
        );
        let file = ControlFile::open(&path).unwrap();
        assert_eq!((file.process().unwrap(), file.failure().unwrap()), (None, None));
        assert_eq!(file.usage().unwrap(), []);
        file.command(Duty { run_ns: 1, window_ns: 2 }, Duration::from_secs(1)).unwrap();
        assert!(!file.taken().unwrap(), "nobody is there to take it");
        file.ask(&[7; SLOTS]).unwrap();
        assert!(file.ask(&[7; SLOTS + 1]).is_err());
    }

    #[test]
    fn what_is_no_such_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vm1-vcpus");
        assert!(ControlFile::open(&path).is_err());
        std::fs::write(&path, "short").unwrap();
        assert!(ControlFile::open(&path).is_err());
        std::fs::write(&path, [0; 64]).unwrap();
        assert!(ControlFile::open(&path).unwrap_err().to_string().contains("version"));
        // A QEMU that shortens it is no danger.
        ControlFile::create(&path).unwrap();
        let file = ControlFile::open(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(file.usage().is_err());
    }
}
