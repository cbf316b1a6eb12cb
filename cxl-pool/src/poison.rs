//! Memory that fails under a running daemon: a load from a poisoned CXL line, or from a file that was truncated, raises SIGBUS.
//!
//! Whatever was being read is lost, and nothing that the process would make of it may reach a guest or a device. So the
//! process ends at once, says which line and region failed, and ends with a status of its own, [`EXIT_STATUS`], so that a supervisor
//! can tell it from what a restart may cure. The fast path does not know of any of this.

use std::fmt::{self, Write};
use std::os::raw::c_int;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::fd::BorrowedFd;

use crate::{ByteOffset, HardwareMemory, Layout, Pool, PoolError, regions};

/// With which status a process ends whose pool failed: `EX_IOERR`.
pub const EXIT_STATUS: i32 = 74;

/// All that the handler needs, made in advance: it must not allocate.
struct Watched {
    path: String,
    base: usize,
    bytes: usize,
    memory: HardwareMemory,
    layout: Layout,
}

static WATCHED: AtomicPtr<Watched> = AtomicPtr::new(ptr::null_mut());

/// From here on the process ends with a clear message and [`EXIT_STATUS`] when the memory of this pool fails. To be called
/// once, by a daemon, for the pool that it works on; the pool stays mapped until the process ends.
pub fn watch(pool: &Pool, path: &Path) -> Result<(), PoolError> {
    let memory = pool.hardware();
    let (base, bytes) = memory.range();
    let layout = pool.layout().clone();
    let watched = Box::new(Watched { path: path.display().to_string(), base, bytes, memory, layout });
    // Never freed: the handler may run at any time.
    WATCHED.store(Box::into_raw(watched), Ordering::Release);
    install().map_err(|source| PoolError::Io {
        operation: "watch for failures of",
        path: path.to_owned(),
        source,
    })
}

fn install() -> std::io::Result<()> {
    // SAFETY: all zeros is a valid `sigaction`, which is then filled in.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_bus_error as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for and does only what a handler may do: atomic loads, reads of
    // mapped memory, `write`, `sigaction` and `_exit`.
    match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

extern "C" fn on_bus_error(_: c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let watched = WATCHED.load(Ordering::Acquire);
    // SAFETY: the kernel hands a valid `siginfo_t` to a handler with SA_SIGINFO.
    let at = unsafe { (*info).si_addr() } as usize;
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
    let _ = line.write_str(
        ": poisoned CXL memory or a truncated file; look at the device's health and at `podctl pool` before starting this daemon again\n",
    );
    line.print();
    // SAFETY: ends the process without running anything else.
    unsafe { libc::_exit(EXIT_STATUS) }
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
