//! What vCPUs load and store, by a directory that looks like resctrl: a fake machine adds bytes in proportion to the processor time that
//! they got, so that only vCPUs that really sleep move less.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Result;

use crate::pod::Pod;

/// What a vCPU moves in a second of processor time.
pub const BYTES_PER_SECOND: u64 = 40_000_000;

/// Counts what the threads in the monitoring groups of some machines load and store, as the kernel would.
#[derive(Debug)]
pub struct FakeResctrl<const N: usize> {
    directory: PathBuf,
    groups: [PathBuf; N],
    bytes: [Arc<AtomicU64>; N],
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl<const N: usize> FakeResctrl<N> {
    /// Begins to count for machines with these names.
    pub fn start(pod: &Pod, machines: [&str; N]) -> Result<Self> {
        // In memory, as the kernel's is: what keeps a disk busy must not keep a count waiting.
        let directory = pod.pool_path().with_file_name("resctrl");
        fs::create_dir_all(directory.join("info/L3_MON"))?;
        fs::write(directory.join("info/L3_MON/mon_features"), "mbm_total_bytes\n")?;
        let groups = machines.map(|name| directory.join("mon_groups").join(format!("wadi-{name}")));
        for group in &groups {
            // The kernel would make them along with the group. Here they are as if an agent that was killed had left them.
            fs::create_dir_all(group.join("mon_data/mon_L3_00"))?;
            fs::write(group.join("tasks"), "")?;
            write_count(group, 0);
        }
        let (bytes, over): ([_; N], _) =
            (std::array::from_fn(|_| Arc::new(AtomicU64::new(0))), Arc::new(AtomicBool::new(false)));
        let (counts, watched, end) = (bytes.clone(), groups.clone(), Arc::clone(&over));
        let thread = thread::spawn(move || {
            let mut ran = [const { BTreeMap::new() }; N];
            while !end.load(Ordering::Acquire) {
                for ((group, count), ran) in watched.iter().zip(&counts).zip(&mut ran) {
                    let more = grown_ns(group, ran) * (BYTES_PER_SECOND / 1_000_000) / 1000;
                    write_count(group, count.fetch_add(more, Ordering::AcqRel) + more);
                }
                thread::sleep(Duration::from_millis(1));
            }
        });
        Ok(Self { directory, groups, bytes, over, thread: Some(thread) })
    }

    /// Where an agent finds it.
    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// What a machine's vCPUs have loaded and stored, in bytes.
    pub fn bytes(&self, place: usize) -> u64 {
        self.bytes[place].load(Ordering::Acquire)
    }

    /// Those of its threads that are counted.
    pub fn threads(&self, place: usize) -> Vec<u32> {
        threads(&self.groups[place])
    }
}

impl<const N: usize> Drop for FakeResctrl<N> {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(thread::panicking() || matches!(ended, Some(Ok(()))), "the fake machine works");
    }
}

/// As a whole or not at all.
fn write_count(group: &Path, bytes: u64) {
    let path = group.join("mon_data/mon_L3_00/mbm_total_bytes");
    let partial = group.join("partial");
    fs::write(&partial, format!("{bytes}\n")).expect("there is room in memory");
    fs::rename(partial, path).expect("it is there");
}

/// The threads of a group. A second agent writes the same ones once more.
fn threads(group: &Path) -> Vec<u32> {
    let tasks = fs::read_to_string(group.join("tasks")).unwrap_or_default();
    let mut threads: Vec<u32> = tasks.lines().filter_map(|thread| thread.parse().ok()).collect();
    threads.sort_unstable();
    threads.dedup();
    threads
}

/// For how long the threads of a group ran since the last time. What they ran before they were in the group does not count.
fn grown_ns(group: &Path, ran: &mut BTreeMap<u32, u64>) -> u64 {
    let look = |thread: u32| {
        let text = fs::read_to_string(format!("/proc/{thread}/schedstat")).ok()?;
        Some((thread, text.split_whitespace().next()?.parse::<u64>().ok()?))
    };
    let now: BTreeMap<u32, u64> = threads(group).into_iter().filter_map(look).collect();
    let grown =
        now.iter().map(|(thread, now)| ran.get(thread).map_or(0, |before| now.saturating_sub(*before)));
    let grown = grown.sum();
    *ran = now;
    grown
}
