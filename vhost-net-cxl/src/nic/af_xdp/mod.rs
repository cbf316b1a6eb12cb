//! An AF_XDP socket whose UMEM is the NIC's receive area in the pool: the kernel itself puts frames there.
//!
//! A chunk of the UMEM is one receive buffer. The kernel leaves 256 bytes and our headroom of 12 in front of a frame,
//! so the virtio-net header, all zero, finds its place exactly at the chunk's fourth cache line. To send, frames are copied
//! into chunks set aside for that; no offload survives this driver, so it offers none.
#![allow(unsafe_code, reason = "a socket and its address, and copies into the UMEM")]

mod program;
mod ring;
mod socket;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use cxl_pool::{ByteOffset, Pool};
use tracing::{info, warn};

use self::program::{Mode, Program};
use self::ring::Ring;
use self::socket::{mmap_offsets, options, promiscuous, set_option, wake_receiver, wake_sender};
use super::carrier::{CarrierWatch, find};
use super::netlink::Netlink;
use super::window::Window;
use super::{Batch, Identity, LinkState, Nic, NicConfig, NicError, OnLinkChange, Piece};
use crate::backend::receive_buffers::{BUFFER_BYTES, ReceiveBuffers};
use crate::offloads::Offloads;
use crate::vnet_header::HEADER_BYTES;

/// What generic XDP leaves free in front of our headroom.
const KERNEL_HEADROOM_BYTES: u64 = 256;
const FRAME_BYTES_MAX: u64 = BUFFER_BYTES as u64 - KERNEL_HEADROOM_BYTES - HEADER_BYTES as u64;
const ETHERNET_AND_VLAN_BYTES: u64 = 18;
const MTU_MAX: u64 = FRAME_BYTES_MAX - ETHERNET_AND_VLAN_BYTES;
const FILL_ENTRIES: u32 = 2048;
const RECEIVE_ENTRIES: u32 = 2048;
const TRANSMIT_ENTRIES: u32 = 512;
/// Chunks that hold frames on their way out.
const TRANSMIT_CHUNKS: usize = 256;
/// `XDP_MAX_TX_SKB_BUDGET`: how many frames a call sends in copy mode. 32 if it is not set, or before Linux 6.17.
const MAX_TRANSMIT_BUDGET: libc::c_int = 9;
/// So many calls in a turn, if each of them sends something: what else the turn has to do costs as much as many frames.
const CALLS_PER_TURN: u32 = 8;
/// A queue stays busy for a moment after its last socket was closed. The worker that waits serves other NICs, too, and opens this one
/// again later.
const BUSY_RETRY: Duration = Duration::from_millis(20);
const BUSY_PAUSE: Duration = Duration::from_millis(5);

/// An interface by AF_XDP.
pub struct AfXdpNic {
    identity: Identity,
    link: LinkState,
    watch: Option<CarrierWatch>,
    interface: String,
    interface_index: u32,
    queue: u32,
    wants_zero_copy: bool,
    window: Window,
    // Before the sockets: it is detached first.
    program: Option<Program>,
    rings: Option<Rings>,
    socket: OwnedFd,
    /// Has the interface hand up what is for instances' addresses, from when it is started.
    promiscuous: Option<OwnedFd>,
    errors: u64,
}

struct Rings {
    fill: Ring<u64>,
    receive: Ring<libc::xdp_desc>,
    transmit: Ring<libc::xdp_desc>,
    completion: Ring<u64>,
    /// Where the UMEM begins in the pool.
    umem: u64,
    /// Chunks for sending that are free, as offsets in the UMEM.
    chunks: Vec<u64>,
    /// Buffers that the kernel has to receive into, or has filled, and how many those may be.
    lent: usize,
    lent_max: usize,
    unsent: bool,
}

impl AfXdpNic {
    /// Opens a socket; the interface's frames go on to the host until it is started.
    pub fn open(config: &NicConfig, pool: &Pool) -> Result<Self, NicError> {
        let nic = &config.name;
        let interface = config.interface();
        let mut netlink = Netlink::open().map_err(|source| system(nic, "open rtnetlink", "", source))?;
        let found = find(&mut netlink, nic, interface)?;
        if u64::from(found.mtu) > MTU_MAX {
            let problem = format!(
                "the MTU of {interface} is {}, and a frame of a buffer's length allows {MTU_MAX}: lower it",
                found.mtu
            );
            return Err(NicError::Config { nic: nic.clone(), problem });
        }
        let socket = open_socket(nic)?;
        let identity = Identity {
            name: nic.clone(),
            driver: config.driver,
            mac: found.mac,
            mtu: u16::try_from(found.mtu).unwrap_or(u16::MAX),
            speed_mbps: config.speed_mbps,
            backup: config.backup,
            lag: config.lag.clone(),
            offloads: Offloads::NONE,
            // In copy mode the kernel copies through this host's caches, and DMA may allocate in them.
            cache_bypassing: false,
        };
        Ok(Self {
            identity,
            link: LinkState::new(found.up),
            watch: None,
            interface: interface.to_owned(),
            interface_index: found.index,
            queue: config.queue,
            wants_zero_copy: config.zero_copy,
            window: Window::new(pool),
            program: None,
            rings: None,
            socket,
            promiscuous: None,
            errors: 0,
        })
    }

    fn register_umem(&self, buffers: &ReceiveBuffers) -> io::Result<()> {
        let bytes = buffers.len() as u64 * u64::from(BUFFER_BYTES);
        // SAFETY: plain data for which zeroes are valid.
        let mut umem: libc::xdp_umem_reg = unsafe { std::mem::zeroed() };
        umem.addr = self.window.address(ByteOffset::new(buffers.start()), bytes) as u64;
        umem.len = bytes;
        umem.chunk_size = BUFFER_BYTES;
        umem.headroom = u32::try_from(HEADER_BYTES).expect("twelve");
        set_option(&self.socket, libc::XDP_UMEM_REG, &umem)
    }

    fn map_rings(&self, buffers: &ReceiveBuffers) -> io::Result<Rings> {
        let socket = &self.socket;
        Ring::<u64>::set_entries(socket, libc::XDP_UMEM_FILL_RING, FILL_ENTRIES)?;
        Ring::<u64>::set_entries(socket, libc::XDP_UMEM_COMPLETION_RING, TRANSMIT_ENTRIES)?;
        Ring::<libc::xdp_desc>::set_entries(socket, libc::XDP_RX_RING, RECEIVE_ENTRIES)?;
        Ring::<libc::xdp_desc>::set_entries(socket, libc::XDP_TX_RING, TRANSMIT_ENTRIES)?;
        // A kernel that does not know it is called several times.
        let _ = set_option(socket, MAX_TRANSMIT_BUDGET, &TRANSMIT_ENTRIES);
        let offsets = mmap_offsets(socket)?;
        let fill_page = libc::off_t::try_from(libc::XDP_UMEM_PGOFF_FILL_RING).map_err(io::Error::other)?;
        let completion_page =
            libc::off_t::try_from(libc::XDP_UMEM_PGOFF_COMPLETION_RING).map_err(io::Error::other)?;
        Ok(Rings {
            fill: Ring::map(socket, fill_page, offsets.fr, FILL_ENTRIES)?,
            completion: Ring::map(socket, completion_page, offsets.cr, TRANSMIT_ENTRIES)?,
            receive: Ring::map(socket, libc::XDP_PGOFF_RX_RING, offsets.rx, RECEIVE_ENTRIES)?,
            transmit: Ring::map(socket, libc::XDP_PGOFF_TX_RING, offsets.tx, TRANSMIT_ENTRIES)?,
            umem: buffers.start(),
            chunks: Vec::with_capacity(TRANSMIT_CHUNKS),
            lent: 0,
            // Half of the area stays with those who receive, and for frames between instances.
            lent_max: buffers.len() / 2,
            unsent: false,
        })
    }

    /// Attaches the program to the driver and lets the kernel choose zero-copy. Nothing, told in the log, if it does not.
    fn begin_zero_copy(&self) -> Result<Option<Program>, io::Error> {
        let (nic, interface) = (&self.identity.name, &self.interface);
        let program = match Program::attach(self.interface_index, Mode::Native) {
            Ok(program) => program,
            Err(error) => {
                warn!(nic, interface, %error, "zero-copy is not to be had: the interface's driver runs no XDP program; frames are copied");
                return self.bind(false).map(|()| None);
            }
        };
        self.bind(true)?;
        if options(&self.socket)? & libc::XDP_OPTIONS_ZEROCOPY == 0 {
            warn!(
                nic,
                interface,
                "zero-copy is not to be had: the interface's driver cannot do it; frames are copied"
            );
            return Ok(None);
        }
        info!(nic, interface, "the device reads and writes the pool itself");
        Ok(Some(program))
    }

    /// Binds the socket, in copy mode or as the kernel can.
    fn bind(&self, zero_copy: bool) -> io::Result<()> {
        let family = libc::c_ushort::try_from(libc::AF_XDP).map_err(io::Error::other)?;
        let address = libc::sockaddr_xdp {
            sxdp_family: family,
            sxdp_flags: if zero_copy { 0 } else { libc::XDP_COPY } | libc::XDP_USE_NEED_WAKEUP,
            sxdp_ifindex: self.interface_index,
            sxdp_queue_id: self.queue,
            sxdp_shared_umem_fd: 0,
        };
        let bytes = libc::socklen_t::try_from(size_of_val(&address)).expect("a short structure");
        let give_up = Instant::now() + BUSY_RETRY;
        loop {
            // SAFETY: the address lives until the call returns.
            let result = unsafe { libc::bind(self.socket.as_raw_fd(), (&raw const address).cast(), bytes) };
            if result == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EBUSY) || Instant::now() > give_up {
                return Err(error);
            }
            // Only while a NIC starts, never on the way of a packet.
            std::thread::sleep(BUSY_PAUSE);
        }
    }

    fn try_to_start(&mut self, buffers: &mut ReceiveBuffers) -> Result<(), NicError> {
        let nic = self.identity.name.clone();
        let failed = |doing, hint| {
            let nic = nic.clone();
            move |source| system(&nic, doing, hint, source)
        };
        let unregistered = failed(
            "register its receive area as UMEM",
            "; may the daemon lock as much memory (LimitMEMLOCK=infinity, or CAP_IPC_LOCK)? driver = \"tap\" needs neither",
        );
        self.register_umem(buffers).map_err(unregistered)?;
        let mut rings = self.map_rings(buffers).map_err(failed("map the rings of its socket", ""))?;
        // A quarter at most: the area is for receiving.
        for _ in 0..TRANSMIT_CHUNKS.min(buffers.len() / 4) {
            let Some(buffer) = buffers.take() else { break };
            rings.chunks.push(buffers.offset(buffer).get() - rings.umem);
        }
        rings.refill(buffers);
        let unbound = failed(
            "bind its socket to the interface",
            "; does another process use this queue? driver = \"tap\" works on any interface",
        );
        let unattached = failed(
            "attach its XDP program",
            "; is another XDP program attached, or CAP_BPF missing? driver = \"tap\" needs neither",
        );
        let native =
            if self.wants_zero_copy { self.begin_zero_copy() } else { self.bind(false).map(|()| None) };
        let program = match native.map_err(unbound)? {
            Some(program) => program,
            None => Program::attach(self.interface_index, Mode::Generic).map_err(unattached)?,
        };
        program.direct(self.queue, &self.socket).map_err(failed("direct frames to its socket", ""))?;
        let undisclosed = failed(
            "have its interface receive what is for other addresses",
            "; run as root or with CAP_NET_RAW",
        );
        self.promiscuous = Some(promiscuous(self.interface_index).map_err(undisclosed)?);
        self.program = Some(program);
        self.rings = Some(rings);
        Ok(())
    }

    fn send_one(&mut self, copy: impl FnOnce(&Window, *mut u8), bytes: u64) -> bool {
        let Some(rings) = &mut self.rings else { return false };
        if rings.chunks.is_empty() {
            rings.reclaim();
        }
        if rings.transmit.room() == 0 {
            return false;
        }
        let Some(chunk) = rings.chunks.pop() else { return false };
        copy(&self.window, self.window.address(ByteOffset::new(rings.umem + chunk), u64::from(BUFFER_BYTES)));
        let len = u32::try_from(bytes).expect("shorter than a chunk");
        rings.transmit.put(libc::xdp_desc { addr: chunk, len, options: 0 });
        rings.unsent = true;
        true
    }
}

impl Rings {
    /// Takes back the chunks that were sent.
    fn reclaim(&mut self) {
        let mut any = false;
        while let Some(chunk) = self.completion.take() {
            self.chunks.push(chunk & !(u64::from(BUFFER_BYTES) - 1));
            any = true;
        }
        if any {
            self.completion.give_back();
        }
    }

    /// Gives the kernel buffers to receive into.
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

impl Nic for AfXdpNic {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn link(&self) -> &LinkState {
        &self.link
    }

    fn watch_link(&mut self, on_change: OnLinkChange) -> Result<(), NicError> {
        let watch =
            CarrierWatch::begin(&self.identity.name, &[&self.interface], self.link.clone(), on_change)?;
        self.watch = Some(watch);
        Ok(())
    }

    fn start(&mut self, buffers: &mut ReceiveBuffers) -> Result<(), NicError> {
        let started = self.try_to_start(buffers);
        if started.is_err() {
            // What a socket was given once, its memory and its queue, cannot be given to it again: the next attempt has another one.
            self.socket = open_socket(&self.identity.name)?;
        }
        started
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.socket.as_fd()]
    }

    fn set_receiver_offloads(&mut self, _offloads: Offloads) -> Result<(), NicError> {
        // Frames come from a wire, complete.
        Ok(())
    }

    fn receive(&mut self, buffers: &mut ReceiveBuffers, batch: &mut Batch) -> Result<(), NicError> {
        if self.link.is_removed() {
            // The socket is bound to what is not there any more, and would stay silent for ever.
            let (nic, interface) = (self.identity.name.clone(), self.interface.clone());
            return Err(NicError::NoInterface { nic, interface });
        }
        let Some(rings) = &mut self.rings else { return Ok(()) };
        let header = [0u8; HEADER_BYTES];
        let header_bytes = HEADER_BYTES as u64;
        let before = batch.len();
        while !batch.is_full() {
            let Some(descriptor) = rings.receive.take() else { break };
            rings.lent = rings.lent.saturating_sub(1);
            let at = ByteOffset::new(rings.umem + descriptor.addr - header_bytes);
            let address = self.window.address(at, header_bytes + u64::from(descriptor.len));
            // SAFETY: the range lies within the pool, in a chunk that the kernel has just handed over.
            unsafe { address.copy_from_nonoverlapping(header.as_ptr(), HEADER_BYTES) };
            let bytes = descriptor.len + u32::try_from(HEADER_BYTES).expect("twelve");
            batch.push_piece(Piece { at, bytes });
            batch.end_frame();
        }
        if batch.len() > before {
            rings.receive.give_back();
        }
        rings.refill(buffers);
        if rings.fill.needs_wakeup() {
            wake_receiver(&self.socket);
        }
        Ok(())
    }

    fn transmit(&mut self, packets: &Batch) -> Result<usize, NicError> {
        if let Some(rings) = &mut self.rings {
            // What was sent last is in the caches.
            rings.reclaim();
        }
        for (sent, packet) in packets.frames().enumerate() {
            let mut header_bytes = HEADER_BYTES as u64;
            let bytes: u64 = packet.iter().map(|piece| u64::from(piece.bytes)).sum();
            let bytes = bytes.saturating_sub(header_bytes);
            if bytes == 0 || bytes > FRAME_BYTES_MAX {
                self.errors += 1;
                continue;
            }
            let copied = self.send_one(
                |window, chunk| {
                    let mut done = 0;
                    for piece in packet {
                        // Only the first piece begins with the header, and is longer than that.
                        let skip = header_bytes.min(u64::from(piece.bytes));
                        header_bytes -= skip;
                        let here = u64::from(piece.bytes) - skip;
                        let from = window.address(piece.at.saturating_add(skip), here);
                        let count = usize::try_from(here).expect("shorter than a chunk");
                        // SAFETY: both ranges lie within the pool; the pieces are together no longer than a chunk, which is
                        // ours until it is handed to the kernel, and a packet is never in the receive area.
                        unsafe { chunk.add(done).copy_from_nonoverlapping(from, count) };
                        done += count;
                    }
                },
                bytes,
            );
            if !copied {
                return Ok(sent);
            }
        }
        Ok(packets.len())
    }

    fn transmit_frame(&mut self, frame: &[u8]) -> Result<bool, NicError> {
        if frame.len() as u64 > FRAME_BYTES_MAX {
            self.errors += 1;
            return Ok(true);
        }
        Ok(self.send_one(
            // SAFETY: the frame fits the chunk, which is ours until it is handed to the kernel.
            |_, chunk| unsafe { chunk.copy_from_nonoverlapping(frame.as_ptr(), frame.len()) },
            frame.len() as u64,
        ))
    }

    fn has_work(&self) -> bool {
        self.rings.as_ref().is_some_and(|rings| rings.unsent)
    }

    fn flush(&mut self) -> Result<(), NicError> {
        let Some(rings) = &mut self.rings else { return Ok(()) };
        if !rings.unsent {
            return Ok(());
        }
        rings.transmit.publish();
        if !rings.transmit.needs_wakeup() {
            rings.unsent = false;
            return Ok(());
        }
        let mut left = rings.transmit.outstanding();
        for _ in 0..CALLS_PER_TURN {
            let Err(error) = wake_sender(&self.socket) else {
                rings.unsent = false;
                return Ok(());
            };
            match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EBUSY | libc::ENOBUFS | libc::EINTR) => {}
                // The interface is down; its watch tells.
                Some(libc::ENETDOWN) if rings.transmit.outstanding() == 0 => {
                    rings.unsent = false;
                    return Ok(());
                }
                // The kernel keeps what it was told to send until the interface is up again, however late that is. Only with its
                // socket does it forget that.
                _ => return Err(system(&self.identity.name, "send by its AF_XDP socket", "", error)),
            }
            let before = std::mem::replace(&mut left, rings.transmit.outstanding());
            if left == before {
                break;
            }
        }
        // It took what it could: once more in the next turn.
        Ok(())
    }

    fn errors(&self) -> u64 {
        self.errors
    }
}

fn open_socket(nic: &str) -> Result<OwnedFd, NicError> {
    // SAFETY: no memory is involved.
    let socket = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        let hint = "; the kernel needs CONFIG_XDP_SOCKETS and the daemon CAP_NET_RAW; driver = \"tap\" needs neither";
        return Err(system(nic, "open an AF_XDP socket", hint, io::Error::last_os_error()));
    }
    // SAFETY: the kernel has just created this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(socket) })
}

fn system(nic: &str, doing: &'static str, hint: &'static str, source: io::Error) -> NicError {
    NicError::System { nic: nic.to_owned(), doing, hint, source }
}
