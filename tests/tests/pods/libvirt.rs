//! A libvirt daemon runs the domain that `vmm xml` prints, and its hook leases the domain's devices.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use guest_images::agent::Agent;
use guest_images::{EXEC_PORT, Guest, Silent};
use pod_api::{CreateInstance, CreateVolume, Instance, NicRequest};
use vhost_frontend::VMM_PATIENCE;
use vmm::Accelerator;
use wadi_tests::pod::{CLIENT_ADDRESS, GUEST_ADDRESS, Pod, PodBuilder, Role};
use wadi_tests::process::Daemon;
use wadi_tests::waiting::wait_for;

const LONG: Duration = Duration::from_mins(1);
/// How long the hook may wait where a domain is to start.
const PATIENT: u64 = 30;

/// The hook as it is installed.
const HOOK: &str = include_str!("../../../deploy/libvirt/wadi");

/// Runs libvirt's daemon with directories of its own in place of the system's. The shell is the first process of a namespace of
/// processes and reaps what libvirt leaves behind: libvirt waits until each QEMU that it tried out is gone for good, and the first
/// process of a container may be slow to let it go. One that is told to end is started again.
const DAEMON: &str = r#"
mount -t tmpfs run /run
mkdir /run/libvirt
mount --bind "$0/etc" /etc/libvirt
for directory in cache lib log; do mount --bind "$0/$directory" /var/$directory/libvirt; done
while { libvirtd -f /etc/libvirt/libvirtd.conf -p "$0/pid" & wait $!; }; do :; done
"#;

/// Without the daemon that writes logs for libvirt, and without a /dev of QEMU's own. QEMU runs as root, to whom the pod's sockets
/// belong.
const QEMU_CONF: &str = r#"stdio_handler = "file"
namespaces = []
cgroup_controllers = []
security_driver = "none"
user = "root"
group = "root"
dynamic_ownership = 0
"#;

/// A domain without anything of the pod.
const FOREIGN: &str = "<domain type='qemu'><name>foreign</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>
    <os><type arch='x86_64' machine='q35'>hvm</type></os></domain>";

/// libvirt on the host h1 of a pod.
struct Libvirt {
    directory: PathBuf,
    daemon: Daemon,
}

impl Libvirt {
    fn start(pod: &Pod) -> Self {
        let directory = pod.directory().join("libvirt");
        for below in ["etc/hooks/qemu.d", "cache", "lib", "log/qemu", "run"] {
            fs::create_dir_all(directory.join(below)).unwrap();
        }
        fs::write(directory.join("etc/qemu.conf"), QEMU_CONF).unwrap();
        let sockets = directory.join("run");
        fs::write(
            directory.join("etc/libvirtd.conf"),
            format!(
                "unix_sock_dir = \"{}\"\nauth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\n",
                sockets.display()
            ),
        )
        .unwrap();
        install_hook(pod, &directory, PATIENT);
        let mut command = pod.host("h1").unwrap().command(Path::new("unshare"));
        command.args([
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-e",
            "-c",
            DAEMON,
        ]);
        command.arg(&directory);
        let daemon = Daemon::start("libvirtd", command, &directory.join("said"));
        let mut libvirt = Self { directory, daemon: daemon.unwrap() };
        let started = Instant::now();
        while UnixStream::connect(sockets.join("libvirt-sock")).is_err() {
            libvirt.daemon.check().unwrap();
            assert!(started.elapsed() < LONG, "{}", libvirt.daemon.said());
            thread::sleep(Duration::from_millis(20));
        }
        libvirt
    }

    /// A program among the processes that libvirt sees.
    fn inside(&self, program: &Path) -> Command {
        let pid = self.daemon.pid().unwrap();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        let mut command = Command::new("nsenter");
        command.args(["--target", children.trim(), "--pid", "--mount"]).arg(program);
        command
    }

    /// Ends libvirt's daemon, which is started again.
    fn restart(&self) {
        let pid = || fs::read_to_string(self.directory.join("pid")).unwrap_or_default();
        let before = pid();
        let killed = self.inside(Path::new("kill")).arg(before.trim()).status().unwrap();
        assert!(killed.success());
        wait_for("libvirt to be back", || ![String::new(), before.clone()].contains(&pid()));
    }

    fn uri(&self) -> String {
        uri(&self.directory)
    }

    /// What `virsh` prints, and whether it did what it was told.
    fn virsh(&self, words: &[&str]) -> (String, bool) {
        let output = Command::new("virsh").args(["-c", &self.uri()]).args(words).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (String::from_utf8_lossy(&said).into_owned(), output.status.success())
    }

    fn does(&self, words: &[&str]) -> String {
        let (said, done) = self.virsh(words);
        assert!(done, "{words:?}: {said}");
        said
    }

    /// Has it fail to start a domain; what it says.
    fn refuses(&self, domain: &str) -> String {
        let (said, done) = self.virsh(&["start", domain]);
        assert!(!done, "{said}");
        said
    }

    fn define(&self, name: &str, xml: &str) {
        let path = self.directory.join(format!("{name}.xml"));
        fs::write(&path, xml).unwrap();
        self.does(&["define", &path.display().to_string()]);
    }
}

fn uri(directory: &Path) -> String {
    format!("qemu:///system?socket={}", directory.join("run/libvirt-sock").display())
}

fn server(pod: &Pod) -> String {
    format!("unix:{}", pod.directory().join("run/controller.sock").display())
}

/// Puts the hook where libvirt looks for it, as an operator would after an edit.
fn install_hook(pod: &Pod, directory: &Path, wait_s: u64) {
    let config = pod.config_path("h1");
    let options = format!(
        "libvirt-hook --server {} --config {} --wait {wait_s} --connect '{}' --directory {} --",
        server(pod),
        config.display(),
        uri(directory),
        pod.directory().join("vm").display()
    );
    let script = HOOK.replace("/usr/bin/vmm", &pod.binary("vmm").display().to_string());
    put_hook(directory, &script.replace("libvirt-hook --", &options));
}

fn put_hook(directory: &Path, script: &str) {
    let (new, path) = (directory.join("new-hook"), directory.join("etc/hooks/qemu.d/wadi"));
    fs::write(&new, script).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(new, path).unwrap();
}

/// What `vmm xml` prints, and a way to run commands in the guest.
fn domain(pod: &Pod, guest: &Guest, agent: &Path) -> String {
    let printed = Command::new(pod.binary("vmm"))
        .args(["xml", "--instance", "vm1", "--memory", "512", "--append", &guest.command_line])
        .arg("--directory")
        .arg(pod.directory().join("vm"))
        .args(["--server", &server(pod)])
        .arg("--kernel")
        .arg(&guest.kernel)
        .arg("--initrd")
        .arg(&guest.initrd)
        .arg("--accelerator")
        .arg(Accelerator::probe(vmm::QEMU.as_ref(), &guest.kernel).to_string().to_lowercase())
        .output()
        .unwrap();
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    let channel = format!(
        "<channel type='unix'><source mode='bind' path='{}'/><target type='virtio' name='{EXEC_PORT}'/></channel>",
        agent.display()
    );
    String::from_utf8(printed.stdout).unwrap().replace("</devices>", &format!("{channel}</devices>"))
}

fn instance(pod: &Pod) -> Option<Instance> {
    match pod.api().instance("vm1") {
        Ok(found) => Some(found),
        Err(error) if error.status() == Some(404) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Runs commands in the guest of a domain that has started.
fn guest_of(libvirt: &Libvirt, socket: &Path) -> Agent {
    Agent::connect(socket, LONG).unwrap_or_else(|error| {
        let log = fs::read_to_string(libvirt.directory.join("log/qemu/vm1.log"));
        panic!("{error}: {}{}", libvirt.daemon.said(), log.unwrap_or_default())
    })
}

fn run(agent: &Agent, command: &str) -> String {
    let outcome = agent.run(command, LONG).unwrap();
    assert!(outcome.success(), "{command}: {}", String::from_utf8_lossy(&outcome.stderr));
    outcome.text()
}

#[test]
fn virsh_start_alone_brings_a_domain_its_devices() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let mut pod = PodBuilder::three_hosts().start().unwrap();
    let made = pod.create_instance("vm1", "h1", &[("vol0", 64 << 20, Some("h2/ssd0"))]).unwrap();
    pod.podctl(&["mchannel", "fabric", "--element", "pool=10G", "--tenant", "red=2"]).unwrap();
    pod.podctl(&["mchannel", "set", "vm1", "--weight", "3", "--tenant", "red", "--path", "pool"]).unwrap();
    let libvirt = Libvirt::start(&pod);
    let socket = libvirt.directory.join("exec.sock");
    libvirt.define("vm1", &domain(&pod, &guest, &socket));
    libvirt.define("foreign", FOREIGN);
    pod.api().delete_instance("vm1").unwrap();

    a_start_without_devices_is_refused(&mut pod, &libvirt);
    let left = a_killed_hook_leaves_something(&mut pod, &libvirt);

    libvirt.does(&["start", "vm1"]);
    let leased = instance(&pod).unwrap();
    assert!(leased.id != left.id && leased.labels == left.labels, "{leased:?}");
    assert_eq!((&leased.nics[0].mac, leased.nics[0].mtu), (&made.nics[0].mac, made.nics[0].mtu));
    let share = pod.api().mchannel("vm1").unwrap();
    assert_eq!((share.weight, share.tenant.as_str(), share.path), (3, "red", vec!["pool".to_owned()]));
    let agent = guest_of(&libvirt, &socket);
    the_devices_work(&mut pod, &agent, &leased);
    the_vcpus_are_sliced_by_the_shim(&pod, &libvirt, &agent);
    devices_come_and_go(&mut pod, &libvirt, &agent);
    a_start_outlasts_a_frontend_that_waits_for_its_vmm(&mut pod, &libvirt, &leased);
    // Of a domain that is gone.
    wait_for("the follower to end", || !is_followed(&pod));

    libvirt.does(&["destroy", "vm1"]);
    assert_eq!(instance(&pod), None);
    an_operators_instance_stays(&pod, &libvirt, &made);
    let mut libvirt = libvirt;
    libvirt.daemon.kill().unwrap();
}

fn a_start_without_devices_is_refused(pod: &mut Pod, libvirt: &Libvirt) {
    let request = CreateInstance {
        name: "other".to_owned(),
        host: "h1".to_owned(),
        volumes: vec!["vol0".to_owned()],
        ..CreateInstance::default()
    };
    pod.create_instance_as(&request).unwrap();
    let said = libvirt.refuses("vm1");
    assert!(said.contains("the domain vm1") && said.contains("\"vol0\" is leased to other"), "{said}");
    pod.api().delete_instance("other").unwrap();

    // Domains that have nothing to do with the pod do not miss it.
    pod.controller().unwrap().kill().unwrap();
    install_hook(pod, &libvirt.directory, 1);
    let said = libvirt.refuses("vm1");
    assert!(said.contains("is pod-controller running there?"), "{said}");
    libvirt.does(&["start", "foreign", "--paused"]);
    libvirt.does(&["destroy", "foreign"]);
    pod.start_controller().unwrap();
    pod.wait_until_joined().unwrap();
    assert_eq!(instance(pod), None);

    pod.daemon("h1", Role::NetFrontend).unwrap().kill().unwrap();
    let started = Instant::now();
    loop {
        // For an instant it is not known yet that the frontend is away, and the instance waits for it.
        let said = libvirt.refuses("vm1");
        if said.contains("h1/net-frontend is not there: start it") {
            break;
        }
        assert!(said.contains("still waits for net0: ") && started.elapsed() < LONG, "{said}");
    }
    // libvirt calls the hook once more when a start was refused.
    assert_eq!(instance(pod), None);
}

/// Kills the hook, which waits for a frontend, once that is there and the devices are leased.
fn a_killed_hook_leaves_something(pod: &mut Pod, libvirt: &Libvirt) -> Instance {
    install_hook(pod, &libvirt.directory, PATIENT);
    let (xml, said) = (libvirt.directory.join("hook.xml"), libvirt.directory.join("hook.said"));
    fs::write(&xml, libvirt.does(&["dumpxml", "vm1"])).unwrap();
    let mut hook = Command::new(libvirt.directory.join("etc/hooks/qemu.d/wadi"))
        .args(["vm1", "prepare", "begin", "-"])
        .stdin(fs::File::open(xml).unwrap())
        .stderr(fs::File::create(&said).unwrap())
        .spawn()
        .unwrap();
    pod.start_daemon("h1", Role::NetFrontend).unwrap();
    let started = Instant::now();
    while instance(pod).is_none() {
        assert!(started.elapsed() < LONG, "{}", fs::read_to_string(&said).unwrap());
        thread::sleep(Duration::from_millis(5));
    }
    hook.kill().unwrap();
    hook.wait().unwrap();
    let left = instance(pod).unwrap();
    assert!(left.labels.contains_key(vmm::hook::LABEL), "{left:?}");
    pod.wait_until_joined().unwrap();
    left
}

fn the_devices_work(pod: &mut Pod, agent: &Agent, leased: &Instance) {
    let nic = &leased.nics[0];
    assert_eq!(run(agent, "cat /sys/class/net/eth0/address").trim(), nic.mac);
    assert_eq!(run(agent, "cat /sys/class/net/eth0/mtu").trim(), nic.mtu.to_string());
    run(agent, &format!("ip address add {GUEST_ADDRESS}/24 dev eth0 && ip link set eth0 up"));
    let ping = format!("ping -c 3 -W 5 {CLIENT_ADDRESS}");
    run(agent, &ping);
    assert_eq!(run(agent, "cat /sys/block/vda/serial").trim(), leased.disks[0].serial);
    run(
        agent,
        "dd if=/dev/urandom of=/tmp/a bs=1M count=8 && dd if=/tmp/a of=/dev/vda bs=64k oflag=direct conv=fsync",
    );

    let (host, failing) = nic.nic.split_once('/').unwrap();
    pod.pull_cable(host, failing).unwrap();
    pod.wait_for_nic("vm1", nic.backup.as_deref().unwrap()).unwrap();
    run(agent, &ping);
    for role in [Role::NetFrontend, Role::BlkFrontend] {
        pod.daemon("h1", role).unwrap().kill().unwrap();
        pod.start_daemon("h1", role).unwrap();
    }
    run(
        agent,
        "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vda of=/tmp/b bs=1M count=8 iflag=direct && cmp /tmp/a /tmp/b",
    );
    // libvirt has QEMU connect again after a second.
    run(agent, &format!("for i in $(seq 30); do {ping} && exit; done; exit 1"));
    pod.plug_cable(host, failing).unwrap();
}

/// `vmm xml` has libvirt load it into QEMU, and the hook makes the file through which it is commanded.
fn the_vcpus_are_sliced_by_the_shim(pod: &Pod, libvirt: &Libvirt, agent: &Agent) {
    let vmm = |words: &[&str]| {
        let mut command = libvirt.inside(&pod.binary("vmm"));
        let output = command.args(words).arg("--directory").arg(pod.directory().join("vm")).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(output.status.success(), "{words:?}: {said}");
        said
    };
    vmm(&["attach", "--domain", "vm1", "--connect", &libvirt.uri()]);
    let _busy = agent.start("while :; do :; done", b"").unwrap();
    let said = vmm(&["slice", "vm1", "--share", "25", "--window", "10000", "--seconds", "2"]);
    assert!(said.contains("vm1: shim (QEMU was started with the shim)"), "{said}");
    let slept = said.lines().skip_while(|line| !line.starts_with("THREAD")).skip(1);
    let slept = slept.map(|line| line.split_whitespace().nth(3).unwrap().parse::<u64>().unwrap());
    assert!(slept.sum::<u64>() > 0, "{said}");
}

fn follow(pod: &Pod, libvirt: &Libvirt) -> Command {
    let mut command = libvirt.inside(&pod.binary("vmm"));
    command.args(["follow", "vm1", "--server", &server(pod), "--directory"]).arg(pod.directory().join("vm"));
    command
}

/// Whether somebody follows the domain.
fn is_followed(pod: &Pod) -> bool {
    let locked = pod.directory().join("vm/vm1.vm.followed");
    !Command::new("flock").arg("--nonblock").arg(locked).arg("true").status().unwrap().success()
}

/// What is leased to the instance meanwhile comes to the domain, which the hook has had followed.
fn devices_come_and_go(pod: &mut Pod, libvirt: &Libvirt, agent: &Agent) {
    pod.api().create_volume(&CreateVolume::new("vol1", "64M".parse().unwrap())).unwrap();
    let instances = |pod: &Pod, words: &[&str]| pod.podctl(&[&["instances"], words].concat());
    let has = |what: &str| agent.run(&format!("test -e {what}"), LONG).unwrap().success();
    let write = "dd if=/dev/urandom of=/tmp/c bs=1M count=4 && dd if=/tmp/c of=/dev/vdb bs=64k oflag=direct conv=fsync";
    let read = "dd if=/dev/vdb of=/tmp/d bs=1M count=4 iflag=direct && cmp /tmp/c /tmp/d";

    instances(pod, &["attach", "vm1", "--volume", "vol1"]).unwrap();
    wait_for("the guest to see the disk", || has("/sys/block/vdb/serial"));
    assert_eq!(run(agent, "cat /sys/block/vdb/serial").trim(), "vol1");
    run(agent, write);
    run(agent, read);
    let error = instances(pod, &["attach", "vm1", "--nic", "mtu=1400"]).unwrap_err();
    assert!(error.contains("MTU of 1400") && error.contains("its lease is given back"), "{error}");
    instances(pod, &["attach", "vm1", "--nic"]).unwrap();
    let mac = instance(pod).unwrap().nics[1].mac.clone();
    wait_for("the guest to see the NIC", || {
        agent.run("cat /sys/class/net/eth1/address", LONG).unwrap().text().trim() == mac
    });
    run(agent, "ip address add 10.77.0.3/24 dev eth1 && ip link set eth1 up");
    let ping = format!("ping -c 1 -W 1 -I eth1 {CLIENT_ADDRESS}");
    wait_for("the NIC to carry packets", || agent.run(&ping, LONG).unwrap().success());

    let second = follow(pod, libvirt).output().unwrap();
    let error = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success() && error.contains("follows vm1 already"), "{error}");

    instances(pod, &["detach", "vm1", "net1"]).unwrap();
    instances(pod, &["detach", "vm1", "vol1"]).unwrap();
    assert!(!has("/sys/class/net/eth1") && !has("/sys/block/vdb"));
    let described = libvirt.does(&["dumpxml", "vm1"]);
    assert!(!described.contains("vm1-net1.sock") && !described.contains("vm1-vol1.sock"), "{described}");

    // Nothing is left that carries packets, and then there is.
    let has_link = || run(agent, "cat /sys/class/net/eth0/carrier").trim() == "1";
    assert!(has_link());
    for (host, nic) in [("h2", "nic0"), ("h3", "nic1")] {
        pod.pull_cable(host, nic).unwrap();
    }
    wait_for("no link", || !has_link());
    for (host, nic) in [("h2", "nic0"), ("h3", "nic1")] {
        pod.plug_cable(host, nic).unwrap();
    }
    wait_for("a link", has_link);

    // Whoever follows goes on with another daemon of libvirt's.
    libvirt.restart();
    instances(pod, &["attach", "vm1", "--volume", "vol1"]).unwrap();
    wait_for("the guest to see the disk", || has("/sys/block/vdb/serial"));
    run(agent, read);
    instances(pod, &["detach", "vm1", "vol1"]).unwrap();

    // Whoever follows is killed, and the daemon has the domain followed again once it is back.
    let locked = fs::read_to_string(pod.directory().join("vm/vm1.vm.followed")).unwrap();
    let pid = locked.rsplit(|other: char| !other.is_ascii_digit()).find(|it| !it.is_empty()).unwrap();
    assert!(libvirt.inside(Path::new("kill")).args(["-s", "KILL", pid]).status().unwrap().success());
    wait_for("the follower to be gone", || !is_followed(pod));
    libvirt.restart();
    instances(pod, &["attach", "vm1", "--volume", "vol1"]).unwrap();
    wait_for("the guest to see the disk", || has("/sys/block/vdb/serial"));
    run(agent, read);

    // A guest that stands still keeps it, until it goes on.
    libvirt.does(&["suspend", "vm1"]);
    let error = instances(pod, &["detach", "vm1", "vol1", "--wait", "1"]).unwrap_err();
    assert!(error.contains("vol1 is still in vm1"), "{error}");
    assert!(libvirt.does(&["dumpxml", "vm1"]).contains("vm1-vol1.sock"));
    libvirt.does(&["resume", "vm1"]);
    wait_for("the guest to let go of it", || instance(pod).unwrap().disks.len() == 1);
    assert!(!has("/sys/block/vdb"));
}

/// QEMU and a frontend end at once and nobody gives anything back, as when the host loses its power. The frontend's next life waits for its
/// VMM, for longer than the domain may wait for its devices.
fn a_start_outlasts_a_frontend_that_waits_for_its_vmm(pod: &mut Pod, libvirt: &Libvirt, left: &Instance) {
    let wait_s = 8;
    assert!(Duration::from_secs(wait_s) < VMM_PATIENCE && VMM_PATIENCE < vmm::hook::VMM_GONE);
    put_hook(&libvirt.directory, "#!/bin/sh\nexit 0\n");
    pod.daemon("h1", Role::NetFrontend).unwrap().kill().unwrap();
    libvirt.does(&["destroy", "vm1"]);
    assert_eq!(instance(pod).unwrap().id, left.id);
    pod.start_daemon("h1", Role::NetFrontend).unwrap();
    pod.wait_until_joined().unwrap();
    install_hook(pod, &libvirt.directory, wait_s);
    libvirt.does(&["start", "vm1", "--paused"]);
    assert_ne!(instance(pod).unwrap().id, left.id);
    install_hook(pod, &libvirt.directory, PATIENT);
}

/// What was leased by hand is used, and not given back.
fn an_operators_instance_stays(pod: &Pod, libvirt: &Libvirt, made: &Instance) {
    let nic = NicRequest { mac: Some("02:00:00:00:00:77".to_owned()), ..NicRequest::default() };
    let mut request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        nics: vec![nic],
        volumes: vec!["vol0".to_owned()],
        ..CreateInstance::default()
    };
    pod.create_instance_as(&request).unwrap();
    let said = libvirt.refuses("vm1");
    assert!(said.contains("net0 has the address 02:00:00:00:00:77") && said.contains("`vmm xml"), "{said}");
    assert!(instance(pod).is_some());
    pod.api().delete_instance("vm1").unwrap();
    request.nics[0].mac = Some(made.nics[0].mac.clone());
    let kept = pod.create_instance_as(&request).unwrap();
    libvirt.does(&["start", "vm1", "--paused"]);
    libvirt.does(&["destroy", "vm1"]);
    assert_eq!(instance(pod).unwrap().id, kept.id);
}
