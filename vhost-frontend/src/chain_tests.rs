//! Chains of all kinds, good and bad, against a walk that is simple enough to be believed.

#![allow(clippy::cast_possible_truncation)] // flag bits of 16

use crate::GuestMemory;
use proptest::prelude::*;
use virtio_bindings::bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::chain::{Chain, ChainError, ChainLimits, Segment, Table};
use crate::copy::{ChainReader, ChainWriter, CopyError};
use crate::view::GuestView;

const NEXT: u16 = VRING_DESC_F_NEXT as u16;
const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

const SIZE: u16 = 8;
const TABLE: u64 = 0x1000;
const INDIRECT_TABLE: u64 = 0x2000;

type Raw = (u64, u32, u16, u16);

/// Two regions that touch at 0x8000, and one apart.
fn memory() -> GuestMemory {
    let ranges = [(0x1000, 0x7000), (0x8000, 0x4000), (0x10_0000, 0x1000)];
    let ranges = ranges.map(|(start, bytes)| (GuestAddress(start), bytes));
    GuestMemory::from(GuestMemoryMmap::from_ranges(&ranges).unwrap())
}

fn store(memory: &GuestMemoryMmap<()>, table: u64, descriptors: &[Raw]) {
    for (index, &(address, bytes, flags, next)) in (0u64..).zip(descriptors) {
        let at = table + 16 * index;
        memory.write_obj(address, GuestAddress(at)).unwrap();
        memory.write_obj(bytes, GuestAddress(at + 8)).unwrap();
        memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
        memory.write_obj(next, GuestAddress(at + 14)).unwrap();
    }
}

fn table(indirect: bool) -> Table {
    Table {
        address: GuestAddress(TABLE),
        size: SIZE,
        indirect,
        limits: ChainLimits { segments: 6, bytes: 0x3000 },
    }
}

fn walk(descriptors: &[Raw], head: u16) -> Result<Chain, ChainError> {
    let memory = memory();
    store(&memory, TABLE, descriptors);
    let mut chain = Chain::default();
    table(true).walk(&GuestView::new(&memory), head, &mut chain).map(|()| chain)
}

fn segment(address: u64, bytes: u32) -> Segment {
    Segment { address: GuestAddress(address), bytes }
}

#[test]
fn a_chain_is_read_whole() {
    let chain = walk(&[(0x3000, 16, NEXT, 2), (0, 0, 0, 0), (0x7ff0, 32, NEXT | WRITE, 1)], 0).unwrap();
    // Descriptor 1 is empty, which is useless but legal; 0x7ff0 crosses from one region into the next.
    assert_eq!(chain.readable(), [segment(0x3000, 16)]);
    assert_eq!(chain.writable(), [segment(0x7ff0, 32)]);
    assert_eq!((chain.readable_bytes(), chain.writable_bytes()), (16, 32));
}

#[test]
fn a_chain_that_runs_in_a_circle_is_refused() {
    let memory = memory();
    store(&memory, TABLE, &[(0x3000, 0, NEXT, 1), (0x3000, 0, NEXT, 0)]);
    let unlimited = Table { limits: ChainLimits::default(), ..table(true) };
    let walked = unlimited.walk(&GuestView::new(&memory), 0, &mut Chain::default());
    assert_eq!(walked, Err(ChainError::Loop));
    let error = walk(&[(0x3000, 1, NEXT, 0)], 0).unwrap_err();
    assert_eq!(error, ChainError::TooManySegments { limit: 6 });
}

#[test]
fn empty_descriptors_count_like_others() {
    let memory = memory();
    store(&memory, TABLE, &[(INDIRECT_TABLE, 16 * 8, INDIRECT, 0)]);
    for (empty, walked) in [(5, Ok(())), (6, Err(ChainError::TooManySegments { limit: 6 }))] {
        let mut chain: Vec<Raw> = (1..=empty).map(|next| (0x3000, 0, NEXT, next)).collect();
        chain.push((0x3000, 16, 0, 0));
        store(&memory, INDIRECT_TABLE, &chain);
        assert_eq!(table(true).walk(&GuestView::new(&memory), 0, &mut Chain::default()), walked);
    }
}

#[test]
fn a_chain_that_leaves_its_table_is_refused() {
    let error = walk(&[(0x3000, 1, NEXT, SIZE)], 0).unwrap_err();
    assert_eq!(error, ChainError::OutOfTable { index: SIZE, size: SIZE });
}

#[test]
fn a_chain_out_of_guest_memory_is_refused() {
    for (address, bytes) in
        [(0xbfff, 2), (0xc000, 1), (0, 1), (u64::MAX, 1), (0x10_0fff, 2), (u64::MAX - 1, 16)]
    {
        let error = walk(&[(address, bytes, 0, 0)], 0).unwrap_err();
        assert_eq!(error, ChainError::OutOfMemory { address, bytes });
    }
}

#[test]
fn a_chain_that_is_too_long_is_refused() {
    let error = walk(&[(0x3000, 0x2000, NEXT, 1), (0x3000, 0x1001, 0, 0)], 0).unwrap_err();
    assert_eq!(error, ChainError::TooManyBytes { limit: 0x3000 });
}

#[test]
fn a_readable_descriptor_after_a_writable_one_is_refused() {
    let error = walk(&[(0x3000, 1, NEXT | WRITE, 1), (0x3000, 1, 0, 0)], 0).unwrap_err();
    assert_eq!(error, ChainError::Direction);
}

#[test]
fn an_indirect_table_is_followed() {
    let memory = memory();
    // The device must ignore the write flag of an indirect descriptor.
    store(
        &memory,
        TABLE,
        &[(0x3000, 4, NEXT, 3), (0, 0, 0, 0), (0, 0, 0, 0), (INDIRECT_TABLE, 48, INDIRECT | WRITE, 7)],
    );
    store(&memory, INDIRECT_TABLE, &[(0x4000, 8, NEXT, 2), (0, 0, 0, 0), (0x5000, 9, WRITE, 0)]);
    let mut chain = Chain::default();
    table(true).walk(&GuestView::new(&memory), 0, &mut chain).unwrap();
    assert_eq!(chain.readable(), [segment(0x3000, 4), segment(0x4000, 8)]);
    assert_eq!(chain.writable(), [segment(0x5000, 9)]);
    assert!(matches!(
        table(false).walk(&GuestView::new(&memory), 0, &mut chain),
        Err(ChainError::Indirect(_))
    ));
}

#[test]
fn bad_indirect_tables_are_refused() {
    let memory = memory();
    for (descriptor, inner) in [
        ((INDIRECT_TABLE, 0, INDIRECT, 0), (0x4000, 1, 0, 0)),
        ((INDIRECT_TABLE, 17, INDIRECT, 0), (0x4000, 1, 0, 0)),
        ((INDIRECT_TABLE, 16, INDIRECT | NEXT, 1), (0x4000, 1, 0, 0)),
        ((INDIRECT_TABLE, 16 << 17, INDIRECT, 0), (0x4000, 1, 0, 0)),
        ((INDIRECT_TABLE, 16, INDIRECT, 0), (INDIRECT_TABLE, 16, INDIRECT, 0)),
    ] {
        store(&memory, TABLE, &[descriptor]);
        store(&memory, INDIRECT_TABLE, &[inner]);
        let result = table(true).walk(&GuestView::new(&memory), 0, &mut Chain::default());
        assert!(matches!(result, Err(ChainError::Indirect(_))), "{descriptor:?} {result:?}");
    }
    // The table itself is not there.
    store(&memory, TABLE, &[(0xf000, 16, INDIRECT, 0)]);
    let result = table(true).walk(&GuestView::new(&memory), 0, &mut Chain::default());
    assert!(matches!(result, Err(ChainError::OutOfMemory { .. })), "{result:?}");
}

#[test]
fn copies_go_through_pieces_and_end_with_the_chain() {
    let memory = memory();
    let segments = [segment(0x7ffe, 3), segment(0x3000, 2)];
    let mut writer = ChainWriter::new(&memory, &segments);
    writer.write(&[1, 2, 3, 4]).unwrap();
    assert_eq!(writer.write(&[5, 6]), Err(CopyError::Short { missing: 1 }));
    writer.write(&[5]).unwrap();
    let mut reader = ChainReader::new(&memory, &segments);
    reader.skip(1).unwrap();
    let mut read = [0; 4];
    reader.read(&mut read).unwrap();
    assert_eq!(read, [2, 3, 4, 5]);
    assert_eq!(reader.left(), 0);
    assert_eq!(reader.skip(1), Err(CopyError::Short { missing: 1 }));
    ChainWriter::new(&memory, &segments).zero(5).unwrap();
    let mut read = [9; 5];
    ChainReader::new(&memory, &segments).read(&mut read).unwrap();
    assert_eq!(read, [0; 5]);
}

fn last_writable(descriptors: &[Raw]) -> Option<u64> {
    let memory = memory();
    store(&memory, TABLE, descriptors);
    let found = table(true).last_writable(&GuestView::new(&memory), 0)?;
    assert_eq!(found.bytes, 1);
    Some(found.address.0)
}

#[test]
fn the_last_writable_byte_of_a_useless_chain_is_found_where_the_chain_has_an_end() {
    let data = |address| (address, 16, NEXT, 1);
    let status = (0x4000, 1, WRITE, 0);
    assert_eq!(last_writable(&[data(0xf_0000), status]), Some(0x4000));
    assert_eq!(last_writable(&[(0x5000, u32::MAX, NEXT | WRITE, 1), status]), Some(0x4000));
    assert_eq!(last_writable(&[(0x4000, 1, NEXT | WRITE, 1), (0x5000, 9, 0, 0)]), Some(0x4000));
    // Segments that begin outside and end inside, and the other way round.
    assert_eq!(last_writable(&[(0xf_fff0, 0x20, WRITE, 0)]), Some(0x10_000f));
    assert_eq!(last_writable(&[data(0x5000), (0xbff0, 0x11, WRITE, 0)]), None);
    // Nothing of it is writable, its end is in the dark, or there is none.
    assert_eq!(last_writable(&[data(0x5000), (0x4000, 1, 0, 0)]), None);
    assert_eq!(last_writable(&[data(0x5000), (0x4000, 0, WRITE, 0)]), None);
    assert_eq!(last_writable(&[data(0x5000), (u64::MAX, 2, WRITE, 0)]), None);
    assert_eq!(last_writable(&[(0x4000, 1, NEXT | WRITE, SIZE)]), None);
    assert_eq!(last_writable(&[(0x4000, 1, NEXT | WRITE, 0)]), None);
    assert_eq!(last_writable(&[(0x4000, 1, NEXT | WRITE, 1), (0xf_0000, 16, INDIRECT, 0)]), None);
    // Nobody looks for it for ever: a table of 65535 descriptors fits into no ring.
    let large = GuestMemory::from(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap());
    store(&large, TABLE, &[(0x1_0000, 16 * 65535, INDIRECT, 0)]);
    let chain: Vec<Raw> = (1..=65535).map(|next| (0x4000, 1, NEXT | WRITE, next)).collect();
    for (ends_after, found) in [(65_534, None), (4000, Some(0x4000))] {
        let mut chain = chain.clone();
        chain[ends_after].2 = WRITE;
        store(&large, 0x1_0000, &chain);
        let segment = table(true).last_writable(&GuestView::new(&large), 0);
        assert_eq!(segment.map(|segment| segment.address.0), found);
    }
}

fn any_descriptor() -> impl Strategy<Value = Raw> {
    let address = prop_oneof![
        0x3000u64..0xc000,
        Just(INDIRECT_TABLE),
        Just(INDIRECT_TABLE + 8),
        0xbff0u64..0xc010,
        0x10_0ff0u64..0x10_1010,
        any::<u64>()
    ];
    let bytes = prop_oneof![0u32..64, Just(16), Just(32), Just(128), 0u32..0x4000, any::<u32>()];
    let flags = prop_oneof![
        Just(NEXT),
        Just(0),
        Just(NEXT | WRITE),
        Just(WRITE),
        Just(INDIRECT),
        0u16..8,
        any::<u16>()
    ];
    let next = prop_oneof![0u16..SIZE + 1, any::<u16>()];
    (address, bytes, flags, next)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Whatever the guest writes: a walk ends, and what it accepts is inside guest memory, within the limits, and
    /// accounted for.
    #[test]
    fn any_table_is_walked_safely(
        direct in prop::collection::vec(any_descriptor(), SIZE as usize),
        indirect in prop::collection::vec(any_descriptor(), SIZE as usize),
        head in 0..SIZE,
        negotiated: bool,
    ) {
        let memory = memory();
        store(&memory, TABLE, &direct);
        store(&memory, INDIRECT_TABLE, &indirect);
        let mut chain = Chain::default();
        let view = GuestView::new(&memory);
        let walked = table(negotiated).walk(&view, head, &mut chain);
        if let Some(last) = table(negotiated).last_writable(&view, head) {
            prop_assert!(view.contains(last.address, 1) && last.bytes == 1);
            let ends = |it: &Segment| it.address.0 + u64::from(it.bytes) - 1 == last.address.0;
            prop_assert!(walked.is_err() || chain.writable().last().is_some_and(ends));
        } else if walked.is_ok() {
            prop_assert_eq!(chain.writable_bytes(), 0);
        }
        if walked.is_ok() {
            prop_assert_eq!(chain.head(), head);
            prop_assert!(chain.readable().len() + chain.writable().len() <= 6);
            prop_assert!(chain.readable_bytes() + chain.writable_bytes() <= 0x3000);
            for (segments, bytes) in
                [(chain.readable(), chain.readable_bytes()), (chain.writable(), chain.writable_bytes())]
            {
                let sum: u64 = segments.iter().map(|segment| u64::from(segment.bytes)).sum();
                prop_assert_eq!(sum, bytes);
                let mut all = vec![0; usize::try_from(bytes).unwrap()];
                prop_assert_eq!(ChainReader::new(&memory, segments).read(&mut all), Ok(()));
            }
        }
    }
}
