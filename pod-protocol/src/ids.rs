//! Names of things the controller hands out. Never bare integers: the compiler refuses to mix them up.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($raw:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name($raw);

        impl $name {
            /// Wraps a number.
            pub const fn new(raw: $raw) -> Self {
                Self(raw)
            }

            /// The number.
            pub const fn get(self) -> $raw {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(
    /// A VM known to the controller.
    InstanceId(u32), "instance-"
);
id!(
    /// A volume carved from an SSD.
    VolumeId(u32), "volume-"
);
id!(
    /// A pair of rings between two endpoints, one per direction.
    ChannelId(u32), "channel-"
);
id!(
    /// A leased range of the pool.
    RegionId(u32), "region-"
);
id!(
    /// Which holder of a lease a message belongs to. Newer ones make older ones worthless at the device's owner.
    LeaseGeneration(u16), "generation-"
);

id!(
    /// Which of the places of a leased volume that lie with one backend. Only while the volume moves between two SSDs of a host
    /// is there another than the first.
    PlaceNumber(u8), "place-"
);

impl PlaceNumber {
    /// The only one, or the one that was there before the other.
    pub const FIRST: Self = Self(0);
    /// The one that came beside it.
    pub const SECOND: Self = Self(1);

    /// Whether it is the [`PlaceNumber::FIRST`].
    pub const fn is_first(&self) -> bool {
        self.0 == 0
    }
}

impl Default for PlaceNumber {
    fn default() -> Self {
        Self::FIRST
    }
}

impl LeaseGeneration {
    /// The generation after this one. It wraps.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// Whether it was given after `other`. Half of the numbers lie ahead of any, half behind.
    #[must_use]
    pub const fn is_newer_than(self, other: Self) -> bool {
        let ahead = self.0.wrapping_sub(other.0);
        ahead != 0 && ahead <= u16::MAX / 2
    }
}

/// The right of an instance to use a NIC or a volume until it is revoked. It has 24 bits, since it travels in 16-byte
/// messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct LeaseId(u32);

impl LeaseId {
    /// How many bits a lease id has.
    pub const BITS: u32 = 24;
    /// The largest lease id.
    pub const MAX: Self = Self((1 << Self::BITS) - 1);

    /// Wraps a number, unless it has more than 24 bits.
    pub const fn new(raw: u32) -> Option<Self> {
        if raw <= Self::MAX.0 { Some(Self(raw)) } else { None }
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// A lease id of more than 24 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("lease id {0} has more than 24 bits")]
pub struct LeaseIdTooLarge(u32);

impl TryFrom<u32> for LeaseId {
    type Error = LeaseIdTooLarge;

    fn try_from(raw: u32) -> Result<Self, Self::Error> {
        Self::new(raw).ok_or(LeaseIdTooLarge(raw))
    }
}

impl From<LeaseId> for u32 {
    fn from(id: LeaseId) -> Self {
        id.0
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease-{}", self.0)
    }
}

/// A place of a leased volume at a backend, as a number: the lease, and above it which of the lease's places there. The first one's
/// is the lease's own, which is all that 1.0 knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "u32", into = "u32")]
pub struct PlaceId {
    /// The lease.
    pub lease: LeaseId,
    /// Which of its places.
    pub place: PlaceNumber,
}

impl PlaceId {
    /// The place of a lease that has one at the backend.
    pub const fn first(lease: LeaseId) -> Self {
        Self { lease, place: PlaceNumber::FIRST }
    }

    /// All that a lease may have at a backend.
    pub const fn all(lease: LeaseId) -> RangeInclusive<Self> {
        Self::first(lease)..=Self { lease, place: PlaceNumber(u8::MAX) }
    }
}

impl From<u32> for PlaceId {
    fn from(raw: u32) -> Self {
        let [a, b, c, place] = raw.to_le_bytes();
        Self { lease: LeaseId(u32::from_le_bytes([a, b, c, 0])), place: PlaceNumber(place) }
    }
}

impl From<PlaceId> for u32 {
    fn from(id: PlaceId) -> Self {
        id.lease.0 | Self::from(id.place.0) << LeaseId::BITS
    }
}

impl fmt::Display for PlaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.place.is_first() {
            write!(f, "{}", self.lease)
        } else {
            write!(f, "{} at {}", self.lease, self.place)
        }
    }
}

/// An Ethernet address, written `02:00:00:00:00:01`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress([u8; 6]);

impl MacAddress {
    /// The address every port receives.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// From its bytes in the order of transmission.
    pub const fn new(bytes: [u8; 6]) -> Self {
        Self(bytes)
    }

    /// Its bytes in the order of transmission.
    pub const fn bytes(self) -> [u8; 6] {
        self.0
    }

    /// Whether it names a group of ports (broadcast included) rather than one.
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Whether it was made up locally rather than assigned by a vendor.
    pub const fn is_local(self) -> bool {
        self.0[0] & 2 != 0
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, rest @ ..] = self.0;
        write!(f, "{first:02x}")?;
        rest.iter().try_for_each(|byte| write!(f, ":{byte:02x}"))
    }
}

impl fmt::Debug for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Text that is no MAC address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a MAC address: write six hexadecimal bytes, such as 02:00:00:00:00:01")]
pub struct NotAMacAddress(String);

impl FromStr for MacAddress {
    type Err = NotAMacAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || NotAMacAddress(text.chars().take(40).collect());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or_else(refuse)?;
            if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(refuse());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| refuse())?;
        }
        if parts.next().is_some() { Err(refuse()) } else { Ok(Self(bytes)) }
    }
}

impl TryFrom<String> for MacAddress {
    type Error = NotAMacAddress;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<MacAddress> for String {
    fn from(mac: MacAddress) -> Self {
        mac.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lease_id_of_25_bits_is_refused() {
        assert_eq!(LeaseId::new(1 << 24), None);
        assert!(serde_json::from_str::<LeaseId>("16777216").is_err());
        assert_eq!(serde_json::from_str::<LeaseId>("16777215").ok(), Some(LeaseId::MAX));
    }

    #[test]
    fn the_first_place_of_a_lease_is_written_as_the_lease() {
        let lease = LeaseId::new(7).unwrap();
        let first = PlaceId::first(lease);
        let second = PlaceId { lease, place: PlaceNumber::SECOND };
        let json = [first, second].map(|id| serde_json::to_string(&id).unwrap());
        assert_eq!(json, ["7", "16777223"]);
        assert!(serde_json::from_str::<LeaseId>(&json[1]).is_err(), "1.0 takes it for no lease");
        assert_eq!(json.map(|it| serde_json::from_str::<PlaceId>(&it).unwrap()), [first, second]);
        let next = PlaceId::first(LeaseId::new(8).unwrap());
        let all = PlaceId::all(lease);
        assert!(all.contains(&first) && all.contains(&second) && !all.contains(&next));
    }

    #[test]
    fn mac_address_with_wrong_shape_is_refused() {
        for text in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:01:02",
            "2:0:0:0:0:1",
            "02:00:00:00:00:0g",
            "+2:00:00:00:00:01",
        ] {
            assert!(text.parse::<MacAddress>().is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn mac_address_survives_text(bytes: [u8; 6]) {
            let mac = MacAddress::new(bytes);
            prop_assert_eq!(mac.to_string().parse::<MacAddress>(), Ok(mac));
            let json = serde_json::to_string(&mac).expect("a string");
            prop_assert_eq!(serde_json::from_str::<MacAddress>(&json).ok(), Some(mac));
        }

        #[test]
        fn any_text_is_a_mac_address_or_an_error(text: String) {
            let _ = text.parse::<MacAddress>();
        }
    }
}
