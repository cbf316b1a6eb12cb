use std::thread;
use std::time::{Duration, Instant};

use cxl_channel::Incoming;
use cxl_channel::doorbell::Doorbell;
use cxl_pool::{
    Area, ControllerHello, FenceLine, Generation, Grant, Hello, HostId, LineCount, LineOffset, Memory,
    Record, Role,
};

use super::*;
use crate::answer::{Answer, Refusal};
use crate::commands::{Command, Version};
use crate::config::RunSection;
use crate::controller::CommandFailure;
use crate::ids::{LeaseId, RegionId};
use crate::link::{Link, decode};
use crate::liveness::write_beat;
use crate::protocol::Protocol;
use crate::reports::{DeviceReport, Report};
use crate::testing::{
    BACKEND, Call, Calls, OTHER_CONTROLLER_HOST, OTHER_REPLICA, PATIENCE, REPLICA, TestPod, config, damage,
    disk, nic, while_beating,
};

mod again;
mod rounds;
mod stuck;
mod usurped;

use self::again::restarted_controller_hears_what_a_device_has_become;
use self::usurped::{
    daemon_keeps_its_slot_until_it_has_let_go, daemon_stops_when_another_kernel_has_its_slot,
    slot_of_a_living_daemon_is_refused_whether_its_hello_can_be_read_or_not,
};

const VERSION: Version = Version { term: 1, index: 1 };

fn apply(object: crate::objects::Object) -> Command {
    Command::Apply { version: VERSION, object }
}

const SYNCED: Command = Command::Synced { version: VERSION };

/// The same test over simulated memory, over a real pool with doorbells, and over one without.
macro_rules! over_every_memory {
    ($($test:ident),+ $(,)?) => {
        mod simulated { $(#[test] fn $test() { super::$test(&crate::testing::TestPod::simulated(7), "socket"); })+ }
        mod real { $(#[test] fn $test() { super::$test(&crate::testing::TestPod::real(), "socket"); })+ }
        mod polling { $(#[test] fn $test() { super::$test(&crate::testing::TestPod::real(), "poll"); })+ }
    };
}

over_every_memory!(
    daemon_joins_obeys_and_reports,
    restarted_controller_finds_objects_undisturbed,
    restarted_controller_hears_what_a_device_has_become,
    commands_answer_for_a_connection_that_ended,
    daemon_obeys_the_highest_term_of_several_controllers,
    fence_of_one_controller_is_known_to_the_others,
    fenced_daemon_stops_and_its_successor_is_granted,
    daemon_stops_when_another_kernel_has_its_slot,
    daemon_keeps_its_slot_until_it_has_let_go,
    slot_of_a_living_daemon_is_refused_whether_its_hello_can_be_read_or_not,
    refused_daemon_ends_with_the_reason,
    daemon_without_controller_waits_and_stops_when_told,
);

fn daemon_joins_obeys_and_reports<M: Memory>(pod: &TestPod<M>, wakeup: &str) {
    let mut controller = pod.controller(1);
    let daemon = pod.start(BACKEND, wakeup);
    let (incarnation, join) = controller.admit(BACKEND);
    assert_eq!(incarnation, daemon.incarnation);
    // It says by itself for how long it may act unseen.
    let fence_ms = Some(RunSection::default().fence_ms);
    assert_eq!(join, Join { fence_ms, ..crate::testing::join() });

    assert_eq!(controller.command(BACKEND, &apply(nic("nic0", 1))), Ok(()));
    assert_eq!(controller.command(BACKEND, &apply(nic("nic0", 1))), Ok(()));
    assert_eq!(
        controller.command(BACKEND, &apply(nic("broken", 1))),
        Err(CommandFailure::Refused("this NIC is broken".into()))
    );
    assert_eq!(controller.command(BACKEND, &SYNCED), Ok(()));
    let region = RegionId::new(3);
    let area = Area::new(LineOffset::new(0), LineCount::new(1));
    assert_eq!(controller.command(BACKEND, &Command::Scrub { version: VERSION, region, area }), Ok(()));
    let id = nic("nic0", 1).id();
    assert_eq!(controller.command(BACKEND, &Command::Remove { version: VERSION, id: id.clone() }), Ok(()));
    assert_eq!(
        daemon.calls.take(),
        [
            Call::Apply(nic("nic0", 1)),
            Call::Apply(nic("broken", 1)),
            Call::Synced,
            Call::Scrub(region),
            Call::Remove(id),
        ]
    );

    let lease = LeaseId::new(5).expect("small");
    let attached =
        Report::Attachment { lease, connected: true, running: true, write_through: false, untold: false };
    daemon.reporter.report(attached.clone());
    assert_eq!(controller.report(|report| matches!(report, Report::Attachment { .. })), attached);
    let mut last = 0;
    for _ in 0..3 {
        let Report::Telemetry(sample) = controller.report(|report| matches!(report, Report::Telemetry(_)))
        else {
            unreachable!()
        };
        assert!(sample.sequence > last, "{} after {last}", sample.sequence);
        assert_eq!(sample.counters["samples"], 1);
        last = sample.sequence;
    }

    let calls = daemon.calls.clone();
    assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
    assert_eq!(calls.take(), [Call::Dropped]);
    controller.gone(BACKEND);
}

fn restarted_controller_finds_objects_undisturbed<M: Memory>(pod: &TestPod<M>, wakeup: &str) {
    let mut controller = pod.controller(1);
    let daemon = pod.start(BACKEND, wakeup);
    let (incarnation, _) = controller.admit(BACKEND);
    let lease = LeaseId::new(5).expect("small");
    for object in [nic("kept", 1), nic("changed", 1), nic("dropped", 1), disk(lease)] {
        assert_eq!(controller.command(BACKEND, &apply(object)), Ok(()));
    }
    assert_eq!(controller.command(BACKEND, &SYNCED), Ok(()));
    daemon.calls.take();
    drop(controller);

    // What happens meanwhile is told to the next controller.
    let link_down = Report::Link { device: "nic0".into(), up: false, reason: "carrier".into() };
    daemon.reporter.report(link_down.clone());
    for connected in [true, false] {
        daemon.reporter.report(Report::Attachment {
            lease,
            connected,
            running: connected,
            write_through: false,
            untold: false,
        });
    }

    let mut controller = pod.controller(2);
    let (same_incarnation, join) = controller.admit(BACKEND);
    assert_eq!(same_incarnation, incarnation);
    assert!(matches!(join.devices[..], [DeviceReport::Nic { up: false, .. }]), "{join:?}");
    assert_eq!(controller.report(|report| matches!(report, Report::Link { .. })), link_down);
    let attachment = controller.report(|report| matches!(report, Report::Attachment { .. }));
    assert_eq!(
        attachment,
        Report::Attachment { lease, connected: false, running: false, write_through: false, untold: false }
    );
    assert_eq!(daemon.calls.take(), [], "the objects stay");

    for object in [nic("kept", 1), nic("changed", 2), nic("new", 1), disk(lease)] {
        assert_eq!(controller.command(BACKEND, &apply(object)), Ok(()));
    }
    assert_eq!(controller.command(BACKEND, &SYNCED), Ok(()));
    assert_eq!(
        daemon.calls.take(),
        [
            Call::Apply(nic("changed", 2)),
            Call::Apply(nic("new", 1)),
            Call::Remove(nic("dropped", 1).id()),
            Call::Synced,
        ]
    );
    assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
}

fn commands_answer_for_a_connection_that_ended<M: Memory>(pod: &TestPod<M>, wakeup: &str) {
    let mut controller = pod.controller(1);
    assert_eq!(controller.command(BACKEND, &SYNCED), Err(CommandFailure::Disconnected));
    let daemon = pod.start(BACKEND, wakeup);
    let (first, _) = controller.admit(BACKEND);
    assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
    assert_eq!(controller.command(BACKEND, &SYNCED), Err(CommandFailure::Disconnected));

    let daemon = pod.start(BACKEND, wakeup);
    let (second, _) = controller.admit(BACKEND);
    assert_ne!(first, second);
    assert_eq!(controller.command(BACKEND, &SYNCED), Ok(()));
    assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
}

fn fenced_daemon_stops_and_its_successor_is_granted<M: Memory>(pod: &TestPod<M>, wakeup: &str) {
    let mut controller = pod.controller(1);
    let daemon = pod.start(BACKEND, wakeup);
    controller.admit(BACKEND);
    assert_eq!(controller.command(BACKEND, &apply(nic("nic0", 1))), Ok(()));
    assert!(daemon.fence.check().is_ok());
    let first = controller.port.fence(BACKEND, daemon.incarnation).expect("a slot");
    let (calls, fence) = (daemon.calls.clone(), daemon.fence.clone());
    assert_eq!(daemon.ended().expect("no error"), Exit::Fenced);
    assert!(fence.check().is_err());
    assert_eq!(calls.take(), [Call::Apply(nic("nic0", 1)), Call::Fenced, Call::Dropped]);
    controller.gone(BACKEND);
    drop(controller);

    let mut controller = pod.controller(2);
    let daemon = pod.start(BACKEND, wakeup);
    controller.admit(BACKEND);
    assert_eq!(controller.command(BACKEND, &apply(nic("nic0", 1))), Ok(()));
    let second = controller.port.fence(BACKEND, daemon.incarnation).expect("a slot");
    assert!(second > first, "{second} after {first}");
    assert_eq!(daemon.ended().expect("no error"), Exit::Fenced);
}

fn refused_daemon_ends_with_the_reason<M: Memory>(pod: &TestPod<M>, wakeup: &str) {
    let mut controller = pod.controller(1);
    let daemon = pod.start(BACKEND, wakeup);
    controller.appeared(BACKEND);
    controller.port.grant(BACKEND).expect("it lives");
    let request = controller.expect("its join", |event| match event {
        crate::controller::PortEvent::Joined { request, .. } => Some(request),
        _ => None,
    });
    controller.port.answer(request, Err("its name is taken".into()));
    controller.gone(BACKEND);
    let refusal = daemon.ended().expect_err("refused").to_string();
    assert!(refusal.contains("its name is taken") && refusal.contains("h2/net-backend"), "{refusal}");
}

fn daemon_obeys_the_highest_term_of_several_controllers<M: Memory>(pod: &TestPod<M>, wakeup: &str) {
    let mut deposed = pod.controller(4);
    let daemon = pod.start(BACKEND, wakeup);
    deposed.admit(BACKEND);
    assert_eq!(deposed.command(BACKEND, &apply(nic("nic0", 1))), Ok(()));
    let link_down = Report::Link { device: "nic0".into(), up: false, reason: "carrier".into() };
    daemon.reporter.report(link_down.clone());
    assert_eq!(deposed.report(|report| *report == link_down), link_down);
    assert_eq!(daemon.calls.take(), [Call::Apply(nic("nic0", 1))]);

    // Both think that they lead; one of them knows less.
    let mut elected = pod.other_controller(5);
    let (incarnation, _) = elected.admit(BACKEND);
    assert_eq!(incarnation, daemon.incarnation);
    // It hears of everything that the other was told.
    assert_eq!(elected.report(|report| *report == link_down), link_down);
    deposed.port.send(BACKEND, &apply(nic("stale", 1)));
    assert_eq!(elected.command(BACKEND, &apply(nic("nic0", 1))), Ok(()));
    deposed.port.grant(BACKEND).expect("nobody told it");
    deposed.port.send(BACKEND, &apply(nic("stale", 1)));
    for _ in 0..3 {
        while deposed.port.poll(Instant::now()).is_some() {}
        assert_eq!(elected.command(BACKEND, &apply(nic("nic1", 1))), Ok(()));
        elected.report(|report| matches!(report, Report::Telemetry(_)));
    }
    // Nor is it obeyed when the newer grant cannot be read any more.
    let (at, memory) = (pod.layout.grant(OTHER_REPLICA, BACKEND).bytes(), pod.memory(OTHER_CONTROLLER_HOST));
    memory.store(at, 0xdead);
    memory.flush(at, 8);
    memory.full_fence();
    for _ in 0..3 {
        while deposed.port.poll(Instant::now()).is_some() {}
        assert_eq!(elected.command(BACKEND, &apply(nic("nic1", 1))), Ok(()));
        elected.report(|report| matches!(report, Report::Telemetry(_)));
    }
    assert_eq!(elected.command(BACKEND, &SYNCED), Ok(()));
    assert_eq!(daemon.calls.take(), [Call::Apply(nic("nic1", 1)), Call::Synced]);

    // It is elected again.
    drop(deposed);
    let mut again = pod.controller(6);
    again.admit(BACKEND);
    assert_eq!(again.command(BACKEND, &apply(nic("nic2", 1))), Ok(()));
    assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
}

fn fence_of_one_controller_is_known_to_the_others<M: Memory>(pod: &TestPod<M>, wakeup: &str) {
    let mut first = pod.controller(1);
    let daemon = pod.start(BACKEND, wakeup);
    first.admit(BACKEND);
    drop(first);
    let mut second = pod.other_controller(2);
    second.appeared(BACKEND);
    // It has granted nothing, and yet may take back what the other granted.
    second.port.fence(BACKEND, daemon.incarnation).expect("a slot");
    assert!(matches!(second.port.grant(BACKEND), Err(crate::controller::PortError::Fenced(_))));
    drop(second);
    let mut third = pod.controller(3);
    let lives = third.expect("its end", |event| match event {
        crate::controller::PortEvent::Appeared { .. } => Some(true),
        crate::controller::PortEvent::Gone { endpoint } => (endpoint == BACKEND).then_some(false),
        _ => None,
    });
    assert!(!lives || third.port.grant(BACKEND).is_err(), "a fenced life was granted");
    assert_eq!(daemon.ended().expect("no error"), Exit::Fenced);
    let successor = pod.start(BACKEND, wakeup);
    third.admit(BACKEND);
    assert_eq!(third.command(BACKEND, &SYNCED), Ok(()));
    assert!(successor.fence.look().is_ok());
    assert_eq!(successor.stop().expect("no error"), Exit::Stopped);
}

fn daemon_without_controller_waits_and_stops_when_told<M: Memory>(pod: &TestPod<M>, wakeup: &str) {
    let daemon = pod.start(BACKEND, wakeup);
    assert!(daemon.fence.check().is_ok());
    thread::sleep(Duration::from_millis(50));
    assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
}

#[test]
fn commands_that_make_no_sense_are_refused_and_the_next_one_is_obeyed() {
    let pod = TestPod::simulated(9);
    let memory = pod.memory(crate::testing::CONTROLLER_HOST);
    let daemon = pod.start(BACKEND, "socket");
    let generation = Generation::new(1);
    ControllerHello { incarnation: 1, term: 1, pid: 1, protocol: Protocol::CURRENT.into() }
        .publish(&memory, pod.layout.controller(REPLICA));
    FenceLine::default().publish(&memory, pod.layout.fence(REPLICA, BACKEND));
    let mut link = Link::open(
        &memory,
        pod.layout.ring_to_endpoint(REPLICA, BACKEND),
        pod.layout.ring_from_endpoint(REPLICA, BACKEND),
        generation,
        Doorbell::connect(&pod.run_directory().control_doorbell(BACKEND)),
        Protocol::CURRENT,
    );
    Grant {
        endpoint_incarnation: daemon.incarnation,
        controller_incarnation: 1,
        term: 1,
        fence_generation: 0,
        control_generation: generation,
    }
    .publish(&memory, pod.layout.grant(REPLICA, BACKEND));
    memory.full_fence();
    let deadline = Instant::now() + PATIENCE;
    let mut ask = |bytes: &[u8]| {
        let id = link.request_bytes(bytes, deadline);
        loop {
            link.flush();
            match link.poll(Instant::now()) {
                Some(Incoming::Response { id: answered, payload }) if answered == id => {
                    return decode::<Answer>(&payload).expect("an answer");
                }
                Some(Incoming::Expired { .. }) => panic!("no answer"),
                Some(_) => {}
                None => thread::sleep(Duration::from_millis(1)),
            }
        }
    };
    for senseless in [b"".as_slice(), b"\xff\x00{", b"{\"command\":\"dance\"}"] {
        assert!(matches!(ask(senseless), Err(Refusal::NotUnderstood { .. })));
    }
    assert_eq!(ask(&serde_json::to_vec(&apply(nic("nic0", 1))).expect("JSON")), Ok(()));
    assert_eq!(daemon.calls.take(), [Call::Apply(nic("nic0", 1))]);
    assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
}

#[test]
fn second_daemon_of_a_role_is_refused_while_the_first_runs() {
    let pod = TestPod::real();
    let daemon = pod.start(BACKEND, "socket");
    let config = pod.config(BACKEND.host, "socket");
    let refused = pod.try_join(&config, BACKEND.role, &Calls::default()).err().expect("the lock is held");
    assert!(matches!(refused, JoinError::AlreadyRuns { .. }), "{refused}");
    assert!(refused.to_string().contains(&format!("process {}", std::process::id())), "{refused}");
    pod.try_join(&config, Role::NetFrontend, &Calls::default()).expect("another role is free");
    assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
    pod.try_join(&config, BACKEND.role, &Calls::default()).expect("free again");
}

#[test]
fn host_id_used_on_another_kernel_is_refused() {
    let pod = TestPod::real();
    let daemon = pod.start(BACKEND, "poll");
    let elsewhere = tempfile::tempdir().expect("a directory");
    let config = config(elsewhere.path(), BACKEND.host, "poll");
    let refused = pod.try_join(&config, BACKEND.role, &Calls::default()).err().expect("it beats");
    assert!(matches!(refused, JoinError::HostIdInUse { .. }), "{refused}");
    assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
    pod.try_join(&config, BACKEND.role, &Calls::default()).expect("free again");
}

#[test]
fn slot_of_a_dead_daemon_is_taken_over() {
    let pod = TestPod::simulated(3);
    let memory = pod.memory(BACKEND.host);
    let dead = Hello { incarnation: 1, pid: 2, protocol: Protocol::CURRENT.into(), started_unix_ms: 0 };
    dead.publish(&memory, pod.layout.hello(BACKEND));
    write_beat(&memory, pod.layout.heartbeat(BACKEND), 5);
    let config = pod.config(BACKEND.host, "socket");
    let (endpoint, ..) = pod.try_join(&config, BACKEND.role, &Calls::default()).expect("nobody beats");
    assert_ne!(endpoint.incarnation(), 1);
}

#[test]
fn host_outside_the_pool_is_refused() {
    let pod = TestPod::simulated(3);
    let config = pod.config(HostId::new(5), "socket");
    let refused = pod.try_join(&config, Role::Agent, &Calls::default()).err().expect("no slot").to_string();
    assert!(refused.contains("hosts 1 to 4"), "{refused}");
}

#[test]
fn handler_that_cannot_be_made_leaves_the_slot_free() {
    let pod = TestPod::simulated(3);
    let config = pod.config(BACKEND.host, "socket");
    let memory = pod.memory(BACKEND.host);
    let failed = Endpoint::join_layout(
        &pod.layout,
        memory.clone(),
        &config,
        BACKEND.role,
        crate::testing::join(),
        |_, _| Err("there is no NIC eth7"),
    );
    assert_eq!(failed.err().expect("no handler").to_string(), "there is no NIC eth7");
    assert_eq!(Hello::look(&memory, pod.layout.hello(BACKEND)), None);
    pod.try_join(&config, BACKEND.role, &Calls::default()).expect("free");
}
