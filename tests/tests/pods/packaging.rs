//! The Debian package installs, runs and goes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use wadi_tests::disk_guest::{Answers, BLOCKS, DiskGuest};
use wadi_tests::frame_guest::FrameGuest;
use wadi_tests::waiting::wait_for;

/// What the package is built of: the programs that the tests run.
fn built() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_wadi-demo")).parent().expect("a program lies in a directory")
}

fn source() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate lies in the workspace")
}

fn succeed(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().expect("it can be run");
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}: {status}\n{stdout}\n{stderr}");
    stdout.into_owned()
}

#[test]
fn a_host_runs_from_the_package_with_no_more_capabilities_than_its_units_have() {
    let directory = tempfile::tempdir().expect("a directory");
    let script = source().join("deploy/build-deb.sh");
    let package = succeed(Command::new(script).arg(built()).arg(directory.path()));
    // In namespaces of its own, so that nothing of it outlives the script; killed if it takes far too long.
    let mut command = Command::new("timeout");
    command.args([
        "--kill-after=10",
        "180",
        "unshare",
        "--mount",
        "--net",
        "--pid",
        "--fork",
        "--kill-child",
    ]);
    command.arg(source().join("tests/packaging/install.sh")).arg(package.trim());
    let root = directory.path().join("root");
    std::fs::create_dir(&root).expect("a directory");
    let said = succeed(command.arg(&root));
    assert!(said.ends_with("== done\n"), "{said}");
}

/// systemd itself starts the daemons, on a copy of this machine: what the units forbid is forbidden then. Guests without a VM use the
/// devices meanwhile.
#[test]
fn a_host_that_systemd_has_booted_works_in_its_units_sandboxes() {
    let directory = tempfile::tempdir().expect("a directory");
    let package =
        succeed(Command::new(source().join("deploy/build-deb.sh")).arg(built()).arg(directory.path()));
    let base = directory.path().join("host");
    fs::create_dir(&base).expect("a directory");
    let mut command = Command::new(source().join("tests/packaging/boot.sh"));
    command.arg(package.trim()).arg(&base);
    let booted = std::thread::spawn(move || command.output().expect("it can be run"));
    let shared = base.join("shared");
    let said = || fs::read_to_string(shared.join("log")).unwrap_or_default();
    let began = Instant::now();
    while !shared.join("at-work").exists() && !booted.is_finished() {
        assert!(began.elapsed() < Duration::from_mins(5), "it has not begun to work:\n{}", said());
        std::thread::sleep(Duration::from_millis(20));
    }
    if shared.join("at-work").exists() {
        let mac = fs::read_to_string(shared.join("at-work")).expect("a file");
        use_devices(&sockets_of_booted(&shared), mac.trim());
        fs::write(shared.join("tried"), "").expect("a file");
    }
    let Output { status, stdout, stderr } = booted.join().expect("it was run");
    let said = said();
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(said.ends_with("== done\n"), "{status}\n{stdout}\n{stderr}\n{said}");
}

/// Where the sockets of a host are that has this directory.
fn sockets_of_booted(shared: &Path) -> PathBuf {
    let processes = fs::read_dir("/proc").expect("processes").flatten().map(|it| it.path());
    let is_there = |process: &PathBuf| {
        let is_frontend =
            fs::read_to_string(process.join("comm")).is_ok_and(|it| it.trim() == "vhost-net-cxl");
        // The same directory has the same file.
        let same = |file: PathBuf| fs::metadata(file).map(|it| std::os::unix::fs::MetadataExt::ino(&it)).ok();
        is_frontend && same(process.join("root/shared/at-work")) == same(shared.join("at-work"))
    };
    processes
        .filter(is_there)
        .map(|it| it.join("root/run/wadi/sockets"))
        .next()
        .expect("a daemon of that host")
}

/// Writes to the disk of `vm1`, reads it back, and sends frames.
fn use_devices(sockets: &Path, mac: &str) {
    let socket = |name: &str| sockets.join(name).to_str().expect("a path").to_owned();
    let mut disk = DiskGuest::connect(&socket("vm1-vol0.sock"));
    disk.begin_to_write(1);
    assert_eq!(disk.finish(), Answers { done: BLOCKS, failed: 0 });
    assert_eq!(disk.versions(), vec![1; BLOCKS]);
    let mut nic = FrameGuest::connect(&socket("vm1-net0.sock"), mac);
    (0..40).for_each(|number| nic.send(number));
    wait_for("all frames are on their way", || nic.in_flight() == 0);
}

#[test]
fn a_package_of_nothing_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut command = Command::new(source().join("deploy/build-deb.sh"));
    let Output { status, stderr, .. } =
        command.arg(directory.path()).arg(directory.path()).output().expect("it can be run");
    assert!(!status.success());
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(stderr.contains("run make build first"), "{stderr}");
}

/// What a unit, or what all of them have in common, says below a heading.
fn section(file: &str, heading: &str) -> String {
    let text = std::fs::read_to_string(source().join("deploy/systemd").join(file)).expect("a unit");
    let below = text.split_once(&format!("[{heading}]\n")).expect("a section").1;
    below.split("\n[").next().unwrap_or_default().to_owned()
}

#[test]
fn units_are_started_again_however_often_they_fail() {
    let common = "wadi-.service.d/50-common.conf";
    // By default systemd gives up at the fifth failure within ten seconds.
    assert!(section(common, "Unit").lines().any(|line| line == "StartLimitIntervalSec=0"));
    let service = section(common, "Service");
    assert!(service.lines().any(|line| line == "Restart=always"), "{service}");
    // What the table of exit statuses says of memory that has failed.
    assert!(service.lines().any(|line| line == "RestartPreventExitStatus=74"), "{service}");
}

#[test]
fn an_agent_of_vcpus_may_do_what_it_has_to() {
    let (unit, more) = ("wadi-slice@.service", "wadi-slice@.service.d/60-slice.conf");
    let service = section(unit, "Service");
    assert!(
        service.lines().any(|line| line == "ExecStart=/usr/bin/vmm slice %i --share fair --wait"),
        "{service}"
    );
    // Drop-ins are read by their names, those of all units first: what differs from that must come later.
    let common = section("wadi-.service.d/50-common.conf", "Service");
    let differs = section(more, "Service");
    assert!("60-slice.conf" > "50-common.conf");
    for (line, instead) in [
        ("Type=exec", "Type=notify"),
        ("ProtectControlGroups=no", "ProtectControlGroups=yes"),
        ("ProtectKernelTunables=no", "ProtectKernelTunables=yes"),
    ] {
        assert!(differs.lines().any(|it| it == line) && common.lines().any(|it| it == instead), "{line}");
    }
    assert!(
        !differs.contains("Restart=") && differs.contains("RestartSec="),
        "it comes back as the others do"
    );
    let makefile = std::fs::read_to_string(source().join("Makefile")).expect("a Makefile");
    assert!(makefile.contains("deploy/systemd/wadi-slice@.service.d/*.conf"), "it is not installed");
}

#[test]
fn the_controller_may_write_its_audit_log_where_the_manual_has_it() {
    let manual = std::fs::read_to_string(source().join("docs/operations.md")).expect("the manual");
    assert!(manual.contains("audit-log = \"/var/log/wadi/"), "it is elsewhere now");
    let service = section("wadi-controller.service", "Service");
    for line in ["LogsDirectory=wadi", "LogsDirectoryMode=0750"] {
        assert!(service.lines().any(|it| it == line), "{line} is not in\n{service}");
    }
    // Whoever moves it away has it opened anew.
    let rotation = std::fs::read_to_string(source().join("deploy/logrotate/wadi")).expect("a rotation");
    assert!(rotation.contains("/var/log/wadi/*.jsonl") && rotation.contains("reload wadi-controller"));
}
