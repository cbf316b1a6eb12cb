//! A device in memory, which finishes what it has in any order.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cxl_pool::simulated::{OmittingMemory, Random, SimulatedMemory, SimulatedPool};
use cxl_pool::{HostId, LINE_BYTES, Memory};

use crate::message::Operation;
use crate::segments::Segment;
use crate::ssd::{Bounce, Command, Finished, Full, Geometry, Outcome, Ssd};

/// What a device holds, and whether it finishes anything.
pub(super) struct Drive {
    bytes: Mutex<Vec<u8>>,
    pub(super) held: AtomicBool,
}

impl Drive {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: Mutex::new(bytes), held: AtomicBool::new(false) }
    }

    pub(super) fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap()
    }

    pub(super) fn hold(&self, held: bool) {
        self.held.store(held, Ordering::Relaxed);
    }
}

/// See the [module](self).
pub(super) struct Ram {
    memory: OmittingMemory,
    /// The same, of which nothing is left out.
    cache: SimulatedMemory,
    drive: Arc<Drive>,
    /// If what is read goes past its host's cache.
    bounce: Option<Bounce<OmittingMemory>>,
    waiting: VecDeque<(Command, Vec<Segment>)>,
    random: Random,
    /// Another host, whose prefetcher now and then brings in what is about to be read from the device.
    early: Option<(SimulatedPool, HostId)>,
}

impl Ram {
    pub(super) fn new(
        drive: &Arc<Drive>,
        (memory, cache): (&OmittingMemory, SimulatedMemory),
        seed: u64,
    ) -> Self {
        let (memory, drive) = (memory.clone(), Arc::clone(drive));
        let mut random = Random::new(seed);
        let bounce = random.one_in(2).then(|| Bounce::new(memory.clone()));
        Self { memory, cache, bounce, drive, waiting: VecDeque::new(), random, early: None }
    }

    pub(super) fn read_early_by(self, pool: &SimulatedPool, host: HostId) -> Self {
        Self { early: Some((pool.clone(), host)), ..self }
    }

    fn carry_out(&mut self, command: &Command, segments: &[Segment]) {
        let mut bytes = self.drive.bytes.lock().unwrap();
        let mut at = usize::try_from(command.offset_bytes).unwrap();
        let length = usize::try_from(command.length_bytes).unwrap();
        match command.operation {
            Operation::Flush => return,
            Operation::WriteZeroes => return bytes[at..at + length].fill(0),
            Operation::Read | Operation::Write => {}
            Operation::Discard => panic!("nothing is discarded"),
        }
        for segment in segments {
            let place = &mut bytes[at..at + segment.bytes as usize];
            if command.operation == Operation::Write {
                self.memory.read(segment.start, place);
            } else {
                if let Some((pool, host)) = self.early.as_ref().filter(|_| self.random.one_in(2)) {
                    // Whichever process is there by now.
                    let early = pool.host(*host);
                    let lines = (0..u64::from(segment.bytes)).step_by(LINE_BYTES);
                    lines.for_each(|line| early.prefetch(segment.start.saturating_add(line)));
                }
                // It stores whole lines, as a copy by the CPU does in the end: what an eviction half way through
                // puts in the place of the guest's bytes is stored over.
                self.cache.invalidate(segment.start, segment.bytes.into());
                self.cache.full_fence();
                match &mut self.bounce {
                    None => self.memory.write(segment.start, place),
                    Some(bounce) => {
                        let read_at = |into: &mut [u8], at| {
                            let from = usize::try_from(at).unwrap();
                            into.copy_from_slice(&place[from..from + into.len()]);
                            Ok(into.len())
                        };
                        let read = bounce.read(0, std::iter::once(*segment), read_at);
                        assert_eq!(read.unwrap(), segment.bytes as usize);
                    }
                }
            }
            at += segment.bytes as usize;
        }
    }
}

impl Ssd for Ram {
    fn driver(&self) -> &'static str {
        "ram"
    }

    fn geometry(&self) -> Geometry {
        Geometry { size_bytes: self.drive.bytes().len() as u64, block_bytes: 512 }
    }

    fn submit(&mut self, command: Command) -> Result<(), Full> {
        let bytes = u32::try_from(command.length_bytes).unwrap();
        self.submit_list(command, &[Segment { start: command.data, bytes }])
    }

    fn submit_list(&mut self, command: Command, segments: &[Segment]) -> Result<(), Full> {
        self.waiting.push_back((command, segments.to_vec()));
        Ok(())
    }

    fn kick(&mut self) {}

    fn reap(&mut self, into: &mut Vec<Finished>) {
        // At times all at once, at times few.
        while !self.drive.held.load(Ordering::Relaxed) && !self.waiting.is_empty() && !self.random.one_in(40)
        {
            let chosen = usize::try_from(self.random.below(self.waiting.len() as u64)).unwrap();
            let Some((command, segments)) = self.waiting.remove(chosen) else { return };
            self.carry_out(&command, &segments);
            into.push(Finished { id: command.id, outcome: Outcome::Done });
        }
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn reads_past_cache(&self, _length_bytes: u64) -> bool {
        self.bounce.is_some()
    }

    fn write_verifier(&self) -> u64 {
        0
    }

    fn failure(&self) -> Option<&str> {
        None
    }
}
