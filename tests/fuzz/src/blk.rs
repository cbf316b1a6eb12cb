//! What a guest may ask of a disk, and a frontend of a storage backend.

use cxl_pool::{Area, LineCount, LineOffset};
use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration, LeaseId, PlaceNumber, VolumeId};
use pod_protocol::objects::{Priority, Qos, VolumeObject};
use vhost_blk_cxl::backend::check::check;
use vhost_blk_cxl::frontend::parse::{Parsed, Shape, parse};
use vhost_blk_cxl::intent_log;
use vhost_blk_cxl::message::{Completion, Holder, Operation, Request};
use vhost_blk_cxl::segments::{Segment, decode};
use vhost_blk_cxl::ssd::Geometry;
use vhost_frontend::{Chain, ChainReader, GuestMemory, Next};

use super::guest::with_ring;
use super::input::Input;

/// Of virtio's requests: type, reserved and sector; an id; a range of sectors with flags.
const HEADER_BYTES: u64 = 16;
const ID_BYTES: u64 = 20;
const RANGE_BYTES: u64 = 16;
const SECTOR_BYTES: u64 = 512;

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
            if parsed == Parsed::Id {
                assert!(chain.readable_bytes() == HEADER_BYTES && chain.writable_bytes() > ID_BYTES);
            }
            let Parsed::Operation { operation, offset_bytes, length_bytes, may_unmap } = parsed else {
                continue;
            };
            assert!(!operation.writes() || !shape.read_only);
            assert!(offset_bytes.checked_add(length_bytes).is_some_and(|end| end <= shape.size_bytes));
            assert!(offset_bytes.is_multiple_of(shape.block_bytes.into()));
            assert!(length_bytes.is_multiple_of(shape.block_bytes.into()));
            assert_eq!(length_bytes == 0, operation == Operation::Flush);
            assert!(!may_unmap || operation == Operation::WriteZeroes);
            let said = said(ring.memory(), &chain);
            let data_bytes = match operation {
                Operation::Read => {
                    assert_eq!(length_bytes + 1, chain.writable_bytes());
                    0
                }
                Operation::Write => {
                    assert_eq!(chain.writable_bytes(), 1);
                    length_bytes
                }
                Operation::Flush => continue,
                Operation::Discard | Operation::WriteZeroes => {
                    let [sectors, flags] = [24, 28].map(|at| number::<4>(&said, at));
                    assert_eq!((sectors * SECTOR_BYTES, flags == 1), (length_bytes, may_unmap));
                    RANGE_BYTES
                }
            };
            assert_eq!(data_bytes + HEADER_BYTES, chain.readable_bytes());
            let sector_at = if operation.has_data() { 8 } else { 16 };
            assert_eq!(
                u128::from(number::<8>(&said, sector_at)) * u128::from(SECTOR_BYTES),
                u128::from(offset_bytes)
            );
        }
    });
}

/// The first bytes of what a guest says.
fn said(memory: &GuestMemory, chain: &Chain) -> [u8; 32] {
    let mut said = [0; 32];
    let bytes = said.len().min(usize::try_from(chain.readable_bytes()).expect("within the limits"));
    ChainReader::new(memory, chain.readable()).read(&mut said[..bytes]).expect("it was read before");
    said
}

/// A number of so many bytes in it.
fn number<const BYTES: usize>(said: &[u8], at: usize) -> u64 {
    said[at..at + BYTES].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
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
    assert_eq!([request.offset_bytes, request.length_bytes], [words[2], words[3]]);
    assert_eq!(
        [request.holder.lease.get(), request.tag.get()].map(u64::from),
        [words[0] >> 32 & 0xff_ffff, words[1] & 0xffff_ffff]
    );
    assert!(request.segments > 0 || request.data.get() == words[4]);
    assert!(!request.intent_log || request.operation.has_data() && request.segments == 0);
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
        ram_area: (choice & 8 != 0).then_some(Area::new(LineOffset::new(4096), LineCount::new(64))),
        instance: InstanceId::new(1),
        qos: Qos::default(),
        priority: Priority::DEFAULT,
    };
    assert!(LeaseId::new(request.holder.lease.get()).is_some());
    let may_hold = |start: u64, bytes: u64| {
        let areas = [volume.data_area].into_iter().chain(volume.ram_area);
        areas.into_iter().any(|it| {
            let (first, end) = (u128::from(it.start.get()) * 64, u128::from(it.end().get()) * 64);
            u128::from(start) >= first && u128::from(start) + u128::from(bytes) <= end
        })
    };
    // What else it says, if it has a list: words of that.
    let mut segments = Vec::new();
    if request.segments > 0 {
        let list: Vec<[u64; 2]> = (0..=request.segments).map(|_| input.words()).collect();
        let length = |segments: &[Segment]| segments.iter().map(|it| u128::from(it.bytes)).sum::<u128>();
        match decode(&list, &request, &mut segments) {
            Ok(()) => {
                assert_eq!(segments.len(), usize::from(request.segments));
                assert_eq!(length(&segments), u128::from(request.length_bytes));
                assert!(
                    segments.iter().all(|it| it.bytes > 0 && it.bytes % 64 == 0 && it.start.get() % 64 == 0)
                );
                // The list says whose it is.
                let Holder { lease, place, generation } = request.holder;
                let of = [u64::from(place.get()) << 24 | u64::from(lease.get()), generation.get().into()];
                assert_eq!([list[0][0] & 0xffff_ffff, list[0][0] >> 32 & 0xffff], of);
                assert_eq!(
                    [list[0][0] >> 48, list[0][1]],
                    [u64::from(request.segments), u64::from(request.tag.get())]
                );
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
    assert_eq!(at.checked_sub(start), Some(request.offset_bytes));
    let block = u64::from(device.block_bytes);
    assert!(
        request.length_bytes > 0 && request.length_bytes % block == 0 && request.offset_bytes % block == 0
    );
    assert!(end <= u128::from(start) + u128::from(bytes));
    assert!(end <= u128::from(device.size_bytes));
    if request.segments > 0 {
        assert!(request.operation.has_data() && !request.intent_log && !segments.is_empty());
        for segment in &segments {
            assert!(may_hold(segment.start.get(), segment.bytes.into()));
            assert!(segment.bytes.is_multiple_of(device.block_bytes));
        }
    } else if request.operation.has_data() {
        // Whole lines.
        let bytes = request.length_bytes.next_multiple_of(64);
        assert!(may_hold(request.data.get().checked_mul(64).expect("in the pool"), bytes));
    }
}
