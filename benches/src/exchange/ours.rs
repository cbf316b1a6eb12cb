//! An exchange over channels.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use cxl_channel::doorbell::{Doorbell, DoorbellListener};
use cxl_channel::{Exchange, Incoming, Receiver, RingPlacement, Sender, Wake};
use cxl_pool::{Generation, Memory};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Waiting;
use super::end::End;

const DEADLINE: Duration = Duration::from_secs(20);
/// Longer than any sleep should last: a sender that begins does not ring for it.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

pub(crate) struct Ours<M: Memory> {
    exchange: Exchange<M>,
    waiting: Waiting,
    own_bell: DoorbellListener,
    peer_bell: Doorbell,
    /// It rang, and was not drained since.
    rang: bool,
    now: Instant,
}

impl<M: Memory> Ours<M> {
    /// `rings` are the outgoing one and the incoming one, `bells` the own one and the peer's.
    pub(crate) fn open(
        memory: &M,
        rings: [RingPlacement; 2],
        generation: Generation,
        bells: [&Path; 2],
        waiting: Waiting,
    ) -> Result<Self> {
        let own_bell = DoorbellListener::bind(bells[0]).context("cannot put up a doorbell")?;
        let sender = Sender::begin(memory.clone(), rings[0], generation);
        let receiver = Receiver::open(memory.clone(), rings[1], generation);
        let mut exchange = Exchange::new(sender, receiver);
        exchange.set_wakeups(waiting == Waiting::Sleep);
        let peer_bell = Doorbell::connect(bells[1]);
        Ok(Self { exchange, waiting, own_bell, peer_bell, rang: false, now: Instant::now() })
    }
}

impl<M: Memory> End for Ours<M> {
    fn ask(&mut self, payload: &[u8]) -> Result<()> {
        self.exchange.request(payload, self.now + DEADLINE)?;
        Ok(())
    }

    fn answer(&mut self) -> Result<Option<Vec<u8>>> {
        match self.exchange.poll(self.now) {
            None => Ok(None),
            Some(Incoming::Response { payload, .. }) => Ok(Some(payload)),
            Some(other) => anyhow::bail!("{other:?} came instead of an answer"),
        }
    }

    fn serve(&mut self) -> Result<Option<Vec<u8>>> {
        match self.exchange.poll(self.now) {
            None => Ok(None),
            Some(Incoming::Request { id, payload }) => {
                self.exchange.respond(id, &payload)?;
                Ok(Some(payload))
            }
            Some(other) => anyhow::bail!("{other:?} came instead of a request"),
        }
    }

    fn flush(&mut self) -> Result<()> {
        if !self.exchange.ready() {
            return Ok(());
        }
        if self.exchange.flush() == Wake::Needed && self.waiting == Waiting::Sleep {
            self.peer_bell.ring();
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        if self.waiting == Waiting::Poll {
            return Ok(());
        }
        self.now = Instant::now();
        if std::mem::take(&mut self.rang) {
            // What woke us went first: this is for the time in which the peer wakes up. Another look follows, for what rang
            // since.
            self.own_bell.drain();
            return Ok(());
        }
        if self.exchange.ready() && self.exchange.announce_sleep() {
            let mut bell = [PollFd::from_borrowed_fd(self.own_bell.as_fd(), PollFlags::IN)];
            self.rang = poll(&mut bell, Some(&NAP)).context("cannot wait for the doorbell")? > 0;
            self.exchange.wake();
        }
        Ok(())
    }
}
