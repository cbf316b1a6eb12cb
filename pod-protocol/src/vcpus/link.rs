use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::MESSAGE_BYTES_MAX;

/// How many may wait to be let in.
const BACKLOG: i32 = 64;

/// Why nothing more comes over a link, or nothing that makes sense.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The other end is gone.
    #[error("the other end has closed the connection")]
    Closed,
    /// It said something that cannot be read.
    #[error("a message that cannot be read: {0}")]
    Malformed(String),
    /// The kernel refused.
    #[error("the connection")]
    Io(#[from] io::Error),
}

/// One end of a connection between an agent and a frontend. Nothing here ever waits: poll its descriptor.
#[derive(Debug)]
pub struct Link(OwnedFd);

/// Where agents connect. Its name goes when this goes.
#[derive(Debug)]
pub struct LinkListener {
    socket: OwnedFd,
    path: PathBuf,
}

fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

impl LinkListener {
    /// Listens there; only this user, and root, may connect. What a dead process left is replaced: that only one listens is the
    /// caller's to ensure.
    pub fn bind(path: &Path) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = socket()?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        // Nobody gets in before it listens.
        rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR)?;
        rustix::net::listen(&socket, BACKLOG)?;
        Ok(Self { socket, path: path.to_owned() })
    }

    /// The next one who wants in, if there is one.
    pub fn accept(&self) -> io::Result<Option<Link>> {
        match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => Ok(Some(Link(socket))),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for LinkListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for LinkListener {
    fn drop(&mut self) {
        // It may be gone with its directory.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Link {
    /// Connects to who listens there.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = socket()?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self(socket))
    }

    /// Says something. False: the other end does not listen, and it is not said.
    pub fn send<T: Serialize>(&self, message: &T) -> Result<bool, LinkError> {
        let text = serde_json::to_vec(message).map_err(|error| LinkError::Malformed(error.to_string()))?;
        if text.len() > MESSAGE_BYTES_MAX {
            return Err(LinkError::Malformed(format!("{} bytes are too many", text.len())));
        }
        match rustix::net::send(&self.0, &text, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(LinkError::Closed),
            Err(error) => Err(LinkError::Io(error.into())),
        }
    }

    /// What the other end said next, if it did.
    pub fn receive<T: DeserializeOwned>(&self) -> Result<Option<T>, LinkError> {
        let mut text = [0; MESSAGE_BYTES_MAX];
        let (read, bytes) =
            match rustix::net::recv(&self.0, &mut text, RecvFlags::DONTWAIT | RecvFlags::TRUNC) {
                Ok((_, 0)) => return Err(LinkError::Closed),
                Ok(read) => read,
                // One that left without having read everything is told of first. What it said before comes next, then the end.
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNRESET) => return Ok(None),
                Err(error) => return Err(LinkError::Io(error.into())),
            };
        if bytes > MESSAGE_BYTES_MAX {
            return Err(LinkError::Malformed(format!("{bytes} bytes are too many")));
        }
        let message = serde_json::from_slice(&text[..read]);
        message.map(Some).map_err(|error| LinkError::Malformed(error.to_string()))
    }

    /// Says and hears nothing any more. The other end learns of it.
    pub fn close(&self) {
        // One that is not connected any more is closed.
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::{FromAgent, Hello, Report, ToAgent, VERSION};
    use super::*;

    fn pair(path: &Path) -> (LinkListener, Link, Link) {
        let listener = LinkListener::bind(path).expect("bound");
        let near = Link::connect(path).expect("connected");
        let far = listener.accept().expect("works").expect("one waits");
        (listener, near, far)
    }

    #[test]
    fn messages_stay_apart_and_in_order() {
        let directory = tempfile::tempdir().expect("a directory");
        let (_listener, near, far) = pair(&directory.path().join("s"));
        let hello =
            FromAgent::Hello(Hello { version: VERSION, instance: "vm1".to_owned(), process: 7, holds: true });
        let report = FromAgent::Report(Report { bytes: 3, ..Report::default() });
        assert!(far.receive::<FromAgent>().expect("open").is_none());
        assert!(near.send(&hello).expect("sent") && near.send(&report).expect("sent"));
        assert_eq!(far.receive().expect("open"), Some(hello));
        assert_eq!(far.receive().expect("open"), Some(report));
        far.send(&ToAgent::Welcome).expect("sent");
        far.close();
        assert_eq!(near.receive().expect("open"), Some(ToAgent::Welcome));
        assert!(matches!(near.receive::<ToAgent>(), Err(LinkError::Closed)));
        assert!(matches!(near.send(&ToAgent::Welcome), Err(LinkError::Closed)));
    }

    #[test]
    fn what_was_said_before_the_end_is_heard_by_one_that_still_speaks() {
        let directory = tempfile::tempdir().expect("a directory");
        let (_listener, near, far) = pair(&directory.path().join("s"));
        assert!(near.send(&ToAgent::Welcome).expect("sent"));
        assert!(far.send(&ToAgent::Welcome).expect("sent"));
        drop(far);
        let mut said = (0..3).map(|_| near.receive::<ToAgent>());
        assert!(said.any(|said| matches!(said, Ok(Some(ToAgent::Welcome)))));
        assert!(said.any(|said| matches!(said, Err(LinkError::Closed))));
    }

    #[test]
    fn what_cannot_be_read_is_told_and_does_no_harm() {
        let directory = tempfile::tempdir().expect("a directory");
        let (_listener, near, far) = pair(&directory.path().join("s"));
        let (nested, blank) = (vec![b'['; MESSAGE_BYTES_MAX], vec![b' '; 60_000]);
        for garbage in [&b"{"[..], &[0xff; 3], &nested, &blank] {
            rustix::net::send(&near, garbage, SendFlags::empty()).expect("sent");
            assert!(matches!(far.receive::<FromAgent>(), Err(LinkError::Malformed(_))));
        }
        assert!(near.send(&"x".repeat(MESSAGE_BYTES_MAX)).is_err());
    }

    #[test]
    fn one_that_does_not_read_holds_nobody_up() {
        let directory = tempfile::tempdir().expect("a directory");
        let (_listener, near, _far) = pair(&directory.path().join("s"));
        assert!((0..1_000_000).any(|_| !near.send(&ToAgent::Welcome).expect("open")));
    }

    #[test]
    fn only_the_owner_gets_in_and_the_name_goes() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        std::fs::write(&path, "left behind").expect("written");
        let listener = LinkListener::bind(&path).expect("bound");
        let mode = std::fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(listener.accept().expect("works").is_none());
        drop(listener);
        assert!(Link::connect(&path).is_err() && !path.exists());
        assert!(LinkListener::bind(&directory.path().join("none/s")).is_err());
    }
}
