//! The harness itself: what it builds works, and goes away without a trace.

use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use wadi_tests::namespace::Namespace;
use wadi_tests::pod::{CLIENT_ADDRESS, PodBuilder};
use wadi_tests::probe::Probe;
use wadi_tests::runner::traces;

/// What either test makes bears the name of this process, and one of them looks for all that does.
fn alone() -> MutexGuard<'static, ()> {
    static TESTS: Mutex<()> = Mutex::new(());
    TESTS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn a_cable_that_is_pulled_loses_packets_for_as_long() {
    let _alone = alone();
    let pod = PodBuilder::three_hosts().lay_out().unwrap();
    // In place of a guest behind the TAP: the host itself answers.
    pod.host("h2").unwrap().ip(&["address", "add", "10.77.0.9/24", "dev", "br0"]).unwrap();
    let probe = Probe::start(pod.client_namespace(), "10.77.0.9").unwrap();
    thread::sleep(Duration::from_millis(300));
    pod.pull_cable("h2", "nic0").unwrap();
    thread::sleep(Duration::from_millis(200));
    pod.plug_cable("h2", "nic0").unwrap();
    thread::sleep(Duration::from_millis(300));
    let loss = probe.finish().unwrap();
    assert!(loss.lost > 0, "{loss:?}");
    assert!(loss.longest_gap >= Duration::from_millis(190), "{loss:?}");

    let tag = pod.tag().to_owned();
    assert!(!traces(&tag).is_empty());
    drop(pod);
    assert!(traces(&tag).is_empty(), "left behind: {:#?}", traces(&tag));
}

#[test]
fn namespaces_are_apart() {
    let _alone = alone();
    let name = format!("wadi-{}-apart", std::process::id());
    let namespace = Namespace::create(&name).unwrap();
    namespace.ip(&["address", "add", &format!("{CLIENT_ADDRESS}/32"), "dev", "lo"]).unwrap();
    let listener = namespace.inside(|| std::net::TcpListener::bind((CLIENT_ADDRESS, 0))).unwrap();
    let port = listener.local_addr().unwrap().port();
    assert!(namespace.inside(move || std::net::TcpStream::connect((CLIENT_ADDRESS, port))).is_ok());
    assert!(std::net::TcpListener::bind((CLIENT_ADDRESS, 0)).is_err());
    drop(namespace);
    let list = Command::new("ip").args(["netns", "list"]).output().unwrap();
    assert!(!String::from_utf8_lossy(&list.stdout).contains(&name));
}
