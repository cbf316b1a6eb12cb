//! System calls on an AF_XDP socket, and on the packet socket beside it.
#![allow(unsafe_code, reason = "socket options that take structures")]

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// A queue stays busy for a moment after its last socket was closed. The worker that waits serves other NICs, too, and opens this one
/// again later.
const BUSY_RETRY: Duration = Duration::from_millis(20);
const BUSY_PAUSE: Duration = Duration::from_millis(5);
const ETHTOOL_GET_CHANNELS: u32 = 0x3c;

/// How a socket has its frames.
#[derive(Clone, Copy, Debug)]
pub(super) enum Binding<'a> {
    /// Copied into the memory that it has registered.
    Copy,
    /// The device itself reads and writes that memory. An error, if the interface's driver cannot do it.
    ZeroCopy,
    /// As another socket of another queue, which is bound, and in the memory of that.
    Shared(&'a OwnedFd),
}

/// Opens an AF_XDP socket.
pub(super) fn open_socket() -> io::Result<OwnedFd> {
    socket(libc::AF_XDP, 0)
}

fn socket(family: libc::c_int, protocol: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: no memory is involved.
    let socket = unsafe { libc::socket(family, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(socket) })
}

/// Binds a socket to a queue of an interface.
pub(super) fn bind(
    socket: &OwnedFd,
    interface_index: u32,
    queue: u32,
    binding: Binding<'_>,
) -> io::Result<()> {
    let family = libc::c_ushort::try_from(libc::AF_XDP).map_err(io::Error::other)?;
    let (flags, owner) = match binding {
        Binding::Copy => (libc::XDP_COPY | libc::XDP_USE_NEED_WAKEUP, 0),
        Binding::ZeroCopy => (libc::XDP_ZEROCOPY | libc::XDP_USE_NEED_WAKEUP, 0),
        // The rest is as with the other one.
        Binding::Shared(owner) => (libc::XDP_SHARED_UMEM, owner.as_raw_fd().cast_unsigned()),
    };
    let address = libc::sockaddr_xdp {
        sxdp_family: family,
        sxdp_flags: flags,
        sxdp_ifindex: interface_index,
        sxdp_queue_id: queue,
        sxdp_shared_umem_fd: owner,
    };
    let bytes = libc::socklen_t::try_from(size_of_val(&address)).expect("a short structure");
    let give_up = Instant::now() + BUSY_RETRY;
    loop {
        // SAFETY: the address lives until the call returns.
        let result = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), bytes) };
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

/// How many receive queues an interface has, among which its device, or whoever is before it, spreads what arrives.
pub(super) fn receive_queues(interface: &str) -> io::Result<u32> {
    match channels(interface) {
        Ok(count) => Ok(count.max(1)),
        // A driver that has no say in it.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(listed_queues(interface).max(1)),
        Err(error) => Err(error),
    }
}

/// As the driver says: `ethtool -l`.
fn channels(interface: &str) -> io::Result<u32> {
    /// `struct ethtool_channels`.
    #[repr(C)]
    #[derive(Default)]
    struct Channels {
        command: u32,
        most: [u32; 4],
        receiving: u32,
        sending: u32,
        other: u32,
        combined: u32,
    }
    // A socket of AF_XDP does not know this call.
    let socket = socket(libc::AF_NETLINK, libc::NETLINK_ROUTE)?;
    let mut channels = Channels { command: ETHTOOL_GET_CHANNELS, ..Channels::default() };
    // SAFETY: an ifreq is plain data for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..room].iter_mut().zip(interface.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = (&raw mut channels).cast();
    // SAFETY: the kernel reads and writes an ifreq and the structure that it points to, which live until the call returns.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(channels.receiving + channels.combined)
}

/// As the kernel lists them.
fn listed_queues(interface: &str) -> u32 {
    let directory = Path::new("/sys/class/net").join(interface).join("queues");
    let names = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let count = names.filter(|name| name.as_encoded_bytes().starts_with(b"rx-")).count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Has an interface hand up what is for other addresses than its own, as long as the descriptor is open: a device drops
/// that before any XDP program sees it, and the addresses of instances are never the device's own.
pub(super) fn promiscuous(interface_index: u32) -> io::Result<OwnedFd> {
    // Of no protocol, it is given no frames itself.
    let socket = socket(libc::AF_PACKET, 0)?;
    let membership = libc::packet_mreq {
        mr_ifindex: libc::c_int::try_from(interface_index).map_err(io::Error::other)?,
        mr_type: libc::c_ushort::try_from(libc::PACKET_MR_PROMISC).map_err(io::Error::other)?,
        mr_alen: 0,
        mr_address: [0; 8],
    };
    let bytes = libc::socklen_t::try_from(size_of_val(&membership)).expect("a short structure");
    // SAFETY: the kernel reads a structure of this length, which lives until the call returns.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_ADD_MEMBERSHIP,
            (&raw const membership).cast(),
            bytes,
        )
    };
    if result == 0 { Ok(socket) } else { Err(io::Error::last_os_error()) }
}

/// Lets the kernel send what the transmit ring holds. It says if that was not all.
pub(super) fn wake_sender(socket: &OwnedFd) -> io::Result<()> {
    // SAFETY: an empty message, so no memory is involved.
    let sent = unsafe {
        libc::sendto(socket.as_raw_fd(), std::ptr::null(), 0, libc::MSG_DONTWAIT, std::ptr::null(), 0)
    };
    if sent >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Lets the kernel look at the fill ring again.
pub(super) fn wake_receiver(socket: &OwnedFd) {
    // SAFETY: no memory is involved. An error means that there is nothing to receive.
    unsafe {
        libc::recvfrom(
            socket.as_raw_fd(),
            std::ptr::null_mut(),
            0,
            libc::MSG_DONTWAIT,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
    };
}

/// Sets an option of AF_XDP's level, of which the kernel reads the bytes of `value`.
pub(super) fn set_option<T>(socket: &OwnedFd, option: libc::c_int, value: &T) -> io::Result<()> {
    let bytes = libc::socklen_t::try_from(size_of::<T>()).expect("a short structure");
    // SAFETY: the kernel reads a structure of this length, which lives until the call returns.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_XDP, option, (&raw const *value).cast(), bytes)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What the kernel says of one option of a socket.
///
/// # Safety
///
/// Whatever the kernel writes for this option, and zeroes, are valid for a `T`.
unsafe fn get<T>(socket: &OwnedFd, option: libc::c_int) -> io::Result<T> {
    // SAFETY: the caller's word.
    let mut value: T = unsafe { std::mem::zeroed() };
    let mut bytes = libc::socklen_t::try_from(size_of::<T>()).expect("a short structure");
    // SAFETY: the kernel writes at most `bytes` bytes into the value.
    let result = unsafe {
        let into = (&raw mut value).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_XDP, option, into, &raw mut bytes)
    };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// What the kernel counts of a socket's troubles.
pub(super) fn statistics(socket: &OwnedFd) -> io::Result<libc::xdp_statistics> {
    // SAFETY: plain numbers.
    unsafe { get(socket, libc::XDP_STATISTICS) }
}

/// Where the kernel has laid out the rings in their mappings.
pub(super) fn mmap_offsets(socket: &OwnedFd) -> io::Result<libc::xdp_mmap_offsets> {
    // SAFETY: plain numbers.
    unsafe { get(socket, libc::XDP_MMAP_OFFSETS) }
}
