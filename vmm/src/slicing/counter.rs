//! Counting what vCPUs load and store, by the kernel's resctrl file system.
//!
//! A processor with memory bandwidth monitoring (MBM) counts what passes between its last-level cache and memory, by the group that the
//! running thread belongs to. A monitoring group with the vCPU threads in it therefore counts what they load and store, and none of what
//! QEMU's other threads, or a frontend, move. That includes what they move to and from the host's own memory: it is the pool's where
//! the VM's memory lies in the pool.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::failed;
use crate::VmmError;

/// Where the file system is mounted as a rule.
pub const RESCTRL: &str = "/sys/fs/resctrl";

/// The event that is read.
const EVENT: &str = "mbm_total_bytes";

/// The resctrl file system of a host that counts bytes.
#[derive(Debug, Clone)]
pub struct Resctrl {
    root: PathBuf,
}

/// A monitoring group. When it is dropped, the group is gone.
#[derive(Debug)]
pub struct Counter {
    group: PathBuf,
    threads: Vec<u32>,
    /// The counters of each cache, as they were read last.
    last: Vec<Seen>,
}

impl Resctrl {
    /// The one that is mounted there; or a control group in it, where the machine's threads are in one.
    pub fn open(root: &Path) -> Result<Self, VmmError> {
        let there = root.display();
        let otherwise = "or hold the vCPUs to a part that you choose: --share PERCENT";
        if !root.join("mon_groups").is_dir() {
            return Err(failed(format!(
                "{there} has no monitoring groups, so nothing says what vCPUs load and store: `mount -t resctrl resctrl {RESCTRL}` \
                 (the processor and the kernel must know memory bandwidth monitoring: cqm_mbm_total in /proc/cpuinfo), say where it is \
                 with --resctrl, {otherwise}"
            )));
        }
        // A control group has no such directory of its own.
        if let Ok(features) = fs::read_to_string(root.join("info/L3_MON/mon_features"))
            && !features.lines().any(|feature| feature.trim() == EVENT)
        {
            return Err(failed(format!(
                "{there} counts no bytes ({EVENT} is not among info/L3_MON/mon_features): this processor cannot be asked, {otherwise}"
            )));
        }
        Ok(Self { root: root.to_owned() })
    }

    /// Counts what these threads of the machine with this name load and store from now on. What another counter for it left that was
    /// killed is taken over.
    pub fn count(&self, machine: &str, threads: &[u32]) -> Result<Counter, VmmError> {
        let plain = |c: char| if c.is_ascii_alphanumeric() || "-_".contains(c) { c } else { '_' };
        let name: String = machine.chars().map(plain).collect();
        let group = self.root.join("mon_groups").join(format!("wadi-{name}"));
        match fs::create_dir(&group) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                return Err(failed(format!(
                    "{}: the processor can monitor no more groups: remove some below {}",
                    group.display(),
                    self.root.display()
                )));
            }
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(format!("{}: {error}", group.display())));
            }
            _ => {}
        }
        // From here on it is removed again.
        let mut counter = Counter { group, threads: Vec::new(), last: Vec::new() };
        counter.follow(threads)?;
        counter.last = counter.look()?.into_iter().filter(|(_, bytes)| bytes.is_some()).collect();
        Ok(counter)
    }
}

impl Counter {
    /// Counts these threads, and none that were counted before and are not among them.
    pub fn follow(&mut self, threads: &[u32]) -> Result<(), VmmError> {
        let path = self.group.join("tasks");
        let failed = |error: &io::Error| {
            let hint = if error.kind() == io::ErrorKind::InvalidInput {
                ": the threads are in a control group; say which with --resctrl DIRECTORY"
            } else {
                ""
            };
            failed(format!("{}: {error}{hint}", path.display()))
        };
        let mut tasks = OpenOptions::new().append(true).open(&path).map_err(|error| failed(&error))?;
        for thread in threads.iter().filter(|thread| !self.threads.contains(thread)) {
            // One with each write: the kernel wants that. One that has just ended is no thread any more.
            match tasks.write_all(format!("{thread}\n").as_bytes()) {
                Err(error) if Errno::from_io_error(&error) == Some(Errno::SRCH) => {}
                Err(error) => return Err(failed(&error)),
                Ok(()) => {}
            }
        }
        // Those that are not followed any more have ended, or will be in no group of ours when this one is gone.
        self.threads = threads.to_vec();
        Ok(())
    }

    /// The bytes since it was asked last; nothing where the processor has no answer at the moment, and then they are in the next answer.
    pub fn take(&mut self) -> Result<Option<u64>, VmmError> {
        let now = self.look()?;
        let of = |all: &[Seen], cache: &Path| {
            all.iter().find(|(other, _)| other == cache).map(|(_, bytes)| *bytes)
        };
        // One that never had an answer is not waited for, nor one whose processor is gone.
        let waits = self.last.iter().any(|(cache, _)| of(&now, cache) == Some(None));
        if waits || now.iter().all(|(_, bytes)| bytes.is_none()) {
            return Ok(None);
        }
        let since = |(cache, bytes): &Seen| {
            let (before, bytes) = (of(&self.last, cache)??, (*bytes)?);
            // One that counts less than before began anew.
            Some(bytes.checked_sub(before).unwrap_or(bytes))
        };
        let bytes = now.iter().filter_map(since).sum();
        self.last = now.into_iter().filter(|(_, bytes)| bytes.is_some()).collect();
        Ok(Some(bytes))
    }

    /// What each cache has counted; nothing of one that has no answer.
    fn look(&self) -> Result<Vec<Seen>, VmmError> {
        let caches = self.group.join("mon_data");
        let unreadable = |path: &Path, error: &io::Error| failed(format!("{}: {error}", path.display()));
        let mut found = Vec::new();
        for entry in fs::read_dir(&caches).map_err(|error| unreadable(&caches, &error))? {
            let cache = entry.map_err(|error| unreadable(&caches, &error))?.path();
            match fs::read_to_string(cache.join(EVENT)) {
                // It says `Unavailable`, `Unassigned` or `Error` where it cannot tell.
                Ok(text) => found.push((cache, text.trim().parse().ok())),
                // Not of a level-3 cache.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(unreadable(&cache.join(EVENT), &error)),
            }
        }
        Ok(found)
    }
}

/// A cache, and what it has counted.
type Seen = (PathBuf, Option<u64>);

impl Drop for Counter {
    fn drop(&mut self) {
        // The kernel moves its threads back to where all are.
        let _ = fs::remove_dir(&self.group);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that looks like the file system, on a machine with two caches.
    fn machine() -> (tempfile::TempDir, Resctrl) {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("info/L3_MON")).unwrap();
        fs::write(directory.path().join("info/L3_MON/mon_features"), "llc_occupancy\nmbm_total_bytes\n")
            .unwrap();
        fs::create_dir(directory.path().join("mon_groups")).unwrap();
        let resctrl = Resctrl::open(directory.path()).unwrap();
        (directory, resctrl)
    }

    /// The kernel fills each group that is made.
    fn group(directory: &tempfile::TempDir) -> PathBuf {
        let group = directory.path().join("mon_groups/wadi-vm1");
        for cache in ["mon_L3_00", "mon_L3_01"] {
            fs::create_dir_all(group.join("mon_data").join(cache)).unwrap();
        }
        fs::write(group.join("tasks"), "").unwrap();
        say(&group, "100", "7000");
        group
    }

    fn say(group: &Path, first: &str, second: &str) {
        for (cache, text) in [("mon_L3_00", first), ("mon_L3_01", second)] {
            fs::write(group.join("mon_data").join(cache).join(EVENT), format!("{text}\n")).unwrap();
        }
    }

    #[test]
    fn bytes_of_all_caches_are_counted_since_the_last_time() {
        let (directory, resctrl) = machine();
        let group = group(&directory);
        let mut counter = resctrl.count("vm1", &[4, 5]).unwrap();
        assert_eq!(fs::read_to_string(group.join("tasks")).unwrap(), "4\n5\n");
        assert_eq!(counter.take().unwrap(), Some(0), "what it counted before is no concern");
        say(&group, "150", "7010");
        assert_eq!(counter.take().unwrap(), Some(60));
        // What has no answer is passed over, and nothing is lost.
        say(&group, "Unavailable", "7020");
        assert_eq!(counter.take().unwrap(), None);
        say(&group, "160", "Error");
        assert_eq!(counter.take().unwrap(), None);
        say(&group, "170", "7040");
        assert_eq!(counter.take().unwrap(), Some(50));
        // One that began anew.
        say(&group, "5", "7040");
        assert_eq!(counter.take().unwrap(), Some(5));
        // A vCPU that was plugged in.
        counter.follow(&[4, 5, 6]).unwrap();
        assert_eq!(fs::read_to_string(group.join("tasks")).unwrap(), "4\n5\n6\n");
    }

    #[test]
    fn the_group_goes_also_one_that_was_left() {
        let (directory, resctrl) = machine();
        let group = group(&directory);
        let counter = resctrl.count("vm1", &[4]).unwrap();
        // Here nobody but us removes the files, which are the kernel's.
        fs::remove_dir_all(group.join("mon_data")).unwrap();
        fs::remove_file(group.join("tasks")).unwrap();
        drop(counter);
        assert!(!group.exists());
    }

    #[test]
    fn what_is_not_there_is_said_with_what_to_do() {
        let directory = tempfile::tempdir().unwrap();
        let error = Resctrl::open(directory.path()).unwrap_err().to_string();
        assert!(error.contains("mount -t resctrl") && error.contains("--share PERCENT"), "{error}");
        let (directory, resctrl) = machine();
        fs::write(directory.path().join("info/L3_MON/mon_features"), "llc_occupancy\n").unwrap();
        let error = Resctrl::open(directory.path()).unwrap_err().to_string();
        assert!(error.contains(EVENT) && error.contains("--share PERCENT"), "{error}");
        // No kernel fills the group.
        let error = resctrl.count("vm1", &[4]).unwrap_err().to_string();
        assert!(error.contains("wadi-vm1/tasks"), "{error}");
        assert!(!directory.path().join("mon_groups/wadi-vm1").exists());
    }
}
