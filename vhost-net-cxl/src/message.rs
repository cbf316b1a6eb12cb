//! The 16-byte message of the network engine, the only thing that crosses a network channel.
//!
//! ```text
//! word 0   bit  0..42  offset in the pool, in cache lines (256 TiB)
//!          bit 42..62  length in bytes; of a completion, its status (8 bits) and, above that, how many packets follow
//!                      the first in this run (12 bits)
//!          bit 62      more: the next message continues this packet; of a packet to be sent, it is
//!                      [scattered](crate::scattered)
//!          bit 63      spare, zero
//! word 1   bit  0..16  sequence: names a packet under way; a completion repeats it
//!          bit 16..32  generation of the lease
//!          bit 32..56  lease
//!          bit 56..63  opcode
//!          bit 63      epoch, owned by the channel
//! ```
//!
//! A buffer holds a 12-byte `virtio_net_hdr_v1` and the Ethernet frame behind it. What travels from a
//! frontend to a backend lies in one run of the instance's transmit area, or begins there; what travels the other way may lie in
//! several receive buffers, one message each, all but the last marked `more`.

use cxl_pool::LineOffset;
use pod_protocol::ids::{LeaseGeneration, LeaseId};

const LINE_BITS: u32 = 42;
const BYTES_BITS: u32 = 20;
const MORE_SHIFT: u32 = LINE_BITS + BYTES_BITS;
const SEQUENCE_BITS: u32 = 16;
const GENERATION_BITS: u32 = 16;
const LEASE_BITS: u32 = 24;
const OPCODE_BITS: u32 = 7;
const GENERATION_SHIFT: u32 = SEQUENCE_BITS;
const LEASE_SHIFT: u32 = GENERATION_SHIFT + GENERATION_BITS;
const OPCODE_SHIFT: u32 = LEASE_SHIFT + LEASE_BITS;

// Word 0 leaves one spare bit; word 1 leaves its top bit to the channel.
const _: () = assert!(MORE_SHIFT == 62);
const _: () = assert!(OPCODE_SHIFT + OPCODE_BITS == 63);
// A packet of 64 KiB with its headers must fit into the length.
const _: () = assert!(MAX_PACKET_BYTES <= mask(BYTES_BITS));

/// Longest packet: the virtio-net header, an Ethernet header with one VLAN tag, and 64 KiB of IP packet.
pub const MAX_PACKET_BYTES: u64 = 12 + 18 + 65536;

const fn mask(bits: u32) -> u64 {
    (1 << bits) - 1
}

/// What a message asks for or answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opcode {
    /// Frontend to backend: send this packet.
    Transmit,
    /// Backend to frontend: the packet's buffer is free again, and those of the packets after it that belong to the same
    /// [`Run`].
    TransmitDone,
    /// Backend to frontend: a packet, or a piece of one, for this lease.
    Receive,
    /// Frontend to backend: the receive buffer is free again.
    ReceiveDone,
    /// Frontend to backend: what the guest's driver accepts to receive; the length is a set of
    /// [`Offloads`](crate::offloads::Offloads). With the sequence number [`REOPENS`] it also says that nothing is under way that
    /// was [`Status::Unreachable`]: what comes next may be sent again.
    Offloads,
}

/// A sequence number of [`Opcode::Offloads`].
pub const REOPENS: u16 = 1;

impl Opcode {
    const fn code(self) -> u64 {
        match self {
            // Zero is no opcode, so that a slot of zeroes is never taken for a message.
            Self::Transmit => 1,
            Self::TransmitDone => 2,
            Self::Receive => 3,
            Self::ReceiveDone => 4,
            Self::Offloads => 5,
        }
    }

    const fn from_code(code: u64) -> Option<Self> {
        Some(match code {
            1 => Self::Transmit,
            2 => Self::TransmitDone,
            3 => Self::Receive,
            4 => Self::ReceiveDone,
            5 => Self::Offloads,
            _ => return None,
        })
    }
}

/// How a transmission ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The NIC or the switch has taken the packet.
    Sent,
    /// The packet was refused and counted; sending it again would not help.
    Dropped,
    /// The backend has not heard of this lease or of this generation yet, or keeps nothing for a link that is down: send it again a little
    /// later. So is everything to the wire that follows, until the first of it comes again: it would overtake what was given back. (And
    /// everything to neighbours, where the backend had not heard of the lease.)
    NotYet,
    /// The lease has a newer generation: whoever sent this no longer holds it.
    Stale,
    /// This NIC cannot send it now, but another one that the lease uses at the same time may. So is everything that follows,
    /// until the frontend has heard of it ([`REOPENS`]): a link that comes back at once would let later packets overtake.
    Unreachable,
}

impl Status {
    /// Its number in a [`Run`].
    pub const fn code(self) -> u32 {
        match self {
            Self::Sent => 0,
            Self::Dropped => 1,
            Self::NotYet => 2,
            Self::Stale => 3,
            Self::Unreachable => 4,
        }
    }

    /// Reads a status; one that a newer peer may have invented counts as dropped.
    pub const fn from_code(code: u32) -> Self {
        match code {
            0 => Self::Sent,
            2 => Self::NotYet,
            3 => Self::Stale,
            4 => Self::Unreachable,
            _ => Self::Dropped,
        }
    }
}

/// Packets with consecutive sequence numbers that ended alike: one message completes all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// How they ended.
    pub status: Status,
    /// How many they are: 1 to [`Run::MAX`].
    pub packets: u16,
}

impl Run {
    const STATUS_BITS: u32 = 8;
    /// The most packets of one run.
    pub const MAX: u16 = 1 << (BYTES_BITS - Self::STATUS_BITS);

    /// The value that travels in the length of a completion.
    pub const fn code(self) -> u32 {
        let following = self.packets.saturating_sub(1);
        debug_assert!(following < Self::MAX);
        self.status.code() | (following as u32) << Self::STATUS_BITS
    }

    /// Reads a run.
    pub const fn from_code(code: u32) -> Self {
        let following = (code >> Self::STATUS_BITS) & (Self::MAX as u32 - 1);
        #[expect(clippy::cast_possible_truncation, reason = "12 bits and one more")]
        let packets = following as u16 + 1;
        Self { status: Status::from_code(code & ((1 << Self::STATUS_BITS) - 1)), packets }
    }
}

/// Whether two messages have opcode, lease and generation in common.
#[inline]
pub(crate) const fn same_flow(one: &[u64; 2], other: &[u64; 2]) -> bool {
    one[1] >> GENERATION_SHIFT == other[1] >> GENERATION_SHIFT
}

/// Whether the next message continues this one's packet.
#[inline]
pub(crate) const fn has_more(words: &[u64; 2]) -> bool {
    words[0] >> MORE_SHIFT & 1 == 1
}

/// One message, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetMessage {
    /// What is asked or answered.
    pub opcode: Opcode,
    /// The lease it belongs to; 24 bits travel.
    pub lease: LeaseId,
    /// The lease's generation as the sender knows it.
    pub generation: LeaseGeneration,
    /// Names the packet.
    pub sequence: u16,
    /// Where the buffer begins; 42 bits travel.
    pub line: LineOffset,
    /// Length of the buffer's content; 20 bits travel.
    pub bytes: u32,
    /// The next message continues this packet. Of a packet to be sent: it is [scattered](crate::scattered).
    pub more: bool,
}

impl NetMessage {
    /// Packs the message into the two words of a slot; the epoch bit is left zero.
    #[inline]
    pub fn encode(&self) -> [u64; 2] {
        let line = self.line.get();
        let bytes = u64::from(self.bytes);
        let lease = u64::from(self.lease.get());
        debug_assert!(line <= mask(LINE_BITS) && bytes <= mask(BYTES_BITS) && lease <= mask(LEASE_BITS));
        [
            (line & mask(LINE_BITS))
                | (bytes & mask(BYTES_BITS)) << LINE_BITS
                | u64::from(self.more) << MORE_SHIFT,
            u64::from(self.sequence)
                | u64::from(self.generation.get()) << GENERATION_SHIFT
                | (lease & mask(LEASE_BITS)) << LEASE_SHIFT
                | self.opcode.code() << OPCODE_SHIFT,
        ]
    }

    /// Unpacks a slot. `None` for an opcode that this version does not know.
    #[inline]
    pub fn decode(words: [u64; 2]) -> Option<Self> {
        let field = |word: u64, shift: u32, bits: u32| (word >> shift) & mask(bits);
        Some(Self {
            opcode: Opcode::from_code(field(words[1], OPCODE_SHIFT, OPCODE_BITS))?,
            lease: LeaseId::new(u32::try_from(field(words[1], LEASE_SHIFT, LEASE_BITS)).ok()?)?,
            generation: LeaseGeneration::new(
                u16::try_from(field(words[1], GENERATION_SHIFT, GENERATION_BITS)).ok()?,
            ),
            sequence: u16::try_from(field(words[1], 0, SEQUENCE_BITS)).ok()?,
            line: LineOffset::new(field(words[0], 0, LINE_BITS)),
            bytes: u32::try_from(field(words[0], LINE_BITS, BYTES_BITS)).ok()?,
            more: field(words[0], MORE_SHIFT, 1) == 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_message() -> impl Strategy<Value = NetMessage> {
        let opcode = prop_oneof![
            Just(Opcode::Transmit),
            Just(Opcode::TransmitDone),
            Just(Opcode::Receive),
            Just(Opcode::ReceiveDone),
            Just(Opcode::Offloads),
        ];
        let fields = (0..=mask(LINE_BITS), 0..=0xf_ffff_u32, any::<bool>());
        (opcode, 0..=0xff_ffff_u32, any::<u16>(), any::<u16>(), fields).prop_map(
            |(opcode, lease, generation, sequence, (line, bytes, more))| NetMessage {
                opcode,
                lease: LeaseId::new(lease).expect("24 bits"),
                generation: LeaseGeneration::new(generation),
                sequence,
                line: LineOffset::new(line),
                bytes,
                more,
            },
        )
    }

    proptest! {
        #[test]
        fn a_message_survives_its_slot(message in any_message()) {
            let words = message.encode();
            prop_assert_eq!(words[0] >> 63, 0, "the spare bit stays zero");
            prop_assert_eq!(words[1] >> 63, 0, "the epoch belongs to the channel");
            prop_assert_eq!(NetMessage::decode(words), Some(message));
        }

        #[test]
        fn any_slot_decodes_to_something_that_encodes_to_it(word0: u64, word1: u64) {
            if let Some(message) = NetMessage::decode([word0, word1]) {
                let carried = [word0 & (mask(63)), word1 & mask(63)];
                prop_assert_eq!(message.encode(), carried);
            }
        }
    }

    #[test]
    fn a_slot_of_zeroes_is_no_message() {
        assert_eq!(NetMessage::decode([0, 0]), None);
    }

    #[test]
    fn every_status_survives_its_code() {
        for status in [Status::Sent, Status::Dropped, Status::NotYet, Status::Stale, Status::Unreachable] {
            assert_eq!(Status::from_code(status.code()), status);
        }
        assert_eq!(Status::from_code(99), Status::Dropped);
    }

    #[test]
    fn every_run_survives_its_code() {
        for status in [Status::Sent, Status::Dropped, Status::NotYet, Status::Stale, Status::Unreachable] {
            for packets in [1, 2, 255, 256, Run::MAX] {
                let run = Run { status, packets };
                assert!(u64::from(run.code()) <= mask(BYTES_BITS));
                assert_eq!(Run::from_code(run.code()), run);
            }
        }
        let single = Run { status: Status::NotYet, packets: 1 };
        assert_eq!(Run::from_code(Status::NotYet.code()), single, "a bare status is a run of one");
    }
}
