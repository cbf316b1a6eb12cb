//! The header in front of every frame (`virtio_net_hdr_v1`), and what makes one acceptable.
//!
//! It comes from a guest and ends in the host's kernel, in a NIC or in another guest, so every field is checked
//! against the frame it stands before.

use crate::finish::HEADERS_BYTES_MAX;
use crate::offloads::Offloads;
use virtio_bindings::virtio_net as bits;

/// Length of the header in pool buffers, always with `num_buffers`.
pub const HEADER_BYTES: usize = 12;
/// The same for arithmetic on lengths in messages.
pub const HEADER_BYTES_U32: u32 = 12;
const _: () = assert!(HEADER_BYTES == HEADER_BYTES_U32 as usize);
/// Length of an Ethernet header.
pub const ETHERNET_BYTES: u32 = 14;
/// An Ethernet header and two VLAN tags: what a frame may be longer than the MTU.
const FRAMING_BYTES_MAX: u32 = 22;
const TCP_CHECKSUM_OFFSET: u16 = 16;
const TCP_HEADER_BYTES: u32 = 20;
const UDP_CHECKSUM_OFFSET: u16 = 6;
const UDP_HEADER_BYTES: u32 = 8;
/// What options a TCP header may have.
const TCP_OPTIONS_BYTES_MAX: u32 = 40;
/// Segments of a large frame, at most: 64 KiB in those of Linux' smallest MSS, 48 bytes, are fewer. Who wants more of them keeps the kernel, or
/// us, busy with one packet while all others of the NIC wait.
pub const SEGMENTS_MAX: u32 = 2048;

#[expect(clippy::cast_possible_truncation, reason = "constants of the standard that fit one byte")]
mod codes {
    use super::bits;
    pub(super) const NEEDS_CHECKSUM: u8 = bits::VIRTIO_NET_HDR_F_NEEDS_CSUM as u8;
    pub(super) const GSO_NONE: u8 = bits::VIRTIO_NET_HDR_GSO_NONE as u8;
    pub(super) const GSO_TCPV4: u8 = bits::VIRTIO_NET_HDR_GSO_TCPV4 as u8;
    pub(super) const GSO_TCPV6: u8 = bits::VIRTIO_NET_HDR_GSO_TCPV6 as u8;
    /// UDP that is cut into datagrams, not into fragments (virtio 1.2, 5.1.6).
    pub(super) const GSO_UDP_L4: u8 = 5;
}

/// The header, in host order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnetHeader {
    /// Bit 0: the checksum is to be completed; bit 1: it was found valid.
    pub flags: u8,
    /// What kind of large frame this is, if any.
    pub gso_type: u8,
    /// Length of the headers of a large frame: a hint.
    pub header_bytes: u16,
    /// Payload of each segment of a large frame.
    pub gso_bytes: u16,
    /// Where the checksummed part of the frame begins.
    pub checksum_start: u16,
    /// Where in that part the checksum lies.
    pub checksum_offset: u16,
    /// Over how many receive buffers of the guest the packet is spread.
    pub buffers: u16,
}

/// What a frame comes to on a wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireCost {
    /// Frames: those that a large one is cut into.
    pub frames: u64,
    /// Their bytes. Each has headers of its own.
    pub bytes: u64,
}

impl std::ops::AddAssign for WireCost {
    #[inline]
    fn add_assign(&mut self, other: Self) {
        self.frames += other.frames;
        self.bytes += other.bytes;
    }
}

/// Why a header is not acceptable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderFault {
    /// Shorter than an Ethernet header.
    #[error("the frame is shorter than an Ethernet header")]
    Runt,
    /// Longer than the MTU allows, and no large frame.
    #[error("the frame is longer than the MTU allows")]
    Oversize,
    /// The checksum lies outside of the frame.
    #[error("the checksum lies outside of the frame")]
    ChecksumOutside,
    /// An offload was used that was not negotiated, or that does not exist.
    #[error("an offload was used that was not negotiated")]
    NotNegotiated,
    /// A large frame with segments of no size or too many of them, without a checksum or without room for its headers.
    #[error("the fields of a large frame contradict each other, or it has too many segments")]
    BadSegmentation,
}

impl VnetHeader {
    /// Reads a header.
    #[inline]
    pub const fn parse(raw: [u8; HEADER_BYTES]) -> Self {
        Self {
            flags: raw[0],
            gso_type: raw[1],
            header_bytes: u16::from_le_bytes([raw[2], raw[3]]),
            gso_bytes: u16::from_le_bytes([raw[4], raw[5]]),
            checksum_start: u16::from_le_bytes([raw[6], raw[7]]),
            checksum_offset: u16::from_le_bytes([raw[8], raw[9]]),
            buffers: u16::from_le_bytes([raw[10], raw[11]]),
        }
    }

    /// Writes a header.
    #[inline]
    pub const fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let [header_0, header_1] = self.header_bytes.to_le_bytes();
        let [gso_0, gso_1] = self.gso_bytes.to_le_bytes();
        let [start_0, start_1] = self.checksum_start.to_le_bytes();
        let [offset_0, offset_1] = self.checksum_offset.to_le_bytes();
        let [buffers_0, buffers_1] = self.buffers.to_le_bytes();
        [
            self.flags,
            self.gso_type,
            header_0,
            header_1,
            gso_0,
            gso_1,
            start_0,
            start_1,
            offset_0,
            offset_1,
            buffers_0,
            buffers_1,
        ]
    }

    /// Whether the checksum is left to the receiver.
    #[inline]
    pub const fn needs_checksum(self) -> bool {
        self.flags & codes::NEEDS_CHECKSUM != 0
    }

    /// What a receiver of this frame must be able to do.
    #[inline]
    pub const fn required(self) -> Offloads {
        let checksum = if self.needs_checksum() { Offloads::CHECKSUM } else { Offloads::NONE };
        match self.gso_type {
            codes::GSO_TCPV4 => checksum.union(Offloads::TSO4.union(Offloads::CHECKSUM)),
            codes::GSO_TCPV6 => checksum.union(Offloads::TSO6.union(Offloads::CHECKSUM)),
            codes::GSO_UDP_L4 => checksum.union(Offloads::USO.union(Offloads::CHECKSUM)),
            _ => checksum,
        }
    }

    /// Whether the frame is larger than the wire takes and has to be cut.
    pub const fn is_large(self) -> bool {
        self.gso_type != codes::GSO_NONE
    }

    /// What a frame of `frame_bytes` bytes comes to on a wire, whoever cuts it. Never too little: how long its TCP header is, is not known here, so that is
    /// taken to have no options where segments are counted. That may be one too many.
    #[inline]
    pub const fn wire_cost(self, frame_bytes: u32) -> WireCost {
        if self.gso_type == codes::GSO_NONE {
            return WireCost { frames: 1, bytes: frame_bytes as u64 };
        }
        self.wire_cost_of_segments(frame_bytes)
    }

    const fn wire_cost_of_segments(self, frame_bytes: u32) -> WireCost {
        let least = self.headers_end();
        let options = if self.gso_type == codes::GSO_UDP_L4 { 0 } else { TCP_OPTIONS_BYTES_MAX };
        // The hint counts as far as it can be true: a guest may give any.
        let headers = match self.header_bytes as u32 {
            hint if hint < least => least,
            hint if hint > least + options => least + options,
            hint => hint,
        };
        let frames = self.segments(frame_bytes) as u64;
        WireCost { frames, bytes: frame_bytes as u64 + (frames - 1) * headers as u64 }
    }

    /// Where the headers of a large frame end, were there no options.
    const fn headers_end(self) -> u32 {
        let transport = if self.gso_type == codes::GSO_UDP_L4 { UDP_HEADER_BYTES } else { TCP_HEADER_BYTES };
        self.checksum_start as u32 + transport
    }

    /// How many segments a large frame has, at most: one at least, and one if they have no size.
    const fn segments(self, frame_bytes: u32) -> u32 {
        let payload = frame_bytes.saturating_sub(self.headers_end());
        if payload == 0 || self.gso_bytes == 0 {
            return 1;
        }
        payload.div_ceil(self.gso_bytes as u32)
    }

    /// Checks the header of a frame of `frame_bytes` bytes whose sender may leave `allowed` undone, and returns
    /// it with everything removed that a receiver could trip over: unknown flags, stale fields, a wrong hint.
    #[inline]
    pub fn check(self, frame_bytes: u32, mtu: u16, allowed: Offloads) -> Result<Self, HeaderFault> {
        if frame_bytes < ETHERNET_BYTES {
            return Err(HeaderFault::Runt);
        }
        let mut clean = Self::default();
        if self.needs_checksum() {
            if !allowed.contains(Offloads::CHECKSUM) {
                return Err(HeaderFault::NotNegotiated);
            }
            let end = u32::from(self.checksum_start) + u32::from(self.checksum_offset) + 2;
            if end > frame_bytes || u32::from(self.checksum_start) < ETHERNET_BYTES {
                return Err(HeaderFault::ChecksumOutside);
            }
            clean.flags = codes::NEEDS_CHECKSUM;
            clean.checksum_start = self.checksum_start;
            clean.checksum_offset = self.checksum_offset;
        }
        let needed = match self.gso_type {
            codes::GSO_NONE => {
                if frame_bytes > u32::from(mtu) + FRAMING_BYTES_MAX {
                    return Err(HeaderFault::Oversize);
                }
                return Ok(clean);
            }
            codes::GSO_TCPV4 => Offloads::TSO4,
            codes::GSO_TCPV6 => Offloads::TSO6,
            codes::GSO_UDP_L4 => Offloads::USO,
            _ => return Err(HeaderFault::NotNegotiated),
        };
        if !allowed.contains(needed) {
            return Err(HeaderFault::NotNegotiated);
        }
        let checksum_offset = match self.gso_type {
            codes::GSO_UDP_L4 => UDP_CHECKSUM_OFFSET,
            _ => TCP_CHECKSUM_OFFSET,
        };
        let headers_end = self.headers_end();
        let consistent = self.needs_checksum()
            && self.checksum_offset == checksum_offset
            && headers_end <= frame_bytes
            // They are in front of each segment: who could say that they are most of the frame would have it count as many times as long.
            && headers_end as usize <= HEADERS_BYTES_MAX
            && self.gso_bytes != 0
            && self.gso_bytes <= mtu
            && self.segments(frame_bytes) <= SEGMENTS_MAX;
        if !consistent {
            return Err(HeaderFault::BadSegmentation);
        }
        clean.gso_type = self.gso_type;
        clean.gso_bytes = self.gso_bytes;
        // The hint is taken only where it can be true; a kernel refuses the frame otherwise.
        let least = u16::try_from(headers_end).unwrap_or(u16::MAX);
        let most = u16::try_from(frame_bytes).unwrap_or(u16::MAX);
        clean.header_bytes = self.header_bytes.clamp(least, most.max(least));
        Ok(clean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tso4() -> VnetHeader {
        VnetHeader {
            flags: codes::NEEDS_CHECKSUM,
            gso_type: codes::GSO_TCPV4,
            header_bytes: 54,
            gso_bytes: 1448,
            checksum_start: 34,
            checksum_offset: 16,
            buffers: 0,
        }
    }

    #[test]
    fn a_plain_frame_passes() {
        let header = VnetHeader::default();
        assert_eq!(header.check(60, 1500, Offloads::NONE), Ok(header));
        assert_eq!(header.check(1522, 1500, Offloads::NONE), Ok(header));
    }

    #[test]
    fn frames_of_impossible_length_are_refused() {
        let header = VnetHeader::default();
        assert_eq!(header.check(13, 1500, Offloads::ALL), Err(HeaderFault::Runt));
        assert_eq!(header.check(1523, 1500, Offloads::ALL), Err(HeaderFault::Oversize));
    }

    #[test]
    fn a_large_frame_passes_where_negotiated() {
        assert_eq!(tso4().check(60000, 1500, Offloads::ALL), Ok(tso4()));
        let without = Offloads::CHECKSUM.union(Offloads::TSO6);
        assert_eq!(tso4().check(60000, 1500, without), Err(HeaderFault::NotNegotiated));
        assert_eq!(tso4().check(60000, 1500, Offloads::NONE), Err(HeaderFault::NotNegotiated));
    }

    #[test]
    fn a_checksum_outside_of_the_frame_is_refused() {
        let header = VnetHeader { flags: 1, checksum_start: 50, checksum_offset: 9, ..VnetHeader::default() };
        assert_eq!(header.check(60, 1500, Offloads::ALL), Err(HeaderFault::ChecksumOutside));
        assert!(header.check(61, 1500, Offloads::ALL).is_ok());
        let inside_ethernet = VnetHeader { checksum_start: 13, ..header };
        assert_eq!(inside_ethernet.check(61, 1500, Offloads::ALL), Err(HeaderFault::ChecksumOutside));
        let wrapping = VnetHeader { checksum_start: u16::MAX, checksum_offset: u16::MAX, ..header };
        assert_eq!(wrapping.check(61, 1500, Offloads::ALL), Err(HeaderFault::ChecksumOutside));
    }

    #[test]
    fn a_contradictory_large_frame_is_refused() {
        for broken in [
            VnetHeader { gso_bytes: 0, ..tso4() },
            VnetHeader { gso_bytes: 1501, ..tso4() },
            VnetHeader { flags: 0, ..tso4() },
            VnetHeader { checksum_offset: 6, ..tso4() },
            VnetHeader { checksum_start: 237, header_bytes: 257, ..tso4() },
            // A thousand segments of almost nothing, each with almost all of it as its headers.
            VnetHeader { checksum_start: 59_000, gso_bytes: 1, ..tso4() },
        ] {
            assert_eq!(broken.check(60000, 1500, Offloads::ALL), Err(HeaderFault::BadSegmentation));
        }
        assert_eq!(tso4().check(53, 1500, Offloads::ALL), Err(HeaderFault::BadSegmentation));
        let longest = VnetHeader { checksum_start: 236, header_bytes: 256, ..tso4() };
        assert_eq!(longest.check(60000, 1500, Offloads::ALL), Ok(longest));
        let fragmented = VnetHeader { gso_type: 3, ..tso4() };
        assert_eq!(fragmented.check(60000, 1500, Offloads::ALL), Err(HeaderFault::NotNegotiated));
        let datagrams = VnetHeader { gso_type: 5, ..tso4() };
        assert_eq!(datagrams.check(60000, 1500, Offloads::ALL), Err(HeaderFault::BadSegmentation));
        let datagrams = VnetHeader { checksum_offset: 6, header_bytes: 42, ..datagrams };
        assert_eq!(datagrams.check(60000, 1500, Offloads::ALL), Ok(datagrams));
        let congestion = VnetHeader { gso_type: 0x81, ..tso4() };
        assert_eq!(congestion.check(60000, 1500, Offloads::ALL), Err(HeaderFault::NotNegotiated));
    }

    #[test]
    fn a_large_frame_has_a_bounded_number_of_segments() {
        let tiny = |gso_bytes| VnetHeader { gso_bytes, ..tso4() };
        let most = 54 + SEGMENTS_MAX * 8;
        assert_eq!(tiny(8).check(most, 1500, Offloads::ALL), Ok(tiny(8)));
        assert_eq!(tiny(8).check(most + 1, 1500, Offloads::ALL), Err(HeaderFault::BadSegmentation));
        assert_eq!(tiny(1).check(65_554, 1500, Offloads::ALL), Err(HeaderFault::BadSegmentation));
        // Linux' smallest MSS.
        assert_eq!(tiny(48).check(65_554, 1500, Offloads::ALL), Ok(tiny(48)));
        let datagrams = VnetHeader { gso_type: 5, checksum_offset: 6, header_bytes: 42, ..tiny(8) };
        let most = 42 + SEGMENTS_MAX * 8;
        assert_eq!(datagrams.check(most, 1500, Offloads::ALL), Ok(datagrams));
        assert_eq!(datagrams.check(most + 1, 1500, Offloads::ALL), Err(HeaderFault::BadSegmentation));
    }

    #[test]
    fn a_frame_costs_what_it_comes_to_on_the_wire() {
        let cost = |header: VnetHeader, frame_bytes| {
            let WireCost { frames, bytes } = header.wire_cost(frame_bytes);
            (frames, bytes)
        };
        assert_eq!(cost(VnetHeader::default(), 1514), (1, 1514));
        let payload = 45 * 1448;
        assert_eq!(cost(tso4(), 54 + payload), (45, u64::from(payload) + 45 * 54));
        assert_eq!(cost(tso4(), 55 + payload), (46, u64::from(payload) + 1 + 46 * 54));
        assert_eq!(cost(tso4(), 54), (1, 54), "all headers");
        let hint = |header_bytes| VnetHeader { header_bytes, ..tso4() };
        assert_eq!(cost(hint(0), 54 + 2 * 1448), (2, 2 * (54 + 1448)), "too low a hint");
        assert_eq!(cost(hint(60_000), 54 + 2 * 1448), (2, 2 * (54 + 1448) + 40), "too high a one");
        // Twelve bytes of options: they count as payload where segments are counted.
        assert_eq!(cost(hint(66), 66 + 1448), (2, 66 + 1448 + 66));
        let datagrams = VnetHeader { gso_type: 5, checksum_offset: 6, header_bytes: 500, ..tso4() };
        assert_eq!(cost(datagrams, 42 + 3000), (3, 3 * 42 + 3000));
        assert_eq!(cost(VnetHeader { gso_bytes: 1, ..tso4() }, 54 + 100), (100, 100 * 55));
        assert_eq!(cost(VnetHeader { gso_bytes: 0, ..tso4() }, 60_000), (1, 60_000), "of an unchecked one");
        assert_eq!(cost(VnetHeader { checksum_start: u16::MAX, ..tso4() }, 60), (1, 60));
    }

    #[test]
    fn what_a_receiver_could_trip_over_is_removed() {
        let odd = VnetHeader {
            flags: 0xfe,
            header_bytes: 9,
            checksum_start: 7,
            buffers: 3,
            ..VnetHeader::default()
        };
        assert_eq!(odd.check(60, 1500, Offloads::ALL), Ok(VnetHeader::default()));
        let hint = VnetHeader { header_bytes: 5, ..tso4() }.check(60000, 1500, Offloads::ALL);
        assert_eq!(hint.map(|header| header.header_bytes), Ok(54));
    }

    proptest! {
        #[test]
        fn a_header_survives_its_bytes(raw: [u8; HEADER_BYTES]) {
            prop_assert_eq!(VnetHeader::parse(raw).to_bytes(), raw);
        }

        #[test]
        fn whatever_passes_lies_within_the_frame_and_passes_again(
            raw: [u8; HEADER_BYTES], shape in 0..6u8, frame_bytes in 0..66_000u32, allowed in 0..16u32,
        ) {
            let mut raw = raw;
            raw[0] &= 3;
            raw[1] = shape;
            let allowed = Offloads::from_bits(allowed);
            let Ok(clean) = VnetHeader::parse(raw).check(frame_bytes, 1500, allowed) else { return Ok(()) };
            prop_assert!(allowed.contains(clean.required()));
            let end = u32::from(clean.checksum_start) + u32::from(clean.checksum_offset) + 2;
            prop_assert!(!clean.needs_checksum() || end <= frame_bytes);
            prop_assert!(u32::from(clean.header_bytes) <= frame_bytes);
            prop_assert!(clean.is_large() == (clean.gso_bytes != 0));
            let cost = clean.wire_cost(frame_bytes);
            prop_assert!((1..=u64::from(SEGMENTS_MAX)).contains(&cost.frames) && cost.bytes >= frame_bytes.into());
            prop_assert_eq!(clean.check(frame_bytes, 1500, allowed), Ok(clean));
        }
    }
}
