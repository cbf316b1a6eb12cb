//! The log of a machine's serial console, which never gets longer than it may, however much the guest writes.
//!
//! QEMU would write without end, into what is memory below /run. So it writes into a pipe, and a shell of its own writes what comes out of
//! that into the log; a log that is full becomes the old one, in place of the one before. The shell lives as long as anybody has the pipe's
//! other end: not with `vmm run`, which may be killed while its machine goes on. A machine can do without it: to QEMU, a pipe whose
//! reader is gone is a log that cannot be written, and it goes on. A reader that is there and does not read would hold QEMU up as soon as
//! the pipe is full. Only a SIGSTOP makes the shell one, since it reads on where nothing can be written. QEMU has no way to write a log
//! without waiting: it takes `O_NONBLOCK` from what it is handed, and no sockets; into a file it would write without end.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::{FdFlags, fcntl_setfd};

use crate::VmmError;

/// How long a log may get, in bytes; there is an old one beside it, too.
pub const CONSOLE_LOG_BYTES: u64 = 1 << 20;
/// How long a keeper may take to write what a machine said last.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Between two looks whether it has.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Its arguments are the log, the old one, and how many bytes one may have. head writes what it has read, without waiting for more.
/// What a guest says is nobody's business but root's: logs of an earlier run may be open to others, or somebody may have one open.
const SCRIPT: &str = r#"
trap '' HUP INT QUIT TERM
umask 077
rm -f "$1"
chmod 600 "$2"
while :; do
  # Where nothing can be written, the guest still need not wait.
  stdbuf -o0 head -c "$3" >"$1" || exec cat >/dev/null
  [ "$(stat -c %s "$1")" -ge "$3" ] || exit 0
  mv -f "$1" "$2"
done
"#;

/// Who writes a console's log.
#[derive(Debug)]
pub(crate) struct ConsoleLog(Child);

/// What QEMU is to inherit.
#[derive(Debug)]
pub(crate) struct ConsolePipe(OwnedFd);

impl ConsoleLog {
    /// Begins a log there.
    pub(crate) fn start(log: &Path) -> Result<(Self, ConsolePipe), VmmError> {
        Self::with_limit(log, CONSOLE_LOG_BYTES)
    }

    fn with_limit(log: &Path, bytes: u64) -> Result<(Self, ConsolePipe), VmmError> {
        let failed = |source| VmmError::Start { program: "/bin/sh".to_owned(), source };
        let (output, input) = io::pipe().map_err(failed)?;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SCRIPT, "wadi-console-log"]).arg(log).arg(old(log)).arg(bytes.to_string());
        command.stdin(output).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        let keeper = command.spawn().map_err(failed)?;
        let input = OwnedFd::from(input);
        fcntl_setfd(&input, FdFlags::empty()).map_err(|error| failed(error.into()))?;
        Ok((Self(keeper), ConsolePipe(input)))
    }

    /// Waits until all that a machine has said stands in its log, once the machine has ended. Not for ever: somebody else may have inherited
    /// the pipe.
    pub(crate) fn finish(&mut self) {
        let began = Instant::now();
        while matches!(self.0.try_wait(), Ok(None)) && began.elapsed() < LAST_WORDS {
            thread::sleep(LOOK_EVERY);
        }
    }
}

impl ConsolePipe {
    /// What has QEMU write the log of this chardev there.
    pub(crate) fn words(&self, chardev: &str) -> [String; 6] {
        let set = |property: &str| format!("chardev.{chardev}.{property}");
        [
            "-add-fd".to_owned(),
            format!("fd={},set=1", self.0.as_raw_fd()),
            "-set".to_owned(),
            set("logfile=/dev/fdset/1"),
            "-set".to_owned(),
            // It would shorten a file to nothing, and a pipe is none.
            set("logappend=on"),
        ]
    }
}

/// Where a log is that became full.
pub(crate) fn old(log: &Path) -> PathBuf {
    let mut old = OsString::from(log);
    old.push(".old");
    old.into()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_log_and_the_old_one_have_what_was_said_last() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("a console's.log");
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        for (said, old_log, new) in
            [("0123456789abcdefghijklmno", "abcdefghij", "klmno"), ("0123456789", "0123456789", "")]
        {
            let (mut keeper, pipe) = ConsoleLog::with_limit(&log, 10).unwrap();
            File::from(pipe.0).write_all(said.as_bytes()).unwrap();
            keeper.finish();
            assert_eq!((read(&old(&log)).as_str(), read(&log).as_str()), (old_log, new));
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn what_a_guest_says_is_for_its_owner_alone() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        // Of an earlier run, for all to read.
        for path in [&log, &old(&log)] {
            fs::write(path, "before").unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
        }
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        for said in ["boot", "booted, and more", ""] {
            let (mut keeper, pipe) = ConsoleLog::with_limit(&log, 10).unwrap();
            File::from(pipe.0).write_all(said.as_bytes()).unwrap();
            keeper.finish();
            assert_eq!((mode(&log), mode(&old(&log))), (0o600, 0o600), "{said}");
        }
    }

    #[test]
    fn what_is_said_stands_there_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let (mut keeper, pipe) = ConsoleLog::with_limit(&log, 100).unwrap();
        let mut guest = File::from(pipe.0);
        for (said, all) in [("boot", "boot"), ("ed", "booted")] {
            guest.write_all(said.as_bytes()).unwrap();
            let began = Instant::now();
            while fs::read_to_string(&log).unwrap_or_default() != all {
                assert!(began.elapsed() < Duration::from_secs(20), "{all} is not logged");
                thread::sleep(LOOK_EVERY);
            }
        }
        assert!(keeper.0.try_wait().unwrap().is_none(), "the machine runs");
        drop(guest);
        keeper.finish();
        assert!(keeper.0.try_wait().unwrap().unwrap().success());
    }

    #[test]
    fn a_guest_does_not_wait_where_nothing_can_be_written() {
        let directory = tempfile::tempdir().unwrap();
        let (mut keeper, pipe) = ConsoleLog::with_limit(&directory.path().join("none/log"), 10).unwrap();
        // More than a pipe holds.
        File::from(pipe.0).write_all(&vec![b'x'; 1 << 20]).unwrap();
        keeper.finish();
        assert!(keeper.0.try_wait().unwrap().unwrap().success());
    }
}
