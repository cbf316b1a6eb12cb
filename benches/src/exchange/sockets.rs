//! A pair of seqpacket sockets.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::Waiting;
use super::end::End;

const NAP: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

pub(crate) struct Socket {
    pub(crate) socket: OwnedFd,
    pub(crate) waiting: Waiting,
}

impl Socket {
    fn send(&self, payload: &[u8]) -> Result<()> {
        // At most 32 are under way, which the socket's buffer holds.
        send(&self.socket, payload, SendFlags::NOSIGNAL).context("cannot send")?;
        Ok(())
    }

    fn receive(&self) -> Result<Option<Vec<u8>>> {
        let mut payload = vec![0; 256];
        match recv(&self.socket, &mut payload[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => anyhow::bail!("the other process has gone"),
            Ok((bytes, _)) => {
                payload.truncate(bytes);
                Ok(Some(payload))
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(error) => Err(error).context("cannot receive"),
        }
    }
}

impl End for Socket {
    fn ask(&mut self, payload: &[u8]) -> Result<()> {
        self.send(payload)
    }

    fn answer(&mut self) -> Result<Option<Vec<u8>>> {
        self.receive()
    }

    fn serve(&mut self) -> Result<Option<Vec<u8>>> {
        let Some(payload) = self.receive()? else { return Ok(None) };
        self.send(&payload)?;
        Ok(Some(payload))
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        if self.waiting == Waiting::Sleep {
            poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&NAP)).context("cannot wait")?;
        }
        Ok(())
    }
}
