//! Transmit queues that the VMM disables while they run.

use cxl_pool::HostId;
use cxl_pool::simulated::SimulatedPool;
use pod_protocol::worker::Task;

use crate::echo::{BUFFER_BYTES, frame, pairs, returned};
use crate::pod::{POOL_BYTES, all_features, lease, settle};

#[test]
fn what_lies_in_a_disabled_queue_comes_back_and_goes_nowhere() {
    let pool = SimulatedPool::new(12, POOL_BYTES);
    for mut pair in pairs(&pool.host(HostId::new(1)), &pool.host(HostId::new(2)), 512, all_features(), 8) {
        let base = pair.frontend.task.stop_ring(lease(1), 1, None);
        let disabled = pair.guest.transmit.ring(all_features(), base).disabled();
        pair.frontend.task.start_ring(lease(1), disabled, None);
        for number in 0..5 {
            assert!(pair.guest.send(&[0; 12], &frame(number, 100)));
        }
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 5, "its driver waits for none of them");
        assert!(pair.guest.received(BUFFER_BYTES).is_empty());
        assert_eq!(pair.frontend.lease(1).drops, [("queue-disabled".to_owned(), 5)].into());
        assert_eq!(pair.frontend.lease(1).tx_packets, 0);
        // Who sleeps is woken by the next one.
        assert!(pair.frontend.task.prepare_sleep());
        pair.frontend.task.resume();
        assert!(pair.guest.send(&[0; 12], &frame(5, 100)));
        assert!(!pair.frontend.task.prepare_sleep());
        pair.frontend.task.resume();
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        assert_eq!(pair.guest.transmit.reclaim_pairs().len(), 1);

        // It is enabled again.
        let base = pair.frontend.task.stop_ring(lease(1), 1, None);
        let enabled = pair.guest.transmit.ring(all_features(), base);
        pair.frontend.task.start_ring(lease(1), enabled, None);
        assert!(pair.guest.send(&[0; 12], &frame(6, 100)));
        settle(&mut [&mut pair.frontend, &mut pair.backend]);
        let arrived: Vec<_> = pair.guest.received(BUFFER_BYTES).into_iter().map(|(_, frame)| frame).collect();
        assert_eq!(arrived, [returned(&frame(6, 100))]);
    }
}
