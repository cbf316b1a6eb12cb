//! Message channels over the pool, and request/response on top.
//!
//! A channel is a one-way ring of small messages between two hosts whose caches are **not** coherent: one
//! [`Sender`], one [`Receiver`], no lock, no atomic instruction that both sides would have to share. After
//! Oasis (SOSP '25), §3.2.2:
//!
//! * the top bit of each message is its *epoch*, which toggles each lap, so that a slot tells by itself whether
//!   it holds a new message;
//! * the receiver publishes how many messages it consumed, every half ring, in a line of its own; the sender
//!   re-reads that only when it is out of slots;
//! * the sender writes a line back when it is full, or when it has nothing more to send;
//! * the receiver prefetches ahead while messages come, and takes care that prefetched lines cannot stay stale
//!   ([`ReceivePolicy`]).
//!
//! A receiver may sleep: it announces that in its line, looks once more, and then waits for a [`doorbell`].
//! A channel has a [`Generation`](cxl_pool::Generation); setting it up again under a new one leaves nothing of
//! the old one behind.
//!
//! [`Exchange`] carries requests, responses and notifications of up to 4 MiB over a pair of channels.
//!
//! `docs/channel.md` draws the ring bit by bit.
//!
//! # Assumptions
//!
//! * A generation is used at most once by a channel, and whoever hands out a placement for a channel calls
//!   [`RingPlacement::clear`] before, so that what lay there is not taken for one of its generations. Both sides may
//!   have anything of it in their caches.
//! * One `Sender` and one `Receiver` at a time.
//! * A message announces only what was written back and fenced before it was sent.

#![forbid(unsafe_code)]

pub mod doorbell;
mod exchange;
mod handover;
mod header;
#[cfg(test)]
mod model;
mod placement;
mod policy;
mod receiver;
mod sender;

pub use exchange::{Counters, Exchange, ExchangeError, Incoming, PAYLOAD_BYTES_LIMIT, RequestId};
pub use placement::{PlacementError, RingPlacement};
pub use policy::{PREFETCH_LINES, ReceivePolicy};
pub use receiver::Receiver;
pub use sender::{Full, Sender, Wake};
