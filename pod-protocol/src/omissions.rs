//! What makes controllers, daemons and boards visible to each other is left out, one thing at a time, wherever this crate does it;
//! somebody must see something that is not so.

use std::path::Path;
use std::time::{Duration, Instant};

use cxl_pool::simulated::{Faults, Mutilation, Omission, SimulatedPool};
use cxl_pool::{
    ControllerHello, EndpointId, FenceLine, Grant, Hello, HostId, Layout, Memory, REGION_SLOTS_LEAST, Record,
    ReplicaHello, ReplicaId, Role, read_beat,
};

use crate::controller::{ControllerPort, PortEvent};
use crate::liveness::{Usurper, look_own, read_own_beat, usurper, write_beat};
use crate::mchannel;
use crate::protocol::Protocol;
use crate::replicas::ReplicaSlot;
use crate::run_directory::RunDirectory;

const CONTROLLER: HostId = HostId::new(1);
const DAEMON: HostId = HostId::new(2);
const ENDPOINT: EndpointId = EndpointId::new(DAEMON, Role::NetBackend);
const REPLICA: ReplicaId = ReplicaId::new(0);
const SIZE_BYTES: u64 = 16 << 20;

fn layout() -> Layout {
    Layout::new(SIZE_BYTES, 2, 2, REGION_SLOTS_LEAST).unwrap()
}

fn hello(incarnation: u64) -> Hello {
    let pid = u32::try_from(incarnation).unwrap();
    Hello { incarnation, pid, protocol: Protocol::CURRENT.into(), started_unix_ms: 9 }
}

/// A controller takes its slot, grants, fences, and leaves: as soon as it has, a daemon sees it.
fn what_a_controller_does_is_seen(seed: u64, omission: &Omission) {
    let (layout, pool, run) = (layout(), SimulatedPool::new(seed, SIZE_BYTES), tempfile::tempdir().unwrap());
    let (memory, daemon) = (omission.in_memory(pool.host(CONTROLLER)), pool.host(DAEMON));
    let run = RunDirectory::new(run.path());
    let mut port = ControllerPort::open_layout(&layout, memory.clone(), run.clone(), 7).unwrap();
    let term = || ControllerHello::look(&daemon, layout.controller(REPLICA)).map(|hello| hello.term);
    assert_eq!(term(), Some(7), "the controller that there is is not seen");

    hello(5).publish(&daemon, layout.hello(ENDPOINT));
    let mut now = Instant::now();
    let mut appeared = false;
    for beat in 1..200 {
        daemon.store(layout.heartbeat(ENDPOINT), beat);
        daemon.write_back(layout.heartbeat(ENDPOINT), 8);
        daemon.full_fence();
        now += Duration::from_millis(100);
        while let Some(event) = port.poll(now) {
            appeared |= matches!(event, PortEvent::Appeared { .. });
        }
        if appeared {
            break;
        }
    }
    assert!(appeared, "a daemon that lives is not seen");
    port.grant(ENDPOINT).unwrap();
    let granted =
        Grant::look(&daemon, layout.grant(REPLICA, ENDPOINT)).map(|grant| grant.endpoint_incarnation);
    assert_eq!(granted, Some(5), "what was granted is not seen");
    let generation = port.fence(ENDPOINT, 5).unwrap();
    let fenced = FenceLine::look(&daemon, layout.fence(REPLICA, ENDPOINT)).map(|line| line.generation);
    assert_eq!(fenced, Some(generation), "the daemon's time runs, and it cannot see that");
    drop(port);
    assert_eq!(term(), None, "who has left still seems to be there");

    let slot = ReplicaSlot::open(&layout, memory, &run, (REPLICA, Protocol::CURRENT)).unwrap();
    let replica = ReplicaHello::look(&daemon, layout.replica_hello(REPLICA));
    assert!(replica.is_some(), "the replica that there is is not seen");
    drop(slot);
    assert_eq!(pool.faults(), Faults::default());
}

/// Who lives is seen to: each beat at the latest with the next one.
fn beats_are_seen(seed: u64, omission: &Omission) {
    let (layout, pool) = (layout(), SimulatedPool::new(seed, SIZE_BYTES));
    let (memory, other) = (omission.in_memory(pool.host(DAEMON)), pool.host(CONTROLLER));
    let at = layout.heartbeat(ENDPOINT);
    for beat in 1..30 {
        write_beat(&memory, at, beat);
        assert!(read_beat(&other, at) + 1 >= beat, "who lives seems to be dead");
    }
    assert_eq!(pool.faults(), Faults::default());
}

/// A host with the same number has taken the slot meanwhile.
fn another_life_is_seen(seed: u64, omission: &Omission) {
    let (layout, pool) = (layout(), SimulatedPool::new(seed, SIZE_BYTES));
    let (hello_at, beat_at) = (layout.hello(ENDPOINT), layout.heartbeat(ENDPOINT));
    for (life, host) in [(1, DAEMON), (2, CONTROLLER)] {
        let memory = pool.host(host);
        look_own::<Hello, _>(&memory, hello_at);
        read_own_beat(&memory, beat_at);
        hello(life).publish(&memory, hello_at);
        write_beat(&memory, beat_at, life);
        memory.full_fence();
    }
    let memory = omission.in_memory(pool.host(DAEMON));
    assert_eq!(usurper::<Hello, _>(&memory, hello_at, 1), Some(Usurper::Process(2)));
    assert_eq!(read_own_beat(&memory, beat_at), 2, "the other one's heart seems to stand still");
    assert_eq!(pool.faults(), Faults::default());
}

/// A predecessor was killed while it wrote.
fn what_a_dead_life_left_does_no_harm(seed: u64, omission: &Omission) {
    let (layout, pool) = (layout(), SimulatedPool::new(seed, SIZE_BYTES));
    let hello_at = layout.hello(ENDPOINT);
    pool.host(DAEMON).store(hello_at.bytes(), 77);
    pool.crash(DAEMON);
    let memory = omission.in_memory(pool.host(DAEMON));
    assert_eq!(look_own::<Hello, _>(&memory, hello_at), None);
    hello(3).publish(&memory, hello_at);
    memory.full_fence();
    assert_eq!(Hello::look(&pool.host(CONTROLLER), hello_at), Some(hello(3)));
    assert_eq!(pool.faults(), Faults::default());
}

fn run(seed: u64, omission: &Omission) {
    mchannel::omissions::run(seed, omission);
    beats_are_seen(seed, omission);
    another_life_is_seen(seed, omission);
    what_a_dead_life_left_does_no_harm(seed, omission);
    what_a_controller_does_is_seen(seed, omission);
}

#[test]
fn every_omission_is_noticed() {
    Mutilation {
        target: "-p pod-protocol --lib omissions",
        workspace: &Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
        sources: &["pod-protocol/src"],
        complete: 100,
        seeds: 300,
        excused: &EXCUSED,
        unmet: &[],
    }
    .prove(run);
}

/// It comes after all that was written, and nobody concludes anything from what the host writes next: the records of the next round bring
/// a fence of their own before the header can change again.
const EXCUSED: [&str; 1] = ["mchannel.rs publish: self.memory.store_fence() (2)"];
