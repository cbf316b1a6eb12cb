//! Daemons and controllers of neighbouring versions, and of others.

use cxl_pool::{Memory, SoftwareMemory};

use crate::commands::{Command, Version};
use crate::controller::{CommandFailure, PortEvent};
use crate::daemon::Exit;
use crate::endpoint::RunError;
use crate::objects::{Object, ObjectId, ProtocolObject};
use crate::protocol::{Incompatible, Protocol};
use crate::reports::Report;
use crate::testing::{BACKEND, Call, Running, TestController, TestPod, nic};

const POD_MINOR: &str = "pod-protocol-minor";

fn pair(theirs: u16, ours: u16) -> (TestPod<SoftwareMemory>, TestController<SoftwareMemory>, Running) {
    let pod = TestPod::real();
    let controller = pod.controller_speaking(1, Protocol::of_minor(theirs));
    let daemon = pod.start_speaking(BACKEND, "socket", Protocol::of_minor(ours));
    (pod, controller, daemon)
}

fn apply(object: Object) -> Command {
    Command::Apply { version: Version::default(), object }
}

/// What the daemon says that the pod speaks, with its next sample.
fn told<M: Memory>(controller: &mut TestController<M>, wanted: u64) {
    controller.report(|report| match report {
        Report::Telemetry(telemetry) => telemetry.gauges.get(POD_MINOR) == Some(&wanted),
        _ => false,
    });
}

#[test]
fn neighbours_work_together_and_only_the_newer_ones_hear_what_is_new() {
    let says = |minor| Object::Protocol(ProtocolObject { minor });
    for (theirs, ours) in [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 1)] {
        let (_pod, mut controller, daemon) = pair(theirs, ours);
        controller.admit(BACKEND);
        let spoken: Vec<_> = controller.port.spoken().collect();
        assert_eq!(spoken, [(BACKEND, Protocol::of_minor(ours), true)]);
        assert_eq!(controller.command(BACKEND, &apply(nic("nic0", 1))), Ok(()));
        let answer = controller.command(BACKEND, &apply(says(1)));
        if theirs.min(ours) == 0 {
            assert!(matches!(answer, Err(CommandFailure::NotSent(_))), "{theirs} and {ours}: {answer:?}");
            told(&mut controller, 0);
        } else {
            assert_eq!(answer, Ok(()));
            told(&mut controller, 1);
            let id = ObjectId::Protocol;
            let remove = Command::Remove { version: Version::default(), id };
            assert_eq!(controller.command(BACKEND, &remove), Ok(()));
            told(&mut controller, 0);
        }
        assert_eq!(
            daemon.calls.take(),
            [Call::Apply(nic("nic0", 1))],
            "the version is not the handler's business"
        );
        assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
    }
}

/// A controller of the version before does not know that there is something to take away.
#[test]
fn older_controller_takes_the_version_away_that_a_newer_one_told() {
    let (pod, mut controller, daemon) = pair(1, 1);
    controller.admit(BACKEND);
    let version = Version::default();
    for command in [apply(Object::Protocol(ProtocolObject { minor: 1 })), Command::Synced { version }] {
        assert_eq!(controller.command(BACKEND, &command), Ok(()));
    }
    told(&mut controller, 1);
    drop(controller);
    let mut older = pod.controller_speaking(2, Protocol::of_minor(0));
    older.admit(BACKEND);
    assert_eq!(older.command(BACKEND, &Command::Synced { version }), Ok(()));
    told(&mut older, 0);
    assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
}

#[test]
fn daemon_two_minors_away_ends_and_says_which_side_to_upgrade() {
    for (theirs, ours, side) in [(0, 2, "the other side"), (2, 0, "this side")] {
        let (_pod, mut controller, daemon) = pair(theirs, ours);
        let seen = controller.expect("a word about it", |event| match event {
            PortEvent::Incompatible { endpoint: BACKEND, why } => Some(why),
            PortEvent::Appeared { .. } => panic!("it is taken in"),
            _ => None,
        });
        let too_old = |why: Incompatible| matches!(why, Incompatible::TheirsIsOld { .. });
        assert_eq!(too_old(seen), ours < theirs);
        // The controller has to beat meanwhile: a dead one keeps nobody from waiting for another.
        while !daemon.is_over() {
            let event = controller.port.poll(std::time::Instant::now());
            // It has left before its thread has ended.
            assert!(matches!(event, None | Some(PortEvent::Gone { .. })), "{event:?}");
            controller.port.wait(std::time::Duration::from_millis(20));
        }
        let ended = daemon.ended().expect_err("it cannot work");
        let RunError::Incompatible { why, .. } = &ended else { panic!("{ended}") };
        assert_eq!(too_old(*why), theirs < ours);
        assert!(ended.to_string().contains(&format!("upgrade {side}")), "{ended}");
    }
}
