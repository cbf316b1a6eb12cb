//! Hellos that cannot be read, of endpoints and of the controller itself.

use super::*;
use crate::liveness::{Usurper, read_beat};
use crate::testing::{damage, while_beating};

const SILENT: PortEvent = PortEvent::Silent { endpoint: BACKEND, for_ms: 200 };

impl Puppet<'_> {
    fn is_damaged(&self) {
        damage(&self.memory, self.pod.layout.hello(BACKEND));
    }
}

/// It may act until it sees that itself: whatever it holds is given on after its fence, and not as if it had left.
#[test]
fn an_endpoint_whose_hello_cannot_be_read_has_not_left() {
    let pod = TestPod::simulated(2);
    let mut puppet = Puppet::new(&pod);
    let mut clock = Clock::new(&pod);
    assert_eq!(clock.after(0), [GONE]);
    clock.sees_appear(&mut puppet, 7);
    puppet.is_damaged();
    // Nobody can tell whose heartbeat it is.
    for _ in 0..9 {
        puppet.beat();
        assert_eq!(clock.after(20), []);
    }
    puppet.beat();
    assert_eq!(clock.after(20), [SILENT]);
    puppet.beat();
    assert_eq!(clock.after(1000), [], "it is told once");
    puppet.hello(7, Protocol::CURRENT.into());
    puppet.beat();
    assert_eq!(clock.after(20), [PortEvent::Back { endpoint: BACKEND }]);
    puppet.is_damaged();
    assert_eq!(clock.after(20), []);
    puppet.leave();
    assert_eq!(clock.after(20), [GONE], "that is certain");
}

#[test]
fn what_a_controller_cannot_read_when_it_opens_is_silent() {
    let pod = TestPod::simulated(2);
    let mut puppet = Puppet::new(&pod);
    puppet.hello(7, Protocol::CURRENT.into());
    puppet.is_damaged();
    let mut clock = Clock::new(&pod);
    assert_eq!(clock.after(0), []);
    assert_eq!(clock.after(180), []);
    assert_eq!(clock.after(20), [SILENT]);
    assert_eq!(clock.after(1000), []);
    clock.sees_appear(&mut puppet, 8);
}

#[test]
fn a_hello_that_is_just_being_written_is_neither_a_silence_nor_a_leave() {
    let pod = TestPod::simulated(2);
    let mut puppet = Puppet::new(&pod);
    let mut clock = Clock::new(&pod);
    assert_eq!(clock.after(0), [GONE]);
    puppet.is_damaged();
    assert_eq!(clock.after(1000), [], "nobody was there before");
    clock.sees_appear(&mut puppet, 7);
    puppet.is_damaged();
    assert_eq!(clock.after(20), []);
    puppet.hello(8, Protocol::CURRENT.into());
    assert_eq!(clock.after(20), [GONE], "the one before");
    puppet.beat();
    assert_eq!(clock.after(20), [appeared(8)]);
}

const ELSEWHERE: ControllerHello = ControllerHello {
    incarnation: 1,
    term: 1,
    pid: 42,
    protocol: (Protocol::CURRENT.major, Protocol::CURRENT.minor),
};

fn other_kernel(pod: &TestPod<SimulatedMemory>) -> SimulatedMemory {
    let memory = pod.memory(HostId::new(1));
    ELSEWHERE.publish(&memory, pod.layout.controller(REPLICA));
    memory.full_fence();
    memory
}

#[test]
fn controller_of_another_kernel_is_noticed_whether_its_hello_can_be_read_or_not() {
    for damaged in [false, true] {
        let pod = TestPod::simulated(7);
        let other = other_kernel(&pod);
        if damaged {
            damage(&other, pod.layout.controller(REPLICA));
        }
        let open = || {
            let memory = pod.memory(CONTROLLER_HOST);
            ControllerPort::open_layout(&pod.layout, memory, pod.run_directory(), 2)
        };
        let refused = while_beating(&other, pod.layout.controller_heartbeat(REPLICA), || open().err());
        let whose = (!damaged).then_some(42);
        assert!(matches!(refused, Some(PortError::AliveElsewhere { pid }) if pid == whose), "{refused:?}");
        open().expect("nobody beats any more");
    }
}

fn usurper<T>(done: &Result<T, PortError>) -> Option<Usurper> {
    match done {
        Err(PortError::Usurped(by)) => Some(*by),
        _ => None,
    }
}

#[test]
fn a_controller_does_nothing_more_once_another_kernel_has_its_slot() {
    let pod = TestPod::simulated(7);
    let mut puppet = Puppet::new(&pod);
    let mut clock = Clock::new(&pod);
    clock.after(0);
    clock.sees_appear(&mut puppet, 7);
    clock.port.check().expect("it has its slot");
    clock.port.grant(BACKEND).expect("it lives");
    let grant = || Grant::look(&puppet.memory, pod.layout.grant(REPLICA, BACKEND)).expect("a grant");
    let fence = || FenceLine::look(&puppet.memory, pod.layout.fence(REPLICA, BACKEND)).expect("a line");
    let written = (grant(), fence());
    let other = other_kernel(&pod);
    let by = Some(Usurper::Process(42));
    assert_eq!(usurper(&clock.port.grant(BACKEND)), by, "it looks before it acts");
    assert_eq!(usurper(&clock.port.fence(BACKEND, 7)), by);
    let sent = clock.port.send(BACKEND, &Command::Synced { version: Version::default() });
    let beat = || read_beat(&other, pod.layout.controller_heartbeat(REPLICA));
    let before = beat();
    puppet.leave();
    assert_eq!(clock.after(1000), [], "{sent:?}");
    assert_eq!(usurper(&clock.port.check()), by);
    assert_eq!((grant(), fence()), written);
    assert_eq!(beat(), before, "the slot is kept alive");
    drop(clock);
    assert_eq!(
        ControllerHello::look(&other, pod.layout.controller(REPLICA)),
        Some(ELSEWHERE),
        "it is not ours to erase"
    );
}

#[test]
fn a_controller_whose_slot_another_one_had_stops_too() {
    let pod = TestPod::simulated(7);
    let mut clock = Clock::new(&pod);
    clock.after(0);
    let other = other_kernel(&pod);
    ControllerHello::erase(&other, pod.layout.controller(REPLICA));
    other.full_fence();
    clock.after(20);
    assert_eq!(usurper(&clock.port.check()), Some(Usurper::Nobody));
}
