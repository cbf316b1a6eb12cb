//! The thread that takes orders. It sleeps until the agent writes.

use std::ffi::{CString, c_void};
use std::mem;
use std::os::fd::AsRawFd as _;
use std::ptr;

use vcpu_slicing::Failure;

use crate::shared::{self, Shared};
use crate::{real, threads};

/// Starts it.
pub(crate) fn start(shared: &'static Shared) {
    // SAFETY: it has no preconditions.
    let watch = unsafe { libc::inotify_init1(libc::IN_CLOEXEC) };
    let path = CString::new(format!("/proc/self/fd/{}", shared.file.as_raw_fd())).unwrap_or_default();
    // SAFETY: the path ends with a zero.
    if watch < 0 || unsafe { libc::inotify_add_watch(watch, path.as_ptr(), libc::IN_MODIFY) } < 0 {
        shared::fail(shared.control, Failure::NoWatch);
        return;
    }
    // SAFETY: all zeros are sets and a thread; both sets can be written and read. It starts with all signals blocked, so that none
    // of QEMU's ends up there.
    let started = unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = (mem::zeroed(), mem::zeroed());
        libc::sigfillset(&raw mut all);
        real::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let mut thread: libc::pthread_t = mem::zeroed();
        let argument = ptr::without_provenance_mut(watch.unsigned_abs() as usize);
        let started = libc::pthread_create(&raw mut thread, ptr::null(), run, argument);
        real::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        if started == 0 {
            libc::pthread_detach(thread);
        }
        started
    };
    if started != 0 {
        shared::fail(shared.control, Failure::NoThread);
    }
}

extern "C" fn run(argument: *mut c_void) -> *mut c_void {
    let watch = i32::try_from(argument.addr()).unwrap_or(-1);
    let Some(control) = shared::opened() else { return ptr::null_mut() };
    let mut events = [0_u8; 4096];
    loop {
        // What was written before the watch was there is taken up first.
        threads::take_up(control);
        // SAFETY: so many bytes can be written there.
        let read = unsafe { libc::read(watch, events.as_mut_ptr().cast(), events.len()) };
        // SAFETY: it points to this thread's.
        if read <= 0 && unsafe { *libc::__errno_location() } != libc::EINTR {
            // Nobody hears the agent any more: what it ordered last ends by its deadline.
            shared::fail(control, Failure::NoWatch);
            return ptr::null_mut();
        }
    }
}
