//! The machines that run on this host: one file for each, in the directory that their sockets are in.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use pod_protocol::daemon::{LockError, LockFile, open_lock};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::{MonitorAddress, Process, VcpuThread, VmmError};

/// What the name of a machine's file ends with.
const SUFFIX: &str = ".vm.json";

/// Who started a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// `vmm run`.
    Run,
    /// Somebody else; it was found with `vmm attach`.
    Attached,
}

/// A machine that runs on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningVm {
    /// Its name: the instance's, for those that `vmm run` started.
    pub name: String,
    /// Its QEMU.
    #[serde(flatten)]
    pub process: Process,
    /// Who started it.
    pub origin: Origin,
    /// Where its monitor is.
    pub monitor: MonitorAddress,
    /// Where the shim in its QEMU is commanded, if it was started with one.
    #[serde(default)]
    pub vcpu_control: Option<PathBuf>,
    /// Files to remove when it is gone.
    #[serde(default)]
    pub files: Vec<PathBuf>,
}

impl RunningVm {
    /// One whose QEMU is this process, and whose monitor is there.
    #[cfg(test)]
    pub(crate) fn of_this_process(monitor: PathBuf) -> Self {
        Self {
            name: "vm1".to_owned(),
            // It runs.
            process: Process::with_id(std::process::id()).unwrap(),
            origin: Origin::Run,
            monitor: MonitorAddress::Socket { path: monitor },
            vcpu_control: None,
            files: Vec::new(),
        }
    }

    /// The threads of its vCPUs, by number. Whoever listens at its monitor need not be its QEMU: another one that was told the same
    /// socket takes it away, and libvirt may speak of a domain of another host.
    pub fn vcpus(&self) -> Result<Vec<VcpuThread>, VmmError> {
        let vcpus = self.monitor.vcpus()?;
        // One that is just unplugged is nobody's.
        let mut owners = vcpus.iter().filter_map(|vcpu| Process::of_thread(vcpu.thread_id)).peekable();
        if owners.peek().is_some() && owners.all(|owner| owner == self.process) {
            return Ok(vcpus);
        }
        let reason = format!("the monitor at {} is not that of process {}", self.monitor, self.process.pid);
        Err(VmmError::Machine { reason })
    }
}

/// What a look at the directory showed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Running {
    /// The machines that run, by name.
    pub machines: Vec<RunningVm>,
    /// Those that have ended without a word; their files are removed.
    pub ended: Vec<String>,
    /// Files that say nothing, and why; they stay.
    pub unreadable: Vec<String>,
}

/// The machines of one directory.
#[derive(Debug, Clone)]
pub struct Registry {
    directory: PathBuf,
}

/// No other process changes the directory's machines while this is there.
#[derive(Debug)]
pub(crate) struct Locked(File);

impl Drop for Locked {
    fn drop(&mut self) {
        // A child that another thread is just starting may have the file as well. The lock ends with the last of them if this fails.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

impl Registry {
    /// The machines of `directory`, which need not exist yet.
    pub fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    /// The machines that run. Files of those that have ended are removed, with their sockets.
    pub fn running(&self) -> Result<Running, VmmError> {
        let mut running = Running::default();
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(running),
            Err(source) => return Err(self.failed(source)),
        };
        let _locked = self.lock()?;
        for entry in entries {
            let path = entry.map_err(|source| self.failed(source))?.path();
            if !path.as_os_str().as_encoded_bytes().ends_with(SUFFIX.as_bytes()) {
                continue;
            }
            match read(&path) {
                Ok(Some(machine)) if machine.process.runs() => running.machines.push(machine),
                Ok(Some(machine)) => {
                    forget(&path, &machine);
                    running.ended.push(machine.name);
                }
                Ok(None) => {}
                Err(reason) => running.unreadable.push(format!("{}: {reason}", path.display())),
            }
        }
        running.machines.sort_by(|a, b| a.name.cmp(&b.name));
        running.ended.sort();
        Ok(running)
    }

    /// The machine with this name.
    pub fn find(&self, name: &str) -> Result<RunningVm, VmmError> {
        let running = self.running()?;
        let known: Vec<&str> = running.machines.iter().map(|machine| machine.name.as_str()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        let reason = format!(
            "no machine {name} runs here ({} has: {known}); find one with `vmm attach`",
            self.directory.display()
        );
        let found = running.machines.into_iter().find(|machine| machine.name == name);
        found.ok_or(VmmError::Machine { reason })
    }

    /// Fails if a machine of this name runs.
    pub fn refuse_a_second(&self, name: &str) -> Result<(), VmmError> {
        self.refuse_another(&self.lock()?, name, None)
    }

    /// Adds a machine. Another one of its name that runs is not replaced.
    pub fn add(&self, machine: &RunningVm) -> Result<(), VmmError> {
        let locked = self.lock()?;
        self.refuse_another(&locked, &machine.name, Some(machine.process))?;
        match read(&self.path(&machine.name)) {
            // Whoever started it has noted more of it.
            Ok(Some(known)) if known.process == machine.process && known.origin == Origin::Run => Ok(()),
            _ => self.write(&locked, machine),
        }
    }

    /// Forgets a machine that has ended; another one of its name stays.
    pub fn remove(&self, machine: &RunningVm) -> Result<(), VmmError> {
        let _locked = self.lock()?;
        let path = self.path(&machine.name);
        if let Ok(Some(written)) = read(&path)
            && written.process == machine.process
        {
            forget(&path, &written);
        }
        Ok(())
    }

    /// A machine is followed by whoever has this, and by nobody else.
    pub(crate) fn lock_machine(&self, machine: &RunningVm) -> Result<LockFile, VmmError> {
        let name = &machine.name;
        self.lock_beside(machine, FOLLOWED, |who| {
            format!("{who} follows {name} already: its `vmm run`, or another `vmm follow`")
        })
    }

    /// The vCPUs of a machine are sliced by whoever has this, and by nobody else: each would undo what the other orders.
    pub fn lock_vcpus(&self, machine: &RunningVm) -> Result<LockFile, VmmError> {
        let name = &machine.name;
        self.lock_beside(machine, SLICED, |who| {
            format!("{who} slices the vCPUs of {name} already: end that `vmm slice {name}` first")
        })
    }

    /// Locks a file beside a machine's own. It says which process has it.
    fn lock_beside(
        &self,
        machine: &RunningVm,
        extension: &str,
        taken: impl FnOnce(&str) -> String,
    ) -> Result<LockFile, VmmError> {
        LockFile::acquire(&self.path(&machine.name).with_extension(extension)).map_err(|error| match error {
            LockError::Held { holder, .. } => VmmError::Machine { reason: taken(&holder) },
            LockError::Io { source, .. } => self.failed(source),
        })
    }

    /// Makes the directory, and keeps others out of it.
    pub(crate) fn lock(&self) -> Result<Locked, VmmError> {
        fs::create_dir_all(&self.directory).map_err(|source| self.failed(source))?;
        let file = open_lock(&self.directory.join(".lock")).map_err(|source| self.failed(source))?;
        flock(&file, FlockOperation::LockExclusive).map_err(|error| self.failed(error.into()))?;
        Ok(Locked(file))
    }

    /// Fails if a machine of this name runs, unless it is `own`. One that has ended is forgotten: whoever still follows that, because
    /// he has not seen it yet, is no hindrance to its successor.
    pub(crate) fn refuse_another(
        &self,
        _: &Locked,
        name: &str,
        own: Option<Process>,
    ) -> Result<(), VmmError> {
        let path = self.path(name);
        match read(&path) {
            Ok(Some(other)) if Some(other.process) == own => Ok(()),
            Ok(Some(other)) if other.process.runs() => Err(VmmError::Machine {
                reason: format!(
                    "{0} runs already, as process {1}: end it with `vmm stop {0}`",
                    other.name, other.process.pid
                ),
            }),
            Ok(Some(ended)) => {
                forget(&path, &ended);
                Ok(())
            }
            // What cannot be read is replaced.
            _ => Ok(()),
        }
    }

    /// Writes a machine's file, so that it is there as a whole or not at all.
    pub(crate) fn write(&self, _: &Locked, machine: &RunningVm) -> Result<(), VmmError> {
        let path = self.path(&machine.name);
        let partial = path.with_extension("new");
        let text = serde_json::to_vec_pretty(machine).map_err(|error| self.failed(error.into()))?;
        fs::write(&partial, text)
            .and_then(|()| fs::rename(&partial, &path))
            .map_err(|source| self.failed(source))
    }

    /// Where is noted what a process says that follows a machine and has nobody to say it to.
    pub fn log_of_following(&self, name: &str) -> PathBuf {
        self.beside(name, "-follow.log")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.beside(name, SUFFIX)
    }

    fn beside(&self, name: &str, suffix: &str) -> PathBuf {
        // A domain of somebody else may be called anything.
        let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
        let name: String = name.chars().map(plain).collect();
        self.directory.join(format!("{name}{suffix}"))
    }

    fn failed(&self, source: io::Error) -> VmmError {
        VmmError::Directory { path: self.directory.clone(), source }
    }
}

/// What a file says; none if it has just been removed.
fn read(path: &Path) -> Result<Option<RunningVm>, String> {
    match fs::read(path) {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|error| error.to_string()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// What the names of the files beside a machine's own end with that are locked by whoever follows or slices it: its own is another one
/// once it was written again.
const FOLLOWED: &str = "followed";
const SLICED: &str = "sliced";

fn forget(path: &Path, machine: &RunningVm) {
    let locks = [FOLLOWED, SLICED].map(|extension| path.with_extension(extension));
    for file in machine.files.iter().chain(&locks).map(PathBuf::as_path).chain([path]) {
        // It may be gone already; what stays is looked at again.
        let _ = fs::remove_file(file);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn machine(name: &str, process: Process) -> RunningVm {
        RunningVm { name: name.to_owned(), process, ..RunningVm::of_this_process("/run/m.sock".into()) }
    }

    fn own() -> Process {
        Process::with_id(std::process::id()).unwrap()
    }

    #[test]
    fn machines_that_ended_are_forgotten_with_their_sockets() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::new(directory.path());
        let socket = directory.path().join("gone-qmp.sock");
        fs::write(&socket, "").unwrap();
        let earlier = Process { started: own().started - 1, ..own() };
        registry.add(&RunningVm { files: vec![socket.clone()], ..machine("gone", earlier) }).unwrap();
        registry.add(&machine("here", own())).unwrap();
        let running = registry.running().unwrap();
        assert_eq!(running.machines, [machine("here", own())]);
        assert_eq!(running.ended, ["gone"]);
        assert!(!socket.exists());
        assert_eq!(registry.running().unwrap().ended, Vec::<String>::new());
    }

    #[test]
    fn a_machine_that_runs_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::new(directory.path());
        let parent = Process::with_id(rustix::process::getppid().unwrap().as_raw_pid().unsigned_abs());
        registry.add(&machine("a", own())).unwrap();
        registry.add(&machine("a", own())).unwrap();
        let error = registry.add(&machine("a", parent.unwrap())).unwrap_err().to_string();
        assert!(error.contains(&std::process::id().to_string()) && error.contains("vmm stop a"), "{error}");
        // One that ends late does not take its successor along.
        registry.remove(&machine("a", parent.unwrap())).unwrap();
        assert_eq!(registry.running().unwrap().machines.len(), 1);
        registry.remove(&machine("a", own())).unwrap();
        assert_eq!(registry.running().unwrap(), Running::default());
    }

    #[test]
    fn one_at_a_time_follows_a_machine() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::new(directory.path());
        registry.add(&machine("a", own())).unwrap();
        let first = registry.lock_machine(&machine("a", own())).unwrap();
        let error = registry.lock_machine(&machine("a", own())).unwrap_err().to_string();
        assert!(error.contains("follows a already"), "{error}");
        registry.add(&machine("a", own())).unwrap();
        assert!(registry.lock_machine(&machine("a", own())).is_err(), "it was noted again");
        drop(first);
        registry.lock_machine(&machine("a", own())).unwrap();
        registry.remove(&machine("a", own())).unwrap();
        assert!(!registry.path("a").with_extension(FOLLOWED).exists());
    }

    #[test]
    fn one_at_a_time_slices_a_machine() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::new(directory.path());
        registry.add(&machine("a", own())).unwrap();
        let first = registry.lock_vcpus(&machine("a", own())).unwrap();
        let error = registry.lock_vcpus(&machine("a", own())).unwrap_err().to_string();
        let expected = format!("process {} slices the vCPUs of a already", std::process::id());
        assert!(error.contains(&expected), "{error}");
        registry.lock_machine(&machine("a", own())).unwrap();
        drop(first);
        registry.lock_vcpus(&machine("a", own())).unwrap();
        registry.remove(&machine("a", own())).unwrap();
        assert!(!registry.path("a").with_extension(SLICED).exists());
    }

    #[test]
    fn who_still_follows_a_machine_that_ended_is_no_hindrance_to_the_next() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::new(directory.path());
        let earlier = machine("a", Process { started: own().started - 1, ..own() });
        registry.add(&earlier).unwrap();
        let _has_not_seen_it = registry.lock_machine(&earlier).unwrap();
        let locked = registry.lock().unwrap();
        registry.refuse_another(&locked, "a", None).unwrap();
        registry.write(&locked, &machine("a", own())).unwrap();
        registry.lock_machine(&machine("a", own())).unwrap();
    }

    #[test]
    fn one_that_was_run_here_and_is_found_once_more_keeps_its_files() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::new(directory.path());
        let run = RunningVm { files: vec![directory.path().join("socket")], ..machine("a", own()) };
        registry.add(&run).unwrap();
        registry.add(&RunningVm { origin: Origin::Attached, ..machine("a", own()) }).unwrap();
        assert_eq!(registry.find("a").unwrap(), run);
    }

    #[test]
    fn files_of_machines_lie_in_the_directory_whatever_these_are_called() {
        let registry = Registry::new(Path::new("/run/vm"));
        let name = "../../etc/a b";
        assert_eq!(registry.path(name), Path::new("/run/vm/.._.._etc_a_b.vm.json"));
        assert_eq!(registry.log_of_following(name), Path::new("/run/vm/.._.._etc_a_b-follow.log"));
    }

    #[test]
    fn what_cannot_be_read_is_told_and_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::new(directory.path());
        let path = directory.path().join("odd.vm.json");
        fs::write(&path, "{ \"name\": 1").unwrap();
        let running = registry.running().unwrap();
        assert!(running.unreadable[0].contains("odd.vm.json"), "{running:?}");
        assert!(path.exists());
        registry.add(&machine("odd", own())).unwrap();
        assert_eq!(registry.find("odd").unwrap().process, own());
        let error = registry.find("other").unwrap_err().to_string();
        assert!(error.contains("has: odd"), "{error}");
    }

    #[test]
    fn nobody_but_their_owner_can_open_what_is_locked() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::new(directory.path());
        let files = [".lock", "a.vm.followed", "a.vm.sliced"].map(|name| directory.path().join(name));
        for file in &files[..2] {
            fs::write(file, "").unwrap();
            fs::set_permissions(file, fs::Permissions::from_mode(0o644)).unwrap();
        }
        registry.add(&machine("a", own())).unwrap();
        let _followed = registry.lock_machine(&machine("a", own())).unwrap();
        let _sliced = registry.lock_vcpus(&machine("a", own())).unwrap();
        for file in files {
            let mode = fs::metadata(&file).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", file.display());
        }
    }

    #[test]
    fn names_stay_in_the_directory() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::new(&directory.path().join("vm"));
        registry.add(&machine("../../a", own())).unwrap();
        assert_eq!(registry.running().unwrap().machines[0].name, "../../a");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn no_directory_has_no_machines() {
        let directory = tempfile::tempdir().unwrap();
        let registry = Registry::new(&directory.path().join("none"));
        assert_eq!(registry.running().unwrap(), Running::default());
        assert!(!directory.path().join("none").exists());
    }
}
