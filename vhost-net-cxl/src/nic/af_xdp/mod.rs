//! AF_XDP sockets whose UMEM is the NIC's receive area in the pool: the kernel itself puts frames there. There is one for
//! each receive queue of the interface, since a device chooses among them by what a frame says, and what finds no socket is not ours.
//!
//! A chunk of the UMEM is one receive buffer. The kernel leaves 256 bytes and our headroom of 12 in front of a frame,
//! so the virtio-net header, all zero, finds its place exactly at the chunk's fourth cache line. To send, frames are copied
//! into chunks set aside for that; no offload survives this driver, so it offers none.
#![allow(unsafe_code, reason = "a socket and its address, and copies into the UMEM")]

mod program;
mod queue;
mod ring;
mod sender;
mod socket;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use cxl_pool::{ByteOffset, Pool};
use tracing::{info, warn};

use self::program::{Mode, Program, QUEUES_MAX};
use self::queue::Queue;
use self::sender::Sender;
use self::socket::{Binding, promiscuous, receive_queues, set_option, statistics};
use super::carrier::{CarrierWatch, find};
use super::netlink::Netlink;
use super::statistics::LookAtDriver;
use super::window::Window;
use super::{BATCH_FRAMES, Batch, Identity, LinkState, Nic, NicConfig, NicError, OnLinkChange, Piece, Taken};
use crate::backend::receive_buffers::{BUFFER_BYTES, ReceiveBuffers};
use crate::offloads::Offloads;
use crate::vnet_header::HEADER_BYTES;

/// What generic XDP leaves free in front of our headroom.
const KERNEL_HEADROOM_BYTES: u64 = 256;
const FRAME_BYTES_MAX: u64 = BUFFER_BYTES as u64 - KERNEL_HEADROOM_BYTES - HEADER_BYTES as u64;
const ETHERNET_AND_VLAN_BYTES: u64 = 18;
const MTU_MAX: u64 = FRAME_BYTES_MAX - ETHERNET_AND_VLAN_BYTES;
/// One of the numbers that the kernel counts for a socket.
type Count = fn(&libc::xdp_statistics) -> u64;

/// An interface by AF_XDP.
pub struct AfXdpNic {
    identity: Identity,
    link: LinkState,
    watch: Option<CarrierWatch>,
    interface: String,
    interface_index: u32,
    /// The only queue to receive from, if the configuration names one.
    only_queue: Option<u32>,
    wants_zero_copy: bool,
    window: Window,
    // Before the sockets: it is detached first.
    program: Option<Program>,
    sender: Option<Sender>,
    /// The first one sends, too.
    queues: Vec<Queue>,
    /// Which of them is looked at first.
    next: usize,
    /// Has the interface hand up what is for instances' addresses, from when it is started.
    promiscuous: Option<OwnedFd>,
    errors: u64,
    /// Of the packets that it was given last, those that are too long for it.
    refused: Vec<usize>,
}

impl AfXdpNic {
    /// Opens its sockets; the interface's frames go on to the host until it is started.
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
        let queues = open_queues(nic, interface, config.queue)?;
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
            only_queue: config.queue,
            wants_zero_copy: config.zero_copy,
            window: Window::new(pool),
            program: None,
            sender: None,
            queues,
            next: 0,
            promiscuous: None,
            errors: 0,
            refused: Vec::with_capacity(BATCH_FRAMES),
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
        set_option(&self.queues[0].socket, libc::XDP_UMEM_REG, &umem)
    }

    /// Maps the rings of all queues, and those for sending, before any of them is bound.
    fn map_rings(&mut self, buffers: &mut ReceiveBuffers) -> io::Result<Sender> {
        let chunks = Sender::take_chunks(buffers);
        // Half of the area stays with those who receive, and for frames between instances.
        let lent_max = (buffers.len() / 2 / self.queues.len()).max(1);
        for queue in &mut self.queues {
            queue.map(buffers, lent_max)?;
        }
        Sender::map(&self.first().socket, buffers.start(), chunks)
    }

    /// Attaches the program to the driver and binds the sockets without copies. Nothing, told in the log, if they are to be had by copies only.
    fn begin_zero_copy(&self) -> Result<Option<Program>, io::Error> {
        let (nic, interface) = (&self.identity.name, &self.interface);
        let program = match Program::attach(self.interface_index, Mode::Native) {
            Ok(program) => program,
            Err(error) => {
                warn!(nic, interface, %error, "zero-copy is not to be had: the interface's driver runs no XDP program; frames are copied");
                return self.bind(Binding::Copy).map(|()| None);
            }
        };
        match self.first().bind(self.interface_index, Binding::ZeroCopy) {
            Ok(()) => self.bind_others()?,
            // Not its word on zero-copy: somebody has the queue, or had it a moment ago.
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => return Err(error),
            Err(error) => {
                warn!(nic, interface, %error, "zero-copy is not to be had: the interface's driver refuses it; frames are copied");
                return self.bind(Binding::Copy).map(|()| None);
            }
        }
        info!(nic, interface, "the device reads and writes the pool itself");
        Ok(Some(program))
    }

    /// Binds the first socket like this, and the others to the same memory.
    fn bind(&self, binding: Binding<'_>) -> io::Result<()> {
        self.first().bind(self.interface_index, binding)?;
        self.bind_others()
    }

    fn bind_others(&self) -> io::Result<()> {
        let shared = Binding::Shared(&self.first().socket);
        self.queues[1..].iter().try_for_each(|queue| queue.bind(self.interface_index, shared))
    }

    /// The queue that sends.
    fn first(&self) -> &Queue {
        &self.queues[0]
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
        let mut sender = self.map_rings(buffers).map_err(failed("map the rings of its sockets", ""))?;
        let unbound = failed(
            "bind its sockets to the interface",
            "; does another process use this queue? driver = \"tap\" works on any interface",
        );
        let unattached = failed(
            "attach its XDP program",
            "; is another XDP program attached, or CAP_BPF missing? driver = \"tap\" needs neither",
        );
        let native = if self.wants_zero_copy {
            self.begin_zero_copy()
        } else {
            self.bind(Binding::Copy).map(|()| None)
        };
        let native = native.map_err(unbound)?;
        sender.set_copies(native.is_none());
        let program = match native {
            Some(program) => program,
            None => Program::attach(self.interface_index, Mode::Generic).map_err(unattached)?,
        };
        for queue in &self.queues {
            program
                .direct(queue.number, &queue.socket)
                .map_err(failed("direct frames to its sockets", ""))?;
        }
        let undisclosed = failed(
            "have its interface receive what is for other addresses",
            "; run as root or with CAP_NET_RAW",
        );
        self.promiscuous = Some(promiscuous(self.interface_index).map_err(undisclosed)?);
        self.program = Some(program);
        self.sender = Some(sender);
        Ok(())
    }

    fn send_one(&mut self, copy: impl FnOnce(&Window, *mut u8), bytes: u64) -> bool {
        self.sender.as_mut().is_some_and(|sender| sender.put(&self.window, copy, bytes))
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
        // What sockets were given once, their memory and their queues, cannot be given to them again: each attempt has others, as many
        // as there are queues now.
        self.queues = open_queues(&self.identity.name, &self.interface, self.only_queue)?;
        self.try_to_start(buffers)
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.queues.iter().map(Queue::descriptor).collect()
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
        let Some(sender) = &self.sender else { return Ok(()) };
        let (window, umem) = (&self.window, sender.umem());
        let header = [0u8; HEADER_BYTES];
        let header_bytes = HEADER_BYTES as u64;
        let count = self.queues.len();
        for step in 0..count {
            let queue = &mut self.queues[(self.next + step) % count];
            if !batch.is_full() {
                queue.receive(|descriptor| {
                    let at = ByteOffset::new(umem + descriptor.addr - header_bytes);
                    let address = window.address(at, header_bytes + u64::from(descriptor.len));
                    // SAFETY: the range lies within the pool, in a chunk that the kernel has just handed over.
                    unsafe { address.copy_from_nonoverlapping(header.as_ptr(), HEADER_BYTES) };
                    let bytes = descriptor.len + u32::try_from(HEADER_BYTES).expect("twelve");
                    batch.push_frame(Piece { at, bytes });
                    !batch.is_full()
                });
            }
            queue.refill(buffers);
        }
        // One of them alone could fill every batch.
        self.next = (self.next + 1) % count;
        Ok(())
    }

    fn transmit(&mut self, packets: &Batch) -> Result<usize, NicError> {
        self.refused.clear();
        if let Some(sender) = &mut self.sender {
            // What was sent last is in the caches.
            sender.reclaim();
        }
        for (sent, packet) in packets.frames().enumerate() {
            let mut header_bytes = HEADER_BYTES as u64;
            let bytes: u64 = packet.iter().map(|piece| u64::from(piece.bytes)).sum();
            let bytes = bytes.saturating_sub(header_bytes);
            if bytes == 0 || bytes > FRAME_BYTES_MAX {
                self.refused.push(sent);
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

    fn transmit_frame(&mut self, frame: &[u8]) -> Result<Taken, NicError> {
        if frame.len() as u64 > FRAME_BYTES_MAX {
            return Ok(Taken::Refused);
        }
        let copied = self.send_one(
            // SAFETY: the frame fits the chunk, which is ours until it is handed to the kernel.
            |_, chunk| unsafe { chunk.copy_from_nonoverlapping(frame.as_ptr(), frame.len()) },
            frame.len() as u64,
        );
        Ok(if copied { Taken::Whole } else { Taken::NoRoom })
    }

    fn refused(&self) -> &[usize] {
        &self.refused
    }

    fn has_work(&self) -> bool {
        self.sender.as_ref().is_some_and(Sender::has_work)
    }

    fn flush(&mut self) -> Result<(), NicError> {
        let Some(sender) = &mut self.sender else { return Ok(()) };
        let begun = sender.begin(&self.queues[0].socket);
        self.errors += sender.take_errors();
        begun.map_err(|error| system(&self.identity.name, "send by its AF_XDP socket", "", error))
    }

    fn troubles(&self) -> Option<LookAtDriver> {
        // They are closed with the NIC, whoever looks at them.
        let sockets: Vec<Weak<OwnedFd>> =
            self.queues.iter().map(|queue| Arc::downgrade(&queue.socket)).collect();
        Some(Box::new(move |troubles| {
            let all: Vec<_> = sockets
                .iter()
                .filter_map(Weak::upgrade)
                .filter_map(|socket| statistics(&socket).ok())
                .collect();
            // Of a NIC that is gone the last count stays.
            if all.is_empty() {
                return;
            }
            let counts: [(&str, Count); 5] = [
                ("xdp-fill-ring-empty", |it| it.rx_fill_ring_empty_descs),
                ("xdp-rx-dropped", |it| it.rx_dropped),
                ("xdp-rx-invalid", |it| it.rx_invalid_descs),
                ("xdp-rx-ring-full", |it| it.rx_ring_full),
                ("xdp-tx-invalid", |it| it.tx_invalid_descs),
            ];
            for (name, count) in counts {
                troubles.insert(name.to_owned(), all.iter().map(count).sum());
            }
        }))
    }

    fn errors(&self) -> u64 {
        self.errors
    }
}

/// A socket for each receive queue of the interface, or for the one that is named.
fn open_queues(nic: &str, interface: &str, only: Option<u32>) -> Result<Vec<Queue>, NicError> {
    let uncounted = |source| system(nic, "count the receive queues of its interface", "", source);
    let count = receive_queues(interface).map_err(uncounted)?;
    let numbers = only.map_or(0..count, |queue| queue..queue.saturating_add(1));
    let problem = if numbers.end > count {
        format!("{interface} has {count} receive queues, of numbers from 0: correct queue in [[nic]]")
    } else if numbers.end > QUEUES_MAX {
        format!(
            "{interface} has {count} receive queues, more than {QUEUES_MAX}: ethtool -L {interface} combined {QUEUES_MAX}"
        )
    } else {
        let hint = "; the kernel needs CONFIG_XDP_SOCKETS and the daemon CAP_NET_RAW; driver = \"tap\" needs neither";
        let failed = |source| system(nic, "open an AF_XDP socket", hint, source);
        return numbers.map(Queue::open).collect::<io::Result<_>>().map_err(failed);
    };
    Err(NicError::Config { nic: nic.to_owned(), problem })
}

fn system(nic: &str, doing: &'static str, hint: &'static str, source: io::Error) -> NicError {
    NicError::System { nic: nic.to_owned(), doing, hint, source }
}
