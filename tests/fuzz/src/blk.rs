//! What a guest may ask of a disk, and a frontend of a storage backend.

use cxl_pool::{Area, LineCount, LineOffset};
use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId, PlaceNumber, VolumeId};
use pod_protocol::objects::{Priority, Qos, VolumeObject};
use vhost_blk_cxl::backend::check::check;
use vhost_blk_cxl::frontend::parse::{Parsed, Shape, parse};
use vhost_blk_cxl::intent_log;
use vhost_blk_cxl::message::{Completion, Operation, Request};
use vhost_blk_cxl::segments::{Segment, decode};
use vhost_blk_cxl::ssd::Geometry;
use vhost_frontend::{Chain, Next};

use super::guest::with_ring;
use super::input::Input;

/// One byte for the disk, then guest memory as in the target `chain`.
pub fn blk_chain(data: &[u8]) {
    let mut input = Input(data);
    let choice = input.byte();
    let shape = Shape {
        size_bytes: if choice & 4 == 0 { 1 << 20 } else { u64::MAX },
        block_bytes: if choice & 1 == 0 { 512 } else { 4096 },
        read_only: choice & 2 != 0,
    };
    with_ring(1 << 28, input.0, |ring| {
        let mut chain = Chain::with_capacity(4);
        for _ in 0..16 {
            match ring.next_chain(&mut chain) {
                Ok(Next::Chain) => {}
                Ok(Next::Malformed(_)) => continue,
                Ok(Next::Empty) | Err(_) => return,
            }
            let parsed = parse(ring.memory(), &chain, shape);
            assert!(
                chain.writable_bytes() > 0 || matches!(parsed, Parsed::Refused(_)),
                "a status has a place"
            );
            let Parsed::Operation { operation, offset_bytes, length_bytes, .. } = parsed else { continue };
            assert!(!operation.writes() || !shape.read_only);
            assert!(offset_bytes.checked_add(length_bytes).is_some_and(|end| end <= shape.size_bytes));
            assert!(offset_bytes.is_multiple_of(shape.block_bytes.into()));
            assert!(length_bytes.is_multiple_of(shape.block_bytes.into()));
            assert_eq!(length_bytes == 0, operation == Operation::Flush);
            match operation {
                Operation::Read => assert_eq!(length_bytes + 1, chain.writable_bytes()),
                Operation::Write => assert_eq!(length_bytes + 16, chain.readable_bytes()),
                _ => {}
            }
        }
    });
}

/// Eight words of a message, then what the volume is, with the request's list in between if it has one.
pub fn blk_message(data: &[u8]) {
    let mut input = Input(data);
    let words = input.words::<8>();
    if let Ok(completion) = Completion::decode(&words) {
        assert_eq!(Completion::decode(&completion.encode()), Ok(completion));
        assert!(Request::decode(&words).is_err());
    }
    let Ok(request) = Request::decode(&words) else { return };
    assert_eq!(Request::decode(&request.encode()), Ok(request));
    let choice = input.byte();
    let device = Geometry { size_bytes: 1 << 30, block_bytes: if choice & 1 == 0 { 512 } else { 4096 } };
    let volume = VolumeObject {
        lease: request.holder.lease,
        place: PlaceNumber::FIRST,
        volume: VolumeId::new(1),
        ssd: "ssd0".to_owned(),
        start_bytes: input.u64(),
        size_bytes: input.u64(),
        read_only: choice & 2 != 0,
        generation: LeaseGeneration::new(1),
        channel: ChannelId::new(1),
        data_area: Area::new(LineOffset::new(1024), LineCount::new(1024)),
        ram_area: None,
        instance: InstanceId::new(1),
        qos: Qos::default(),
        priority: Priority::DEFAULT,
    };
    assert!(LeaseId::new(request.holder.lease.get()).is_some());
    // What else it says, if it has a list: words of that.
    let mut segments = Vec::new();
    if request.segments > 0 {
        let list: Vec<[u64; 2]> = (0..=request.segments).map(|_| input.words()).collect();
        let length = |segments: &[Segment]| segments.iter().map(|it| u128::from(it.bytes)).sum::<u128>();
        match decode(&list, &request, &mut segments) {
            Ok(()) => {
                assert_eq!(segments.len(), usize::from(request.segments));
                assert_eq!(length(&segments), u128::from(request.length_bytes));
            }
            Err(_) => assert!(segments.is_empty()),
        }
    }
    let intent_log = (choice & 4 != 0).then(|| input.u64());
    let Ok(at) = check(&request, &segments, &volume, intent_log, device) else { return };
    assert!(!request.operation.writes() || !volume.read_only);
    if request.operation == Operation::Flush {
        return;
    }
    let end = u128::from(at) + u128::from(request.length_bytes);
    let (start, bytes) = match intent_log {
        Some(start) if request.intent_log => (start, intent_log::BYTES),
        _ => (volume.start_bytes, volume.size_bytes),
    };
    assert!(!request.intent_log || intent_log.is_some());
    assert!(at >= start);
    assert!(end <= u128::from(start) + u128::from(bytes));
    assert!(end <= u128::from(device.size_bytes));
    if request.segments > 0 {
        assert!(request.operation.has_data() && !request.intent_log && !segments.is_empty());
        for segment in &segments {
            assert!(segment.start.get() >= 1024 * 64 && segment.start.get().is_multiple_of(64));
            assert!(segment.start.get() + u64::from(segment.bytes) <= 2048 * 64);
            assert!(segment.bytes > 0 && segment.bytes.is_multiple_of(device.block_bytes));
        }
    } else if request.operation.has_data() {
        let first = request.data.get();
        assert!(first >= 1024 && first + request.data_lines().get() <= 2048);
    }
}
