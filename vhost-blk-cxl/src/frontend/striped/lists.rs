//! Data that the guest has itself: where that of each part lies.
//!
//! A part whose data lies in several places has a list of its own. Those of a request lie one behind the other in the room that was
//! taken for them, as long as the request is under way.

use cxl_pool::{LineCount, LineOffset, Memory};

use super::StripedDisk;
use super::layout::Piece;
use super::parts::{Owner, Part};
use crate::message::{Holder, Request};
use crate::segments::{after, list_bytes};

/// Where the data of a part lies, or the list of so many segments.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartData {
    pub(super) data: LineOffset,
    pub(super) segments: u16,
}

impl PartData {
    /// There is none.
    pub(super) fn none() -> Self {
        Self { data: LineOffset::new(0), segments: 0 }
    }
}

impl<M: Memory> StripedDisk<M> {
    /// Where the data of a part is. If a list is needed, it will be at `next_list`, and the next one behind it.
    pub(super) fn data_of(
        &mut self,
        job: u16,
        whole: &Request,
        piece: &Piece,
        next_list: &mut LineOffset,
    ) -> PartData {
        if whole.segments == 0 {
            // Pieces are whole sectors, and so whole lines.
            let data = whole.data.saturating_add(LineCount::covering(piece.data_bytes));
            return PartData { data, segments: 0 };
        }
        self.gather(job, piece.data_bytes, piece.length_bytes);
        if let [one] = self.gathered[..] {
            return PartData { data: one.start.line(), segments: 0 };
        }
        // Not more than the whole request has.
        let segments = u16::try_from(self.gathered.len()).unwrap_or(u16::MAX);
        let data = *next_list;
        *next_list = data.saturating_add(LineCount::covering(list_bytes(segments).into()));
        PartData { data, segments }
    }

    /// Writes the list of a part that is about to be sent as this one's.
    pub(super) fn write_list(&mut self, part: &Part, holder: Holder) {
        let Owner::Guest(job) = part.owner else { return };
        self.gather(job, part.data_bytes, part.request.length_bytes);
        let (disk, name) = (&mut self.disk, (holder, part.request.tag));
        disk.list.write(&disk.memory, part.request.data_start(), name, self.gathered.iter().copied());
    }

    /// Collects the segments of a part.
    fn gather(&mut self, job: u16, from_bytes: u64, bytes: u64) {
        self.gathered.clear();
        let mut left = bytes;
        for mut segment in after(&self.disk.slots.get(job).pieces, from_bytes) {
            if left == 0 {
                break;
            }
            segment.bytes = segment.bytes.min(u32::try_from(left).unwrap_or(u32::MAX));
            left -= u64::from(segment.bytes);
            self.gathered.push(segment);
        }
    }

    /// Whether the data of a request is in the guest's own memory.
    pub(super) fn is_in_guest(&self, job: u16) -> bool {
        self.disk.slots.get(job).place.is_in_guest()
    }

    /// Whether that of any request is.
    pub(super) fn any_in_guest(&self) -> bool {
        (0..).zip(&self.jobs).any(|(index, job)| job.is_some() && self.is_in_guest(index))
    }
}
