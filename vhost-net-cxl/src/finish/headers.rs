//! The headers of a large frame, as far as cutting it has to understand them.

use super::{FinishFault, HEADERS_BYTES_MAX};
use crate::checksum;
use crate::offloads::Offloads;
use crate::vnet_header::VnetHeader;

pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
pub(super) const IPV6_BYTES: usize = 40;

const ETHERNET_TYPE_AT: usize = 12;
const TYPE_IPV4: u16 = 0x0800;
const TYPE_IPV6: u16 = 0x86dd;
const TYPES_VLAN: [u16; 2] = [0x8100, 0x88a8];
const VLAN_TAG_BYTES: usize = 4;
const VLAN_TAGS_MAX: usize = 2;
const IPV4_BYTES_MIN: usize = 20;
const TCP_BYTES_MIN: usize = 20;
const UDP_BYTES: usize = 8;
/// IPv6 extension headers that may stand before TCP or UDP and do not concern us.
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Network {
    Ipv4,
    Ipv6,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Tcp,
    Udp,
}

/// A private copy of the headers up to the payload.
#[derive(Clone, Debug)]
pub(super) struct Headers {
    raw: [u8; HEADERS_BYTES_MAX],
    bytes: u16,
    network_at: u16,
    transport_at: u16,
    network: Network,
    transport: Transport,
}

impl Headers {
    /// Finds the headers at the front of a large frame, where its virtio-net header says.
    pub(super) fn parse(header: VnetHeader, front: &[u8], frame_bytes: u32) -> Result<Self, FinishFault> {
        let front = &front[..front.len().min(HEADERS_BYTES_MAX).min(frame_bytes as usize)];
        let required = header.required();
        let transport = if required.contains(Offloads::USO) { Transport::Udp } else { Transport::Tcp };
        let (kind, network_at) = network_type(front)?;
        let transport_at = usize::from(header.checksum_start);
        let between = front.get(network_at..transport_at).ok_or(FinishFault::Headers)?;
        let protocol = if transport == Transport::Tcp { TCP } else { UDP };
        let network = match kind {
            TYPE_IPV4 if !required.contains(Offloads::TSO6) => {
                check_ipv4(between, protocol)?;
                Network::Ipv4
            }
            TYPE_IPV6 if !required.contains(Offloads::TSO4) => {
                check_ipv6(between, protocol)?;
                Network::Ipv6
            }
            _ => return Err(FinishFault::Headers),
        };
        let transport_bytes = match transport {
            Transport::Tcp => {
                let bytes = front.get(transport_at + 12).map_or(0, |offset| usize::from(offset >> 4) * 4);
                if bytes < TCP_BYTES_MIN {
                    return Err(FinishFault::Headers);
                }
                bytes
            }
            Transport::Udp => UDP_BYTES,
        };
        let bytes = transport_at + transport_bytes;
        let own = front.get(..bytes).ok_or(FinishFault::Headers)?;
        let mut raw = [0; HEADERS_BYTES_MAX];
        raw[..bytes].copy_from_slice(own);
        let short = |bytes: usize| u16::try_from(bytes).map_err(|_| FinishFault::Headers);
        Ok(Self {
            raw,
            bytes: short(bytes)?,
            network_at: short(network_at)?,
            transport_at: short(transport_at)?,
            network,
            transport,
        })
    }

    pub(super) fn raw(&self) -> &[u8] {
        &self.raw[..usize::from(self.bytes)]
    }

    pub(super) fn bytes(&self) -> u32 {
        u32::from(self.bytes)
    }

    pub(super) fn network_at(&self) -> usize {
        usize::from(self.network_at)
    }

    pub(super) fn transport_at(&self) -> usize {
        usize::from(self.transport_at)
    }

    pub(super) fn network(&self) -> Network {
        self.network
    }

    pub(super) fn transport(&self) -> Transport {
        self.transport
    }

    /// The addresses' part of the pseudo header's sum.
    pub(super) fn addresses_sum(&self) -> u64 {
        let network = &self.raw[self.network_at()..];
        match self.network {
            Network::Ipv4 => checksum::sum(&network[12..20]),
            Network::Ipv6 => checksum::sum(&network[8..40]),
        }
    }
}

/// The type of what the frame carries behind its VLAN tags, and where that begins.
fn network_type(front: &[u8]) -> Result<(u16, usize), FinishFault> {
    let mut at = ETHERNET_TYPE_AT;
    for _ in 0..=VLAN_TAGS_MAX {
        let kind = front.get(at..at + 2).ok_or(FinishFault::Headers)?;
        let kind = u16::from_be_bytes([kind[0], kind[1]]);
        if !TYPES_VLAN.contains(&kind) {
            return Ok((kind, at + 2));
        }
        at += VLAN_TAG_BYTES;
    }
    Err(FinishFault::Headers)
}

/// Checks an IPv4 header that takes all of `header`.
fn check_ipv4(header: &[u8], protocol: u8) -> Result<(), FinishFault> {
    let first = *header.first().ok_or(FinishFault::Headers)?;
    let bytes = usize::from(first & 0x0f) * 4;
    if first >> 4 != 4 || bytes < IPV4_BYTES_MIN || bytes != header.len() || header[9] != protocol {
        return Err(FinishFault::Headers);
    }
    // More fragments, or an offset.
    if header[6] & 0x3f != 0 || header[7] != 0 {
        return Err(FinishFault::Fragment);
    }
    Ok(())
}

/// Checks an IPv6 header and its extensions that take all of `headers`.
fn check_ipv6(headers: &[u8], protocol: u8) -> Result<(), FinishFault> {
    if headers.len() < IPV6_BYTES || headers[0] >> 4 != 6 {
        return Err(FinishFault::Headers);
    }
    let mut next = headers[6];
    let mut at = IPV6_BYTES;
    while at < headers.len() {
        let extension = &headers[at..];
        let [following, length, _, left, ..] = *extension else { return Err(FinishFault::Headers) };
        match next {
            HOP_BY_HOP | DESTINATION_OPTIONS => {}
            // While segments are left, the checksum is that of another destination.
            ROUTING if left == 0 => {}
            FRAGMENT => return Err(FinishFault::Fragment),
            _ => return Err(FinishFault::Headers),
        }
        next = following;
        at += 8 * (usize::from(length) + 1);
    }
    if at == headers.len() && next == protocol { Ok(()) } else { Err(FinishFault::Headers) }
}
