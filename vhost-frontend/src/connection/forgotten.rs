//! VMMs that have forgotten which features the driver acknowledged.
//!
//! QEMU before 8.0 notes for a vhost-user NIC what the driver acknowledged when its connection closes. A driver that acknowledges
//! while there is no connection, or a guest that arrives from another host then, is told to the next connection as one that
//! has acknowledged nothing. Served by the letter, its headers would be taken to be two bytes shorter than they are, and its indirect
//! tables for packets.

use tracing::warn;

use super::vring::VringAddresses;
use super::{Connection, VHOST_FEATURES};

impl Connection {
    /// The features by which a ring is to be served, and whether it is unknown if its driver uses event indices.
    ///
    /// Who acknowledges nothing is a driver of a legacy device, and those have to lay their rings out in one way. Others have
    /// been forgotten, and are served by what may be assumed of every driver.
    pub(super) fn features_of_driver(&self, index: u16, size: u16, addresses: VringAddresses) -> (u64, bool) {
        let acknowledged = self.features & !VHOST_FEATURES;
        let assumed = self.spec.assumed_features;
        if acknowledged != 0 || assumed == 0 || addresses.is_legacy_layout(size) {
            return (acknowledged, false);
        }
        if index == 0 {
            warn!(
                device = self.spec.name,
                "the VMM has forgotten what the driver acknowledged, as QEMU before 8.0 does if nobody serves the device at that \
                 moment: until the guest resets the device, it does more of the work itself; update QEMU"
            );
        }
        (assumed, true)
    }
}
