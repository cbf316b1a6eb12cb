//! What a ring does when it begins where a predecessor ended.

use rustix::event::{EventfdFlags, eventfd};
use virtio_queue::QueueT as _;
use vm_memory::{GuestMemoryMmap, MmapRegion};

use super::*;
use crate::inflight::{Resubmission, region_bytes};

const SIZE: u16 = 8;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;

/// A guest that offers its first descriptors, each of them a chain.
fn guest(offered: u16) -> GuestMemory {
    let memory = GuestMemory::from(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x4000)]).unwrap());
    for head in 0..offered {
        let at = u64::from(head) * 16;
        memory.write_obj(0x3000_u64, GuestAddress(at)).unwrap();
        memory.write_obj(64_u32, GuestAddress(at + 8)).unwrap();
        memory.write_obj(head, GuestAddress(AVAILABLE + 4 + 2 * u64::from(head))).unwrap();
    }
    memory.write_obj(offered, GuestAddress(AVAILABLE + 2)).unwrap();
    memory
}

/// A ring of which so many were used, and where the guest hears of it.
fn ring(memory: GuestMemory, used: u16, inflight: Option<InflightQueue>) -> (Ring, File) {
    ring_of(memory, used, inflight, false)
}

fn ring_of(memory: GuestMemory, used: u16, inflight: Option<InflightQueue>, in_order: bool) -> (Ring, File) {
    let mut queue = Queue::new(SIZE).unwrap();
    queue.set_size(SIZE);
    queue.try_set_desc_table_address(GuestAddress(0)).unwrap();
    queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).unwrap();
    queue.try_set_used_ring_address(GuestAddress(USED)).unwrap();
    queue.set_ready(true);
    queue.set_next_used(used);
    queue.set_next_avail(used);
    let call: File = eventfd(0, EventfdFlags::NONBLOCK).unwrap().into();
    let parts = RingParts {
        index: 0,
        queue,
        memory,
        kick: None,
        call: Arc::new(Mutex::new(Some(call.try_clone().unwrap()))),
        error: None,
        features: 0,
        event_index_unknown: false,
        inflight,
        in_order,
    };
    (Ring::new(parts), call)
}

#[test]
fn a_guest_hears_at_once_of_what_a_predecessor_may_have_completed() {
    // After 65536 requests it is used up to where it began.
    for (offered, used, signalled) in [(0, 0, false), (1, 0, true), (0, 1, true), (0, u16::MAX, true)] {
        let (_ring, call) = ring(guest(offered), used, None);
        assert_eq!(rustix::io::read(&call, &mut [0; 8]).is_ok(), signalled, "{offered}, {used}");
    }
}

#[test]
fn a_ring_that_was_used_before_is_known() {
    let is_known = |memory, used| ring(memory, used, None).0.was_used_before();
    assert!(!is_known(guest(0), 0));
    assert!(!is_known(guest(1), 0), "nobody has taken it");
    assert!(is_known(guest(1), 1));
    // As often as it takes for the indices to be what they were.
    let memory = guest(0);
    memory.write_obj(1_u32, GuestAddress(USED + 4 + 8 * u64::from(SIZE - 1) + 4)).unwrap();
    assert!(is_known(memory, 0));
}

#[test]
fn a_device_that_completes_in_order_takes_from_the_ring_again_what_the_record_has_in_flight() {
    let region = Arc::new(MmapRegion::new(region_bytes(1, SIZE)).unwrap());
    let inflight = || InflightQueue::open(Arc::clone(&region), 1, SIZE, 0, SIZE).unwrap();
    let (mut ring, _call) = ring_of(guest(3), 0, Some(inflight()), true);
    let mut chains = [Chain::default(), Chain::default(), Chain::default()];
    assert_eq!(ring.next_chains(&mut chains[..2]), Ok(2));
    let heads = chains.each_ref().map(Chain::head);
    ring.complete_together(&[(heads[0], 0)]).unwrap();
    assert_eq!(inflight().recover(1), Resubmission { heads: vec![heads[1]], next_available: 2 });

    let memory = ring.memory().clone();
    let (mut ring, _call) = ring_of(memory.clone(), 1, Some(inflight()), true);
    assert_eq!((ring.owed(), ring.next_available()), (0, 1));
    assert_eq!(inflight().recover(1), Resubmission { heads: vec![], next_available: 1 }, "nothing yet");
    assert_eq!(ring.next_chains(&mut chains), Ok(2));
    assert_eq!(chains[0].head(), heads[1]);
    // Two that a packet lies in come together or not at all.
    ring.complete_together(&[(chains[0].head(), 1), (chains[1].head(), 1)]).unwrap();
    let (ring, _call) = ring_of(memory, 3, Some(inflight()), true);
    assert_eq!((ring.owed(), ring.next_available()), (0, 3));
}

#[test]
fn a_request_that_was_put_back_is_not_in_flight() {
    let region = Arc::new(MmapRegion::new(region_bytes(1, SIZE)).unwrap());
    let inflight = || InflightQueue::open(Arc::clone(&region), 1, SIZE, 0, SIZE).unwrap();
    let (mut ring, _call) = ring(guest(2), 0, Some(inflight()));
    let mut chain = Chain::default();
    assert_eq!(ring.next_chain(&mut chain), Ok(Next::Chain));
    assert_eq!(ring.next_chain(&mut chain), Ok(Next::Chain));
    ring.put_back(&chain);
    assert_eq!(inflight().recover(0), Resubmission { heads: vec![0], next_available: 1 });
    // One that is reset by its driver has nothing of it left.
    ring.complete(0, 0).unwrap();
    assert_eq!(inflight().recover(1), Resubmission { heads: vec![], next_available: 1 });
}
