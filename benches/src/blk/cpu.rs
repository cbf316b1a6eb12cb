//! What threads have run.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

/// The threads whose time counts: of who serves the guest, and of who serves the device if that is somebody else.
pub(super) type Threads = [Vec<PathBuf>; 2];

/// How long they have run so far.
pub(super) fn times(threads: &Threads) -> Result<[Duration; 2]> {
    Ok([time(&threads[0])?, time(&threads[1])?])
}

fn time(threads: &[PathBuf]) -> Result<Duration> {
    let mut sum = Duration::ZERO;
    for thread in threads {
        // One that ended meanwhile counts for nothing.
        let Ok(text) = fs::read_to_string(thread.join("schedstat")) else { continue };
        let ran_ns = text.split_whitespace().next().context("schedstat says nothing")?;
        sum += Duration::from_nanos(ran_ns.parse()?);
    }
    Ok(sum)
}

/// The directories in /proc of a process's threads, of those that have such a name.
pub(super) fn threads_of(process: &str, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let mut threads = Vec::new();
    for task in fs::read_dir(format!("/proc/{process}/task")).context("the process ended")? {
        let path = task?.path();
        if fs::read_to_string(path.join("comm")).is_ok_and(|name| wanted(name.trim_end())) {
            threads.push(path);
        }
    }
    Ok(threads)
}

/// Whether this is the name of a thread that the kernel made for an io_uring.
pub(super) fn is_of_io_uring(name: &str) -> bool {
    name.starts_with("iou-")
}
