//! A controller whose state an etcd keeps: it takes over from a file, dies, goes without etcd for a while, and is alone.

use std::cell::Cell;
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::support::description::Description;
use crate::support::etcd_server::Etcd;
use crate::support::replicas::volume;
use crate::support::{Pod, until, vm};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use cxl_pool::Role;
use pod_api::InstanceTypeSpec;
use pod_api::client::Client;
use pod_protocol::objects::Object;
use pod_protocol::reports::Report;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustix::process::{Pid, Signal, kill_process};

/// A controller as a process, which can be killed.
pub(crate) struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// With the configuration that lies in the pod's directory.
    pub(crate) fn start(pod: &Pod, arguments: &[&str]) -> Self {
        pod.config();
        let log = pod.path("controller.log");
        let file = File::options().create(true).append(true).open(&log).expect("a file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_pod-controller"));
        command.arg("--config").arg(pod.path("controller.toml")).args(arguments);
        let child = command.stdin(Stdio::null()).stderr(file).spawn().expect("the controller starts");
        Self { child, log }
    }

    /// Begins a pod, with this in its configuration.
    fn bootstrap(pod: &Pod, sections: &str) -> Self {
        pod.config_with(sections);
        let log = pod.path("controller.log");
        let to = File::create(&log).expect("a file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_pod-controller"));
        command.arg("--config").arg(pod.path("controller.toml")).arg("--bootstrap");
        let child = command.stdin(Stdio::null()).stderr(to).spawn().expect("the controller starts");
        Self { child, log }
    }

    /// As if its host had died.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
    }

    /// Asks it to stop.
    fn terminate(&self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).expect("it is there");
    }

    /// Whether it has not ended.
    pub(crate) fn runs(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    /// Waits until it has ended by itself.
    fn ended(&mut self) -> ExitStatus {
        until("its end", || self.child.try_wait().expect("a child"))
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- controller\n{}", self.said());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn create(client: &Client, name: &str) -> Result<(), pod_api::client::ClientError> {
    client.create_volume(&volume(name)).map(drop)
}

/// A change in a pod without devices.
pub(crate) fn set_type(client: &Client, name: &str) -> Result<(), pod_api::client::ClientError> {
    client.set_instance_type(name, &InstanceTypeSpec::default())
}

fn types(client: &Client) -> Option<usize> {
    Some(client.instance_types().ok()?.len())
}

fn names(client: &Client) -> Option<Vec<String>> {
    Some(client.volumes().ok()?.into_iter().map(|volume| volume.name).collect())
}

#[test]
fn pod_goes_on_with_etcd_whatever_dies() {
    let mut etcd = Etcd::start();
    let store = etcd.address("wadi/pod1");
    let mut pod = Pod::demo_in_file();
    let client = pod.client();
    client.create_instance(&vm("vm1", &[]), Duration::ZERO).expect("created");
    create(&client, "in-file").expect("created");
    let frontend = |pod: &Pod| pod.endpoint(1, Role::NetFrontend).objects();
    let port =
        until("its port", || frontend(&pod).into_values().find(|object| matches!(object, Object::Port(_))));
    pod.stop_controller();

    // A typing error in the prefix is not taken for a new pod.
    let mut process = Process::start(&pod, &["--store", &store]);
    assert!(!process.ended().success());
    assert!(process.said().contains("start once with --bootstrap"), "{}", process.said());

    // It goes on with the file, which nobody uses any more.
    let process = Process::start(&pod, &["--store", &store, "--bootstrap"]);
    until("what the file had", || (names(&client)? == ["in-file"]).then_some(()));
    create(&client, "in-etcd").expect("created");
    process.kill();
    let mut without = Process::start(&pod, &[]);
    assert!(!without.ended().success());
    assert!(without.said().contains("handed over"), "{}", without.said());

    // Killed, it is there again with everything, once its lease has run out.
    let process = Process::start(&pod, &["--store", &store]);
    until("what etcd had", || (names(&client)?.len() == 2).then_some(()));
    assert!(frontend(&pod).values().any(|object| *object == port), "engines were not disturbed");

    // Another pod's controller does not get the same place.
    let other = Pod::new_in_file();
    let mut second = {
        let mut other = other;
        other.stop_controller();
        (Process::start(&other, &["--store", &store, "--bootstrap"]), other)
    };
    assert!(!second.0.ended().success());
    assert!(second.0.said().contains("stop that one first"), "{}", second.0.said());

    // While etcd is away, nothing is changed, and what there is stays; what happens meanwhile is dealt with afterwards.
    etcd.kill();
    let error = create(&client, "refused").expect_err("nobody keeps it");
    assert_eq!(error.status(), Some(503), "{error}");
    until("a refusal that says why", || {
        let error = create(&client, "refused").expect_err("nobody keeps it");
        assert_eq!(error.status(), Some(503), "{error}");
        error.to_string().contains("see that a majority of its members runs").then_some(())
    });
    Description::checked_in().assert_has("POST", "/v1/volumes", 503);
    assert_eq!(names(&client).map(|names| names.len()), Some(2), "it answers questions");
    let available = |client: &Client| client.metrics().map(|text| text.contains("\nwadi_store_available 1"));
    assert!(!available(&client).expect("metrics"), "whoever watches sees it");
    let ages =
        |client: &Client| Some(client.metrics().ok()?.contains("\nwadi_endpoint_telemetry_age_seconds{"));
    until("nobody to hear what daemons say", || ages(&client).filter(|it| !*it));
    assert!(
        client
            .ready()
            .expect_err("nothing can be changed")
            .to_string()
            .contains("see that a majority of its members runs")
    );
    pod.endpoint(2, Role::NetBackend).reporter.report(Report::Link {
        device: "nic0".into(),
        up: false,
        reason: "carrier".into(),
    });
    assert!(frontend(&pod).values().any(|object| *object == port), "engines were not disturbed");
    assert!(etcd.go_on());
    until("the failover", || frontend(&pod).remove(&port.id()).filter(|now| *now != port));
    until("changes", || create(&client, "again").ok());
    client.ready().expect("it is ready");
    assert!(available(&client).expect("metrics"));
    until("what daemons say", || ages(&client).filter(|it| *it));
    let mut there = names(&client).expect("it answers");
    there.sort();
    assert_eq!(there, ["again", "in-etcd", "in-file"]);

    // Nobody asks for anything, and it is seen all the same.
    etcd.kill();
    until("a word on it", || client.ready().is_err().then_some(()));
    assert!(!available(&client).expect("metrics"));
    assert!(etcd.go_on());
    until("readiness", || client.ready().ok());

    // Both at once.
    etcd.kill();
    process.kill();
    let mut early = Process::start(&pod, &["--store", &store]);
    assert!(!early.ended().success());
    assert!(early.said().contains("cannot be used"), "{}", early.said());
    assert!(etcd.go_on());
    let _process = Process::start(&pod, &["--store", &store]);
    until("all of it", || (names(&client)?.len() == 3).then_some(()));
}

#[test]
fn etcd_over_tls_asks_who_somebody_is() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = |name: &str| directory.path().join(name).display().to_string();
    issue(directory.path());
    let arguments = [
        "--cert-file".to_owned(),
        file("member.pem"),
        "--key-file".to_owned(),
        file("member.key"),
        "--client-cert-auth".to_owned(),
        "--trusted-ca-file".to_owned(),
        file("ca.pem"),
    ];
    let mut etcd = Etcd::start_with("https", &arguments);
    let mut pod = Pod::new_in_file();
    pod.stop_controller();
    let store = format!("store = 'etcds://127.0.0.1:{}/wadi'", etcd.port());
    let section = |pair: &str| format!("{store}\n[etcd]\nca-file = '{}'\n{pair}", file("ca.pem"));
    let mut nobody = Process::bootstrap(&pod, &section(""));
    assert!(!nobody.ended().success());
    assert!(nobody.said().contains("cannot be used"), "{}", nobody.said());
    let pair = format!("cert-file = '{}'\nkey-file = '{}'\n", file("controller.pem"), file("controller.key"));
    let process = Process::bootstrap(&pod, &section(&pair));
    until("a controller", || pod.client().ready().ok());
    assert_eq!(names(&pod.client()), Some(Vec::new()));

    // All certificates are of another authority now, and the controller runs on.
    etcd.kill();
    issue(directory.path());
    assert!(etcd.go_on());
    until("a change", || set_type(&pod.client(), "after").ok());
    process.kill();
}

/// Lays an authority's certificate there, and those of a member and of a controller with their keys.
fn issue(directory: &Path) {
    let mut params = CertificateParams::new(Vec::new()).expect("parameters");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("a key");
    let ca = params.self_signed(&key).expect("a certificate").pem();
    std::fs::write(directory.join("ca.pem"), ca).expect("written");
    let issuer = Issuer::new(params, key);
    for name in ["member", "controller"] {
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("parameters");
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &issuer).expect("a certificate");
        std::fs::write(directory.join(format!("{name}.pem")), certificate.pem()).expect("written");
        std::fs::write(directory.join(format!("{name}.key")), key.serialize_pem()).expect("written");
    }
}

/// Asks etcd for something that no controller asks for, as whoever this token is of. Returns the answer.
fn post(etcd: &Etcd, path: &str, body: &str, token: Option<&str>) -> String {
    let answer = send(etcd, path, body, token);
    assert!(answer.starts_with("HTTP/1.0 200"), "{path}: {answer}");
    answer.split_once("\r\n\r\n").expect("an answer").1.to_owned()
}

/// The same, whatever the answer is.
fn send(etcd: &Etcd, path: &str, body: &str, token: Option<&str>) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", etcd.port())).expect("etcd listens");
    let who = token.map_or_else(String::new, |token| format!("Authorization: {token}\r\n"));
    let length = body.len();
    let request = format!("POST /v3/{path} HTTP/1.0\r\n{who}Content-Length: {length}\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).expect("etcd hears");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("etcd answers");
    answer
}

#[test]
fn etcd_with_users_asks_for_a_password() {
    let mut etcd = Etcd::start();
    let mut pod = Pod::new_in_file();
    pod.stop_controller();
    post(&etcd, "auth/user/add", r#"{"name":"root","password":"r"}"#, None);
    post(&etcd, "auth/role/add", r#"{"name":"root"}"#, None);
    post(&etcd, "auth/user/grant", r#"{"user":"root","role":"root"}"#, None);
    post(&etcd, "auth/user/add", r#"{"name":"wadi","password":"first"}"#, None);
    post(&etcd, "auth/role/add", r#"{"name":"pods"}"#, None);
    // Of /wadi/ and what begins with it.
    let allowed =
        r#"{"name":"pods","perm":{"permType":"READWRITE","key":"L3dhZGkv","range_end":"L3dhZGkw"}}"#;
    post(&etcd, "auth/role/grant", allowed, None);
    post(&etcd, "auth/user/grant", r#"{"user":"wadi","role":"pods"}"#, None);
    post(&etcd, "auth/enable", "{}", None);
    let password = pod.path("password");
    let section = |prefix: &str, user: &str| format!("store = '{}'\n[etcd]\n{user}", etcd.address(prefix));
    let user = format!("user = 'wadi'\npassword-file = '{}'\n", password.display());
    std::fs::write(&password, "wrong\n").expect("written");
    for (prefix, user, word) in [
        ("wadi/pod1", "", "etcd.password-file"),
        ("wadi/pod1", user.as_str(), "with the password in etcd.password-file"),
        ("other/pod1", user.as_str(), "etcdctl role grant-permission"),
    ] {
        let mut refused = Process::bootstrap(&pod, &section(prefix, user));
        assert!(!refused.ended().success());
        assert!(refused.said().contains(word), "{}", refused.said());
        if word.starts_with("with") {
            std::fs::write(&password, "first\n").expect("written");
        }
    }
    let process = Process::bootstrap(&pod, &section("wadi/pod1", &user));
    let client = pod.client();
    until("a controller", || client.ready().ok());
    set_type(&client, "known").expect("a change");

    // It forgets whom it knows when it restarts.
    etcd.kill();
    assert!(etcd.go_on());
    until("a change", || set_type(&client, "known-again").ok());

    // And when somebody has another password.
    std::fs::write(&password, "second\n").expect("written");
    let root = post(&etcd, "auth/authenticate", r#"{"name":"root","password":"r"}"#, None);
    let root: serde_json::Value = serde_json::from_str(&root).expect("JSON");
    post(&etcd, "auth/user/changepw", r#"{"name":"wadi","password":"second"}"#, root["token"].as_str());
    until("a change", || set_type(&client, "with-another-password").ok());
    assert_eq!(types(&client), Some(3));
    assert!(!process.said().contains("second") && !process.said().contains("first"), "{}", process.said());
    process.kill();
}

/// Of what etcd answered, a number that stands there as text.
fn number(answer: &str, name: &str) -> u64 {
    let rest =
        answer.split(&format!("\"{name}\":\"")).nth(1).unwrap_or_else(|| panic!("no {name}: {answer}"));
    rest.split('"').next().and_then(|it| it.parse().ok()).unwrap_or_else(|| panic!("no {name}: {answer}"))
}

/// Has the claim of whoever is in office last for so long, and be this in place of its own. Returns the lease.
fn put_claim(etcd: &Etcd, seconds: u32, other: Option<&str>) -> u64 {
    let all = post(etcd, "kv/range", r#"{"key":"AA==","range_end":"AA=="}"#, None);
    let all: serde_json::Value = serde_json::from_str(&all).expect("JSON");
    let keys = all["kvs"].as_array().expect("keys");
    let claim = keys.iter().find(|key| key["lease"].is_string()).expect("its claim");
    let granted = post(etcd, "lease/grant", &format!("{{\"TTL\":\"{seconds}\"}}"), None);
    let lease = number(&granted, "ID");
    let value = other.map_or_else(|| claim["value"].clone(), |other| STANDARD.encode(other).into());
    let put = serde_json::json!({"key": claim["key"], "value": value, "lease": lease.to_string()});
    post(etcd, "kv/put", &put.to_string(), None);
    lease
}

#[test]
fn whoever_waits_for_another_ones_lease_refuses_changes_and_can_be_stopped() {
    let mut etcd = Etcd::start();
    let mut pod = Pod::new_in_file();
    pod.stop_controller();
    let client = pod.client();
    let store = etcd.address("wadi/pod1");
    let mut process = Process::start(&pod, &["--store", &store, "--bootstrap"]);
    until("a change", || set_type(&client, "before").ok());

    // As if a stand-by had taken over while etcd could not be reached from here, and had died.
    let lease = put_claim(&etcd, 3600, Some("a stand-by"));
    let begin_to_wait = |etcd: &mut Etcd| {
        etcd.kill();
        until("that etcd is away", || set_type(&client, "before").err());
        assert!(etcd.go_on());
        until("that somebody is waited for", || {
            let refusal = set_type(&client, "before").err()?.to_string();
            refusal.contains("waiting until a stand-by counts as gone").then_some(())
        });
    };
    begin_to_wait(&mut etcd);
    // What was seen of the state is shown meanwhile.
    assert_eq!(types(&client), Some(1));
    post(&etcd, "lease/revoke", &format!("{{\"ID\":\"{lease}\"}}"), None);
    until("a change", || set_type(&client, "after").ok());
    assert_eq!(types(&client), Some(2));

    put_claim(&etcd, 3600, Some("a stand-by"));
    begin_to_wait(&mut etcd);
    process.terminate();
    assert!(process.ended().success(), "{}", process.said());
}

#[test]
fn who_died_is_waited_for_also_where_etcd_ends_leases_late() {
    let etcd = Etcd::start();
    let mut pod = Pod::new_in_file();
    pod.stop_controller();
    let client = pod.client();
    let store = etcd.address("wadi/pod1");
    let process = Process::start(&pod, &["--store", &store, "--bootstrap"]);
    until("a change", || set_type(&client, "before").ok());
    process.kill();

    // As if a busy disk kept etcd from ending it: longer than it was granted for.
    put_claim(&etcd, 11, None);

    let _next = Process::start(&pod, &["--store", &store]);
    until("what was there before", || (types(&client)? == 1).then_some(()));
}

#[test]
fn an_etcd_without_room_loses_nothing_and_the_controller_goes_on_by_itself() {
    // Less than a handful of changes and what others put there need.
    let etcd = Etcd::start_with("http", &["--quota-backend-bytes=4000000".to_owned()]);
    let mut pod = Pod::demo_in_file();
    let client = pod.client();
    client.create_instance(&vm("vm1", &[]), Duration::ZERO).expect("created");
    let frontend = |pod: &Pod| pod.endpoint(1, Role::NetFrontend).objects();
    let port =
        until("its port", || frontend(&pod).into_values().find(|object| matches!(object, Object::Port(_))));
    pod.stop_controller();
    let process = Process::start(&pod, &["--store", &etcd.address("wadi/pod1"), "--bootstrap"]);
    until("the instance", || client.instance("vm1").ok()?.ready.then_some(()));
    let answered = Cell::new(0);
    let change = || {
        let changed = set_type(&client, &format!("type{}", answered.get()));
        answered.set(answered.get() + usize::from(changed.is_ok()));
        changed
    };
    change().expect("there is room");

    // Somebody else fills it.
    let value = "A".repeat(1 << 20);
    let put = format!("{{\"key\":\"eHh4\",\"value\":\"{value}\"}}");
    until("it to be full", || {
        send(&etcd, "kv/put", &put, None).contains("database space exceeded").then_some(())
    });
    let refused = until("a refusal", || change().err());
    assert_eq!(refused.status(), Some(503), "{refused}");
    let said = refused.to_string();
    for word in ["database space exceeded", "etcdctl compact", "etcdctl defrag", "etcdctl alarm disarm"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    // What was answered is there, what was not is not, guests go on, and whoever watches is told the same.
    let ready = until("a word on it", || client.ready().err());
    assert!(ready.to_string().contains("etcdctl alarm disarm"), "{ready}");
    assert_eq!(types(&client), Some(answered.get()));
    assert!(frontend(&pod).values().any(|object| *object == port), "engines were not disturbed");

    // It is done what it says: the controller goes on, with every change that it had answered.
    let deleted = post(&etcd, "kv/deleterange", r#"{"key":"eHh4"}"#, None);
    let revision = number(&deleted, "revision");
    post(&etcd, "kv/compaction", &format!("{{\"revision\":\"{revision}\",\"physical\":true}}"), None);
    post(&etcd, "maintenance/defragment", "{}", None);
    let alarms = post(&etcd, "maintenance/alarm", r#"{"action":"GET","alarm":"NOSPACE"}"#, None);
    let member = number(&alarms, "memberID");
    let disarm = format!("{{\"action\":\"DEACTIVATE\",\"memberID\":\"{member}\",\"alarm\":\"NOSPACE\"}}");
    post(&etcd, "maintenance/alarm", &disarm, None);
    until("a change", || change().ok());
    assert_eq!(types(&client), Some(answered.get()));
    until("a word on it", || client.ready().ok());
    assert!(frontend(&pod).values().any(|object| *object == port), "engines were not disturbed");

    // Whoever comes after it finds the same.
    process.kill();
    let _process = Process::start(&pod, &["--store", &etcd.address("wadi/pod1")]);
    until("all that was answered", || (types(&client)? == answered.get()).then_some(()));
}
