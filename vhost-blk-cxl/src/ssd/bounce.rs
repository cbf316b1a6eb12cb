//! What is read from a file in memory, on its way past this host's cache.
//!
//! The kernel copies from such a file with the CPU. Straight into the pool, it would first fetch each line that it is about to write, for
//! none is in the cache, and leave it there, to be flushed. Instead it copies into a buffer that stays in the cache, and from there the data
//! is stored past it. On a virtual EPYC a read of 4 KiB takes 1.25 µs so instead of 1.43, flush included, and one of 128 KiB 19 µs instead of
//! 22.3.

use std::io;

use cxl_pool::Memory;

use crate::segments::Segment;

/// What is read at a time: with 4 KiB, 128 KiB take half as long again, and with more than this no less.
const BYTES: usize = 64 << 10;

/// The buffer, and the pool.
pub(crate) struct Bounce<M: Memory> {
    memory: M,
    buffer: Box<[u8]>,
}

impl<M: Memory> Bounce<M> {
    pub(crate) fn new(memory: M) -> Self {
        Self { memory, buffer: vec![0; BYTES].into_boxed_slice() }
    }

    /// Reads into these segments, one after the other, what `read_at` finds from `at` on. Returns how many bytes those were: fewer if
    /// there are no more, or after an error. A `store_fence` has to follow before they are announced.
    pub(crate) fn read(
        &mut self,
        mut at: u64,
        segments: impl Iterator<Item = Segment>,
        mut read_at: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut moved = 0;
        for Segment { start, bytes } in segments {
            let bytes = bytes as usize;
            let mut done = 0;
            while done < bytes {
                let piece = self.buffer.len().min(bytes - done);
                let read = match read_at(&mut self.buffer[..piece], at) {
                    Err(error) if moved == 0 => return Err(error),
                    // Whoever goes on from there meets it again.
                    Err(_) => return Ok(moved),
                    Ok(read) => read,
                };
                self.memory.write_streaming(start.saturating_add(done as u64), &self.buffer[..read]);
                (done, moved, at) = (done + read, moved + read, at + read as u64);
                if read < piece {
                    return Ok(moved);
                }
            }
        }
        Ok(moved)
    }
}

#[cfg(test)]
mod tests {
    use cxl_pool::simulated::SimulatedPool;
    use cxl_pool::{ByteOffset, HostId};
    use std::io::ErrorKind;

    use super::*;

    const SEGMENTS: [Segment; 3] = [
        Segment { start: ByteOffset::new(300 << 10), bytes: 512 },
        Segment { start: ByteOffset::new(0), bytes: 150 << 10 },
        Segment { start: ByteOffset::new(200 << 10), bytes: 64 << 10 },
    ];

    /// Reads a file with these bytes, which from `fails_at` on cannot be read. Returns how that ended, and what another host sees.
    fn read(file: &[u8], fails_at: Option<usize>) -> (Result<usize, ErrorKind>, Vec<u8>) {
        let pool = SimulatedPool::new(1, 1 << 20);
        let memory = pool.host(HostId::new(1));
        let mut bounce = Bounce::new(memory.clone());
        let result = bounce.read(7, SEGMENTS.into_iter(), |into, at| {
            let at = usize::try_from(at).unwrap() - 7;
            if fails_at.is_some_and(|fails_at| at >= fails_at) {
                return Err(ErrorKind::PermissionDenied.into());
            }
            let there = &file[at.min(file.len())..];
            let count = there.len().min(into.len());
            into[..count].copy_from_slice(&there[..count]);
            Ok(count)
        });
        memory.full_fence();
        let there = pool.host(HostId::new(2));
        let mut bytes = Vec::new();
        for Segment { start, bytes: length } in SEGMENTS {
            let from = bytes.len();
            bytes.resize(from + length as usize, 0);
            there.read(start, &mut bytes[from..]);
        }
        (result.map_err(|error| error.kind()), bytes)
    }

    #[test]
    fn each_segment_gets_its_part_in_memory() {
        let total = SEGMENTS.iter().map(|segment| segment.bytes as usize).sum::<usize>();
        let file: Vec<u8> = (0..total).map(|byte| u8::try_from(byte % 251).unwrap()).collect();
        let (result, bytes) = read(&file, None);
        assert_eq!(result, Ok(total));
        assert!(bytes == file);
        // It ends early: within a segment, and where a piece does.
        for length in [0, 511, 512, 512 + BYTES, 512 + BYTES + 9, total - 1] {
            let (result, bytes) = read(&file[..length], None);
            assert_eq!(result, Ok(length));
            assert!(bytes[..length] == file[..length], "{length}");
        }
        assert_eq!(read(&file, Some(0)).0, Err(ErrorKind::PermissionDenied));
        assert_eq!(read(&file, Some(512 + BYTES)).0, Ok(512 + BYTES), "it is met by whoever goes on");
    }
}
