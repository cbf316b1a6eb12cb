use vhost::vhost_user::message::{VhostUserInflight, VhostUserLog};

use super::*;
use crate::config::ConfigSpace;
use crate::inflight::region_bytes;
use crate::memory::GuestMemory;

/// An engine that is given no ring.
struct Idle;

impl DeviceSink for Idle {
    fn ring_started(&mut self, _: Ring) {
        panic!("no ring was described");
    }

    fn ring_stopped(&mut self, _: u16, _: StopReason) -> u16 {
        panic!("no ring runs");
    }

    fn memory_changed(&mut self, _: &GuestMemory) {}
}

fn connection() -> Connection {
    let spec = DeviceSpec {
        name: "device".to_owned(),
        virtio_features: 1 << 28,
        assumed_features: 0,
        config: ConfigSpace::new(vec![]),
        queues: 1,
        queues_hint: |count| format!("ask for {count}"),
        queue_size_max: 64,
        in_order: false,
        announces: true,
        discards: |_| false,
        pool_ram: None,
        vmm_patience: crate::VMM_PATIENCE,
    };
    Connection::new(spec, Box::new(Idle))
}

fn file(bytes: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes).unwrap();
    file
}

#[test]
fn who_connects_next_finds_nothing_of_its_predecessor() {
    let mut connection = connection();
    let bytes = 2 << 20;
    let protocol_features = connection.get_protocol_features().unwrap().bits();
    connection.set_protocol_features(protocol_features).unwrap();
    connection.set_features(connection.offered()).unwrap();
    let region = VhostUserSingleMemoryRegion::new(0, bytes, 0x7000_0000, 0);
    connection.add_mem_region(&region, file(bytes), None).unwrap();
    connection.get_inflight_fd(&VhostUserInflight::new(0, 0, 1, 64)).unwrap();
    connection.set_log_base(&VhostUserLog::new(4096, 0), file(4096)).unwrap();
    connection.set_vring_kick(0, None).unwrap();
    connection.set_vring_enable(0, true).unwrap();
    connection.status = 3;
    assert!(
        connection.logging().is_some() && connection.inflight.is_some() && connection.memory.end() == bytes
    );

    connection.disconnected();
    assert_eq!((connection.features, connection.protocol_features, connection.status), (0, 0, 0));
    assert!(connection.log.is_none() && connection.inflight.is_none());
    assert_eq!(connection.memory.end(), 0);
    assert!(connection.vrings.iter().all(|vring| !vring.kick_known && !vring.enabled));
}

#[test]
fn who_asks_for_more_queues_than_there_are_is_told_how_many_to_ask_for() {
    let refusal = connection().vring(1).map(drop).unwrap_err();
    let vhost::vhost_user::Error::ReqHandlerError(error) = refusal else { panic!("{refusal:?}") };
    let message = error.to_string();
    assert!(message.contains("vring 1 of 1") && message.contains("ask for 1"), "{message}");
}

#[test]
fn a_region_in_flight_that_its_file_does_not_hold_is_refused() {
    let mut connection = connection();
    let bytes = region_bytes(1, 64) as u64;
    let described = |bytes| VhostUserInflight::new(bytes, 0, 1, 64);
    // Touching it would be our end.
    assert!(connection.set_inflight_fd(&described(bytes), file(bytes - 1)).is_err());
    assert!(connection.set_inflight_fd(&described(bytes - 1), file(bytes)).is_err());
    assert!(connection.inflight.is_none());
    connection.set_inflight_fd(&described(bytes), file(bytes)).unwrap();
    // Nor is it taken away from rings that run.
    connection.vrings[0].running = true;
    assert!(connection.set_inflight_fd(&described(bytes), file(bytes)).is_err());
    connection.vrings[0].running = false;
}

#[test]
fn memory_beyond_the_log_is_refused_also_if_all_of_it_is_replaced() {
    let mut connection = connection();
    connection.set_features(connection.offered()).unwrap();
    connection.set_log_base(&VhostUserLog::new(1, 0), file(4096)).unwrap();
    let region = |address| VhostUserMemoryRegion::new(address, 4096, 0x7000_0000, 0);
    connection.set_mem_table(&[region(7 * 4096)], vec![file(4096)], None).unwrap();
    assert!(connection.set_mem_table(&[region(8 * 4096)], vec![file(4096)], None).is_err());
}
