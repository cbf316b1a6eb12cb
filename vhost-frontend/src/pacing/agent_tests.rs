//! Agents of vCPUs at the door of a meter.

use std::sync::Arc;

use cxl_pool::simulated::SimulatedPool;
use cxl_pool::{EndpointId, Role};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::vcpus::{Hello, Link, LinkListener, Report, ToAgent, VERSION};

use super::Meter;
use super::agents::Host as _;
use super::meter::Shared;
use super::vcpu_tests::{endpoint, fabric, object};

/// A meter with a device of `vm1`, and the two ends of a connection.
fn met(sample_us: f64) -> (Meter, Arc<Shared>, tempfile::TempDir, LinkListener) {
    let directory = tempfile::tempdir().unwrap();
    let listener = LinkListener::bind(&directory.path().join("s")).unwrap();
    let pool = SimulatedPool::new(1, 1 << 16);
    let mut meter = Meter::new(pool.host(endpoint(0).host));
    meter.share(fabric(0, 1, sample_us)).unwrap();
    meter.measure(object(0, 1));
    let shared = meter.shared();
    (meter, shared, directory, listener)
}

fn connection(directory: &tempfile::TempDir, listener: &LinkListener) -> (Link, Arc<Link>) {
    let near = Link::connect(&directory.path().join("s")).unwrap();
    (near, Arc::new(listener.accept().unwrap().unwrap()))
}

fn hello() -> Hello {
    Hello { version: VERSION, instance: "vm1".to_owned(), process: 4711, holds: true }
}

/// What is said next.
fn said(link: &Link) -> ToAgent {
    let began = std::time::Instant::now();
    loop {
        if let Some(said) = link.receive().unwrap() {
            return said;
        }
        assert!(began.elapsed() < std::time::Duration::from_secs(20), "nothing is said");
        std::thread::yield_now();
    }
}

#[test]
fn an_agent_is_told_each_k_and_no_other_one_gets_in() {
    let (mut meter, shared, directory, listener) = met(2000.0);
    let (near, far) = connection(&directory, &listener);
    let vm = shared.enter(&hello(), 1, &far).unwrap();
    assert_eq!(said(&near), ToAgent::Welcome);
    shared.report(vm, 1, &Report { elapsed_us: 2000, bytes: 20, ..Report::default() }).unwrap();
    for _ in 0..3 {
        let ToAgent::Order(order) = said(&near) else { panic!("an order comes in each K") };
        assert!((order.part() - 1.0).abs() < 1e-9 && order.sample_us == 2000);
        shared.report(vm, 1, &Report { elapsed_us: 2000, bytes: 20, ..Report::default() }).unwrap();
    }
    assert!(meter.vcpus()[0].bytes >= 80, "{:?}", meter.vcpus());

    let (_, other) = connection(&directory, &listener);
    let refused = shared.enter(&hello(), 2, &other).unwrap_err();
    assert!(refused.contains("4711"), "{refused}");
    let unknown = Hello { instance: "vm2".to_owned(), ..hello() };
    assert!(shared.enter(&unknown, 2, &other).unwrap_err().contains("podctl mchannel set vm2"));
    let later = Hello { version: VERSION + 1, ..hello() };
    assert!(shared.enter(&later, 2, &other).unwrap_err().contains("release"));
    assert!(shared.report(vm, 2, &Report::default()).is_err());
    shared.leave(vm, 2);
    assert_eq!(meter.vcpus().len(), 1, "it is not his to end");

    // Another weight holds for it, too, and it goes with its VM's last device.
    meter.measure(object(0, 9));
    assert_eq!(meter.vcpus().len(), 1);
    meter.forget(object(0, 1).lease);
    let refused = loop {
        match said(&near) {
            ToAgent::Order(_) => {}
            other => break other,
        }
    };
    assert!(matches!(refused, ToAgent::Refused { reason } if reason.contains("vm1")));
    assert!(near.receive::<ToAgent>().is_err() && meter.vcpus().is_empty());
    assert!(shared.report(vm, 1, &Report::default()).is_err());
}

#[test]
fn one_that_is_killed_makes_room_at_once_and_one_that_is_stopped_soon() {
    let (meter, shared, directory, listener) = met(2000.0);
    let (_near, far) = connection(&directory, &listener);
    let vm = shared.enter(&hello(), 1, &far).unwrap();
    shared.leave(vm, 1);
    assert!(meter.vcpus().is_empty());
    let (near, far) = connection(&directory, &listener);
    shared.enter(&hello(), 2, &far).unwrap();
    // It says nothing at all.
    let refused = loop {
        if let ToAgent::Refused { reason } = said(&near) {
            break reason;
        }
    };
    assert!(refused.contains("too long"), "{refused}");
    let (_near, far) = connection(&directory, &listener);
    shared.enter(&hello(), 3, &far).unwrap();
}

#[test]
fn the_frontends_of_a_host_find_each_others_budget_of_a_vm() {
    let directory = tempfile::tempdir().unwrap();
    let run = RunDirectory::new(directory.path());
    run.prepare().unwrap();
    let (pool, host) = (SimulatedPool::new(1, 1 << 16), endpoint(0).host);
    let join = |role| {
        let mut meter = Meter::new(pool.host(host));
        meter.join_host(&run, EndpointId::new(host, role)).unwrap();
        meter.measure(object(0, 1));
        meter
    };
    let (mut net, blk) = (join(Role::NetFrontend), join(Role::BlkFrontend));
    let path = run.byte_budget(host, object(0, 1).instance);
    assert!(path.exists());
    drop(blk);
    assert!(path.exists(), "the other one has it");
    net.forget(object(0, 1).lease);
    assert!(!path.exists());
}
