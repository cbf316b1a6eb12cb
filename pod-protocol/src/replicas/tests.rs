use std::time::{Duration, Instant};

use cxl_pool::simulated::{SimulatedMemory, check_seeds};
use cxl_pool::{HostId, Memory, Record, ReplicaHello, ReplicaId};

use super::*;
use crate::controller::PortWaker;
use crate::liveness::{Usurper, read_beat};
use crate::protocol::Protocol;
use crate::testing::{PATIENCE, TestPod, damage, while_beating};

const A: ReplicaId = ReplicaId::new(0);
const B: ReplicaId = ReplicaId::new(1);
const C: ReplicaId = ReplicaId::new(2);

fn open<M: Memory>(pod: &TestPod<M>, replica: ReplicaId) -> Result<ReplicaPort<M>, ReplicaPortError> {
    let memory = pod.memory(HostId::new(replica.get() + 1));
    let waker = PortWaker::new().expect("a descriptor");
    ReplicaPort::open(&pod.layout, memory, pod.run_directory(), (replica, Protocol::CURRENT), (true, waker))
}

/// Turns both until `b` has received something.
fn receive<M: Memory>(a: &mut ReplicaPort<M>, b: &mut ReplicaPort<M>) -> Vec<u8> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = Instant::now();
        assert!(now < deadline, "no message came");
        assert_eq!(a.poll(now), None);
        if let Some((_, message)) = b.poll(now) {
            return message;
        }
        b.wait(Duration::from_millis(1));
    }
}

/// Sends once there is a connection.
fn send<M: Memory>(a: &mut ReplicaPort<M>, b: &mut ReplicaPort<M>, to: ReplicaId, message: &[u8]) {
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = a.send(to, message.to_vec()) {
        assert!(matches!(error, ReplicaPortError::NotConnected { .. }), "{error}");
        assert!(Instant::now() < deadline, "no connection was made");
        assert_eq!(a.poll(Instant::now()), None);
        assert_eq!(b.poll(Instant::now()), None);
        a.wait(Duration::from_millis(1));
    }
}

fn long(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| seed.wrapping_add(u8::try_from(at % 251).expect("small"))).collect()
}

fn messages_arrive_whole_and_in_order<M: Memory>(pod: &TestPod<M>) {
    let (mut a, mut b) = (open(pod, A).expect("a slot"), open(pod, B).expect("a slot"));
    let messages = [b"".to_vec(), long(1, 3), long(2, 300_000), long(3, 65_536), long(4, 65_537)];
    for message in &messages {
        send(&mut a, &mut b, B, message);
    }
    for message in &messages {
        assert!(receive(&mut a, &mut b) == *message, "another message");
    }
    send(&mut b, &mut a, A, b"back");
    assert_eq!(receive(&mut b, &mut a), b"back");
}

fn restarted_replica_is_connected_anew<M: Memory>(pod: &TestPod<M>) {
    let (mut a, mut b) = (open(pod, A).expect("a slot"), open(pod, B).expect("a slot"));
    for round in 0..3 {
        send(&mut a, &mut b, B, &long(round, 100));
        assert_eq!(receive(&mut a, &mut b), long(round, 100));
        // What it did not take is lost with it.
        let losses = a.losses(B);
        a.send(B, long(round, 200_000)).expect("connected");
        assert_eq!(a.poll(Instant::now()), None);
        drop(b);
        b = open(pod, B).expect("a free slot");
        let deadline = Instant::now() + PATIENCE;
        while a.send(B, b"lost, perhaps".to_vec()).is_ok() {
            assert!(Instant::now() < deadline, "its restart is not noticed");
            a.wait(Duration::from_millis(5));
            assert_eq!(a.poll(Instant::now()), None);
        }
        assert_eq!(a.losses(B), losses + 1);
    }
    send(&mut b, &mut a, A, b"here again");
    assert_eq!(receive(&mut b, &mut a), b"here again");
}

/// As where its process was killed while it wrote its hello.
fn lives_are_counted_on_behind_a_hello_that_cannot_be_read<M: Memory>(pod: &TestPod<M>) {
    let (memory, at) = (pod.memory(HostId::new(B.get() + 1)), pod.layout.replica_hello(B));
    let life = || ReplicaHello::look(&memory, at).expect("a hello").life;
    let (mut a, mut seen) = (open(pod, A).expect("a slot"), 0);
    for round in 0..3 {
        let mut b = open(pod, B).expect("a free slot");
        assert!(life() > seen, "life {} after {seen}", life());
        seen = life();
        send(&mut b, &mut a, A, &long(round, 10));
        assert_eq!(receive(&mut b, &mut a), long(round, 10));
        drop(b);
        damage(&memory, at);
        assert_eq!(ReplicaHello::look(&memory, at), None);
    }
}

#[test]
fn messages_cross_a_real_pool() {
    messages_arrive_whole_and_in_order(&TestPod::real());
    lives_are_counted_on_behind_a_hello_that_cannot_be_read(&TestPod::real());
    restarted_replica_is_connected_anew(&TestPod::real());
}

#[test]
fn messages_cross_simulated_memory() {
    check_seeds("-p pod-protocol --lib", 4, |seed| {
        messages_arrive_whole_and_in_order(&TestPod::simulated(seed));
        restarted_replica_is_connected_anew(&TestPod::simulated(seed));
        lives_are_counted_on_behind_a_hello_that_cannot_be_read(&TestPod::simulated(seed));
        Ok(())
    });
}

#[test]
fn slot_in_use_is_refused() {
    let pod = TestPod::real();
    let first = open(&pod, A).expect("a slot");
    assert!(matches!(open(&pod, A), Err(ReplicaPortError::AlreadyRuns { .. })));
    drop(first);
    let missing = ReplicaId::new(3);
    assert!(matches!(open(&pod, missing), Err(ReplicaPortError::NoSlot { slots: 3, .. })));
}

const ELSEWHERE: ReplicaHello = ReplicaHello {
    incarnation: 1,
    life: 1,
    pid: 42,
    protocol: (Protocol::CURRENT.major, Protocol::CURRENT.minor),
};

#[test]
fn slot_that_another_host_uses_is_refused_whether_its_hello_can_be_read_or_not() {
    for damaged in [false, true] {
        let pod: TestPod<SimulatedMemory> = TestPod::simulated(3);
        let (other, hello) = (pod.memory(HostId::new(4)), pod.layout.replica_hello(A));
        ELSEWHERE.publish(&other, hello);
        // It has been there for a while: everybody sees it.
        other.full_fence();
        if damaged {
            damage(&other, hello);
        }
        let refused = while_beating(&other, pod.layout.replica_heartbeat(A), || open(&pod, A).err());
        let whose = (!damaged).then_some(42);
        assert!(
            matches!(refused, Some(ReplicaPortError::AliveElsewhere { pid, .. }) if pid == whose),
            "{refused:?}"
        );
        open(&pod, A).expect("nobody beats any more");
    }
}

fn a_replica_says_nothing_more_once_another_kernel_has_its_slot<M: Memory>(pod: &TestPod<M>) {
    let (mut a, mut b) = (open(pod, A).expect("a slot"), open(pod, B).expect("a slot"));
    send(&mut a, &mut b, B, b"one");
    assert_eq!(receive(&mut a, &mut b), b"one");
    let (other, hello) = (pod.memory(HostId::new(4)), pod.layout.replica_hello(A));
    ELSEWHERE.publish(&other, hello);
    other.full_fence();
    let deadline = Instant::now() + PATIENCE;
    while a.check().is_ok() {
        assert!(Instant::now() < deadline, "it is not noticed");
        assert_eq!(a.poll(Instant::now()), None);
        a.wait(Duration::from_millis(1));
    }
    let lost = |it: Result<(), ReplicaPortError>| match it {
        Err(ReplicaPortError::Usurped { replica: A, by }) => by,
        other => panic!("{other:?}"),
    };
    assert_eq!(lost(a.check()), Usurper::Process(42));
    assert_eq!(lost(a.send(B, b"two".to_vec())), Usurper::Process(42));
    let beat = || read_beat(&other, pod.layout.replica_heartbeat(A));
    let before = beat();
    for ms in [1000, 2000] {
        assert_eq!(a.poll(Instant::now() + Duration::from_millis(ms)), None);
    }
    assert_eq!(beat(), before, "the slot is kept alive");
    drop(a);
    assert_eq!(ReplicaHello::look(&other, hello), Some(ELSEWHERE));
}

#[test]
fn a_usurped_replica_stops_over_every_memory() {
    a_replica_says_nothing_more_once_another_kernel_has_its_slot(&TestPod::real());
    a_replica_says_nothing_more_once_another_kernel_has_its_slot(&TestPod::simulated(5));
}

#[test]
fn a_replica_that_says_much_keeps_nobody_else_from_being_heard() {
    let pod: TestPod<SimulatedMemory> = TestPod::simulated(4);
    let [mut a, mut b, mut c] = [A, B, C].map(|replica| open(&pod, replica).expect("a slot"));
    let deadline = Instant::now() + PATIENCE;
    let mut waiting = [A, B].to_vec();
    while !waiting.is_empty() {
        assert!(Instant::now() < deadline, "no connection was made");
        waiting.retain(|to| {
            let other = if *to == A { &mut a } else { &mut b };
            other.send(C, b"hello".to_vec()).is_err()
        });
        for port in [&mut a, &mut b, &mut c] {
            while port.poll(Instant::now()).is_some() {}
            port.wait(Duration::from_millis(1));
        }
    }
    for _ in 0..100 {
        a.send(C, b"and".to_vec()).expect("connected");
    }
    b.send(C, b"me too".to_vec()).expect("connected");
    for (replica, port) in [(A, &mut a), (B, &mut b)] {
        assert_eq!(port.poll(Instant::now()), None);
        // All of it is in the ring.
        pod.memory(HostId::new(replica.get() + 1)).full_fence();
    }
    let mut heard = Vec::new();
    while heard.len() < 101 {
        assert!(Instant::now() < deadline, "{} messages came", heard.len());
        heard.extend(c.poll(Instant::now()).map(|(from, _)| from));
    }
    let before = heard.iter().position(|from| *from == B).expect("it was heard");
    assert!(before < 100, "it was heard after all of the other's");
}

fn nothing_is_kept_for_a_stopped_replica<M: Memory>(pod: &TestPod<M>) {
    let (mut a, mut b) = (open(pod, A).expect("a slot"), open(pod, B).expect("a slot"));
    send(&mut a, &mut b, B, b"one");
    assert_eq!(receive(&mut a, &mut b), b"one");
    let losses = a.losses(B);
    // More than the ring takes, so that one of them is half sent.
    for number in 0..40 {
        a.send(B, long(number, 300_000)).expect("connected");
    }
    let stopped = Instant::now();
    assert_eq!(a.poll(stopped), None);
    // It may have beaten since it was looked at last.
    for seconds in [1, 4] {
        assert_eq!(a.poll(stopped + Duration::from_secs(seconds)), None);
    }
    assert_eq!(a.losses(B), losses + 1);
    let refused = a.send(B, b"too late".to_vec());
    assert!(matches!(refused, Err(ReplicaPortError::NotConnected { replica: B })), "{refused:?}");

    let (deadline, mut now) = (Instant::now() + PATIENCE, stopped + Duration::from_secs(4));
    let mut heard = Vec::new();
    let mut said = false;
    while heard.last().is_none_or(|last: &Vec<u8>| last != b"back") {
        assert!(Instant::now() < deadline, "it is not spoken to again");
        now += Duration::from_millis(20);
        while let Some((_, message)) = b.poll(now) {
            heard.push(message);
        }
        assert_eq!(a.poll(now), None);
        said = said || a.send(B, b"back".to_vec()).is_ok();
        b.wait(Duration::from_millis(1));
    }
    let before = heard.len() - 1;
    assert!(before < 30, "{before} messages were kept");
    for (number, message) in (0..).zip(&heard[..before]) {
        assert!(*message == long(number, 300_000), "message {number} is another one");
    }
}

#[test]
fn a_stopped_replica_costs_nothing_over_every_memory() {
    nothing_is_kept_for_a_stopped_replica(&TestPod::real());
    nothing_is_kept_for_a_stopped_replica(&TestPod::simulated(6));
}
