//! The second choice: the kernel's processor quota (cgroup v1 and v2), each vCPU thread in a group of its own.
//!
//! The kernel takes no quota below 1 ms, so windows get longer where the share is small. It hands run time out in slices and looks at its
//! ticks, so no window is exact; what a thread got too much or too little is carried into its next quotas, ten times a second. A quota stays
//! when the agent dies, so a process of its own frees the threads then.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::carry::{Carry, Times};
use super::guard::Guard;
use super::{Actuator, Duty, VcpuUse, failed, schedstat};
use crate::{RunningVm, VmmError};

/// The least quota and period of the kernel, in µs.
const LEAST_US: u64 = 1000;
/// The longest period of the kernel, in µs.
const MOST_US: u64 = 1_000_000;
/// A corrected quota has a period that is at most so many times as long: the kernel begins a new one only when the one before is over, so after
/// one of a second, which a thread that owes much would get, nothing could be corrected for that second.
const LONGER_AT_MOST: u64 = 2;
/// Quotas are corrected no sooner than after so long, and after so many periods: else chance would be corrected.
const CORRECT_AFTER: Duration = Duration::from_millis(80);
const CORRECT_AFTER_PERIODS: u32 = 4;
/// On average over so many corrections their errors are gone.
const EXACT_OVER: Duration = Duration::from_millis(500);

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
    origin: Origin,
    /// What the names of the machine's groups begin with.
    prefix: String,
    groups: Vec<Group>,
    guard: Option<Guard>,
}

/// Where threads come from.
#[derive(Debug)]
enum Origin {
    /// All from this group.
    Group(PathBuf),
    /// Each from its own: libvirt has one for each vCPU, with limits that the domain was given.
    Own { process: u32, mounts: String },
}

#[derive(Debug)]
struct Group {
    thread: u32,
    /// Where the thread came from.
    home: PathBuf,
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
        let threads: Vec<u32> = machine.vcpus()?.iter().map(|vcpu| vcpu.thread_id).collect();
        let process = machine.process.pid;
        let (hierarchy, _) = home(&mounts, &read(Path::new(&format!("/proc/{process}/cgroup")))?)?;
        Self::begin(hierarchy, Origin::Own { process, mounts }, &machine.name, &threads)
    }

    /// Makes groups for `threads`, which are in the group `home`, below it.
    pub fn in_group(
        hierarchy: Hierarchy,
        home: &Path,
        name: &str,
        threads: &[u32],
    ) -> Result<Self, VmmError> {
        Self::begin(hierarchy, Origin::Group(home.to_owned()), name, threads)
    }

    fn begin(hierarchy: Hierarchy, origin: Origin, name: &str, threads: &[u32]) -> Result<Self, VmmError> {
        let plain = |c: char| if c.is_ascii_alphanumeric() || "-_".contains(c) { c } else { '_' };
        let name: String = name.chars().map(plain).collect();
        let prefix = format!("wadi-{name}-");
        let mut actuator = Self { hierarchy, origin, prefix, groups: Vec::new(), guard: None };
        for thread in threads {
            actuator.add(*thread)?;
        }
        actuator.guard_all()?;
        Ok(actuator)
    }

    /// What the names of this process's groups end with: the guard of another one that has just died may be about to remove that one's.
    fn suffix() -> String {
        format!("-{}", std::process::id())
    }

    /// Where a thread comes from; nothing if it has ended.
    fn home_of(&self, thread: u32) -> Result<Option<PathBuf>, VmmError> {
        let found = match &self.origin {
            Origin::Group(home) => home.clone(),
            Origin::Own { process, mounts } => {
                let path = format!("/proc/{process}/task/{thread}/cgroup");
                match fs::read_to_string(&path) {
                    Ok(groups) => home(mounts, &groups)?.1,
                    Err(error) if has_ended(&error) => return Ok(None),
                    Err(error) => return Err(failed(format!("cannot read {path}: {error}"))),
                }
            }
        };
        // What an agent left that was killed together with its guard belongs to a thread that may be no more: from there, threads go home.
        let left = found.file_name().is_some_and(|last| last.to_string_lossy().starts_with("wadi-"));
        Ok(Some(if left { found.parent().map_or(found.clone(), Path::to_owned) } else { found }))
    }

    /// Makes a group for a thread, unless it has one.
    fn add(&mut self, thread: u32) -> Result<(), VmmError> {
        if self.groups.iter().any(|group| group.thread == thread) {
            return Ok(());
        }
        let Some(home) = self.home_of(thread)? else { return Ok(()) };
        if !self.groups.iter().any(|group| group.home == home) {
            // What an agent left that was killed together with its guard.
            self.remove_empty(&home);
        }
        let path = home.join(format!("{}{thread}{}", self.prefix, Self::suffix()));
        let _alone = alone(&home)?;
        match fs::create_dir(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(format!("{}: {error}", path.display())));
            }
            _ => {}
        }
        // From here on it is removed again.
        self.groups.push(Group { thread, home: home.clone(), path: path.clone(), held: None });
        match self.hierarchy {
            Hierarchy::V1 => Ok(()),
            Hierarchy::V2 => {
                write(&path.join("cgroup.type"), "threaded")?;
                write(&home.join("cgroup.subtree_control"), "+cpu")
            }
        }
    }

    /// Has all that there are given back, however this process ends.
    fn guard_all(&mut self) -> Result<(), VmmError> {
        let groups = self.groups.iter().map(|group| (group.home.as_path(), group.path.as_path()));
        // The one before leaves when this one is there.
        self.guard = Some(Guard::start(self.members_file(), groups)?);
        Ok(())
    }

    /// Puts a thread back to where it came from. One that has ended is in no group, and its id may be another one's by now.
    fn release(&self, group: &Group) {
        if self.is_member(&group.path, group.thread) {
            let _ = write(&self.members(&group.home), &group.thread.to_string());
        }
        let _ = fs::remove_dir(&group.path);
    }

    fn is_member(&self, group: &Path, thread: u32) -> bool {
        let members = fs::read_to_string(self.members(group)).unwrap_or_default();
        members.lines().any(|member| member.parse() == Ok(thread))
    }

    /// Removes groups of this machine that no thread is in any more.
    fn remove_empty(&self, home: &Path) {
        // Not those of a machine whose name goes on where this one's ends.
        let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        let ours = |name: &str| {
            let rest = name.strip_prefix(&*self.prefix).and_then(|rest| rest.split_once('-'));
            rest.is_some_and(|(thread, process)| number(thread) && number(process))
        };
        for entry in fs::read_dir(home).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if ours(&name) {
                // The kernel refuses that for one that is in use.
                let _ = fs::remove_dir(entry.path());
            }
        }
    }

    /// Has a group of the second version be what it was before there were groups of threads below it: with the controller given to groups below,
    /// it could have no others than such.
    fn give_up(&self, home: &Path) {
        if self.hierarchy == Hierarchy::V1 {
            return;
        }
        // Another agent may have a machine in the same group, and be about to make one below it.
        let Ok(_alone) = alone(home) else { return };
        let mut below = fs::read_dir(home).into_iter().flatten().flatten();
        let kind = fs::read_to_string(home.join("cgroup.type")).unwrap_or_default();
        if kind.trim() == "domain threaded" && !below.any(|entry| entry.path().is_dir()) {
            // It is of use as it is.
            let _ = write(&home.join("cgroup.subtree_control"), "-cpu");
        }
    }

    fn members_file(&self) -> &'static str {
        match self.hierarchy {
            Hierarchy::V1 => "tasks",
            Hierarchy::V2 => "cgroup.threads",
        }
    }

    fn members(&self, group: &Path) -> PathBuf {
        group.join(self.members_file())
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
            (Hierarchy::V1, Some((quota, period))) => {
                let file = group.join("cpu.cfs_quota_us");
                if before.is_none_or(|(_, before)| before != period) {
                    // Together they must never be more than all, whatever the older ones were.
                    write(&file, "-1")?;
                    write(&group.join("cpu.cfs_period_us"), &period.to_string())?;
                }
                match fs::write(&file, quota.to_string()) {
                    // A group above has less, such as libvirt's of a vCPU whose domain was given a limit. That holds it then.
                    Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => write(&file, "-1"),
                    Err(error) => Err(cannot_write(&quota.to_string(), &file, &error)),
                    Ok(()) => Ok(()),
                }
            }
            (Hierarchy::V2, None) => write(&group.join("cpu.max"), "max"),
            (Hierarchy::V2, Some((quota, period))) => {
                write(&group.join("cpu.max"), &format!("{quota} {period}"))
            }
        }
    }
}

/// Quota and period in µs, or nothing at full duty. The period is that of `duty`, unless `asked`, which is asked of the kernel in place of
/// its part, is too small for that: then it is longer, up to [`LONGER_AT_MOST`] times, and less is not asked for.
fn quota(duty: Duty, asked: f64) -> Option<(u64, u64)> {
    if duty.run_ns >= duty.window_ns || asked >= 1.0 {
        return None;
    }
    let shortest = |run_ns: u64| {
        u64::try_from(u128::from(LEAST_US) * u128::from(duty.window_ns) / u128::from(run_ns.max(1)))
            .unwrap_or(MOST_US)
    };
    let run_ns = super::duty(asked, Duration::from_nanos(duty.window_ns)).run_ns;
    let usual = (duty.window_ns / 1000).max(shortest(duty.run_ns));
    let period = usual.max(shortest(run_ns).min(usual * LONGER_AT_MOST)).clamp(LEAST_US, MOST_US);
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

    fn exact_over(&self) -> Duration {
        EXACT_OVER
    }

    fn set(&mut self, duty: Duty) -> Result<Duration, VmmError> {
        for index in 0..self.groups.len() {
            let Group { path, thread, held, .. } = &self.groups[index];
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
            // The guard of an agent that was here before, an operator or libvirt may have moved it since.
            let mut is_elsewhere = held.is_none();
            if let Some(held) = held {
                carry.pass(now, part(held.duty));
                if carry.waits() >= correct_after(held.duty) {
                    carry.correct();
                    is_elsewhere = !self.is_member(path, *thread);
                }
            }
            if part(duty) >= 1.0 {
                // Who is not held neither owes nor is owed.
                carry.settle(now);
            }
            let limit = quota(duty, carry.asked(part(duty)));
            if held.is_none() || limit != before {
                self.limit(path, before, limit)?;
            }
            if is_elsewhere {
                match fs::write(self.members(path), thread.to_string()) {
                    // It has just been unplugged.
                    Err(error) if has_ended(&error) => continue,
                    Err(error) => {
                        return Err(failed(format!("cannot put {thread} into {}: {error}", path.display())));
                    }
                    Ok(()) => {}
                }
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
                forgiven: held.carry.forgiven(),
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
        // Those of vCPUs that were about to end when they were unplugged, and those from which threads came that another agent had left.
        for group in &self.groups {
            self.remove_empty(&group.home);
            self.give_up(&group.home);
        }
    }
}

/// Whether a thread was not found because it is no more.
fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || Errno::from_io_error(error) == Some(Errno::SRCH)
}

/// Keeps other agents, and their guards, from making and removing groups below one.
fn alone(home: &Path) -> Result<File, VmmError> {
    let failed = |error: io::Error| failed(format!("cannot lock {}: {error}", home.display()));
    let lock = File::open(home).map_err(failed)?;
    flock(&lock, FlockOperation::LockExclusive).map_err(|error| failed(error.into()))?;
    Ok(lock)
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
    fs::write(path, text).map_err(|error| cannot_write(text, path, &error))
}

fn cannot_write(text: &str, path: &Path, error: &io::Error) -> VmmError {
    failed(format!("cannot write {text} to {}: {error}", path.display()))
}

#[cfg(test)]
mod tests;
