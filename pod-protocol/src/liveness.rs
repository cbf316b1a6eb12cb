//! Seeing through non-coherent memory whether somebody lives, and saying that one does.

use cxl_pool::{ByteOffset, LineCount, LineOffset, Memory, Record};

/// A random number that is not 0: one life of a daemon or controller.
pub(crate) fn new_incarnation() -> u64 {
    uuid::Uuid::new_v4().as_u64_pair().0.max(1)
}

/// The current value of another host's heartbeat.
pub(crate) fn read_beat<M: Memory>(memory: &M, at: ByteOffset) -> u64 {
    memory.invalidate(at, 8);
    memory.full_fence();
    memory.load(at)
}

/// The value of a heartbeat that this host itself writes, or that a host with the same id does. A dead predecessor may
/// have left its last beat in our cache, and invalidating what was not written back is for other hosts' lines only.
pub(crate) fn read_own_beat<M: Memory>(memory: &M, at: ByteOffset) -> u64 {
    memory.flush(at, 8);
    memory.full_fence();
    memory.load(at)
}

/// Makes a heartbeat visible.
pub(crate) fn write_beat<M: Memory>(memory: &M, at: ByteOffset, beat: u64) {
    memory.store(at, beat);
    memory.write_back(at, 8);
    memory.store_fence();
}

/// A record that this host itself writes; as [`read_own_beat`].
pub(crate) fn look_own<R: Record, M: Memory>(memory: &M, at: LineOffset) -> Option<R> {
    memory.flush(at.bytes(), LineCount::new(R::LINES).bytes());
    memory.full_fence();
    R::look(memory, at)
}
