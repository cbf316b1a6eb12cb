//! `SIGHUP` has the daemons of a host read their configuration anew; it ends none of them, whatever the file says by then.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};
use wadi_tests::pod::{Pod, PodBuilder, Role};
use wadi_tests::waiting::until;

/// Has a daemon read its configuration, and waits until it has said this since.
fn hang_up(pod: &mut Pod, host: &str, role: Role, word: &str) {
    let daemon = pod.daemon(host, role).unwrap();
    let before = daemon.said().len();
    let pid = i32::try_from(daemon.pid().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::HUP).unwrap();
    until(word, || daemon.said()[before..].contains(word).then_some(()));
}

#[test]
fn daemons_read_what_is_logged_and_go_on() {
    let mut pod = PodBuilder::three_hosts().start().unwrap();
    pod.wait_until_joined().unwrap();
    let engines = pod.engines();
    let daemons = [
        ("h1", Role::NetFrontend),
        ("h1", Role::BlkFrontend),
        ("h2", Role::NetBackend),
        ("h2", Role::BlkBackend),
    ];
    for (host, role) in daemons {
        let path = pod.config_path(host);
        let text = fs::read_to_string(&path).unwrap();
        let with = |lines: &str| text.replacen("\n[pool]", &format!("{lines}\n[pool]"), 1);
        for (text, word) in [
            (with("log = \"debug\"\n"), "the configuration was read anew"),
            (with("log = \"loud\"\n"), "host.log: \"loud\" does not say what is logged"),
            (text.replacen("[run]", "[run]\nfence-ms = 400", 1), "takes effect with a restart"),
            (text.clone(), "the configuration was read anew"),
        ] {
            fs::write(&path, text).unwrap();
            hang_up(&mut pod, host, role, word);
        }
    }
    assert_eq!(pod.engines(), engines);
    for daemon in pod.processes() {
        daemon.check().unwrap();
    }
}
