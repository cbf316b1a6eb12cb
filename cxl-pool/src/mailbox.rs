//! The mailboxes of CXL memory devices, as the kernel offers them (`/dev/cxl/mem*`).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;

/// `CXL_MEM_SEND_COMMAND`: `_IOWR(0xCE, 2, struct cxl_send_command)`.
const SEND_COMMAND: libc::c_ulong = 3 << 30 | (size_of::<Command>() as libc::c_ulong) << 16 | 0xCE << 8 | 2;
/// `CXL_MEM_COMMAND_ID_RAW`: the opcode is passed on as it is. The kernel must have been built with `CONFIG_CXL_MEM_RAW_COMMANDS`.
const RAW: u32 = 2;
/// Get QoS Status (CXL 3, "MLD components"): one byte, the percentage of time with backpressure at the device's port, averaged by the device.
const GET_QOS_STATUS: u16 = 0x5405;

/// `struct cxl_send_command`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Command {
    id: u32,
    flags: u32,
    opcode: u16,
    reserved: u16,
    outcome: u32,
    input: Payload,
    output: Payload,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Payload {
    bytes: i32,
    reserved: u32,
    address: u64,
}

const _: () = assert!(size_of::<Command>() == 48);

/// The mailbox of a memory device.
#[derive(Debug)]
pub struct Mailbox(File);

impl Mailbox {
    /// Those of all memory devices of this host that answer how they do. None without such devices, or where they may not be asked.
    pub fn all() -> Vec<Self> {
        Self::below(Path::new("/dev/cxl"))
    }

    fn below(directory: &Path) -> Vec<Self> {
        let entries = directory.read_dir().into_iter().flatten().filter_map(Result::ok);
        let is_memory =
            |name: &str| name.strip_prefix("mem").is_some_and(|number| number.parse::<u32>().is_ok());
        let devices = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_memory));
        let opened = devices.filter_map(|it| OpenOptions::new().read(true).write(true).open(it.path()).ok());
        opened.map(Self).filter(|mailbox| mailbox.backpressure_percent().is_some()).collect()
    }

    /// For how much of the time the device holds its responses back, in percent, as it averages that itself; nothing if it does not say.
    pub fn backpressure_percent(&self) -> Option<u8> {
        backpressure_percent(|command| send(self.0.as_raw_fd(), command))
    }
}

/// Asks by a call of the kernel, which fills in what the command says.
fn send(device: RawFd, command: &mut Command) -> io::Result<()> {
    // SAFETY: the kernel writes to `command`, which is laid out as it wants it, and to the output that it names, no more than so many bytes. Whoever
    // made it keeps that alive. Any other file refuses the request by its number.
    let outcome = unsafe { libc::ioctl(device, SEND_COMMAND, std::ptr::from_mut(command)) };
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn backpressure_percent(mut send: impl FnMut(&mut Command) -> io::Result<()>) -> Option<u8> {
    let mut answer = [0_u8; 1];
    let output = Payload { bytes: 1, address: answer.as_mut_ptr() as u64, ..Payload::default() };
    let mut command = Command { id: RAW, opcode: GET_QOS_STATUS, output, ..Command::default() };
    send(&mut command).ok()?;
    // SAFETY: it is ours, and the kernel is done with it. Read as it is in memory: the compiler knows nothing of who wrote it.
    let percent = unsafe { answer.as_ptr().read_volatile() };
    (command.outcome == 0 && command.output.bytes == 1 && percent <= 100).then_some(percent)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that answers like this.
    fn answers(percent: u8, outcome: u32, bytes: i32) -> Option<u8> {
        backpressure_percent(|command| {
            assert_eq!((command.id, command.opcode, command.output.bytes), (RAW, GET_QOS_STATUS, 1));
            // SAFETY: the output has a byte, as was just looked at.
            unsafe { (command.output.address as *mut u8).write_volatile(percent) };
            (command.outcome, command.output.bytes) = (outcome, bytes);
            Ok(())
        })
    }

    #[test]
    fn a_device_says_for_how_much_of_the_time_it_holds_back() {
        assert_eq!(answers(37, 0, 1), Some(37));
        assert_eq!(answers(37, 21, 1), None, "it does not know the command");
        assert_eq!(answers(37, 0, 0), None, "it said nothing");
        assert_eq!(answers(101, 0, 1), None, "that is no percentage");
        assert_eq!(backpressure_percent(|_| Err(io::Error::from_raw_os_error(libc::EPERM))), None);
    }

    #[test]
    fn what_is_no_mailbox_is_not_asked_twice() {
        let directory = tempfile::tempdir().expect("a directory");
        for name in ["mem0", "mem1", "memory", "port0"] {
            std::fs::write(directory.path().join(name), "").expect("a file");
        }
        assert!(Mailbox::below(directory.path()).is_empty());
        assert!(Mailbox::below(Path::new("/nonexistent")).is_empty());
        let file = File::open("/dev/null").expect("it is there");
        let mut command = Command::default();
        assert!(send(file.as_raw_fd(), &mut command).is_err(), "another file does not know the request");
    }
}
