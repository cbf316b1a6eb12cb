//! A controller stands still, another one decides in its place, and then it runs again: nobody obeys what it still believes, no lease has two
//! holders, and two of them never have one state or one slot of the pool.

use std::fs;
use std::thread;
use std::time::Duration;

use pod_api::client::Client;
use pod_api::{CreateInstance, DeviceHealth};
use wadi_tests::frame_guest::Talk;
use wadi_tests::pod::{HostPlan, Pod, PodBuilder};
use wadi_tests::process::Daemon;
use wadi_tests::replicas::Replicas;
use wadi_tests::stage::rounds;
use wadi_tests::waiting::until;

/// Longer than a controller takes that finds out that it may not run.
const PATIENCE: Duration = Duration::from_secs(30);

fn pod() -> Pod {
    PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0"))
        .host(HostPlan::new("h3").vms().nic("nic1"))
        .start()
        .unwrap()
}

fn nic_of(client: &Client) -> Option<String> {
    Some(client.instance("vm1").ok()?.nics.first()?.nic.clone())
}

fn wait_for_nic(client: &Client, nic: &str) {
    until(&format!("vm1 to have {nic}"), || (nic_of(client)? == nic).then_some(()));
}

fn wait_until_up(client: &Client, (host, nic): (&str, &str)) {
    until("the NIC", || (client.device(host, nic).ok()?.health == DeviceHealth::Up).then_some(()));
}

#[test]
fn a_leader_that_stood_still_is_obeyed_by_nobody() {
    let mut pod = pod();
    let instance = pod.create_instance("vm1", "h1", &[]).unwrap();
    let mut talk = Talk::begin(&pod, &instance.nics[0]).unwrap();
    talk.check().unwrap();
    let engines = pod.engines();
    let mut replicas = Replicas::instead_of_the_controller(&mut pod).unwrap();
    for round in 0..=rounds() {
        let old = replicas.leader(3);
        let home = nic_of(&replicas.client(old).unwrap()).unwrap();
        let (host, nic) = home.split_once('/').unwrap();
        let (other_host, other_nic) = if host == "h2" { ("h3", "nic1") } else { ("h2", "nic0") };
        replicas.freeze(old).unwrap();
        // It has not read yet that its instance's NIC has no link, nor what somebody wants of it.
        pod.pull_cable(host, nic).unwrap();
        let name = format!("also{round}");
        let wish =
            |host: &str| CreateInstance { name: name.clone(), host: host.to_owned(), ..Default::default() };
        let (asked, late) = (replicas.client(old).unwrap(), wish("h3"));
        let late = thread::spawn(move || asked.create_instance(&late, Duration::ZERO));
        let leader = replicas.leader(3);
        let next = replicas.client(leader).unwrap();
        wait_for_nic(&next, &format!("{other_host}/{other_nic}"));
        talk.check().unwrap();
        // By now that is long over: it would be wrong to leave.
        pod.plug_cable(host, nic).unwrap();
        wait_until_up(&next, (host, nic));
        pod.pull_cable(other_host, other_nic).unwrap();
        wait_for_nic(&next, &home);
        talk.check().unwrap();
        next.create_instance(&wish("h1"), Duration::ZERO).unwrap();
        let before = next.events(0).unwrap().events;

        replicas.thaw(old).unwrap();
        let late = late.join().unwrap();
        replicas.leader(3);
        talk.check().unwrap();
        assert!(late.is_err(), "round {round}: what it was asked for was done twice: {late:?}");
        for replica in 0..3 {
            let client = replicas.client(replica).unwrap();
            wait_for_nic(&client, &home);
            until("the instance", || (client.instance(&name).ok()?.host == "h1").then_some(()));
            let events = until("all events", || {
                let events = client.events(0).ok()?.events;
                (events.len() >= before.len()).then_some(events)
            });
            let what = |events: &[pod_api::Event]| -> Vec<_> {
                events
                    .iter()
                    .map(|it| (it.sequence, it.kind, it.subject.clone(), it.message.clone()))
                    .collect()
            };
            assert_eq!(what(&events), what(&before), "round {round}: replica {replica} tells something else");
        }
        assert_eq!(pod.engines(), engines, "engines were not disturbed");
        pod.plug_cable(other_host, other_nic).unwrap();
        wait_until_up(&replicas.client(0).unwrap(), (other_host, other_nic));
        talk.check().unwrap();
    }
}

/// A second controller, with a configuration that differs from the first one's in this.
fn second(pod: &Pod, name: &str, changes: &[(&str, &str)]) -> Daemon {
    let mut text = fs::read_to_string(pod.controller_config_path()).unwrap();
    for (from, to) in changes {
        assert!(text.contains(from), "{from} is not in {text}");
        text = text.replace(from, to);
    }
    let config = pod.directory().join(format!("{name}.toml"));
    fs::write(&config, text).unwrap();
    let mut command = pod.control_namespace().command(&pod.binary("pod-controller"));
    command.arg("--config").arg(config);
    Daemon::start(name, command, &pod.directory().join("log").join(format!("{name}.log"))).unwrap()
}

/// Waits until it has ended, and returns what it said.
fn refused(mut controller: Daemon) -> String {
    let status = controller.wait(PATIENCE).unwrap();
    assert!(!status.success(), "{status}");
    controller.said()
}

#[test]
fn nobody_takes_the_place_of_a_controller_that_stands_still_but_as_another_kernel() {
    let mut pod = pod();
    let instance = pod.create_instance("vm1", "h1", &[]).unwrap();
    let mut talk = Talk::begin(&pod, &instance.nics[0]).unwrap();
    talk.check().unwrap();
    let engines = pod.engines();
    pod.controller().unwrap().freeze().unwrap();
    let said = refused(second(&pod, "same-state", &[]));
    assert!(said.contains("stop that one first"), "{said}");
    // What it has kept so far, as in a backup.
    let state = pod.directory().join("controller.redb");
    fs::copy(&state, pod.directory().join("copied.redb")).unwrap();
    let said = refused(second(&pod, "same-kernel", &[("controller.redb", "copied.redb")]));
    let pid = pod.controller().unwrap().pid().unwrap();
    assert!(said.contains(&pid.to_string()), "{said}");
    talk.check().unwrap();

    // On another kernel no lock says that it lives, and nor does its heartbeat.
    let elsewhere = pod.directory().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let run = format!("directory = \"{}\"", pod.directory().join("run").display());
    let there = format!("directory = \"{}\"", elsewhere.display());
    let changes = [("controller.redb", "copied.redb"), (&*run, &*there), ("\"socket\"", "\"poll\"")];
    let mut other = second(&pod, "elsewhere", &changes);
    let client = Client::unix(&elsewhere.join("controller.sock")).unwrap();
    until("the other controller", || {
        other.check().unwrap();
        client.ready().ok()
    });
    let home = nic_of(&client).unwrap();
    let to = if home == "h2/nic0" { "h3/nic1" } else { "h2/nic0" };
    until("a move", || client.migrate_nic("vm1", "net0", Some(to)).ok());
    wait_for_nic(&client, to);
    talk.check().unwrap();

    let old = pod.controller().unwrap();
    old.thaw().unwrap();
    let status = old.wait(PATIENCE).unwrap();
    assert!(!status.success(), "{status}");
    let said = old.said();
    let usurper = format!("process {} of another host", other.pid().unwrap());
    assert!(said.contains(&usurper), "{said}");
    talk.check().unwrap();
    assert_eq!(nic_of(&client).as_deref(), Some(to));
    until("a move back", || client.migrate_nic("vm1", "net0", Some(&home)).ok());
    wait_for_nic(&client, &home);
    talk.check().unwrap();
    assert_eq!(pod.engines(), engines, "engines were not disturbed");
}
