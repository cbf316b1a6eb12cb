//! Waking a receiver that sleeps, where both hosts share one kernel.
//!
//! A doorbell is a UNIX datagram socket with a path in the pod's run directory: it works across network
//! namespaces and with epoll.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why a doorbell could not be put up.
#[derive(Debug, Error)]
pub enum DoorbellError {
    /// Somebody listens there already.
    #[error(
        "another process listens on the doorbell {path}: stop it, or give this daemon another host id or run \
         directory", path = path.display()
    )]
    InUse {
        /// Where.
        path: PathBuf,
    },
    /// What is there is no socket.
    #[error("{path} exists and is not a socket: remove it, or use another run directory", path = path.display())]
    NotASocket {
        /// Where.
        path: PathBuf,
    },
    /// An operating system call failed.
    #[error("cannot listen on the doorbell {path}", path = path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Hears a doorbell. Readable once it rang. Dropping it removes the socket.
#[derive(Debug)]
pub struct DoorbellListener {
    socket: UnixDatagram,
    path: PathBuf,
}

impl DoorbellListener {
    /// Puts a doorbell up. One that a dead process left behind is replaced.
    pub fn bind(path: &Path) -> Result<Self, DoorbellError> {
        let failed = |source| DoorbellError::Io { path: path.to_owned(), source };
        match std::fs::symlink_metadata(path) {
            Ok(metadata) if !metadata.file_type().is_socket() => {
                return Err(DoorbellError::NotASocket { path: path.to_owned() });
            }
            Ok(_) => {
                let probe = UnixDatagram::unbound().map_err(failed)?;
                if probe.connect(path).is_ok() {
                    return Err(DoorbellError::InUse { path: path.to_owned() });
                }
                std::fs::remove_file(path).map_err(failed)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(failed(source)),
        }
        let socket = UnixDatagram::bind(path).map_err(failed)?;
        let listener = Self { socket, path: path.to_owned() };
        listener.socket.set_nonblocking(true).map_err(failed)?;
        Ok(listener)
    }

    /// Takes all rings that have come so far; whether there was one.
    pub fn drain(&self) -> bool {
        let mut rang = false;
        // The kernel queues a limited number: this ends, even if somebody keeps ringing.
        for _ in 0..1024 {
            match self.socket.recv(&mut [0]) {
                Ok(_) => rang = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        rang
    }
}

impl AsFd for DoorbellListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for DoorbellListener {
    fn drop(&mut self) {
        // If it is gone already, so much the better.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Rings somebody's doorbell.
#[derive(Debug)]
pub struct Doorbell {
    path: PathBuf,
    socket: Option<UnixDatagram>,
}

impl Doorbell {
    /// The doorbell at this path. Nobody need be there yet.
    pub fn connect(path: &Path) -> Self {
        Self { path: path.to_owned(), socket: None }
    }

    /// Rings without waiting. Whether somebody will hear it: a peer that is not there looks at its channels anyway
    /// when it comes.
    pub fn ring(&mut self) -> bool {
        // A peer that was restarted has a new socket at the old path: then the second try reaches it.
        for _ in 0..2 {
            if self.socket.is_none() {
                self.socket = self.try_connect().ok();
            }
            let Some(socket) = &self.socket else { return false };
            match socket.send(&[1]) {
                Ok(_) => return true,
                // It has not heard all earlier rings yet, so it will wake up.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(_) => self.socket = None,
            }
        }
        false
    }

    fn try_connect(&self) -> io::Result<UnixDatagram> {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        socket.connect(&self.path)?;
        Ok(socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_heard_once_drained_it_is_quiet() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("bell.sock");
        let mut doorbell = Doorbell::connect(&path);
        assert!(!doorbell.ring(), "nobody is there yet");
        let listener = DoorbellListener::bind(&path).unwrap();
        assert!(!listener.drain());
        for _ in 0..10_000 {
            assert!(doorbell.ring(), "a full queue does not block and does not fail");
        }
        assert!(listener.drain());
        assert!(!listener.drain());
    }

    #[test]
    fn a_restarted_listener_is_found_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("bell.sock");
        let mut doorbell = Doorbell::connect(&path);
        for _ in 0..3 {
            let listener = DoorbellListener::bind(&path).unwrap();
            assert!(doorbell.ring());
            assert!(listener.drain());
        }
    }

    #[test]
    fn a_stale_socket_is_replaced_and_others_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("bell.sock");
        drop(UnixDatagram::bind(&path).unwrap());
        let listener = DoorbellListener::bind(&path).unwrap();
        assert!(matches!(DoorbellListener::bind(&path), Err(DoorbellError::InUse { .. })));
        drop(listener);
        assert!(!path.exists());
        std::fs::write(&path, "mine").unwrap();
        assert!(matches!(DoorbellListener::bind(&path), Err(DoorbellError::NotASocket { .. })));
        assert!(path.exists());
    }
}
