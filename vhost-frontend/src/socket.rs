//! The socket on which a VMM finds its device.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use thiserror::Error;

/// Why a device's socket cannot be opened.
#[derive(Debug, Error)]
pub enum ListenError {
    /// Another process serves it.
    #[error("{} is served by another process: stop it, or give this device another name", path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// Something else has its name.
    #[error("{} exists and is not a socket: remove it, or give this device another name", path.display())]
    NotASocket {
        /// What is there.
        path: PathBuf,
    },
    /// The kernel refused.
    #[error("cannot {what} {}: check that its directory exists and may be written", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The socket.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// A bound socket; its name goes when this goes.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) listener: UnixListener,
    path: PathBuf,
    identity: Option<(u64, u64)>,
}

impl Socket {
    /// Binds `path`. What a dead process left there is replaced; a live socket or another kind of file is not.
    pub(crate) fn bind(path: &Path) -> Result<Self, ListenError> {
        let error = |what: &'static str| {
            let path = path.to_owned();
            move |source| ListenError::Io { what, path, source }
        };
        match std::fs::symlink_metadata(path) {
            Ok(metadata) if !metadata.file_type().is_socket() => {
                return Err(ListenError::NotASocket { path: path.to_owned() });
            }
            Ok(_) => match knock(path) {
                // Whoever takes nobody in just now, and has a full queue of those who wait, is there all the same.
                Ok(()) | Err(Errno::AGAIN) => return Err(ListenError::InUse { path: path.to_owned() }),
                // Nobody listens.
                Err(Errno::CONNREFUSED) => {
                    std::fs::remove_file(path).map_err(error("replace the stale socket"))?;
                }
                Err(Errno::NOENT) => {}
                Err(other) => return Err(error("look at the existing socket")(other.into())),
            },
            Err(missing) if missing.kind() == io::ErrorKind::NotFound => {}
            Err(other) => return Err(error("look at")(other)),
        }
        let listener = UnixListener::bind(path).map_err(error("listen on"))?;
        listener.set_nonblocking(true).map_err(error("listen on"))?;
        Ok(Self { listener, path: path.to_owned(), identity: identity(path) })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Whoever has replaced it in the meantime keeps its own.
        if self.identity.is_some() && identity(&self.path) == self.identity {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Connects, and goes away again, without waiting for anybody.
fn knock(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_stale_socket_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("stale.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let socket = Socket::bind(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_successors_socket_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("device.sock");
        let ours = Socket::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let theirs = Socket::bind(&path).unwrap();
        drop(ours);
        UnixStream::connect(&path).unwrap();
        drop(theirs);
        assert!(!path.exists());
    }

    #[test]
    fn a_live_socket_is_refused_and_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("live.sock");
        let _live = UnixListener::bind(&path).unwrap();
        assert!(matches!(Socket::bind(&path), Err(ListenError::InUse { .. })));
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_live_socket_that_takes_nobody_in_is_refused_and_does_not_hold_us_up() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("busy.sock");
        let _live = UnixListener::bind(&path).unwrap();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let waiting = || {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
            connect(&socket, &SocketAddrUnix::new(&path).unwrap()).ok().map(|()| socket)
        };
        // The kernel lets no queue grow beyond net.core.somaxconn, which is 4096.
        let queued: Vec<_> = std::iter::from_fn(waiting).take(10_000).collect();
        assert!(queued.len() < 10_000, "the queue has an end");
        let (ends, ended) = std::sync::mpsc::channel();
        let there = path.clone();
        std::thread::spawn(move || ends.send(matches!(Socket::bind(&there), Err(ListenError::InUse { .. }))));
        assert_eq!(ended.recv_timeout(std::time::Duration::from_secs(20)), Ok(true));
        assert!(path.exists());
    }

    #[test]
    fn a_file_is_refused_and_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file.sock");
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(Socket::bind(&path), Err(ListenError::NotASocket { .. })));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn a_missing_directory_is_named() {
        let error = Socket::bind(Path::new("/nonexistent/wadi.sock")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/wadi.sock"), "{error}");
    }
}
