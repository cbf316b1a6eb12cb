//! The file that an agent and this library share.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use vcpu_slicing::{Control, Failure, MAGIC};

/// Says where the file is.
pub(crate) const VARIABLE: &str = "WADI_VCPU_CONTROL";

/// The file as it is mapped, and its descriptor.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) control: &'static Control,
    pub(crate) file: OwnedFd,
}

/// Whether this process was told of a file at all.
pub(crate) fn wanted() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| std::env::var_os(VARIABLE).is_some())
}

static SHARED: OnceLock<Option<Shared>> = OnceLock::new();

/// The file; none if there is none for this process. Not for signal handlers.
pub(crate) fn shared() -> Option<&'static Shared> {
    SHARED.get_or_init(open).as_ref()
}

/// The file, if it has been opened. For signal handlers.
pub(crate) fn opened() -> Option<&'static Control> {
    SHARED.get()?.as_ref().map(|shared| shared.control)
}

/// Tells the agent why something cannot be done.
pub(crate) fn fail(control: &Control, failure: Failure) {
    control.failure.store(failure as u32, Ordering::Release);
}

fn open() -> Option<Shared> {
    let path = std::env::var_os(VARIABLE)?;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).ok()?;
    if file.metadata().ok()?.size() < size_of::<Control>() as u64 {
        return None;
    }
    // SAFETY: a new mapping of the kernel's choice replaces none; the arguments are those of an open file that is long
    // enough.
    let address = unsafe {
        libc::mmap(
            ptr::null_mut(),
            size_of::<Control>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping is as long as a `Control`, aligned to a page, never unmapped, and a `Control` consists of atomics, for
    // which every value is one and which others may write at any time.
    let control = unsafe { &*address.cast::<Control>() };
    let own = std::process::id();
    let claimed = control.process.compare_exchange(0, own, Ordering::AcqRel, Ordering::Acquire);
    // Another QEMU that was told the same file would take the first one's slots.
    let ours = claimed.is_ok() || claimed == Err(own);
    (control.magic.load(Ordering::Acquire) == MAGIC && ours).then(|| Shared { control, file: file.into() })
}
