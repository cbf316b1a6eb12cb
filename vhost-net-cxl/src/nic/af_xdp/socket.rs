//! System calls on an AF_XDP socket.
#![allow(unsafe_code, reason = "socket options that take structures")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

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
