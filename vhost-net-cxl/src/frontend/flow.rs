//! Telling flows apart, so that the frames of one stay in one queue and in order.

const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
const TYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const TYPE_VLAN: [u8; 2] = [0x81, 0x00];
const TCP: u8 = 6;
const UDP: u8 = 17;

/// What is looked at to tell flows apart: Ethernet, VLAN, IPv6 and port fields.
pub(super) const FLOW_BYTES: usize = 68;

/// A number that is equal for all frames of a flow, in both directions: of its addresses and, where it has them, its ports.
/// `frame` is the front of a frame, as much as is at hand.
pub(super) fn flow_hash(frame: &[u8]) -> u32 {
    let mut hash = Fnv::new();
    let mut kind_at = 12;
    if frame.get(kind_at..kind_at + 2) == Some(&TYPE_VLAN) {
        kind_at += 4;
    }
    let ip = frame.get(kind_at + 2..).unwrap_or_default();
    match frame.get(kind_at..kind_at + 2) {
        Some(kind) if kind == TYPE_IPV4 => hash_ipv4(ip, &mut hash),
        Some(kind) if kind == TYPE_IPV6 => hash_ipv6(ip, &mut hash),
        _ => hash.add_either_way(frame.get(..12).unwrap_or_default()),
    }
    hash.finish()
}

fn hash_ipv4(ip: &[u8], hash: &mut Fnv) {
    hash.add_either_way(ip.get(12..20).unwrap_or_default());
    let header_bytes = ip.first().map_or(0, |first| usize::from(first & 0x0f) * 4);
    // Later fragments carry no ports, so none of a fragmented packet may count.
    let fragment = ip.get(6..8).is_some_and(|field| field[0] & 0x3f != 0 || field[1] != 0);
    let has_ports = ip.get(9).is_some_and(|protocol| *protocol == TCP || *protocol == UDP);
    if has_ports && !fragment {
        hash.add_either_way(ip.get(header_bytes..header_bytes + 4).unwrap_or_default());
    }
}

fn hash_ipv6(ip: &[u8], hash: &mut Fnv) {
    hash.add_either_way(ip.get(8..40).unwrap_or_default());
    if ip.get(6).is_some_and(|next| *next == TCP || *next == UDP) {
        hash.add_either_way(ip.get(40..44).unwrap_or_default());
    }
}

/// Fowler–Noll–Vo, 32 bits: short and good enough to spread flows.
struct Fnv(u32);

impl Fnv {
    const fn new() -> Self {
        Self(0x811c_9dc5)
    }

    /// Adds two fields of the same length, the sender's and the receiver's, whichever comes first.
    fn add_either_way(&mut self, both: &[u8]) {
        let (one, other) = both.split_at(both.len() / 2);
        for (one, other) in one.iter().zip(other) {
            self.0 = (self.0 ^ u32::from(one ^ other)).wrapping_mul(0x0100_0193);
        }
    }

    /// Mixed as MurmurHash3 ends: a few low bits of it choose a queue or a NIC, and those of this hash hardly change from one even port to the
    /// next, as which a kernel hands them to connections to one server.
    const fn finish(&self) -> u32 {
        let mixed = (self.0 ^ self.0 >> 16).wrapping_mul(0x85eb_ca6b);
        let mixed = (mixed ^ mixed >> 13).wrapping_mul(0xc2b2_ae35);
        mixed ^ mixed >> 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn udp(source_port: u16, fragment: bool) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend(TYPE_IPV4);
        let mut ip = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, UDP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        ip[6] = if fragment { 0x20 } else { 0x40 };
        frame.extend(ip);
        frame.extend(source_port.to_be_bytes());
        frame.extend([0; 30]);
        frame
    }

    #[test]
    fn flows_spread_over_queues() {
        let queues: std::collections::BTreeSet<u32> =
            (0..64).map(|port| flow_hash(&udp(port, false)) % 4).collect();
        assert_eq!(queues.len(), 4);
    }

    #[test]
    fn connections_to_one_server_spread_over_queues() {
        // Linux connects from every other port, in a row.
        for first in (32_768..60_000).step_by(98) {
            for queues in [2, 3] {
                let mut flows = vec![0; queues as usize];
                for number in 0..24 {
                    flows[(flow_hash(&udp(first + 2 * number, false)) % queues) as usize] += 1;
                }
                assert!(flows.iter().all(|count| (1..=20).contains(count)), "{first}: {flows:?}");
            }
        }
    }

    #[test]
    fn fragments_of_a_packet_stay_together() {
        assert_eq!(flow_hash(&udp(1, true)), flow_hash(&udp(2, true)));
        assert_ne!(flow_hash(&udp(1, false)), flow_hash(&udp(2, false)));
    }

    #[test]
    fn both_directions_are_one_flow() {
        let there = udp(7, false);
        let mut back = there.clone();
        back[26..34].rotate_left(4);
        back[34..38].rotate_left(2);
        assert_ne!(there, back);
        assert_eq!(flow_hash(&there), flow_hash(&back));
        let mut there = vec![0; 12];
        there.extend(TYPE_IPV6);
        there.extend([0x60, 0, 0, 0, 0, 8, TCP, 64]);
        there.extend(0..36);
        let mut back = there.clone();
        back[22..54].rotate_left(16);
        back[54..58].rotate_left(2);
        assert_ne!(there, back);
        assert_eq!(flow_hash(&there), flow_hash(&back));
        let mut other: Vec<u8> = (0..20).collect();
        let there = flow_hash(&other);
        other[..12].rotate_left(6);
        assert_eq!(flow_hash(&other), there, "what is no IP as well");
    }

    proptest! {
        #[test]
        fn any_bytes_have_a_hash(frame: Vec<u8>) {
            let _ = flow_hash(&frame);
        }
    }
}
