//! What a frontend may ask for. Frontends are trusted as little as guests.

use cxl_pool::LineCount;
use pod_protocol::objects::VolumeObject;

use crate::message::{Request, Status};
use crate::ssd::Geometry;

/// Why a request is not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rejected(pub Status);

/// Checks a request of a holder whose lease and generation were found to be the volume's. Returns where on the device
/// it begins.
pub fn check(request: &Request, volume: &VolumeObject, device: Geometry) -> Result<u64, Rejected> {
    let refused = Rejected(Status::IoError);
    if request.operation.writes() && volume.read_only {
        return Err(refused);
    }
    if request.operation == crate::message::Operation::Flush {
        return Ok(0);
    }
    let block = u64::from(device.block_bytes);
    let (offset, length) = (request.offset_bytes, request.length_bytes);
    let end = offset.checked_add(length).ok_or(refused)?;
    if length == 0
        || end > volume.size_bytes
        || !offset.is_multiple_of(block)
        || !length.is_multiple_of(block)
    {
        return Err(refused);
    }
    if request.operation.has_data() {
        // Whole lines: what lies behind the data in its last line belongs to the buffer as well.
        let bytes = LineCount::covering(length).bytes();
        if !volume.may_hold(request.data_start(), bytes) {
            return Err(refused);
        }
    }
    let start = volume.start_bytes.checked_add(offset).ok_or(refused)?;
    let device_end = volume.start_bytes.checked_add(end).ok_or(refused)?;
    if device_end > device.size_bytes { Err(refused) } else { Ok(start) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Holder, Operation, Tag};
    use cxl_pool::{Area, LineOffset};
    use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId, VolumeId};
    use pod_protocol::objects::Qos;
    use proptest::prelude::*;

    const DEVICE: Geometry = Geometry { size_bytes: 1 << 30, block_bytes: 512 };

    fn volume() -> VolumeObject {
        VolumeObject {
            lease: LeaseId::new(1).unwrap(),
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
        }
    }

    fn request(operation: Operation, offset_bytes: u64, length_bytes: u64, line: u64) -> Request {
        Request {
            holder: Holder { lease: LeaseId::new(1).unwrap(), generation: LeaseGeneration::new(1) },
            tag: Tag::new(0),
            operation,
            force_unit_access: false,
            may_unmap: false,
            offset_bytes,
            length_bytes,
            data: LineOffset::new(line),
        }
    }

    #[test]
    fn the_edges_are_inside() {
        assert_eq!(check(&request(Operation::Read, 0, 4096, 1024), &volume(), DEVICE), Ok(1 << 20));
        let last = request(Operation::Write, (1 << 20) - 4096, 4096, 2048 - 64);
        assert_eq!(check(&last, &volume(), DEVICE), Ok((2 << 20) - 4096));
        assert_eq!(check(&request(Operation::Flush, u64::MAX, u64::MAX, u64::MAX), &volume(), DEVICE), Ok(0));
    }

    #[test]
    fn the_instances_memory_is_as_good_as_its_data_area() {
        let ram_area = Some(Area::new(LineOffset::new(8192), LineCount::new(64)));
        let volume = VolumeObject { ram_area, ..volume() };
        let at = |line| check(&request(Operation::Read, 0, 4096, line), &volume, DEVICE);
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
            assert!(check(&request, &volume(), DEVICE).is_err(), "{request:?}");
        }
    }

    #[test]
    fn a_read_only_volume_is_not_written() {
        let volume = VolumeObject { read_only: true, ..volume() };
        for operation in [Operation::Write, Operation::Discard, Operation::WriteZeroes] {
            assert!(check(&request(operation, 0, 512, 1024), &volume, DEVICE).is_err());
        }
        assert!(check(&request(Operation::Read, 0, 512, 1024), &volume, DEVICE).is_ok());
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_stays_inside(offset: u64, length: u64, line: u64, start: u64, size: u64, write: bool) {
            let volume = VolumeObject { start_bytes: start, size_bytes: size, ..volume() };
            let operation = if write { Operation::Write } else { Operation::Read };
            if let Ok(at) = check(&request(operation, offset, length, line), &volume, DEVICE) {
                prop_assert!(u128::from(at) >= u128::from(start));
                prop_assert!(u128::from(at) + u128::from(length) <= u128::from(start) + u128::from(size));
                prop_assert!(at + length <= DEVICE.size_bytes);
                prop_assert!(line >= 1024 && line * 64 + length <= 2048 * 64);
            }
        }
    }
}
