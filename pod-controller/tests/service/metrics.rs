//! What operators watch: metrics as promtool wants them, alerts that fire for what they are for, and a dashboard of metrics that there are.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::replicas::{Replicas, volume};
use crate::support::{Pod, until, vm};
use pod_api::{Fabric, MchannelSpec};
use serde_json::Value;

fn deploy(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(name)
}

/// What promtool says to this, given so on its input; it must have nothing against it.
fn promtool(arguments: &[&str], input: &str, directory: &Path) -> String {
    let mut command = Command::new("promtool");
    command.args(arguments).current_dir(directory).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn().expect("promtool is installed: run make setup");
    child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("promtool reads");
    let output = child.wait_with_output().expect("promtool ends");
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "promtool {arguments:?}: {said}");
    said
}

/// The metrics of a pod in which there is some of everything.
fn page() -> String {
    let pod = Pod::demo();
    let client = pod.client();
    client.create_volume(&volume("vol0")).expect("there is room");
    client.create_instance(&vm("vm1", &["vol0"]), Duration::from_secs(30)).expect("created");
    let elements = [("link".to_owned(), 1_000_000)].into();
    client.set_fabric(&Fabric { elements, ..client.fabric().expect("an answer") }).expect("it makes sense");
    let spec = MchannelSpec { weight: 1, tenant: "default".to_owned(), path: vec!["link".to_owned()] };
    client.set_mchannel("vm1", &spec).expect("it makes sense");
    until("telemetry of all that there is", || {
        let text = client.metrics().ok()?;
        let last = ["lease_packets", "lease_requests", "channel_stalls", "mchannel_vcpu_slept_seconds"];
        last.iter().all(|it| text.contains(&format!("wadi_{it}_total{{"))).then_some(text)
    })
}

/// The metrics that an expression names.
fn named(expression: &str) -> BTreeSet<&str> {
    let words = expression.split(|it: char| !(it.is_ascii_alphanumeric() || it == '_'));
    words.filter(|word| word.starts_with("wadi_")).collect()
}

fn nothing_speaks_against(page: &str) {
    let said = promtool(&["check", "metrics"], page, Path::new("."));
    assert_eq!(said, "");
}

#[test]
fn promtool_has_nothing_against_the_metrics() {
    nothing_speaks_against(&page());
}

#[test]
fn alerts_fire_for_what_they_are_for_and_know_the_metrics() {
    let directory = deploy("prometheus");
    promtool(&["check", "rules", "wadi.rules.yml"], "", &directory);
    promtool(&["test", "rules", "wadi.rules.test.yml"], "", &directory);
    promtool(&["check", "config", "--syntax-only", "prometheus.yml"], "", &directory);
    let rules = fs::read_to_string(directory.join("wadi.rules.yml")).expect("the rules");
    let tests = fs::read_to_string(directory.join("wadi.rules.test.yml")).expect("their tests");
    let page = page();
    for line in rules.lines().filter(|line| !line.contains("summary:") && !line.contains("description:")) {
        for name in named(line) {
            assert!(page.contains(&format!("# TYPE {name} ")), "{name} is none of the metrics: {line}");
        }
        if let Some((_, alert)) = line.split_once("- alert: ") {
            assert!(
                tests.contains(&format!("alertname: {alert}\n        exp_alerts:")),
                "nothing makes {alert} fire"
            );
        }
    }
}

#[test]
fn whoever_watches_controllers_sees_that_none_leads() {
    let mut pod = Pod::demo();
    pod.stop_controller();
    let mut replicas = Replicas::new(pod.directory.path());
    replicas.start_first(3);
    let is = |replicas: &Replicas, replica: u16, line: &str| {
        replicas
            .client(replica)
            .metrics()
            .is_ok_and(|text| text.contains(&format!("\nwadi_controller_{line}\n")))
    };
    // Whoever is left led before, or followed.
    for led in [true, false] {
        let leader = replicas.leader(&[0, 1, 2]);
        for replica in 0..3 {
            let leads = format!("leads {}", u8::from(replica == leader));
            until("a leader", || {
                (is(&replicas, replica, "has_leader 1") && is(&replicas, replica, &leads)).then_some(())
            });
            until("readiness", || replicas.client(replica).ready().ok());
            nothing_speaks_against(&replicas.client(replica).metrics().expect("it answers"));
        }
        until("all changes", || is(&replicas, leader, "behind_changes{replica=\"0\"} 0").then_some(()));
        let left = if led { leader } else { (leader + 1) % 3 };
        let gone: Vec<u16> = (0..3).filter(|replica| *replica != left).collect();
        for replica in &gone {
            replicas.kill(*replica);
        }
        until("it to be seen", || is(&replicas, left, "has_leader 0").then_some(()));
        assert!(is(&replicas, left, "leads 0"), "it leads nobody");
        nothing_speaks_against(&replicas.client(left).metrics().expect("it answers"));
        let refused = replicas.client(left).ready().expect_err("nothing can be changed");
        assert_eq!(refused.status(), Some(503), "{refused}");
        for replica in gone {
            replicas.start(replica, &[]);
        }
    }
}

#[test]
fn dashboard_shows_what_there_is() {
    let text = fs::read_to_string(deploy("grafana/wadi.json")).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let page = page();
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().expect("targets"));
    let mut rules = "groups:\n- name: dashboard\n  rules:\n".to_owned();
    for (number, target) in targets.enumerate() {
        let expression = target["expr"].as_str().expect("an expression");
        for name in named(expression) {
            assert!(page.contains(&format!("# TYPE {name} ")), "{name} is none of the metrics: {expression}");
        }
        // As Grafana asks Prometheus.
        let asked = expression.replace("$__rate_interval", "1m").replace("$instance", ".*");
        let asked = serde_json::to_string(&asked).expect("a string");
        writeln!(rules, "  - record: panel:{number}\n    expr: {asked}").expect("it is a string");
    }
    let directory = tempfile::tempdir().expect("a directory");
    fs::write(directory.path().join("rules.yml"), rules).expect("written");
    promtool(&["check", "rules", "rules.yml"], "", directory.path());
}
