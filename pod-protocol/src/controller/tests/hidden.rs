//! Hellos that cannot be read.

use super::*;
use crate::testing::damage;

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
