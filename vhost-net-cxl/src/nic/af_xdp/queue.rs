//! One receive queue of the interface: a socket, and the rings over which the kernel is given buffers and hands frames over.
//!
//! All queues fill buffers of one UMEM, which the first one's socket has registered. That one also sends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::ring::Ring;
use super::sender::TRANSMIT_ENTRIES;
use super::socket::{Binding, bind, mmap_offsets, open_socket, wake_receiver};
use crate::backend::receive_buffers::ReceiveBuffers;

const FILL_ENTRIES: u32 = 2048;
const RECEIVE_ENTRIES: u32 = 2048;

/// A queue, whose socket is bound once it is started.
pub(super) struct Queue {
    pub(super) number: u32,
    // Before the socket: they are mapped from it.
    rings: Option<Rings>,
    /// Others may look at it for a moment, to count.
    pub(super) socket: Arc<OwnedFd>,
}

struct Rings {
    fill: Ring<u64>,
    receive: Ring<libc::xdp_desc>,
    /// Where the UMEM begins in the pool.
    umem: u64,
    /// Buffers that the kernel has to receive into, or has filled, and how many those may be.
    lent: usize,
    lent_max: usize,
}

impl Queue {
    /// A queue with a socket that is bound to nothing yet.
    pub(super) fn open(number: u32) -> io::Result<Self> {
        Ok(Self { number, rings: None, socket: Arc::new(open_socket()?) })
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Has the kernel lay out the rings, and lends it at most `lent_max` of these buffers to receive into.
    pub(super) fn map(&mut self, buffers: &mut ReceiveBuffers, lent_max: usize) -> io::Result<()> {
        let socket = &self.socket;
        Ring::<u64>::set_entries(socket, libc::XDP_UMEM_FILL_RING, FILL_ENTRIES)?;
        // A queue that does not send has none to complete, and the kernel wants to know where it would.
        Ring::<u64>::set_entries(socket, libc::XDP_UMEM_COMPLETION_RING, TRANSMIT_ENTRIES)?;
        Ring::<libc::xdp_desc>::set_entries(socket, libc::XDP_RX_RING, RECEIVE_ENTRIES)?;
        let offsets = mmap_offsets(socket)?;
        let fill_page = libc::off_t::try_from(libc::XDP_UMEM_PGOFF_FILL_RING).map_err(io::Error::other)?;
        let mut rings = Rings {
            fill: Ring::map(socket, fill_page, offsets.fr, FILL_ENTRIES)?,
            receive: Ring::map(socket, libc::XDP_PGOFF_RX_RING, offsets.rx, RECEIVE_ENTRIES)?,
            umem: buffers.start(),
            lent: 0,
            lent_max,
        };
        rings.refill(buffers);
        self.rings = Some(rings);
        Ok(())
    }

    /// Binds the socket to its queue of the interface.
    pub(super) fn bind(&self, interface_index: u32, binding: Binding<'_>) -> io::Result<()> {
        bind(&self.socket, interface_index, self.number, binding)
    }

    /// Takes frames, for as long as `take` has room for another one.
    pub(super) fn receive(&mut self, mut take: impl FnMut(libc::xdp_desc) -> bool) {
        let Some(rings) = &mut self.rings else { return };
        let mut any = false;
        while let Some(descriptor) = rings.receive.take() {
            rings.lent = rings.lent.saturating_sub(1);
            any = true;
            if !take(descriptor) {
                break;
            }
        }
        if any {
            rings.receive.give_back();
        }
    }

    /// Lends the kernel buffers in the place of those that it has filled.
    pub(super) fn refill(&mut self, buffers: &mut ReceiveBuffers) {
        let Some(rings) = &mut self.rings else { return };
        rings.refill(buffers);
        if rings.fill.needs_wakeup() {
            wake_receiver(&self.socket);
        }
    }
}

impl Rings {
    fn refill(&mut self, buffers: &mut ReceiveBuffers) {
        let mut any = false;
        while self.lent < self.lent_max && self.fill.room() > 0 {
            let Some(buffer) = buffers.take() else { break };
            self.fill.put(buffers.offset(buffer).get() - self.umem);
            self.lent += 1;
            any = true;
        }
        if any {
            self.fill.publish();
        }
    }
}
