//! A library that is preloaded into an unmodified QEMU (`LD_PRELOAD`) and slices the time of its vCPU threads, as an agent
//! commands through a file that both map (`WADI_VCPU_CONTROL`; [`vcpu_slicing::Control`] is its layout).
//!
//! A vCPU thread is known by the name that QEMU gives it (`-name …,debug-threads=on`), by its calls of `KVM_RUN`, or because the
//! agent says so. Each has a timer that sends it a real-time signal when it has run for its T_R; in the handler it sleeps. It is
//! put to sleep only where it holds nothing that other threads may wait for: in code that QEMU's translator has generated, and
//! around `KVM_RUN`. Elsewhere it is tried again soon. Without an order to slice no timer is armed, and without the file the
//! library does nothing but pass calls on. An order holds until a deadline: when the agent dies, threads run freely.
//!
//! It stands in front of three functions of the C library: `pthread_setname_np` and `ioctl`, to know vCPU threads, and
//! `pthread_sigmask`, which would block its signal in them.
//!
//! One thing is not seen: an emulated vCPU that is in the middle of an instruction for which QEMU has stopped all others
//! (`cpu_exec_step_atomic`) may be put to sleep there, and the others wait with it until it wakes up.

#![cfg_attr(
    test,
    allow(dead_code, reason = "tests export nothing, for they would be in front of the C library then")
)]

#[cfg(not(test))]
pub mod exports;
mod places;
mod real;
mod shared;
mod threads;
mod tick;
mod watch;
