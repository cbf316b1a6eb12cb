//! IEEE 802.1Q tags. An instance in a VLAN neither sends nor receives any: its backend adds and removes them.

use crate::vnet_header::VnetHeader;

/// Length of a tag.
pub const TAG_BYTES: usize = 4;
/// The same for offsets in headers.
const TAG_BYTES_U16: u16 = 4;
const _: () = assert!(TAG_BYTES == TAG_BYTES_U16 as usize);
/// Where in a frame it lies: behind the addresses.
pub const TAG_AT: usize = 12;
/// The numbers that a VLAN may have.
pub const NUMBERS: std::ops::RangeInclusive<u16> = 1..=4094;

const TYPE_TAGGED: [u8; 2] = [0x81, 0x00];
/// IEEE 802.1ad: a provider's tag in front of the customer's.
const TYPE_PROVIDER: [u8; 2] = [0x88, 0xa8];
const NUMBER_MASK: u16 = 0xfff;

/// The tag of a VLAN, of the lowest priority.
pub fn tag(number: u16) -> [u8; TAG_BYTES] {
    let [high, low] = (number & NUMBER_MASK).to_be_bytes();
    [TYPE_TAGGED[0], TYPE_TAGGED[1], high, low]
}

/// Adds a tag to the frame of `bytes` bytes, its addresses at least, that lies in `bench` behind room for it, and returns it.
pub fn insert_tag(bench: &mut [u8], bytes: usize, vlan: u16) -> &[u8] {
    bench.copy_within(TAG_BYTES..TAG_BYTES + TAG_AT, 0);
    bench[TAG_AT..TAG_AT + TAG_BYTES].copy_from_slice(&tag(vlan));
    &bench[..bytes + TAG_BYTES]
}

/// The VLAN of a frame that has this where a tag would lie; none if it has no tag, or one that only tells its priority.
pub fn number(tag: [u8; TAG_BYTES]) -> Option<u16> {
    let [type_high, type_low, high, low] = tag;
    let number = u16::from_be_bytes([high, low]) & NUMBER_MASK;
    ([type_high, type_low] == TYPE_TAGGED && number != 0).then_some(number)
}

/// Whether a frame with this where its type lies has a tag, of whatever kind.
pub fn is_tagged(frame_type: [u8; 2]) -> bool {
    frame_type == TYPE_TAGGED || frame_type == TYPE_PROVIDER
}

/// The virtio-net header of a frame that is given a tag.
#[must_use]
pub fn tagged(header: VnetHeader) -> VnetHeader {
    moved(header, |offset| offset.saturating_add(TAG_BYTES_U16))
}

/// The virtio-net header of a frame whose tag is removed.
#[must_use]
pub fn untagged(header: VnetHeader) -> VnetHeader {
    moved(header, |offset| offset.saturating_sub(TAG_BYTES_U16))
}

fn moved(header: VnetHeader, by: impl Fn(u16) -> u16) -> VnetHeader {
    let mut moved = header;
    if header.needs_checksum() {
        moved.checksum_start = by(header.checksum_start);
    }
    if header.is_large() {
        moved.header_bytes = by(header.header_bytes);
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_tells_its_vlan() {
        for vlan in NUMBERS {
            assert_eq!(number(tag(vlan)), Some(vlan));
        }
        assert_eq!(tag(100), [0x81, 0, 0, 100]);
        assert_eq!(number([0x81, 0, 0xe0, 100]), Some(100), "priority 7");
        assert_eq!(number([0x81, 0, 0xe0, 0]), None, "a priority only");
        assert_eq!(number([0x08, 0, 0x45, 0]), None);
        assert!(is_tagged([0x81, 0]) && is_tagged([0x88, 0xa8]) && !is_tagged([8, 0]));
    }

    #[test]
    fn offsets_of_a_header_move_with_what_they_point_at() {
        // NEEDS_CSUM, TCPV4, headers of 54 bytes, segments of 1448, checksum at 34 + 16.
        let header = VnetHeader::parse([1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0]);
        let with_tag = tagged(header);
        assert_eq!((with_tag.checksum_start, with_tag.header_bytes), (38, 58));
        assert_eq!(with_tag.checksum_offset, header.checksum_offset);
        assert_eq!(untagged(with_tag), header);
        assert_eq!(tagged(VnetHeader::default()), VnetHeader::default());
    }
}
