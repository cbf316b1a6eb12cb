//! The C library's own functions, behind those that this library exports.

use std::ffi::{CStr, c_char, c_int, c_long, c_ulong, c_void};
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{pthread_t, sigset_t};

/// The next function of this name after ours; null if there is none.
fn next(found: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let known = found.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    // SAFETY: the name ends with a zero.
    let address = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    found.store(address, Ordering::Release);
    address
}

/// `pthread_sigmask` of the C library.
///
/// # Safety
/// As for that.
pub(crate) unsafe fn pthread_sigmask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_int {
    type Function = unsafe extern "C" fn(c_int, *const sigset_t, *mut sigset_t) -> c_int;
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let address = next(&FOUND, c"pthread_sigmask");
    if address.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: the C library's function of this name has this type; the caller keeps what it asks for.
    unsafe { mem::transmute::<*mut c_void, Function>(address)(how, set, old) }
}

/// `pthread_setname_np` of the C library.
///
/// # Safety
/// As for that.
pub(crate) unsafe fn pthread_setname_np(thread: pthread_t, name: *const c_char) -> c_int {
    type Function = unsafe extern "C" fn(pthread_t, *const c_char) -> c_int;
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let address = next(&FOUND, c"pthread_setname_np");
    if address.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: the C library's function of this name has this type; the caller keeps what it asks for.
    unsafe { mem::transmute::<*mut c_void, Function>(address)(thread, name) }
}

/// `ioctl`, which the C library passes on to the kernel as it is.
///
/// # Safety
/// As for that.
pub(crate) unsafe fn ioctl(file: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    // SAFETY: the caller keeps what the request asks for.
    let result: c_long = unsafe { libc::syscall(libc::SYS_ioctl, file, request, argument) };
    #[expect(clippy::cast_possible_truncation, reason = "the kernel's answer is an int")]
    let result = result as c_int;
    result
}
