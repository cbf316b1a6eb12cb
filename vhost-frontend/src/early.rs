//! Rings that a VMM enables before it has acknowledged any feature.
//!
//! QEMU enables the rings of a NIC when it attaches to the backend, before the first SET_FEATURES, which is when it
//! acknowledges that rings can be enabled at all. Other backends do not mind; crate `vhost` ends the connection. So this
//! one message is taken off the socket before the crate sees it.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvFlags, recv};

const SET_VRING_ENABLE: u32 = 18;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Three words of header, then index and state of a vring.
const MESSAGE_BYTES: usize = 20;
const PAYLOAD_BYTES: u32 = 8;

/// A SET_VRING_ENABLE that came early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EarlyEnable {
    pub(crate) index: u32,
    pub(crate) enable: bool,
    wants_answer: bool,
}

impl EarlyEnable {
    /// Takes the next message off the socket if it is one of these; leaves any other message where it is.
    pub(crate) fn take(mut stream: &UnixStream) -> io::Result<Option<Self>> {
        let mut message = [0_u8; MESSAGE_BYTES];
        let (bytes, _) = recv(stream, &mut message[..], RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
        if bytes < MESSAGE_BYTES {
            return Ok(None);
        }
        let enable = Self::parse(&message);
        if enable.is_some() {
            stream.read_exact(&mut message)?;
        }
        Ok(enable)
    }

    /// Answers it, if an answer is wanted.
    pub(crate) fn answer(self, mut stream: &UnixStream, served: bool) -> io::Result<()> {
        if !self.wants_answer {
            return Ok(());
        }
        let mut answer = Vec::with_capacity(MESSAGE_BYTES);
        for word in [SET_VRING_ENABLE, VERSION | REPLY, PAYLOAD_BYTES] {
            answer.extend_from_slice(&word.to_ne_bytes());
        }
        answer.extend_from_slice(&u64::from(!served).to_ne_bytes());
        stream.write_all(&answer)
    }

    /// Words are in the order of the machine that VMM and engine share.
    fn parse(message: &[u8; MESSAGE_BYTES]) -> Option<Self> {
        let mut words = [0_u32; MESSAGE_BYTES / 4];
        for (word, bytes) in words.iter_mut().zip(message.chunks_exact(4)) {
            *word = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        let [request, flags, size, index, state] = words;
        let ours = request == SET_VRING_ENABLE && flags & REPLY == 0 && size == PAYLOAD_BYTES && state <= 1;
        ours.then_some(Self { index, enable: state == 1, wants_answer: flags & NEED_REPLY != 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(words: [u32; 5]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn an_early_enable_is_taken_and_the_rest_left() {
        let (mut vmm, engine) = UnixStream::pair().unwrap();
        vmm.write_all(&message([SET_VRING_ENABLE, VERSION | NEED_REPLY, 8, 3, 1])).unwrap();
        vmm.write_all(&message([2, VERSION, 8, 0, 0])).unwrap();
        let taken = EarlyEnable::take(&engine).unwrap().unwrap();
        assert_eq!((taken.index, taken.enable), (3, true));
        taken.answer(&engine, true).unwrap();
        let mut answer = [0; MESSAGE_BYTES];
        vmm.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..], message([SET_VRING_ENABLE, VERSION | REPLY, 8, 0, 0]));
        assert_eq!(EarlyEnable::take(&engine).unwrap(), None);
        let mut left = [0; MESSAGE_BYTES];
        (&engine).read_exact(&mut left).unwrap();
        assert_eq!(left[..4], 2_u32.to_ne_bytes());
    }

    #[test]
    fn a_closed_socket_is_left_to_the_crate() {
        let (vmm, engine) = UnixStream::pair().unwrap();
        drop(vmm);
        assert_eq!(EarlyEnable::take(&engine).unwrap(), None);
    }
}
