//! A TAP device: the NIC of a host whose uplink is a port of a Linux bridge.
//!
//! Frames cross with their virtio-net header, so that checksums and segmentation stay undone from one guest's
//! driver to the next wire or guest that does them. The link is up while both the device and its uplink are up and have a carrier.
#![allow(unsafe_code, reason = "ioctl, and readv and writev on the pool's memory")]

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use cxl_pool::Pool;

use super::carrier::{CarrierWatch, find};
use super::netlink::Netlink;
use super::room::RoomWatch;
use super::window::Window;
use super::{BATCH_FRAMES, Batch, Identity, LinkState, Nic, NicConfig, NicError, OnLinkChange, Piece, Taken};
use crate::backend::receive_buffers::{BUFFER_BYTES, BufferIndex, PIECES_MAX, ReceiveBuffers};
use crate::offloads::Offloads;
use crate::vnet_header::HEADER_BYTES;

const CLONE_DEVICE: &str = "/dev/net/tun";
/// How long packets wait for a device that is down, until its watch says so: as long as for a link that is.
const DOWN_HOLD: Duration = Duration::from_secs(1);

/// A TAP device in use.
pub struct TapNic {
    identity: Identity,
    link: LinkState,
    watch: Option<CarrierWatch>,
    /// The device, and its uplink if that is another one.
    interfaces: Vec<String>,
    file: File,
    window: Window,
    /// Buffers that the next frame will be read into.
    staged: Vec<BufferIndex>,
    offloads: Option<Offloads>,
    errors: u64,
    /// Of the packets that it was given last, those that the kernel did not take.
    refused: Vec<usize>,
    /// Tells when it has room again, and does so now.
    room: RoomWatch,
    watches_room: bool,
    /// It had no room for the packet that it was given last.
    full: bool,
    /// Since when the kernel has said that the device is down, and taken nothing.
    down_since: Option<Instant>,
}

impl TapNic {
    /// Opens the TAP device, or creates it for as long as this daemon lives, and sets it up.
    pub fn open(config: &NicConfig, pool: &Pool) -> Result<Self, NicError> {
        let nic = &config.name;
        let interface = config.interface();
        let uplink = config.uplink.as_deref().unwrap_or(interface);
        let mut netlink = Netlink::open().map_err(|source| system(nic, "open rtnetlink", "", source))?;
        // A wrong uplink is found before anything is created.
        if uplink != interface {
            find(&mut netlink, nic, uplink)?;
        }
        if !config.create {
            find(&mut netlink, nic, interface)?;
        }
        let file = attach(nic, interface)?;
        if let Some(bytes) = config.send_buffer_bytes {
            limit_sending(nic, &file, bytes)?;
        }
        let room = RoomWatch::new(&file)
            .map_err(|source| system(nic, "watch its TAP device for room", "", source))?;
        let index = find(&mut netlink, nic, interface)?.index;
        netlink.set_up(index).map_err(|source| {
            system(nic, "set its interface up", "; run as root or with CAP_NET_ADMIN", source)
        })?;
        let device = find(&mut netlink, nic, interface)?;
        let port = find(&mut netlink, nic, uplink)?;
        let mut interfaces = vec![interface.to_owned()];
        if uplink != interface {
            interfaces.push(uplink.to_owned());
        }
        let identity = Identity {
            name: nic.clone(),
            driver: config.driver,
            mac: port.mac,
            mtu: u16::try_from(port.mtu.min(device.mtu)).unwrap_or(u16::MAX),
            speed_mbps: config.speed_mbps,
            backup: config.backup,
            lag: config.lag.clone(),
            offloads: Offloads::ALL,
            // The kernel copies through this host's caches.
            cache_bypassing: false,
        };
        let mut tap = Self {
            identity,
            link: LinkState::new(device.up && port.up),
            watch: None,
            interfaces,
            file,
            window: Window::new(pool),
            staged: Vec::with_capacity(PIECES_MAX),
            offloads: None,
            errors: 0,
            refused: Vec::with_capacity(BATCH_FRAMES),
            room,
            watches_room: false,
            full: false,
            down_since: None,
        };
        // Kernels before 6.2 know nothing of large UDP, and refuse what they do not know.
        if tap.set_receiver_offloads(Offloads::ALL).is_err() {
            tap.identity.offloads = Offloads::CHECKSUM.union(Offloads::TSO4).union(Offloads::TSO6);
        }
        tap.set_receiver_offloads(Offloads::NONE)?;
        Ok(tap)
    }

    fn write(&mut self, parts: &[libc::iovec]) -> Result<Taken, NicError> {
        loop {
            let descriptor = self.file.as_raw_fd();
            // SAFETY: the parts lie in the pool, which the window keeps mapped, or in the caller's slices; the
            // kernel only reads them. By number, since the C library's functions are points of cancellation: that is 5 % of it.
            let written = unsafe {
                match parts {
                    // The usual small frame: the kernel has no vector to copy and to check.
                    [part] => libc::syscall(libc::SYS_write, descriptor, part.iov_base, part.iov_len),
                    _ => libc::syscall(libc::SYS_writev, descriptor, parts.as_ptr(), parts.len()),
                }
            };
            self.full = false;
            if written >= 0 {
                self.down_since = None;
                return Ok(Taken::Whole);
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // Full for now: no memory or no room in the socket's buffer.
                Some(libc::EAGAIN | libc::ENOBUFS) => {
                    self.full = true;
                    return Ok(Taken::NoRoom);
                }
                // The device is down, and the watch is about to say so: packets wait for that as for any link. Should it never say
                // so, they are lost as on any link that is down for long. Otherwise the backend would try again and again for ever.
                Some(libc::EIO)
                    if self.down_since.get_or_insert_with(Instant::now).elapsed() <= DOWN_HOLD =>
                {
                    return Ok(Taken::NoRoom);
                }
                // The kernel found fault with this one packet. That is no trouble of the device's: whoever makes packets could
                // cause as many as he likes.
                Some(libc::EINVAL | libc::EMSGSIZE) => return Ok(Taken::Refused),
                Some(libc::EIO | libc::ENOMEM | libc::EFAULT) => {
                    self.errors += 1;
                    return Ok(Taken::Refused);
                }
                _ => return Err(system(&self.identity.name, "write to its TAP device", "", error)),
            }
        }
    }
}

impl Nic for TapNic {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn link(&self) -> &LinkState {
        &self.link
    }

    fn watch_link(&mut self, on_change: OnLinkChange) -> Result<(), NicError> {
        let interfaces: Vec<&str> = self.interfaces.iter().map(String::as_str).collect();
        let watch = CarrierWatch::begin(&self.identity.name, &interfaces, self.link.clone(), on_change)?;
        self.watch = Some(watch);
        Ok(())
    }

    fn start(&mut self, _buffers: &mut ReceiveBuffers) -> Result<(), NicError> {
        self.staged.clear();
        Ok(())
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.file.as_fd(), self.room.descriptor()]
    }

    fn set_receiver_offloads(&mut self, offloads: Offloads) -> Result<(), NicError> {
        if self.offloads == Some(offloads) {
            return Ok(());
        }
        let mut flags: libc::c_uint = 0;
        for (offload, flag) in [
            (Offloads::CHECKSUM, libc::TUN_F_CSUM),
            (Offloads::TSO4, libc::TUN_F_TSO4),
            (Offloads::TSO6, libc::TUN_F_TSO6),
            (Offloads::USO, libc::TUN_F_USO4 | libc::TUN_F_USO6),
        ] {
            if offloads.contains(offload) {
                flags |= flag;
            }
        }
        // SAFETY: TUNSETOFFLOAD takes its flags by value.
        let result =
            unsafe { libc::ioctl(self.file.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(flags)) };
        if result != 0 {
            let error = io::Error::last_os_error();
            return Err(system(&self.identity.name, "set the offloads of its TAP device", "", error));
        }
        self.offloads = Some(offloads);
        Ok(())
    }

    fn receive(&mut self, buffers: &mut ReceiveBuffers, batch: &mut Batch) -> Result<(), NicError> {
        // Once in each turn: what waits for room has been sent, or is gone.
        if std::mem::take(&mut self.watches_room) {
            self.room.forget(&self.file);
        }
        while !batch.is_full() {
            while self.staged.len() < PIECES_MAX {
                // Without room for the longest frame nothing is read, since the kernel would cut it off. The frames
                // wait in the device's queue, and are dropped there once that is full.
                let Some(buffer) = buffers.take() else { return Ok(()) };
                self.staged.push(buffer);
            }
            let mut parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PIECES_MAX];
            for (part, buffer) in parts.iter_mut().zip(&self.staged) {
                let address = self.window.address(buffers.offset(*buffer), u64::from(BUFFER_BYTES));
                *part = libc::iovec { iov_base: address.cast(), iov_len: BUFFER_BYTES as usize };
            }
            let count = libc::c_int::try_from(parts.len()).expect("a few parts");
            // SAFETY: the parts are staged buffers of the receive area, which nobody else uses until the frame is
            // announced, in the pool, which the window keeps mapped.
            let read = unsafe { libc::readv(self.file.as_raw_fd(), parts.as_ptr(), count) };
            let Ok(read) = usize::try_from(read) else {
                let error = io::Error::last_os_error();
                match error.raw_os_error() {
                    Some(libc::EINTR) => continue,
                    Some(libc::EAGAIN) => return Ok(()),
                    // EBADFD: the device was deleted below us, which the carrier watch reports too.
                    _ => return Err(system(&self.identity.name, "read from its TAP device", "", error)),
                }
            };
            if read <= HEADER_BYTES {
                self.errors += 1;
                continue;
            }
            let pieces = read.div_ceil(BUFFER_BYTES as usize);
            let mut left = u32::try_from(read).expect("no longer than the staged buffers");
            for buffer in self.staged.drain(..pieces) {
                let bytes = left.min(BUFFER_BYTES);
                left -= bytes;
                batch.push_piece(Piece { at: buffers.offset(buffer), bytes });
            }
            batch.end_frame();
        }
        Ok(())
    }

    fn transmit(&mut self, packets: &Batch) -> Result<usize, NicError> {
        self.refused.clear();
        for (sent, packet) in packets.frames().enumerate() {
            let mut parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; super::PIECES_MAX];
            for (part, piece) in parts.iter_mut().zip(packet) {
                let address = self.window.address(piece.at, u64::from(piece.bytes));
                *part = libc::iovec { iov_base: address.cast(), iov_len: piece.bytes as usize };
            }
            match self.write(&parts[..packet.len()]) {
                Ok(Taken::Whole) => {}
                Ok(Taken::Refused) => self.refused.push(sent),
                // What went out must not go out again: the next call tells of the error.
                Err(_) if sent > 0 => return Ok(sent),
                Ok(Taken::NoRoom) => return Ok(sent),
                Err(error) => return Err(error),
            }
        }
        Ok(packets.len())
    }

    fn transmit_frame(&mut self, frame: &[u8]) -> Result<Taken, NicError> {
        let header = [0u8; HEADER_BYTES];
        let part =
            |bytes: &[u8]| libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        self.write(&[part(&header), part(frame)])
    }

    fn refused(&self) -> &[usize] {
        &self.refused
    }

    fn tells_of_room(&mut self) -> bool {
        self.watches_room = self.full && self.room.watch(&self.file);
        self.watches_room
    }

    fn errors(&self) -> u64 {
        self.errors
    }
}

/// A file that is tied to the TAP device of this name, which the kernel creates if it is missing. Frames are read from it and written to it
/// behind a virtio-net header of 12 bytes each; it does not block.
pub fn attach(nic: &str, interface: &str) -> Result<File, NicError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(CLONE_DEVICE)
        .map_err(|source| system(nic, "open /dev/net/tun", "; does the kernel have tun?", source))?;
    // SAFETY: an ifreq is plain data for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if interface.is_empty() || interface.len() >= request.ifr_name.len() {
        let problem =
            format!("interface {interface:?} is no name of an interface: give one to 15 characters");
        return Err(NicError::Config { nic: nic.to_owned(), problem });
    }
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).expect("flags of 15 bits");
    // SAFETY: TUNSETIFF reads and writes an ifreq, which lives until the call returns.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } != 0 {
        let error = io::Error::last_os_error();
        let hint = match error.raw_os_error() {
            Some(libc::EBUSY) => "; another process uses it: stop that, or name another interface",
            Some(libc::EINVAL) => "; an interface of that name exists and is no single-queue TAP device",
            Some(libc::EPERM) => "; run as root or with CAP_NET_ADMIN",
            _ => "",
        };
        return Err(system(nic, "attach to its TAP device", hint, error));
    }
    let header_bytes = libc::c_int::try_from(HEADER_BYTES).expect("twelve");
    // SAFETY: TUNSETVNETHDRSZ reads an int, which lives until the call returns.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const header_bytes) } != 0 {
        return Err(system(nic, "set the header length of its TAP device", "", io::Error::last_os_error()));
    }
    Ok(file)
}

/// Has the kernel take no more packets than these bytes of its memory hold, until some have left the host. It is less than it
/// says, since each packet counts with what the kernel needs for it.
fn limit_sending(nic: &str, file: &File, bytes: NonZeroU32) -> Result<(), NicError> {
    // More than an int holds was refused with the configuration.
    let bytes = libc::c_int::try_from(bytes.get()).unwrap_or(libc::c_int::MAX);
    // SAFETY: TUNSETSNDBUF reads an int, which lives until the call returns.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETSNDBUF, &raw const bytes) } != 0 {
        let error = io::Error::last_os_error();
        return Err(system(nic, "set the send buffer of its TAP device", "", error));
    }
    Ok(())
}

fn system(nic: &str, doing: &'static str, hint: &'static str, source: io::Error) -> NicError {
    NicError::System { nic: nic.to_owned(), doing, hint, source }
}
