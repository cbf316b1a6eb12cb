use std::path::Path;

use proptest::prelude::*;

use super::*;

const GOOD: &str = r#"
[host]
id = 2
name = "h2"
[pool]
path = "/dev/shm/wadi/pool"
[run]
directory = "/run/wadi"
wakeup = "socket"
busy-poll-us = 20
poll-in-flight-us = 90
fence-ms = 300
worker-timeout-ms = 8000
[[nic]]
name = "nic0"
driver = "tap"
[[ssd]]
name = "ssd0"
driver = "file"
[net]
backend-cpu = 3
"#;

fn parse(text: &str) -> Result<HostConfig, ConfigError> {
    HostConfig::parse(text, Path::new("host.toml"))
}

fn complaint(text: &str) -> String {
    let complaint = parse(text).expect_err("refused").to_string();
    assert!(!complaint.contains('\n'), "{complaint:?} is not one line");
    complaint
}

#[test]
fn full_configuration_is_read() {
    let config = parse(GOOD).expect("good");
    assert_eq!(config.host.id.get(), 2);
    assert_eq!(config.run.wakeup, Wakeup::Socket);
    assert_eq!(config.run.busy_poll(), Duration::from_micros(20));
    assert_eq!(config.run.poll_in_flight(), Duration::from_micros(90));
    assert_eq!(config.run.fence(), Duration::from_millis(300));
    assert_eq!(config.run.worker_timeout(), Some(Duration::from_secs(8)));
    assert_eq!(config.net.backend_cpu, Some(3));
    assert_eq!(config.nic.len(), 1);
}

#[test]
fn short_configuration_gets_defaults() {
    let config = parse("[host]\nid = 1\nname = \"h1\"\n[pool]\npath = \"/p\"\n").expect("good");
    assert_eq!(config.run, RunSection::default());
    assert!(config.nic.is_empty());
}

#[test]
fn unknown_key_is_refused_with_its_line() {
    let text = GOOD.replace("fence-ms", "fence-msec");
    let complaint = complaint(&text);
    assert!(complaint.contains("host.toml, line 12") && complaint.contains("fence-msec"), "{complaint}");
}

#[test]
fn broken_syntax_is_refused_with_its_line() {
    let complaint = complaint("[host]\nid = \n");
    assert!(complaint.contains("host.toml, line 2"), "{complaint}");
}

#[test]
fn values_out_of_range_are_refused() {
    for (good, bad) in [
        ("id = 2", "id = 0"),
        ("id = 2", "id = 65536"),
        ("\"h2\"", "\"../h2\""),
        ("\"h2\"", "\"\""),
        ("= 300", "= 3"),
        ("= 8000", "= 80"),
        ("= 8000", "= 6000000"),
        ("busy-poll-us = 20", "busy-poll-us = 2000000"),
        ("poll-in-flight-us = 90", "poll-in-flight-us = 2000000"),
        ("\"socket\"", "\"doorbell\""),
        ("\"ssd0\"", "\"nic0\""),
        ("name = \"nic0\"", "nom = \"nic0\""),
    ] {
        complaint(&GOOD.replace(good, bad));
    }
}

#[test]
fn missing_file_is_named() {
    let complaint = HostConfig::load(Path::new("/nonexistent/host.toml")).expect_err("missing").to_string();
    assert!(complaint.contains("/nonexistent/host.toml"), "{complaint}");
}

#[test]
fn device_tables_are_read_by_their_engine() {
    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Nic {
        name: String,
    }
    let config = parse(GOOD).expect("good");
    let complaint = config.nics::<Nic>().expect_err("driver is unknown to it").to_string();
    assert!(complaint.contains("[[nic]] \"nic0\"") && complaint.contains("driver"), "{complaint}");
    let config = parse(&GOOD.replace("name = \"nic0\"\ndriver = \"tap\"", "name = \"nic0\"")).expect("good");
    assert_eq!(config.nics::<Nic>().expect("good")[0].name, "nic0");
}

proptest! {
    #[test]
    fn any_text_is_a_configuration_or_one_line(text: String) {
        if let Err(error) = parse(&text) {
            prop_assert!(!error.to_string().contains('\n') || text.contains('\n'));
        }
    }
}
