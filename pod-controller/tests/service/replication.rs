//! Several controllers: a single one grows to three, leaders die, and what was answered is there.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::support::description::Description;
use crate::support::replicas::{Replicas, create, names, volume};
use crate::support::{Pod, until, vm};
use cxl_pool::Role;
use pod_api::{DeviceHealth, Fabric, FabricSignal, InstanceTypeSpec};
use pod_protocol::objects::Object;
use pod_protocol::reports::Report;

#[test]
fn single_controller_grows_to_three_whose_leaders_may_die() {
    let mut pod = Pod::demo_in_file();
    pod.client().create_instance(&vm("vm1", &[]), Duration::ZERO).expect("created");
    create(&pod.client(), "before");
    let frontend = |pod: &Pod| pod.endpoint(1, Role::NetFrontend).objects();
    let port =
        until("its port", || frontend(&pod).into_values().find(|object| matches!(object, Object::Port(_))));
    pod.stop_controller();

    let mut replicas = Replicas::new(pod.directory.path());
    replicas.start(0, &["--bootstrap"]);
    assert_eq!(replicas.leader(&[0]), 0);
    until("what there was before", || {
        (names(&replicas.client(0))? == ["before"] && frontend(&pod).values().any(|it| *it == port))
            .then_some(())
    });
    replicas.start(1, &[]);
    replicas.leader(&[0, 1]);
    replicas.start(2, &[]);
    let first = replicas.leader(&[0, 1, 2]);

    // Every replica answers, and a follower has the leader carry out what it is asked for.
    for replica in 0..3 {
        let name = format!("by-{replica}");
        create(&replicas.client(replica), &name);
        assert!(names(&replicas.client(replica)).is_some_and(|names| names.contains(&name)), "{name}");
    }
    let follower = replicas.client((first + 1) % 3);
    let made = follower.create_instance(&vm("vm2", &[]), Duration::from_secs(30)).expect("created");
    assert!(made.ready, "{made:?}");
    let ports = |pod: &Pod| frontend(pod).values().filter(|object| matches!(object, Object::Port(_))).count();
    assert_eq!(ports(&pod), 2, "what is said to be ready is there");
    let refused = follower.create_volume(&volume("before"));
    assert_eq!(refused.expect_err("there is one").status(), Some(409));

    // The leader dies while a NIC fails: another one has the instance moved.
    let started = frontend(&pod);
    assert!(started.values().any(|object| *object == port), "the instance kept its port");
    let down = Report::Link { device: "nic0".into(), up: false, reason: "carrier".into() };
    replicas.kill(first);
    let killed = Instant::now();
    pod.endpoint(2, Role::NetBackend).reporter.report(down);
    let moved = until("the failover", || frontend(&pod).remove(&port.id()).filter(|now| *now != port));
    println!("failover {} ms after the leader's death", killed.elapsed().as_millis());
    let second = replicas.leader(&[0, 1, 2]);
    assert_ne!(first, second);
    create(&replicas.client(second), "after");
    let failed = replicas.client(second).device("h2", "nic0").expect("known");
    assert_eq!(failed.health, DeviceHealth::Down, "{failed:?}");

    // It comes back, gets what it missed, and the others may die one after the other.
    replicas.start(first, &[]);
    let wanted = ["before", "by-0", "by-1", "by-2", "after"];
    until("what it missed", || (names(&replicas.client(first))?.len() == wanted.len()).then_some(()));
    replicas.leader(&[0, 1, 2]);
    replicas.kill(second);
    let third = replicas.leader(&[0, 1, 2]);
    create(&replicas.client(third), "last");
    assert_eq!(names(&replicas.client(third)).map(|names| names.len()), Some(wanted.len() + 1));
    assert!(frontend(&pod).values().any(|object| *object == moved), "engines were not disturbed");

    // Two are no majority of three without one of them: nothing is promised.
    let last = *replicas.running.keys().find(|replica| **replica != third).expect("two run");
    replicas.kill(third);
    let error = replicas.client(last).create_volume(&volume("never")).expect_err("there is no majority");
    assert_eq!(error.status(), Some(503), "{error}");
    Description::checked_in().assert_has("POST", "/v1/volumes", 503);
    assert_eq!(names(&replicas.client(last)).map(|names| names.len()), Some(wanted.len() + 1));

    // With its log lost, a replica becomes a member anew, in its own place.
    replicas.start(third, &[]);
    replicas.leader(&[0, 1, 2]);
    std::fs::remove_file(replicas.log_file(second)).expect("it was there");
    replicas.start(second, &[]);
    until("all of it once more", || {
        let names = names(&replicas.client(second))?;
        (names.len() == wanted.len() + 1).then_some(())
    });
    let leader = replicas.leader(&[0, 1, 2]);

    // A leader that stood still for a while is not one any more, and learns so.
    replicas.pause(leader);
    let elected = replicas.leader(&[0, 1, 2]);
    assert_ne!(leader, elected);
    create(&replicas.client(elected), "meanwhile");
    replicas.go_on(leader);
    until("what it missed", || {
        names(&replicas.client(leader))?.contains(&"meanwhile".to_owned()).then_some(())
    });
    let leader = replicas.leader(&[0, 1, 2]);
    assert!(frontend(&pod).values().any(|object| *object == moved), "engines were not disturbed");

    // Those who led, followed, were sent everything and began anew with nothing know the same, to the last region.
    until("the same everywhere", || {
        let known: Option<Vec<_>> = (0..3).map(|replica| replicas.client(replica).pool().ok()).collect();
        let known = known?;
        known.iter().all(|pool| *pool == known[0]).then_some(())
    });

    // A member that is gone for good is let go.
    let gone = (leader + 1) % 3;
    replicas.kill(gone);
    let trying = replicas.client((leader + 2) % 3).trying_only(true);
    trying.remove_controller(gone).expect("it would be");
    assert_eq!(trying.remove_controller(9).expect_err("nobody").status(), Some(404));
    assert_eq!(trying.controllers().expect("a list").len(), 3, "it was only tried");
    replicas.client((leader + 2) % 3).remove_controller(gone).expect("removed");
    let rest: Vec<u16> = (0..3).filter(|replica| *replica != gone).collect();
    replicas.leader(&rest);
    assert_eq!(replicas.client(leader).remove_controller(gone).expect_err("gone").status(), Some(404));

    // So is the leader, whoever is asked; as it runs, it comes back, to one that leads by then.
    let left = (leader + 2) % 3;
    replicas.client(left).remove_controller(leader).expect("removed");
    until("the other one to lead", || (replicas.leader(&rest) == left).then_some(()));
    create(&replicas.client(leader), "after-it-led");
}

#[test]
fn five_controllers_go_on_while_three_live() {
    let mut pod = Pod::demo_with_slots(5);
    pod.client().create_instance(&vm("vm1", &[]), Duration::from_secs(30)).expect("created");
    let port = |pod: &Pod| {
        let objects = pod.endpoint(1, Role::NetFrontend).objects();
        objects.into_values().find(|object| matches!(object, Object::Port(_)))
    };
    let given = port(&pod);
    assert!(given.is_some(), "it has its port");
    pod.stop_controller();
    let mut replicas = Replicas::new(pod.directory.path());
    let all: Vec<u16> = (0..5).collect();
    replicas.start_first(5);
    let mut wanted = Vec::new();
    for replica in 0..5 {
        wanted.push(format!("by-{replica}"));
        create(&replicas.client(replica), &format!("by-{replica}"));
    }
    let everything = |replicas: &Replicas, wanted: &[String]| {
        for replica in replicas.running.keys() {
            until("what was answered", || {
                let names = names(&replicas.client(*replica))?;
                wanted.iter().all(|name| names.contains(name)).then_some(())
            });
        }
    };

    // The leader, and whoever leads then: three of five are a majority.
    let mut dead = Vec::new();
    for death in ["first", "second"] {
        let leader = replicas.leader(&all);
        replicas.kill(leader);
        dead.push(leader);
        let next = replicas.leader(&all);
        create(&replicas.client(next), death);
        wanted.push(death.to_owned());
        everything(&replicas, &wanted);
    }
    // A third one: two of five promise nothing, and answer what they know.
    let third = replicas.leader(&all);
    replicas.kill(third);
    let left = *replicas.running.keys().next().expect("two run");
    let error = replicas.client(left).create_volume(&volume("never")).expect_err("there is no majority");
    assert_eq!(error.status(), Some(503), "{error}");
    everything(&replicas, &wanted);

    // All come back, and one that was dead leads no worse than another.
    for replica in dead.into_iter().chain([third]) {
        replicas.start(replica, &[]);
    }
    replicas.leader(&all);
    wanted.push("last".to_owned());
    create(&replicas.client(left), "last");
    everything(&replicas, &wanted);
    // A new leader gives everybody everything anew, which disturbs no engine.
    until("the instance", || replicas.client(left).instance("vm1").ok()?.ready.then_some(()));
    assert_eq!(port(&pod), given, "engines were not disturbed");
}

#[test]
fn whoever_leads_no_more_tells_nothing_of_what_daemons_do() {
    let mut pod = Pod::demo_in_file();
    let client = pod.client();
    client.create_volume(&volume("vol0")).expect("created");
    client.create_instance(&vm("vm1", &["vol0"]), Duration::from_secs(30)).expect("created");
    pod.stop_controller();
    let mut replicas = Replicas::new(pod.directory.path());
    replicas.start_first(3);
    // Counters of daemons, which only whoever leads hears.
    let measured = |text: &str| {
        ["wadi_endpoint_telemetry_age_seconds{", "wadi_lease_packets_total{", "wadi_lease_requests_total{"]
            .map(|series| text.contains(&format!("\n{series}")))
    };
    let tells = |replicas: &Replicas, replica: u16, leads: u8, expected: bool| {
        until("what is measured, of whoever leads alone", || {
            let text = replicas.client(replica).metrics().ok()?;
            let is = text.contains(&format!("\nwadi_controller_leads {leads}\n"))
                && text.contains("\nwadi_controller_has_leader 1\n");
            (is && measured(&text) == [expected; 3]).then_some(())
        });
    };
    let first = replicas.leader(&[0, 1, 2]);
    tells(&replicas, first, 1, true);
    let rates = |replicas: &Replicas, replica: u16| Some(replicas.client(replica).balance().ok()?.nics.len());
    until("a rate", || rates(&replicas, first).filter(|nics| *nics > 0));
    let fabric = Fabric {
        elements: [("link".to_owned(), 1_000_000)].into(),
        signals: [("link".to_owned(), FabricSignal::Probe)].into(),
        ..replicas.client(first).fabric().expect("an answer")
    };
    replicas.client(first).set_fabric(&fabric).expect("it makes sense");
    // Others ask it, for whoever asks them.
    let unknown = |replicas: &Replicas, replica: u16| replicas.client(replica).balance().ok()?.unknown_here;
    assert_eq!(unknown(&replicas, first), None);
    let counted = |text: &str| measured(text) == [true; 3];
    for other in (0..3).filter(|replica| *replica != first) {
        until("the leader's rates", || {
            let balance = replicas.client(other).balance().ok()?;
            (balance.unknown_here.is_none() && !balance.nics.is_empty()).then_some(())
        });
        until("how loaded the fabric is", || {
            replicas.client(other).fabric().ok().filter(|it| it.loads.contains_key("link"))
        });
        until("its counters", || counted(&replicas.client(other).metrics_of_leader().ok()?).then_some(()));
    }
    replicas.pause(first);
    let second = replicas.leader(&[0, 1, 2]);
    assert_ne!(first, second);
    tells(&replicas, second, 1, true);
    replicas.go_on(first);
    tells(&replicas, first, 0, false);
    // Where nobody leads, what is known here has to do: nothing, and it says so.
    let left = (0..3).find(|replica| ![first, second].contains(replica)).expect("a third one");
    replicas.kill(first);
    replicas.kill(second);
    until("that nobody knows", || {
        let balance = replicas.client(left).balance().ok()?;
        (balance.unknown_here.is_some() && balance.nics.is_empty()).then_some(())
    });
    let client = replicas.client(left);
    assert!(!counted(&client.metrics_of_leader().expect("an answer")));
    let missing = client.take_unmeasured().expect("it says that they are missing");
    assert!(missing.contains("no controller replica leads"), "{missing}");
    assert_eq!(client.take_unmeasured(), None, "it was said");
    client.devices().expect("what is known here");
    assert_eq!(client.take_unmeasured(), Some(missing));
    client.instances().expect("they are not measured");
    assert_eq!(client.take_unmeasured(), None);
}

#[test]
fn a_replica_that_joins_late_or_lagged_gets_a_snapshot() {
    let mut pod = Pod::demo_in_file();
    pod.stop_controller();
    let mut replicas = Replicas::new(pod.directory.path());
    replicas.start_first(2);
    let told = |replicas: &Replicas, replica: u16| {
        replicas.client(replica).instance_type("kind").ok()?.spec.volume_iops
    };
    // More than twice as many as a log has before a snapshot takes its place: what of it others may yet need is kept.
    let many = 600;
    let mut known = 0;
    let mut change = |replicas: &Replicas, replica: u16| {
        let client = replicas.client(replica);
        for _ in 0..many {
            known += 1;
            let kind = InstanceTypeSpec { volume_iops: Some(known), ..InstanceTypeSpec::default() };
            until("a change", || client.set_instance_type("kind", &kind).ok());
        }
        known
    };
    let wanted = change(&replicas, 0);
    let came = |replicas: &Replicas, replica: u16| {
        replicas.said(replica).matches("what was decided before came as a snapshot").count()
    };
    replicas.start(2, &[]);
    replicas.leader(&[0, 1, 2]);
    until("everything", || (told(&replicas, 2)? == wanted).then_some(()));
    assert!(came(&replicas, 2) > 0, "{}", replicas.said(2));

    // One that is away for as long is sent another one, and what it was sent is on its disk.
    let lags = (replicas.leader(&[0, 1, 2]) + 1) % 3;
    let before = came(&replicas, lags);
    replicas.kill(lags);
    let wanted = change(&replicas, (lags + 1) % 3);
    replicas.start(lags, &[]);
    until("what it missed", || (told(&replicas, lags)? == wanted).then_some(()));
    assert!(came(&replicas, lags) > before, "{}", replicas.said(lags));
    let other = (lags + 1) % 3;
    replicas.leader(&[0, 1, 2]);
    replicas.kill(other);
    let leader = replicas.leader(&[0, 1, 2]);
    let last = InstanceTypeSpec { volume_iops: Some(wanted + 1), ..InstanceTypeSpec::default() };
    replicas.client(leader).set_instance_type("kind", &last).expect("two are a majority");
    replicas.kill(lags);
    replicas.start(lags, &[]);
    until("all of it once more", || (told(&replicas, lags)? == wanted + 1).then_some(()));
}

/// Asks a replica for a volume, under a key of the same name.
fn ask(replicas: &Replicas, replica: u16, name: &str) -> std::io::Result<UnixStream> {
    let mut stream = UnixStream::connect(replicas.socket(replica))?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let body = format!("{{\"name\": \"{name}\", \"size\": \"1M\"}}");
    let length = body.len();
    write!(
        stream,
        "POST /v1/volumes HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         idempotency-key: {name}\r\ncontent-length: {length}\r\n\r\n{body}"
    )?;
    Ok(stream)
}

#[test]
fn what_is_sent_again_under_its_key_is_carried_out_once_whoever_leads() {
    let mut pod = Pod::demo_in_file();
    pod.stop_controller();
    let mut replicas = Replicas::new(pod.directory.path());
    replicas.start_first(3);
    for round in 0..4 {
        let leader = replicas.leader(&[0, 1, 2]);
        let others = [(leader + 1) % 3, (leader + 2) % 3];
        // Asked of the leader itself, or of one that has it asked. Nobody hears the answer.
        let asked = if round % 2 == 0 { leader } else { others[0] };
        let name = format!("vol{round}");
        let unheard = ask(&replicas, asked, &name).expect("it accepts");
        if round < 2 {
            // It is done for certain.
            until("it to be done", || names(&replicas.client(others[1]))?.contains(&name).then_some(()));
        }
        replicas.kill(leader);
        drop(unheard);
        let said = until("an answer", || {
            let mut said = String::new();
            ask(&replicas, others[1], &name).and_then(|mut it| it.read_to_string(&mut said)).ok()?;
            // Nobody leads yet, or whoever did was lost meanwhile.
            (!said.is_empty() && !said.starts_with("HTTP/1.1 503")).then_some(said)
        });
        assert!(said.starts_with("HTTP/1.1 201") && said.contains(&name), "round {round}: {said}");
        replicas.start(leader, &[]);
    }
    replicas.leader(&[0, 1, 2]);
    let mut found = names(&replicas.client(0)).expect("a list");
    found.sort();
    assert_eq!(found, ["vol0", "vol1", "vol2", "vol3"]);
}

/// Asks a replica to let another one go, with these headers, and returns the status.
fn let_go(replicas: &Replicas, asked: u16, gone: u16, headers: &str) -> u16 {
    let mut stream = UnixStream::connect(replicas.socket(asked)).expect("it accepts");
    stream.set_read_timeout(Some(Duration::from_secs(90))).expect("a timeout");
    let request =
        format!("DELETE /v1/controllers/{gone} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    Description::checked_in().assert_allows(&request, &answer);
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status")
}

#[test]
fn a_controller_is_let_go_once_under_a_key() {
    let mut pod = Pod::demo();
    pod.stop_controller();
    let mut replicas = Replicas::new(pod.directory.path());
    replicas.start_first(3);
    let leader = replicas.leader(&[0, 1, 2]);
    let (gone, other) = ((leader + 1) % 3, (leader + 2) % 3);
    let members = |replicas: &Replicas| Some(replicas.client(leader).controllers().ok()?.len());
    for version in ["*", "\"0123456789abcdef\""] {
        let headers = format!("if-match: {version}\r\n");
        assert_eq!(let_go(&replicas, other, gone, &headers), 400, "it has no version");
    }
    assert_eq!(members(&replicas), Some(3));
    replicas.kill(gone);
    let key = "idempotency-key: gone\r\n";
    assert_eq!(let_go(&replicas, other, gone, key), 204);
    until("two members", || (members(&replicas)? == 2).then_some(()));
    assert_eq!(let_go(&replicas, other, gone, "idempotency-key: another\r\n"), 404);
    until("the key everywhere", || (let_go(&replicas, leader, gone, key) == 204).then_some(()));
    assert_eq!(let_go(&replicas, leader, other, key), 422, "it is another request's");

    // It comes back, and what is sent again is about the time before.
    replicas.start(gone, &[]);
    until("three members", || (members(&replicas)? == 3).then_some(()));
    assert_eq!(let_go(&replicas, leader, gone, key), 204);
    assert_eq!(let_go(&replicas, other, gone, key), 204);
    assert_eq!(members(&replicas), Some(3));
}

#[test]
fn a_controller_that_the_others_need_is_not_let_go() {
    let mut pod = Pod::demo();
    pod.stop_controller();
    let mut replicas = Replicas::new(pod.directory.path());
    replicas.start_first(3);
    let leader = replicas.leader(&[0, 1, 2]);
    let (dead, other) = ((leader + 1) % 3, (leader + 2) % 3);
    replicas.kill(dead);
    // Without it the two that are left would have to agree, of which one does not answer.
    for asked in [leader, other] {
        for gone in [leader, other] {
            let trying = replicas.client(asked).trying_only(true);
            let error = trying.remove_controller(gone).expect_err("it is needed");
            assert_eq!(error.status(), Some(409), "{error}");
            assert_eq!(let_go(&replicas, asked, gone, ""), 409, "{asked} is asked to let {gone} go");
        }
    }
    let names_dead = replicas.client(leader).remove_controller(other).expect_err("it is needed").to_string();
    assert!(names_dead.contains(&format!("do not answer: {dead};")), "{names_dead}");
    create(&replicas.client(other), "goes-on");
    assert_eq!(replicas.client(leader).controllers().expect("a list").len(), 3);

    // Whoever is away can be let go, and the others go on.
    assert_eq!(let_go(&replicas, other, dead, ""), 204);
    replicas.leader(&[leader.min(other), leader.max(other)]);
    create(&replicas.client(leader), "goes-on-without");
}
