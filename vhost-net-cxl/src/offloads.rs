//! What may be left to the receiver of a frame: checksums and segmentation.

use virtio_bindings::virtio_net as bits;

/// The driver takes UDP over IPv4 unsegmented (virtio 1.2, 5.1.3).
const VIRTIO_NET_F_GUEST_USO4: u32 = 54;
/// The driver takes UDP over IPv6 unsegmented.
const VIRTIO_NET_F_GUEST_USO6: u32 = 55;
/// The device takes UDP unsegmented.
const VIRTIO_NET_F_HOST_USO: u32 = 56;

/// A set of offloads. As a NIC's or a guest's *ability*: frames with these left undone are accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads(u32);

impl Offloads {
    /// None: every frame has its checksums and fits the MTU.
    pub const NONE: Self = Self(0);
    /// A partial checksum is accepted.
    pub const CHECKSUM: Self = Self(1);
    /// TCP over IPv4 is accepted unsegmented.
    pub const TSO4: Self = Self(2);
    /// TCP over IPv6 is accepted unsegmented.
    pub const TSO6: Self = Self(4);
    /// UDP over IPv4 and over IPv6 is accepted unsegmented.
    pub const USO: Self = Self(8);
    /// Everything that this version knows.
    pub const ALL: Self = Self(15);

    /// The virtio-net features by which a guest leaves work to us.
    pub const FROM_GUESTS: u64 = 1 << bits::VIRTIO_NET_F_CSUM
        | 1 << bits::VIRTIO_NET_F_HOST_TSO4
        | 1 << bits::VIRTIO_NET_F_HOST_TSO6
        | 1 << VIRTIO_NET_F_HOST_USO;

    /// The set as it travels in a message; bits that are not known are dropped.
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits).closed()
    }

    /// The bits of the set.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Whether all of `other` is in this set.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// What both sets have.
    #[must_use]
    #[inline]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0).closed()
    }

    /// What either set has.
    #[must_use]
    #[inline]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0).closed()
    }

    /// Segmentation is only meaningful with checksums: the standard makes it depend on them.
    const fn closed(self) -> Self {
        let known = self.0 & Self::ALL.0;
        if known & Self::CHECKSUM.0 == 0 { Self::NONE } else { Self(known) }
    }

    /// What a guest's driver accepts to receive, by the features that it acknowledged.
    pub const fn accepted_by_guest(features: u64) -> Self {
        Self(
            pick(features, bits::VIRTIO_NET_F_GUEST_CSUM, Self::CHECKSUM)
                | pick(features, bits::VIRTIO_NET_F_GUEST_TSO4, Self::TSO4)
                | pick(features, bits::VIRTIO_NET_F_GUEST_TSO6, Self::TSO6)
                // Only both together: a set has one bit for them.
                | pick(features & features >> 1, VIRTIO_NET_F_GUEST_USO4, Self::USO),
        )
        .closed()
    }

    /// What a guest's driver may leave to us when it sends, by the features that it acknowledged.
    pub const fn left_by_guest(features: u64) -> Self {
        Self(
            pick(features, bits::VIRTIO_NET_F_CSUM, Self::CHECKSUM)
                | pick(features, bits::VIRTIO_NET_F_HOST_TSO4, Self::TSO4)
                | pick(features, bits::VIRTIO_NET_F_HOST_TSO6, Self::TSO6)
                | pick(features, VIRTIO_NET_F_HOST_USO, Self::USO),
        )
        .closed()
    }

    /// The virtio-net features, both directions, that a NIC with these abilities lets us offer.
    pub const fn features(self) -> u64 {
        self.pair(Self::CHECKSUM, bits::VIRTIO_NET_F_CSUM, bits::VIRTIO_NET_F_GUEST_CSUM)
            | self.pair(Self::TSO4, bits::VIRTIO_NET_F_HOST_TSO4, bits::VIRTIO_NET_F_GUEST_TSO4)
            | self.pair(Self::TSO6, bits::VIRTIO_NET_F_HOST_TSO6, bits::VIRTIO_NET_F_GUEST_TSO6)
            | self.pair(Self::USO, VIRTIO_NET_F_HOST_USO, VIRTIO_NET_F_GUEST_USO4)
            | self.pair(Self::USO, VIRTIO_NET_F_HOST_USO, VIRTIO_NET_F_GUEST_USO6)
    }

    const fn pair(self, offload: Self, host: u32, guest: u32) -> u64 {
        if self.contains(offload) { 1 << host | 1 << guest } else { 0 }
    }
}

const fn pick(features: u64, bit: u32, offload: Offloads) -> u32 {
    if features >> bit & 1 == 1 { offload.0 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn features_map_there_and_back() {
        assert_eq!(Offloads::accepted_by_guest(Offloads::ALL.features()), Offloads::ALL);
        assert_eq!(Offloads::left_by_guest(Offloads::ALL.features()), Offloads::ALL);
        assert_eq!(Offloads::NONE.features(), 0);
        let from_guests = Offloads::ALL.features() & Offloads::FROM_GUESTS;
        assert_eq!(Offloads::left_by_guest(from_guests), Offloads::ALL);
        assert_eq!(Offloads::accepted_by_guest(from_guests), Offloads::NONE);
    }

    #[test]
    fn segmentation_without_checksums_is_nothing() {
        let only_tso = 1 << bits::VIRTIO_NET_F_GUEST_TSO4;
        assert_eq!(Offloads::accepted_by_guest(only_tso), Offloads::NONE);
    }

    #[test]
    fn large_udp_is_accepted_for_both_versions_of_ip_or_not_at_all() {
        let checksum = Offloads::CHECKSUM.features();
        let (four, six) = (1 << VIRTIO_NET_F_GUEST_USO4, 1 << VIRTIO_NET_F_GUEST_USO6);
        assert!(Offloads::accepted_by_guest(checksum | four | six).contains(Offloads::USO));
        for half in [four, six] {
            assert!(!Offloads::accepted_by_guest(checksum | half).contains(Offloads::USO));
        }
        assert!(Offloads::left_by_guest(checksum | 1 << VIRTIO_NET_F_HOST_USO).contains(Offloads::USO));
    }

    proptest! {
        #[test]
        fn sets_stay_closed(left: u32, right: u32) {
            let (left, right) = (Offloads::from_bits(left), Offloads::from_bits(right));
            for set in [left.intersection(right), left.union(right)] {
                prop_assert_eq!(Offloads::from_bits(set.bits()), set);
            }
            prop_assert!(left.contains(left.intersection(right)));
            prop_assert!(left.union(right).contains(right));
        }
    }
}
