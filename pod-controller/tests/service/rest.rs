//! The API as strangers use it: everything gets an answer, and every refusal is a problem that says why.

mod again;
mod answers;
mod events;
mod misspelt;
mod versions;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixListener;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{Pod, until, vm};
use pod_api::client::Client;
use pod_api::{CandidatePart, Condition, ConditionKind, Event, EventKind, PROBLEM_JSON, Problem};
use pod_controller::store::Store;

fn request(method: &str, path: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n{body}"
    )
}

fn status(answer: &str) -> u16 {
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    status.unwrap_or_else(|| panic!("no HTTP: {answer:?}"))
}

fn problem(answer: &str) -> Problem {
    assert!(answer.contains(PROBLEM_JSON), "no problem: {answer}");
    let body = answer.split_once("\r\n\r\n").expect("a body").1;
    let problem: Problem = serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}"));
    assert_eq!(problem.status, status(answer));
    assert!(!problem.detail.is_empty() && !problem.kind.is_empty() && !problem.title.is_empty());
    problem
}

const JSON: &str = "content-type: application/json\r\n";

#[test]
fn garbage_gets_a_problem() {
    let pod = Pod::demo();
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let large = format!("{{\"name\": \"{}\"}}", "x".repeat(300_000));
    let long_name = format!("/v1/volumes/{}", "y".repeat(3000));
    for (method, path, headers, body, expected) in [
        ("GET", "/page/", "", "", 404),
        ("GET", "/v2/hosts", "", "", 404),
        ("GET", "/v1/hosts/", "", "", 404),
        ("GET", "/v1/hosts/nobody", "", "", 404),
        ("GET", "/v1/hosts/%ff%fe", "", "", 400),
        ("GET", "/v1/devices/h2/nothing", "", "", 404),
        ("GET", "/v1/devices/h2%2Fnic0", "", "", 404),
        ("GET", "/v1/volumes/%00", "", "", 404),
        ("GET", &long_name, "", "", 404),
        ("PUT", "/v1/hosts", "", "", 405),
        ("DELETE", "/v1/instances", "", "", 405),
        ("POST", "/metrics", "", "", 405),
        ("BREW", "/v1/hosts", "", "", 405),
        ("GET", "/v1/events?after=minus", "", "", 400),
        ("GET", "/v1/events?before=1", "", "", 400),
        ("GET", "/v1/events?limit=0", "", "", 400),
        ("GET", "/v1/events?limit=10001", "", "", 400),
        ("GET", "/v1/pool?limit=0", "", "", 400),
        ("GET", "/v1/pool?state=lost", "", "", 400),
        ("GET", "/metrics?leadr=true", "", "", 400),
        ("GET", "/v1/events/stream?after=99999999999999999999", "", "", 400),
        ("GET", "/v1/events/stream", "last-event-id: x\r\n", "", 400),
        ("POST", "/v1/volumes", JSON, "", 400),
        ("POST", "/v1/volumes", JSON, "{", 400),
        ("POST", "/v1/volumes", JSON, "[]", 400),
        ("POST", "/v1/volumes", JSON, "null", 400),
        ("POST", "/v1/volumes", JSON, "{\"name\": 7, \"size\": 1}", 400),
        ("POST", "/v1/volumes", JSON, "{\"name\": \"v\"}", 400),
        ("POST", "/v1/volumes", JSON, "{\"name\": \"v\", \"size\": -1}", 400),
        ("POST", "/v1/volumes", JSON, "{\"name\": \"v\", \"size\": \"8X\"}", 400),
        ("POST", "/v1/volumes", JSON, "{\"name\": \"v\", \"size\": \"8G\", \"color\": \"red\"}", 400),
        ("POST", "/v1/volumes", JSON, "{\"name\": \"../v\", \"size\": \"4K\"}", 400),
        ("POST", "/v1/volumes", JSON, "{\"name\": \"v\", \"size\": 5}", 400),
        ("POST", "/v1/volumes", JSON, "{\"name\": \"v\", \"size\": \"9999T\"}", 409),
        ("POST", "/v1/volumes", JSON, "{\"name\": \"v\", \"size\": \"4K\", \"device\": \"h9/ssd0\"}", 404),
        ("POST", "/v1/volumes", JSON, "{\"name\": \"v\", \"size\": \"4K\", \"device\": \"h2/nic0\"}", 404),
        ("POST", "/v1/volumes", JSON, "\u{1}\u{2}\u{3}", 400),
        ("POST", "/v1/volumes", JSON, &deep, 400),
        ("POST", "/v1/volumes", JSON, &large, 413),
        ("POST", "/v1/volumes", "", "{\"name\": \"v\", \"size\": \"4K\"}", 415),
        ("POST", "/v1/volumes", "content-type: text/xml\r\n", "<volume/>", 415),
        ("POST", "/v1/instances", JSON, "{\"name\": \"vm1\", \"host\": \"nobody\"}", 404),
        ("POST", "/v1/instances", JSON, "{\"name\": \"vm1\", \"host\": \"h2\", \"nics\": [{}]}", 409),
        (
            "POST",
            "/v1/instances",
            JSON,
            "{\"name\": \"vm1\", \"host\": \"h1\", \"volumes\": [\"none\"]}",
            404,
        ),
        (
            "POST",
            "/v1/instances",
            JSON,
            "{\"name\": \"vm1\", \"host\": \"h1\", \"nics\": [{\"mac\": \"red\"}]}",
            400,
        ),
        (
            "POST",
            "/v1/instances",
            JSON,
            "{\"name\": \"vm1\", \"host\": \"h1\", \"nics\": [{\"mtu\": 70000}]}",
            400,
        ),
        ("POST", "/v1/instances", JSON, "{\"name\": \"vm1\", \"host\": \"h1\", \"nics\": {}}", 400),
        ("POST", "/v1/instances?wait=forever", JSON, "{\"name\": \"vm1\", \"host\": \"h1\"}", 400),
        ("POST", "/v1/instances?wait=999999", JSON, "{\"name\": \"vm1\", \"host\": \"h1\"}", 400),
        ("DELETE", "/v1/instances/vm9", "", "", 404),
        ("DELETE", "/v1/volumes/vol9", "", "", 404),
    ] {
        let answer = pod.raw(&request(method, path, headers, body));
        assert_eq!(status(&answer), expected, "{method} {path:.60} {body:.60}: {answer}");
        problem(&answer);
    }
    let client = pod.client();
    assert!(client.volumes().expect("still there").is_empty());
    assert!(client.instances().expect("still there").is_empty());
}

#[test]
fn what_is_no_http_is_refused_and_hurts_nobody() {
    let pod = Pod::new();
    for garbage in ["\0\0\0\0\r\n\r\n", "hello\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "GET  HTTP/1.1\r\n\r\n"] {
        let answer = pod.raw(garbage);
        assert!(answer.is_empty() || (400..600).contains(&status(&answer)), "{garbage:?}: {answer:?}");
    }
    pod.client().ready().expect("still ready");
}

#[test]
fn conflicts_say_who_is_in_the_way() {
    let pod = Pod::demo();
    let body = "{\"name\": \"vol0\", \"size\": \"4M\"}";
    let created = pod.raw(&request("POST", "/v1/volumes", JSON, body));
    assert_eq!(status(&created), 201);
    assert!(created.contains("location: /v1/volumes/vol0"), "{created}");
    assert_eq!(problem(&pod.raw(&request("POST", "/v1/volumes", JSON, body))).kind, "exists");
    pod.client().create_instance(&vm("vm1", &["vol0"]), Duration::from_secs(30)).expect("created");
    let refused = problem(&pod.raw(&request("DELETE", "/v1/volumes/vol0", "", "")));
    assert_eq!((refused.status, refused.kind.as_str()), (409, "leased"));
    assert!(refused.detail.contains("vm1"), "{refused}");
    assert_eq!(status(&pod.raw(&request("DELETE", "/v1/instances/vm1", "", ""))), 204);
    assert_eq!(status(&pod.raw(&request("DELETE", "/v1/volumes/vol0", "", ""))), 204);
}

#[test]
fn what_would_be_made_and_why_is_told_and_devices_are_emptied() {
    let pod = Pod::demo();
    let client = pod.client();
    let would = client.try_instance(&vm("vm1", &[])).expect("it could be made");
    assert!(!would.ready && client.instances().expect("a list").is_empty(), "nothing is made");
    let made = client.create_instance(&vm("vm1", &[]), Duration::from_secs(30)).expect("created");
    assert_eq!(made.nics[0].nic, would.nics[0].nic);

    let explained = client.explain_instance("vm1").expect("it exists");
    let first = &explained.devices[0].candidates[0];
    assert_eq!((&first.name, first.part), (&made.nics[0].nic, CandidatePart::Active));
    assert_eq!(client.explain_instance("vm9").expect_err("nobody").status(), Some(404));

    let (host, nic) = made.nics[0].nic.split_once('/').expect("host and name");
    client.drain_device(host, nic, true).expect("it exists");
    let device = client.device(host, nic).expect("it exists");
    assert!(device.drained && device.leases == 0, "{device:?}");
    assert_ne!(client.instance("vm1").expect("there").nics[0].nic, made.nics[0].nic);
    client.drain_device(host, nic, false).expect("it exists");
    client.drain_host(host, true).expect("it exists");
    assert!(client.host(host).expect("it exists").drained);
    client.drain_host(host, false).expect("it exists");
    assert_eq!(client.drain_host("h9", true).expect_err("nobody").status(), Some(404));
}

#[test]
fn description_names_every_path_that_there_is() {
    let pod = Pod::new();
    let answer = pod.raw(&request("GET", "/openapi.json", "", ""));
    let body = answer.split_once("\r\n\r\n").expect("a body").1;
    let description: serde_json::Value = serde_json::from_str(body).expect("JSON");
    for path in [
        "/v1/hosts",
        "/v1/hosts/{name}",
        "/v1/devices",
        "/v1/devices/{host}/{name}",
        "/v1/volumes",
        "/v1/volumes/{name}",
        "/v1/instances",
        "/v1/instances/{name}",
        "/v1/events",
        "/v1/events/stream",
        "/v1/pool",
        "/healthz",
        "/readyz",
        "/metrics",
    ] {
        assert!(description["paths"][path].is_object(), "{path} is not described");
    }
    for schema in
        ["Host", "Device", "Volume", "Instance", "Event", "Pool", "Problem", "CreateInstance", "NicRequest"]
    {
        assert!(description["components"]["schemas"][schema].is_object(), "{schema} is not described");
    }
}

#[test]
fn metrics_show_hosts_devices_leases_and_regions() {
    let pod = Pod::demo();
    let client = pod.client();
    client.create_instance(&vm("vm1", &[]), Duration::from_secs(30)).expect("created");
    let text = until("telemetry of the lease", || {
        let text = client.metrics().ok()?;
        let known = ["wadi_lease_packets_total{instance=\"vm1\"", "wadi_channel_depth{"];
        known.iter().all(|start| text.contains(start)).then_some(text)
    });
    for line in [
        "wadi_endpoint_joined{host=\"h1\",role=\"net-frontend\"} 1",
        "wadi_device_up{device=\"h2/nic0\"} 1",
        "wadi_device_bytes_total{device=\"h2/nic0\",direction=\"receive\"} 1234",
        "wadi_device_drops_total{device=\"h2/nic0\",reason=\"no-receiver\"} 9",
        "wadi_channel_messages_total{channel=\"1\",endpoint=\"h1/net-frontend\",peer=\"h2/net-backend\",direction=\"sent\"} 77",
        "wadi_channel_stalls_total{channel=\"1\",endpoint=\"h1/net-frontend\",peer=\"h2/net-backend\"} 3",
        "wadi_channel_faults_total{channel=\"1\",endpoint=\"h1/net-frontend\",peer=\"h2/net-backend\",reason=\"stray\"} 2",
        "wadi_channel_depth{channel=\"1\",endpoint=\"h1/net-frontend\",peer=\"h2/net-backend\"} 5",
        "wadi_channel_depth_max{channel=\"1\",endpoint=\"h1/net-frontend\",peer=\"h2/net-backend\"} 2040",
        "wadi_lease_throttled_total{instance=\"vm1\",device=\"net0\",endpoint=\"h1/net-frontend\"} 0",
        "wadi_device_leases{device=\"h2/nic0\"} 1",
        "wadi_regions_bytes{purpose=\"transmit\",state=\"in-use\"} 4194304",
        "wadi_instances 1",
        "# TYPE wadi_failovers_total counter",
        "wadi_failovers_total 0",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    // Who knows OpenMetrics gets that.
    let accept = "accept: application/openmetrics-text;version=1.0.0\r\n";
    let open = pod.raw(&request("GET", "/metrics", accept, ""));
    for line in ["# TYPE wadi_failovers counter", "wadi_failovers_total 0", "# EOF"] {
        assert!(open.contains(line), "{line} is not in\n{open}");
    }
}

#[test]
fn socket_is_for_its_group_and_goes_away() {
    use std::os::unix::fs::PermissionsExt;
    let mut pod = Pod::new();
    let mode = std::fs::metadata(pod.socket()).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    pod.stop_controller();
    until("the socket to go", || (!pod.socket().exists()).then_some(()));
    let refused = pod.client().hosts().expect_err("nobody there");
    assert!(refused.to_string().contains("is pod-controller running"), "{refused}");
}

#[test]
fn a_connection_that_was_closed_since_is_no_failure() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("controller.sock");
    let listener = UnixListener::bind(&path).expect("a socket");
    let server = std::thread::spawn(move || {
        for _ in 0..2 {
            let (stream, _) = listener.accept().expect("a client");
            let mut lines = BufReader::new(&stream).lines();
            while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
            // It does not say that it will close the connection.
            (&stream).write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nready\n").expect("sent");
            // Only once the client does nothing that would let it notice.
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let client = Client::unix(&path).expect("a client");
    for _ in 0..2 {
        client.ready().expect("an answer");
        // Time for the server to be gone.
        std::thread::sleep(Duration::from_millis(200));
    }
    server.join().expect("the server");
}

/// The body of an answer that is a success, as JSON.
fn body(answer: &str) -> serde_json::Value {
    assert!((200..300).contains(&status(answer)), "{answer}");
    serde_json::from_str(answer.split_once("\r\n\r\n").expect("a body").1).expect("JSON")
}

fn names(list: &serde_json::Value, of: &str) -> Vec<String> {
    let name = |it: &serde_json::Value| it["name"].as_str().expect("a name").to_owned();
    list[of].as_array().expect("a list").iter().map(name).collect()
}

#[test]
fn description_is_the_one_that_is_checked_in() {
    let pod = Pod::new();
    let served = body(&pod.raw(&request("GET", "/openapi.json", "", "")));
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/openapi.json");
    if std::env::var_os("WADI_WRITE_OPENAPI").is_some() {
        std::fs::write(&path, format!("{served:#}\n")).expect("written");
    }
    let kept = std::fs::read_to_string(&path).expect("docs/openapi.json");
    let kept: serde_json::Value = serde_json::from_str(&kept).expect("JSON");
    assert!(
        kept == served,
        "the API is not docs/openapi.json any more: WADI_WRITE_OPENAPI=1 cargo test -p pod-controller --test service description"
    );
    for (path, operations) in served["paths"].as_object().expect("paths") {
        for (method, operation) in operations.as_object().expect("operations") {
            let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
            let has = |name: &str| parameters.iter().any(|it| it["name"] == name);
            assert_eq!(has("dry-run") && has("Idempotency-Key"), method != "get", "{method} {path}");
        }
    }
}

#[test]
fn lists_have_pages_fields_and_labels() {
    let pod = Pod::demo();
    let client = pod.client();
    for (name, tier) in [("vol0", "web"), ("vol1", "db"), ("vol2", "web"), ("vol3", "web")] {
        let body =
            format!("{{\"name\": \"{name}\", \"size\": \"4M\", \"labels\": {{\"tier\": \"{tier}\"}}}}");
        assert_eq!(status(&pod.raw(&request("POST", "/v1/volumes", JSON, &body))), 201);
    }
    client.create_instance(&vm("vm1", &["vol1"]), Duration::from_secs(30)).expect("created");
    let list = |path: &str| body(&pod.raw(&request("GET", path, "", "")));
    let first = list("/v1/volumes?limit=2&label=tier=web");
    assert_eq!(names(&first, "volumes"), ["vol0", "vol2"]);
    let token = first["continue"].as_str().expect("there is more");
    let rest = list(&format!("/v1/volumes?limit=2&label=tier%3Dweb&continue={token}"));
    assert_eq!(
        (names(&rest, "volumes"), &rest["continue"]),
        (vec!["vol3".to_owned()], &serde_json::Value::Null)
    );
    assert_eq!(names(&list("/v1/volumes?instance=vm1"), "volumes"), ["vol1"]);
    assert_eq!(names(&list("/v1/volumes?device=h2/ssd0&label=tier"), "volumes").len(), 4);
    assert_eq!(names(&list("/v1/instances?host=h2"), "instances"), [""; 0]);
    assert_eq!(names(&list("/v1/instances?host=h1&device=h2/nic0&ready=true"), "instances"), ["vm1"]);
    assert_eq!(names(&list("/v1/devices?type=ssd"), "devices"), ["h2/ssd0"]);
    assert_eq!(names(&list("/v1/devices?host=h3&health=up"), "devices"), ["h3/nic0"]);
    let hosts = list("/v1/hosts?limit=1&drained=false");
    assert_eq!(names(&hosts, "hosts"), ["h1"]);
    let token = hosts["continue"].as_str().expect("there is more");
    assert_eq!(names(&list(&format!("/v1/hosts?continue={token}")), "hosts"), ["h2", "h3"]);

    let labelled =
        pod.raw(&request("PUT", "/v1/instances/vm1/labels", JSON, "{\"labels\": {\"env\": \"test\"}}"));
    assert_eq!(body(&labelled)["labels"]["env"], "test");
    assert_eq!(client.instances_with(&[("label", "env=test")]).expect("a list").len(), 1);
    for (path, expected) in [
        ("/v1/volumes?limit=0", 400),
        ("/v1/volumes?limit=many", 400),
        ("/v1/volumes?continue=%20", 400),
        ("/v1/volumes?label==", 400),
        ("/v1/volumes?colour=red", 400),
        ("/v1/devices?type=gpu", 400),
    ] {
        let answer = pod.raw(&request("GET", path, "", ""));
        assert_eq!(status(&answer), expected, "{path}: {answer}");
        problem(&answer);
    }
    let bad = pod.raw(&request("PUT", "/v1/volumes/vol0/labels", JSON, "{\"labels\": {\"a b\": \"c\"}}"));
    assert_eq!(problem(&bad).status, 400);
}

#[test]
fn requests_are_carried_out_once_and_tried_without_being_carried_out() {
    let mut pod = Pod::demo();
    let keyed = |method: &str, path: &str, key: &str, body: &str| {
        request(method, path, &format!("{JSON}idempotency-key: {key}\r\n"), body)
    };
    let vol0 = "{\"name\": \"vol0\", \"size\": \"4M\"}";
    let tried = pod.raw(&request("POST", "/v1/volumes?dry-run=true", JSON, vol0));
    assert_eq!((status(&tried), &body(&tried)["name"]), (200, &"vol0".into()));
    let client = pod.client();
    assert!(client.volumes().expect("a list").is_empty(), "nothing was made");

    for round in 0..2 {
        let answer = pod.raw(&keyed("POST", "/v1/volumes", "first", vol0));
        assert_eq!((status(&answer), &body(&answer)["name"]), (201, &"vol0".into()), "{round}: {answer}");
    }
    let reused =
        problem(&pod.raw(&keyed("POST", "/v1/volumes", "first", "{\"name\": \"vol1\", \"size\": \"4M\"}")));
    assert_eq!((reused.status, reused.kind.as_str()), (422, "idempotency-key-reused"));
    assert_eq!(problem(&pod.raw(&keyed("DELETE", "/v1/volumes/vol0", "first", ""))).status, 422);
    assert_eq!(problem(&pod.raw(&keyed("DELETE", "/v1/volumes/vol0", "two words", ""))).status, 400);
    assert_eq!(problem(&pod.raw(&keyed("POST", "/v1/volumes", "big", &"x".repeat(300_000)))).status, 413);
    // A key that was only tried is free.
    assert_eq!(status(&pod.raw(&keyed("DELETE", "/v1/volumes/vol0?dry-run=true", "last", ""))), 204);
    assert_eq!(client.volumes().expect("a list").len(), 1);
    let only_try = pod.client().trying_only(true);
    only_try.delete_volume("vol0").expect("it could be deleted");
    assert_eq!(only_try.delete_volume("vol9").expect_err("nobody").status(), Some(404));
    assert_eq!(problem(&pod.raw(&request("DELETE", "/v1/volumes/vol0?dry-run=maybe", "", ""))).status, 400);
    assert_eq!(client.volumes().expect("a list").len(), 1);

    // Known across a restart.
    pod.stop_controller();
    pod.start_controller();
    assert_eq!(status(&pod.raw(&keyed("DELETE", "/v1/volumes/vol0", "last", ""))), 204);
    assert_eq!(status(&pod.raw(&keyed("DELETE", "/v1/volumes/vol0", "last", ""))), 204, "done already");
    assert_eq!(
        problem(&pod.raw(&keyed("POST", "/v1/volumes", "first", vol0))).status,
        404,
        "made once, and gone"
    );
    assert!(pod.client().volumes().expect("a list").is_empty());
}
