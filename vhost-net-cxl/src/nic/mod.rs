//! What a NIC has to be able to do, and the drivers that do it.
//!
//! | driver | receives and sends by | offloads |
//! |---|---|---|
//! | [`tap`] | `readv` and `writev` on a TAP device with virtio-net headers | checksums, TSO, USO |
//! | [`af_xdp`] | an AF_XDP socket whose UMEM is the receive area in the pool | none |
//! | [`null`] | nothing: sink, source or echo, for tests and benchmarks | all |
//!
//! A driver owns no memory of its own: it fills [`ReceiveBuffers`] and reads packets where they lie in the pool. It
//! does not care about coherence either; whoever calls it invalidates before [`Nic::transmit`] and writes
//! back after [`Nic::receive`], unless the driver says that its device bypasses this host's caches.

pub mod af_xdp;
pub mod carrier;
mod config;
pub mod failed;
mod netlink;
pub mod null;
mod open;
pub mod reopen;
mod room;
pub mod statistics;
pub mod tap;
mod window;

pub use config::{Driver, NicConfig, NullMode};
pub use open::{exists, open};

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use cxl_pool::ByteOffset;
use pod_protocol::ids::MacAddress;
use pod_protocol::reports::DeviceReport;

use self::statistics::LookAtDriver;
use crate::backend::receive_buffers::ReceiveBuffers;
use crate::offloads::Offloads;

/// Frames that one call of [`Nic::receive`] delivers, or of [`Nic::transmit`] takes, at most.
pub const BATCH_FRAMES: usize = 64;
/// The most pieces of one frame, in either direction.
pub const PIECES_MAX: usize = {
    let (received, sent) = (crate::backend::receive_buffers::PIECES_MAX, crate::scattered::PIECES_MAX);
    // And one with a VLAN's tag.
    if received > sent { received } else { sent + 1 }
};

/// What a NIC says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its name in the host's configuration.
    pub name: String,
    /// Which driver runs it.
    pub driver: Driver,
    /// Its own address, if it has one.
    pub mac: Option<MacAddress>,
    /// The largest packet without the Ethernet header.
    pub mtu: u16,
    /// Its speed.
    pub speed_mbps: u64,
    /// Whether it is kept free for failover.
    pub backup: bool,
    /// The link aggregation group at the switch that its port belongs to.
    pub lag: Option<String>,
    /// What may be left to it when sending, and what it can be told to leave to us when receiving.
    pub offloads: Offloads,
    /// Whether its device reads and writes memory behind this host's caches, so that nothing needs to be written
    /// back or invalidated for it.
    pub cache_bypassing: bool,
}

impl Identity {
    /// What the controller is told of the NIC.
    pub fn report(&self, up: bool) -> DeviceReport {
        DeviceReport::Nic {
            name: self.name.clone(),
            driver: self.driver.name().to_owned(),
            mac: self.mac,
            up,
            speed_mbps: self.speed_mbps,
            mtu: self.mtu,
            features: self.offloads.features(),
            backup: self.backup,
            lag: self.lag.clone(),
        }
    }
}

/// Whether a NIC can carry traffic; shared with whoever watches the carrier.
#[derive(Clone, Debug, Default)]
pub struct LinkState(Arc<Link>);

#[derive(Debug, Default)]
struct Link {
    up: AtomicBool,
    removed: AtomicBool,
    unwatched: OnceLock<String>,
}

impl LinkState {
    /// A link in this state.
    pub fn new(up: bool) -> Self {
        Self(Arc::new(Link { up: AtomicBool::new(up), ..Link::default() }))
    }

    /// Whether it is up.
    pub fn is_up(&self) -> bool {
        self.0.up.load(Ordering::Acquire)
    }

    /// Notes a change; true if it was one.
    pub fn set(&self, up: bool) -> bool {
        self.0.up.swap(up, Ordering::AcqRel) != up
    }

    /// Whether the interface that was watched first does not exist any more. What is bound to it stays dead, even if
    /// there is another one of its name.
    pub fn is_removed(&self) -> bool {
        self.0.removed.load(Ordering::Acquire)
    }

    /// Notes that the interface was removed.
    pub fn set_removed(&self) {
        self.0.removed.store(true, Ordering::Release);
    }

    /// Why nobody watches the carrier any more who did. The NIC is of no use then: if it lost its carrier, nobody would hear of it.
    pub fn unwatched(&self) -> Option<&str> {
        self.0.unwatched.get().map(String::as_str)
    }

    /// Notes that the carrier cannot be watched any more, and why.
    pub fn set_unwatched(&self, reason: &str) {
        // The first reason stays.
        let _ = self.0.unwatched.set(reason.to_owned());
    }
}

/// Hears of each change of a link: whether it is up now, and why.
pub type OnLinkChange = Box<dyn Fn(bool, &str) + Send>;

/// A run of bytes in the pool. A packet's first piece begins with the virtio-net header, at a cache line's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where it begins.
    pub at: ByteOffset,
    /// How long it is.
    pub bytes: u32,
}

impl Piece {
    /// Nothing, to be replaced.
    pub(crate) const NONE: Self = Self { at: ByteOffset::new(0), bytes: 0 };
}

/// What a NIC puts on the frames of one flow, so that whoever takes them need not read them to know whose they are (Oasis §3.3.1).
/// Never given to two registrations of one NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowTag(pub u32);

/// The flow that a tag stands for: frames to this address without a VLAN tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Their destination.
    pub destination: MacAddress,
    /// What they get.
    pub tag: FlowTag,
}

/// Frames, each in one piece or several: what [`Nic::receive`] delivers and [`Nic::transmit`] takes. Allocates nothing after [`Batch::new`]; the default is one without storage, to stand in
/// for it while it is in use.
#[derive(Debug, Default)]
pub struct Batch {
    pieces: Vec<Piece>,
    /// Per frame, where its pieces end.
    ends: Vec<usize>,
    /// Per frame, what the NIC found it to be.
    tags: Vec<Option<FlowTag>>,
}

impl Batch {
    /// An empty batch.
    pub fn new() -> Self {
        let pieces = BATCH_FRAMES * PIECES_MAX;
        Self {
            pieces: Vec::with_capacity(pieces),
            ends: Vec::with_capacity(BATCH_FRAMES),
            tags: Vec::with_capacity(BATCH_FRAMES),
        }
    }

    /// Forgets all frames.
    #[inline]
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.ends.clear();
        self.tags.clear();
    }

    /// Whether no further frame fits.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.ends.len() >= BATCH_FRAMES
    }

    /// How many frames there are.
    #[inline]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Forgets the pieces of the frame under construction.
    #[inline]
    pub fn abandon_frame(&mut self) {
        self.pieces.truncate(self.ends.last().copied().unwrap_or(0));
    }

    /// Adds a frame in one piece.
    #[inline]
    pub fn push_frame(&mut self, piece: Piece) {
        self.push_piece(piece);
        self.end_frame();
    }

    /// The frames, in order.
    #[inline]
    pub fn frames(&self) -> impl ExactSizeIterator<Item = &[Piece]> {
        (0..self.len()).map(|index| self.frame(index))
    }

    /// Adds a piece to the frame under construction.
    #[inline]
    pub fn push_piece(&mut self, piece: Piece) {
        self.pieces.push(piece);
    }

    /// Ends the frame under construction.
    #[inline]
    pub fn end_frame(&mut self) {
        self.ends.push(self.pieces.len());
        self.tags.push(None);
    }

    /// Adds a frame in one piece that belongs to a flow, and whose virtio-net header asks for nothing.
    #[inline]
    pub fn push_tagged_frame(&mut self, piece: Piece, tag: FlowTag) {
        self.pieces.push(piece);
        self.ends.push(self.pieces.len());
        self.tags.push(Some(tag));
    }

    /// The flow of frame `index`, if the NIC knows: then it is in one piece, and its virtio-net header asks for nothing.
    #[inline]
    pub fn tag(&self, index: usize) -> Option<FlowTag> {
        self.tags[index]
    }

    /// The pieces of all frames.
    #[inline]
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The pieces of frame `index`.
    #[inline]
    pub fn frame(&self, index: usize) -> &[Piece] {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.pieces[start..self.ends[index]]
    }
}

/// Why a NIC cannot be used, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// There is no such interface.
    #[error(
        "nic {nic}: there is no interface {interface} here: create it, or correct [[nic]] in the configuration"
    )]
    NoInterface {
        /// The NIC's name.
        nic: String,
        /// The interface's name.
        interface: String,
    },
    /// Nobody would hear of it if it lost its carrier.
    #[error("nic {nic}: {reason}")]
    Unwatched {
        /// The NIC's name.
        nic: String,
        /// What happened to the watch.
        reason: String,
    },
    /// The configuration contradicts itself.
    #[error("nic {nic}: {problem}")]
    Config {
        /// The NIC's name.
        nic: String,
        /// What to change.
        problem: String,
    },
    /// A system call failed.
    #[error("nic {nic}: cannot {doing}{hint}")]
    System {
        /// The NIC's name.
        nic: String,
        /// What was attempted.
        doing: &'static str,
        /// What to try, beginning with a separator, or nothing.
        hint: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

/// What became of one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It is sent, or is going to be.
    Whole,
    /// The kernel or the driver found fault with it. It is not sent, and would not be another time.
    Refused,
    /// The NIC is full for now.
    NoRoom,
}

/// A NIC, driven from one thread. Nothing blocks.
pub trait Nic: Send {
    /// What it says about itself.
    fn identity(&self) -> &Identity;

    /// Its link, kept up to date by whoever watches the carrier.
    fn link(&self) -> &LinkState;

    /// Begins to watch the carrier: from now on [`Nic::link`] follows it, and each change is told with its reason,
    /// on another thread.
    fn watch_link(&mut self, on_change: OnLinkChange) -> Result<(), NicError>;

    /// Starts it with these buffers to receive into.
    fn start(&mut self, buffers: &mut ReceiveBuffers) -> Result<(), NicError>;

    /// What becomes readable when frames arrive.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;

    /// Tells the NIC what all receivers accept; it does the rest itself before frames reach us.
    fn set_receiver_offloads(&mut self, offloads: Offloads) -> Result<(), NicError>;

    /// From now on frames of these flows, and of no others, may be delivered with their tag. A NIC that can tell flows apart
    /// saves whoever takes its frames to look at them.
    fn set_flows(&mut self, flows: &[Flow]) {
        let _ = flows;
    }

    /// Takes buffers, fills them, and adds the frames that arrived to `batch`.
    fn receive(&mut self, buffers: &mut ReceiveBuffers, batch: &mut Batch) -> Result<(), NicError>;

    /// Sends packets; of each, the first piece begins with the virtio-net header. Returns how many from the front are
    /// done with: their buffers may be used again. Those behind were not looked at, since the NIC is full for now.
    /// [`Nic::refused`] says which of them were not sent.
    fn transmit(&mut self, packets: &Batch) -> Result<usize, NicError>;

    /// Of the packets that the last [`Nic::transmit`] was done with, the positions of those with which the kernel or the driver found fault.
    fn refused(&self) -> &[usize] {
        &[]
    }

    /// Sends a bare frame from our own memory.
    fn transmit_frame(&mut self, frame: &[u8]) -> Result<Taken, NicError>;

    /// Whether frames may still be delivered or sent without a descriptor becoming readable.
    fn has_work(&self) -> bool {
        false
    }

    /// Whether a descriptor becomes readable once it takes packets again that was full when it was given some last. Asked before everybody
    /// sleeps; whoever does not tell is asked again all the time.
    fn tells_of_room(&mut self) -> bool {
        false
    }

    /// Pushes what was transmitted on its way; called once per turn.
    fn flush(&mut self) -> Result<(), NicError> {
        Ok(())
    }

    /// Looks at what the driver knows of its troubles, if it knows of any that its interface does not count.
    fn troubles(&self) -> Option<LookAtDriver> {
        None
    }

    /// What went wrong for the device itself, and was lost by it, since it was opened: nothing that a packet is to blame for.
    fn errors(&self) -> u64 {
        0
    }
}
