//! What leaves by the first queue's socket: frames are copied into chunks of the UMEM, from which the kernel or the device sends them.

use std::io;
use std::os::fd::OwnedFd;

use cxl_pool::ByteOffset;

use super::ring::Ring;
use super::socket::{mmap_offsets, set_option, wake_sender};
use crate::backend::receive_buffers::{BUFFER_BYTES, ReceiveBuffers};
use crate::nic::window::Window;

pub(super) const TRANSMIT_ENTRIES: u32 = 512;
/// Chunks that hold frames on their way out.
const TRANSMIT_CHUNKS: usize = 256;
/// `XDP_MAX_TX_SKB_BUDGET`: how many frames a call sends in copy mode. 32 if it is not set, or before Linux 6.17.
const MAX_TRANSMIT_BUDGET: libc::c_int = 9;
/// So many calls in a turn, if each of them sends something: what else the turn has to do costs as much as many frames.
const CALLS_PER_TURN: u32 = 8;

/// The rings to send by, and the chunks.
pub(super) struct Sender {
    transmit: Ring<libc::xdp_desc>,
    completion: Ring<u64>,
    /// Where the UMEM begins in the pool.
    umem: u64,
    /// Chunks for sending that are free, as offsets in the UMEM.
    chunks: Vec<u64>,
    unsent: bool,
    /// The kernel sends copies, and says of each one what became of it.
    copies: bool,
    /// Frames that the kernel lost, until somebody asks.
    errors: u64,
}

impl Sender {
    /// Sets aside what of the area is for sending, as offsets in the pool.
    pub(super) fn take_chunks(buffers: &mut ReceiveBuffers) -> Vec<u64> {
        // A quarter at most: the area is for receiving.
        let count = TRANSMIT_CHUNKS.min(buffers.len() / 4);
        let taken: Vec<_> = std::iter::from_fn(|| buffers.take()).take(count).collect();
        taken.into_iter().map(|chunk| buffers.offset(chunk).get()).collect()
    }

    /// Maps the rings of a socket that is not bound yet. The UMEM begins at `umem` in the pool, and the chunks lie in it.
    pub(super) fn map(socket: &OwnedFd, umem: u64, mut chunks: Vec<u64>) -> io::Result<Self> {
        Ring::<libc::xdp_desc>::set_entries(socket, libc::XDP_TX_RING, TRANSMIT_ENTRIES)?;
        // A kernel that does not know it is called several times.
        let _ = set_option(socket, MAX_TRANSMIT_BUDGET, &TRANSMIT_ENTRIES);
        let offsets = mmap_offsets(socket)?;
        let completion_page =
            libc::off_t::try_from(libc::XDP_UMEM_PGOFF_COMPLETION_RING).map_err(io::Error::other)?;
        for chunk in &mut chunks {
            *chunk -= umem;
        }
        Ok(Self {
            completion: Ring::map(socket, completion_page, offsets.cr, TRANSMIT_ENTRIES)?,
            transmit: Ring::map(socket, libc::XDP_PGOFF_TX_RING, offsets.tx, TRANSMIT_ENTRIES)?,
            umem,
            chunks,
            unsent: false,
            copies: true,
            errors: 0,
        })
    }

    /// Where the UMEM begins in the pool.
    pub(super) fn umem(&self) -> u64 {
        self.umem
    }

    /// Says whether the socket was bound to send copies.
    pub(super) fn set_copies(&mut self, copies: bool) {
        self.copies = copies;
    }

    /// Whether something was put that the kernel may not have begun to send.
    pub(super) fn has_work(&self) -> bool {
        self.unsent
    }

    /// How many frames the kernel has lost since this was last asked.
    pub(super) fn take_errors(&mut self) -> u64 {
        std::mem::take(&mut self.errors)
    }

    /// Puts a frame, which `copy` writes into its chunk. Not if there is no room.
    pub(super) fn put(&mut self, window: &Window, copy: impl FnOnce(&Window, *mut u8), bytes: u64) -> bool {
        if self.chunks.is_empty() {
            self.reclaim();
        }
        if self.transmit.room() == 0 {
            return false;
        }
        let Some(chunk) = self.chunks.pop() else { return false };
        copy(window, window.address(ByteOffset::new(self.umem + chunk), u64::from(BUFFER_BYTES)));
        let len = u32::try_from(bytes).expect("shorter than a chunk");
        self.transmit.put(libc::xdp_desc { addr: chunk, len, options: 0 });
        self.unsent = true;
        true
    }

    /// Takes back the chunks that were sent.
    pub(super) fn reclaim(&mut self) {
        let mut any = false;
        while let Some(chunk) = self.completion.take() {
            self.chunks.push(chunk & !(u64::from(BUFFER_BYTES) - 1));
            any = true;
        }
        if any {
            self.completion.give_back();
        }
    }

    /// Has the kernel send what was put, as far as it can now.
    pub(super) fn begin(&mut self, socket: &OwnedFd) -> io::Result<()> {
        if !self.unsent {
            return Ok(());
        }
        self.transmit.publish();
        if !self.transmit.needs_wakeup() {
            self.unsent = false;
            return Ok(());
        }
        let mut left = self.transmit.outstanding();
        for _ in 0..CALLS_PER_TURN {
            let Err(error) = wake_sender(socket) else {
                self.unsent = false;
                return Ok(());
            };
            match error.raw_os_error() {
                // It had a frame and lost it, and is done with it: the interface has no carrier, or its queue is full.
                Some(libc::EBUSY) if self.copies => self.errors += 1,
                Some(libc::EAGAIN | libc::EBUSY | libc::ENOBUFS | libc::EINTR) => {}
                // The interface is down; its watch tells.
                Some(libc::ENETDOWN) if self.transmit.outstanding() == 0 => {
                    self.unsent = false;
                    return Ok(());
                }
                // The kernel keeps what it was told to send until the interface is up again, however late that is. Only with its
                // socket does it forget that.
                _ => return Err(error),
            }
            let before = std::mem::replace(&mut left, self.transmit.outstanding());
            if left == before {
                break;
            }
        }
        // It took what it could: once more in the next turn.
        Ok(())
    }
}
