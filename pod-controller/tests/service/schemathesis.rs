//! What somebody else's tester finds, who knows of the API only what its description says: schemathesis. `make test` and `make verify-api`
//! install it; where nobody says where it is, there is nothing to do, unless it is required. Each run asks something else, and says how to
//! ask it again.

use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::support::{Pod, RunningController};

/// Where the program is.
const PROGRAM: &str = "WADI_SCHEMATHESIS";
/// That it must be there.
const REQUIRED: &str = "WADI_REQUIRE_SCHEMATHESIS";
/// How many requests of each kind, and from which seed.
const EXAMPLES: &str = "WADI_SCHEMATHESIS_EXAMPLES";
const SEED: &str = "WADI_SCHEMATHESIS_SEED";

#[test]
fn nothing_that_the_description_allows_or_forbids_breaks_a_promise() {
    let Some(program) = std::env::var_os(PROGRAM) else {
        let is_required = std::env::var_os(REQUIRED).is_some_and(|it| !it.is_empty());
        assert!(
            !is_required,
            "{REQUIRED} is set, and {PROGRAM} does not say where schemathesis is: make test does"
        );
        eprintln!("skipped: {PROGRAM} does not say where schemathesis is; make verify-api does");
        return;
    };
    let mut pod = Pod::demo();
    pod.stop_controller();
    let config = pod.config_with("listen-tcp = '127.0.0.1:0'\nrequests-per-second = 0");
    let controller = RunningController::start(&config).expect("a controller");
    let address = controller.address.expect("it listens");
    pod.controller = Some(controller);
    let said = |name: &str, otherwise: &str| std::env::var(name).unwrap_or_else(|_| otherwise.to_owned());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_secs());
    let (seed, examples) = (said(SEED, &now.to_string()), said(EXAMPLES, "20"));
    let again = format!("{SEED}={seed} {EXAMPLES}={examples} make verify-api");
    println!("to ask the same again: {again}");
    let output = Command::new("timeout")
        .arg("600")
        .arg(program)
        .args(["run", &format!("http://{address}/openapi.json"), "--no-color", "--seed", &seed])
        .args(["--max-examples", &examples, "--phases", "examples,coverage,fuzzing,stateful"])
        .args(["--checks", "not_a_server_error,status_code_conformance,content_type_conformance"])
        .args(["--checks", "response_schema_conformance,response_headers_conformance"])
        // Many texts are no part of a path: that it leaves them out is no fault of ours.
        .args(["--suppress-health-check", "filter_too_much"])
        // It never ends.
        .args(["--exclude-path", "/v1/events/stream", "--request-timeout", "45"])
        .current_dir(pod.directory.path())
        .output()
        .expect("it starts");
    let found = String::from_utf8_lossy(&output.stdout);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{found}\n{complaints}\nto ask the same again: {again}");
    // Whatever it asked for, the controller goes on.
    pod.client().hosts().expect("it answers");
    println!("{}", found.lines().filter(|line| line.contains("generated")).collect::<String>());
}
