//! Whether the VMM's next request is there as a whole.
//!
//! Crate `vhost` reads a request with calls that wait for the rest of it. A VMM that sends half of one would hold the
//! device's thread, and where it also attached its own end of the connection (which is then kept open by the request that
//! carries it) its death would not be seen either. So a request is looked at where it lies, and read once all is there.

use std::io;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

const HEADER_BYTES: usize = 12;
/// Longer ones are refused by the crate when it has read the header.
const MAX_BODY_BYTES: u32 = 4096;

/// Whether a request has begun on `stream`, a socket with something to read, and is not there as a whole. A closed
/// connection and a request that will be refused by its header have nothing to wait for.
pub(crate) fn is_partial(stream: &UnixStream) -> io::Result<bool> {
    let mut header = [0_u8; HEADER_BYTES];
    let there = match recv(stream, &mut header[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((there, _)) => there,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(true),
        Err(errno) => return Err(errno.into()),
    };
    if there == 0 {
        return Ok(false);
    }
    if there < HEADER_BYTES {
        return Ok(true);
    }
    let body = u32::from_ne_bytes([header[8], header[9], header[10], header[11]]);
    let needed = HEADER_BYTES as u64 + u64::from(body);
    Ok(body <= MAX_BODY_BYTES && rustix::io::ioctl_fionread(stream)? < needed)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::Shutdown;

    use super::*;

    #[test]
    fn a_request_is_whole_when_its_last_byte_is_there() {
        let (mut vmm, device) = UnixStream::pair().unwrap();
        let mut request = Vec::new();
        for word in [8_u32, 1, 8, 0, 64] {
            request.extend(word.to_ne_bytes());
        }
        for byte in &request {
            assert!(is_partial(&device).unwrap());
            vmm.write_all(&[*byte]).unwrap();
        }
        assert!(!is_partial(&device).unwrap());
        // Its successor may be on its way.
        vmm.write_all(&request[..3]).unwrap();
        assert!(!is_partial(&device).unwrap());
    }

    #[test]
    fn there_is_no_waiting_for_what_cannot_come_or_is_refused() {
        let (mut vmm, device) = UnixStream::pair().unwrap();
        for word in [8_u32, 1, MAX_BODY_BYTES + 1] {
            vmm.write_all(&word.to_ne_bytes()).unwrap();
        }
        assert!(!is_partial(&device).unwrap());
        let (vmm, device) = UnixStream::pair().unwrap();
        vmm.shutdown(Shutdown::Both).unwrap();
        assert!(!is_partial(&device).unwrap());
    }
}
