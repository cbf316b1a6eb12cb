//! Finishing in software what a frame's sender left to others: its checksum, or cutting it into frames that fit the
//! wire. For NICs and guests that do not do it themselves.
//!
//! A [`Finish`] is planned from a private copy of the frame's headers; the payload is only ever copied. So whoever
//! owns the buffer may scribble over it meanwhile and gets nothing for it but his own wrong payload.
//!
//! The frames are those that a NIC would send (virtio 1.2, 5.1.6.2): headers as in the large frame, except that
//! - lengths and checksums are each frame's own, and IPv4 identifications count up from the first;
//! - TCP sequence numbers go on; FIN and PSH are the last one's, CWR is the first one's (RFC 3168, 6.1.2).

mod headers;

use self::headers::{Headers, Network, Transport};
use crate::checksum;
use crate::vnet_header::{SEGMENTS_MAX, VnetHeader};

/// Headers of a large frame, at most: more than two VLAN tags and the longest IPv4 and TCP headers take.
pub const HEADERS_BYTES_MAX: usize = 256;
/// Frames out of one, at most.
pub const FRAMES_MAX: u32 = SEGMENTS_MAX;

const TCP_FIN: u8 = 0x01;
const TCP_PSH: u8 = 0x08;
const TCP_CWR: u8 = 0x80;
const UDP_CHECKSUM_OFFSET: u16 = 6;

/// Why a frame cannot be finished: its headers are not what its virtio-net header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FinishFault {
    /// Headers that are cut off, too long, or of another protocol.
    #[error("the headers do not match the virtio-net header")]
    Headers,
    /// A fragment of an IP packet, which cannot be cut again.
    #[error("the packet is a fragment already")]
    Fragment,
    /// It would become more frames than [`FRAMES_MAX`].
    #[error("it would become more than {FRAMES_MAX} frames")]
    TooMany,
}

/// How to finish one frame.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a box would be an allocation per packet")]
pub enum Finish {
    /// One checksum is missing.
    Checksum {
        /// Where the summed part begins.
        start: u16,
        /// Where in it the checksum lies.
        offset: u16,
        /// Length of the frame.
        frame_bytes: u32,
    },
    /// It is to be cut.
    Cut(Cut),
}

/// How to cut one frame.
#[derive(Clone, Debug)]
pub struct Cut {
    headers: Headers,
    segment_bytes: u32,
    payload_bytes: u32,
}

impl Finish {
    /// Plans for a frame of `frame_bytes` bytes that begins with `front`: all of it, or [`HEADERS_BYTES_MAX`] bytes. Its
    /// virtio-net header must have been [checked](VnetHeader::check).
    pub fn plan(header: VnetHeader, front: &[u8], frame_bytes: u32) -> Result<Self, FinishFault> {
        if !header.is_large() {
            return Ok(Self::Checksum {
                start: header.checksum_start,
                offset: header.checksum_offset,
                frame_bytes,
            });
        }
        let headers = Headers::parse(header, front, frame_bytes)?;
        let payload_bytes = frame_bytes - headers.bytes();
        let cut = Cut { headers, segment_bytes: u32::from(header.gso_bytes), payload_bytes };
        if cut.frames() > FRAMES_MAX {
            return Err(FinishFault::TooMany);
        }
        // The first frame is the longest, and its length has to fit its headers.
        if u64::from(cut.headers.bytes() + cut.payload(0).1) - cut.headers.network_at() as u64
            > u64::from(u16::MAX)
        {
            return Err(FinishFault::Headers);
        }
        Ok(Self::Cut(cut))
    }

    /// How many frames it becomes.
    pub fn frames(&self) -> u32 {
        match self {
            Self::Checksum { .. } => 1,
            Self::Cut(cut) => cut.frames(),
        }
    }

    /// Length of frame `index`, which is below [`Finish::frames`].
    pub fn frame_bytes(&self, index: u32) -> u32 {
        match self {
            Self::Checksum { frame_bytes, .. } => *frame_bytes,
            Self::Cut(cut) => cut.headers.bytes() + cut.payload(index).1,
        }
    }

    /// Writes frame `index` to the front of `out`, which has room for it, and returns it. `read` copies bytes of the
    /// original frame from a position on.
    pub fn build<'a>(&self, index: u32, out: &'a mut [u8], mut read: impl FnMut(u32, &mut [u8])) -> &'a [u8] {
        let frame = &mut out[..self.frame_bytes(index) as usize];
        match self {
            Self::Checksum { start, offset, .. } => {
                read(0, frame);
                complete(frame, *start, *offset);
            }
            Self::Cut(cut) => cut.build(index, frame, read),
        }
        frame
    }
}

/// Completes a checksum: its field holds the sum of the pseudo header already, so it is summed like the rest.
fn complete(frame: &mut [u8], start: u16, offset: u16) {
    let at = usize::from(start) + usize::from(offset);
    let sum = checksum::sum(&frame[usize::from(start)..]);
    let sum = if offset == UDP_CHECKSUM_OFFSET { checksum::of_udp_sum(sum) } else { checksum::of_sum(sum) };
    frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}

impl Cut {
    fn frames(&self) -> u32 {
        // A large frame may be all headers.
        self.payload_bytes.div_ceil(self.segment_bytes).max(1)
    }

    /// Where the payload of frame `index` begins within the whole payload, and its length.
    fn payload(&self, index: u32) -> (u32, u32) {
        let start = index * self.segment_bytes;
        (start, (self.payload_bytes - start).min(self.segment_bytes))
    }

    fn build(&self, index: u32, frame: &mut [u8], mut read: impl FnMut(u32, &mut [u8])) {
        let headers = &self.headers;
        let (payload_at, payload_bytes) = self.payload(index);
        let (front, payload) = frame.split_at_mut(headers.bytes() as usize);
        front.copy_from_slice(headers.raw());
        read(headers.bytes() + payload_at, payload);

        let network_at = headers.network_at();
        let transport_at = headers.transport_at();
        let packet_bytes = length(frame.len() - network_at);
        let segment_bytes = length(frame.len() - transport_at);
        let network = &mut frame[network_at..transport_at];
        match headers.network() {
            Network::Ipv4 => {
                put(network, 2, packet_bytes);
                let identification = u16::from_be_bytes([network[4], network[5]]);
                put(network, 4, identification.wrapping_add(length(index as usize)));
                put(network, 10, 0);
                let sum = checksum::of_sum(checksum::sum(network));
                put(network, 10, sum);
            }
            Network::Ipv6 => put(network, 4, packet_bytes - length(headers::IPV6_BYTES)),
        }
        let mut sum = headers.addresses_sum() + u64::from(segment_bytes);
        let segment = &mut frame[transport_at..];
        match headers.transport() {
            Transport::Tcp => {
                let first = u32::from_be_bytes([segment[4], segment[5], segment[6], segment[7]]);
                segment[4..8].copy_from_slice(&first.wrapping_add(payload_at).to_be_bytes());
                if index > 0 {
                    segment[13] &= !TCP_CWR;
                }
                if index + 1 < self.frames() {
                    segment[13] &= !(TCP_FIN | TCP_PSH);
                }
                put(segment, 16, 0);
                sum += u64::from(headers::TCP) + checksum::sum(segment);
                put(segment, 16, checksum::of_sum(sum));
            }
            Transport::Udp => {
                put(segment, 4, segment_bytes);
                put(segment, 6, 0);
                sum += u64::from(headers::UDP) + checksum::sum(segment);
                put(segment, 6, checksum::of_udp_sum(sum));
            }
        }
        debug_assert_eq!(payload_bytes as usize, frame.len() - headers.bytes() as usize);
    }
}

fn put(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// A length as headers have it. Frames are shorter than 64 KiB: a segment is no longer than an MTU.
fn length(bytes: usize) -> u16 {
    u16::try_from(bytes).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests;
