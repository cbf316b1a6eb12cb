//! System calls on an AF_XDP socket, and on the packet socket beside it.
#![allow(unsafe_code, reason = "socket options that take structures")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Has an interface hand up what is for other addresses than its own, as long as the descriptor is open: a device drops
/// that before any XDP program sees it, and the addresses of instances are never the device's own.
pub(super) fn promiscuous(interface_index: u32) -> io::Result<OwnedFd> {
    // Of no protocol, it is given no frames itself.
    // SAFETY: no memory is involved.
    let socket = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor for us alone.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
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

/// Where the kernel has laid out the rings in their mappings.
pub(super) fn mmap_offsets(socket: &OwnedFd) -> io::Result<libc::xdp_mmap_offsets> {
    // SAFETY: plain data for which zeroes are valid.
    let mut offsets: libc::xdp_mmap_offsets = unsafe { std::mem::zeroed() };
    let mut bytes = libc::socklen_t::try_from(size_of_val(&offsets)).expect("a short structure");
    // SAFETY: the kernel writes at most `bytes` bytes into the structure.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            libc::XDP_MMAP_OFFSETS,
            (&raw mut offsets).cast(),
            &raw mut bytes,
        )
    };
    if result == 0 { Ok(offsets) } else { Err(io::Error::last_os_error()) }
}

/// What the kernel has chosen for a socket that is bound.
pub(super) fn options(socket: &OwnedFd) -> io::Result<u32> {
    let mut options = 0_u32;
    let mut bytes = libc::socklen_t::try_from(size_of_val(&options)).expect("a word");
    // SAFETY: the kernel writes at most `bytes` bytes into the word.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            libc::XDP_OPTIONS,
            (&raw mut options).cast(),
            &raw mut bytes,
        )
    };
    if result == 0 { Ok(options) } else { Err(io::Error::last_os_error()) }
}
