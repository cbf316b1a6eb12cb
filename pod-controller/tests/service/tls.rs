//! The API over TLS: who is who by certificate, and what somebody with the wrong one is told.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use crate::support::authority::{Authority, Pair, write};
use crate::support::{Pod, RunningController};

const PATIENCE: Duration = Duration::from_mins(1);

fn start(pod: &mut Pod, lines: &str) -> SocketAddr {
    pod.stop_controller();
    let controller = RunningController::start(&pod.config_with(lines)).expect("a controller");
    let address = controller.address.expect("it listens");
    pod.controller = Some(controller);
    address
}

fn podctl(server: &str, ca: Option<&Path>, pair: Option<&Pair>, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_podctl"));
    command.arg("--server").arg(server).args(arguments.split_whitespace());
    command.args(ca.into_iter().flat_map(|it| ["--ca-file".as_ref(), it.as_os_str()]));
    if let Some(pair) = pair {
        command.arg("--cert-file").arg(&pair.certificate).arg("--key-file").arg(&pair.key);
    }
    command.output().expect("podctl starts")
}

#[track_caller]
fn fine(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[track_caller]
fn fails(output: &Output, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "it was let in");
    for word in words {
        assert!(said.contains(word), "{word:?} is not in: {said}");
    }
}

#[test]
fn certificates_say_who_somebody_is_and_are_renewed_without_a_restart() {
    let mut pod = Pod::demo();
    let directory = pod.directory.path().to_owned();
    let (ours, others) = (Authority::new(&directory, "ours"), Authority::new(&directory, "others"));
    let mut server = ours.issue(&directory, "server", &["localhost"], false);
    let log = pod.path("audit.jsonl");
    let lines = format!(
        "listen-tcp = '127.0.0.1:0'\naudit-log = '{}'\n[controller.tls]\ncertificate = '{}'\nkey = '{}'\nclient-ca = '{}'\n\
         [[controller.tls.client]]\nmatch = 'cn:alice'\nrole = 'operator'\n\
         [[controller.tls.client]]\nmatch = 'dns:h1.pod'\nrole = 'host'",
        log.display(),
        server.certificate.display(),
        server.key.display(),
        ours.file.display()
    );
    let port = start(&mut pod, &lines).port();
    let at = format!("https://localhost:{port}");
    let alice = ours.issue(&directory, "alice", &["alice"], false);
    let ca = Some(ours.file.as_path());
    fine(&podctl(&at, ca, Some(&alice), "volumes create vol0 --size 4M"));
    let written = fs::read_to_string(&log).expect("a log");
    assert!(
        written.contains("\"who\":\"cn:alice\"") && written.contains("\"role\":\"operator\""),
        "{written}"
    );

    let host = ours.issue(&directory, "h1", &["H1.pod", "x"], false);
    fine(&podctl(&at, ca, Some(&host), "hosts list"));
    fails(&podctl(&at, ca, Some(&host), "volumes delete vol0"), &["not for the role host"]);
    let stranger = ours.issue(&directory, "stranger", &["mallory"], false);
    let output = podctl(&at, ca, Some(&stranger), "hosts list");
    fails(&output, &["cn:mallory", "controller.tls.client"]);
    fails(&podctl(&at, ca, None, "hosts list"), &["--cert-file"]);

    // Wrong ones, on either side, and what to do about them.
    let late = ours.issue(&directory, "late", &["alice"], true);
    fails(&podctl(&at, ca, Some(&late), "hosts list"), &["has expired", "--cert-file"]);
    let foreign = others.issue(&directory, "foreign", &["alice"], false);
    fails(&podctl(&at, ca, Some(&foreign), "hosts list"), &["client-ca"]);
    fails(&podctl(&at, Some(&others.file), Some(&alice), "hosts list"), &["--ca-file"]);
    fails(&podctl(&at, None, Some(&alice), "hosts list"), &["--ca-file"]);
    let mixed = Pair { certificate: alice.certificate.clone(), key: host.key.clone() };
    fails(&podctl(&at, ca, Some(&mixed), "hosts list"), &["do not belong together"]);
    let by_address = format!("https://127.0.0.1:{port}");
    fails(&podctl(&by_address, ca, Some(&alice), "hosts list"), &["for another name"]);
    let plain = format!("http://localhost:{port}");
    fails(&podctl(&plain, ca, Some(&alice), "hosts list"), &["https://"]);

    // Put in place while it runs: an expired one (which clients refuse), half of a pair (nothing changes), and a good one.
    ours.issue(&directory, "server", &["localhost"], true);
    fails(&podctl(&at, ca, Some(&alice), "hosts list"), &["certificate has expired"]);
    let broken = fs::read_to_string(&host.key).expect("a key");
    write(&server.key, &broken);
    fails(&podctl(&at, ca, Some(&alice), "hosts list"), &["certificate has expired"]);
    server = ours.issue(&directory, "server", &["localhost", "other.pod"], false);
    fine(&podctl(&at, ca, Some(&alice), "hosts list"));
    // The authority is given up: its clients are strangers from the next connection on.
    fs::copy(&others.file, ours.file.with_extension("new")).expect("copied");
    let kept = pod.path("ours.kept");
    fs::copy(&ours.file, &kept).expect("copied");
    fs::rename(ours.file.with_extension("new"), &ours.file).expect("renamed");
    fails(&podctl(&at, Some(&kept), Some(&alice), "hosts list"), &["client-ca"]);
    fine(&podctl(&at, Some(&kept), Some(&foreign), "hosts list"));
    drop(server);
}

#[test]
fn tokens_are_enough_and_clients_that_stall_hold_nothing() {
    let mut pod = Pod::demo();
    let directory = pod.directory.path().to_owned();
    let ours = Authority::new(&directory, "ours");
    let server = ours.issue(&directory, "server", &["localhost"], false);
    let made = Command::new(env!("CARGO_BIN_EXE_podctl")).args(["token", "bob", "--role", "viewer"]).output();
    let made = String::from_utf8(made.expect("podctl starts").stdout).expect("text");
    let (tokens, token) = (pod.path("tokens"), pod.path("token"));
    write(&tokens, &format!("[[token]]{}", made.split_once("[[token]]").expect("lines").1));
    write(&token, made.lines().nth(1).expect("a token"));
    let lines = format!(
        "listen-tcp = '127.0.0.1:0'\ntokens = '{}'\n[controller.tls]\ncertificate = '{}'\nkey = '{}'",
        tokens.display(),
        server.certificate.display(),
        server.key.display()
    );
    let address = start(&mut pod, &lines);
    let at = format!("https://localhost:{}", address.port());
    let hosts = format!("hosts list --token-file {}", token.display());
    // Silent ones, one in the middle of its first message, and one that talks of something else.
    let stalled: Vec<TcpStream> =
        (0..200).map(|_| TcpStream::connect(address).expect("it listens")).collect();
    for mut stream in &stalled[100..] {
        stream.write_all(&[0x16, 3, 1, 2, 0, 1, 0]).expect("sent");
    }
    let mut other = TcpStream::connect(address).expect("it listens");
    other.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    other.write_all(b"GET /v1/hosts HTTP/1.1\r\nhost: x\r\n\r\n").expect("sent");
    other.shutdown(Shutdown::Write).expect("half closed");
    let mut answer = String::new();
    other.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("https://"), "{answer}");
    fine(&podctl(&at, Some(&ours.file), None, &hosts));
    fails(&podctl(&at, Some(&ours.file), None, "hosts list"), &["token"]);
    pod.client().hosts().expect("the socket answers");
    drop(stalled);
}
