//! The few fields of an Ethernet frame that the engine looks at, and the frame by which a MAC is borrowed.

use pod_protocol::ids::MacAddress;

/// Length of the shortest frame on a wire, without its check sequence.
pub const FRAME_BYTES_MIN: usize = 60;
const TYPE_RARP: [u8; 2] = [0x80, 0x35];

/// The addresses at the front of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// To whom.
    pub destination: MacAddress,
    /// From whom.
    pub source: MacAddress,
}

impl Addresses {
    /// Bytes that have to be at hand.
    pub const BYTES: usize = 12;

    /// Reads the addresses at the front of `frame`.
    #[inline]
    pub fn parse(frame: [u8; Self::BYTES]) -> Self {
        let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5] = frame;
        Self {
            destination: MacAddress::new([d0, d1, d2, d3, d4, d5]),
            source: MacAddress::new([s0, s1, s2, s3, s4, s5]),
        }
    }

    /// Whether the frame is between switches: for the nearest bridge alone, 01:80:C2:00:00:00 to 0F (IEEE 802.1Q, table 8-1), to which spanning
    /// tree, pause frames, LACP and LLDP go, and which no bridge passes on; or to where Cisco's switches send the same, 01:00:0C:CC:CC:CC (CDP, VTP,
    /// DTP, PAgP, UDLD) and :CD (spanning tree of a VLAN).
    #[inline]
    pub fn is_reserved(&self) -> bool {
        let [front @ .., last] = self.destination.bytes();
        match front {
            [0x01, 0x80, 0xc2, 0, 0] => last < 0x10,
            [0x01, 0, 0x0c, 0xcc, 0xcc] => matches!(last, 0xcc | 0xcd),
            _ => false,
        }
    }

    /// Whether the frame goes to a group: broadcast or multicast.
    #[inline]
    pub fn is_flooded(&self) -> bool {
        self.destination.is_multicast()
    }
}

/// The frame that moves `mac` to the port it is sent from: a broadcast reverse ARP request, as hypervisors send it
/// after a migration. Switches learn from its source, hosts ignore its content.
pub fn announcement(mac: MacAddress) -> [u8; FRAME_BYTES_MIN] {
    let mac = mac.bytes();
    let mut frame = [0; FRAME_BYTES_MIN];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac);
    frame[12..14].copy_from_slice(&TYPE_RARP);
    // Hardware type Ethernet, protocol IPv4, address lengths, operation 3: "request reverse".
    frame[14..22].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac);
    frame[32..38].copy_from_slice(&mac);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_floods_and_bears_the_borrowed_address() {
        let mac = MacAddress::new([2, 0, 0, 0, 0, 9]);
        let frame = announcement(mac);
        let mut front = [0; Addresses::BYTES];
        front.copy_from_slice(&frame[..Addresses::BYTES]);
        let addresses = Addresses::parse(front);
        assert!(addresses.is_flooded());
        assert_eq!(addresses.source, mac);
        assert_eq!(frame[12..14], [0x80, 0x35]);
    }

    #[test]
    fn what_is_for_the_nearest_bridge_is_known() {
        let to = |destination: [u8; 6]| Addresses {
            destination: MacAddress::new(destination),
            source: MacAddress::new([2, 0, 0, 0, 0, 1]),
        };
        for last in 0..=0x0f {
            assert!(to([1, 0x80, 0xc2, 0, 0, last]).is_reserved());
        }
        for last in [0xcc, 0xcd] {
            assert!(to([1, 0, 0x0c, 0xcc, 0xcc, last]).is_reserved());
        }
        for other in [
            [1, 0x80, 0xc2, 0, 0, 0x10],
            [1, 0x80, 0xc2, 0, 1, 0],
            [0, 0x80, 0xc2, 0, 0, 0],
            [1, 0, 0x0c, 0xcc, 0xcc, 0xce],
            [1, 0, 0x0c, 0xcc, 0xcd, 0xcc],
            [0xff; 6],
        ] {
            assert!(!to(other).is_reserved());
        }
    }

    #[test]
    fn a_unicast_frame_does_not_flood() {
        let addresses = Addresses::parse([2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
        assert!(!addresses.is_flooded());
        assert_eq!(addresses.destination, MacAddress::new([2, 0, 0, 0, 0, 1]));
    }
}
