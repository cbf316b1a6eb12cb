//! Gives threads back when the agent that holds them dies.
//!
//! A quota of the kernel's outlives whoever set it. The guard is a shell that waits on a pipe: a line says that all is done; the
//! pipe's end says that the agent is no more, however it ended, and the guard puts the threads where they came from. Its own
//! signals do not end it with the agent's terminal or its group of processes. It goes by what the kernel says is in a group: a thread
//! that has ended is in none, and its id may be another one's by now. Like the agent, it has a group of the second version be what it was.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::VmmError;

/// Its arguments are the name of the file that lists the threads of a group, and then each group after the one that its thread came
/// from.
const SCRIPT: &str = r#"
trap '' HUP INT QUIT TERM
read -r _ && exit
members=$1
shift
while [ $# -ge 2 ]; do
  while read -r thread; do
    printf %s "$thread" >"$1/$members"
  done <"$2/$members"
  rmdir "$2"
  (
    flock 9
    for below in "$1"/*/; do [ -d "$below" ] && exit; done
    [ "$(cat "$1/cgroup.type")" = "domain threaded" ] && echo -cpu >"$1/cgroup.subtree_control"
  ) 9<"$1"
  shift 2
done
"#;

/// The guard of some threads. Dropping it ends it without a deed.
#[derive(Debug)]
pub(super) struct Guard(Child);

impl Guard {
    /// Guards the threads in groups, each with the group that they came from.
    pub(super) fn start<'a>(
        members: &str,
        groups: impl Iterator<Item = (&'a Path, &'a Path)>,
    ) -> Result<Self, VmmError> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SCRIPT, "wadi-guard", members]);
        for (home, group) in groups {
            command.arg(home).arg(group);
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_is_in_a_group_goes_home_when_the_agent_is_no_more() {
        let tree = tempfile::tempdir().unwrap();
        let path = |name: &str| tree.path().join(name);
        for (group, threads) in
            [("home0", ""), ("home1", ""), ("held", "7\n"), ("ended", ""), ("other", "8\n")]
        {
            fs::create_dir(path(group)).unwrap();
            fs::write(path(group).join("tasks"), threads).unwrap();
        }
        let (home0, home1) = (path("home0"), path("home1"));
        let (held, ended, other) = (path("held"), path("ended"), path("other"));
        let groups = || [(&*home0, &*held), (&home0, &ended), (&home1, &other)].into_iter();
        let arrived = |home: &str| fs::read_to_string(path(home).join("tasks")).unwrap();
        drop(Guard::start("tasks", groups()).unwrap());
        assert_eq!(arrived("home0"), "", "all was done");
        let mut guard = Guard::start("tasks", groups()).unwrap();
        // As when the agent is killed.
        drop(guard.0.stdin.take());
        guard.0.wait().unwrap();
        assert_eq!((arrived("home0").as_str(), arrived("home1").as_str()), ("7", "8"));
    }
}
