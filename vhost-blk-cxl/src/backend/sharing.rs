//! Who has a device when several volumes want it.

use pod_protocol::ids::PlaceId;
use pod_protocol::turns::Turns;

use crate::message::{Charge, Operation, Request};

/// What a volume of the usual priority may begin per round: a few small requests, or a part of a large one.
const QUANTUM_BYTES: u32 = 16 << 10;
/// What a request costs besides its data.
const REQUEST_BYTES: u64 = 4096;
/// For so many requests after several volumes had some at the device it is taken for shared: who has one request at a time is
/// back soon.
const SHARED_REQUESTS: u32 = 1024;

/// What a discard counts for at most, however long: the file system or the drive notes that a range is free.
const DISCARD_BYTES: u64 = 64 << 10;

/// What a request keeps its device busy with, in bytes: what a volume's rates count. Zeros may be written, and nobody knows before; those
/// of a discard are not, unless its device is known to write them.
pub(super) fn moved_bytes(request: &Request, writes_zeroes: impl FnOnce() -> bool) -> u64 {
    match request.operation {
        Operation::WriteZeroes if request.charge == Charge::AsDiscard && !writes_zeroes() => {
            request.length_bytes.min(DISCARD_BYTES)
        }
        Operation::Read | Operation::Write | Operation::WriteZeroes => request.length_bytes,
        Operation::Discard => request.length_bytes.min(DISCARD_BYTES),
        Operation::Flush => 0,
    }
}

/// What a request costs the volume whose turn it is, in bytes.
pub(super) fn cost(request: &Request, writes_zeroes: impl FnOnce() -> bool) -> u64 {
    REQUEST_BYTES + moved_bytes(request, writes_zeroes)
}

/// The volumes that want a device, and what it may be given.
#[derive(Debug)]
pub(crate) struct Sharing {
    /// Volumes with requests that wait.
    pub(super) turns: Turns<PlaceId>,
    pub(super) room: Room,
}

/// How many requests a device is given at a time. One that has them all decides by itself which is first; so while several volumes
/// want it, it has no more than it needs to be busy, and the others wait where their turns count.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Room {
    /// How many it has then.
    depth: u32,
    /// For how many more requests it is taken for shared.
    shared_for: u32,
}

impl Sharing {
    /// Of a device that has so many requests while it is shared.
    pub(crate) fn new(depth: u32) -> Self {
        Self { turns: Turns::new(QUANTUM_BYTES), room: Room { depth, shared_for: 0 } }
    }
}

/// One that stands in while another is in use.
impl Default for Sharing {
    fn default() -> Self {
        Self::new(0)
    }
}

impl Room {
    /// Whether a device that has so many requests, and so many of them of this volume, may have another one of it.
    pub(super) fn is_there(&mut self, of_device: u32, of_volume: u32) -> bool {
        if of_device > of_volume {
            self.shared_for = SHARED_REQUESTS;
        }
        self.shared_for == 0 || of_device < self.depth
    }

    /// It has another one.
    pub(super) fn taken(&mut self) {
        self.shared_for = self.shared_for.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_filled_by_one_volume_and_kept_short_for_several() {
        let mut room = Room { depth: 64, shared_for: 0 };
        // One alone has all that the device takes.
        assert!((0..500).all(|has| room.is_there(has, has)));
        // Another one comes: nothing more until few are left.
        assert!(!room.is_there(500, 0) && !room.is_there(500, 500) && !room.is_there(64, 64));
        assert!(room.is_there(63, 62) && room.is_there(63, 63));
        // The other one stays away.
        for _ in 0..SHARED_REQUESTS {
            assert!(!room.is_there(64, 64));
            room.taken();
        }
        assert!(room.is_there(64, 64));
    }
}
