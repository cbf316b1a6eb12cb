//! Garbage gets a 4xx and a problem description, never a hang or a panic.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wadi_tests::pod::{HostPlan, Pod, PodBuilder};

/// A pod with a controller and a host that may run VMs.
fn pod() -> MutexGuard<'static, Pod> {
    static POD: LazyLock<Mutex<Pod>> = LazyLock::new(|| {
        Mutex::new(PodBuilder::new().host(HostPlan::new("h1").vms().ssd("ssd0", "256M")).start().unwrap())
    });
    POD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends these bytes as they are and returns the whole answer.
fn send(pod: &Pod, request: &[u8]) -> String {
    let mut stream = UnixStream::connect(pod.directory().join("run/controller.sock")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // A server may refuse before it has read everything.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn call(pod: &Pod, method: &str, path: &str, content_type: &str, body: &[u8]) -> String {
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    request.extend_from_slice(body);
    send(pod, &request)
}

fn assert_problem(answer: &str, what: &str) {
    let status = answer.split_whitespace().nth(1).unwrap_or_default();
    assert!(status.len() == 3 && status.starts_with('4'), "{what}: {answer}");
    assert!(
        answer.to_ascii_lowercase().contains("content-type: application/problem+json"),
        "{what}: {answer}"
    );
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body).unwrap_or_default();
    assert!(body.contains("\"title\"") && body.contains("\"status\""), "{what}: {answer}");
}

#[test]
fn garbage_gets_a_problem_description() {
    let pod = pod();
    let json = "application/json";
    let long_name = format!("{{\"name\":\"{}\",\"size\":1}}", "x".repeat(5000));
    let deep = "[".repeat(20_000);
    let huge = vec![b' '; 5 << 20];
    let requests: &[(&str, &str, &str, &[u8])] = &[
        ("GET", "/v1/nothing", json, b""),
        ("GET", "/nothing", json, b""),
        ("GET", "/v1/instances/none", json, b""),
        ("GET", "/v1/hosts/%00%ff", json, b""),
        ("GET", "/v1/devices/h1/..%2f..", json, b""),
        ("GET", "/v1/events?after=minus", json, b""),
        ("GET", "/v1/events?after=99999999999999999999999", json, b""),
        ("GET", "/v1/events/stream?after=x", json, b""),
        ("DELETE", "/v1/instances/none", json, b""),
        ("DELETE", "/v1/volumes/none", json, b""),
        ("PATCH", "/v1/volumes", json, b"{}"),
        ("POST", "/v1/hosts", json, b"{}"),
        ("POST", "/v1/volumes", json, b""),
        ("POST", "/v1/volumes", json, b"{"),
        ("POST", "/v1/volumes", json, b"null"),
        ("POST", "/v1/volumes", json, b"[1,2,3]"),
        ("POST", "/v1/volumes", json, b"\xff\xfe\x00"),
        ("POST", "/v1/volumes", "text/plain", b"{\"name\":\"a\",\"size\":1048576}"),
        ("POST", "/v1/volumes", json, b"{\"name\":\"a\"}"),
        ("POST", "/v1/volumes", json, b"{\"name\":\"\",\"size\":1048576}"),
        ("POST", "/v1/volumes", json, b"{\"name\":\"../a\",\"size\":1048576}"),
        ("POST", "/v1/volumes", json, b"{\"name\":\"a\",\"size\":0}"),
        ("POST", "/v1/volumes", json, b"{\"name\":\"a\",\"size\":-1}"),
        ("POST", "/v1/volumes", json, b"{\"name\":\"a\",\"size\":\"8X\"}"),
        ("POST", "/v1/volumes", json, b"{\"name\":\"a\",\"size\":18446744073709551615}"),
        ("POST", "/v1/volumes", json, b"{\"name\":\"a\",\"size\":\"1T\"}"),
        ("POST", "/v1/volumes", json, b"{\"name\":\"a\",\"size\":1048576,\"device\":\"h9/ssd9\"}"),
        ("POST", "/v1/volumes", json, b"{\"name\":\"a\",\"size\":1048576,\"colour\":\"red\"}"),
        ("POST", "/v1/volumes", json, long_name.as_bytes()),
        ("POST", "/v1/volumes", json, deep.as_bytes()),
        ("POST", "/v1/volumes", json, &huge),
        ("POST", "/v1/instances", json, b"{\"name\":\"vm\",\"host\":\"h9\"}"),
        ("POST", "/v1/instances", json, b"{\"name\":\"vm\",\"host\":\"h1\",\"volumes\":[\"none\"]}"),
        ("POST", "/v1/instances", json, b"{\"name\":\"vm\",\"host\":\"h1\",\"nics\":[{\"mac\":\"zz\"}]}"),
        (
            "POST",
            "/v1/instances",
            json,
            b"{\"name\":\"vm\",\"host\":\"h1\",\"nics\":[{\"mac\":\"01:00:00:00:00:01\"}]}",
        ),
        ("POST", "/v1/instances", json, b"{\"name\":\"vm\",\"host\":\"h1\",\"nics\":[{\"mtu\":1}]}"),
        (
            "POST",
            "/v1/instances",
            json,
            b"{\"name\":\"vm\",\"host\":\"h1\",\"nics\":[{\"queue_pairs\":60000}]}",
        ),
        ("POST", "/v1/instances", json, b"{\"name\":\"vm\",\"host\":\"h1\",\"nics\":[{}]}"),
        ("POST", "/v1/instances?wait=x", json, b"{\"name\":\"vm\",\"host\":\"h1\"}"),
    ];
    for (method, path, content_type, body) in requests {
        let shown = String::from_utf8_lossy(&body[..body.len().min(80)]);
        assert_problem(&call(&pod, method, path, content_type, body), &format!("{method} {path} {shown}"));
    }
    pod.api().ready().unwrap();
    assert_eq!(pod.api().volumes().unwrap(), []);
    assert_eq!(pod.api().instances().unwrap(), []);
}

#[test]
fn bytes_that_are_no_http_do_no_harm() {
    let pod = pod();
    for garbage in
        [&b"\x00\x01\x02\x03\r\n\r\n"[..], b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n"]
    {
        let mut stream = UnixStream::connect(pod.directory().join("run/controller.sock")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let _ = stream.write_all(garbage);
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert_problem(&String::from_utf8_lossy(&answer), &String::from_utf8_lossy(garbage));
    }
    // Somebody who connects and says nothing holds nobody up.
    let _silent = UnixStream::connect(pod.directory().join("run/controller.sock")).unwrap();
    pod.api().ready().unwrap();
}

#[test]
fn podctl_says_what_is_wrong_and_fails() {
    let pod = pod();
    let server = format!("unix:{}/run/controller.sock", pod.directory().display());
    let podctl = |arguments: &[&str]| {
        Command::new(pod.binary("podctl")).args(["--server", &server]).args(arguments).output().unwrap()
    };
    let lists = ["hosts", "devices", "volumes", "instances"].map(|what| [what, "list"]);
    for what in lists.iter().map(|words| &words[..]).chain([&["events"][..], &["pool"]]) {
        let output = podctl(what);
        assert!(output.status.success(), "{what:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    for what in [&["nonsense"][..], &[], &["hosts", "get", "none"], &["volumes", "delete", "none"]] {
        let output = podctl(what);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{what:?} succeeded");
        assert!(!said.is_empty() && !said.contains("panicked"), "{what:?}: {said}");
    }
    let output = Command::new(pod.binary("podctl"))
        .args(["--server", "unix:/nowhere", "hosts", "list"])
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("/nowhere"));
}

#[test]
fn podctl_doctor_finds_the_pods_hosts_fit_and_a_host_without_its_pool_not() {
    let pod = pod();
    let doctor = |config: &std::path::Path| {
        let mut command = Command::new(pod.binary("podctl"));
        // It asks no controller.
        command.args(["--server", "unix:/nowhere", "--output", "json", "doctor", "--config"]).arg(config);
        command.output().unwrap()
    };
    let config = pod.config_path("h1");
    let output = doctor(&config);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("\"ssd ssd0\"") && said.contains("\"pool\""), "{said}");

    let directory = tempfile::tempdir().unwrap();
    let broken = directory.path().join("host.toml");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&broken, text.replace("/pool\"", "/no-pool\"")).unwrap();
    let output = doctor(&broken);
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("wadi-pool create"), "{said}");
}

#[test]
fn description_names_every_resource() {
    let pod = pod();
    let answer = call(&pod, "GET", "/openapi.json", "application/json", b"");
    for path in ["/v1/hosts", "/v1/devices", "/v1/volumes", "/v1/instances", "/v1/events", "/v1/pool"] {
        assert!(answer.contains(&format!("\"{path}\"")), "{path} is not in the description");
    }
    assert!(pod.api().metrics().unwrap().contains("# TYPE wadi_failovers_total counter"));
}
