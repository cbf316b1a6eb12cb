//! `podctl` as people and scripts use it.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use cxl_pool::Role;
use pod_api::{DeviceAnswer, DeviceHealth, FailedBack, NicLimit, NicPolicy, Volume, VolumeQos};
use pod_protocol::reports::Report;

use crate::support::{Pod, until, vm};

fn podctl(pod: &Pod, arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_podctl"));
    command
        .arg("--server")
        .arg(format!("unix:{}", pod.socket().display()))
        .args(arguments.split_whitespace());
    command
}

pub(crate) fn run(pod: &Pod, arguments: &str) -> Output {
    podctl(pod, arguments).output().expect("podctl starts")
}

/// What it says when all is well.
pub(crate) fn said(pod: &Pod, arguments: &str) -> String {
    let output = run(pod, arguments);
    let (said, failed) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "podctl {arguments}: {said}{failed}");
    said.into_owned()
}

#[test]
fn every_form_of_output_says_the_same() {
    let pod = Pod::demo();
    said(&pod, "volumes create vol0 --size 4M --label tier=web");
    said(&pod, "volumes create vol1 --size 4M --label tier=db");
    let tried = said(&pod, "--dry-run volumes create vol2 --size 4M");
    assert!(tried.contains("vol2"), "{tried}");
    let json: Vec<Volume> = serde_json::from_str(&said(&pod, "volumes list -o json")).expect("JSON");
    assert_eq!(json.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["vol0", "vol1"]);
    let yaml = said(&pod, "volumes list -o yaml --label tier=db");
    assert!(yaml.starts_with("---\n- name: vol1\n"), "{yaml}");
    assert!(!said(&pod, "volumes list").contains("tier=web"));
    assert!(said(&pod, "volumes list -o wide").contains("tier=web"));
    assert!(said(&pod, "volumes get vol0").contains("tier=web"));
    said(&pod, "volumes read-only vol0");
    let volume = said(&pod, "volumes get vol0");
    assert!(
        volume.lines().any(|line| line.starts_with("guests:") && line.ends_with("only read it")),
        "{volume}"
    );
    said(&pod, "volumes read-only vol0 --off");
    assert!(!said(&pod, "volumes get vol0").contains("only read it"));
    said(&pod, "volumes label vol0");
    assert!(!said(&pod, "volumes list -o wide").contains("tier=web"));
    for list in ["hosts", "devices", "instances"] {
        assert!(!said(&pod, &format!("{list} list -o wide")).is_empty());
    }
    let ssd = said(&pod, "devices get h2/ssd0");
    assert!(
        ssd.lines().any(|line| line.starts_with("discards:") && line.ends_with("whole units of 64.0 KiB")),
        "{ssd}"
    );
    assert!(said(&pod, "devices get h2/ssd0 -o yaml").contains("discard_granularity_bytes: 65536\n"));
    assert_eq!(said(&pod, "volumes delete vol1 -o yaml"), "--- {}\n");
    assert_eq!(said(&pod, "--dry-run volumes delete vol0"), "volume vol0 would be deleted\n");
    assert_eq!(said(&pod, "--dry-run hosts drain h2"), "host h2 would have to be empty\n");
    let refused = run(&pod, "volumes delete vol9 --dry-run");
    assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("vol9"));
}

#[test]
fn what_does_not_go_back_is_named() {
    let pod = Pod::demo();
    let link = |up| {
        let report = Report::Link { device: "nic0".to_owned(), up, reason: "carrier".to_owned() };
        pod.endpoint(2, Role::NetBackend).reporter.report(report);
    };
    let nic = |instance: &str| pod.client().instance(instance).expect("it is there").nics[0].nic.clone();
    said(&pod, "instances create vm1 --host h1 --nic apart=db");
    link(false);
    until("the lease to leave", || (nic("vm1") == "h3/nic0").then_some(()));
    link(true);
    until("the link to be there", || {
        pod.client().device("h2", "nic0").ok().filter(|it| it.health == DeviceHealth::Up)
    });
    let back = "devices fail-back h2/nic0";
    assert_eq!(said(&pod, &format!("{back} --dry-run")), "device h2/nic0 would have its leases back\n");
    said(&pod, "instances create vm2 --host h1 --nic apart=db");
    assert_eq!(nic("vm2"), "h2/nic0");
    let said_of_it = said(&pod, back);
    assert_eq!(nic("vm1"), "h3/nic0");
    let stays = "net0 of vm1 stays on h3/nic0: h2/nic0 has no room for what it reserves, or another NIC of its group is there";
    assert!(said_of_it.contains(stays), "{said_of_it}");
    said(&pod, "instances delete vm2");
    let json: FailedBack = serde_json::from_str(&said(&pod, &format!("{back} -o json"))).expect("JSON");
    assert_eq!((json, nic("vm1")), (FailedBack::default(), "h2/nic0".to_owned()));
}

#[test]
fn load_is_shown_and_what_only_looks_is_watched() {
    let mut pod = Pod::demo();
    pod.client().create_instance(&vm("vm1", &[]), Duration::from_secs(30)).expect("created");
    let shown = said(&pod, "top --once --interval 0.2");
    for word in ["3 hosts, 3 devices, 1 instances", "h2/nic0", "vm1", "RECEIVED/S"] {
        assert!(shown.contains(word), "{word} is not in\n{shown}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&said(&pod, "top --once --interval 0.2 -o json")).expect("JSON");
    assert_eq!(json["instances"][0]["instance"], "vm1");
    let balance = until("a rate of every NIC", || {
        let shown = said(&pod, "balance");
        let all = ["h2/nic0", "h3/nic0", "h2/ssd0"];
        all.iter().all(|it| shown.contains(it)).then_some(shown)
    });
    assert!(balance.contains("nothing would move") && balance.contains("no volume would move"), "{balance}");
    let wide = said(&pod, "balance -o wide");
    let columns = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let header = wide.lines().find(|line| line.starts_with("SSD")).expect("a table of SSDs");
    assert_eq!(columns(header), ["SSD", "REQUESTS/S", "BYTES/S", "USED", "OVERLOADED", "COPYING"]);
    // Nobody has said what it can do.
    assert!(wide.contains("h2/ssd0           0    0 B/s     -  no          no\n"), "{wide}");
    assert!(said(&pod, "balance -o yaml").contains("bytes_max: 274877906944"));
    let explained = said(&pod, "explain instance vm1");
    assert!(explained.contains("carries 0 Mbit/s now, 0 %"), "{explained}");

    let mut watch = podctl(&pod, "--watch=0.1 volumes list")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("podctl starts");
    let (sender, lines) = mpsc::channel();
    let stdout = watch.stdout.take().expect("piped");
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    let next = || lines.recv_timeout(Duration::from_mins(1)).expect("a line from podctl --watch");
    assert!(next().contains("no volumes"));
    said(&pod, "volumes create vol0 --size 4M");
    assert!(next().starts_with("VOLUME"));
    assert!(next().starts_with("vol0"));
    // While the controller is away, what was seen last stays.
    let mut notes = BufReader::new(watch.stderr.take().expect("piped"));
    pod.stop_controller();
    let mut note = String::new();
    notes.read_line(&mut note).expect("a note");
    assert!(note.contains("controller"), "{note:?}");
    pod.start_controller();
    assert!(next().starts_with("VOLUME"), "it is back");
    assert!(next().starts_with("vol0"));
    watch.kill().expect("it runs");
    watch.wait().expect("it ends");
    reader.join().expect("the reader");
    let refused = run(&pod, "--watch volumes delete vol0");
    assert!(!refused.status.success(), "what changes something is not watched");
    assert_eq!(pod.client().volumes().expect("a list").len(), 1);
}

#[test]
fn who_says_after_which_event_sees_all_that_came_since() {
    const DRAINS: usize = 30;
    let pod = Pod::demo();
    let seen = pod.client().events(0).expect("events").events.last().map_or(0, |it| it.sequence);
    for _ in 0..DRAINS {
        pod.client().drain_host("h3", true).expect("drained");
        pod.client().drain_host("h3", false).expect("used again");
    }
    let lines = |arguments: &str| said(&pod, arguments).lines().count();
    let all = lines(&format!("events --after {seen}"));
    assert!(all >= 2 * DRAINS, "{all}");
    assert_eq!(lines(&format!("events --after {seen} -n 5")), 5);
    assert_eq!(lines("events"), 50);

    // Nothing is left out before it follows.
    let mut follow = podctl(&pod, &format!("events --follow --after {seen}"))
        .stdout(Stdio::piped())
        .spawn()
        .expect("podctl starts");
    let mut followed = BufReader::new(follow.stdout.take().expect("piped")).lines();
    let first = followed.next().expect("a line").expect("text");
    follow.kill().expect("it runs");
    follow.wait().expect("it ends");
    assert_eq!(first.split_whitespace().next(), Some((seen + 1).to_string().as_str()), "{first}");
}

#[test]
fn a_fabric_that_is_only_tried_is_shown() {
    let pod = Pod::demo();
    let tried = said(&pod, "--dry-run mchannel fabric --element port1=10G --tenant red=2");
    assert!(tried.contains("port1") && tried.contains("red"), "{tried}");
    assert!(!said(&pod, "mchannel fabric").contains("port1"), "it was only tried");
    assert!(said(&pod, "mchannel fabric --element port1=10G").contains("port1"));
}

#[test]
fn a_device_that_nobody_plugs_in_is_given_back_whatever_version_was_meant() {
    let pod = Pod::demo();
    let client = pod.client();
    client.create_instance(&vm("vm1", &[]), Duration::from_secs(30)).expect("created");
    client.answer_device("vm1", "net0", &DeviceAnswer { plugged: true, refused: None }).expect("it has it");
    let version = client.instance("vm1").expect("it is there").resource_version;
    let failed = run(&pod, &format!("instances attach vm1 --nic --wait 1 --if-version {version}"));
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && said.contains("its lease is given back"), "{said}");
    assert_eq!(client.instance("vm1").expect("it is there").nics.len(), 1);
}

#[test]
fn what_is_broken_is_shown_to_who_watches_a_host() {
    let pod = Pod::new();
    let mut watch = podctl(&pod, "--watch=0.1 doctor --config")
        .arg(pod.path("no-such-host.toml"))
        .stdout(Stdio::piped())
        .spawn()
        .expect("podctl starts");
    let mut lines = BufReader::new(watch.stdout.take().expect("piped")).lines();
    let mut next = || lines.next().expect("a line").expect("text");
    assert!(next().starts_with("WHAT"));
    while !next().contains("BROKEN") {}
    // It goes on, and shows what has changed.
    let root = pod.directory.path().display();
    let mended = format!(
        "[host]\nid = 7\nname = 'mended'\n[pool]\npath = '{root}/pool'\n[run]\ndirectory = '{root}/run'\n"
    );
    std::fs::write(pod.path("no-such-host.toml"), mended).expect("written");
    while !next().contains("mended is host 7") {}
    watch.kill().expect("it runs");
    watch.wait().expect("it ends");
}

#[test]
fn labels_that_many_change_at_once_are_all_there() {
    const WRITERS: usize = 6;
    let pod = Pod::demo();
    said(&pod, "volumes create vol0 --size 4M --label tier=web --label old=yes");
    let label = |number: usize| {
        let arguments = format!("volumes label vol0 n{number}=yes --merge");
        podctl(&pod, &arguments).stdout(Stdio::null()).spawn().expect("podctl starts")
    };
    let writers: Vec<_> = (0..WRITERS).map(label).collect();
    for mut writer in writers {
        assert!(writer.wait().expect("it ends").success());
    }
    said(&pod, "volumes label vol0 tier=db --remove old");
    let volume: Volume = serde_json::from_str(&said(&pod, "volumes get vol0 -o json")).expect("JSON");
    let expected = (0..WRITERS).map(|number| (format!("n{number}"), "yes".to_owned()));
    let expected = expected.chain([("tier".to_owned(), "db".to_owned())]).collect();
    assert_eq!(volume.labels, expected);

    // Whoever says which version is meant changes that one or none.
    let version = volume.resource_version;
    said(&pod, &format!("volumes label vol0 --merge a=b --if-version {version}"));
    let late = run(&pod, &format!("volumes delete vol0 --if-version {version}"));
    let said = String::from_utf8_lossy(&late.stderr).into_owned();
    assert!(!late.status.success() && said.contains("has changed since you looked"), "{said}");
}

#[test]
fn of_nics_and_volumes_changes_what_is_said_whoever_else_changes_something() {
    let pod = Pod::demo();
    said(&pod, "volumes create vol0 --size 4M");
    pod.client().create_instance(&vm("vm1", &["vol0"]), Duration::from_secs(30)).expect("created");
    said(&pod, "instances nic-policy vm1 --vlan 10 --address 10.0.0.2");
    said(&pod, "instances nic-policy vm1 --send 125M");
    let policy = || pod.client().instance("vm1").expect("it is there").nics.remove(0).policy;
    let address = "10.0.0.2".parse().expect("an address");
    let transmit = NicLimit { bytes_per_second: Some(125 << 20), ..NicLimit::default() };
    let mut expected =
        NicPolicy { transmit, receive: NicLimit::default(), addresses: vec![address], vlan: Some(10) };
    assert_eq!(policy(), expected);

    // All at once, and each knows of one thing only.
    let all = [
        "instances nic-policy vm1 --send-packets 1000",
        "instances nic-policy vm1 --send-minimum 1M",
        "instances nic-policy vm1 --receive 10M",
        "instances nic-policy vm1 --receive-packets 2000",
        "instances nic-policy vm1 --vlan none",
        "volumes qos vol0 --iops 5000",
        "volumes qos vol0 --bandwidth 200M",
        "volumes qos vol0 --minimum-iops 100",
        "volumes qos vol0 --minimum-bandwidth 5M",
    ];
    let start = |line: &&str| podctl(&pod, line).stdout(Stdio::null()).spawn().expect("podctl starts");
    let writers: Vec<_> = all.iter().map(start).collect();
    for mut writer in writers {
        assert!(writer.wait().expect("it ends").success());
    }
    expected.transmit.packets_per_second = Some(1000);
    expected.transmit.minimum_bytes_per_second = Some(1 << 20);
    expected.receive.bytes_per_second = Some(10 << 20);
    expected.receive.packets_per_second = Some(2000);
    expected.vlan = None;
    assert_eq!(policy(), expected);
    let qos = VolumeQos {
        iops: Some(5000),
        bytes_per_second: Some(200 << 20),
        minimum_iops: Some(100),
        minimum_bytes_per_second: Some(5 << 20),
        ..VolumeQos::default()
    };
    let volume = pod.client().volume("vol0").expect("it is there");
    assert_eq!(volume.qos, qos);

    // What is only tried, or means what is not there any more, changes nothing; nor does what says nothing.
    said(&pod, "--dry-run volumes qos vol0 --iops none");
    said(&pod, "volumes label vol0 --merge a=b");
    let late = format!("volumes qos vol0 --iops none --if-version {}", volume.resource_version);
    for refused in
        [late.as_str(), "volumes qos vol0", "instances nic-policy vm1", "volumes qos vol9 --iops 1"]
    {
        assert!(!run(&pod, refused).status.success(), "{refused}");
    }
    assert_eq!(pod.client().volume("vol0").expect("it is there").qos, qos);
    said(&pod, "volumes qos vol0 --anew --burst-ms 50");
    let burst = VolumeQos { burst_ms: 50, ..VolumeQos::default() };
    assert_eq!(pod.client().volume("vol0").expect("it is there").qos, burst);
    assert_eq!(policy(), expected);
}
