//! Everything that the API can be asked, `podctl` can be told to ask: each operation and each parameter of the description.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::support::{Pod, until, vm};

/// One after the other, on a pod with an instance vm1 that has a NIC and vol1. Those that change something are only tried, but for
/// those that begin with `!`.
const LINES: &str = "
    hosts list --drained --label rack=a
    hosts get h1
    hosts label h1 rack=a
    hosts drain h2
    hosts undrain h2
    hosts reset h3
    hosts delete h3
    devices list --host h2 --type ssd --health up --label tier=fast
    devices get h2/ssd0
    devices label h2/ssd0 tier=fast
    devices drain h2/ssd0
    devices undrain h2/ssd0
    devices fail-back h2/nic0
    devices release h2/nic0
    devices adopt h2/ssd0
    devices delete h2/ssd0 --lose-data
    volumes list --device h2/ssd0 --instance vm1 --label tier=web
    volumes create vol2 --size 4M
    volumes get vol1
    volumes grow vol1 8M
    volumes label vol1 tier=web
    volumes add-replica vol1
    volumes remove-replica vol1 --device h2/ssd0
    volumes delete vol1
    instances list --host h1 --device h2/nic0 --ready --label tier=web
    instances get vm1
    !instances create vm2 --host h1 --volume vol3 --wait 5
    instances create vm3 --host h1
    instances label vm1 tier=web
    instances priority vm1 300
    instances nic-policy vm1 --send 125M
    instances migrate-nic vm1
    instances migrate vm1 --to h3
    instances abort-migration vm1
    instances activate-migration vm1 --force
    !instances attach vm1 --volume vol4 --wait 5
    instances attach vm1 --nic
    instances detach vm1 vol1 --force
    instances answer vm1 vol1 --plugged
    instances delete vm1 --force
    types list
    types get small
    types set small
    types delete small
    mchannel list --tenant red --host h1
    mchannel get vm1
    mchannel set vm1 --weight 3 --path pool
    mchannel clear vm1
    mchannel fabric
    mchannel fabric --element pool=20G
    explain instance vm1
    events --kind failover --subject vm1 --after 1
    pool
    balance
    controllers list
    controllers remove 2
";

/// Which programs ask, and not people.
const OF_PROGRAMS: [&str; 3] = ["GET /healthz", "GET /readyz", "GET /metrics"];
/// podctl shows lists as a whole, and the newest events by what it has been given.
const OF_PAGES: [&str; 2] = ["limit", "continue"];

/// Between podctl and a controller: keeps what is asked.
struct Relay {
    socket: PathBuf,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Relay {
    fn start(pod: &Pod) -> Self {
        let socket = pod.path("relay.sock");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let (controller, asked) = (pod.socket(), Arc::<Mutex<Vec<String>>>::default());
        let kept = Arc::clone(&asked);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let controller = UnixStream::connect(&controller).expect("the controller accepts");
                let [to, back] = [(&client, &controller), (&controller, &client)]
                    .map(|(from, to)| (from.try_clone().expect("another"), to.try_clone().expect("another")));
                let kept = Arc::clone(&kept);
                thread::spawn(move || {
                    carry(to, |text| kept.lock().expect("unpoisoned").extend(requests(text)));
                });
                thread::spawn(move || carry(back, |_| ()));
            }
        });
        Self { socket, asked }
    }

    fn podctl(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_podctl"));
        command.arg("--server").arg(format!("unix:{}", self.socket.display())).args(line.split_whitespace());
        command
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().expect("unpoisoned").clone()
    }
}

/// Carries bytes on until one side has ended. A head comes in one piece.
fn carry((mut from, mut to): (UnixStream, UnixStream), look: impl Fn(&str)) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        look(&String::from_utf8_lossy(&bytes[..count]));
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
}

/// Methods and addresses of the requests that begin in a text.
fn requests(text: &str) -> Vec<String> {
    let lines = text.lines().filter_map(|line| line.strip_suffix(" HTTP/1.1"));
    lines.map(str::to_owned).collect()
}

/// Whether an address is of the kind that is described as `/v1/hosts/{name}`.
fn is_of(path: &str, described: &str) -> bool {
    let (words, of_kind): (Vec<&str>, Vec<&str>) =
        (path.split('/').collect(), described.split('/').collect());
    words.len() == of_kind.len()
        && words.iter().zip(&of_kind).all(|(word, kind)| kind.starts_with('{') || word == kind)
}

/// What the description has: operations, and the parameters of each.
fn described() -> Vec<(String, String, Vec<String>)> {
    let text = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/openapi.json"))
        .expect("the description");
    let description: Value = serde_json::from_slice(&text).expect("JSON");
    let paths = description["paths"].as_object().expect("paths");
    let all = paths.iter().flat_map(|(path, operations)| {
        operations.as_object().expect("operations").iter().map(move |(method, operation)| {
            let parameters = operation["parameters"].as_array().into_iter().flatten();
            let of_query = parameters.filter(|it| it["in"] == "query");
            let names = of_query.map(|it| it["name"].as_str().expect("a name").to_owned()).collect();
            (method.to_uppercase(), path.clone(), names)
        })
    });
    all.collect()
}

#[test]
fn podctl_asks_for_everything_that_the_api_offers() {
    let pod = Pod::demo();
    let relay = Relay::start(&pod);
    for volume in ["vol1", "vol3", "vol4"] {
        let made =
            relay.podctl(&format!("volumes create {volume} --size 4M")).output().expect("podctl starts");
        assert!(made.status.success(), "{volume}: {}", String::from_utf8_lossy(&made.stderr));
    }
    pod.client().create_instance(&vm("vm1", &["vol1"]), Duration::from_secs(30)).expect("created");
    for line in LINES.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let line = line.strip_prefix('!').map_or_else(|| format!("{line} --dry-run"), str::to_owned);
        // What becomes of it does not matter here, but that podctl knows it.
        let output = relay.podctl(&line).output().expect("podctl starts");
        let failed = String::from_utf8_lossy(&output.stderr);
        assert_ne!(output.status.code(), Some(2), "podctl {line}: {failed}");
    }
    let mut following = relay
        .podctl("events --follow --after 1 --kind failover --subject vm1")
        .stdout(Stdio::null())
        .spawn()
        .expect("podctl starts");
    until("events to be followed", || relay.asked().iter().any(|it| it.contains("/stream")).then_some(()));
    following.kill().expect("it runs");
    following.wait().expect("it has ended");

    let asked = relay.asked();
    let mut missing = BTreeSet::new();
    for (method, path, parameters) in described() {
        let operation = format!("{method} {path}");
        if OF_PROGRAMS.contains(&operation.as_str()) {
            continue;
        }
        let queries = asked.iter().filter_map(|it| {
            let address = it.strip_prefix(&method)?.strip_prefix(' ')?;
            let (asked, query) = address.split_once('?').unwrap_or((address, ""));
            is_of(asked, &path).then_some(query)
        });
        let queries: Vec<&str> = queries.collect();
        if queries.is_empty() {
            missing.insert(operation);
            continue;
        }
        for name in parameters.iter().filter(|name| !OF_PAGES.contains(&name.as_str())) {
            let is_asked = |query: &&str| query.split('&').any(|it| it.split('=').next() == Some(name));
            if !queries.iter().any(is_asked) {
                missing.insert(format!("{operation}?{name}"));
            }
        }
    }
    assert_eq!(missing, BTreeSet::new());
}
