//! What a frontend may send to a network backend.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cxl_pool::simulated::SimulatedPool;
use cxl_pool::{Area, ByteOffset, HostId, LineCount, LineOffset, Memory as _};
use pod_protocol::ids::MacAddress;
use pod_protocol::objects::RegistrationState;
use vhost_net_cxl::backend::RegistrationIndex;
use vhost_net_cxl::backend::switch::Switch;
use vhost_net_cxl::ethernet::Addresses;
use vhost_net_cxl::finish::{FRAMES_MAX, Finish, HEADERS_BYTES_MAX};
use vhost_net_cxl::message::NetMessage;
use vhost_net_cxl::offloads::Offloads;
use vhost_net_cxl::scattered::{self, PIECES_MAX};
use vhost_net_cxl::source_guard::{FRONT_BYTES, SourceGuard};
use vhost_net_cxl::vlan::{self, TAG_AT, TAG_BYTES};
use vhost_net_cxl::vnet_header::{ETHERNET_BYTES, SEGMENTS_MAX, VnetHeader};

use super::input::Input;

/// Two words of a message; offloads, MTU and length of a frame; its virtio-net header.
pub fn net_message(data: &[u8]) {
    let mut input = Input(data);
    let words = input.words::<2>();
    if let Some(message) = NetMessage::decode(words) {
        assert_eq!(message.encode(), words.map(|word| word & !(1 << 63)));
        let area = Area::new(LineOffset::new(4096), LineCount::new(4096));
        if area.contains(message.line.bytes(), u64::from(message.bytes)) {
            let end = message.line.get() * 64 + u64::from(message.bytes);
            assert!(message.line >= area.start && end <= area.end().get() * 64);
        }
    }
    let allowed = Offloads::from_bits(input.u32());
    let (mtu, frame_bytes) = (input.u16(), input.u32());
    let header = VnetHeader::parse(input.array());
    assert_eq!(VnetHeader::parse(header.to_bytes()), header);
    let Ok(clean) = header.check(frame_bytes, mtu, allowed) else { return };
    assert!(frame_bytes >= ETHERNET_BYTES);
    assert!(allowed.contains(clean.required()));
    assert!(clean.is_large() || frame_bytes <= u32::from(mtu) + 22);
    if clean.needs_checksum() {
        assert!(u32::from(clean.checksum_start) + u32::from(clean.checksum_offset) + 2 <= frame_bytes);
    }
    if clean.is_large() {
        assert!(clean.needs_checksum() && clean.gso_bytes > 0 && clean.gso_bytes <= mtu);
        assert!(u32::from(clean.header_bytes) <= frame_bytes);
    }
    let cost = clean.wire_cost(frame_bytes);
    assert!((1..=u64::from(SEGMENTS_MAX)).contains(&cost.frames) && cost.bytes >= u64::from(frame_bytes));
    // What is clean stays as it is: the backend relies on that to find who did not check.
    assert_eq!(clean.check(frame_bytes, mtu, allowed), Ok(clean));
}

/// A virtio-net header, an MTU, how long the frame is beyond what is given, and the frame.
pub fn finish(data: &[u8]) {
    let mut input = Input(data);
    let header = VnetHeader::parse(input.array());
    let (mtu, more) = (input.u16(), u32::from(input.u16()));
    let front = input.some(2048);
    let given = u32::try_from(front.len()).expect("short");
    let frame_bytes = given + more;
    let Ok(header) = header.check(frame_bytes, mtu, Offloads::ALL) else { return };
    let Ok(finish) = Finish::plan(header, &front[..front.len().min(HEADERS_BYTES_MAX)], frame_bytes) else {
        return;
    };
    let frames = finish.frames();
    assert!((1..=FRAMES_MAX).contains(&frames));
    let mut out = vec![0; 80_000];
    let mut next = None;
    for index in 0..frames {
        let mut copied = None;
        let frame = finish.build(index, &mut out, |at, to| {
            let bytes = u32::try_from(to.len()).expect("short");
            assert!(at + bytes <= frame_bytes, "it reads behind the frame");
            copied = Some((at, bytes));
            to.fill(7);
        });
        assert_eq!(frame.len(), finish.frame_bytes(index) as usize);
        let (at, bytes) = copied.expect("something is copied, were it nothing");
        assert!(next.is_none_or(|next| next == at), "the payload has a gap");
        assert!(frames == 1 || bytes <= u32::from(header.gso_bytes));
        next = Some(at + bytes);
    }
    assert_eq!(next, Some(frame_bytes), "the payload's end is missing");
}

/// How long a packet is, and the list of where its payload lies in an instance's memory, lines 32 to 63 of the pool.
pub fn scattered(data: &[u8]) {
    const BUFFER: ByteOffset = ByteOffset::new(512);
    let ram = Area::new(LineOffset::new(32), LineCount::new(32));
    let mut input = Input(data);
    let bytes = input.u32();
    let memory = SimulatedPool::new(1, 4096).host(HostId::new(1));
    let longest = usize::try_from(scattered::LIST_BYTES_MAX).expect("short");
    memory.write(scattered::list(BUFFER), input.some(longest));
    let mut pieces = Vec::new();
    let whole = scattered::pieces(&memory, BUFFER, bytes, ram, |piece| pieces.push(piece));
    assert!(pieces.len() <= PIECES_MAX, "the batch has no room for more");
    // Also of a packet that is refused: they may be in the batch already.
    let Some((front, rest)) = pieces.split_first() else { return assert!(!whole) };
    assert_eq!((front.at, front.bytes), (BUFFER, scattered::FRONT_BYTES));
    assert!(rest.iter().all(|piece| piece.bytes > 0 && ram.contains(piece.at, piece.bytes.into())));
    let listed: u64 = pieces.iter().map(|piece| u64::from(piece.bytes)).sum();
    assert!(listed <= u64::from(bytes) && whole == (listed == u64::from(bytes)));
    // The first line of a list is invalidated in any case, the others where it is long.
    assert!(!whole || rest.len() <= 4 || scattered::is_long(&memory, BUFFER, bytes));
}

/// The number of a VLAN, a virtio-net header, an MTU, and a frame that gets a tag and loses it again.
pub fn tag(data: &[u8]) {
    let mut input = Input(data);
    let number = 1 + input.u16() % 4094;
    let header = VnetHeader::parse(input.array());
    let mtu = input.u16();
    let frame = input.some(1 << 17);
    let bytes = u32::try_from(frame.len()).expect("short");
    let Ok(clean) = header.check(bytes, mtu, Offloads::ALL) else { return };
    let tagged = vlan::tagged(clean);
    let longer = bytes + u32::try_from(TAG_BYTES).expect("few");
    if tagged.needs_checksum() {
        assert!(u32::from(tagged.checksum_start) + u32::from(tagged.checksum_offset) + 2 <= longer);
    }
    assert!(!tagged.is_large() || u32::from(tagged.header_bytes) <= longer);
    assert_eq!(tagged.required(), clean.required());
    if clean.checksum_start.max(clean.header_bytes) < u16::MAX - 4 {
        assert_eq!(vlan::untagged(tagged), clean);
    }
    let mut bench = [&[0; TAG_BYTES][..], frame].concat();
    let with_tag = vlan::insert_tag(&mut bench, frame.len(), number);
    assert_eq!(with_tag.len(), longer as usize);
    let (addresses, rest) = with_tag.split_at(TAG_AT);
    let (tag, rest) = rest.split_first_chunk().expect("a tag");
    assert_eq!(vlan::number(*tag), Some(number));
    assert!(vlan::is_tagged([tag[0], tag[1]]));
    assert!([addresses, rest].concat() == frame, "it is another frame without its tag");
}

/// The front of a frame of an instance whose addresses are known.
pub fn source_guard(data: &[u8]) {
    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
    let v4 = Ipv4Addr::new(10, 0, 0, 1);
    let v6 = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);
    let link_local = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, 1);
    let own = [IpAddr::V4(v4), IpAddr::V6(v6)];
    let guard =
        |addresses: &[IpAddr]| SourceGuard::new(MacAddress::new(MAC), addresses).expect("there are some");
    let front = Input(data).some(FRONT_BYTES);
    let permitted = guard(&own).permits(front);
    // An address more never makes a frame worse.
    let more = [own[0], own[1], IpAddr::V4(Ipv4Addr::LOCALHOST)];
    assert!(!permitted || guard(&more).permits(front));
    if !permitted {
        return;
    }
    let network = &front[14..];
    match [front[12], front[13]] {
        [0x08, 0x00] => assert!(network[12..16] == v4.octets() || network[12..16] == [0; 4]),
        [0x08, 0x06] => {
            assert!(network[8..14] == MAC);
            assert!(network[14..18] == v4.octets() || network[14..18] == [0; 4]);
        }
        [0x86, 0xdd] => {
            let source = &network[8..24];
            assert!(source == v6.octets() || source == link_local.octets() || source == [0; 16]);
            // Neighbour discovery for others, and from routers, right behind the header.
            if network[6] == 58 && network.len() >= 64 {
                let target = &network[48..64];
                assert!(!matches!(network[40], 134 | 137));
                assert!(network[40] != 136 || target == v6.octets() || target == link_local.octets());
            }
        }
        other => panic!("frames of type {other:02x?} cannot be judged"),
    }
}

/// A choice of few addresses, so that they meet, groups included.
fn address(code: u8) -> MacAddress {
    match code {
        0xff => MacAddress::BROADCAST,
        _ if code & 0x80 != 0 => MacAddress::new([1, 0, 0x5e, 0, 0, code]),
        _ => MacAddress::new([2, 0, 0, 0, 0, code % 8]),
    }
}

/// Few of them too, and mostly none.
fn vlan(code: u8) -> Option<u16> {
    [None, None, Some(10), Some(20)][usize::from(code % 4)]
}

/// Registrations that come, change and go, and frames between them, in VLANs and in none: of three bytes each.
pub fn switch(data: &[u8]) {
    let mut switch = Switch::new();
    let mut known = [None; 256];
    let mut receivers = Vec::new();
    let mut input = Input(data.get(..3 * 512).unwrap_or(data));
    while !input.is_empty() {
        let [action, a, b] = input.array();
        let index = RegistrationIndex::new(a.into()).expect("below the limit");
        let vlan = vlan(action / 5);
        let state = match action % 5 {
            0 => Some(RegistrationState::Active),
            1 => Some(RegistrationState::Standby),
            2 => Some(RegistrationState::Draining),
            3 => {
                switch.remove(index);
                known[index.get()] = None;
                continue;
            }
            _ => None,
        };
        if let Some(state) = state {
            // An instance's own address is never a group's: the controller gives out no others.
            let mac = address(b & 0x7f);
            switch.set(index, mac, vlan, state);
            known[index.get()] = Some((mac, vlan, state));
            continue;
        }
        let tagged = known
            .iter()
            .flatten()
            .any(|(_, vlan, state)| vlan.is_some() && *state != RegistrationState::Standby);
        assert!(tagged || !switch.has_vlans(), "frames are looked at for tags that nobody here has");
        let mut front = [0; Addresses::BYTES];
        front[..6].copy_from_slice(&address(a).bytes());
        front[6..].copy_from_slice(&address(b).bytes());
        let frame = Addresses::parse(front);
        let to_wire = switch.route(frame, vlan, &mut receivers);
        for receiver in &receivers {
            let (mac, of, state) = known[receiver.get()].expect("receivers are registered");
            assert_ne!(state, RegistrationState::Standby, "those on standby receive nothing");
            assert_eq!(of, vlan, "VLANs are apart");
            assert_ne!(mac, frame.source, "nobody receives its own frame");
            assert!(frame.is_flooded() || mac == frame.destination, "frames of others stay theirs");
        }
        let mut once: Vec<_> = receivers.iter().map(|receiver| receiver.get()).collect();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), receivers.len(), "nobody receives a frame twice");
        assert!(frame.is_flooded() || receivers.len() <= 1);
        assert_eq!(to_wire, frame.is_flooded() || receivers.is_empty() && frame.destination != frame.source);
    }
}
