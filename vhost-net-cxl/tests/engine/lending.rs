//! What is lent to a backend is waited for: by a queue that stops, and by a VMM that takes guest memory back.

use std::sync::Arc;
use std::time::Duration;

use cxl_pool::HostId;
use cxl_pool::simulated::{SimulatedMemory, SimulatedPool};
use pod_protocol::config::Wakeup;
use pod_protocol::objects::Object;
use pod_protocol::worker::{Turned, Worker, WorkerConfig};
use vhost_frontend::GuestMemory;
use vhost_net_cxl::channel_counters::ChannelBook;
use vhost_net_cxl::channel_end::ChannelEnd;
use vhost_net_cxl::frontend::{Frontend, Order};
use vhost_net_cxl::message::{NetMessage, Opcode, Status};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion};

use crate::echo::{QUEUE_SIZE, frame};
use crate::guest::{Guest, QUEUE_BYTES};
use crate::pod::{POOL_BYTES, TestFrontend, Turn, all_features, area, channel, lease, open, route};
use crate::zero_copy::{SLOTS, offered, transmissions};

/// A frontend that can be given orders, and a bare end in place of its backend.
struct Alone {
    frontend: Turned<Frontend<SimulatedMemory>>,
    end: ChannelEnd<SimulatedMemory>,
    guest: Guest,
    _pool: SimulatedPool,
}

/// A frontend with a guest in the pool, and the other end of its channel.
fn ends() -> (TestFrontend<SimulatedMemory>, ChannelEnd<SimulatedMemory>, Guest, SimulatedPool) {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    let here = pool.host(HostId::new(1));
    let guest = Guest::in_simulated_pool(&here, QUEUE_SIZE);
    let mut frontend = TestFrontend::new(&here).with_pool_file(guest.pool_file);
    frontend.apply(Object::Channel(channel(1, 1, SLOTS, true)));
    frontend.apply(offered(route(1, 1), None));
    frontend.start(1, &guest, all_features());
    let mut end = open(&pool.host(HostId::new(2)), &ChannelBook::default())(&channel(1, 1, SLOTS, false))
        .expect("a channel");
    for _ in 0..1000 {
        frontend.turn_once();
        if end.ready() {
            break;
        }
    }
    assert!(end.ready());
    (frontend, end, guest, pool)
}

fn alone() -> Alone {
    let (frontend, end, guest, pool) = ends();
    let frontend = Turned::new(frontend.task).expect("sources");
    Alone { frontend, end, guest, _pool: pool }
}

impl Alone {
    fn heard(&mut self) -> Vec<NetMessage> {
        for _ in 0..5 {
            self.frontend.turn();
        }
        transmissions(&mut self.end)
    }
}

#[test]
fn a_queue_stops_once_its_memory_was_given_back() {
    let mut alone = alone();
    assert!(alone.guest.send(&[0; 12], &frame(1, 1514)));
    let heard = alone.heard();
    assert!(heard.len() == 1 && heard[0].more, "{heard:?}");
    // However often the task is turned, there is no answer, and the guest gets nothing back.
    assert_eq!(alone.frontend.call(|reply| Order::RingStopped(lease(1), 1, reply)), None);
    assert!(alone.guest.transmit.used().is_empty());
    // What it offers meanwhile is left to whoever serves the queue next.
    assert!(alone.guest.send(&[0; 12], &frame(2, 1514)));
    assert!(alone.heard().is_empty());
    alone.end.complete(NetMessage { opcode: Opcode::TransmitDone, ..heard[0] }, Status::Sent);
    alone.end.publish();
    assert!(alone.heard().is_empty());
    assert_eq!(alone.guest.transmit.used().len(), 1);
    assert_eq!(alone.frontend.call(|reply| Order::RingStopped(lease(1), 1, reply)), Some(0), "it is gone");
}

/// As whoever stops it hears it.
#[test]
fn a_queue_that_stops_is_answered_when_its_memory_was_given_back() {
    let (mut frontend, mut end, mut guest, _pool) = ends();
    assert!(guest.send(&[0; 12], &frame(1, 1514)));
    for _ in 0..5 {
        frontend.turn_once();
    }
    let heard = transmissions(&mut end);
    assert!(heard.len() == 1 && heard[0].more, "{heard:?}");
    let config = WorkerConfig {
        wakeup: Wakeup::Poll,
        busy_poll: Duration::ZERO,
        poll_in_flight: Duration::ZERO,
        cpu: None,
        fence: None,
    };
    let worker = Worker::spawn("frontend", config, None, frontend.task).expect("a worker");
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| worker.call(|reply| Order::RingStopped(lease(1), 1, reply)));
        for _ in 0..100 {
            assert_eq!(worker.call(|reply| Order::Uses(area(8, 1), reply)), Ok(true));
            assert!(!stopping.is_finished(), "the backend has what it was lent");
        }
        assert!(guest.transmit.used().is_empty());
        end.complete(NetMessage { opcode: Opcode::TransmitDone, ..heard[0] }, Status::Sent);
        end.publish();
        assert_eq!(stopping.join().expect("it ends"), Ok(1));
    });
    assert_eq!(guest.transmit.used().len(), 1, "before it was answered");
}

#[test]
fn memory_that_is_taken_back_is_gone_once_it_was_given_back() {
    let mut alone = alone();
    // Its rings lie in one half, and what it sends in the other.
    let half = QUEUE_BYTES / 2;
    let (rest, region) = alone
        .guest
        .memory
        .remove_region(GuestAddress(QUEUE_BYTES), QUEUE_BYTES)
        .expect("the part in the pool");
    let file = region.file_offset().expect("a part of the pool");
    let part = |from: u64| {
        let part = FileOffset::from_arc(Arc::clone(file.arc()), file.start() + from);
        let mapped = MmapRegion::from_file(part, usize::try_from(half).expect("small")).expect("a mapping");
        Arc::new(GuestRegionMmap::new(mapped, GuestAddress(QUEUE_BYTES + from)).expect("a region"))
    };
    let with_rings = rest.insert_region(part(0)).expect("beside the rest");
    let whole = with_rings.insert_region(part(half)).expect("beside the rest");
    let change = |alone: &mut Alone, memory: &GuestMemoryMmap<()>| {
        let memory = GuestMemory::from(memory.clone());
        alone.frontend.call(|reply| Order::MemoryChanged(lease(1), memory, reply))
    };
    let lend = |alone: &mut Alone, slot: u16| {
        let (at, packet) = (QUEUE_BYTES + half, [vec![0; 12], frame(slot.into(), 1514)].concat());
        alone.guest.store(at, &packet);
        alone.guest.transmit.offer(&[(slot, at, u32::try_from(packet.len()).expect("short"), 0)]);
        let heard = alone.heard();
        assert!(heard.len() == 1 && heard[0].more, "{heard:?}");
        heard[0]
    };
    assert_eq!(change(&mut alone, &whole), Some(()), "nothing is lent");
    let first = lend(&mut alone, 0);
    alone.end.complete(NetMessage { opcode: Opcode::TransmitDone, ..first }, Status::Sent);
    alone.end.publish();
    assert_eq!(alone.heard(), []);
    assert_eq!(change(&mut alone, &with_rings), Some(()), "it was given back");
    assert_eq!(change(&mut alone, &whole), Some(()));
    lend(&mut alone, 2);
    assert_eq!(change(&mut alone, &whole), Some(()), "nothing of it goes");
    assert_eq!(change(&mut alone, &with_rings), None, "the backend may read it");
}

#[test]
fn a_queue_whose_packets_were_copied_stops_at_once() {
    let mut alone = alone();
    assert!(alone.guest.send(&[0; 12], &frame(1, 300)));
    assert_eq!(alone.heard().len(), 1);
    let next = alone.frontend.call(|reply| Order::RingStopped(lease(1), 1, reply));
    assert_eq!(next, Some(1));
    assert_eq!(alone.guest.transmit.used().len(), 1);
}
