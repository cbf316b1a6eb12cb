//! Data that lies in several places of the pool: a list of them, in the instance's data area, as NVMe's scatter-gather lists are.
//!
//! ```text
//!            63       48 47       32 31                           0
//! header  0 | segments  | generation | place and lease             |
//!         1 | 0                      | tag                         |
//! segment 0 | first byte in the pool                               |
//!         1 | 0                      | length, bytes               |
//! ```
//!
//! The header repeats what the message says, so that whatever else lies in that place, of another request or a holder of before, is
//! not taken for the list. The reader copies a list once and checks the copy: its writer may be dead, fenced or mad.

use cxl_pool::{ByteOffset, LINE_BYTES, Memory};
use zerocopy::IntoBytes;

use crate::message::{Holder, Request, Tag};

/// The longest list: with its header, it fills a page.
pub const SEGMENTS_MAX: usize = ENTRIES_MAX - 1;
const ENTRIES_MAX: usize = 256;
/// Words of the header, and of a segment.
const ENTRY_WORDS: usize = 2;
const ENTRY_BYTES: u32 = 16;
const _: () = assert!(ENTRY_WORDS * 8 == ENTRY_BYTES as usize);

/// A part of a request's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins in the pool.
    pub start: ByteOffset,
    /// Its length.
    pub bytes: u32,
}

/// What is found where a list should be is none, or not this request's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not the list of this request's segments")]
pub struct NotItsList;

/// How much room a list of so many segments takes up.
pub const fn list_bytes(segments: u16) -> u32 {
    (segments as u32 + 1) * ENTRY_BYTES
}

fn header(holder: Holder, tag: Tag, segments: u16) -> [u64; ENTRY_WORDS] {
    let place = u64::from(u32::from(holder.place_id()));
    let first = u64::from(segments) << 48 | u64::from(holder.generation.get()) << 32 | place;
    [first.to_le(), u64::from(tag.get()).to_le()]
}

/// Room for a list on its way to or from the pool.
#[derive(Debug)]
pub struct ListBuffer(Box<[[u64; ENTRY_WORDS]; ENTRIES_MAX]>);

impl Default for ListBuffer {
    fn default() -> Self {
        Self(Box::new([[0; ENTRY_WORDS]; ENTRIES_MAX]))
    }
}

impl ListBuffer {
    /// Writes a list to the pool, past the cache where that is not coherent; a `store_fence` has to follow.
    ///
    /// # Panics
    ///
    /// If there are more than [`SEGMENTS_MAX`].
    pub fn write<M: Memory>(
        &mut self,
        memory: &M,
        at: ByteOffset,
        (holder, tag): (Holder, Tag),
        segments: impl ExactSizeIterator<Item = Segment>,
    ) {
        let count = segments.len();
        assert!(count <= SEGMENTS_MAX, "a list has {SEGMENTS_MAX} segments at most");
        #[expect(clippy::cast_possible_truncation, reason = "just compared")]
        let count_short = count as u16;
        self.0[0] = header(holder, tag, count_short);
        for (entry, segment) in self.0[1..].iter_mut().zip(segments) {
            *entry = [segment.start.get().to_le(), u64::from(segment.bytes).to_le()];
        }
        // Whole lines: what lies behind the list in its last one is the buffer's, too.
        let entries = (count + 1).next_multiple_of(LINE_BYTES / ENTRY_BYTES as usize);
        memory.write_streaming(at, self.0[..entries].as_bytes());
    }

    /// Reads the list of a request, whose lines were invalidated. What is found there may still point anywhere; it is as long as the
    /// request says, and its segments are whole lines that together have the request's length.
    pub fn read<M: Memory>(
        &mut self,
        memory: &M,
        request: &Request,
        into: &mut Vec<Segment>,
    ) -> Result<(), NotItsList> {
        let entries = usize::from(request.segments) + 1;
        let list = self.0.get_mut(..entries).ok_or(NotItsList)?;
        memory.read(request.data_start(), list.as_mut_bytes());
        decode(list, request, into)
    }
}

/// Reads what stands in a list, its header first.
pub fn decode(
    list: &[[u64; ENTRY_WORDS]],
    request: &Request,
    into: &mut Vec<Segment>,
) -> Result<(), NotItsList> {
    into.clear();
    let Some((first, entries)) = list.split_first() else { return Err(NotItsList) };
    if *first != header(request.holder, request.tag, request.segments)
        || entries.len() != usize::from(request.segments)
    {
        return Err(NotItsList);
    }
    let mut left = request.length_bytes;
    for [start, bytes] in entries.iter().map(|entry| entry.map(u64::from_le)) {
        // What is too long for a segment is refused as what is empty is.
        let short = u32::try_from(bytes).unwrap_or(0);
        let whole = |value: u64| value.is_multiple_of(LINE_BYTES as u64);
        if short == 0 || bytes > left || !whole(start) || !whole(bytes) {
            into.clear();
            return Err(NotItsList);
        }
        left -= bytes;
        into.push(Segment { start: ByteOffset::new(start), bytes: short });
    }
    if left > 0 {
        into.clear();
        return Err(NotItsList);
    }
    Ok(())
}

/// The part of a list that begins after `done` of its bytes.
///
/// The first of these segments is cut accordingly; there is none where the list is over.
pub(crate) fn after(list: &[Segment], done: u64) -> impl Iterator<Item = Segment> {
    let mut skip = done;
    list.iter().filter_map(move |segment| {
        let cut = skip.min(u64::from(segment.bytes));
        skip -= cut;
        // Not more than the segment has.
        #[expect(clippy::cast_possible_truncation, reason = "a minimum of something and a u32")]
        let bytes = segment.bytes - cut as u32;
        (bytes > 0).then(|| Segment { start: segment.start.saturating_add(cut), bytes })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Charge, Operation};
    use cxl_pool::HostId;
    use cxl_pool::LineOffset;
    use cxl_pool::simulated::SimulatedPool;
    use pod_protocol::ids::{LeaseGeneration, LeaseId, PlaceNumber};
    use proptest::prelude::*;

    fn request(segments: &[Segment]) -> Request {
        Request {
            holder: Holder {
                lease: LeaseId::new(7).unwrap(),
                place: PlaceNumber::FIRST,
                generation: LeaseGeneration::new(3),
            },
            tag: Tag::new(0x1_0002),
            operation: Operation::Write,
            force_unit_access: false,
            may_unmap: false,
            intent_log: false,
            marked: false,
            charge: Charge::Whole,
            offset_bytes: 0,
            length_bytes: segments.iter().map(|segment| u64::from(segment.bytes)).sum(),
            data: LineOffset::new(64),
            segments: u16::try_from(segments.len()).unwrap(),
        }
    }

    fn segments() -> impl Strategy<Value = Vec<Segment>> {
        let one = (0u64..1 << 50, 1u32..1 << 16)
            .prop_map(|(line, lines)| Segment { start: ByteOffset::new(line * 64), bytes: lines * 64 });
        prop::collection::vec(one, 1..=SEGMENTS_MAX)
    }

    proptest! {
        #[test]
        fn lists_survive_the_journey(list in segments()) {
            let pool = SimulatedPool::new(1, 1 << 20);
            let [here, there] = [1, 2].map(|host| pool.host(HostId::new(host)));
            let request = request(&list);
            let mut buffer = ListBuffer::default();
            buffer.write(&here, request.data_start(), (request.holder, request.tag), list.iter().copied());
            here.full_fence();
            let mut read = Vec::new();
            there.invalidate(request.data_start(), list_bytes(request.segments).into());
            there.full_fence();
            prop_assert_eq!(ListBuffer::default().read(&there, &request, &mut read), Ok(()));
            prop_assert_eq!(&read, &list);
            // Of anybody else, or as long as something else, it is not the list.
            let others = [
                Request { tag: Tag::new(2), ..request },
                Request { holder: Holder { generation: LeaseGeneration::new(4), ..request.holder }, ..request },
                Request { holder: Holder { place: PlaceNumber::SECOND, ..request.holder }, ..request },
                Request { holder: Holder { lease: LeaseId::new(8).unwrap(), ..request.holder }, ..request },
                Request { length_bytes: request.length_bytes + 64, ..request },
                Request { length_bytes: request.length_bytes - 64, ..request },
                Request { segments: request.segments - 1, ..request },
                Request { segments: request.segments.wrapping_add(1), ..request },
                Request { segments: u16::MAX, ..request },
            ];
            for other in others {
                prop_assert_eq!(buffer.read(&there, &other, &mut read), Err(NotItsList));
                prop_assert!(read.is_empty());
            }
        }

        #[test]
        fn what_is_left_is_what_was_not_done(list in segments(), part in 0.0f64..1.0) {
            let total: u64 = list.iter().map(|segment| u64::from(segment.bytes)).sum();
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
            let done = (total as f64 * part) as u64 / 64 * 64;
            let lines = |segments: &mut dyn Iterator<Item = Segment>| -> Vec<u64> {
                segments.flat_map(|it| (0..u64::from(it.bytes) / 64).map(move |line| it.start.get() + line * 64).take(4000)).collect()
            };
            let bytes: u64 = after(&list, done).map(|segment| u64::from(segment.bytes)).sum();
            prop_assert_eq!(bytes, total - done);
            let first = after(&list, done).next();
            let mut at = done;
            let expected = list.iter().find_map(|segment| {
                let inside = at < u64::from(segment.bytes);
                let found = inside.then(|| segment.start.get() + at);
                at = at.saturating_sub(segment.bytes.into());
                found
            });
            prop_assert_eq!(first.map(|segment| segment.start.get()), expected);
            prop_assert!(done > 0 || lines(&mut after(&list, 0)) == lines(&mut list.iter().copied()));
        }
    }

    #[test]
    fn segments_are_whole_lines_and_not_empty() {
        let good = [Segment { start: ByteOffset::new(4096), bytes: 512 }; 2];
        let request = request(&good);
        let mut read = Vec::new();
        let list = |second: [u64; 2]| [header(request.holder, request.tag, 2), [4096, 512], second];
        assert_eq!(decode(&list([4096, 512]), &request, &mut read), Ok(()));
        for second in [[4097, 512], [4096, 0], [4096, 511], [4096, 576], [4096, 448], [4096, 1 << 32 | 512]] {
            assert_eq!(decode(&list(second), &request, &mut read), Err(NotItsList), "{second:?}");
        }
        assert_eq!(decode(&[], &request, &mut read), Err(NotItsList));
        assert!(read.is_empty());
    }
}
