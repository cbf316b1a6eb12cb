use std::io::Read as _;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;

const MS: u64 = 1_000_000;

#[test]
fn quotas_the_kernel_takes() {
    let exact = |duty: Duty| quota(duty, part(duty));
    assert_eq!(exact(Duty { run_ns: 5 * MS, window_ns: 10 * MS }), Some((5000, 10_000)));
    assert_eq!(exact(Duty { run_ns: MS / 20, window_ns: MS }), Some((1000, 20_000)), "5 % of 1 ms");
    assert_eq!(exact(Duty { run_ns: MS, window_ns: MS }), None);
    assert_eq!(exact(Duty { run_ns: 0, window_ns: MS }), Some((1000, 1_000_000)), "the least there is");
    // Corrected, the period stays if it can.
    let duty = Duty { run_ns: MS / 20, window_ns: MS };
    assert_eq!(quota(duty, 0.06), Some((1200, 20_000)));
    assert_eq!(quota(duty, 0.04), Some((1000, 25_000)));
    assert_eq!(quota(duty, 1.0), None, "for once it may run");
    assert_eq!(quota(duty, 0.0), Some((1000, 40_000)), "what comes after waits for the end of a period");
}

const V1: &str = "\
25 20 0:22 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
26 25 0:23 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
27 25 0:24 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
28 25 0:25 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw";

#[test]
fn the_controller_is_found_on_either_interface() {
    let groups = "9:cpu,cpuacct:/machine/vm1\n3:cpuset:/\n0::/user\n";
    assert_eq!(home(V1, groups).unwrap(), (Hierarchy::V1, "/sys/fs/cgroup/cpu,cpuacct/machine/vm1".into()));
    let tree = tempfile::tempdir().unwrap();
    let group = tree.path().join("machine/vm1");
    fs::create_dir_all(&group).unwrap();
    let mounts = format!("28 25 0:25 / {} rw - cgroup2 cgroup2 rw", tree.path().display());
    let error = home(&mounts, "0::/machine/vm1\n").unwrap_err().to_string();
    assert!(error.contains("not enabled"), "{error}");
    fs::write(group.join("cgroup.controllers"), "cpuset cpu io\n").unwrap();
    assert_eq!(home(&mounts, "0::/machine/vm1\n").unwrap(), (Hierarchy::V2, group));
    assert!(home("", "0::/\n").is_err());
    // In a container, whose root is a group of the host's.
    let mounts = "27 25 0:24 /docker/1 /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu";
    assert_eq!(home(mounts, "4:cpu:/docker/1/a\n").unwrap().1, Path::new("/sys/fs/cgroup/cpu/a"));
}

#[test]
fn groups_of_the_second_version_are_threaded() {
    let home = tempfile::tempdir().unwrap();
    let own = std::process::id();
    let text = |path: &Path| fs::read_to_string(path).unwrap();
    let group = home.path().join(format!("wadi-vm1-{own}-{own}"));
    let mut actuator = CgroupActuator::in_group(Hierarchy::V2, home.path(), "vm1", &[own, own]).unwrap();
    fs::write(group.join("cpu.stat"), "usage_usec 0\nthrottled_usec 0\n").unwrap();
    assert_eq!(text(&group.join("cgroup.type")), "threaded");
    assert_eq!(text(&home.path().join("cgroup.subtree_control")), "+cpu");
    let window = actuator.set(Duty { run_ns: 3 * MS, window_ns: 10 * MS }).unwrap();
    assert_eq!(window, Duration::from_millis(10));
    assert_eq!(text(&group.join("cpu.max")), "3000 10000");
    assert_eq!(text(&group.join("cgroup.threads")), own.to_string());
    fs::write(group.join("cpu.stat"), "usage_usec 5\nthrottled_usec 70\n").unwrap();
    assert_eq!(actuator.usage().unwrap()[0].slept, Duration::from_micros(70));
    actuator.set(Duty { run_ns: 1, window_ns: 1 }).unwrap();
    assert_eq!(text(&group.join("cpu.max")), "max");
    drop(actuator);
    assert_eq!(text(&home.path().join("cgroup.threads")), own.to_string());
}

#[test]
fn each_thread_goes_back_to_where_it_came_from() {
    // As libvirt has it: a group for each vCPU, beside that of the rest of QEMU.
    let tree = tempfile::tempdir().unwrap();
    let own = std::process::id();
    let mounts = format!("28 25 0:25 / {} rw - cgroup2 cgroup2 rw", tree.path().display());
    let groups = fs::read_to_string(format!("/proc/self/task/{own}/cgroup")).unwrap();
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap();
    let mine = tree.path().join(group);
    fs::create_dir_all(&mine).unwrap();
    fs::write(mine.join("cgroup.controllers"), "cpu").unwrap();
    let origin = Origin::Own { process: own, mounts };
    let actuator = CgroupActuator::begin(Hierarchy::V2, origin, "vm1", &[own, u32::MAX]).unwrap();
    let homes: Vec<(u32, &Path)> = actuator.groups.iter().map(|it| (it.thread, &*it.home)).collect();
    assert_eq!(homes, [(own, &*mine)], "one that has ended comes from nowhere");
}

#[test]
fn groups_of_other_machines_are_left_alone() {
    let home = tempfile::tempdir().unwrap();
    let own = std::process::id();
    // Of an agent that was killed with its guard, of one that has just made its group, and of somebody else.
    let names = ["wadi-vm-7-8", "wadi-vm-1-7-8", "wadi-vm-x"].map(|name| home.path().join(name));
    for name in &names {
        fs::create_dir(name).unwrap();
    }
    let left = home.path().join("wadi-vm-9-9");
    fs::create_dir(&left).unwrap();
    let actuator = CgroupActuator::in_group(Hierarchy::V1, &left, "vm", &[own]).unwrap();
    assert_eq!(actuator.groups[0].home, home.path(), "what was left is nobody's home");
    assert_eq!(names.map(|name| name.exists()), [false, true, true]);
    drop(actuator);
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 2);
}

/// A thread that waits to be told to end, and its id.
fn sleeper() -> (std::sync::mpsc::Sender<()>, std::thread::JoinHandle<()>, u32) {
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let (tell, told) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        tell.send(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()).unwrap();
        let _ = ended.recv();
    });
    let id = told.recv().unwrap();
    (end, thread, id)
}

#[test]
fn a_vcpu_that_is_plugged_in_is_held_and_one_that_is_unplugged_forgotten() {
    let home = tempfile::tempdir().unwrap();
    let own = std::process::id();
    let group = |thread: u32| home.path().join(format!("wadi-vm1-{thread}-{own}"));
    let said = |thread: u32, file: &str| fs::read_to_string(group(thread).join(file)).unwrap_or_default();
    // The kernel makes it along with a group.
    let counts = |thread: u32| fs::write(group(thread).join("cpu.stat"), "throttled_usec 0\n").unwrap();
    let mut actuator = CgroupActuator::in_group(Hierarchy::V2, home.path(), "vm1", &[own]).unwrap();
    counts(own);
    let quarter = Duty { run_ns: 25 * MS, window_ns: 100 * MS };
    actuator.set(quarter).unwrap();
    let carried = actuator.groups[0].held.as_ref().unwrap().began;

    let (end, thread, plugged) = sleeper();
    actuator.follow(&[own, plugged]).unwrap();
    counts(plugged);
    assert_eq!(said(plugged, "cgroup.type"), "threaded");
    actuator.set(quarter).unwrap();
    assert_eq!(said(plugged, "cgroup.threads"), plugged.to_string());
    assert_eq!(said(plugged, "cpu.max"), "25000 100000");
    let held: Vec<u32> = actuator.usage().unwrap().iter().map(|it| it.thread).collect();
    assert_eq!(held, [own, plugged]);
    assert_eq!(actuator.groups[0].held.as_ref().unwrap().began, carried, "the account of the other goes on");

    drop(end);
    thread.join().unwrap();
    // The kernel takes it out of its group, and lets the group be removed.
    fs::remove_dir_all(group(plugged)).unwrap();
    fs::create_dir(group(plugged)).unwrap();
    actuator.follow(&[own]).unwrap();
    assert!(!group(plugged).exists());
    let text = fs::read_to_string(home.path().join("cgroup.threads")).unwrap_or_default();
    assert_eq!(text, "", "nobody is moved who may have its id by now");
    actuator.set(quarter).unwrap();
    assert_eq!(actuator.usage().unwrap().len(), 1);
}

#[test]
fn who_is_free_neither_owes_nor_is_owed() {
    let home = tempfile::tempdir().unwrap();
    let own = std::process::id();
    let group = home.path().join(format!("wadi-vm1-{own}-{own}"));
    let limit = || fs::read_to_string(group.join("cpu.max")).unwrap();
    let mut actuator = CgroupActuator::in_group(Hierarchy::V2, home.path(), "vm1", &[own]).unwrap();
    fs::write(group.join("cpu.stat"), "throttled_usec 0\n").unwrap();
    let part = Duty { run_ns: 3 * MS, window_ns: 10 * MS };
    actuator.set(part).unwrap();
    assert_eq!(limit(), "3000 10000");
    // The kernel lets it run for less than it should: after a while it is owed so much that it may run for once.
    let began = Instant::now();
    while limit() != "max" {
        assert!(began.elapsed() < Duration::from_mins(1), "nothing is made good");
        let held_us = began.elapsed().as_micros();
        fs::write(group.join("cpu.stat"), format!("throttled_usec {held_us}\n")).unwrap();
        actuator.set(part).unwrap();
    }
    actuator.set(Duty { run_ns: 1, window_ns: 1 }).unwrap();
    actuator.set(part).unwrap();
    assert_eq!(limit(), "3000 10000", "what it is owed ended with its being held");
}

#[test]
fn a_thread_that_somebody_moved_away_is_put_back() {
    let home = tempfile::tempdir().unwrap();
    let own = std::process::id();
    let group = home.path().join(format!("wadi-vm1-{own}-{own}"));
    let mut actuator = CgroupActuator::in_group(Hierarchy::V2, home.path(), "vm1", &[own]).unwrap();
    fs::write(group.join("cpu.stat"), "throttled_usec 0\n").unwrap();
    let part = Duty { run_ns: 3 * MS, window_ns: 10 * MS };
    actuator.set(part).unwrap();
    // As the guard of the agent before does when it comes late.
    fs::write(group.join("cgroup.threads"), "").unwrap();
    let began = Instant::now();
    while fs::read_to_string(group.join("cgroup.threads")).unwrap() != own.to_string() {
        assert!(began.elapsed() < Duration::from_mins(1), "it stays where it was moved to");
        actuator.set(part).unwrap();
    }
}

#[test]
fn quota_and_period_are_together_never_more_than_all() {
    let home = tempfile::tempdir().unwrap();
    let own = std::process::id();
    let group = home.path().join(format!("wadi-vm1-{own}-{own}"));
    let mut actuator = CgroupActuator::in_group(Hierarchy::V1, home.path(), "vm1", &[own]).unwrap();
    fs::write(group.join("cpu.stat"), "throttled_time 0\n").unwrap();
    // What is written to either stands in one pipe, in its order.
    let pipe = home.path().join("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    for file in ["cpu.cfs_quota_us", "cpu.cfs_period_us"] {
        std::os::unix::fs::symlink(&pipe, group.join(file)).unwrap();
    }
    let mut written = fs::File::options().read(true).write(true).open(&pipe).unwrap();
    let mut written = |expected: &str| {
        let mut bytes = vec![0; 64];
        let read = written.read(&mut bytes).unwrap();
        assert_eq!(String::from_utf8_lossy(&bytes[..read]), expected);
    };
    actuator.set(Duty { run_ns: 4 * MS, window_ns: 10 * MS }).unwrap();
    written("-1100004000");
    actuator.set(Duty { run_ns: 5 * MS, window_ns: 10 * MS }).unwrap();
    written("5000");
    // With the quota of 5 ms before it, a period of 2 ms would be more than all.
    actuator.set(Duty { run_ns: MS, window_ns: 2 * MS }).unwrap();
    written("-120001000");
    actuator.set(Duty { run_ns: 1, window_ns: 1 }).unwrap();
    written("-1");
}

#[test]
fn a_vcpu_that_ends_while_it_is_moved_is_no_failure() {
    let home = tempfile::tempdir().unwrap();
    let own = std::process::id();
    let (end, thread, unplugged) = sleeper();
    let group = |thread: u32| home.path().join(format!("wadi-vm1-{thread}-{own}"));
    let mut actuator =
        CgroupActuator::in_group(Hierarchy::V1, home.path(), "vm1", &[unplugged, own]).unwrap();
    for thread in [unplugged, own] {
        fs::write(group(thread).join("cpu.stat"), "throttled_time 0\n").unwrap();
    }
    // The kernel says so of a thread that was there a moment ago.
    std::os::unix::fs::symlink(home.path().join("none/tasks"), group(unplugged).join("tasks")).unwrap();
    actuator.set(Duty { run_ns: 3 * MS, window_ns: 10 * MS }).unwrap();
    assert_eq!(fs::read_to_string(group(own).join("tasks")).unwrap(), own.to_string(), "the next is held");
    let held: Vec<u32> = actuator.usage().unwrap().iter().map(|it| it.thread).collect();
    assert_eq!(held, [own]);
    drop(end);
    thread.join().unwrap();
}
