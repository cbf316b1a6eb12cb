//! Requests that crate `vhost` cannot send.

use std::io::{Read as _, Write as _};
use std::time::Duration;

use super::MockGuest;

const SET_VRING_KICK: u32 = 12;
const SEND_RARP: u32 = 19;
const SET_STATUS: u32 = 39;
const GET_STATUS: u32 = 40;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Of a vring's index, where no descriptor comes with it.
const NO_DESCRIPTOR: u64 = 1 << 8;
const ANSWER_DEADLINE: Duration = Duration::from_secs(20);

impl MockGuest {
    /// Tells the device its status. Returns whether it was accepted.
    pub fn set_status(&mut self, status: u64) -> bool {
        self.ask(SET_STATUS, VERSION | NEED_REPLY, Some(status)) == Some(0)
    }

    /// Asks the device for its status; nothing if it hangs up.
    pub fn status(&mut self) -> Option<u64> {
        self.ask(GET_STATUS, VERSION, None)
    }

    /// Asks the device to announce an address. Returns whether it was accepted.
    pub fn send_rarp(&mut self, address: [u8; 6]) -> bool {
        let [b0, b1, b2, b3, b4, b5] = address;
        let body = u64::from_ne_bytes([b0, b1, b2, b3, b4, b5, 0, 0]);
        self.ask(SEND_RARP, VERSION | NEED_REPLY, Some(body)) == Some(0)
    }

    /// Has a ring polled from now on: no descriptor for kicks comes with the request. Returns whether that was accepted.
    pub fn poll_ring(&mut self, ring: u8) -> bool {
        let body = u64::from(ring) | NO_DESCRIPTOR;
        self.ask(SET_VRING_KICK, VERSION | NEED_REPLY, Some(body)) == Some(0)
    }

    fn ask(&mut self, request: u32, flags: u32, body: Option<u64>) -> Option<u64> {
        let mut stream = self.stream.as_ref().unwrap();
        stream.set_read_timeout(Some(ANSWER_DEADLINE)).unwrap();
        let size = if body.is_some() { 8 } else { 0 };
        let mut message: Vec<u8> = [request, flags, size].into_iter().flat_map(u32::to_ne_bytes).collect();
        message.extend(body.into_iter().flat_map(u64::to_ne_bytes));
        stream.write_all(&message).ok()?;
        let mut answer = [0; 20];
        stream.read_exact(&mut answer).ok()?;
        let word = |at: usize| u32::from_ne_bytes(answer[at..at + 4].try_into().unwrap());
        assert_eq!([word(0), word(4), word(8)], [request, VERSION | REPLY, 8]);
        Some(u64::from_ne_bytes(answer[12..].try_into().unwrap()))
    }
}
