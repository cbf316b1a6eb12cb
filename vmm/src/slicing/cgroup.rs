//! The second choice: the kernel's processor quota (cgroup v1 and v2), each vCPU thread in a group of its own.
//!
//! The kernel takes no quota below 1 ms, so windows get longer where the share is small. It hands run time out in slices and looks at its
//! ticks, so no window is exact; what a thread got too much or too little is carried into its next quotas, ten times a second. A quota stays
//! when the agent dies, so a process of its own frees the threads then.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::carry::{Carry, Times};
use super::guard::Guard;
use super::{Actuator, Duty, VcpuUse, failed, schedstat};
use crate::{RunningVm, VmmError};

/// The least quota and period of the kernel, in µs.
const LEAST_US: u64 = 1000;
/// The longest period of the kernel, in µs.
const MOST_US: u64 = 1_000_000;
/// Quotas are corrected no sooner than after so long, and after so many periods: else chance would be corrected.
const CORRECT_AFTER: Duration = Duration::from_millis(80);
const CORRECT_AFTER_PERIODS: u32 = 4;

/// Which of the two interfaces the processor controller is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hierarchy {
    /// cgroup v1: `tasks`, `cpu.cfs_quota_us`, `cpu.cfs_period_us`.
    V1,
    /// cgroup v2: threaded groups, `cgroup.threads`, `cpu.max`.
    V2,
}

/// The groups of one machine's vCPU threads. When it is dropped, the threads are where they were.
#[derive(Debug)]
pub struct CgroupActuator {
    hierarchy: Hierarchy,
    /// The group that the threads come from.
    home: PathBuf,
    /// What the names of the machine's groups begin with.
    prefix: String,
    groups: Vec<Group>,
    guard: Option<Guard>,
}

#[derive(Debug)]
struct Group {
    thread: u32,
    path: PathBuf,
    held: Option<Held>,
}

/// A thread that is held.
#[derive(Debug)]
struct Held {
    began: Instant,
    /// What it had run by then.
    before: Duration,
    duty: Duty,
    carry: Carry,
    /// What the kernel was told.
    limit: Option<(u64, u64)>,
}

impl CgroupActuator {
    /// Makes groups for the vCPU threads of `machine`.
    pub fn new(machine: &RunningVm) -> Result<Self, VmmError> {
        let mounts = read(Path::new("/proc/self/mountinfo"))?;
        let threads: Vec<u32> = machine.monitor.vcpus()?.iter().map(|vcpu| vcpu.thread_id).collect();
        let groups = read(Path::new(&format!("/proc/{}/cgroup", machine.process.pid)))?;
        let (hierarchy, home) = home(&mounts, &groups)?;
        Self::in_group(hierarchy, &home, &machine.name, &threads)
    }

    /// Makes groups for `threads`, which are in the group `home`, below it.
    pub fn in_group(
        hierarchy: Hierarchy,
        home: &Path,
        name: &str,
        threads: &[u32],
    ) -> Result<Self, VmmError> {
        let plain = |c: char| if c.is_ascii_alphanumeric() || "-_".contains(c) { c } else { '_' };
        let name: String = name.chars().map(plain).collect();
        // What an agent left that was killed together with its guard belongs to a thread that may be no more: from there, threads go home.
        let home = if home.file_name().is_some_and(|last| last.to_string_lossy().starts_with("wadi-")) {
            home.parent().unwrap_or(home)
        } else {
            home
        };
        let prefix = format!("wadi-{name}-");
        let mut actuator = Self { hierarchy, home: home.to_owned(), prefix, groups: Vec::new(), guard: None };
        // What an agent left that was killed together with its guard.
        actuator.remove_empty("");
        for thread in threads {
            actuator.add(*thread)?;
        }
        if hierarchy == Hierarchy::V2 {
            write(&home.join("cgroup.subtree_control"), "+cpu")?;
        }
        actuator.guard_all()?;
        Ok(actuator)
    }

    /// What the names of this process's groups end with: the guard of another one that has just died may be about to remove that one's.
    fn suffix() -> String {
        format!("-{}", std::process::id())
    }

    /// Makes a group for a thread, unless it has one.
    fn add(&mut self, thread: u32) -> Result<(), VmmError> {
        if self.groups.iter().any(|group| group.thread == thread) {
            return Ok(());
        }
        let path = self.home.join(format!("{}{thread}{}", self.prefix, Self::suffix()));
        match fs::create_dir(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(format!("{}: {error}", path.display())));
            }
            _ => {}
        }
        // From here on it is removed again.
        self.groups.push(Group { thread, path: path.clone(), held: None });
        match self.hierarchy {
            Hierarchy::V1 => Ok(()),
            Hierarchy::V2 => write(&path.join("cgroup.type"), "threaded"),
        }
    }

    /// Has all that there are given back, however this process ends.
    fn guard_all(&mut self) -> Result<(), VmmError> {
        let groups = self.groups.iter().map(|group| (group.thread, group.path.as_path()));
        // The one before leaves when this one is there.
        self.guard = Some(Guard::start(&self.members(&self.home), groups)?);
        Ok(())
    }

    /// Puts a thread back to where it came from. One that has ended is in no group, and its id may be another one's by now.
    fn release(&self, group: &Group) {
        let members = fs::read_to_string(self.members(&group.path)).unwrap_or_default();
        if members.lines().any(|member| member.parse() == Ok(group.thread)) {
            let _ = write(&self.members(&self.home), &group.thread.to_string());
        }
        let _ = fs::remove_dir(&group.path);
    }

    /// Removes groups of this machine that no thread is in any more.
    fn remove_empty(&self, suffix: &str) {
        for entry in fs::read_dir(&self.home).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(&self.prefix) && name.ends_with(suffix) {
                // The kernel refuses that for one that is in use.
                let _ = fs::remove_dir(entry.path());
            }
        }
    }

    fn members(&self, group: &Path) -> PathBuf {
        group.join(match self.hierarchy {
            Hierarchy::V1 => "tasks",
            Hierarchy::V2 => "cgroup.threads",
        })
    }

    /// Tells the kernel, which was told `before`.
    fn limit(
        &self,
        group: &Path,
        before: Option<(u64, u64)>,
        quota_and_period: Option<(u64, u64)>,
    ) -> Result<(), VmmError> {
        match (self.hierarchy, quota_and_period) {
            (Hierarchy::V1, None) => write(&group.join("cpu.cfs_quota_us"), "-1"),
            (Hierarchy::V1, Some((quota, period))) if before.is_some_and(|(_, before)| before == period) => {
                write(&group.join("cpu.cfs_quota_us"), &quota.to_string())
            }
            (Hierarchy::V1, Some((quota, period))) => {
                // Together they must never be more than all, whatever the older ones were.
                write(&group.join("cpu.cfs_quota_us"), "-1")?;
                write(&group.join("cpu.cfs_period_us"), &period.to_string())?;
                write(&group.join("cpu.cfs_quota_us"), &quota.to_string())
            }
            (Hierarchy::V2, None) => write(&group.join("cpu.max"), "max"),
            (Hierarchy::V2, Some((quota, period))) => {
                write(&group.join("cpu.max"), &format!("{quota} {period}"))
            }
        }
    }
}

/// Quota and period in µs, or nothing at full duty. The period is that of `duty`, unless `asked`, which is asked of the kernel in place of
/// its part, is too small for that.
fn quota(duty: Duty, asked: f64) -> Option<(u64, u64)> {
    if duty.run_ns >= duty.window_ns || asked >= 1.0 {
        return None;
    }
    let shortest = |run_ns: u64| {
        u64::try_from(u128::from(LEAST_US) * u128::from(duty.window_ns) / u128::from(run_ns.max(1)))
            .unwrap_or(MOST_US)
    };
    let run_ns = super::duty(asked, Duration::from_nanos(duty.window_ns)).run_ns;
    let period =
        (duty.window_ns / 1000).max(shortest(duty.run_ns)).max(shortest(run_ns)).clamp(LEAST_US, MOST_US);
    let quota = u64::try_from(u128::from(period) * u128::from(run_ns) / u128::from(duty.window_ns));
    Some((quota.unwrap_or(period).max(LEAST_US), period))
}

/// T_R/T_W.
#[expect(clippy::cast_precision_loss, reason = "parts of a second")]
fn part(duty: Duty) -> f64 {
    duty.run_ns as f64 / duty.window_ns.max(1) as f64
}

/// How long a quota is left as it is.
fn correct_after(duty: Duty) -> Duration {
    let period = quota(duty, part(duty)).map_or(Duration::ZERO, |(_, period)| Duration::from_micros(period));
    CORRECT_AFTER.max(period * CORRECT_AFTER_PERIODS)
}

impl Actuator for CgroupActuator {
    fn name(&self) -> &'static str {
        match self.hierarchy {
            Hierarchy::V1 => "cgroup v1",
            Hierarchy::V2 => "cgroup v2",
        }
    }

    fn set(&mut self, duty: Duty) -> Result<Duration, VmmError> {
        for index in 0..self.groups.len() {
            let Group { path, thread, held } = &self.groups[index];
            let Some(time) = schedstat::times(*thread).map(|times| times.ran) else {
                // A vCPU that was unplugged.
                continue;
            };
            let began =
                held.as_ref().map_or_else(|| (Instant::now(), time), |held| (held.began, held.before));
            let now = Times {
                elapsed: began.0.elapsed(),
                ran: time.saturating_sub(began.1),
                held: throttled(path)?,
            };
            let (mut carry, before) = match held {
                Some(held) => (held.carry, held.limit),
                None => (Carry::begin(now), None),
            };
            if let Some(held) = held {
                carry.pass(now, part(held.duty));
                if carry.waits() >= correct_after(held.duty) {
                    carry.correct();
                }
            }
            if part(duty) >= 1.0 {
                // Who is not held neither owes nor is owed.
                carry = Carry::begin(now);
            }
            let limit = quota(duty, carry.asked(part(duty)));
            if held.is_none() || limit != before {
                self.limit(path, before, limit)?;
            }
            if held.is_none() {
                write(&self.members(path), &thread.to_string())?;
            }
            self.groups[index].held = Some(Held { began: began.0, before: began.1, duty, carry, limit });
        }
        let period = quota(duty, part(duty)).map(|(_, period)| Duration::from_micros(period));
        Ok(period.unwrap_or(Duration::from_nanos(duty.window_ns)))
    }

    fn follow(&mut self, threads: &[u32]) -> Result<(), VmmError> {
        for thread in threads {
            self.add(*thread)?;
        }
        let (kept, gone): (Vec<Group>, Vec<Group>) =
            self.groups.drain(..).partition(|group| threads.contains(&group.thread));
        self.groups = kept;
        for group in &gone {
            self.release(group);
        }
        self.guard_all()
    }

    fn usage(&self) -> Result<Vec<VcpuUse>, VmmError> {
        let mut found = Vec::new();
        for group in &self.groups {
            let (Some(held), Some(time)) =
                (&group.held, schedstat::times(group.thread).map(|times| times.ran))
            else {
                continue;
            };
            found.push(VcpuUse {
                thread: group.thread,
                elapsed: held.began.elapsed(),
                ran: time.saturating_sub(held.before),
                slept: throttled(&group.path)?,
                ..VcpuUse::default()
            });
        }
        Ok(found)
    }
}

impl Drop for CgroupActuator {
    fn drop(&mut self) {
        for group in &self.groups {
            // The guard has nothing to do after that.
            self.release(group);
        }
        // Those of vCPUs that were about to end when they were unplugged.
        self.remove_empty(&Self::suffix());
    }
}

/// For how long the kernel has held a group back.
fn throttled(group: &Path) -> Result<Duration, VmmError> {
    let text = read(&group.join("cpu.stat"))?;
    let value =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    let v1 = value("throttled_time ").map(Duration::from_nanos);
    Ok(v1.or_else(|| value("throttled_usec ").map(Duration::from_micros)).unwrap_or_default())
}

/// Where the processor controller has the group of a process, by `/proc/self/mountinfo` and its `/proc/PID/cgroup`.
fn home(mounts: &str, groups: &str) -> Result<(Hierarchy, PathBuf), VmmError> {
    let mount = |kind: &str, option: Option<&str>| {
        mounts.lines().find_map(|line| {
            let (before, after) = line.split_once(" - ")?;
            let (mut fields, mut after) = (before.split(' ').skip(3), after.split(' '));
            let (root, point) = (fields.next()?, fields.next()?);
            let options = (after.next()? == kind).then(|| after.nth(1)).flatten()?;
            let fits = option.is_none_or(|option| options.split(',').any(|it| it == option));
            fits.then(|| (root.to_owned(), PathBuf::from(point)))
        })
    };
    let group = |fits: &dyn Fn(&str) -> bool| {
        groups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let controllers = fields.next()?;
            fits(controllers).then(|| fields.next()).flatten()
        })
    };
    let below = |(root, point): (String, PathBuf), group: &str| {
        let inside = group.strip_prefix(root.trim_end_matches('/')).unwrap_or(group);
        point.join(inside.trim_start_matches('/'))
    };
    // A kernel has each controller on one of the two.
    if let (Some(mount), Some(group)) =
        (mount("cgroup", Some("cpu")), group(&|list| list.split(',').any(|it| it == "cpu")))
    {
        return Ok((Hierarchy::V1, below(mount, group)));
    }
    match (mount("cgroup2", None), group(&str::is_empty)) {
        (Some(mount), Some(group)) => {
            let path = below(mount, group);
            let controllers = fs::read_to_string(path.join("cgroup.controllers")).unwrap_or_default();
            if controllers.split_whitespace().any(|it| it == "cpu") {
                Ok((Hierarchy::V2, path))
            } else {
                Err(failed(format!("the processor controller is not enabled in {}", path.display())))
            }
        }
        _ => Err(failed("no cgroup file system is mounted".to_owned())),
    }
}

fn read(path: &Path) -> Result<String, VmmError> {
    fs::read_to_string(path).map_err(|error| failed(format!("cannot read {}: {error}", path.display())))
}

fn write(path: &Path, text: &str) -> Result<(), VmmError> {
    fs::write(path, text)
        .map_err(|error| failed(format!("cannot write {text} to {}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
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
    }

    const V1: &str = "\
25 20 0:22 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
26 25 0:23 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
27 25 0:24 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
28 25 0:25 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw";

    #[test]
    fn the_controller_is_found_on_either_interface() {
        let groups = "9:cpu,cpuacct:/machine/vm1\n3:cpuset:/\n0::/user\n";
        assert_eq!(
            home(V1, groups).unwrap(),
            (Hierarchy::V1, "/sys/fs/cgroup/cpu,cpuacct/machine/vm1".into())
        );
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
        assert_eq!(
            actuator.groups[0].held.as_ref().unwrap().began,
            carried,
            "the account of the other goes on"
        );

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
}
