//! Finding a VMM that listens, instead of one that connects.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tracing::{info, warn};

use crate::socket::ListenError;

/// Between two tries, at first.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// It doubles up to this. A VMM waits for its devices when it starts, so this is what its start may take longer.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Tries to reach the VMM at a path, again and again. What is at the path is the VMM's: nothing is made or removed there.
#[derive(Debug)]
pub(crate) struct Connector {
    path: PathBuf,
    address: SocketAddrUnix,
    name: String,
    pause: Duration,
    /// What was logged: the same trouble is told once.
    told: Option<Errno>,
}

impl Connector {
    /// For the device called `name`.
    pub(crate) fn new(path: &Path, name: &str) -> Result<Self, ListenError> {
        let address = SocketAddrUnix::new(path).map_err(|errno| ListenError::Io {
            what: "connect to",
            path: path.to_owned(),
            source: errno.into(),
        })?;
        Ok(Self { path: path.to_owned(), address, name: name.to_owned(), pause: PAUSE_MIN, told: None })
    }

    /// One try, which does not block.
    pub(crate) fn attempt(&mut self) -> Option<UnixStream> {
        match self.connect() {
            Ok(stream) => {
                self.told = None;
                Some(stream)
            }
            Err(errno) => {
                if self.told.replace(errno) != Some(errno) {
                    self.tell(errno);
                }
                None
            }
        }
    }

    /// How long to wait before the next try.
    pub(crate) fn pause(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = PAUSE_MAX.min(pause * 2);
        pause
    }

    /// A VMM that was served so long went away. The successor of one that meant it is looked for soon.
    pub(crate) fn parted_after(&mut self, served: Duration) {
        if served >= PAUSE_MAX {
            self.pause = PAUSE_MIN;
        }
    }

    fn connect(&self) -> Result<UnixStream, Errno> {
        // With its queue of connections full, a listener would hold up whoever blocks.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &self.address)?;
        rustix::io::ioctl_fionbio(&socket, false)?;
        Ok(socket.into())
    }

    fn tell(&self, errno: Errno) {
        let (device, path) = (&self.name, self.path.display());
        match errno {
            Errno::NOENT | Errno::CONNREFUSED => info!(device, %path, "no VMM listens yet"),
            Errno::AGAIN => warn!(device, %path, "whoever listens has taken no connection for long"),
            _ => warn!(device, %path, error = %errno, "cannot connect to the VMM; trying again"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn nothing_is_made_where_no_vmm_listens() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vmm.sock");
        let mut connector = Connector::new(&path, "device").unwrap();
        assert!(connector.attempt().is_none());
        std::fs::write(&path, "somebody's").unwrap();
        assert!(connector.attempt().is_none());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "somebody's");
        std::fs::remove_file(&path).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        assert!(connector.attempt().is_some());
        drop(listener);
        assert!(connector.attempt().is_none(), "what a dead VMM left is not one");
        assert!(path.exists());
    }

    #[test]
    fn a_listener_that_takes_nobody_blocks_nobody() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vmm.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        let mut connector = Connector::new(&path, "device").unwrap();
        // The kernel lets no queue grow beyond net.core.somaxconn, which is 4096.
        let queued: Vec<_> = std::iter::from_fn(|| connector.attempt()).take(10_000).collect();
        assert!(queued.len() < 10_000, "the queue has an end");
    }

    #[test]
    fn tries_become_rarer_until_a_vmm_was_there() {
        let mut connector = Connector::new(Path::new("/nonexistent/vmm.sock"), "device").unwrap();
        let pauses: Vec<_> = (0..8).map(|_| connector.pause()).collect();
        assert!(pauses.is_sorted() && pauses[0] == PAUSE_MIN && pauses[7] == PAUSE_MAX, "{pauses:?}");
        connector.parted_after(PAUSE_MIN);
        assert_eq!(connector.pause(), PAUSE_MAX, "it may be one that always fails");
        connector.parted_after(PAUSE_MAX);
        assert_eq!(connector.pause(), PAUSE_MIN);
    }

    #[test]
    fn a_path_that_is_too_long_is_refused_at_once() {
        let path = PathBuf::from(format!("/{}", "x".repeat(200)));
        assert!(matches!(Connector::new(&path, "device"), Err(ListenError::Io { .. })));
    }
}
