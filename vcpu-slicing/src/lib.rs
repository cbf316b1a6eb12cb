//! How a vCPU thread is held to a part of its time ([`Slicer`]), and the memory through which an agent commands the shim that
//! does so inside a QEMU ([`Control`]).
//!
//! Pure code: clocks come in as arguments. It allocates nothing and cannot panic, for it runs in signal handlers.

#![forbid(unsafe_code)]

mod control;
mod slicer;

pub use control::{Command, Control, Failure, MAGIC, Order, SLOTS, Slot};
pub use slicer::{Clocks, Duty, Phase, Slicer, Step};
