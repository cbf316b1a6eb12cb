//! What a frontend may ask for. Frontends are trusted as little as guests.

use cxl_pool::LineCount;
use pod_protocol::objects::VolumeObject;

use crate::intent_log;
use crate::message::{Operation, Request, Status};
use crate::segments::{SEGMENTS_MAX, Segment, list_bytes};
use crate::ssd::Geometry;

/// Why a request is not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rejected(pub Status);

/// Checks a request of a holder whose lease and generation were found to be the volume's, and whose write-intent log begins
/// there on the device if it has one. If its data lies in several segments, these are what was read from its list. Returns where on
/// the device the request begins.
pub fn check(
    request: &Request,
    segments: &[Segment],
    volume: &VolumeObject,
    intent_log_start: Option<u64>,
    device: Geometry,
) -> Result<u64, Rejected> {
    let refused = Rejected(Status::IoError);
    if request.operation.writes() && volume.read_only {
        return Err(refused);
    }
    if request.operation == Operation::Flush {
        return Ok(0);
    }
    let block = u64::from(device.block_bytes);
    let (offset, length) = (request.offset_bytes, request.length_bytes);
    let end = offset.checked_add(length).ok_or(refused)?;
    let size_bytes = if request.intent_log { intent_log::BYTES } else { volume.size_bytes };
    if length == 0 || end > size_bytes || !offset.is_multiple_of(block) || !length.is_multiple_of(block) {
        return Err(refused);
    }
    if request.segments > 0 {
        // The device is given each by itself.
        let allowed = |segment: &Segment| {
            u64::from(segment.bytes).is_multiple_of(block)
                && volume.may_hold(segment.start, segment.bytes.into())
        };
        if segments.len() != usize::from(request.segments) || !segments.iter().all(allowed) {
            return Err(refused);
        }
    } else if request.operation.has_data() {
        // Whole lines: what lies behind the data in its last line belongs to the buffer as well.
        let bytes = LineCount::covering(length).bytes();
        if !volume.may_hold(request.data_start(), bytes) {
            return Err(refused);
        }
    }
    let start_bytes = match intent_log_start {
        _ if !request.intent_log => volume.start_bytes,
        Some(start_bytes) => start_bytes,
        None => return Err(Rejected(Status::Unsupported)),
    };
    let start = start_bytes.checked_add(offset).ok_or(refused)?;
    let device_end = start_bytes.checked_add(end).ok_or(refused)?;
    if device_end > device.size_bytes { Err(refused) } else { Ok(start) }
}

/// Whether a request makes the device read its buffer, which is in one piece, and the buffer is where it may be.
pub(super) fn reads_buffer_of(request: &Request, volume: &VolumeObject) -> bool {
    request.operation == Operation::Write
        && request.segments == 0
        && volume.may_hold(request.data_start(), request.data_lines().bytes())
}

/// Whether a request has a list, and the list is where it may be: where the frontend writes, and not the guest.
pub(super) fn has_list_of(request: &Request, volume: &VolumeObject) -> bool {
    request.segments > 0
        && usize::from(request.segments) <= SEGMENTS_MAX
        && volume.data_area.contains(request.data_start(), list_bytes(request.segments).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Charge, Holder, Tag};
    use cxl_pool::{Area, LineOffset};
    use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId, PlaceNumber, VolumeId};
    use pod_protocol::objects::{Priority, Qos};
    use proptest::prelude::*;

    const DEVICE: Geometry = Geometry { size_bytes: 1 << 30, block_bytes: 512 };

    fn volume() -> VolumeObject {
        VolumeObject {
            lease: LeaseId::new(1).unwrap(),
            place: PlaceNumber::FIRST,
            volume: VolumeId::new(1),
            ssd: "ssd0".to_owned(),
            start_bytes: 1 << 20,
            size_bytes: 1 << 20,
            read_only: false,
            generation: LeaseGeneration::new(1),
            channel: ChannelId::new(1),
            data_area: Area::new(LineOffset::new(1024), LineCount::new(1024)),
            ram_area: None,
            instance: InstanceId::new(1),
            qos: Qos::default(),
            priority: Priority::DEFAULT,
        }
    }

    fn request(operation: Operation, offset_bytes: u64, length_bytes: u64, line: u64) -> Request {
        Request {
            holder: Holder {
                lease: LeaseId::new(1).unwrap(),
                place: PlaceNumber::FIRST,
                generation: LeaseGeneration::new(1),
            },
            tag: Tag::new(0),
            operation,
            force_unit_access: false,
            may_unmap: false,
            intent_log: false,
            marked: false,
            charge: Charge::Whole,
            offset_bytes,
            length_bytes,
            data: LineOffset::new(line),
            segments: 0,
        }
    }

    #[test]
    fn the_edges_are_inside() {
        assert_eq!(
            check(&request(Operation::Read, 0, 4096, 1024), &[], &volume(), None, DEVICE),
            Ok(1 << 20)
        );
        let last = request(Operation::Write, (1 << 20) - 4096, 4096, 2048 - 64);
        assert_eq!(check(&last, &[], &volume(), None, DEVICE), Ok((2 << 20) - 4096));
        assert_eq!(
            check(&request(Operation::Flush, u64::MAX, u64::MAX, u64::MAX), &[], &volume(), None, DEVICE),
            Ok(0)
        );
    }

    #[test]
    fn the_instances_memory_is_as_good_as_its_data_area() {
        let ram_area = Some(Area::new(LineOffset::new(8192), LineCount::new(64)));
        let volume = VolumeObject { ram_area, ..volume() };
        let at = |line| check(&request(Operation::Read, 0, 4096, line), &[], &volume, None, DEVICE);
        assert_eq!((at(8192), at(1024)), (Ok(1 << 20), Ok(1 << 20)));
        for line in [8191, 8193, 4096, 2048] {
            assert!(at(line).is_err(), "{line}");
        }
    }

    #[test]
    fn beyond_the_edges_is_outside() {
        for (offset, length, line) in [
            (0, 0, 1024),
            (0, 4096, 1023),
            (0, 4096, 2048 - 63),
            ((1 << 20) - 512, 1024, 1024),
            (1 << 20, 512, 1024),
            (u64::MAX - 511, 512, 1024),
            (512, u64::MAX - 511, 1024),
            (1, 512, 1024),
            (0, 100, 1024),
            (0, 512, u64::MAX / 64),
            (0, 512, u64::MAX),
        ] {
            let request = request(Operation::Read, offset, length, line);
            assert!(check(&request, &[], &volume(), None, DEVICE).is_err(), "{request:?}");
        }
    }

    #[test]
    fn the_log_of_intents_is_another_place() {
        let of = |operation, offset, length, log| {
            let request = Request { intent_log: true, ..request(operation, offset, length, 1024) };
            check(&request, &[], &volume(), log, DEVICE)
        };
        assert_eq!(of(Operation::Write, 0, 4096, Some(262_144)), Ok(262_144));
        assert_eq!(of(Operation::Read, 3584, 512, Some(262_144)), Ok(265_728));
        assert_eq!(of(Operation::Read, 0, 4096, None), Err(Rejected(Status::Unsupported)));
        for (offset, length) in [(4096, 512), (512, 4096), (0, 8192), (0, 100), (u64::MAX - 511, 512)] {
            assert_eq!(of(Operation::Write, offset, length, Some(0)), Err(Rejected(Status::IoError)));
        }
    }

    #[test]
    fn a_read_only_volume_is_not_written() {
        let volume = VolumeObject { read_only: true, ..volume() };
        for operation in [Operation::Write, Operation::Discard, Operation::WriteZeroes] {
            assert!(check(&request(operation, 0, 512, 1024), &[], &volume, None, DEVICE).is_err());
        }
        assert!(check(&request(Operation::Read, 0, 512, 1024), &[], &volume, None, DEVICE).is_ok());
    }

    #[test]
    fn each_segment_is_checked() {
        let ram_area = Some(Area::new(LineOffset::new(8192), LineCount::new(64)));
        let volume = VolumeObject { ram_area, ..volume() };
        let list = |places: &[(u64, u32)]| -> Vec<Segment> {
            places
                .iter()
                .map(|&(line, bytes)| Segment { start: LineOffset::new(line).bytes(), bytes })
                .collect()
        };
        let at = |places: &[(u64, u32)], device| {
            let segments = list(places);
            let length = segments.iter().map(|segment| u64::from(segment.bytes)).sum();
            let count = u16::try_from(segments.len()).unwrap();
            let request = Request { segments: count, ..request(Operation::Read, 0, length, 1024) };
            check(&request, &segments, &volume, None, device)
        };
        assert_eq!(at(&[(8192, 512), (1024, 3584)], DEVICE), Ok(1 << 20));
        for outside in [(0, 512), (1023, 512), (8192 + 57, 512), (2048, 512), (u64::MAX / 64, 512)] {
            assert!(at(&[(8192, 512), outside], DEVICE).is_err(), "{outside:?}");
            assert!(at(&[outside, (8192, 512)], DEVICE).is_err(), "{outside:?}");
        }
        let blocks = Geometry { block_bytes: 4096, ..DEVICE };
        assert!(at(&[(1024, 4096), (1500, 4096)], blocks).is_ok());
        assert!(at(&[(1024, 512), (1500, 3584)], blocks).is_err(), "a device takes whole blocks");
        // What was no list has no segments.
        let unread = Request { segments: 2, ..request(Operation::Read, 0, 1024, 1024) };
        assert!(check(&unread, &[], &volume, None, DEVICE).is_err());
        assert!(check(&unread, &list(&[(1024, 1024)]), &volume, None, DEVICE).is_err());
    }

    #[test]
    fn a_list_lies_where_only_the_frontend_writes() {
        let ram_area = Some(Area::new(LineOffset::new(8192), LineCount::new(64)));
        let volume = VolumeObject { ram_area, ..volume() };
        let of = |segments, line| {
            let request = Request { segments, ..request(Operation::Read, 0, 4096, line) };
            (has_list_of(&request, &volume), reads_buffer_of(&request, &volume))
        };
        assert_eq!(of(2, 1024), (true, false));
        assert_eq!(of(255, 2048 - 64), (true, false));
        for (segments, line) in [(0, 1024), (255, 2048 - 63), (256, 1024), (2, 8192), (2, 0), (2, u64::MAX)] {
            assert!(!of(segments, line).0, "{segments} at {line}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_stays_inside(offset: u64, length: u64, line: u64, start: u64, size: u64, write: bool, log: bool) {
            let volume = VolumeObject { start_bytes: start, size_bytes: size, ..volume() };
            let operation = if write { Operation::Write } else { Operation::Read };
            if let Ok(at) = check(&request(operation, offset, length, line), &[], &volume, None, DEVICE) {
                prop_assert!(u128::from(at) >= u128::from(start));
                prop_assert!(u128::from(at) + u128::from(length) <= u128::from(start) + u128::from(size));
                prop_assert!(at + length <= DEVICE.size_bytes);
                prop_assert!(line >= 1024 && line * 64 + length <= 2048 * 64);
            }
        }
    }
}
