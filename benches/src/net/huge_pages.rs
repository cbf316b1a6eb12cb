//! Huge pages for the rival's memory.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use super::testpmd::MEMORY_MIB;

const HUGE_PAGE_MIB: u64 = 2;
const COUNT: &str = "/proc/sys/vm/nr_hugepages";

/// As many as its two processes need, beside those that are reserved already. Given back when dropped, and also if this
/// process is ended from outside.
pub(super) struct HugePages {
    _restored: Restored,
}

impl HugePages {
    /// Reserves them; nothing if this machine has none to give.
    pub(super) fn reserve() -> Option<Self> {
        let count = || fs::read_to_string(COUNT).ok()?.trim().parse::<u64>().ok();
        let before = count()?;
        let restored = Restored::guard(Path::new(COUNT), &before.to_string()).ok()?;
        let wanted = before + 2 * MEMORY_MIB / HUGE_PAGE_MIB;
        fs::write(COUNT, wanted.to_string()).ok()?;
        // Fewer are reserved where memory is too fragmented.
        (count()? >= wanted).then_some(Self { _restored: restored })
    }
}

/// A file into which something is written once this is dropped or this process has ended, however it does. A process
/// waits for that which Ctrl-C does not reach.
struct Restored(Child);

impl Restored {
    fn guard(path: &Path, text: &str) -> Result<Self> {
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "trap '' INT TERM HUP QUIT; echo; cat >/dev/null; echo \"$1\" >\"$2\"",
            "sh",
            text,
        ]);
        // In a group of its own: what ends this one does not reach it.
        command.arg(path).stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut waiting = Self(command.spawn().context("cannot start sh")?);
        // Its first line comes once no signal ends it any more.
        let mut stdout = waiting.0.stdout.take().context("a pipe")?;
        std::io::Read::read_exact(&mut stdout, &mut [0]).context("sh does not start")?;
        Ok(waiting)
    }
}

impl Drop for Restored {
    fn drop(&mut self) {
        // It sees the end of its input, writes, and ends.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::shared_window::Forked;

    #[test]
    fn what_was_there_is_back_after_a_drop_and_after_a_kill() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("count");
        let (ready, said) = (directory.path().join("ready"), || fs::read_to_string(&path).unwrap());
        fs::write(&path, "changed").unwrap();
        let guard = Restored::guard(&path, "7").unwrap();
        assert_eq!(said(), "changed");
        drop(guard);
        assert_eq!(said(), "7\n");

        fs::write(&path, "changed").unwrap();
        let forked = Forked::run(|| {
            let _guard = Restored::guard(&path, "8")?;
            fs::write(&ready, "")?;
            loop {
                std::thread::park();
            }
        })
        .unwrap();
        let wait_until = |done: &dyn Fn() -> bool| {
            let deadline = Instant::now() + Duration::from_mins(1);
            while !done() {
                assert!(Instant::now() < deadline, "the other process does not come");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        wait_until(&|| ready.exists());
        assert_eq!(said(), "changed");
        drop(forked);
        wait_until(&|| said() == "8\n");
    }
}
