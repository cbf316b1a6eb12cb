//! Refusing frames that bear others' network addresses, for an instance whose own ones are known: in IPv4 and IPv6
//! headers, in ARP, and in neighbour discovery, by which it could draw others' traffic to itself.
//!
//! What cannot be judged is refused: VLAN tags, other protocols, and fragments of IPv6 whose first header is not told.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use pod_protocol::ids::MacAddress;

use crate::ethernet::{FRAME_BYTES_MIN, announcement};

/// Bytes of a frame that are looked at: Ethernet, IPv6 with some extensions, and a neighbour advertisement.
pub const FRONT_BYTES: usize = 192;

const TYPE_AT: usize = 12;
const NETWORK_AT: usize = 14;
const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
const TYPE_ARP: [u8; 2] = [0x08, 0x06];
const TYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const TYPE_RARP: [u8; 2] = [0x80, 0x35];
/// Ethernet and IPv4, and the lengths of their addresses.
const ARP_FRONT: [u8; 6] = [0, 1, 8, 0, 6, 4];
const UDP: u8 = 17;
const DHCP_SERVER: [u8; 2] = [0, 67];
const IPV4_BYTES_MIN: usize = 20;
/// Of the fourth word of two bytes; what is above it are flags.
const IPV4_FRAGMENT_OFFSET: u16 = 0x1fff;
const IPV6_BYTES: usize = 40;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;
const ICMPV6: u8 = 58;
const LISTENER_REPORT: u8 = 131;
const LISTENER_DONE: u8 = 132;
const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;
const LISTENER_REPORT_V2: u8 = 143;
const OPTION_SOURCE: u8 = 1;
const OPTION_TARGET: u8 = 2;

/// Of a fragment's second word; what is below it says whether more follow.
const FRAGMENT_OFFSET: u16 = 0xfff8;

/// The addresses that an instance may use.
#[derive(Clone, Debug)]
pub struct SourceGuard {
    mac: MacAddress,
    addresses: Vec<IpAddr>,
}

impl SourceGuard {
    /// For an instance with these addresses; nothing if they are not known.
    pub fn new(mac: MacAddress, addresses: &[IpAddr]) -> Option<Self> {
        (!addresses.is_empty()).then(|| Self { mac, addresses: addresses.to_vec() })
    }

    /// Whether a frame that begins with `front` bears the instance's own addresses only. Its Ethernet source was checked.
    pub fn permits(&self, front: &[u8]) -> bool {
        let Some(network) = front.get(NETWORK_AT..) else { return false };
        match front.get(TYPE_AT..NETWORK_AT) {
            Some(kind) if kind == TYPE_IPV4 => self.permits_ipv4(network),
            Some(kind) if kind == TYPE_ARP => self.permits_arp(network),
            Some(kind) if kind == TYPE_IPV6 => self.permits_ipv6(network),
            // By which its frontend announces it after a live migration.
            Some(kind) if kind == TYPE_RARP => front.get(..FRAME_BYTES_MIN) == Some(&announcement(self.mac)),
            _ => false,
        }
    }

    fn owns_v4(&self, bytes: &[u8]) -> bool {
        <[u8; 4]>::try_from(bytes).is_ok_and(|it| self.addresses.contains(&IpAddr::V4(Ipv4Addr::from(it))))
    }

    /// Also the link-local address that is made from its MAC, which every IPv6 host has.
    fn owns_v6(&self, bytes: &[u8]) -> bool {
        let Ok(bytes) = <[u8; 16]>::try_from(bytes) else { return false };
        let address = Ipv6Addr::from(bytes);
        self.addresses.contains(&IpAddr::V6(address)) || address == self.link_local()
    }

    fn link_local(&self) -> Ipv6Addr {
        let mac = self.mac.bytes();
        let mut address = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xfe, 0, 0, 0];
        address[8..11].copy_from_slice(&mac[..3]);
        address[8] ^= 2;
        address[13..].copy_from_slice(&mac[3..]);
        Ipv6Addr::from(address)
    }

    fn permits_ipv4(&self, network: &[u8]) -> bool {
        let Some(source) = network.get(12..16) else { return false };
        if network[0] >> 4 != 4 {
            return false;
        }
        // Who has no address yet asks for one.
        let header_bytes = usize::from(network[0] & 0x0f) * 4;
        let port = network.get(header_bytes + 2..header_bytes + 4);
        // Later fragments have something else where the port would be.
        let offset = u16::from_be_bytes([network[6], network[7]]) & IPV4_FRAGMENT_OFFSET;
        let begins = offset == 0 && header_bytes >= IPV4_BYTES_MIN;
        let to_server = network[9] == UDP && port.is_some_and(|port| port == DHCP_SERVER);
        source == [0; 4] && begins && to_server || self.owns_v4(source)
    }

    fn permits_arp(&self, arp: &[u8]) -> bool {
        let Some(sender) = arp.get(8..18) else { return false };
        let (hardware, protocol) = sender.split_at(6);
        // A probe bears no address (RFC 5227).
        arp[..6] == ARP_FRONT
            && hardware == self.mac.bytes()
            && (protocol == [0; 4] || self.owns_v4(protocol))
    }

    fn permits_ipv6(&self, network: &[u8]) -> bool {
        let Some(source) = network.get(8..24) else { return false };
        if network[0] >> 4 != 6 {
            return false;
        }
        let unspecified = source == [0; 16];
        if !unspecified && !self.owns_v6(source) {
            return false;
        }
        let mut next = network[6];
        let mut at = IPV6_BYTES;
        loop {
            let Some(header) = network.get(at..) else { return false };
            match (next, header) {
                (HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS, [following, length, ..]) => {
                    next = *following;
                    at += 8 * (usize::from(*length) + 1);
                }
                // It counts in words of four bytes, and less two of them.
                (AUTHENTICATION, [following, length, ..]) => {
                    next = *following;
                    at += 4 * (usize::from(*length) + 2);
                }
                (FRAGMENT, [following, _, high, low, _, _, _, _, message @ ..]) => {
                    let begins = u16::from_be_bytes([*high, *low]) & FRAGMENT_OFFSET == 0;
                    return !unspecified && permits_fragment(*following, begins, message);
                }
                (ICMPV6, message) => return self.permits_icmp(message, unspecified),
                (HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS | FRAGMENT | AUTHENTICATION, _) => return false,
                _ => return !unspecified,
            }
        }
    }

    fn permits_icmp(&self, message: &[u8], unspecified: bool) -> bool {
        let own_option = |options: &[u8], kind| self.permits_options(options, kind);
        match message.first() {
            // It is no router.
            None | Some(&(ROUTER_ADVERTISEMENT | REDIRECT)) => false,
            // A router learns from it where the sender is.
            Some(&ROUTER_SOLICITATION) => {
                message.get(8..).is_some_and(|options| own_option(options, OPTION_SOURCE))
            }
            // From no address it is the question whether the address is free.
            Some(&NEIGHBOUR_SOLICITATION) => {
                message.get(24..).is_some_and(|options| own_option(options, OPTION_SOURCE))
                    && (!unspecified || message.get(8..24).is_some_and(|target| self.owns_v6(target)))
            }
            Some(&NEIGHBOUR_ADVERTISEMENT) => {
                message.get(8..24).is_some_and(|target| self.owns_v6(target))
                    && message.get(24..).is_some_and(|options| own_option(options, OPTION_TARGET))
            }
            // Who has no address yet says which groups it listens to, as it has to before it asks whether one is free.
            Some(&(LISTENER_REPORT | LISTENER_DONE | LISTENER_REPORT_V2)) => true,
            Some(_) => !unspecified,
        }
    }

    /// Whether all link-layer addresses of this kind are the instance's. Options that are cut off are refused.
    fn permits_options(&self, mut options: &[u8], kind: u8) -> bool {
        while let [option, length, ..] = *options {
            let bytes = usize::from(length) * 8;
            if bytes == 0 {
                // Padding of a short frame.
                return options.iter().all(|byte| *byte == 0);
            }
            let Some(rest) = options.get(bytes..) else { return false };
            if option == kind && options[2..8] != self.mac.bytes() {
                return false;
            }
            options = rest;
        }
        options.iter().all(|byte| *byte == 0)
    }
}

/// Whether a piece of a packet may pass whose fragmented part begins with a header of this kind, and with `message` if the piece is the
/// first one. Neighbour discovery is never fragmented (RFC 6980), and what it is lies in its first byte, which is in the first
/// piece. Where that has another header in front, it could be hidden behind it.
fn permits_fragment(kind: u8, begins: bool, message: &[u8]) -> bool {
    match kind {
        HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION_OPTIONS => false,
        ICMPV6 if begins => {
            message.first().is_some_and(|kind| !(ROUTER_SOLICITATION..=REDIRECT).contains(kind))
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAC: MacAddress = MacAddress::new([2, 0, 0, 0, 0, 1]);
    const OTHER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

    fn guard() -> SourceGuard {
        let addresses = ["10.0.0.1".parse().expect("v4"), "fd00::1".parse().expect("v6")];
        SourceGuard::new(MAC, &addresses).expect("addresses")
    }

    fn frame(kind: [u8; 2], network: &[u8]) -> Vec<u8> {
        let mut frame = vec![0xff; 6];
        frame.extend(MAC.bytes());
        frame.extend(kind);
        frame.extend(network);
        frame
    }

    fn ipv4(source: [u8; 4], protocol: u8, destination_port: u8) -> Vec<u8> {
        let mut network = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, protocol, 0, 0];
        network.extend(source);
        network.extend([10, 0, 0, 2, 0, 68, 0, destination_port, 0, 8, 0, 0]);
        frame(TYPE_IPV4, &network)
    }

    fn arp(hardware: [u8; 6], protocol: [u8; 4]) -> Vec<u8> {
        let mut network = vec![0, 1, 8, 0, 6, 4, 0, 1];
        network.extend(hardware);
        network.extend(protocol);
        network.extend([0; 10]);
        frame(TYPE_ARP, &network)
    }

    fn ipv6(source: &str, next: u8, rest: &[u8]) -> Vec<u8> {
        let mut network = vec![0x60, 0, 0, 0, 0, 0, next, 255];
        network.extend(source.parse::<Ipv6Addr>().expect("v6").octets());
        network.extend([0xff; 16]);
        network.extend(rest);
        frame(TYPE_IPV6, &network)
    }

    fn with(mut frame: Vec<u8>, at: usize, byte: u8) -> Vec<u8> {
        frame[at] = byte;
        frame
    }

    fn neighbour(kind: u8, target: &str, option: u8, mac: [u8; 6]) -> Vec<u8> {
        let mut message = vec![kind, 0, 0, 0, 0, 0, 0, 0];
        message.extend(target.parse::<Ipv6Addr>().expect("v6").octets());
        message.extend([option, 1]);
        message.extend(mac);
        message
    }

    fn router_solicitation(mac: [u8; 6]) -> Vec<u8> {
        [&[ROUTER_SOLICITATION, 0, 0, 0, 0, 0, 0, 0, OPTION_SOURCE, 1], &mac[..]].concat()
    }

    /// Behind an authentication header of 24 bytes.
    fn authenticated(message: &[u8]) -> Vec<u8> {
        let mut header = [0; 24];
        header[..2].copy_from_slice(&[ICMPV6, 4]);
        [&header, message].concat()
    }

    #[test]
    fn own_addresses_pass_and_others_do_not() {
        let guard = guard();
        assert!(SourceGuard::new(MAC, &[]).is_none());
        let cases = [
            (ipv4([10, 0, 0, 1], 6, 80), true),
            (ipv4([10, 0, 0, 2], 6, 80), false),
            (ipv4([0; 4], UDP, 67), true),
            (ipv4([0; 4], UDP, 68), false),
            (ipv4([0; 4], 6, 67), false),
            (with(with(ipv4([0; 4], UDP, 68), 14, 0x44), 33, 67), false),
            (with(ipv4([0; 4], UDP, 67), 20, 0x20), true),
            (with(ipv4([0; 4], UDP, 67), 20, 0x01), false),
            (with(ipv4([0; 4], UDP, 67), 21, 1), false),
            (with(ipv4([10, 0, 0, 1], UDP, 67), 21, 1), true),
            (with(ipv4([10, 0, 0, 1], 6, 80), 14, 0x65), false),
            (arp(MAC.bytes(), [10, 0, 0, 1]), true),
            (arp(MAC.bytes(), [0; 4]), true),
            (arp(MAC.bytes(), [10, 0, 0, 254]), false),
            (arp(OTHER_MAC, [10, 0, 0, 1]), false),
            (with(arp(MAC.bytes(), [10, 0, 0, 1]), 15, 6), false),
            (ipv6("fd00::1", 6, &[]), true),
            (ipv6("fe80::ff:fe00:1", 6, &[]), true),
            (ipv6("fe80::ff:fe00:9", 6, &[]), false),
            (ipv6("fd00::2", 6, &[]), false),
            (ipv6("::", 6, &[]), false),
            (with(ipv6("fd00::1", 6, &[]), 14, 0x40), false),
            (announcement(MAC).to_vec(), true),
            (announcement(MacAddress::new(OTHER_MAC)).to_vec(), false),
            (announcement(MAC)[..59].to_vec(), false),
            (frame(TYPE_RARP, &[0; 46]), false),
            (frame([0x88, 0xcc], &[0; 40]), false),
            (frame([0x81, 0], &ipv4([10, 0, 0, 1], 6, 80)[10..]), false),
            (vec![0; 10], false),
        ];
        for (number, (frame, permitted)) in cases.into_iter().enumerate() {
            assert_eq!(guard.permits(&frame), permitted, "case {number}");
        }
    }

    #[test]
    fn neighbour_discovery_speaks_for_itself_alone() {
        let guard = guard();
        let own = MAC.bytes();
        let advertisement = |target, mac| neighbour(NEIGHBOUR_ADVERTISEMENT, target, OPTION_TARGET, mac);
        let solicitation = |target, mac| neighbour(NEIGHBOUR_SOLICITATION, target, OPTION_SOURCE, mac);
        let behind = |next: u8, rest: &[u8]| [&[next, 0, 0, 0, 0, 0, 0, 0], rest].concat();
        let cases = [
            (ipv6("fd00::1", ICMPV6, &advertisement("fd00::1", own)), true),
            (ipv6("fd00::1", ICMPV6, &advertisement("fd00::99", own)), false),
            (ipv6("fd00::1", ICMPV6, &advertisement("fd00::1", OTHER_MAC)), false),
            // An option that is cut off.
            (ipv6("fd00::1", ICMPV6, &advertisement("fd00::1", own)[..29]), false),
            (ipv6("fd00::1", ICMPV6, &solicitation("fd00::99", own)), true),
            (ipv6("fd00::1", ICMPV6, &solicitation("fd00::99", OTHER_MAC)), false),
            (ipv6("::", ICMPV6, &solicitation("fd00::1", own)[..24]), true),
            (ipv6("::", ICMPV6, &solicitation("fd00::99", own)[..24]), false),
            (ipv6("fd00::1", ICMPV6, &[ROUTER_ADVERTISEMENT; 40]), false),
            (ipv6("fd00::1", ICMPV6, &[128; 40]), true),
            (ipv6("fd00::1", HOP_BY_HOP, &behind(ICMPV6, &advertisement("fd00::99", own))), false),
            (ipv6("fd00::1", HOP_BY_HOP, &behind(ICMPV6, &advertisement("fd00::1", own))), true),
            (ipv6("fd00::1", HOP_BY_HOP, &[ICMPV6]), false),
            (ipv6("fd00::1", AUTHENTICATION, &authenticated(&advertisement("fd00::99", own))), false),
            (ipv6("fd00::1", AUTHENTICATION, &authenticated(&advertisement("fd00::1", own))), true),
            (ipv6("fd00::1", AUTHENTICATION, &[ICMPV6]), false),
            (ipv6("fd00::1", ICMPV6, &router_solicitation(own)), true),
            (ipv6("fd00::1", ICMPV6, &router_solicitation(OTHER_MAC)), false),
            (ipv6("fd00::1", ICMPV6, &[REDIRECT; 40]), false),
            (ipv6("::", ICMPV6, &router_solicitation(own)[..8]), true),
            (ipv6("::", ICMPV6, &[128; 40]), false),
            // A report of groups, as it comes before the question whether an address is free.
            (ipv6("::", HOP_BY_HOP, &behind(ICMPV6, &[LISTENER_REPORT_V2; 28])), true),
        ];
        for (number, (frame, permitted)) in cases.into_iter().enumerate() {
            assert_eq!(guard.permits(&frame), permitted, "case {number}");
        }
    }

    #[test]
    fn neighbour_discovery_hides_in_no_fragment() {
        let guard = guard();
        let advertisement = neighbour(NEIGHBOUR_ADVERTISEMENT, "fd00::99", OPTION_TARGET, MAC.bytes());
        let options = [&[ICMPV6, 0, 1, 4, 0, 0, 0, 0], &advertisement[..]].concat();
        let piece = |source, next, offset: u16, more: u16, rest: &[u8]| {
            let [high, low] = (offset << 3 | more).to_be_bytes();
            ipv6(source, FRAGMENT, &[&[next, 0, high, low, 0, 0, 0, 1], rest].concat())
        };
        let cases = [
            (piece("fd00::1", UDP, 0, 1, &[0; 16]), true),
            (piece("fd00::1", UDP, 2, 0, &[0; 16]), true),
            (piece("fd00::2", UDP, 2, 0, &[0; 16]), false),
            (piece("::", UDP, 0, 0, &[0; 16]), false),
            // A long ping.
            (piece("fd00::1", ICMPV6, 0, 1, &[128; 16]), true),
            (piece("fd00::1", ICMPV6, 2, 0, &[128; 16]), true),
            // Of a packet in one piece, too.
            (piece("fd00::1", ICMPV6, 0, 1, &advertisement), false),
            (piece("fd00::1", ICMPV6, 0, 0, &advertisement), false),
            (piece("fd00::1", ICMPV6, 0, 0, &[]), false),
            (piece("fd00::1", DESTINATION_OPTIONS, 0, 0, &options), false),
            (piece("fd00::1", DESTINATION_OPTIONS, 1, 0, &advertisement), false),
            (piece("fd00::1", FRAGMENT, 0, 0, &options), false),
            (ipv6("fd00::1", FRAGMENT, &[UDP, 0, 0, 0, 0, 0, 0]), false),
        ];
        for (number, (frame, permitted)) in cases.into_iter().enumerate() {
            assert_eq!(guard.permits(&frame), permitted, "case {number}");
        }
    }

    proptest! {
        #[test]
        fn any_frame_is_judged(mut front in prop::collection::vec(any::<u8>(), 0..FRONT_BYTES), kind in 0..4_u8) {
            if let Some(place) = front.get_mut(TYPE_AT..NETWORK_AT) {
                place.copy_from_slice(&[TYPE_IPV4, TYPE_ARP, TYPE_IPV6, [0x81, 0]][usize::from(kind)]);
            }
            let _ = guard().permits(&front);
        }
    }
}
