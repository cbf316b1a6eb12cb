//! The kernel's quota through the second version of cgroups: in a guest, whose kernel has the processor controller free for that, wherever the
//! host's has it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use guest_images::agent::{Agent, Job};
use guest_images::{Guest, Silent};
use vmm::{Vm, VmSpec};
use wadi_tests::bare_vm::bare_vm;
use wadi_tests::waiting::wait_for;

const LONG: Duration = Duration::from_mins(1);
/// Where programs of the host's are in the guest.
const CARRIED: &str = "/opt/carried";
/// Where cgroups are in the guest.
const CGROUPS: &str = "/sys/fs/cgroup";
/// To how much of their time vCPUs are held, in percent, and in what windows, in µs.
const SHARE: u64 = 20;
const WINDOW_US: u64 = 10_000;

/// A guest in which a process that looks like a QEMU spins.
struct Inside {
    agent: Agent,
    pid: String,
}

/// Threads of that process, by their ids.
type Threads = BTreeMap<u32, Thread>;

/// A thread of that process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Thread {
    name: String,
    /// Below [`CGROUPS`].
    group: String,
}

impl Inside {
    /// Starts it in the group `/machine`, which has the processor controller as libvirt's and systemd's groups have it.
    fn begin(agent: Agent) -> Self {
        for program in ["vmm", "spinning-qemu"] {
            carry(&agent, &Path::new(env!("CARGO_BIN_EXE_wadi-demo")).with_file_name(program));
        }
        let mut inside = Self { agent, pid: String::new() };
        inside.shell(&format!("mount -t cgroup2 cgroup2 {CGROUPS}; cd {CGROUPS}; mkdir machine"));
        inside.shell(&format!("echo +cpu > {CGROUPS}/cgroup.subtree_control"));
        let spin = format!(
            "echo $$ > {CGROUPS}/machine/cgroup.procs
            {} -name spinning -qmp unix:/tmp/qmp.sock > /tmp/spinning.log 2>&1 < /dev/null &
            echo $!",
            carried("spinning-qemu")
        );
        inside.shell(&spin).trim().clone_into(&mut inside.pid);
        wait_for("the process to spin", || inside.agent.run("[ -S /tmp/qmp.sock ]", LONG).unwrap().success());
        inside.shell(&format!("{} attach --pid {}", carried("vmm"), inside.pid));
        inside
    }

    /// What a command says that succeeds.
    fn shell(&self, command: &str) -> String {
        let outcome = self.agent.run(&format!("set -e\n{command}"), LONG).unwrap();
        assert!(outcome.success(), "{command}: {}", String::from_utf8_lossy(&outcome.stderr));
        outcome.text()
    }

    fn threads(&self) -> Threads {
        let look = format!(
            "for task in /proc/{}/task/*; do
                echo \"${{task##*/}};$(cat $task/comm);$(sed -n 's/^0:://p' $task/cgroup)\"
            done",
            self.pid
        );
        let said = self.shell(&look);
        let line = |line: &str| {
            let mut fields = line.split(';').map(str::to_owned);
            let mut next = || fields.next().unwrap();
            (next().parse().unwrap(), Thread { name: next(), group: next() })
        };
        said.lines().map(line).collect()
    }

    /// What is in a file of a group.
    fn read(&self, group: &str, file: &str) -> String {
        self.shell(&format!("cat {CGROUPS}{group}/{file}"))
    }

    fn stat(&self, group: &str) -> Stat {
        let text = self.read(group, "cpu.stat");
        let value = |name: &str| {
            let found = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            found.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
        };
        Stat {
            used_us: value("usage_usec"),
            periods: value("nr_periods"),
            throttled: value("nr_throttled"),
            throttled_us: value("throttled_usec"),
        }
    }

    /// Holds the vCPUs.
    fn slice(&self, share: u64, more: &str) -> Job {
        let vmm = carried("vmm");
        let command = format!(
            "exec {vmm} slice spinning --share {share} --window {WINDOW_US} --actuator cgroup {more}"
        );
        self.agent.start(&command, &[]).unwrap()
    }

    /// Waits until each vCPU has a group and was kept from running in that.
    fn wait_until_held(&self, by: &Job) -> Vec<String> {
        let mut groups = Vec::new();
        wait_for("the vCPUs to be held", || {
            assert_eq!(by.outcome(), None, "it holds nothing");
            groups = vcpus(&self.threads()).into_iter().map(|vcpu| vcpu.group).collect();
            groups.iter().all(|group| group.contains("/wadi-spinning-") && self.stat(group).throttled > 5)
        });
        groups
    }

    /// Groups of slicing, wherever they are.
    fn left(&self) -> String {
        self.shell(&format!("find {CGROUPS} -type d -name 'wadi-*'"))
    }

    /// Waits until all is as it was before the vCPUs were held.
    fn wait_until_free(&self, before: &Threads, kind: &str) {
        wait_for("the threads to be where they were", || self.threads() == *before);
        wait_for("the groups to be gone", || self.left().is_empty());
        wait_for("their home to be what it was", || self.read("/machine", "cgroup.type") == kind);
    }
}

/// What the kernel has counted of a group.
#[derive(Debug)]
struct Stat {
    used_us: u64,
    periods: u64,
    throttled: u64,
    throttled_us: u64,
}

fn vcpus(threads: &Threads) -> Vec<Thread> {
    threads.values().filter(|thread| thread.name.starts_with("CPU ")).cloned().collect()
}

/// How a carried program is started.
fn carried(program: &str) -> String {
    format!("env LD_LIBRARY_PATH={CARRIED} {CARRIED}/{program}")
}

/// Puts a program of the host's into the guest, with its libraries.
fn carry(agent: &Agent, program: &Path) {
    let listed = Command::new("ldd").arg(program).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let libraries = listed.lines().filter_map(|line| line.split_once(" => ")?.1.split(' ').next());
    for path in libraries.map(Path::new).chain([program]) {
        let to = Path::new(CARRIED).join(path.file_name().unwrap());
        let put = format!("mkdir -p {CARRIED}; cat > {0}; chmod +x {0}", to.display());
        let put = agent.start(&put, &fs::read(path).unwrap()).unwrap().wait(LONG).unwrap();
        assert!(put.success(), "{}: {}", path.display(), String::from_utf8_lossy(&put.stderr));
    }
}

#[test]
fn vcpus_are_held_by_the_second_version_of_cgroups_and_let_go() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let spec = VmSpec { memory_mib: 1024, ..bare_vm("cgroup2", &guest, directory.path()) };
    let mut vm = Vm::start(spec.clone()).unwrap();
    let inside = Inside::begin(Agent::connect(&spec.exec_socket(), LONG).unwrap());

    let before = inside.threads();
    assert!(before.values().all(|thread| thread.group == "/machine"), "{before:?}");
    vcpus_get_their_share_and_others_are_not_touched(&inside, &before);
    vcpus_go_home_when_their_agent_is_killed(&inside, &before);
    an_agent_that_was_killed_with_its_guard_is_cleared_away_after(&inside, &before);
    // As libvirt has it: a group for each vCPU, beside that of the rest.
    let vcpu = before.iter().find(|(_, thread)| thread.name == "CPU 1/TCG").unwrap().0;
    let own = format!("{CGROUPS}/machine/vcpu1");
    inside.shell(&format!(
        "mkdir {own}; echo threaded > {own}/cgroup.type; echo {vcpu} > {own}/cgroup.threads"
    ));
    inside.shell(&format!("echo +cpu > {CGROUPS}/machine/cgroup.subtree_control"));
    let before = inside.threads();
    assert_eq!(before[vcpu].group, "/machine/vcpu1");
    vcpus_get_their_share_and_others_are_not_touched(&inside, &before);
    assert_eq!(inside.read("/machine", "cgroup.subtree_control"), "cpu\n", "it is still of use");
    vcpus_go_home_when_their_agent_is_killed(&inside, &before);
    assert!(vm.stop().unwrap().success());
}

fn vcpus_get_their_share_and_others_are_not_touched(inside: &Inside, before: &Threads) {
    let kind = inside.read("/machine", "cgroup.type");
    let slice = inside.slice(SHARE, "");
    let groups = inside.wait_until_held(&slice);
    for (thread, now) in inside.threads() {
        if now.name.starts_with("CPU ") {
            assert!(now.group.starts_with(&before[&thread].group), "{now:?}");
            assert_eq!(inside.read(&now.group, "cgroup.threads"), format!("{thread}\n"));
            assert_eq!(inside.read(&now.group, "cgroup.type"), "threaded\n");
            let limit = inside.read(&now.group, "cpu.max");
            assert_eq!(limit.trim().split_once(' ').unwrap().1, WINDOW_US.to_string(), "{limit}");
        } else {
            assert_eq!(before[&thread], now, "no other thread is held");
        }
    }
    for group in groups {
        let first = inside.stat(&group);
        let mut last = inside.stat(&group);
        wait_for("100 more periods", || {
            last = inside.stat(&group);
            last.periods > first.periods + 100
        });
        let used = last.used_us - first.used_us;
        let asked = (last.periods - first.periods) * WINDOW_US * SHARE / 100;
        eprintln!("{group}: {used} of {asked} µs; {first:?}, {last:?}");
        assert!(used > asked / 2 && used < asked * 3 / 2, "{used} of {asked} µs: {first:?}, {last:?}");
        assert!(last.throttled > first.throttled && last.throttled_us > first.throttled_us);
    }
    inside.agent.signal(&slice, "TERM").unwrap();
    let ended = slice.wait(LONG).unwrap();
    assert!(ended.success(), "{ended:?}");
    inside.wait_until_free(before, &kind);
}

fn vcpus_go_home_when_their_agent_is_killed(inside: &Inside, before: &Threads) {
    let kind = inside.read("/machine", "cgroup.type");
    let slice = inside.slice(SHARE, "");
    inside.wait_until_held(&slice);
    inside.agent.signal(&slice, "KILL").unwrap();
    slice.wait(LONG).unwrap();
    inside.wait_until_free(before, &kind);
}

/// The vCPUs stay held, as is said, until another agent has had them.
fn an_agent_that_was_killed_with_its_guard_is_cleared_away_after(inside: &Inside, before: &Threads) {
    let kind = inside.read("/machine", "cgroup.type");
    let slice = inside.slice(SHARE, "");
    let groups = inside.wait_until_held(&slice);
    inside.shell(
        "for it in /proc/[0-9]*; do
            if grep -qa wadi-guard $it/cmdline; then kill -KILL ${it##*/}; fi
        done",
    );
    inside.agent.signal(&slice, "KILL").unwrap();
    slice.wait(LONG).unwrap();
    let left = vcpus(&inside.threads()).into_iter().map(|vcpu| vcpu.group);
    assert_eq!(left.collect::<Vec<_>>(), groups);
    let freed = inside.slice(100, "--seconds 1").wait(LONG).unwrap();
    assert!(freed.success(), "{freed:?}");
    inside.wait_until_free(before, &kind);
}
