//! Two kernels with the same host id.

use super::*;

fn of_another(incarnation: u64) -> Hello {
    Hello { incarnation, pid: 42, protocol: Protocol::CURRENT.into(), started_unix_ms: 0 }
}

/// Takes the slot as on another kernel, which has other locks, if it is free.
fn join_elsewhere<M: Memory>(pod: &TestPod<M>, wakeup: &str) -> Option<JoinError> {
    let elsewhere = tempfile::tempdir().expect("a directory");
    let config = config(elsewhere.path(), BACKEND.host, wakeup);
    pod.try_join(&config, BACKEND.role, &Calls::default()).err()
}

pub(super) fn slot_of_a_living_daemon_is_refused_whether_its_hello_can_be_read_or_not<M: Memory>(
    pod: &TestPod<M>,
    wakeup: &str,
) {
    let (other, hello) = (pod.memory(HostId::new(1)), pod.layout.hello(BACKEND));
    for damaged in [false, true] {
        of_another(5).publish(&other, hello);
        other.full_fence();
        if damaged {
            damage(&other, hello);
        }
        let refused = while_beating(&other, pod.layout.heartbeat(BACKEND), || join_elsewhere(pod, wakeup));
        let refused = refused.expect("it beats");
        let JoinError::HostIdInUse { endpoint: BACKEND, pid } = refused else { panic!("{refused}") };
        assert_eq!(pid, (!damaged).then_some(42));
        assert!(refused.to_string().contains("give each host an id of its own"), "{refused}");
        assert!(join_elsewhere(pod, wakeup).is_none(), "nobody beats any more");
    }
}

/// Whoever has seen that its hello is damaged stops, and that takes a while.
pub(super) fn daemon_keeps_its_slot_until_it_has_let_go<M: Memory>(pod: &TestPod<M>, wakeup: &str) {
    let daemon = pod.start(BACKEND, wakeup);
    let (calls, fence) = (daemon.calls.clone(), daemon.fence.clone());
    let held = calls.hold_up();
    damage(&pod.memory(HostId::new(1)), pod.layout.hello(BACKEND));
    let deadline = Instant::now() + PATIENCE;
    while fence.check().is_ok() {
        assert!(Instant::now() < deadline, "it does not see that its hello is damaged");
        thread::sleep(Duration::from_millis(1));
    }
    let refused = join_elsewhere(pod, wakeup);
    drop(held);
    assert_eq!(daemon.ended().expect("no error"), Exit::Fenced);
    let refused = refused.expect("it still held what it had");
    assert!(matches!(refused, JoinError::HostIdInUse { pid: None, .. }), "{refused}");
    assert!(refused.to_string().contains("cannot be read"), "{refused}");
    assert_eq!(calls.take(), [Call::Fenced, Call::Dropped]);
    assert!(join_elsewhere(pod, wakeup).is_none(), "free again");
}

/// One stood still when the other one looked whether the slot is free.
pub(super) fn daemon_stops_when_another_kernel_has_its_slot<M: Memory>(pod: &TestPod<M>, wakeup: &str) {
    let mut controller = pod.controller(1);
    let daemon = pod.start(BACKEND, wakeup);
    controller.admit(BACKEND);
    assert_eq!(controller.command(BACKEND, &apply(nic("nic0", 1))), Ok(()));
    // The other one: a cache of its own, and the same slot.
    let (memory, at) = (pod.memory(HostId::new(1)), pod.layout.hello(BACKEND));
    let other = of_another(daemon.incarnation ^ 2);
    other.publish(&memory, at);
    memory.full_fence();
    let (calls, fence) = (daemon.calls.clone(), daemon.fence.clone());
    assert_eq!(daemon.ended().expect("no error"), Exit::Fenced);
    assert!(fence.check().is_err());
    assert_eq!(calls.take(), [Call::Apply(nic("nic0", 1)), Call::Fenced, Call::Dropped]);
    assert_eq!(Hello::look(&memory, at), Some(other), "the other one's hello is not ours to erase");
}
