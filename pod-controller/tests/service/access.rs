//! Who may do what over TCP, and what is written down of it.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::support::description::Description;
use crate::support::{Pod, RunningController, until, vm};
use cxl_pool::Role;
use pod_api::{EndpointHealth, Problem};
use pod_controller::config::ListenTcp;
use pod_controller::rest::Listeners;

/// An answer to a request over TCP: its status, and all of it.
fn ask(address: SocketAddr, method: &str, path: &str, token: Option<&str>, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_mins(1))).expect("a timeout");
    let token = token.map_or_else(String::new, |token| format!("authorization: Bearer {token}\r\n"));
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n{token}\
         content-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    if status >= 400 {
        let body = answer.split_once("\r\n\r\n").expect("a body").1;
        let problem: Problem = serde_json::from_str(body).expect("a problem");
        assert_eq!(problem.status, status);
    }
    Description::checked_in().assert_allows(&request, &answer);
    (status, answer)
}

/// A token and its lines for the file, as podctl makes them.
pub(crate) fn token(name: &str, role: &str) -> (String, String) {
    token_of(&[name, "--role", role])
}

fn token_of(arguments: &[&str]) -> (String, String) {
    let made = Command::new(env!("CARGO_BIN_EXE_podctl")).arg("token").args(arguments).output();
    let made = String::from_utf8(made.expect("podctl starts").stdout).expect("text");
    let token = made.lines().nth(1).expect("a token").to_owned();
    let lines = made.split_once("[[token]]").expect("lines").1;
    (token, format!("[[token]]{lines}"))
}

pub(crate) fn restart(pod: &mut Pod, lines: &str) -> SocketAddr {
    pod.stop_controller();
    let config = pod.config_with(&format!("listen-tcp = '127.0.0.1:0'\n{lines}"));
    let controller = RunningController::start(&config).expect("a controller");
    let address = controller.address.expect("it listens");
    pod.controller = Some(controller);
    address
}

#[test]
fn tokens_say_who_somebody_is_and_changes_are_written_down() {
    let mut pod = Pod::demo();
    let roles = ["viewer", "host", "operator", "admin"].map(|role| token(role, role));
    let [viewer, host, operator, admin] = roles.each_ref().map(|(token, _)| Some(token.as_str()));
    let file = pod.path("tokens");
    let write = |lines: &str| {
        fs::write(&file, lines).expect("written");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("a mode");
    };
    write(&roles.iter().map(|(_, lines)| lines.as_str()).collect::<String>());
    let log = pod.path("audit.jsonl");
    let lines = format!("tokens = '{}'\naudit-log = '{}'", file.display(), log.display());
    let address = restart(&mut pod, &lines);
    let vol0 = "{\"name\": \"vol0\", \"size\": \"4M\"}";
    let (status, answer) = ask(address, "GET", "/v1/hosts", None, "");
    assert!(status == 401 && answer.contains("www-authenticate: Bearer"), "{answer}");
    for (method, path, who, body, expected) in [
        ("GET", "/v1/hosts", Some("wrong"), "", 401),
        ("GET", "/metrics", None, "", 401),
        ("GET", "/v1/hosts", viewer, "", 200),
        ("POST", "/v1/volumes", viewer, vol0, 403),
        ("POST", "/v1/volumes?dry-run=true", viewer, vol0, 403),
        ("POST", "/v1/volumes", host, vol0, 403),
        ("DELETE", "/v1/instances/vm9/migration", host, "", 404),
        ("POST", "/v1/volumes", operator, vol0, 201),
        ("POST", "/v1/hosts/h3/reset", operator, "", 403),
        ("POST", "/v1/hosts/h3/reset", admin, "", 409),
        ("POST", "/v1/hosts/h9/reset", admin, "", 404),
    ] {
        let (status, answer) = ask(address, method, path, who, body);
        assert_eq!(status, expected, "{method} {path}: {answer}");
    }
    // The socket is for whom its permissions let in.
    pod.client().delete_volume("vol0").expect("no token is needed");

    let (written, entries) = audited(&log);
    let shown = |entry: &serde_json::Value| {
        let text = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
        format!("{} {} {} {}", text("who"), text("method"), text("path"), entry["status"])
    };
    let shown: Vec<String> = entries.iter().map(shown).collect();
    assert_eq!(entries.len(), 12, "{shown:?}");
    assert!(shown.contains(&"127.0.0.1 GET /metrics 401".to_owned()), "{shown:?}");
    assert!(shown.contains(&"viewer POST /v1/volumes 403".to_owned()), "{shown:?}");
    assert!(shown.contains(&"operator POST /v1/volumes 201".to_owned()), "{shown:?}");
    assert!(shown[11].starts_with("uid:") && shown[11].ends_with("DELETE /v1/volumes/vol0 204"), "{shown:?}");
    assert!(roles.iter().all(|(token, _)| !written.contains(token)), "a token is in the log");

    // Taken away, it is worth nothing from the next request on.
    write(&roles[0].1);
    assert_eq!(ask(address, "GET", "/v1/hosts", admin, "").0, 401);
    assert_eq!(ask(address, "GET", "/v1/hosts", viewer, "").0, 200);

    let token_file = pod.path("token");
    fs::write(&token_file, format!("{}\n", roles[0].0)).expect("written");
    let podctl = |with_token: bool| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_podctl"));
        command.arg("--server").arg(format!("http://{address}")).args(["hosts", "list"]);
        if with_token {
            command.arg("--token-file").arg(&token_file);
        }
        command.output().expect("podctl starts").status.success()
    };
    assert_eq!((podctl(true), podctl(false)), (true, false));
}

#[test]
fn who_is_bound_to_a_host_changes_what_concerns_it() {
    let mut pod = Pod::demo();
    pod.join(2, Role::NetFrontend, Vec::new());
    pod.join(2, Role::BlkFrontend, Vec::new());
    let hosts = ["h1", "h2", "h3"].map(|host| token_of(&[host, "--role", "host", "--host", host]));
    let [h1, h2, h3] = hosts.each_ref().map(|(token, _)| Some(token.as_str()));
    let (unbound, lines) = token("any", "host");
    let file = pod.path("tokens");
    fs::write(&file, hosts.iter().map(|(_, lines)| lines.as_str()).collect::<String>() + &lines)
        .expect("written");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("a mode");
    let address = restart(&mut pod, &format!("tokens = '{}'", file.display()));
    let client = pod.client();
    until("all daemons", || {
        let hosts = client.hosts().ok()?;
        let endpoints = hosts.iter().flat_map(|host| &host.endpoints);
        (endpoints.filter(|it| it.health == EndpointHealth::Joined).count() == 7).then_some(())
    });
    let vm1 = serde_json::to_string(&vm("vm1", &[])).expect("JSON");
    let (instances, instance) = ("/v1/instances", "/v1/instances/vm1");
    let [migration, activate, answer] =
        ["migration", "migration/activate", "devices/net0/vmm"].map(|it| format!("{instance}/{it}"));
    let to_h2 = "{\"to\": \"h2\"}";
    let plugged = "{\"plugged\": true}";
    let (share, spec) = ("/v1/mchannels/vm1", "{\"path\": [\"pool\"]}");
    for (method, path, who, body, expected) in [
        ("POST", instances, Some(unbound.as_str()), vm1.as_str(), 403),
        ("POST", instances, h2, &vm1, 403),
        ("POST", "/v1/instances?dry-run=true", h2, &vm1, 403),
        ("POST", instances, h1, &vm1, 201),
        ("PUT", &answer, h2, plugged, 403),
        ("PUT", &answer, h1, plugged, 204),
        ("PUT", share, Some(&unbound), spec, 403),
        ("PUT", share, h2, spec, 403),
        // It may: there is no such element.
        ("PUT", share, h1, spec, 404),
        ("DELETE", share, h1, "", 403),
        // A host asks for what comes to it, and lets go of what it has.
        ("POST", &migration, h3, to_h2, 403),
        ("POST", &migration, h2, to_h2, 200),
        ("POST", &activate, h3, "", 403),
        ("DELETE", &migration, h3, "", 403),
        ("DELETE", &migration, h2, "", 204),
        ("POST", &migration, h1, to_h2, 200),
        ("DELETE", &migration, h1, "", 204),
        ("POST", &migration, Some(&unbound), to_h2, 200),
        ("DELETE", &migration, Some(&unbound), "", 204),
        ("PUT", "/v1/hosts/h1/drain", h1, "", 403),
        ("DELETE", instance, h2, "", 403),
        ("DELETE", "/v1/instances/vm9", h2, "", 404),
        ("DELETE", "/v1/instances/vm1?force=true", h1, "", 204),
    ] {
        let (status, answer) = ask(address, method, path, who, body);
        assert_eq!(status, expected, "{method} {path}: {answer}");
    }
    let (_, refused) = ask(address, "POST", instances, h3, &vm1);
    assert!(refused.contains("you are known here as the host h3"), "{refused}");
}

/// What is in an audit log, as text and as what it means.
/// A pod with one token, whose audit log is that file and which answers so many requests per second.
fn audited_pod(name: &str, role: &str, per_second: u32) -> (Pod, SocketAddr, String, PathBuf) {
    let mut pod = Pod::new();
    let (token, lines) = token(name, role);
    let file = pod.path("tokens");
    fs::write(&file, lines).expect("written");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("a mode");
    let log = pod.path("audit.jsonl");
    let (tokens, to) = (file.display(), log.display());
    let lines = format!("tokens = '{tokens}'\naudit-log = '{to}'\nrequests-per-second = {per_second}");
    let address = restart(&mut pod, &lines);
    (pod, address, token, log)
}

fn audited(log: &Path) -> (String, Vec<serde_json::Value>) {
    let written = fs::read_to_string(log).expect("the log");
    let entries = written.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    (written, entries)
}

#[test]
fn refusals_are_written_down_and_no_flood_fills_the_log() {
    const FLOOD: u64 = 150;
    let (mut pod, address, token, log) = audited_pod("operator", "operator", 1000);
    assert_eq!(ask(address, "POST", "/v1/hosts/h1/reset", Some(&token), "").0, 403);
    let endless = format!("/v1/{}?{}", "p".repeat(1000), "q".repeat(1000));
    assert_eq!(ask(address, "GET", &endless, Some("a-secret-of-somebody-else"), "").0, 401);
    let (written, entries) = audited(&log);
    assert_eq!(entries.len(), 2, "{written}");
    let text = |number: usize, name: &str| entries[number][name].as_str().unwrap_or_default().to_owned();
    assert_eq!((text(0, "who"), text(0, "role")), ("operator".to_owned(), "operator".to_owned()));
    assert_eq!((text(1, "who"), text(1, "from")), ("127.0.0.1".to_owned(), "127.0.0.1".to_owned()));
    assert_eq!((text(1, "path").len(), text(1, "query").len()), (200, 200), "{written}");
    assert_eq!((&entries[1]["status"], &entries[0]["status"]), (&401.into(), &403.into()));
    assert!(!written.contains("a-secret-of-somebody-else"));

    for _ in 0..FLOOD {
        assert_eq!(ask(address, "GET", "/v1/hosts", None, "").0, 401);
    }
    let (written, entries) = audited(&log);
    assert!(entries.len() <= 20, "{written}");
    // What is no refusal is told of, however many there were.
    ask(address, "POST", "/v1/volumes", Some(&token), "{\"name\": \"vol0\", \"size\": \"4M\"}");
    let told = entries.len();
    assert_eq!(audited(&log).1.len(), told + 1);
    // A controller that ends tells what it has not told.
    pod.stop_controller();
    let (written, entries) = audited(&log);
    let last = entries.last().expect("a line");
    let untold = last["refusals_not_told_of"].as_u64().unwrap_or_else(|| panic!("{written}"));
    assert_eq!((untold + told as u64, last["from"].as_str()), (FLOOD + 2, Some("127.0.0.1")), "{written}");
}

#[test]
fn who_follows_events_hears_nothing_more_once_his_token_is_gone() {
    let (mut pod, address, token, _) = audited_pod("watcher", "viewer", 1000);
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_mins(1))).expect("a timeout");
    let request = format!(
        "GET /v1/events/stream?after=0 HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).expect("sent");
    let mut heard = Vec::new();
    let mut hear = |heard: &mut Vec<u8>| {
        let mut part = [0; 4096];
        let read = stream.read(&mut part).expect("the stream goes on, or ends");
        heard.extend_from_slice(&part[..read]);
        read > 0
    };
    let says = |heard: &[u8], words: &str| String::from_utf8_lossy(heard).contains(words);
    while !says(&heard, "controller-started") {
        assert!(hear(&mut heard), "{}", String::from_utf8_lossy(&heard));
    }
    // Others of the file are known, and he is not any more.
    fs::write(pod.path("tokens"), self::token("somebody-else", "viewer").1).expect("written");
    pod.join(2, Role::NetBackend, Vec::new());
    // The last part of an answer is an empty one.
    let is_over = |heard: &[u8]| says(heard, "\r\n0\r\n\r\n") || says(heard, "endpoint-joined");
    while !is_over(&heard) && hear(&mut heard) {}
    assert!(!says(&heard, "endpoint-joined"), "{}", String::from_utf8_lossy(&heard));
}

#[test]
fn a_stranger_may_look_at_the_page_and_send_it_nothing() {
    let (_pod, address, _, log) = audited_pod("operator", "operator", 1000);
    assert_eq!(ask(address, "GET", "/", None, "").0, 200);
    assert_eq!(ask(address, "GET", "/page/main.js", None, "").0, 200);
    let endless = "x".repeat(10_000);
    assert_eq!(ask(address, "PUT", &format!("/page/main.js?{endless}"), None, "").0, 401);
    for _ in 0..100 {
        assert_eq!(ask(address, "POST", &format!("/?{endless}"), None, "").0, 401);
    }
    let (written, entries) = audited(&log);
    assert!(!entries.is_empty() && entries.len() <= 20, "{} lines", entries.len());
    for entry in entries {
        for part in ["path", "query"] {
            assert!(entry[part].as_str().is_some_and(|text| text.len() <= 200), "{written}");
        }
    }
}

#[test]
fn too_many_requests_are_written_down_with_whose_they_were() {
    let (_pod, address, token, log) = audited_pod("alice", "viewer", 1);
    let refused = (0..20).filter(|_| ask(address, "GET", "/v1/hosts", Some(&token), "").0 == 429).count();
    assert!(refused > 0, "20 requests take no 20 seconds");
    let (written, entries) = audited(&log);
    assert_eq!(entries.len(), refused, "{written}");
    assert!(
        entries.iter().all(|it| it["who"] == "alice" && it["status"] == 429 && it["path"] == "/v1/hosts")
    );
}

#[test]
fn floods_are_refused_and_the_socket_stays_open() {
    let mut pod = Pod::new();
    let address = restart(&mut pod, "requests-per-second = 1");
    // Without tokens, whoever is on this host may do everything, but not all at once.
    let answers: Vec<(u16, String)> = (0..20).map(|_| ask(address, "GET", "/v1/hosts", None, "")).collect();
    assert_eq!(answers[0].0, 200, "{}", answers[0].1);
    let refused = answers.iter().find(|(status, _)| *status == 429);
    let (_, refused) = refused.expect("20 requests take no 20 seconds");
    assert!(refused.contains("retry-after: "), "{refused}");
    for _ in 0..20 {
        pod.client().hosts().expect("it answers");
    }
}

/// A controller whose configuration says nothing of TCP but this, at another port than it would have: many tests run at a time.
pub(crate) fn restart_by_default(pod: &mut Pod, lines: &str) -> SocketAddr {
    pod.stop_controller();
    let mut config = pod.config_with(lines);
    config.controller.listen_tcp = ListenTcp::ByDefault;
    let mut tcp = config.listen_tcp().expect("it listens by default");
    assert!(tcp.address.ip().is_loopback());
    tcp.address.set_port(0);
    let controller = RunningController::start_on(&config, Some(tcp)).expect("a controller");
    let address = controller.address.expect("it listens");
    pod.controller = Some(controller);
    address
}

#[test]
fn by_default_this_host_may_look_and_changes_take_a_token() {
    let mut pod = Pod::demo();
    let address = restart_by_default(&mut pod, "");
    let vol0 = "{\"name\": \"vol0\", \"size\": \"4M\"}";
    for (method, path, body, expected) in [
        ("GET", "/", "", 200),
        ("GET", "/v1/hosts", "", 200),
        ("GET", "/metrics", "", 200),
        ("POST", "/v1/volumes", vol0, 403),
        ("POST", "/v1/volumes?dry-run=true", vol0, 403),
        ("PUT", "/v1/hosts/h2/drain", "", 403),
        ("DELETE", "/v1/hosts/h3", "", 403),
        ("BREW", "/v1/hosts", "", 403),
    ] {
        let (status, answer) = ask(address, method, path, None, body);
        assert_eq!(status, expected, "{method} {path}: {answer}");
        assert!(status != 403 || answer.contains("controller.tokens"), "{answer}");
    }
    pod.client().drain_host("h3", true).expect("the socket is for whom its permissions let in");

    let (token, lines) = token("admin", "admin");
    let file = pod.path("tokens");
    fs::write(&file, lines).expect("written");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("a mode");
    let address = restart_by_default(&mut pod, &format!("tokens = '{}'", file.display()));
    assert_eq!(ask(address, "GET", "/", None, "").0, 200, "the page asks for the token");
    assert_eq!(ask(address, "GET", "/v1/hosts", None, "").0, 401);
    assert_eq!(ask(address, "POST", "/v1/volumes", Some(&token), vol0).0, 201);
}

#[test]
fn a_port_that_is_taken_is_missed_only_by_who_asked_for_it() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address");
    let mut pod = Pod::new();
    pod.stop_controller();
    let mut config = pod.config();
    config.controller.listen_tcp = ListenTcp::ByDefault;
    let mut tcp = config.listen_tcp().expect("it listens by default");
    tcp.address = address;
    pod.controller = Some(RunningController::start_on(&config, Some(tcp)).expect("a controller"));
    assert_eq!(pod.controller.as_ref().and_then(|it| it.address), None);
    pod.client().hosts().expect("it serves without");

    pod.stop_controller();
    config.controller.listen_tcp = ListenTcp::At(address);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let bound = runtime.block_on(Listeners::bind(&config.listen(), config.listen_tcp()));
    let error = bound.expect_err("it is taken").to_string();
    assert!(error.contains(&address.to_string()) && error.contains("listen-tcp"), "{error}");
}
