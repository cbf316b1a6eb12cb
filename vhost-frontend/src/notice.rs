//! Telling the VMM that the configuration space changed, over the channel that it opens for such requests.
//!
//! Crate `vhost` keeps that channel to itself and knows no way to send this message. So the one request that hands it over
//! is taken off the socket before the crate sees it.

use std::io;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::net::{RecvFlags, SendFlags, recv, send};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

const SET_BACKEND_REQ_FD: u32 = 21;
const CONFIG_CHANGE_MSG: u32 = 2;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
const HEADER_BYTES: usize = 12;

/// The way to a VMM, if it opened one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Notices {
    channel: Arc<Mutex<Option<UnixStream>>>,
}

impl Notices {
    /// Takes the next message off the socket if it hands over the channel; leaves any other message where it is. Returns
    /// whether it took one.
    pub(crate) fn take(&self, mut stream: &UnixStream) -> io::Result<bool> {
        let mut header = [0_u8; HEADER_BYTES];
        let (bytes, _) = recv(stream, &mut header[..], RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
        let [request, flags, size] = words(&header);
        if bytes < HEADER_BYTES || request != SET_BACKEND_REQ_FD || size != 0 || flags & REPLY != 0 {
            return Ok(false);
        }
        let (_, file) = stream.recv_with_fd(&mut header).map_err(io::Error::from)?;
        let channel = file.map(|file| UnixStream::from(std::os::fd::OwnedFd::from(file)));
        if channel.as_ref().is_some_and(|channel| channel.local_addr().is_err()) {
            // Whoever serves a file can have us wait for as long as it likes.
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "what the VMM handed over as the channel for requests to it is no UNIX socket",
            ));
        }
        if channel.as_ref().is_some_and(|channel| is_own_end(channel, stream)) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the VMM handed over its own end of the connection as the channel for requests to it",
            ));
        }
        let given = channel.is_some();
        *self.lock() = channel;
        if flags & NEED_REPLY != 0 {
            let mut answer = message([SET_BACKEND_REQ_FD, VERSION | REPLY, 8]);
            answer.extend_from_slice(&u64::from(!given).to_ne_bytes());
            stream.write_all(&answer)?;
        }
        Ok(true)
    }

    /// Forgets the channel: its VMM went away.
    pub(crate) fn close(&self) {
        *self.lock() = None;
    }

    /// Tells the VMM to look at the configuration space. One that opened no channel sees it when it looks.
    pub(crate) fn config_changed(&self) {
        let mut channel = self.lock();
        if let Some(stream) = channel.as_mut()
            && let Err(error) = tell(stream, &message([CONFIG_CHANGE_MSG, VERSION, 0]))
        {
            tracing::warn!(%error, "the VMM does not hear of a change of its device's configuration");
            *channel = None;
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<UnixStream>> {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends all of a message, or fails: a VMM that does not read must not stop us. That is said with each message, since the socket's own
/// setting is the VMM's, too.
fn tell(channel: &UnixStream, message: &[u8]) -> io::Result<()> {
    let sent = send(channel, message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Whether `channel` is the other end of `stream`, or of another connection to the same device. We would keep that
/// connection open ourselves, and never see it close.
fn is_own_end(channel: &UnixStream, stream: &UnixStream) -> bool {
    let (Ok(ours), Ok(theirs)) = (stream.local_addr(), stream.peer_addr()) else { return false };
    let (Ok(own), Ok(peer)) = (channel.local_addr(), channel.peer_addr()) else { return false };
    // The path names the end of whoever listened: us, or the VMM.
    ours.as_pathname().is_some_and(|path| peer.as_pathname() == Some(path))
        || theirs.as_pathname().is_some_and(|path| own.as_pathname() == Some(path))
}

/// Words are in the order of the machine that VMM and engine share.
fn message(words: [u32; 3]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn words(header: &[u8; HEADER_BYTES]) -> [u32; 3] {
    let mut words = [0_u32; 3];
    for (word, bytes) in words.iter_mut().zip(header.chunks_exact(4)) {
        *word = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    words
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn a_channel_is_taken_and_told() {
        let (mut vmm, engine) = UnixStream::pair().unwrap();
        let (mut listening, given) = UnixStream::pair().unwrap();
        let request = message([SET_BACKEND_REQ_FD, VERSION | NEED_REPLY, 0]);
        vmm.send_with_fd(&request[..], given.as_raw_fd()).unwrap();
        vmm.write_all(&message([7, VERSION, 0])).unwrap();
        drop(given);
        let notices = Notices::default();
        // Before there is a channel nobody hears, and nothing fails.
        notices.config_changed();
        assert!(notices.take(&engine).unwrap());
        let mut answer = [0; 20];
        vmm.read_exact(&mut answer).unwrap();
        assert_eq!(answer[12..], 0_u64.to_ne_bytes());
        assert!(!notices.take(&engine).unwrap(), "another message is left to the crate");
        notices.config_changed();
        let mut told = [0; HEADER_BYTES];
        listening.read_exact(&mut told).unwrap();
        assert_eq!(words(&told), [CONFIG_CHANGE_MSG, VERSION, 0]);
        drop(listening);
        notices.config_changed();
        assert!(notices.lock().is_none());
    }

    #[test]
    fn only_a_socket_is_a_channel() {
        let file = tempfile::tempfile().unwrap();
        let (_reading, writing) = std::io::pipe().unwrap();
        for other in [file.as_raw_fd(), writing.as_raw_fd()] {
            let (vmm, engine) = UnixStream::pair().unwrap();
            vmm.send_with_fd(&message([SET_BACKEND_REQ_FD, VERSION, 0])[..], other).unwrap();
            let notices = Notices::default();
            assert!(notices.take(&engine).unwrap_err().to_string().contains("no UNIX socket"));
            assert!(notices.lock().is_none());
        }
    }

    /// Also if it has its end block again, which is ours as well.
    #[test]
    fn a_vmm_that_does_not_read_stops_nobody() {
        let (vmm, engine) = UnixStream::pair().unwrap();
        let (_listening, given) = UnixStream::pair().unwrap();
        vmm.send_with_fd(&message([SET_BACKEND_REQ_FD, VERSION, 0])[..], given.as_raw_fd()).unwrap();
        let notices = Notices::default();
        assert!(notices.take(&engine).unwrap());
        given.set_nonblocking(false).unwrap();
        for _ in 0..100_000 {
            notices.config_changed();
        }
        assert!(notices.lock().is_none());
    }
}
