//! Gives threads back when the agent that holds them dies.
//!
//! A quota of the kernel's outlives whoever set it. The guard is a shell that waits on a pipe: a line says that all is done; the
//! pipe's end says that the agent is no more, however it ended, and the guard puts the threads where they came from. Its own
//! signals do not end it with the agent's terminal or its group of processes.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::VmmError;

/// Its arguments are the file that lists the threads of where they came from, and then each thread with its group.
const SCRIPT: &str = r#"
trap '' HUP INT QUIT TERM
read -r _ && exit
home=$1
shift
while [ $# -ge 2 ]; do
  printf %s "$1" >"$home"
  rmdir "$2"
  shift 2
done
"#;

/// The guard of some threads. Dropping it ends it without a deed.
#[derive(Debug)]
pub(super) struct Guard(Child);

impl Guard {
    /// Guards threads, each in a group of its own, that came from the group whose list of threads this is.
    pub(super) fn start<'a>(
        home: &Path,
        groups: impl Iterator<Item = (u32, &'a Path)>,
    ) -> Result<Self, VmmError> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SCRIPT, "wadi-guard"]).arg(home);
        for (thread, group) in groups {
            command.arg(thread.to_string()).arg(group);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        command.spawn().map(Self).map_err(|source| VmmError::Start { program: "/bin/sh".to_owned(), source })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(mut pipe) = self.0.stdin.take() {
            // One that was killed has nothing to be told.
            let _ = pipe.write_all(b"done\n");
        }
        let _ = self.0.wait();
    }
}
