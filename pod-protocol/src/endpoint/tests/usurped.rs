//! Two kernels with the same host id, of which one stood still when the other one looked whether the slot is free.

use super::*;

pub(super) fn daemon_stops_when_another_kernel_has_its_slot<M: Memory>(pod: &TestPod<M>, wakeup: &str) {
    let mut controller = pod.controller(1);
    let daemon = pod.start(BACKEND, wakeup);
    controller.admit(BACKEND);
    assert_eq!(controller.command(BACKEND, &apply(nic("nic0", 1))), Ok(()));
    // The other one: a cache of its own, and the same slot.
    let (memory, at) = (pod.memory(HostId::new(1)), pod.layout.hello(BACKEND));
    let other = Hello {
        incarnation: daemon.incarnation ^ 2,
        pid: 42,
        protocol: Protocol::CURRENT.into(),
        started_unix_ms: 0,
    };
    other.publish(&memory, at);
    memory.full_fence();
    let (calls, fence) = (daemon.calls.clone(), daemon.fence.clone());
    assert_eq!(daemon.ended().expect("no error"), Exit::Fenced);
    assert!(fence.check().is_err());
    assert_eq!(calls.take(), [Call::Apply(nic("nic0", 1)), Call::Fenced, Call::Dropped]);
    assert_eq!(Hello::look(&memory, at), Some(other), "the other one's hello is not ours to erase");
}
