//! Everything that the API can be asked, `podctl` can be told to ask: each operation, each parameter of the description, and whatever a body may say.

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
    volumes create vol2 --size 4M --near h2 --minimum-iops 9 --minimum-bandwidth 1M --apart db --together web --label tier=web
    volumes create vol2 --size 4M --device h2/ssd0 --replicas 1
    volumes create vol2 --size 4M --stripes 2 --stripe-size 64K
    volumes get vol1
    volumes grow vol1 8M
    volumes label vol1 tier=web
    volumes qos vol1 --iops 9 --bandwidth 1M --burst-ms 50 --minimum-iops 9 --minimum-bandwidth 1M
    volumes group vol1 --apart db --together web
    volumes read-only vol1
    volumes move vol1 --from h2/ssd0 --to h2/ssd0
    volumes add-replica vol1
    volumes remove-replica vol1 --device h2/ssd0
    volumes delete vol1
    instances list --host h1 --device h2/nic0 --ready --label tier=web
    instances get vm1
    !instances create vm2 --host h1 --volume vol3 --wait 5
    instances create vm3 --host h1 --type small --vmm-listens --ram 2M --priority 300 --label tier=web --nic device=net9,mac=02:00:00:00:00:02,mtu=1500,queue-pairs=2,reserve=1G,apart=db,together=web,rails=1,vlan=7,address=10.0.0.2,send=1M,send-packets=9,send-minimum=1M,receive=1M,receive-packets=9,receive-minimum=1M,burst-ms=50
    instances label vm1 tier=web
    instances priority vm1 300
    instances nic-policy vm1 --send 1M --send-packets 9 --send-minimum 1M --receive 1M --receive-packets 9 --receive-minimum 1M --vlan 7
    instances migrate-nic vm1 --to h3/nic0
    instances migrate vm1 --to h3
    instances abort-migration vm1
    instances activate-migration vm1 --force
    !instances attach vm1 --volume vol4 --wait 5
    instances attach vm1 --nic device=net9,mac=02:00:00:00:00:02,mtu=1500,queue-pairs=2,reserve=1G,apart=db,together=web,rails=1,vlan=7,address=10.0.0.2,send=1M,send-packets=9,send-minimum=1M,receive=1M,receive-packets=9,receive-minimum=1M,burst-ms=50
    instances detach vm1 vol1 --force
    instances answer vm1 vol1 --plugged --refused no-port
    instances delete vm1 --force
    types list --label tier=web
    types get small
    types set small --reserve 1G --queue-pairs 2 --volume-iops 9 --priority 300 --label tier=web
    types delete small
    mchannel list --tenant red --host h1
    mchannel get vm1
    mchannel set vm1 --weight 3 --path pool
    mchannel clear vm1
    mchannel fabric
    mchannel fabric --element pool=20G --signal pool=probe --tenant red=1 --window-us 1000 --sample-us 10000
    explain instance vm1
    events --kind failover --subject vm1 --after 1
    pool
    pool regions --state in-use --purpose rings
    balance
    controllers list
    controllers remove 2
";

/// Which programs ask, and not people.
const OF_PROGRAMS: [&str; 3] = ["GET /healthz", "GET /readyz", "GET /metrics"];
/// Which version is to be changed podctl says in a header, and how loaded the fabric is nobody sets.
const NOT_SAID: [&str; 2] = ["resourceVersion", "loads"];
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
                // podctl makes one request with each connection.
                let mut all = kept.lock().expect("unpoisoned");
                let place = all.len();
                all.push(String::new());
                drop(all);
                thread::spawn(move || {
                    carry(to, |text| kept.lock().expect("unpoisoned")[place].push_str(text));
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

    /// Methods and addresses of requests, and their bodies.
    fn asked(&self) -> Vec<(String, Value)> {
        let all = self.asked.lock().expect("unpoisoned");
        all.iter().filter_map(|text| request(text)).collect()
    }
}

/// Carries bytes on until one side has ended.
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

/// Method and address of a request, and its body, if it has one.
fn request(text: &str) -> Option<(String, Value)> {
    let (line, _) = text.split_once(" HTTP/1.1\r\n")?;
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    Some((line.to_owned(), serde_json::from_str(body).unwrap_or_default()))
}

/// Whether an address is of the kind that is described as `/v1/hosts/{name}`.
fn is_of(path: &str, described: &str) -> bool {
    let (words, of_kind): (Vec<&str>, Vec<&str>) =
        (path.split('/').collect(), described.split('/').collect());
    words.len() == of_kind.len()
        && words.iter().zip(&of_kind).all(|(word, kind)| kind.starts_with('{') || word == kind)
}

/// An operation of the description.
struct Operation {
    method: String,
    path: String,
    parameters: Vec<String>,
    /// What its body may say.
    fields: BTreeSet<String>,
}

fn described() -> Vec<Operation> {
    let text = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/openapi.json"))
        .expect("the description");
    let description: Value = serde_json::from_slice(&text).expect("JSON");
    let paths = description["paths"].as_object().expect("paths");
    let mut all = Vec::new();
    for (path, operations) in paths {
        for (method, operation) in operations.as_object().expect("operations") {
            let parameters = operation["parameters"].as_array().into_iter().flatten();
            let of_query = parameters.filter(|it| it["in"] == "query");
            let parameters = of_query.map(|it| it["name"].as_str().expect("a name").to_owned()).collect();
            let mut fields = BTreeSet::new();
            let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
            collect_described(schema, &description["components"]["schemas"], "", &mut fields);
            all.push(Operation { method: method.to_uppercase(), path: path.clone(), parameters, fields });
        }
    }
    all
}

/// The fields of a schema, those within them as `nics.policy.vlan`; of a map, whose names are anybody's, only itself.
fn collect_described(schema: &Value, schemas: &Value, of: &str, fields: &mut BTreeSet<String>) {
    if let Some(name) = schema["$ref"].as_str().and_then(|it| it.rsplit('/').next()) {
        return collect_described(&schemas[name], schemas, of, fields);
    }
    for part in ["oneOf", "anyOf", "allOf"].iter().filter_map(|it| schema[it].as_array()).flatten() {
        collect_described(part, schemas, of, fields);
    }
    if !schema["items"].is_null() {
        collect_described(&schema["items"], schemas, of, fields);
    }
    for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
        let field = format!("{of}{name}");
        collect_described(schema, schemas, &format!("{field}."), fields);
        fields.insert(field);
    }
}

/// The fields that a body says, likewise.
fn collect_said(body: &Value, of: &str, fields: &mut BTreeSet<String>) {
    for it in body.as_array().into_iter().flatten() {
        collect_said(it, of, fields);
    }
    for (name, value) in body.as_object().into_iter().flatten() {
        let field = format!("{of}{name}");
        collect_said(value, &format!("{field}."), fields);
        fields.insert(field);
    }
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
    until("events to be followed", || {
        relay.asked().iter().any(|(it, _)| it.contains("/stream")).then_some(())
    });
    following.kill().expect("it runs");
    following.wait().expect("it has ended");

    let asked = relay.asked();
    let mut missing = BTreeSet::new();
    for Operation { method, path, parameters, fields } in described() {
        let operation = format!("{method} {path}");
        if OF_PROGRAMS.contains(&operation.as_str()) {
            continue;
        }
        let of_it = asked.iter().filter_map(|(it, body)| {
            let address = it.strip_prefix(&method)?.strip_prefix(' ')?;
            let (asked, query) = address.split_once('?').unwrap_or((address, ""));
            is_of(asked, &path).then_some((query, body))
        });
        let (queries, bodies): (Vec<&str>, Vec<&Value>) = of_it.unzip();
        if queries.is_empty() {
            missing.insert(operation);
            continue;
        }
        let mut said = BTreeSet::new();
        for body in bodies {
            collect_said(body, "", &mut said);
        }
        let unsaid = fields.difference(&said).filter(|it| !NOT_SAID.contains(&it.as_str()));
        missing.extend(unsaid.map(|field| format!("{operation} {field}")));
        for name in parameters.iter().filter(|name| !OF_PAGES.contains(&name.as_str())) {
            let is_asked = |query: &&str| query.split('&').any(|it| it.split('=').next() == Some(name));
            if !queries.iter().any(is_asked) {
                missing.insert(format!("{operation}?{name}"));
            }
        }
    }
    assert_eq!(missing, BTreeSet::new());
}
