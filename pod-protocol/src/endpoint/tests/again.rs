//! What a daemon says, and does not say, to a controller that is there again.

use super::*;
use crate::controller::PortEvent;
use crate::ids::VolumeId;
use crate::volume_table::{VolumeEntry, VolumeTable};

pub(super) fn restarted_controller_hears_what_a_device_has_become<M: Memory>(pod: &TestPod<M>, wakeup: &str) {
    let mut controller = pod.controller(1);
    let daemon = pod.start(BACKEND, wakeup);
    controller.admit(BACKEND);
    let failed = Report::DeviceFailed { device: "nic0".into(), reason: "gone".into() };
    let [mut other] = crate::testing::join().devices.try_into().expect("one NIC");
    if let DeviceReport::Nic { mtu, .. } = &mut other {
        *mtu = 9000;
    }
    for report in [failed, Report::DeviceBack { device: other.clone() }] {
        daemon.reporter.report(report.clone());
        assert_eq!(controller.report(|heard| !matches!(heard, Report::Telemetry(_))), report);
    }
    drop(controller);
    let mut controller = pod.controller(2);
    let (_, join) = controller.admit(BACKEND);
    assert_eq!(join.devices, [other]);
    assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
}

#[test]
fn what_was_said_of_a_lease_that_is_gone_is_not_said_again() {
    let pod = TestPod::real();
    let mut controller = pod.controller(1);
    let daemon = pod.start(BACKEND, "socket");
    controller.admit(BACKEND);
    let [gone, held] = [5, 6].map(|lease| LeaseId::new(lease).expect("small"));
    for lease in [gone, held] {
        assert_eq!(controller.command(BACKEND, &apply(disk(lease))), Ok(()));
    }
    let id = disk(gone).id();
    assert_eq!(controller.command(BACKEND, &Command::Remove { version: VERSION, id }), Ok(()));
    // As its device did when it went.
    for lease in [gone, held] {
        let report = Report::Attachment {
            lease,
            connected: false,
            running: false,
            write_through: false,
            untold: false,
        };
        daemon.reporter.report(report.clone());
        assert_eq!(controller.report(|heard| !matches!(heard, Report::Telemetry(_))), report);
    }
    drop(controller);
    let mut controller = pod.controller(2);
    controller.admit(BACKEND);
    let told = controller.report(|heard| !matches!(heard, Report::Telemetry(_)));
    assert!(matches!(told, Report::Attachment { lease, .. } if lease == held), "{told:?}");
    assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
}

#[test]
fn backend_of_many_volumes_joins() {
    let entry = |id| VolumeEntry {
        id: VolumeId::new(id),
        name: format!("instance-{id}-data"),
        start_bytes: u64::from(id) << 40,
        size_bytes: 1 << 40,
        deleted: false,
        mirror: None,
        stripe: None,
    };
    let ssd = |name: &str| DeviceReport::Ssd {
        name: name.into(),
        driver: "file".into(),
        size_bytes: 1 << 60,
        block_bytes: 512,
        discard_granularity_bytes: None,
        table: Some(VolumeTable { volumes: (1..2000).map(entry).collect() }),
        reserved_bytes: 0,
        identity: None,
        iops: None,
        bytes_per_second: None,
    };
    let join = Join { devices: ["ssd0", "ssd1", "ssd2"].map(ssd).to_vec(), ..crate::testing::join() };
    let pod = TestPod::real();
    let mut controller = pod.controller(1);
    let calls = Calls::default();
    let backend = EndpointId::new(BACKEND.host, Role::BlkBackend);
    let handler = |_, _| Ok::<Box<dyn Handler>, Infallible>(calls.handler());
    let config = pod.config(backend.host, "socket");
    let memory = pod.memory(backend.host);
    let daemon = Endpoint::join_layout(&pod.layout, memory, &config, backend.role, join.clone(), handler);
    let daemon = daemon.expect("a free slot");
    let stop = StopSignal::manual().expect("a pair");
    let told = stop.clone();
    let running = thread::spawn(move || daemon.run_until(&told));
    let heard = controller.admit(backend).1;
    // It says by itself for how long it may act unseen.
    assert!(heard == Join { fence_ms: Some(config.run.fence_ms), ..join }, "another join");
    stop.stop();
    running.join().expect("no panic").expect("no error");
}

#[test]
fn scrub_of_an_older_conversation_is_not_answered_in_the_next_one() {
    let pod = TestPod::real();
    let mut controller = pod.controller(1);
    let daemon = pod.start(BACKEND, "socket");
    controller.admit(BACKEND);
    // So long that it is not over when the next controller is there.
    let area = Area::new(LineOffset::new(0), LineCount::new(u64::MAX >> 6));
    let region = RegionId::new(3);
    controller.port.send(BACKEND, &Command::Scrub { version: VERSION, region, area });
    let started = |calls: &[Call]| calls.contains(&Call::Scrub(region));
    let deadline = Instant::now() + PATIENCE;
    let mut began = false;
    while !began {
        assert!(Instant::now() < deadline, "it does not begin");
        while controller.port.poll(Instant::now()).is_some() {}
        controller.port.wait(Duration::from_millis(1));
        began = started(&daemon.calls.take());
    }
    drop(controller);
    let mut controller = pod.controller(2);
    controller.admit(BACKEND);
    assert_eq!(controller.command(BACKEND, &SYNCED), Ok(()));
    daemon.calls.take();
    assert_eq!(controller.command(BACKEND, &SYNCED), Ok(()));
    assert!(!started(&daemon.calls.take()), "nobody waits for it any more");
    assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
}

/// The controller asks again for what takes longer than it waits.
#[test]
fn scrub_that_is_asked_for_again_is_done_once_and_answered_each_time() {
    let pod = TestPod::real();
    let mut controller = pod.controller(1);
    let daemon = pod.start(BACKEND, "socket");
    controller.admit(BACKEND);
    let scrub = |region, mib: u64| {
        let area = Area::new(LineOffset::new(0), LineCount::new(mib << 14));
        Command::Scrub { version: VERSION, region, area }
    };
    // The first one takes so long that the others wait when they are asked for again.
    let (long, other) = (RegionId::new(2), RegionId::new(3));
    let asked: Vec<_> = [scrub(long, 64 << 10), scrub(other, 128), scrub(other, 128)]
        .iter()
        .map(|command| controller.port.send(BACKEND, command))
        .collect();
    let deadline = Instant::now() + PATIENCE;
    let mut answered = Vec::new();
    while answered.len() < asked.len() {
        assert!(Instant::now() < deadline, "of {asked:?} only {answered:?} are answered");
        while let Some(event) = controller.port.poll(Instant::now()) {
            if let PortEvent::Answered { command, result, .. } = event {
                assert_eq!(result, Ok(()));
                answered.push(command);
            }
        }
        controller.port.wait(Duration::from_millis(1));
    }
    assert_eq!(answered, asked);
    let flushed = daemon.calls.take().iter().filter(|call| **call == Call::Scrub(other)).count();
    assert_eq!(flushed, 2, "two pieces, once");
    assert_eq!(daemon.stop().expect("no error"), Exit::Stopped);
}
