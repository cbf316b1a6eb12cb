//! Two controllers, or two of one replica, on two kernels, each of which finds the slot free: one stood still when the other one looked.

use cxl_pool::{ControllerHello, Pool, Record, ReplicaHello, ReplicaId};
use pod_controller::controller::ControllerError;
use pod_protocol::controller::PortError;
use pod_protocol::protocol::Protocol;

use crate::support::Pod;
use crate::support::replicas::{Replicas, create};

fn pool(pod: &Pod) -> Pool {
    Pool::open(&pod.path("pool")).expect("the pool")
}

#[test]
fn a_controller_ends_when_another_kernels_has_its_slot() {
    let mut pod = Pod::new();
    let pool = pool(&pod);
    let (memory, at) = (pool.hardware(), pool.layout().controller(ReplicaId::default()));
    let found = ControllerHello::look(&memory, at).expect("it runs");
    let other = ControllerHello { incarnation: found.incarnation ^ 2, pid: 42, ..found };
    other.publish(&memory, at);
    let ended = pod.controller.take().expect("it runs").ended();
    let ControllerError::Port(PortError::Usurped(by)) = ended else { panic!("{ended}") };
    assert!(by.to_string().contains("process 42 of another host"), "{by}");
    assert_eq!(ControllerHello::look(&memory, at), Some(other), "it is not ours to erase");
}

#[test]
fn a_replica_ends_when_another_kernels_has_its_slot_and_the_others_go_on() {
    let mut pod = Pod::new_in_file();
    pod.stop_controller();
    let mut replicas = Replicas::new(pod.directory.path());
    replicas.start_first(3);
    let pool = pool(&pod);
    let memory = pool.hardware();
    // Whether it leads or not.
    let leader = replicas.leader(&[0, 1, 2]);
    for replica in [leader, (leader + 1) % 3] {
        let at = pool.layout().replica_hello(ReplicaId::new(replica));
        let found = ReplicaHello::look(&memory, at).expect("it runs");
        assert_eq!(found.protocol, Protocol::CURRENT.into());
        let other = ReplicaHello { incarnation: found.incarnation ^ 2, pid: 42, ..found };
        other.publish(&memory, at);
        let said = replicas.ended(replica);
        let last = said.lines().last().unwrap_or_default().to_owned();
        assert!(
            last.contains(&format!("controller replica {replica} stops: process 42 of another host")),
            "{last}"
        );
        assert_eq!(ReplicaHello::look(&memory, at), Some(other), "it is not ours to take away");
        // That one is not there: it is no more than a hello.
        replicas.start(replica, &[]);
        let next = replicas.leader(&[0, 1, 2]);
        create(&replicas.client(next), &format!("after-{replica}"));
    }
}
