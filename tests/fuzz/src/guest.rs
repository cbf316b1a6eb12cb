//! What a guest may write into its memory: rings, descriptors, chains.

use std::cell::RefCell;
use std::slice;
use std::sync::{Arc, Mutex};

use vhost_frontend::{
    Chain, ChainError, ChainLimits, ChainReader, GuestMemory, Next, Ring, RingParts, Segment,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::input::Input;

const SIZE: u16 = 16;
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x1100;
const USED: u64 = 0x1200;
/// Where an input goes: the rings, and what lies behind them. Indirect tables may lie anywhere in it.
const MEMORY_BYTES: usize = 0x2000;
/// A second region that touches the first, and one apart.
const REGIONS: [(u64, usize); 3] =
    [(DESCRIPTORS, MEMORY_BYTES), (DESCRIPTORS + MEMORY_BYTES as u64, 0x1000), (0x10_0000, 0x1000)];

const INDIRECT: u64 = 1 << 28;
const EVENT_INDEX: u64 = 1 << 29;
pub(crate) const LIMITS: ChainLimits = ChainLimits { segments: 32, bytes: 0x4000 };

/// Runs `look` with a ring whose memory begins with `data`.
pub(crate) fn with_ring(features: u64, data: &[u8], look: impl FnOnce(&mut Ring)) {
    thread_local! {
        static MEMORY: RefCell<Option<GuestMemory>> = const { RefCell::new(None) };
    }
    let memory = MEMORY.with_borrow_mut(|memory| {
        let regions = REGIONS.map(|(start, bytes)| (GuestAddress(start), bytes));
        let new = || GuestMemory::from(GuestMemoryMmap::from_ranges(&regions).expect("a little memory"));
        memory.get_or_insert_with(new).clone()
    });
    let mut image = vec![0; MEMORY_BYTES];
    let bytes = data.len().min(MEMORY_BYTES);
    image[..bytes].copy_from_slice(&data[..bytes]);
    memory.write_slice(&image, GuestAddress(DESCRIPTORS)).expect("guest memory");

    let mut queue = Queue::new(SIZE).expect("a power of two");
    queue.set_size(SIZE);
    queue.try_set_desc_table_address(GuestAddress(DESCRIPTORS)).expect("aligned");
    queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).expect("aligned");
    queue.try_set_used_ring_address(GuestAddress(USED)).expect("aligned");
    queue.set_ready(true);
    let mut ring = Ring::new(RingParts {
        index: 0,
        queue,
        memory,
        kick: None,
        call: Arc::new(Mutex::new(None)),
        error: None,
        features,
        event_index_unknown: false,
        inflight: None,
        in_order: false,
    });
    ring.set_limits(LIMITS);
    look(&mut ring);
}

/// How many chains are taken at a time.
const BATCHES: [usize; 4] = [1, 3, 7, SIZE as usize + 1];

/// What was found of a chain: its head, and its parts or what is wrong with it.
type Found = (u16, Result<(Vec<Segment>, Vec<Segment>), ChainError>);

fn found(chain: &Chain, fault: Option<ChainError>) -> Found {
    let parts = || (chain.readable().to_vec(), chain.writable().to_vec());
    (chain.head(), fault.map_or_else(|| Ok(parts()), Err))
}

/// Batches are what looks for one chain at a time find, up to what breaks the ring, also where a part of each is put back.
fn batches(features: u64, data: &[u8], batch: usize, puts_back: bool) {
    let (mut expected, mut broken) = (Vec::new(), None);
    with_ring(features, data, |ring| {
        let mut chain = Chain::with_capacity(4);
        broken = loop {
            match ring.next_chain(&mut chain) {
                Ok(Next::Empty) => break None,
                Ok(Next::Chain) => expected.push(found(&chain, None)),
                Ok(Next::Malformed(error)) => expected.push(found(&chain, Some(error))),
                Err(error) => break Some(error),
            }
        };
    });
    with_ring(features, data, |ring| {
        let mut chains = vec![Chain::with_capacity(4); batch];
        let mut taken = Vec::new();
        let end = loop {
            let offered = match ring.next_chains(&mut chains) {
                Ok(0) => break None,
                Ok(offered) => offered,
                Err(error) => break Some(error),
            };
            // As who finds no room for the rest.
            let kept = if puts_back { offered.div_ceil(2) } else { offered };
            for chain in &chains[..kept] {
                if chain.fault().is_none() {
                    check(ring, chain);
                }
                taken.push(found(chain, chain.fault()));
            }
            chains[kept..offered].iter().rev().for_each(|chain| ring.put_back(chain));
            assert!(taken.len() <= usize::from(SIZE), "the ring never ends");
        };
        assert_eq!((&taken, end), (&expected, broken));
        assert_eq!(ring.is_broken(), broken.is_some());
        assert_eq!(ring.next_chains(&mut chains), Ok(0), "one that is broken is empty for ever");
        let used: Vec<(u16, u32)> = (0..).zip(&taken).map(|(written, (head, _))| (*head, written)).collect();
        assert_eq!(ring.complete_together(&used), Ok(()));
        for (place, (head, written)) in (0..).zip(&used) {
            let element: [u32; 2] =
                ring.memory().read_obj(GuestAddress(USED + 4 + 8 * place)).expect("in memory");
            assert_eq!(element, [u32::from(*head), *written]);
        }
        ring.signal();
    });
}

/// One byte of features and of what is done, then guest memory: sixteen descriptors, and from 0x100 on the available ring.
pub fn chain(data: &[u8]) {
    let mut input = Input(data);
    let choice = input.byte();
    let features = if choice & 1 == 0 { INDIRECT } else { 0 } | if choice & 2 == 0 { 0 } else { EVENT_INDEX };
    if choice & 32 != 0 {
        let batch = BATCHES[usize::from(choice >> 6)];
        return batches(features, input.0, batch, choice & 4 != 0);
    }
    with_ring(features, input.0, |ring| {
        let mut chain = Chain::with_capacity(4);
        let mut taken = 0;
        loop {
            match ring.next_chain(&mut chain) {
                Ok(Next::Empty) => break,
                Err(_) => {
                    assert!(ring.is_broken());
                    assert_eq!(
                        ring.next_chain(&mut chain),
                        Ok(Next::Empty),
                        "a broken ring is empty for ever"
                    );
                    break;
                }
                Ok(Next::Malformed(_)) => match ring.last_writable(&chain) {
                    Some(last) => {
                        let mut reader = ChainReader::new(ring.memory(), slice::from_ref(&last));
                        assert_eq!(reader.read(&mut [0]), Ok(()), "it is guest memory");
                    }
                    None if choice & 16 != 0 => {
                        ring.break_off(&chain);
                        assert!(ring.is_broken());
                        assert_eq!(ring.next_chain(&mut chain), Ok(Next::Empty));
                        break;
                    }
                    None => {}
                },
                Ok(Next::Chain) => check(ring, &chain),
            }
            assert!(chain.head() < SIZE);
            if choice & 4 != 0 && taken == 0 {
                ring.put_back(&chain);
            } else if choice & 8 != 0 {
                let _ = ring.complete_together(&[(chain.head(), 1), (chain.head(), 2)]);
            } else {
                let _ = ring.complete(chain.head(), 0);
            }
            ring.signal();
            taken += 1;
            // A ring holds no more than its size; one was put back. Completions do not write what was asked here.
            assert!(taken <= usize::from(SIZE) + 1, "the ring never ends");
        }
        let _ = ring.enable_notifications();
        ring.disable_notifications();
    });
}

/// What a walk accepts is within the limits, inside guest memory, and accounted for.
fn check(ring: &Ring, chain: &Chain) {
    assert!(chain.readable().len() + chain.writable().len() <= usize::from(LIMITS.segments));
    assert!(chain.readable_bytes() + chain.writable_bytes() <= LIMITS.bytes);
    for (segments, bytes) in
        [(chain.readable(), chain.readable_bytes()), (chain.writable(), chain.writable_bytes())]
    {
        assert_eq!(segments.iter().map(|segment| u64::from(segment.bytes)).sum::<u64>(), bytes);
        assert!(segments.iter().all(|segment| segment.bytes > 0));
        let mut all = vec![0; usize::try_from(bytes).expect("within the limits")];
        assert_eq!(ChainReader::new(ring.memory(), segments).read(&mut all), Ok(()));
    }
}
