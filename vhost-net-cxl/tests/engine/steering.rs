//! What answers a guest with several pairs of queues arrives beside the queue over which the guest sends.

use cxl_pool::HostId;
use cxl_pool::simulated::SimulatedPool;
use pod_protocol::objects::{Object, ObjectId, PortObject};

use crate::echo::{BUFFER_BYTES, QUEUE_SIZE, frame, pairs};
use crate::guest::Guest;
use crate::pod::{POOL_BYTES, all_features, area, lease, port, route, settle};

/// More than there are queues, so that some would arrive elsewhere if their addresses alone decided.
const FLOWS: u32 = 8;

/// A UDP frame of a flow, as far as anybody looks at it.
fn of_flow(flow: u32) -> Vec<u8> {
    let mut frame = frame(flow, 60);
    frame[12..14].copy_from_slice(&[0x08, 0x00]);
    frame[14..38].fill(0);
    frame[14] = 0x45;
    frame[23] = 17;
    frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    frame[34..38].copy_from_slice(&[0x10, flow.to_le_bytes()[0], 0, 9]);
    frame
}

/// An answer to it: an echo leaves addresses as they are, and these are in the frame that comes back.
fn flow_of(frame: &[u8]) -> u32 {
    u32::from(frame[35])
}

#[test]
fn answers_arrive_beside_the_queue_over_which_their_flow_is_sent() {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    let (here, there) = (pool.host(HostId::new(1)), pool.host(HostId::new(2)));
    for mut pod in pairs(&here, &there, 512, all_features(), 8) {
        pod.frontend.task.remove(&ObjectId::Port(lease(1)), None);
        let port = port(1, area(8, 8), route(1, 1), None);
        pod.frontend.apply(Object::Port(PortObject { queue_pairs: 2, ..port }));
        let mut guests = [Guest::new(QUEUE_SIZE), Guest::new(QUEUE_SIZE)];
        for (guest, first) in guests.iter_mut().zip([0, 2]) {
            guest.post(QUEUE_SIZE, BUFFER_BYTES);
            pod.frontend.task.start_ring(lease(1), guest.receive.ring_as(first, all_features(), 0), None);
            pod.frontend.task.start_ring(
                lease(1),
                guest.transmit.ring_as(first + 1, all_features(), 0),
                None,
            );
        }
        // Which pair of queues sends the flows of even numbers; the other one sends the others.
        for even in [0, 1, 0] {
            for flow in 0..FLOWS {
                let pair = if flow % 2 == 0 { even } else { 1 - even };
                assert!(guests[pair].send(&[0; 12], &of_flow(flow)));
            }
            settle(&mut [&mut pod.frontend, &mut pod.backend]);
            for (pair, guest) in guests.iter_mut().enumerate() {
                let mut arrived: Vec<u32> =
                    guest.received(BUFFER_BYTES).iter().map(|(_, frame)| flow_of(frame)).collect();
                arrived.sort_unstable();
                let wanted: Vec<u32> = (0..FLOWS).filter(|flow| (flow % 2 == 0) == (pair == even)).collect();
                assert_eq!(arrived, wanted, "pair {pair}, which of them sends flows of even numbers: {even}");
                assert_eq!(guest.transmit.reclaim_pairs().len(), FLOWS as usize / 2);
            }
        }
        // One that does not run gets nothing.
        pod.frontend.task.stop_ring(lease(1), 2, None);
        for flow in 0..FLOWS {
            assert!(guests[1].send(&[0; 12], &of_flow(flow)));
        }
        settle(&mut [&mut pod.frontend, &mut pod.backend]);
        assert_eq!(guests[0].received(BUFFER_BYTES).len(), FLOWS as usize);
    }
}
