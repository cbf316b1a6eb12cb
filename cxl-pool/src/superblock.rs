//! The superblock: what a pool says about itself, in its first page.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::layout::REGION_SLOTS_LEAST;
use crate::{LINE_BYTES, PoolError};

/// The layout version that this program reads and writes. Version 1: everything as drawn in `docs/layout.md`.
///
/// A pool of another major version is refused. A higher minor version only adds meaning to bytes that are
/// zero in the lower one, so that daemons of adjacent minor versions work side by side: a pool of any earlier minor version
/// is used as it is, and one of the next.
pub const MAJOR_VERSION: u16 = 1;
/// See [`MAJOR_VERSION`].
///
/// - 1.0: room for 4095 regions.
/// - 1.2: room for as many as the superblock says. Programs that know 1.0 only would take other lines for the control structures,
///   and so there was no 1.1, which they would work with. A pool with room for 4095 is still one of 1.0.
pub const MINOR_VERSION: u16 = 2;
/// The minor version from which on a pool says how many regions it has room for.
const REGION_SLOTS_SINCE: u16 = 2;

const MAGIC: [u8; 8] = *b"WADIPOOL";

/// How the pool's hosts see each other's writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CoherenceMode {
    /// Only after write-backs and invalidates: CXL 2.0.
    Software,
    /// At once: CXL 3.0 back-invalidate, or "hosts" that are processes of one machine.
    Hardware,
}

impl CoherenceMode {
    const fn code(self) -> u8 {
        match self {
            Self::Software => 1,
            Self::Hardware => 2,
        }
    }
}

impl fmt::Display for CoherenceMode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Software => "software",
            Self::Hardware => "hardware",
        })
    }
}

/// What a pool says about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Superblock {
    /// The layout's major version.
    pub major: u16,
    /// The layout's minor version.
    pub minor: u16,
    /// Which pod this is.
    pub uuid: Uuid,
    /// The size of the whole pool.
    pub size_bytes: u64,
    /// How hosts see each other's writes.
    pub mode: CoherenceMode,
    /// How many hosts there is room for: their ids go from 1 to this.
    pub host_slots: u16,
    /// How many controller replicas there is room for.
    pub replica_slots: u16,
    /// How many regions there is room for.
    pub region_slots: u32,
}

/// The superblock as it lies in the pool.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Wire {
    magic: [u8; 8],
    major: U16,
    minor: U16,
    mode: u8,
    reserved_1: [u8; 3],
    uuid: [u8; 16],
    size_bytes: U64,
    host_slots: U16,
    replica_slots: U16,
    region_slots: U32,
    reserved_2: [u8; 12],
    /// Over all that precedes it.
    crc: U32,
}

const _: () = assert!(size_of::<Wire>() == LINE_BYTES);

impl Superblock {
    /// Its length in the pool.
    pub const WIRE_BYTES: usize = size_of::<Wire>();

    /// The lowest minor version of a pool with room for so many regions: a pool is used by as many programs as can.
    pub const fn minor_for(region_slots: u32) -> u16 {
        if region_slots == REGION_SLOTS_LEAST { 0 } else { REGION_SLOTS_SINCE }
    }

    pub(crate) fn encode(&self) -> [u8; Self::WIRE_BYTES] {
        let mut wire = Wire {
            magic: MAGIC,
            major: self.major.into(),
            minor: self.minor.into(),
            mode: self.mode.code(),
            reserved_1: [0; 3],
            uuid: *self.uuid.as_bytes(),
            size_bytes: self.size_bytes.into(),
            host_slots: self.host_slots.into(),
            replica_slots: self.replica_slots.into(),
            region_slots: if self.minor < REGION_SLOTS_SINCE { 0 } else { self.region_slots }.into(),
            reserved_2: [0; 12],
            crc: 0.into(),
        };
        wire.crc = wire.checksum().into();
        zerocopy::transmute!(wire)
    }

    /// Reads the first bytes of a pool that is `actual_bytes` long; `path` is for messages. Checks in the order in which the
    /// answer helps most: is it a pool, one of ours, undamaged, all there.
    pub fn decode(bytes: [u8; Self::WIRE_BYTES], actual_bytes: u64, path: &Path) -> Result<Self, PoolError> {
        let wire: Wire = zerocopy::transmute!(bytes);
        let path = path.to_owned();
        if wire.magic != MAGIC {
            return Err(PoolError::NotAPool { path });
        }
        // Before the checksum: another major version may have put that elsewhere.
        if wire.major.get() != MAJOR_VERSION {
            let found = format!("{}.{}", wire.major, wire.minor);
            return Err(PoolError::MajorVersion { path, found, known: MAJOR_VERSION });
        }
        if wire.crc.get() != wire.checksum() {
            return Err(PoolError::Checksum { path });
        }
        if wire.minor.get() > MINOR_VERSION + 1 {
            let found = format!("{}.{}", wire.major, wire.minor);
            return Err(PoolError::MinorVersion {
                path,
                found,
                known: format!("{MAJOR_VERSION}.{MINOR_VERSION}"),
            });
        }
        let expected_bytes = wire.size_bytes.get();
        if actual_bytes < expected_bytes {
            return Err(PoolError::Truncated { path, actual_bytes, expected_bytes });
        }
        if actual_bytes > expected_bytes {
            return Err(PoolError::SizeMismatch { path, actual_bytes, expected_bytes });
        }
        let mode = [CoherenceMode::Software, CoherenceMode::Hardware]
            .into_iter()
            .find(|mode| mode.code() == wire.mode)
            .ok_or_else(|| PoolError::Field { path, field: "coherence mode", value: wire.mode.into() })?;
        Ok(Self {
            major: wire.major.get(),
            minor: wire.minor.get(),
            uuid: Uuid::from_bytes(wire.uuid),
            size_bytes: expected_bytes,
            mode,
            host_slots: wire.host_slots.get(),
            replica_slots: wire.replica_slots.get(),
            region_slots: if wire.minor.get() < REGION_SLOTS_SINCE {
                REGION_SLOTS_LEAST
            } else {
                wire.region_slots.get()
            },
        })
    }

    /// Whether these bytes begin a pool of any version.
    pub(crate) fn has_magic(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC)
    }
}

impl Wire {
    fn checksum(&self) -> u32 {
        let bytes = self.as_bytes();
        crc32fast::hash(&bytes[..bytes.len() - size_of::<U32>()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_of_the_next_minor_version_is_used_and_one_of_a_later_one_is_not() {
        let size_bytes = 1 << 30;
        let of_minor = |minor| Superblock {
            major: MAJOR_VERSION,
            minor,
            uuid: Uuid::from_u128(7),
            size_bytes,
            mode: CoherenceMode::Software,
            host_slots: 16,
            replica_slots: 3,
            region_slots: 5000,
        };
        let read = |minor| Superblock::decode(of_minor(minor).encode(), size_bytes, Path::new("pool"));
        for minor in 0..=MINOR_VERSION + 1 {
            let slots = if minor < REGION_SLOTS_SINCE { REGION_SLOTS_LEAST } else { 5000 };
            let found = read(minor).map(|it| (it.minor, it.region_slots));
            assert_eq!(found.map_err(|error| error.to_string()), Ok((minor, slots)));
        }
        for minor in [MINOR_VERSION + 2, u16::MAX] {
            let error = read(minor).expect_err("too far away");
            assert!(matches!(error, PoolError::MinorVersion { .. }));
            assert!(error.to_string().contains("upgrade this host"), "{error}");
        }
    }
}
