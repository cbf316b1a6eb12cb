//! What somebody else's tester finds, who knows of the API only what its description says: schemathesis. `make test` and `make verify-api`
//! install it; where nobody says where it is, there is nothing to do, unless it is required. Each run asks something else, and says how to
//! ask it again.

use std::fs::{self, Permissions};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::access::{restart, token};
use crate::support::network::addresses;
use crate::support::replicas::Replicas;
use crate::support::{Pod, until};

/// Where the program is.
const PROGRAM: &str = "WADI_SCHEMATHESIS";
/// That it must be there.
const REQUIRED: &str = "WADI_REQUIRE_SCHEMATHESIS";
/// How many requests of each kind, and from which seed.
const EXAMPLES: &str = "WADI_SCHEMATHESIS_EXAMPLES";
const SEED: &str = "WADI_SCHEMATHESIS_SEED";
/// What it is told of the API; it is what a controller shows who may ask it.
const DESCRIPTION: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
/// The tester asks faster than anybody would.
const NO_LIMIT: &str = "requests-per-second = 0";

/// Has the tester ask so many times for each operation but for those with the names left out, and fails with what it found. Returns false
/// where it is not there and need not be.
fn ask(
    address: SocketAddr,
    directory: &Path,
    token: Option<&str>,
    left_out: &[&str],
    (examples, phases): (u32, &str),
) -> bool {
    let Some(program) = std::env::var_os(PROGRAM) else {
        let is_required = std::env::var_os(REQUIRED).is_some_and(|it| !it.is_empty());
        assert!(
            !is_required,
            "{REQUIRED} is set, and {PROGRAM} does not say where schemathesis is: make test does"
        );
        eprintln!("skipped: {PROGRAM} does not say where schemathesis is; make verify-api does");
        return false;
    };
    let said = |name: &str, otherwise: String| std::env::var(name).unwrap_or(otherwise);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_secs());
    let (seed, examples) = (said(SEED, now.to_string()), said(EXAMPLES, examples.to_string()));
    let again = format!("{SEED}={seed} {EXAMPLES}={examples} make verify-api");
    println!("to ask the same again: {again}");
    let mut command = Command::new("timeout");
    command
        .arg("600")
        .arg(program)
        .args(["run", DESCRIPTION, "--url", &format!("http://{address}"), "--no-color", "--seed", &seed])
        .args(["--max-examples", &examples, "--phases", phases])
        .args(["--checks", "not_a_server_error,status_code_conformance,content_type_conformance"])
        .args(["--checks", "response_schema_conformance,response_headers_conformance"])
        // Many texts are no part of a path: that it leaves them out is no fault of ours.
        .args(["--suppress-health-check", "filter_too_much"])
        // It never ends.
        .args(["--exclude-operation-id", "stream_events", "--request-timeout", "45"])
        .args(left_out.iter().flat_map(|name| ["--exclude-operation-id", name]))
        .current_dir(directory);
    if let Some(token) = token {
        command.args(["--header", &format!("Authorization: Bearer {token}")]);
    }
    let output = command.output().expect("it starts");
    let found = String::from_utf8_lossy(&output.stdout);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{found}\n{complaints}\nto ask the same again: {again}");
    println!("{}", found.lines().filter(|line| line.contains("generated")).collect::<String>());
    true
}

#[test]
fn nothing_that_the_description_allows_or_forbids_breaks_a_promise() {
    let mut pod = Pod::demo();
    let address = restart(&mut pod, NO_LIMIT);
    ask(address, pod.directory.path(), None, &[], (20, "examples,coverage,fuzzing,stateful"));
    // Whatever it asked for, the controller goes on.
    pod.client().hosts().expect("it answers");
}

#[test]
fn whoever_asks_gets_what_is_described() {
    let mut pod = Pod::demo();
    let file = pod.path("tokens");
    let roles = ["viewer", "host", "operator"].map(|role| token(role, role));
    fs::write(&file, roles.each_ref().map(|(_, lines)| lines.as_str()).concat()).expect("written");
    fs::set_permissions(&file, Permissions::from_mode(0o640)).expect("a mode");
    let address = restart(&mut pod, &format!("tokens = '{}'\n{NO_LIMIT}", file.display()));
    for who in [None, Some(&roles[0]), Some(&roles[1]), Some(&roles[2])] {
        let token = who.map(|(token, _)| token.as_str());
        if !ask(address, pod.directory.path(), token, &[], (2, "examples,fuzzing")) {
            return;
        }
    }
    pod.client().hosts().expect("it answers");
}

#[test]
fn replicas_that_do_not_lead_answer_as_described() {
    let mut pod = Pod::demo_with_slots(3);
    pod.stop_controller();
    let listening = addresses(3);
    let mut replicas = Replicas::new(pod.directory.path());
    // While another one is elected they answer 503, as they should, which the tester counts as a fault. So the leader is not to be lost to a
    // busy machine, nor removed by the tester; a test of replicas removes it.
    replicas.election_ms = 10_000;
    for (replica, address) in (0..).zip(&listening) {
        replicas.listen.insert(replica, format!("listen-tcp = '{address}'\n{NO_LIMIT}"));
    }
    replicas.start_first(3);
    let leader = replicas.leader(&[0, 1, 2]);
    let follower = (leader + 1) % 3;
    let follower = listening[usize::from(follower)];
    if ask(follower, pod.directory.path(), None, &["remove_controller"], (2, "examples,fuzzing")) {
        until("the leader to answer", || replicas.client(leader).hosts().ok());
    }
}
