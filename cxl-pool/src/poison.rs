//! Memory that fails under a running daemon: a load from a poisoned CXL line, or from a file that was truncated, raises SIGBUS.
//!
//! Whatever was being read is lost, and nothing that the process would make of it may reach a guest or a device. So the
//! process ends at once, and says which line and region failed. If that is part of the data area, it also notes it in a file, for its
//! next life to tell the controller, which gives the region to nobody any more: started again, it works on, and ends with
//! [`EXIT_RECORDED`]. Without what failed elsewhere, no daemon can work, and it ends with [`EXIT_STATUS`], so that a supervisor does
//! not try again and again. The fast path does not know of any of this.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fmt::{self, Write};
use std::fs;
use std::io;
use std::os::raw::c_int;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::fd::BorrowedFd;
use rustix::fs::{Access, Mode, OFlags};

use crate::{Area, ByteOffset, HardwareMemory, Layout, LineCount, LineOffset, Pool, PoolError, regions};

/// With which status a process ends whose pool failed for good: `EX_IOERR`.
pub const EXIT_STATUS: i32 = 74;
/// With which status it ends if it can be started again: `EX_TEMPFAIL`.
pub const EXIT_RECORDED: i32 = 75;

/// What a line of the record begins behind. One that a dying process did not write to its end, for want of room on its disk, stands
/// before the next one without a line break: with this at its end it reads as nothing, in place of as a number that nobody wrote.
const BEGIN: &str = "~\n";

/// What the kernel takes away at least.
const PAGE_BYTES: u64 = 4096;

/// All that the handler needs, made in advance: it must not allocate.
struct Watched {
    path: String,
    base: usize,
    bytes: usize,
    memory: HardwareMemory,
    layout: Layout,
    /// Made when there is something to note, so that who refuses to start leaves nothing behind.
    record: Option<CString>,
}

static WATCHED: AtomicPtr<Watched> = AtomicPtr::new(ptr::null_mut());

/// From here on the process ends with a clear message when the memory of this pool fails, and notes where in this file. To be
/// called once, by a daemon, for the pool that it works on; the pool stays mapped until the process ends.
pub fn watch(pool: &Pool, path: &Path, record: Option<&Path>) -> Result<(), PoolError> {
    let memory = pool.hardware();
    let (base, bytes) = memory.range();
    let layout = pool.layout().clone();
    let record = record.map(writable).transpose()?;
    let watched = Box::new(Watched { path: path.display().to_string(), base, bytes, memory, layout, record });
    // Never freed: the handler may run at any time.
    WATCHED.store(Box::into_raw(watched), Ordering::Release);
    install().map_err(|source| PoolError::Io {
        operation: "watch for failures of",
        path: path.to_owned(),
        source,
    })
}

/// The name of a file that can be made when it is needed: what stands against it shall show now.
fn writable(record: &Path) -> Result<CString, PoolError> {
    let failed = |source| PoolError::Io {
        operation: "prepare to write the record of failures",
        path: record.to_owned(),
        source,
    };
    let directory = record.parent().unwrap_or(Path::new("."));
    rustix::fs::access(directory, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|error| failed(error.into()))?;
    CString::new(record.as_os_str().as_bytes()).map_err(|error| failed(error.into()))
}

/// What was noted in this file, each place once; nothing if there is none. Lines that were not written to their end are left out.
pub fn recorded(record: &Path) -> Result<Vec<Area>, PoolError> {
    let text = match fs::read(record) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => {
            let (operation, path) = ("read the record of failures", record.to_owned());
            return Err(PoolError::Io { operation, path, source });
        }
    };
    let area = |line: &str| {
        let (start, lines) = line.strip_suffix('\n')?.split_once(' ')?;
        let (start, lines) = (start.parse().ok()?, lines.parse().ok()?);
        Some((start, lines))
    };
    // What a power failure left of one line is no reason not to read the others.
    let text = String::from_utf8_lossy(&text);
    let areas: BTreeSet<(u64, u64)> = text.split_inclusive('\n').filter_map(area).collect();
    Ok(areas
        .into_iter()
        .map(|(start, lines)| Area::new(LineOffset::new(start), LineCount::new(lines)))
        .collect())
}

fn install() -> std::io::Result<()> {
    // SAFETY: all zeros is a valid `sigaction`, which is then filled in.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_bus_error as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for and does only what a handler may do: atomic loads, reads of
    // mapped memory, `open`, `write`, `sigaction` and `_exit`.
    match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

extern "C" fn on_bus_error(_: c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let watched = WATCHED.load(Ordering::Acquire);
    // SAFETY: the kernel hands a valid `siginfo_t` to a handler with SA_SIGINFO.
    let at = unsafe { (*info).si_addr() } as usize;
    // SAFETY: the same.
    let bytes = unsafe { lost_bytes(info) };
    // SAFETY: it is null, or was made by `watch` and is never freed.
    let watched = unsafe { watched.as_ref() };
    let Some((watched, offset)) = watched
        .and_then(|watched| Some((watched, at.checked_sub(watched.base)?)))
        .filter(|(watched, offset)| *offset < watched.bytes)
    else {
        // Not ours: let the access fault again, with the usual end.
        // SAFETY: SIG_DFL is a valid action.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        return;
    };
    let offset = ByteOffset::new(offset as u64);
    let recorded = watched.note(offset, bytes);
    let mut line = Line::default();
    let _ = write!(
        line,
        "error: memory of the pool {} failed at byte {}, line {}",
        watched.path,
        offset.get(),
        offset.line().get()
    );
    line.print();
    // Should the table lie in what failed, this faults once more, and the kernel ends the process: what counts was said.
    match regions::holding(&watched.memory, &watched.layout, offset.line()) {
        Some((id, holder)) => _ = write!(line, ", in region {id} of {holder}"),
        None => _ = line.write_str(", outside all regions"),
    }
    let _ = line.write_str(if recorded {
        ": poisoned CXL memory; started again, this daemon reports it, and the region is not used any more\n"
    } else {
        ": poisoned CXL memory or a truncated file; look at the device's health and at `podctl pool` before starting this daemon again\n"
    });
    line.print();
    let status = if recorded { EXIT_RECORDED } else { EXIT_STATUS };
    // SAFETY: ends the process without running anything else.
    unsafe { libc::_exit(status) }
}

/// How much the kernel says was lost; a page if it does not say.
///
/// # Safety
///
/// `info` is what the kernel hands to a handler of SIGBUS.
unsafe fn lost_bytes(info: *mut libc::siginfo_t) -> u64 {
    const BUS_MCEERR_AR: c_int = 4;
    const BUS_MCEERR_AO: c_int = 5;
    // `si_addr_lsb`, which libc does not name, follows `si_addr` at byte 24 of the 128.
    const HALFWORDS: usize = size_of::<libc::siginfo_t>() / 2;
    const SIGNIFICANT_BIT: usize = 24 / 2;
    // SAFETY: the caller's. Of these codes the kernel fills in the field, of the others nobody looks at it.
    let (code, bit) = unsafe { ((*info).si_code, (*info.cast::<[i16; HALFWORDS]>())[SIGNIFICANT_BIT]) };
    match (code, u32::try_from(bit)) {
        (BUS_MCEERR_AR | BUS_MCEERR_AO, Ok(bit @ 12..=30)) => 1 << bit,
        _ => PAGE_BYTES,
    }
}

impl Watched {
    /// Notes what was lost, if a next life can do without. Says whether that is on the medium.
    fn note(&self, at: ByteOffset, bytes: u64) -> bool {
        let Some(record) = self.record.as_ref().filter(|_| self.layout.data().contains(at, 1)) else {
            return false;
        };
        let mut line = Line::default();
        let start = ByteOffset::new(at.get() / bytes * bytes).line();
        let _ = writeln!(line, "{BEGIN}{} {}", start.get(), LineCount::covering(bytes).get());
        let text = &line.bytes[..line.used];
        let flags = OFlags::CREATE | OFlags::APPEND | OFlags::WRONLY | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::open(record.as_c_str(), flags, Mode::from_raw_mode(0o644)) else {
            return false;
        };
        rustix::io::write(&file, text) == Ok(text.len()) && rustix::fs::fdatasync(&file).is_ok()
    }
}

/// Text of limited length, without allocation. What does not fit is left out.
struct Line {
    bytes: [u8; 1024],
    used: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { bytes: [0; 1024], used: 0 }
    }
}

impl Line {
    /// Prints what there is and begins anew.
    fn print(&mut self) {
        // SAFETY: nobody closes standard error while a daemon runs; if it is closed, the write fails, which changes nothing.
        let stderr = unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) };
        let _ = rustix::io::write(stderr, &self.bytes[..self.used]);
        self.used = 0;
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let bytes = text.len().min(self.bytes.len() - self.used);
        self.bytes[self.used..self.used + bytes].copy_from_slice(&text.as_bytes()[..bytes]);
        self.used += bytes;
        Ok(())
    }
}
