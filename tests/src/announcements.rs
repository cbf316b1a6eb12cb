//! The frames by which an address is announced to switches, as seen behind them.

use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, recv, socket_with, sockopt};

use crate::namespace::Namespace;

/// Reverse ARP.
const TYPE_RARP: u16 = 0x8035;

/// Hears the announcements that reach the interfaces of a namespace.
#[derive(Debug)]
pub struct Announcements {
    socket: OwnedFd,
}

impl Announcements {
    /// Hears those from now on.
    pub fn listen(namespace: &Namespace) -> Result<Self> {
        let protocol = NonZero::new(u32::from(TYPE_RARP.to_be())).map(Protocol::from_raw);
        let socket = namespace.inside(move || {
            let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(Duration::from_millis(50)))?;
            Ok(socket)
        })?;
        Ok(Self { socket })
    }

    /// Waits until `count` frames have announced `mac`.
    pub fn wait_for(&self, mac: [u8; 6], count: usize, patience: Duration) -> Result<()> {
        let (began, mut heard) = (Instant::now(), 0);
        let mut frame = [0; 64];
        while heard < count {
            match recv(&self.socket, &mut frame[..], RecvFlags::empty()) {
                Ok(_) => heard += usize::from(frame[6..12] == mac && frame[22..28] == mac),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            if heard < count && began.elapsed() > patience {
                bail!("{heard} of {count} announcements of {mac:02x?} within {patience:?}");
            }
        }
        Ok(())
    }
}
