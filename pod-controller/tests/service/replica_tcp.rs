//! Controller replicas over TCP with TLS: leaders die, the network is cut, and strangers are not let in.

use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};

use crate::support::authority::{Authority, Pair, write};
use crate::support::network::{Wire, addresses};
use crate::support::replicas::{Replicas, create, names, tcp_section as section, volume};
use crate::support::{Pod, until};

const ALL: [u16; 3] = [0, 1, 2];

fn grow(replicas: &mut Replicas, to: &[u16]) {
    replicas.start(0, &["--bootstrap"]);
    replicas.leader(&[0]);
    for replica in to.iter().skip(1) {
        replicas.start(*replica, &[]);
        replicas.leader(&to[..=usize::from(*replica)]);
    }
}

#[test]
fn leaders_die_and_the_network_is_cut_and_what_was_answered_is_there() {
    let mut pod = Pod::demo_in_file();
    create(&pod.client(), "before");
    pod.stop_controller();
    let directory = pod.directory.path().to_owned();
    let ours = Authority::new(&directory, "replicas");
    let listen = addresses(3);
    let mut replicas = Replicas::new(&directory);
    // A pair's connection is made by the one with the higher number: that is where it can be cut.
    let mut wires = Vec::new();
    for replica in ALL {
        let mut reached = listen.clone();
        for lower in 0..replica {
            let way = SocketAddr::new(listen[usize::from(lower)].ip(), 9000 + replica);
            wires.push((lower, replica, Wire::new(way, listen[usize::from(lower)])));
            reached[usize::from(lower)] = way;
        }
        let host = listen[usize::from(replica)].ip().to_string();
        let pair = ours.issue(&directory, &format!("replica{replica}"), &[&host], false);
        let listen = listen[usize::from(replica)];
        replicas.sections.insert(replica, section(listen, &reached, &pair, &ours.file));
    }
    let cut = |whom: u16, cut: bool| {
        for (_, _, wire) in wires.iter().filter(|(low, high, _)| whom == *low || whom == *high) {
            wire.cut(cut);
        }
    };
    grow(&mut replicas, &ALL);
    let mut wanted = vec!["before".to_owned()];
    let mut change = |replicas: &Replicas, replica: u16, name: &str| {
        create(&replicas.client(replica), name);
        wanted.push(name.to_owned());
        wanted.clone()
    };
    let known = |replicas: &Replicas, wanted: &[String]| {
        for replica in replicas.running.keys() {
            until("what was answered", || {
                let names = names(&replicas.client(*replica))?;
                wanted.iter().all(|name| names.contains(name)).then_some(())
            });
        }
    };
    // Whoever is asked has the leader carry it out.
    for replica in ALL {
        change(&replicas, replica, &format!("by-{replica}"));
    }
    let first = replicas.leader(&ALL);
    replicas.kill(first);
    let second = replicas.leader(&ALL);
    assert_ne!(first, second);
    let wanted_then = change(&replicas, second, "after-a-death");
    known(&replicas, &wanted_then);
    replicas.start(first, &[]);
    let leader = replicas.leader(&ALL);
    known(&replicas, &wanted_then);

    // Nobody hears of the leader, nor it of anybody: the others have one of their own, and what it is asked for does not happen.
    cut(leader, true);
    let cut_off = replicas.running.remove(&leader).expect("it runs");
    let elected = replicas.leader(&ALL);
    assert_ne!(leader, elected);
    let wanted_then = change(&replicas, elected, "meanwhile");
    let error = replicas.client(leader).create_volume(&volume("never")).expect_err("it has no majority");
    assert_eq!(error.status(), Some(503), "{error}");
    assert!(names(&replicas.client(leader)).is_some_and(|names| !names.contains(&"meanwhile".to_owned())));
    replicas.running.insert(leader, cut_off);
    cut(leader, false);
    known(&replicas, &wanted_then);
    replicas.leader(&ALL);
    let everything = change(&replicas, leader, "last");
    known(&replicas, &everything);
    for replica in ALL {
        assert!(!names(&replicas.client(replica)).expect("it answers").contains(&"never".to_owned()));
    }
}

#[test]
fn strangers_are_told_why_and_fill_no_log() {
    let mut pod = Pod::demo_in_file();
    pod.stop_controller();
    let directory = pod.directory.path().to_owned();
    let (ours, others) = (Authority::new(&directory, "replicas"), Authority::new(&directory, "others"));
    let listen = addresses(2);
    let mut replicas = Replicas::new(&directory);
    let issue = |authority: &Authority, file: &str, host: SocketAddr| {
        authority.issue(&directory, file, &[&host.ip().to_string()], false)
    };
    let good = issue(&ours, "replica0", listen[0]);
    replicas.sections.insert(0, section(listen[0], &listen, &good, &ours.file));
    grow(&mut replicas, &[0]);
    create(&replicas.client(0), "vol0");

    // One after the other, in the files of the same replica, which is not restarted in between.
    let pair = issue(&others, "replica1", listen[1]);
    replicas.sections.insert(1, section(listen[1], &listen, &pair, &ours.file));
    replicas.start(1, &[]);
    let told = |replicas: &Replicas, word: &str| {
        until(word, || replicas.said(1).contains(word).then_some(()));
        assert_eq!(replicas.controllers(0).map(|known| known.len()), Some(1), "it is no member");
    };
    told(&replicas, "it refuses our certificate");
    let elsewhere: SocketAddr = "127.0.0.99:1".parse().expect("an address");
    issue(&ours, "replica1", elsewhere);
    told(&replicas, &format!("its certificate is not for {}", listen[1].ip()));
    let kept = std::fs::read_to_string(&ours.file).expect("an authority");
    let ca = directory.join("its-own.pem");
    replicas.kill(1);
    issue(&ours, "replica1", listen[1]);
    write(&ca, &std::fs::read_to_string(&others.file).expect("an authority"));
    replicas.sections.insert(1, section(listen[1], &listen, &pair, &ca));
    replicas.start(1, &[]);
    told(&replicas, "not of the authority in replication.tcp.ca");

    // Whoever just comes by, many at once.
    for sent in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[0x16, 3, 1, 2, 0, 1, 0], &[0xff; 4096]].repeat(40) {
        let mut stream = TcpStream::connect(listen[0]).expect("it listens");
        // It may have been sent away already.
        let _ = stream.write_all(sent);
    }
    let lines =
        |replica: u16, word: &str| replicas.said(replica).lines().filter(|it| it.contains(word)).count();
    let said = lines(0, "is not let in");
    assert!((1..10).contains(&said), "{said} lines for hundreds of strangers");
    assert!(lines(1, "is not connected") < 10, "one line for each reason");

    // With what it should have had it becomes a member.
    write(&ca, &kept);
    replicas.leader(&[0, 1]);
    until("the volume", || (names(&replicas.client(1))? == ["vol0"]).then_some(()));
}

#[test]
fn mistakes_in_the_configuration_are_named() {
    let mut pod = Pod::demo_in_file();
    pod.stop_controller();
    let directory = pod.directory.path().to_owned();
    let ours = Authority::new(&directory, "replicas");
    let listen = addresses(4);
    let mut replicas = Replicas::new(&directory);
    let pair = ours.issue(&directory, "replica0", &[&listen[0].ip().to_string()], false);
    let absent = Pair { certificate: directory.join("absent.pem"), key: pair.key.clone() };
    let taken = std::net::TcpListener::bind(listen[3]).expect("a free address");
    for (section, word) in [
        (section(listen[0], &listen, &pair, &ours.file), "--replicas"),
        (section(listen[0], &listen[..3], &absent, &ours.file), "absent.pem"),
        (section(listen[0], &listen[..3], &pair, &pair.key), "no certificate in it"),
        (section(listen[3], &listen[..3], &pair, &ours.file), "replication.tcp.listen"),
        (section(listen[0], &[], &pair, &ours.file), "this one included"),
    ] {
        replicas.sections.insert(0, section);
        replicas.start(0, &["--bootstrap"]);
        let said = replicas.ended(0);
        assert!(said.contains(word), "{word}: {said}");
    }
    drop(taken);
}
