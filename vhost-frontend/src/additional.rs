//! Requests that crate `vhost` does not serve: the device's status, and announcing the guest's address.
//!
//! The crate knows their numbers and ends the connection of a VMM that sends them. So they are taken off the socket before it
//! sees them. Words are in the order of the machine that VMM and engine share.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvFlags, recv};

const SEND_RARP: u32 = 19;
const SET_STATUS: u32 = 39;
const GET_STATUS: u32 = 40;
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
const HEADER_BYTES: usize = 12;
/// The body of all requests and answers here that have one.
const BODY_BYTES: u32 = 8;
const MESSAGE_BYTES: usize = HEADER_BYTES + BODY_BYTES as usize;

/// What the VMM asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// `VHOST_USER_SEND_RARP`: announce this address.
    Announce([u8; 6]),
    /// `VHOST_USER_SET_STATUS`: this is the device's status now (virtio 1.2, 2.1); one byte of it is defined.
    SetStatus(u64),
    /// `VHOST_USER_GET_STATUS`: what is it?
    Status,
}

/// One of these requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Additional {
    pub(crate) asked: Asked,
    request: u32,
    wants_answer: bool,
}

impl Additional {
    /// Takes the next request off the socket if it is one of these; leaves any other where it is.
    pub(crate) fn take(mut stream: &UnixStream) -> io::Result<Option<Self>> {
        let mut message = [0_u8; MESSAGE_BYTES];
        let (bytes, _) = recv(stream, &mut message[..], RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
        let Some((additional, length)) = Self::parse(&message[..bytes.min(MESSAGE_BYTES)]) else {
            return Ok(None);
        };
        stream.read_exact(&mut message[..length])?;
        Ok(Some(additional))
    }

    /// Answers, where an answer is wanted: with the status, or with whether the request was served.
    pub(crate) fn answer(self, mut stream: &UnixStream, outcome: Result<u64, ()>) -> io::Result<()> {
        let body = match (self.asked, outcome) {
            (Asked::Status, outcome) => outcome.unwrap_or(0),
            _ if !self.wants_answer => return Ok(()),
            (_, outcome) => u64::from(outcome.is_err()),
        };
        let mut answer = Vec::with_capacity(MESSAGE_BYTES);
        for word in [self.request, VERSION | REPLY, BODY_BYTES] {
            answer.extend_from_slice(&word.to_ne_bytes());
        }
        answer.extend_from_slice(&body.to_ne_bytes());
        stream.write_all(&answer)
    }

    /// The request at the front of `message`, and its length. Nothing if it is another one, or not as it has to be: that is for
    /// the crate to refuse.
    fn parse(message: &[u8]) -> Option<(Self, usize)> {
        let word = |at: usize| Some(u32::from_ne_bytes(message.get(at..at + 4)?.try_into().ok()?));
        let (request, flags, size) = (word(0)?, word(4)?, word(8)?);
        if flags & REPLY != 0 || flags & VERSION_MASK != VERSION {
            return None;
        }
        let body = || <[u8; BODY_BYTES as usize]>::try_from(message.get(HEADER_BYTES..MESSAGE_BYTES)?).ok();
        let asked = match (request, size) {
            (SEND_RARP, BODY_BYTES) => {
                let [b0, b1, b2, b3, b4, b5, ..] = body()?;
                Asked::Announce([b0, b1, b2, b3, b4, b5])
            }
            (SET_STATUS, BODY_BYTES) => Asked::SetStatus(u64::from_ne_bytes(body()?)),
            (GET_STATUS, 0) => Asked::Status,
            _ => return None,
        };
        let length = HEADER_BYTES + size as usize;
        Some((Self { asked, request, wants_answer: flags & NEED_REPLY != 0 }, length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn answered(vmm: &mut UnixStream) -> Vec<u8> {
        let mut answer = [0; MESSAGE_BYTES];
        vmm.read_exact(&mut answer).unwrap();
        answer.to_vec()
    }

    #[test]
    fn each_is_taken_and_answered_and_others_are_left() {
        let (mut vmm, engine) = UnixStream::pair().unwrap();
        vmm.write_all(&message(&[SET_STATUS, VERSION | NEED_REPLY, 8, 0xf, 0])).unwrap();
        vmm.write_all(&message(&[GET_STATUS, VERSION, 0])).unwrap();
        vmm.write_all(&message(&[SEND_RARP, VERSION, 8, u32::from_ne_bytes([2, 0, 0, 1]), 0x0505])).unwrap();
        vmm.write_all(&message(&[2, VERSION, 8, 0, 0])).unwrap();
        let set = Additional::take(&engine).unwrap().unwrap();
        assert_eq!(set.asked, Asked::SetStatus(0xf));
        set.answer(&engine, Err(())).unwrap();
        assert_eq!(answered(&mut vmm), message(&[SET_STATUS, VERSION | REPLY, 8, 1, 0]));
        let get = Additional::take(&engine).unwrap().unwrap();
        assert_eq!(get.asked, Asked::Status);
        get.answer(&engine, Ok(0xf)).unwrap();
        assert_eq!(answered(&mut vmm), message(&[GET_STATUS, VERSION | REPLY, 8, 0xf, 0]));
        let announce = Additional::take(&engine).unwrap().unwrap();
        assert_eq!(announce.asked, Asked::Announce([2, 0, 0, 1, 5, 5]));
        // Nobody waits for an answer to it.
        announce.answer(&engine, Ok(0)).unwrap();
        assert_eq!(Additional::take(&engine).unwrap(), None);
        let mut left = [0; MESSAGE_BYTES];
        (&engine).read_exact(&mut left).unwrap();
        assert_eq!(left[..4], 2_u32.to_ne_bytes());
        vmm.set_nonblocking(true).unwrap();
        assert!(vmm.read(&mut left).is_err());
    }

    #[test]
    fn what_is_not_as_it_has_to_be_is_left_to_the_crate() {
        for words in [
            [SET_STATUS, VERSION, 4, 0, 0],
            [GET_STATUS, VERSION, 8, 0, 0],
            [SEND_RARP, VERSION | REPLY, 8, 0, 0],
            [SEND_RARP, 2, 8, 0, 0],
        ] {
            let (mut vmm, engine) = UnixStream::pair().unwrap();
            vmm.write_all(&message(&words)).unwrap();
            assert_eq!(Additional::take(&engine).unwrap(), None, "{words:?}");
        }
        let (vmm, engine) = UnixStream::pair().unwrap();
        drop(vmm);
        assert_eq!(Additional::take(&engine).unwrap(), None);
    }
}
