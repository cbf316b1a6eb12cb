//! What daemons and controllers say about themselves in lines of their own.
//!
//! A record has one writer. A reader may look while it is written, or see some of its lines and not
//! others: the checksum tells, and the reader looks again later.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{ByteOffset, Generation, LINE_BYTES, LineOffset, Memory};

/// Something that one writer keeps in lines of the pool and many readers look at.
pub trait Record: Sized {
    /// How many lines it takes.
    const LINES: u64;

    /// Writes the record and makes it visible.
    fn publish<M: Memory>(&self, memory: &M, at: LineOffset);

    /// What is there now, and whether nothing is or nothing that can be read.
    fn find<M: Memory>(memory: &M, at: LineOffset) -> Found<Self>;

    /// The record that is there now: none if nothing was ever written, or if it cannot be read.
    fn look<M: Memory>(memory: &M, at: LineOffset) -> Option<Self> {
        match Self::find(memory, at) {
            Found::Record(record) => Some(record),
            Found::Nothing | Found::Unreadable => None,
        }
    }

    /// Takes the record away. Only its writer may.
    fn erase<M: Memory>(memory: &M, at: LineOffset) {
        let bytes = Self::LINES * LINE_BYTES as u64;
        memory.zero(at.bytes(), bytes);
        show(memory, at, bytes);
    }
}

/// Writes a record's bytes.
fn put<M: Memory>(memory: &M, at: LineOffset, wire: &[u8]) {
    memory.write(at.bytes(), wire);
    show(memory, at, wire.len() as u64);
}

/// Makes visible what was written.
fn show<M: Memory>(memory: &M, at: LineOffset, bytes: u64) {
    memory.write_back(at.bytes(), bytes);
    memory.store_fence();
}

/// Reads a record's bytes as they are in the pool.
fn get<M: Memory>(memory: &M, at: LineOffset, wire: &mut [u8]) {
    memory.invalidate(at.bytes(), wire.len() as u64);
    memory.full_fence();
    memory.read(at.bytes(), wire);
}

/// The heartbeat of an endpoint or a replica on another host: a word that it counts up while it lives.
pub fn read_beat<M: Memory>(memory: &M, at: ByteOffset) -> u64 {
    memory.invalidate(at, size_of::<u64>() as u64);
    memory.full_fence();
    memory.load(at)
}

/// What is where a record may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found<R> {
    /// Nothing was ever written there, or it was taken away.
    Nothing,
    /// Something that is no record: the writer is just writing or erasing, died while it did, or the memory was damaged.
    Unreadable,
    /// This.
    Record(R),
}

/// An endpoint announces itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// A random number, never 0, that tells this life of the daemon from others.
    pub incarnation: u64,
    /// Its process, as seen on its own host.
    pub pid: u32,
    /// The control protocol that it speaks: (major, minor).
    pub protocol: (u16, u16),
    /// When it began, in milliseconds since 1970 by its own clock.
    pub started_unix_ms: u64,
}

/// A controller replica announces itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerHello {
    /// A random number, never 0, that tells this life of the controller from others.
    pub incarnation: u64,
    /// Its term: of two that both seem to live, the one with the higher term counts.
    pub term: u64,
    /// Its process, as seen on its own host.
    pub pid: u32,
    /// The control protocol that it speaks: (major, minor).
    pub protocol: (u16, u16),
}

/// A controller replica announces itself to the other replicas, whether it leads them or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaHello {
    /// A random number, never 0, that tells this life of the replica from others.
    pub incarnation: u64,
    /// Which life it is: each one counts on from the one before.
    pub life: u32,
    /// Its process, as seen on its own host.
    pub pid: u32,
    /// What replicas say to each other: (major, minor).
    pub protocol: (u16, u16),
}

/// The controller answers an endpoint's hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Which life of the endpoint it is for.
    pub endpoint_incarnation: u64,
    /// Which life of the controller gave it.
    pub controller_incarnation: u64,
    /// The controller's term.
    pub term: u64,
    /// The fence generation at the time: once the fence line shows a newer one, the grant is revoked.
    pub fence_generation: u64,
    /// The generation of the two control rings.
    pub control_generation: Generation,
}

/// Revokes grants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FenceLine {
    /// Grants that were given at an older fence generation are revoked.
    pub generation: u64,
    /// The term of the controller that wrote it.
    pub term: u64,
    /// Which life of the endpoint it is for: to another one it says nothing. Zero: whichever has the slot.
    pub incarnation: u64,
}

impl FenceLine {
    /// Whether it is for this life of the endpoint.
    pub const fn concerns(&self, incarnation: u64) -> bool {
        self.incarnation == 0 || self.incarnation == incarnation
    }
}

/// Ties a record to what lies in the pool.
macro_rules! record {
    ($record:ident as $wire:ident, kind $kind:literal, $lines:literal lines, $from:expr, $into:expr) => {
        const _: () = assert!(size_of::<$wire>() == $lines * LINE_BYTES);

        impl Record for $record {
            const LINES: u64 = $lines;

            fn publish<M: Memory>(&self, memory: &M, at: LineOffset) {
                let into: fn(&$record) -> $wire = $into;
                let mut wire = into(self);
                wire.crc = checksum($kind, wire.as_bytes()).into();
                put(memory, at, wire.as_bytes());
            }

            fn find<M: Memory>(memory: &M, at: LineOffset) -> Found<Self> {
                let mut wire = $wire::new_zeroed();
                get(memory, at, wire.as_mut_bytes());
                let from: fn(&$wire) -> $record = $from;
                if wire.crc.get() == checksum($kind, wire.as_bytes()) {
                    Found::Record(from(&wire))
                } else if wire.as_bytes().iter().all(|byte| *byte == 0) {
                    Found::Nothing
                } else {
                    Found::Unreadable
                }
            }
        }
    };
}

/// Over all but the checksum at the end. The kind of record goes in, so that none is taken for one of another
/// kind. Never 0, so that lines of zeros hold no record.
fn checksum(kind: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(kind);
    hasher.update(&bytes[..bytes.len() - size_of::<U32>()]);
    hasher.finalize().max(1)
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct HelloWire {
    incarnation: U64,
    started_unix_ms: U64,
    pid: U32,
    protocol: [U16; 2],
    reserved: [u8; 100],
    crc: U32,
}

record!(
    Hello as HelloWire, kind 1, 2 lines,
    |wire| Hello {
        incarnation: wire.incarnation.get(),
        pid: wire.pid.get(),
        protocol: (wire.protocol[0].get(), wire.protocol[1].get()),
        started_unix_ms: wire.started_unix_ms.get(),
    },
    |hello| HelloWire {
        incarnation: hello.incarnation.into(),
        started_unix_ms: hello.started_unix_ms.into(),
        pid: hello.pid.into(),
        protocol: [hello.protocol.0.into(), hello.protocol.1.into()],
        reserved: [0; 100],
        crc: 0.into(),
    }
);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ControllerWire {
    incarnation: U64,
    term: U64,
    pid: U32,
    protocol: [U16; 2],
    reserved: [u8; 36],
    crc: U32,
}

record!(
    ControllerHello as ControllerWire, kind 2, 1 lines,
    |wire| ControllerHello {
        incarnation: wire.incarnation.get(),
        term: wire.term.get(),
        pid: wire.pid.get(),
        protocol: (wire.protocol[0].get(), wire.protocol[1].get()),
    },
    |hello| ControllerWire {
        incarnation: hello.incarnation.into(),
        term: hello.term.into(),
        pid: hello.pid.into(),
        protocol: [hello.protocol.0.into(), hello.protocol.1.into()],
        reserved: [0; 36],
        crc: 0.into(),
    }
);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ReplicaWire {
    incarnation: U64,
    life: U32,
    pid: U32,
    protocol: [U16; 2],
    reserved: [u8; 40],
    crc: U32,
}

record!(
    ReplicaHello as ReplicaWire, kind 5, 1 lines,
    |wire| ReplicaHello {
        incarnation: wire.incarnation.get(),
        life: wire.life.get(),
        pid: wire.pid.get(),
        protocol: (wire.protocol[0].get(), wire.protocol[1].get()),
    },
    |hello| ReplicaWire {
        incarnation: hello.incarnation.into(),
        life: hello.life.into(),
        pid: hello.pid.into(),
        protocol: [hello.protocol.0.into(), hello.protocol.1.into()],
        reserved: [0; 40],
        crc: 0.into(),
    }
);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct GrantWire {
    endpoint_incarnation: U64,
    controller_incarnation: U64,
    term: U64,
    fence_generation: U64,
    control_generation: U32,
    reserved: [u8; 24],
    crc: U32,
}

record!(
    Grant as GrantWire, kind 3, 1 lines,
    |wire| Grant {
        endpoint_incarnation: wire.endpoint_incarnation.get(),
        controller_incarnation: wire.controller_incarnation.get(),
        term: wire.term.get(),
        fence_generation: wire.fence_generation.get(),
        control_generation: Generation::new(wire.control_generation.get()),
    },
    |grant| GrantWire {
        endpoint_incarnation: grant.endpoint_incarnation.into(),
        controller_incarnation: grant.controller_incarnation.into(),
        term: grant.term.into(),
        fence_generation: grant.fence_generation.into(),
        control_generation: grant.control_generation.get().into(),
        reserved: [0; 24],
        crc: 0.into(),
    }
);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct FenceWire {
    generation: U64,
    term: U64,
    incarnation: U64,
    reserved: [u8; 36],
    crc: U32,
}

record!(
    FenceLine as FenceWire, kind 4, 1 lines,
    |wire| FenceLine {
        generation: wire.generation.get(),
        term: wire.term.get(),
        incarnation: wire.incarnation.get(),
    },
    |fence| FenceWire {
        generation: fence.generation.into(),
        term: fence.term.into(),
        incarnation: fence.incarnation.into(),
        reserved: [0; 36],
        crc: 0.into(),
    }
);
