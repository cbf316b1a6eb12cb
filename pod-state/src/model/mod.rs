//! Pods to try things on, and what always holds of a state.

mod apart;
mod changed;
#[cfg(test)]
mod commands;
mod disks;
mod invariants;
mod pod;
#[cfg(test)]
mod random;
mod reports;
mod reservations;
#[cfg(test)]
mod step;
mod touched;

pub use apart::Apart;
pub use changed::Changed;
pub use disks::{guest, guest_with_volume, pod_with_ssds, ssd_of, volume};
pub use invariants::check;
pub use pod::{MIB, create_instance, devices_of, endpoint, fabric, join, nic, options, ssd};
pub use reports::{relieve, scrub_all, wipe_all};
pub use reservations::{check_moved, check_reservations};
pub use touched::check_touched;
