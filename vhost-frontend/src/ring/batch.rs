//! Many requests at a time: indices are read and written once for all of them.

use std::sync::atomic::Ordering;

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, VolatileMemory};

use super::{Ring, RingBroken, RingParts, Service};
use crate::chain::Chain;
use crate::view::GuestView;

/// The rings begin with flags and index, two bytes each.
const INDEX_OFFSET: u64 = 2;
const ENTRIES_OFFSET: u64 = 4;
const USED_ELEMENT_BYTES: usize = 8;

impl Ring {
    /// Takes as many requests as there are and `chains` has room for, and says how many. One that breaks the rules has a
    /// [`Chain::fault`]: give it back with [`Ring::complete_together`] and length 0, and count it. An error is returned
    /// once; after it the ring is empty for ever.
    pub fn next_chains(&mut self, chains: &mut [Chain]) -> Result<usize, RingBroken> {
        self.next_chains_within(chains, u32::MAX)
    }

    /// As [`Ring::next_chains`], until so many descriptors were walked: the last chain of them whole, and one at least. Chains may have many, and
    /// others wait meanwhile.
    pub fn next_chains_within(
        &mut self,
        chains: &mut [Chain],
        descriptors: u32,
    ) -> Result<usize, RingBroken> {
        if self.is_broken() || chains.is_empty() {
            return Ok(0);
        }
        if !self.again.is_empty() {
            return self.next_chains_again(chains, descriptors);
        }
        self.taken_again = false;
        let RingParts { queue, memory, inflight, .. } = &mut self.parts;
        let view = GuestView::new(memory);
        let taken = available_index(queue, memory, self.table.size).and_then(|available| {
            self.available = available;
            let next = queue.next_avail();
            let count = usize::from(available.wrapping_sub(next)).min(chains.len());
            take_heads(&view, queue.avail_ring(), next, self.table.size, &mut chains[..count])
        });
        let taken = match taken {
            Ok(taken) => taken,
            Err(broken) => {
                self.park();
                return Err(broken);
            }
        };
        self.table.prefetch(&view, chains[..usize::from(taken)].iter().map(Chain::head));
        let (mut walked, mut descriptors_walked) = (0, 0);
        for chain in &mut chains[..usize::from(taken)] {
            if walked > 0 && descriptors_walked >= descriptors {
                break;
            }
            let outcome = self.table.walk(&view, chain.head(), chain);
            chain.set_fault(outcome.err());
            walked += 1;
            descriptors_walked += u32::from(chain.walked());
            // By the time that it is copied, its front has arrived.
            if let Some(first) = chain.readable().first() {
                if let Some(slice) = view.slice(first.address, first.bytes as usize) {
                    cxl_pool::prefetch_front(&slice);
                }
            } else if let Some(first) = chain.writable().first()
                && let Some(slice) = view.slice(first.address, first.bytes as usize)
            {
                cxl_pool::prefetch_front_to_write(&slice);
            }
        }
        let next = queue.next_avail().wrapping_add(walked);
        queue.set_next_avail(next);
        if let Some(inflight) = inflight {
            chains[..usize::from(walked)].iter().for_each(|chain| inflight.take(chain.head()));
        }
        Ok(usize::from(walked))
    }

    /// Those that a predecessor took, and no others: the two kinds are put back to different places.
    fn next_chains_again(&mut self, chains: &mut [Chain], descriptors: u32) -> Result<usize, RingBroken> {
        let count = chains.len().min(self.again.len());
        let (mut walked, mut descriptors_walked) = (0, 0);
        for chain in &mut chains[..count] {
            if walked > 0 && descriptors_walked >= descriptors {
                break;
            }
            self.next_chain(chain)?;
            walked += 1;
            descriptors_walked += u32::from(chain.walked());
        }
        Ok(walked)
    }

    /// Puts several requests, each with how many bytes of it were written, into the used ring so that the guest sees all
    /// of them at once: elements first, then the index, once. A driver that finds fewer buffers than a packet's
    /// header names drops the packet. The guest learns of it by [`Ring::signal`].
    pub fn complete_together(&mut self, used: &[(u16, u32)]) -> Result<(), RingBroken> {
        if self.service == Service::Silent || used.is_empty() {
            return Ok(());
        }
        let RingParts { queue, memory, inflight, .. } = &mut self.parts;
        let heads = || used.iter().map(|(head, _)| *head);
        if let Some(inflight) = inflight {
            inflight.completing(heads());
        }
        let Some(next) = write_used(memory, queue.used_ring(), queue.next_used(), self.table.size, used)
        else {
            return self.silence();
        };
        let before = queue.next_used();
        queue.set_next_used(next);
        if let Some(inflight) = inflight {
            inflight.completed(heads(), next);
        }
        self.log_used(before, next.wrapping_sub(before));
        self.unsignalled = true;
        Ok(())
    }
}

fn available_index(queue: &Queue, memory: &GuestMemoryMmap<()>, size: u16) -> Result<u16, RingBroken> {
    let next = queue.next_avail();
    let index = queue.avail_idx(memory, Ordering::Acquire).map_err(|_| RingBroken::NotInMemory)?.0;
    if index.wrapping_sub(next) > size {
        return Err(RingBroken::AvailableIndex { next, index, size });
    }
    Ok(index)
}

/// Sets the heads of the chains, as far as the guest names descriptors.
fn take_heads(
    view: &GuestView<'_>,
    ring: u64,
    next: u16,
    size: u16,
    chains: &mut [Chain],
) -> Result<u16, RingBroken> {
    let whole = view.slice(GuestAddress(ring + ENTRIES_OFFSET), 2 * usize::from(size));
    let mut taken = 0;
    for chain in chains {
        // The size is a power of two.
        let place = usize::from(next.wrapping_add(taken) & (size - 1));
        let entry = match &whole {
            Some(entries) => entries.get_ref::<u16>(2 * place).ok().map(|entry| entry.load()),
            // The ring begins in one region and ends in the next.
            None => view
                .memory()
                .load(GuestAddress(ring + ENTRIES_OFFSET + 2 * place as u64), Ordering::Relaxed)
                .ok(),
        };
        let head = u16::from_le(entry.ok_or(RingBroken::NotInMemory)?);
        if head >= size {
            // Its turn comes once those before it were taken.
            return if taken > 0 { Ok(taken) } else { Err(RingBroken::Head { head, size }) };
        }
        chain.restart(head);
        taken += 1;
    }
    Ok(taken)
}

/// Writes the elements, then the index. Returns the new index; nothing if the ring is not in guest memory.
fn write_used(
    memory: &GuestMemoryMmap<()>,
    ring: u64,
    next: u16,
    size: u16,
    used: &[(u16, u32)],
) -> Option<u16> {
    let view = GuestView::new(memory);
    let whole = view.slice(GuestAddress(ring + ENTRIES_OFFSET), USED_ELEMENT_BYTES * usize::from(size));
    let mut next = next;
    for (head, written) in used {
        let element = (u64::from(*head) | u64::from(*written) << 32).to_le();
        let place = USED_ELEMENT_BYTES * usize::from(next & (size - 1));
        match &whole {
            Some(elements) => elements.get_ref::<u64>(place).ok()?.store(element),
            None => memory.write_obj(element, GuestAddress(ring + ENTRIES_OFFSET + place as u64)).ok()?,
        }
        next = next.wrapping_add(1);
    }
    memory.store(next.to_le(), GuestAddress(ring + INDEX_OFFSET), Ordering::Release).ok()?;
    Some(next)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::super::Next;
    use super::*;
    use crate::chain::ChainError;
    use crate::memory::GuestMemory;

    const SIZE: u16 = 8;
    const AVAILABLE: u64 = 0x1000;
    /// The used ring begins in one region and ends in the next.
    const USED: u64 = 0x1ff0;

    fn ring_of(heads: &[u16]) -> (Ring, GuestMemory) {
        let ranges = [(GuestAddress(0), 0x2000), (GuestAddress(0x2000), 0x1000)];
        let memory = GuestMemory::from(GuestMemoryMmap::from_ranges(&ranges).unwrap());
        for index in 0..SIZE {
            // Each descriptor is a chain of its own; number 2 leads out of the table.
            let (flags, next) = if index == 2 { (1u16, 99u16) } else { (0, 0) };
            let at = u64::from(index) * 16;
            memory.write_obj(0x2800u64 + u64::from(index), GuestAddress(at)).unwrap();
            memory.write_obj(5u32, GuestAddress(at + 8)).unwrap();
            memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
            memory.write_obj(next, GuestAddress(at + 14)).unwrap();
        }
        for (place, head) in heads.iter().enumerate() {
            memory.write_obj(*head, GuestAddress(AVAILABLE + 4 + 2 * place as u64)).unwrap();
        }
        memory.write_obj(u16::try_from(heads.len()).unwrap(), GuestAddress(AVAILABLE + 2)).unwrap();
        let mut queue = Queue::new(SIZE).unwrap();
        queue.set_size(SIZE);
        queue.set_desc_table_address(Some(0), Some(0));
        queue.set_avail_ring_address(Some(0x1000), Some(0));
        queue.set_used_ring_address(Some(0x1ff0), Some(0));
        queue.set_ready(true);
        let parts = RingParts {
            index: 0,
            queue,
            memory: memory.clone(),
            kick: None,
            call: Arc::new(Mutex::new(None)),
            error: None,
            features: 0,
            event_index_unknown: false,
            inflight: None,
            in_order: false,
        };
        (Ring::new(parts), memory)
    }

    #[test]
    fn a_batch_is_what_single_looks_would_have_taken() {
        let (mut ring, _memory) = ring_of(&[3, 2, 1, 0]);
        let mut chains = vec![Chain::default(); 3];
        assert_eq!(ring.next_chains(&mut chains), Ok(3));
        assert_eq!(chains.iter().map(Chain::head).collect::<Vec<_>>(), [3, 2, 1]);
        assert_eq!(chains[0].readable_bytes(), 5);
        assert_eq!(chains[1].fault(), Some(ChainError::OutOfTable { index: 99, size: SIZE }));
        assert_eq!(chains[2].fault(), None, "what a chain broke is forgotten with it");
        ring.put_back(&chains[2]);
        assert_eq!(ring.next_chains(&mut chains), Ok(2));
        assert_eq!((chains[0].head(), chains[1].head()), (1, 0));
        assert_eq!(ring.next_chains(&mut chains), Ok(0));
    }

    #[test]
    fn a_batch_ends_once_enough_descriptors_were_walked() {
        let (mut ring, _memory) = ring_of(&[3, 4, 1, 0]);
        let mut chains = vec![Chain::default(); 4];
        assert_eq!(ring.next_chains_within(&mut chains, 0), Ok(1), "one at least");
        assert_eq!(ring.next_chains_within(&mut chains, 2), Ok(2));
        assert_eq!((chains[0].head(), chains[1].head()), (4, 1));
        assert_eq!(ring.next_chains_within(&mut chains, 2), Ok(1), "what was not walked was not taken");
        assert_eq!(chains[0].head(), 0);
    }

    #[test]
    fn a_head_beyond_the_table_waits_for_those_before_it_and_then_breaks_the_ring() {
        let (mut ring, _memory) = ring_of(&[3, 77]);
        let mut chains = vec![Chain::default(); 4];
        assert_eq!(ring.next_chains(&mut chains), Ok(1));
        assert_eq!(ring.next_chains(&mut chains), Err(RingBroken::Head { head: 77, size: SIZE }));
        assert_eq!(ring.next_chains(&mut chains), Ok(0), "silent from now on");
    }

    #[test]
    fn an_available_index_out_of_reach_breaks_the_ring() {
        let (mut ring, memory) = ring_of(&[3]);
        memory.write_obj(SIZE + 1, GuestAddress(AVAILABLE + 2)).unwrap();
        let broken = RingBroken::AvailableIndex { next: 0, index: SIZE + 1, size: SIZE };
        assert_eq!(ring.next_chains(&mut [Chain::default()]), Err(broken));
    }

    #[test]
    fn a_broken_ring_gives_back_what_was_taken_from_it() {
        let (mut ring, memory) = ring_of(&[3, 1, 2]);
        let mut chain = Chain::default();
        for _ in 0..3 {
            ring.next_chain(&mut chain).unwrap();
        }
        ring.break_off(&chain);
        assert_eq!(ring.next_chain(&mut chain), Ok(Next::Empty));
        ring.complete(3, 7).unwrap();
        ring.complete_together(&[(1, 8)]).unwrap();
        let element = |place: u64| memory.read_obj::<u64>(GuestAddress(USED + 4 + 8 * place)).unwrap();
        assert_eq!([element(0), element(1)], [3 | 7 << 32, 1 | 8 << 32]);
        let index: u16 = memory.read_obj(GuestAddress(USED + 2)).unwrap();
        assert_eq!((index, ring.next_available()), (2, 2), "what broke it is in it again");
    }

    #[test]
    fn a_ring_that_cannot_be_written_says_so_once() {
        let (mut ring, _memory) = ring_of(&[3, 1]);
        assert_eq!(ring.next_chains(&mut [Chain::default(), Chain::default()]), Ok(2));
        let elsewhere = GuestMemoryMmap::from_ranges(&[(GuestAddress(0x1_0000), 0x1000)]).unwrap();
        ring.set_memory(GuestMemory::from(elsewhere));
        assert_eq!(ring.complete(3, 0), Err(RingBroken::NotInMemory));
        assert_eq!(ring.complete(1, 0), Ok(()));
        assert_eq!(ring.complete_together(&[(1, 0)]), Ok(()));
    }

    #[test]
    fn used_elements_come_in_order_round_the_ring_and_across_regions() {
        let (mut ring, memory) = ring_of(&[]);
        for lap in 0..3u16 {
            let used: Vec<(u16, u32)> = (0..6).map(|head| (head, u32::from(lap) + 100)).collect();
            ring.complete_together(&used).unwrap();
            let index: u16 = memory.read_obj(GuestAddress(USED + 2)).unwrap();
            assert_eq!(index, 6 * (lap + 1));
            for (head, written) in used {
                let place = u64::from((6 * lap + head) % SIZE);
                let element: u64 = memory.read_obj(GuestAddress(USED + 4 + 8 * place)).unwrap();
                assert_eq!(element, u64::from(head) | u64::from(written) << 32);
            }
        }
    }
}
