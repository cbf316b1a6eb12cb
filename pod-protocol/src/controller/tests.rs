use std::time::{Duration, Instant};

use cxl_channel::Incoming;
use cxl_channel::doorbell::Doorbell;
use cxl_pool::simulated::{Random, SimulatedMemory, check_seeds};
use cxl_pool::{
    ByteOffset, ControllerHello, EndpointId, FenceLine, Grant, Hello, HostId, Memory, Record, Role,
};
use proptest::prelude::*;

use super::*;
use crate::answer::{Answer, Refusal};
use crate::commands::{Command, Version};
use crate::link::{Link, decode};
use crate::liveness::write_beat;
use crate::protocol::{Incompatible, Protocol};
use crate::reports::Report;
use crate::telemetry::Telemetry;
use crate::testing::{BACKEND, CONTROLLER_HOST, PATIENCE, REPLICA, TestPod, nic};

mod granted;
mod hidden;

/// A slot's owner without threads: it lives as the test says.
struct Puppet<'pod> {
    pod: &'pod TestPod<SimulatedMemory>,
    memory: SimulatedMemory,
    beat: u64,
}

impl<'pod> Puppet<'pod> {
    fn new(pod: &'pod TestPod<SimulatedMemory>) -> Self {
        Self { pod, memory: pod.memory(BACKEND.host), beat: 0 }
    }

    fn hello(&self, incarnation: u64, protocol: (u16, u16)) {
        Hello { incarnation, pid: 1, protocol, started_unix_ms: 0 }
            .publish(&self.memory, self.pod.layout.hello(BACKEND));
        self.memory.full_fence();
    }

    fn beat(&mut self) {
        self.beat += 1;
        write_beat(&self.memory, self.pod.layout.heartbeat(BACKEND), self.beat);
        self.memory.full_fence();
    }

    fn leave(&self) {
        Hello::erase(&self.memory, self.pod.layout.hello(BACKEND));
        self.memory.full_fence();
    }
}

/// A port whose clock the test moves.
struct Clock {
    port: ControllerPort<SimulatedMemory>,
    now: Instant,
}

impl Clock {
    fn new(pod: &TestPod<SimulatedMemory>) -> Self {
        Self::speaking(pod, Protocol::CURRENT)
    }

    fn speaking(pod: &TestPod<SimulatedMemory>, protocol: Protocol) -> Self {
        let port = pod.controller_speaking(1, protocol).port;
        Self { port, now: Instant::now() + Duration::from_secs(1) }
    }

    /// A life of the backend says hello, beats, and is seen.
    fn sees_appear(&mut self, puppet: &mut Puppet<'_>, incarnation: u64) {
        puppet.hello(incarnation, Protocol::CURRENT.into());
        self.after(20);
        puppet.beat();
        assert_eq!(self.after(20), [appeared(incarnation)]);
    }

    /// What happened to the backend within this long, with a look every 20 ms.
    fn after(&mut self, ms: u64) -> Vec<PortEvent> {
        (0..(ms / 20).max(1)).flat_map(|_| self.held_up(ms.min(20))).collect()
    }

    /// What happened to the backend after this long without a look.
    fn held_up(&mut self, ms: u64) -> Vec<PortEvent> {
        self.now += Duration::from_millis(ms);
        std::iter::from_fn(|| self.port.poll(self.now)).filter(|event| event.endpoint() == BACKEND).collect()
    }
}

fn appeared(incarnation: u64) -> PortEvent {
    PortEvent::Appeared { endpoint: BACKEND, incarnation, pid: 1 }
}

const GONE: PortEvent = PortEvent::Gone { endpoint: BACKEND };

#[test]
fn every_slot_is_accounted_for_after_opening() {
    let pod = TestPod::simulated(1);
    let mut puppet = Puppet::new(&pod);
    puppet.hello(7, Protocol::CURRENT.into());
    puppet.beat();
    let mut port = pod.controller(1).port;
    let mut now = Instant::now();
    let mut gone = Vec::new();
    let mut silent = Vec::new();
    for _ in 0..100 {
        now += Duration::from_millis(20);
        while let Some(event) = port.poll(now) {
            match event {
                PortEvent::Gone { endpoint } => gone.push(endpoint),
                PortEvent::Silent { endpoint, for_ms } => {
                    assert!(for_ms >= 200);
                    silent.push(endpoint);
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(silent, [BACKEND]);
    let others: Vec<EndpointId> = pod.layout.endpoints().filter(|endpoint| *endpoint != BACKEND).collect();
    assert_eq!(gone, others);
}

#[test]
fn endpoint_appears_falls_silent_comes_back_is_replaced_and_leaves() {
    let pod = TestPod::simulated(2);
    let mut puppet = Puppet::new(&pod);
    let mut clock = Clock::new(&pod);
    assert_eq!(clock.after(0), [GONE]);
    puppet.hello(7, Protocol::CURRENT.into());
    assert_eq!(clock.after(20), []);
    puppet.beat();
    assert_eq!(clock.after(20), [appeared(7)]);
    puppet.beat();
    assert_eq!(clock.after(20), []);
    assert_eq!(clock.after(180), []);
    assert_eq!(clock.after(20), [PortEvent::Silent { endpoint: BACKEND, for_ms: 200 }]);
    assert_eq!(clock.after(1000), [], "silence is told once");
    puppet.beat();
    assert_eq!(clock.after(20), [PortEvent::Back { endpoint: BACKEND }]);
    puppet.hello(8, Protocol::CURRENT.into());
    assert_eq!(clock.after(20), [GONE]);
    puppet.beat();
    assert_eq!(clock.after(20), [appeared(8)]);
    puppet.leave();
    assert_eq!(clock.after(20), [GONE]);
    assert_eq!(clock.after(1000), []);
}

#[test]
fn a_controller_that_was_held_up_blames_nobody_for_it() {
    let pod = TestPod::simulated(2);
    let mut puppet = Puppet::new(&pod);
    let mut clock = Clock::new(&pod);
    clock.after(0);
    clock.sees_appear(&mut puppet, 7);
    // All of the machine stood still, so the heartbeat did too.
    for _ in 0..3 {
        assert_eq!(clock.held_up(10_000), []);
    }
    puppet.beat();
    assert_eq!(clock.after(20), []);
    // Who is dead is found out all the same, however seldom it looks.
    let found: Vec<PortEvent> = (0..4).flat_map(|_| clock.held_up(10_000)).collect();
    assert_eq!(found, [PortEvent::Silent { endpoint: BACKEND, for_ms: 200 }]);
}

#[test]
fn silence_is_noticed_when_it_has_lasted_long_enough_and_not_at_the_next_look() {
    let pod = TestPod::simulated(2);
    let mut puppet = Puppet::new(&pod);
    let mut clock = Clock::new(&pod);
    clock.after(0);
    clock.sees_appear(&mut puppet, 7);
    for ms in [48, 48, 48, 46] {
        assert_eq!(clock.held_up(ms), []);
    }
    assert_eq!(clock.held_up(9), []);
    assert_eq!(clock.held_up(1), [PortEvent::Silent { endpoint: BACKEND, for_ms: 200 }]);
}

#[test]
fn endpoint_of_another_protocol_gets_no_grant_and_is_told_of() {
    let pod = TestPod::simulated(2);
    let mut puppet = Puppet::new(&pod);
    let mut clock = Clock::new(&pod);
    clock.after(0);
    puppet.hello(7, (Protocol::CURRENT.major + 1, 0));
    clock.after(20);
    puppet.beat();
    let told = clock.after(20);
    let [PortEvent::Incompatible { endpoint: BACKEND, why: Incompatible::Major { .. } }] = told[..] else {
        panic!("{told:?}")
    };
    assert!(matches!(clock.port.grant(BACKEND), Err(PortError::Incompatible { .. })));
    assert_eq!(clock.after(100), [], "it is told of once");
}

#[test]
fn endpoint_two_minors_away_gets_no_grant() {
    for (away, named) in [(Protocol::CURRENT.minor + 2, "upgrade this side"), (0, "upgrade the other side")] {
        let pod = TestPod::simulated(2);
        let mut puppet = Puppet::new(&pod);
        let mut clock =
            Clock::speaking(&pod, Protocol::of_minor(if away == 0 { 2 } else { Protocol::CURRENT.minor }));
        clock.after(0);
        puppet.hello(7, Protocol::of_minor(away).into());
        clock.after(20);
        puppet.beat();
        let told = clock.after(20);
        let [PortEvent::Incompatible { why, .. }] = told[..] else { panic!("{told:?}") };
        assert!(why.to_string().contains(named), "{why}");
    }
}

#[test]
fn endpoint_of_a_neighbouring_minor_version_is_taken_in() {
    let pod = TestPod::simulated(2);
    let mut puppet = Puppet::new(&pod);
    let mut clock = Clock::new(&pod);
    clock.after(0);
    puppet.hello(7, Protocol::of_minor(Protocol::CURRENT.minor + 1).into());
    clock.after(20);
    puppet.beat();
    assert_eq!(clock.after(20), [appeared(7)]);
}

#[test]
fn absent_and_unknown_endpoints_get_no_grant() {
    let pod = TestPod::simulated(2);
    let mut clock = Clock::new(&pod);
    clock.after(0);
    assert!(matches!(clock.port.grant(BACKEND), Err(PortError::Absent(_))));
    let outside = EndpointId::new(HostId::new(99), Role::Agent);
    assert!(matches!(clock.port.grant(outside), Err(PortError::NoSlot(_))));
    assert!(matches!(clock.port.fence(outside, 7), Err(PortError::NoSlot(_))));
}

#[test]
fn fenced_life_gets_no_further_grant_not_even_from_a_restarted_controller() {
    let pod = TestPod::simulated(4);
    let mut puppet = Puppet::new(&pod);
    let mut clock = Clock::new(&pod);
    clock.after(0);
    clock.sees_appear(&mut puppet, 7);
    clock.port.grant(BACKEND).expect("it lives");
    clock.port.fence(BACKEND, 7).expect("a slot");
    assert!(matches!(clock.port.grant(BACKEND), Err(PortError::Fenced(_))));

    drop(clock);
    let mut clock = Clock::new(&pod);
    clock.after(0);
    puppet.beat();
    assert_eq!(clock.after(20), [appeared(7)]);
    assert!(matches!(clock.port.grant(BACKEND), Err(PortError::Fenced(_))));
    clock.sees_appear(&mut puppet, 8);
    clock.port.grant(BACKEND).expect("a new life");
}

/// Another replica, which does not know yet that it was deposed, fences the life before.
fn late_fence(pod: &TestPod<SimulatedMemory>, incarnation: u64) {
    pod.other_controller(2).port.fence(BACKEND, incarnation).expect("a slot");
}

#[test]
fn a_life_that_is_in_the_place_of_the_fenced_one_keeps_what_it_has() {
    let pod = TestPod::simulated(4);
    let mut puppet = Puppet::new(&pod);
    let mut clock = Clock::new(&pod);
    clock.after(0);
    clock.sees_appear(&mut puppet, 8);
    clock.port.grant(BACKEND).expect("it lives");
    let grant = || Grant::look(&puppet.memory, pod.layout.grant(REPLICA, BACKEND)).expect("a grant");
    let granted = grant().fence_generation;
    let lines = || {
        pod.layout.replicas().filter_map(|it| FenceLine::look(&puppet.memory, pod.layout.fence(it, BACKEND)))
    };
    late_fence(&pod, 7);
    assert!(lines().all(|line| line.generation <= granted), "older daemons do not know for whom a line is");
    clock.port.fence(BACKEND, 7).expect("a slot");
    clock.port.grant(BACKEND).expect("it was not meant");
    // The replica looked who has the slot, stood still, and writes only now.
    let replica = pod.layout.replicas().find(|it| *it != REPLICA).expect("another one");
    FenceLine { generation: granted + 1, term: 0, incarnation: 7 }
        .publish(&pod.memory(CONTROLLER_HOST), pod.layout.fence(replica, BACKEND));
    clock.port.grant(BACKEND).expect("it was not meant");
    assert_eq!(grant().fence_generation, granted, "nor does it look as if it had been");
    clock.port.fence(BACKEND, 8).expect("a slot");
    assert!(matches!(clock.port.grant(BACKEND), Err(PortError::Fenced(_))));
    assert!(
        lines().any(|line| line.concerns(8) && line.generation > granted + 1),
        "above all that was written"
    );
}

#[test]
fn a_fence_is_written_where_nobody_can_be_seen() {
    let pod = TestPod::simulated(4);
    let mut puppet = Puppet::new(&pod);
    let mut clock = Clock::new(&pod);
    clock.after(0);
    clock.sees_appear(&mut puppet, 7);
    clock.port.grant(BACKEND).expect("it lives");
    let granted =
        Grant::look(&puppet.memory, pod.layout.grant(REPLICA, BACKEND)).expect("a grant").fence_generation;
    // Its hello is damaged, say.
    puppet.leave();
    clock.port.fence(BACKEND, 7).expect("a slot");
    let line = FenceLine::look(&puppet.memory, pod.layout.fence(REPLICA, BACKEND)).expect("a line");
    assert!(line.concerns(7) && line.generation > granted);
}

#[test]
fn each_grant_has_a_newer_control_generation_whoever_gives_it() {
    let pod = TestPod::simulated(5);
    let mut puppet = Puppet::new(&pod);
    let mut last = 0;
    for _ in 0..3 {
        let mut clock = Clock::new(&pod);
        clock.after(0);
        puppet.hello(7, Protocol::CURRENT.into());
        clock.after(20);
        puppet.beat();
        clock.after(20);
        for _ in 0..2 {
            clock.port.grant(BACKEND).expect("it lives");
            let grant = Grant::look(&puppet.memory, pod.layout.grant(REPLICA, BACKEND)).expect("visible");
            assert_eq!((grant.endpoint_incarnation, grant.term), (7, 1));
            assert!(grant.control_generation.get() > last);
            last = grant.control_generation.get();
        }
    }
}

#[test]
fn commands_that_wait_when_an_endpoint_is_replaced_are_answered() {
    let pod = TestPod::simulated(6);
    let mut puppet = Puppet::new(&pod);
    let mut clock = Clock::new(&pod);
    clock.after(0);
    puppet.hello(7, Protocol::CURRENT.into());
    clock.after(20);
    puppet.beat();
    clock.after(20);
    clock.port.grant(BACKEND).expect("it lives");
    let sent = clock.port.send(BACKEND, &Command::Synced { version: Version::default() });
    puppet.hello(8, Protocol::CURRENT.into());
    let answered =
        PortEvent::Answered { endpoint: BACKEND, command: sent, result: Err(CommandFailure::Disconnected) };
    assert_eq!(clock.after(20), [answered, GONE]);
}

#[test]
fn second_controller_is_refused_and_a_dead_ones_slot_is_taken() {
    let pod = TestPod::simulated(7);
    let first = pod.controller(1);
    let memory = pod.memory(CONTROLLER_HOST);
    let refused = ControllerPort::open_layout(&pod.layout, memory.clone(), pod.run_directory(), 2).err();
    assert!(matches!(refused, Some(PortError::AlreadyRuns { .. })), "{refused:?}");
    drop(first);
    ControllerHello { incarnation: 1, term: 1, pid: 1, protocol: Protocol::CURRENT.into() }
        .publish(&memory, pod.layout.controller(REPLICA));
    pod.controller(2);
}

#[test]
fn requests_that_make_no_sense_are_refused_and_the_next_one_is_heard() {
    let pod = TestPod::simulated(8);
    let mut puppet = Puppet::new(&pod);
    let mut clock = Clock::new(&pod);
    clock.after(0);
    puppet.hello(7, Protocol::CURRENT.into());
    clock.after(20);
    puppet.beat();
    clock.after(20);
    clock.port.grant(BACKEND).expect("it lives");
    let generation =
        Grant::look(&puppet.memory, pod.layout.grant(REPLICA, BACKEND)).expect("visible").control_generation;
    let mut link = Link::open(
        &puppet.memory,
        pod.layout.ring_from_endpoint(REPLICA, BACKEND),
        pod.layout.ring_to_endpoint(REPLICA, BACKEND),
        generation,
        Doorbell::connect(&pod.run_directory().controller_doorbell(REPLICA)),
        Protocol::CURRENT,
    );
    let deadline = clock.now + PATIENCE;
    let not_a_join = serde_json::to_vec(&Report::Telemetry(Telemetry::default())).expect("JSON");
    let senseless: [&[u8]; 4] = [b"", b"\xff\x00{", b"{\"report\":\"dance\"}", &not_a_join];
    for bytes in senseless {
        let id = link.request_bytes(bytes, deadline);
        let mut answer = None;
        while answer.is_none() {
            link.flush();
            assert_eq!(clock.after(1), []);
            answer = link.poll(clock.now);
        }
        let Some(Incoming::Response { id: answered, payload }) = answer else { panic!("{answer:?}") };
        assert_eq!(answered, id);
        let expected_unknown = bytes != not_a_join;
        let Ok(Err(refusal)) = decode::<Answer>(&payload) else { panic!("{payload:?}") };
        assert_eq!(matches!(refusal, Refusal::NotUnderstood { .. }), expected_unknown, "{refusal}");
    }
    assert_eq!(clock.port.not_understood(), 3);
    link.request(&Report::Join(crate::testing::join()), deadline).expect("room");
    link.flush();
    let mut heard = Vec::new();
    while heard.is_empty() {
        heard = clock.after(1);
    }
    assert!(matches!(heard[..], [PortEvent::Joined { .. }]), "{heard:?}");
}

/// Whatever is in the rings, neither end panics, and a new grant brings them together again.
#[test]
fn scribbled_rings_are_survived() {
    check_seeds("-p pod-protocol --lib", 4, |seed| {
        let pod = TestPod::simulated(seed);
        let mut controller = pod.controller(1);
        let daemon = pod.start(BACKEND, "socket");
        controller.admit(BACKEND);
        let mut random = Random::new(seed);
        for (host, ring) in [
            (CONTROLLER_HOST, pod.layout.ring_to_endpoint(REPLICA, BACKEND)),
            (BACKEND.host, pod.layout.ring_from_endpoint(REPLICA, BACKEND)),
        ] {
            // The first two lines are the sender's and the receiver's own: only slots carry what the other end said.
            let slots = ByteOffset::new(ring.start_byte().get() + 128);
            let bytes = ring.bytes() - 128;
            let memory = pod.memory(host);
            for at in (0..bytes).step_by(8) {
                memory.store(ByteOffset::new(slots.get() + at), random.bits());
            }
            memory.write_back(slots, bytes);
            memory.store_fence();
        }
        for _ in 0..50 {
            while controller.port.poll(Instant::now()).is_some() {}
            controller.port.wait(Duration::from_millis(2));
        }
        drop(controller);
        let mut controller = pod.controller(2);
        controller.admit(BACKEND);
        assert_eq!(
            controller
                .command(BACKEND, &Command::Apply { version: Version::default(), object: nic("nic0", 1) }),
            Ok(())
        );
        daemon.stop().expect("no error");
        Ok(())
    });
}

fn commands() -> impl Strategy<Value = Command> {
    let version = (any::<u64>(), any::<u64>()).prop_map(|(term, index)| Version { term, index });
    prop_oneof![
        (version.clone(), "[a-z]{1,8}", any::<u32>()).prop_map(|(version, name, lines)| Command::Apply {
            version,
            object: nic(&name, u64::from(lines))
        }),
        (version.clone(), "\\PC*")
            .prop_map(|(version, name)| Command::Remove { version, id: nic(&name, 1).id() }),
        version.prop_map(|version| Command::Synced { version }),
    ]
}

proptest! {
    #[test]
    fn any_bytes_are_understood_or_refused(bytes: Vec<u8>) {
        let _ = decode::<Command>(&bytes);
        let _ = decode::<Report>(&bytes);
        let _ = decode::<Answer>(&bytes);
    }

    #[test]
    fn damaged_commands_are_understood_or_refused(command in commands(), at: usize, byte: u8) {
        let mut bytes = serde_json::to_vec(&command).expect("JSON");
        let at = at % bytes.len();
        bytes[at] = byte;
        let _ = decode::<Command>(&bytes);
        let _ = decode::<Command>(&bytes[..at]);
    }

    #[test]
    fn commands_survive_the_wire(command in commands()) {
        let bytes = serde_json::to_vec(&command).expect("JSON");
        prop_assert_eq!(decode::<Command>(&bytes), Ok(command));
    }
}

#[test]
fn fields_of_later_versions_are_ignored() {
    let later = br#"{"command":"synced","version":{"term":1,"index":2,"epoch":3},"hint":"x"}"#;
    assert_eq!(decode::<Command>(later), Ok(Command::Synced { version: Version { term: 1, index: 2 } }));
}
