use proptest::prelude::*;

use super::*;
use crate::offloads::Offloads;

/// A packet as a guest would send it.
#[derive(Clone, Debug)]
struct Packet {
    udp: bool,
    version_6: bool,
    vlan_tags: usize,
    /// IPv4 options, or an IPv6 destination-options header.
    network_options: bool,
    tcp_options: usize,
    flags: u8,
    identification: u16,
    sequence: u32,
    payload: Vec<u8>,
    segment_bytes: u16,
}

impl Packet {
    /// The frame, its virtio-net header, and where network and transport headers begin.
    fn build(&self) -> (Vec<u8>, VnetHeader, usize, usize) {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        for _ in 0..self.vlan_tags {
            frame.extend([0x81, 0x00, 0x00, 0x07]);
        }
        frame.extend(if self.version_6 { [0x86, 0xdd] } else { [8, 0] });
        let network_at = frame.len();
        let protocol = if self.udp { 17 } else { 6 };
        let transport = self.transport();
        let rest = transport.len() + self.payload.len();
        if self.version_6 {
            let extension: &[u8] = if self.network_options { &[protocol, 0, 1, 4, 0, 0, 0, 0] } else { &[] };
            frame.extend([0x60, 0, 0, 0]);
            frame.extend(u16::try_from(extension.len() + rest).unwrap().to_be_bytes());
            frame.extend([if self.network_options { 60 } else { protocol }, 64]);
            frame.extend((0..32).map(|byte| 0x20 + byte));
            frame.extend(extension);
        } else {
            let options: &[u8] = if self.network_options { &[1, 1, 1, 0] } else { &[] };
            frame.push(0x45 + u8::try_from(options.len() / 4).unwrap());
            frame.push(0);
            frame.extend(u16::try_from(20 + options.len() + rest).unwrap().to_be_bytes());
            frame.extend(self.identification.to_be_bytes());
            frame.extend([0x40, 0, 64, protocol, 0xde, 0xad, 10, 0, 0, 1, 10, 0, 0, 2]);
            frame.extend(options);
        }
        let transport_at = frame.len();
        frame.extend(&transport);
        frame.extend(&self.payload);
        let header = VnetHeader {
            flags: 1,
            gso_type: match (self.udp, self.version_6) {
                (true, _) => 5,
                (_, true) => 4,
                _ => 1,
            },
            header_bytes: u16::try_from(transport_at + transport.len()).unwrap(),
            gso_bytes: self.segment_bytes,
            checksum_start: u16::try_from(transport_at).unwrap(),
            checksum_offset: if self.udp { 6 } else { 16 },
            buffers: 0,
        };
        (frame, header, network_at, transport_at)
    }

    fn transport(&self) -> Vec<u8> {
        let mut bytes = vec![0x30, 0x39, 0, 80];
        if self.udp {
            bytes.extend(u16::try_from(8 + self.payload.len()).unwrap().to_be_bytes());
            bytes.extend([0xbe, 0xef]);
        } else {
            bytes.extend(self.sequence.to_be_bytes());
            bytes.extend([0, 0, 0, 9]);
            bytes.push(u8::try_from(5 + self.tcp_options).unwrap() << 4);
            bytes.push(self.flags);
            bytes.extend([0x10, 0, 0xbe, 0xef, 0, 0]);
            bytes.extend(std::iter::repeat_n(1, 4 * self.tcp_options));
        }
        bytes
    }
}

fn packet() -> impl Strategy<Value = Packet> {
    let shape = (any::<bool>(), any::<bool>(), 0..3_usize, any::<bool>(), 0..11_usize, any::<u8>());
    let numbers = (any::<u16>(), any::<u32>(), prop::collection::vec(any::<u8>(), 0..20_000), 100..9000_u16);
    (shape, numbers).prop_map(|(shape, numbers)| {
        let (udp, version_6, vlan_tags, network_options, tcp_options, flags) = shape;
        let (identification, sequence, payload, segment_bytes) = numbers;
        Packet {
            udp,
            version_6,
            vlan_tags,
            network_options,
            tcp_options,
            flags,
            identification,
            sequence,
            payload,
            segment_bytes,
        }
    })
}

/// All frames of a packet.
fn frames(frame: &[u8], header: VnetHeader) -> Result<Vec<Vec<u8>>, FinishFault> {
    let bytes = u32::try_from(frame.len()).unwrap();
    let header = header.check(bytes, 9000, Offloads::ALL).expect("a good virtio-net header");
    let front = &frame[..frame.len().min(HEADERS_BYTES_MAX)];
    let finish = Finish::plan(header, front, bytes)?;
    let mut out = vec![0xaa; 70_000];
    let read = |at: u32, to: &mut [u8]| to.copy_from_slice(&frame[at as usize..][..to.len()]);
    Ok((0..finish.frames()).map(|index| finish.build(index, &mut out, read).to_vec()).collect())
}

/// A receiver's check, written down once more: word by word, with the pseudo header spelt out.
fn transport_checksum_is_right(frame: &[u8], network_at: usize, transport_at: usize) -> bool {
    let segment = &frame[transport_at..];
    let version_6 = frame[network_at] >> 4 == 6;
    let network = &frame[network_at..];
    let protocol = if version_6 && network[6] == 60 {
        network[40]
    } else if version_6 {
        network[6]
    } else {
        network[9]
    };
    let mut bytes = if version_6 { network[8..40].to_vec() } else { network[12..20].to_vec() };
    bytes.extend(u32::try_from(segment.len()).unwrap().to_be_bytes());
    bytes.extend([0, 0, 0, protocol]);
    bytes.extend(segment);
    ones_complement(&bytes) == 0xffff
}

fn ones_complement(bytes: &[u8]) -> u32 {
    let mut sum = 0_u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_frames_of_a_packet_are_what_a_nic_would_send(packet in packet()) {
        let (whole, header, network_at, transport_at) = packet.build();
        let headers_bytes = transport_at + packet.transport().len();
        let cut = frames(&whole, header).expect("few frames");
        let segment_bytes = usize::from(packet.segment_bytes);
        prop_assert_eq!(cut.len(), packet.payload.len().div_ceil(segment_bytes).max(1));

        let payload: Vec<u8> = cut.iter().flat_map(|frame| &frame[headers_bytes..]).copied().collect();
        prop_assert_eq!(&payload, &packet.payload);

        let mut sequence = packet.sequence;
        for (index, frame) in cut.iter().enumerate() {
            let (first, last) = (index == 0, index + 1 == cut.len());
            let bytes = frame.len() - headers_bytes;
            prop_assert!(last || bytes == segment_bytes);
            prop_assert_eq!(&frame[..network_at], &whole[..network_at], "Ethernet and VLAN headers stay");
            let network = &frame[network_at..transport_at];
            if packet.version_6 {
                prop_assert_eq!(usize::from(be16(network, 4)), frame.len() - network_at - 40);
                prop_assert_eq!(&network[6..], &whole[network_at + 6..transport_at]);
            } else {
                prop_assert_eq!(usize::from(be16(network, 2)), frame.len() - network_at);
                let expected = packet.identification.wrapping_add(u16::try_from(index).unwrap());
                prop_assert_eq!(be16(network, 4), expected);
                prop_assert_eq!(ones_complement(network), 0xffff);
                prop_assert_eq!(&network[6..10], &whole[network_at + 6..network_at + 10]);
            }
            prop_assert!(transport_checksum_is_right(frame, network_at, transport_at));
            let segment = &frame[transport_at..];
            prop_assert_eq!(&segment[..4], &whole[transport_at..transport_at + 4], "ports stay");
            if packet.udp {
                prop_assert_eq!(usize::from(be16(segment, 4)), segment.len());
                prop_assert!(be16(segment, 6) != 0, "zero would say that there is no checksum");
                continue;
            }
            let got = u32::from_be_bytes([segment[4], segment[5], segment[6], segment[7]]);
            prop_assert_eq!(got, sequence);
            sequence = sequence.wrapping_add(u32::try_from(bytes).unwrap());
            let mut flags = packet.flags;
            if !last {
                flags &= !(TCP_FIN | TCP_PSH);
            }
            if !first {
                flags &= !TCP_CWR;
            }
            prop_assert_eq!(segment[13], flags);
            prop_assert_eq!(&segment[20..headers_bytes - transport_at], &packet.transport()[20..], "options stay");
        }
    }

    #[test]
    fn a_lone_checksum_is_completed_and_nothing_else_changes(packet in packet()) {
        let (mut whole, header, network_at, transport_at) = packet.build();
        whole.truncate(9000);
        let bytes = u32::try_from(whole.len()).unwrap();
        let header = VnetHeader { gso_type: 0, gso_bytes: 0, ..header };
        let field = transport_at + usize::from(header.checksum_offset);
        // The pseudo header's sum, as the sender leaves it.
        let mut pseudo = if packet.version_6 { whole[network_at + 8..][..32].to_vec() } else { whole[network_at + 12..][..8].to_vec() };
        pseudo.extend(u32::try_from(whole.len() - transport_at).unwrap().to_be_bytes());
        pseudo.extend([0, 0, 0, if packet.udp { 17 } else { 6 }]);
        let sum = u16::try_from(ones_complement(&pseudo)).unwrap();
        whole[field..field + 2].copy_from_slice(&sum.to_be_bytes());
        let header = header.check(bytes, 9000, Offloads::ALL).expect("good");
        let finish = Finish::plan(header, &whole, bytes).expect("always possible");
        prop_assert_eq!(finish.frames(), 1);
        let mut out = vec![0; 70_000];
        let read = |at: u32, to: &mut [u8]| to.copy_from_slice(&whole[at as usize..][..to.len()]);
        let done = finish.build(0, &mut out, read).to_vec();
        prop_assert!(transport_checksum_is_right(&done, network_at, transport_at));
        let mut expected = whole.clone();
        expected[field..field + 2].copy_from_slice(&done[field..field + 2]);
        prop_assert_eq!(done, expected);
    }

    #[test]
    fn any_frame_is_cut_within_bounds_or_refused(
        front in prop::collection::vec(any::<u8>(), 14..300), more in 0..66_000_u32, raw: [u8; 12], kind in 0..6_u8,
    ) {
        let frame_bytes = u32::try_from(front.len()).unwrap() + more;
        let mut raw = raw;
        raw[0] = 1;
        raw[1] = kind;
        let Ok(header) = VnetHeader::parse(raw).check(frame_bytes, 9000, Offloads::ALL) else { return Ok(()) };
        let seen = &front[..front.len().min(HEADERS_BYTES_MAX)];
        let Ok(finish) = Finish::plan(header, seen, frame_bytes) else { return Ok(()) };
        let mut out = vec![0; 70_000];
        prop_assert!(finish.frames() <= FRAMES_MAX);
        for index in 0..finish.frames() {
            finish.build(index, &mut out, |at, to| {
                assert!(u64::from(at) + to.len() as u64 <= u64::from(frame_bytes));
                to.fill(0);
            });
        }
    }
}

fn plain() -> Packet {
    Packet {
        udp: false,
        version_6: false,
        vlan_tags: 0,
        network_options: false,
        tcp_options: 3,
        flags: 0x18,
        identification: 7,
        sequence: 1000,
        payload: vec![5; 4000],
        segment_bytes: 1448,
    }
}

#[test]
fn headers_that_contradict_the_virtio_net_header_are_refused() {
    let (frame, header, network_at, transport_at) = plain().build();
    let with = |at: usize, value: u8| {
        let mut frame = frame.clone();
        frame[at] = value;
        frames(&frame, header).map(|frames| frames.len())
    };
    assert_eq!(with(0, 2), Ok(3));
    assert_eq!(with(12, 0x86), Err(FinishFault::Headers), "neither IPv4 nor IPv6");
    assert_eq!(with(network_at, 0x65), Err(FinishFault::Headers), "IPv6 in an IPv4 frame");
    assert_eq!(with(network_at, 0x46), Err(FinishFault::Headers), "an IP header of another length");
    assert_eq!(with(network_at + 9, 17), Err(FinishFault::Headers), "UDP");
    assert_eq!(with(network_at + 6, 0x20), Err(FinishFault::Fragment));
    assert_eq!(with(network_at + 7, 1), Err(FinishFault::Fragment));
    assert_eq!(with(transport_at + 12, 0x40), Err(FinishFault::Headers), "a TCP header of 16 bytes");
    let (six, header, ..) = Packet { version_6: true, ..plain() }.build();
    assert_eq!(frames(&six, VnetHeader { gso_type: 1, ..header }), Err(FinishFault::Headers));
    let (routed, header, network_at, _) =
        Packet { version_6: true, network_options: true, ..plain() }.build();
    let mut routed = routed;
    routed[network_at + 6] = 43;
    assert_eq!(frames(&routed, header), Err(FinishFault::Headers), "segments are left");
    routed[network_at + 6] = 44;
    assert_eq!(frames(&routed, header), Err(FinishFault::Fragment));
}

#[test]
fn tiny_segments_without_end_are_refused() {
    let packet = Packet { payload: vec![0; 20_000], segment_bytes: 8, ..plain() };
    let (frame, header, ..) = packet.build();
    let bytes = u32::try_from(frame.len()).unwrap();
    // Nobody should have let its header pass.
    assert!(header.check(bytes, 9000, Offloads::ALL).is_err());
    let finish = Finish::plan(header, &frame[..HEADERS_BYTES_MAX], bytes);
    assert_eq!(finish.map(|finish| finish.frames()), Err(FinishFault::TooMany));
}
