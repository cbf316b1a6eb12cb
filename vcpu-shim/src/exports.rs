//! What stands in front of the C library's functions.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};

use libc::{pthread_t, sigset_t};

use crate::{real, shared, threads, tick};

/// `_IO(KVMIO, 0x80)`: run the vCPU.
const KVM_RUN: u32 = 0xae80;

/// Names a thread; one that names itself a vCPU is one.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_setname_np(thread: pthread_t, name: *const c_char) -> c_int {
    // SAFETY: the caller's arguments.
    let result = unsafe { real::pthread_setname_np(thread, name) };
    // SAFETY: it has no preconditions.
    let own = unsafe { libc::pthread_self() } == thread;
    if own && !name.is_null() && shared::wanted() {
        // SAFETY: the caller's name ends with a zero.
        let name = unsafe { CStr::from_ptr(name) };
        if threads::is_vcpu(name.to_bytes()) {
            threads::register_own();
        }
    }
    result
}

/// Changes which signals are blocked: never that of this library.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_sigmask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_int {
    if set.is_null() || how == libc::SIG_UNBLOCK || !shared::wanted() {
        // SAFETY: the caller's arguments.
        return unsafe { real::pthread_sigmask(how, set, old) };
    }
    // SAFETY: the caller's set can be read.
    let mut without = unsafe { *set };
    // SAFETY: it is a set, and the signal is one.
    unsafe { libc::sigdelset(&raw mut without, tick::signal()) };
    // SAFETY: the caller's arguments, and a set of our own.
    unsafe { real::pthread_sigmask(how, &raw const without, old) }
}

/// Controls a device. Around `KVM_RUN` a vCPU thread holds nothing, and may be put to sleep.
///
/// # Safety
/// As for the C library's; that takes any number of arguments, of which the kernel uses one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(file: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    #[expect(clippy::cast_possible_truncation, reason = "the kernel looks at 32 bits")]
    let run = request as u32 == KVM_RUN;
    if !run || !shared::wanted() {
        // SAFETY: the caller's arguments.
        return unsafe { real::ioctl(file, request, argument) };
    }
    let Some(thread) = threads::own().or_else(threads::register_own) else {
        // SAFETY: the caller's arguments.
        return unsafe { real::ioctl(file, request, argument) };
    };
    // What could not be slept while QEMU held something is slept now.
    tick::pay(thread);
    threads::enter_run(thread);
    // SAFETY: the caller's arguments.
    let result = unsafe { real::ioctl(file, request, argument) };
    threads::leave_run(thread);
    tick::pay(thread);
    result
}
