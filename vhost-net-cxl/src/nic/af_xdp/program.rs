//! The XDP program that hands every frame of an interface to our sockets, by the bpf system call alone.
#![allow(unsafe_code, reason = "the bpf system call")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const MAP_CREATE: libc::c_long = 0;
const MAP_UPDATE: libc::c_long = 2;
const PROGRAM_LOAD: libc::c_long = 5;
const LINK_CREATE: libc::c_long = 28;
const LINK_DETACH: libc::c_long = 34;
const MAP_TYPE_XSK: u32 = 17;
const PROGRAM_TYPE_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
const FLAG_SKB_MODE: u32 = 1 << 1;
const FLAG_DRIVER_MODE: u32 = 1 << 2;
/// Queues of one interface that can be told apart.
pub(super) const QUEUES_MAX: u32 = 64;
/// The largest `bpf_attr` used here; shorter ones are zero behind their end, which the kernel wants.
const ATTRIBUTE_WORDS: usize = 16;

/// Who runs the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// The kernel's stack: works on every interface, and copy mode gains nothing from the driver's own.
    Generic,
    /// The interface's driver. Without it there is no zero-copy.
    Native,
}

/// The map and the program, attached until it is dropped.
#[derive(Debug)]
pub(super) struct Program {
    map: OwnedFd,
    link: OwnedFd,
}

impl Program {
    /// Attaches the program to an interface.
    pub(super) fn attach(interface: u32, mode: Mode) -> io::Result<Self> {
        let flags = match mode {
            Mode::Generic => FLAG_SKB_MODE,
            Mode::Native => FLAG_DRIVER_MODE,
        };
        // map_type, key_size, value_size, max_entries
        let map = bpf_fd(MAP_CREATE, &[MAP_TYPE_XSK, 4, 4, QUEUES_MAX])?;
        let instructions = redirect_to(map.as_raw_fd());
        let license = *b"Apache-2.0\0";
        let mut load = [0u32; ATTRIBUTE_WORDS];
        load[0] = PROGRAM_TYPE_XDP;
        load[1] = u32::try_from(instructions.len()).expect("a handful");
        set_address(&mut load[2..4], instructions.as_ptr() as u64);
        set_address(&mut load[4..6], license.as_ptr() as u64);
        let program = bpf_fd(PROGRAM_LOAD, &load)?;
        // prog_fd, target_ifindex, attach_type, flags
        let link = bpf_fd(LINK_CREATE, &[raw(&program), interface, ATTACH_XDP, flags])?;
        Ok(Self { map, link })
    }

    /// From now on the frames of this queue go to this socket.
    pub(super) fn direct(&self, queue: u32, socket: &OwnedFd) -> io::Result<()> {
        let value = raw(socket);
        let mut update = [0u32; ATTRIBUTE_WORDS];
        update[0] = raw(&self.map);
        set_address(&mut update[2..4], &raw const queue as u64);
        set_address(&mut update[4..6], &raw const value as u64);
        bpf(MAP_UPDATE, &update).map(drop)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Closing the link detaches the program too, but only once no copy of the descriptor is left, and a process
        // that another thread forks has one until it begins its program: the next program would find this one attached.
        // Before Linux 5.9, where this is not known, closing has to do.
        let _ = bpf(LINK_DETACH, &[raw(&self.link)]);
    }
}

/// `return bpf_redirect_map(&map, ctx->rx_queue_index, XDP_PASS);`
fn redirect_to(map: i32) -> [u64; 6] {
    /// One instruction: opcode, destination and source register, offset, immediate.
    const fn instruction(opcode: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> u64 {
        opcode as u64
            | (destination as u64) << 8
            | (source as u64) << 12
            | (offset.cast_unsigned() as u64) << 16
            | (immediate.cast_unsigned() as u64) << 32
    }
    const RX_QUEUE_INDEX: i16 = 16;
    const PSEUDO_MAP_FD: u8 = 1;
    const XDP_PASS: i32 = 2;
    const REDIRECT_MAP: i32 = 51;
    [
        instruction(0x61, 2, 1, RX_QUEUE_INDEX, 0), // r2 = *(u32 *)(r1 + 16)
        instruction(0x18, 1, PSEUDO_MAP_FD, 0, map), // r1 = map, in two slots
        0,
        instruction(0xb7, 3, 0, 0, XDP_PASS),     // r3 = 2
        instruction(0x85, 0, 0, 0, REDIRECT_MAP), // call 51
        instruction(0x95, 0, 0, 0, 0),            // exit
    ]
}

fn raw(fd: &OwnedFd) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

fn set_address(words: &mut [u32], address: u64) {
    // As the kernel reads a u64 on this machine.
    let halves = address.to_ne_bytes();
    words[0] = u32::from_ne_bytes([halves[0], halves[1], halves[2], halves[3]]);
    words[1] = u32::from_ne_bytes([halves[4], halves[5], halves[6], halves[7]]);
}

fn bpf_fd(command: libc::c_long, attribute: &[u32]) -> io::Result<OwnedFd> {
    let fd = bpf(command, attribute)?;
    // SAFETY: the kernel has just created this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn bpf(command: libc::c_long, attribute: &[u32]) -> io::Result<i32> {
    // Eight-byte aligned, as the kernel's own union is.
    #[repr(align(8))]
    struct Attribute([u32; ATTRIBUTE_WORDS]);
    let mut whole = Attribute([0; ATTRIBUTE_WORDS]);
    whole.0[..attribute.len()].copy_from_slice(attribute);
    let bytes = size_of::<Attribute>();
    // SAFETY: the attribute, and what its addresses point to, live until the call returns; the kernel writes to
    // neither for these commands.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw const whole, bytes) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(i32::try_from(result).unwrap_or(-1)) }
}

#[cfg(test)]
mod tests {
    use rustix::thread::{UnshareFlags, unshare_unsafe};

    use super::*;

    #[test]
    fn a_program_is_gone_once_dropped_though_its_link_is_open_elsewhere() {
        const LOOPBACK: u32 = 1;
        let thread = std::thread::spawn(|| {
            // SAFETY: a network namespace does not affect file descriptors or memory.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("run as root");
            let program = Program::attach(LOOPBACK, Mode::Generic).expect("attached");
            assert!(Program::attach(LOOPBACK, Mode::Generic).is_err(), "one at a time");
            let _copy = program.link.try_clone().expect("copied");
            drop(program);
            Program::attach(LOOPBACK, Mode::Generic).expect("attached again");
        });
        thread.join().expect("passes");
    }
}
