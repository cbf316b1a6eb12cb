//! What this process has made outside itself, and how all of it goes away again, however the process ends.
//!
//! Namespaces, files and processes carry the process id of their runner in their names. A *janitor* (a shell that
//! waits for the end of a pipe from the runner) removes them once the runner is gone, be it by a panic, a signal or
//! `kill -9`; what even that leaves behind, the next runner sweeps.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Sender};
use std::sync::{LazyLock, Mutex, OnceLock, PoisonError};
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Where a runner's state lies, on disk.
const STATE: &str = "/tmp";
/// Where a runner's pools lie.
const SHARED_MEMORY: &str = "/dev/shm";
/// Where iproute2 keeps named network namespaces.
const NAMESPACES: &str = "/run/netns";

/// Removes everything whose name begins with `$1-`, or is `$1`, once the pipe on its standard input ends.
const JANITOR: &str = r#"
read -r word
[ "$word" = keep ] && exit 0
for path in /run/netns/"$1"-*; do
  [ -e "$path" ] || continue
  name=${path##*/}
  kill -9 $(ip netns pids "$name") 2>/dev/null
  ip netns del "$name"
done
rm -rf /tmp/"$1" /tmp/"$1"-* /dev/shm/"$1" /dev/shm/"$1"-*
"#;

struct Runner {
    janitor: Mutex<Option<ChildStdin>>,
    spawner: Mutex<Sender<SpawnRequest>>,
    interrupted: OnceLock<()>,
}

type SpawnRequest = (Command, Sender<io::Result<Child>>);

static RUNNER: LazyLock<Runner> = LazyLock::new(|| {
    sweep(false);
    report_panics();
    Runner {
        janitor: Mutex::new(start_janitor()),
        spawner: Mutex::new(start_spawner()),
        interrupted: OnceLock::new(),
    }
});

/// The start of every name that this process gives to something outside itself.
pub(crate) fn prefix() -> String {
    LazyLock::force(&RUNNER);
    format!("wadi-{}", std::process::id())
}

/// A directory on disk for `tag`, made new.
pub(crate) fn state_directory(tag: &str) -> io::Result<PathBuf> {
    fresh_directory(Path::new(STATE).join(tag))
}

/// A directory in shared memory for `tag`, made new.
pub(crate) fn memory_directory(tag: &str) -> io::Result<PathBuf> {
    fresh_directory(Path::new(SHARED_MEMORY).join(tag))
}

/// A directory in shared memory that goes when this is dropped, or else with this process, however that ends.
pub fn memory_tempdir() -> io::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix(&format!("{}-", prefix())).tempdir_in(SHARED_MEMORY)
}

fn fresh_directory(path: PathBuf) -> io::Result<PathBuf> {
    fs::create_dir(&path).map_err(|error| {
        io::Error::new(error.kind(), format!("cannot create {}: {error}", path.display()))
    })?;
    Ok(path)
}

/// Starts a child that the kernel kills when this process dies, unless the pod is to be kept. It gets no signals from
/// the terminal.
pub fn spawn(mut command: Command) -> io::Result<Child> {
    command.process_group(0);
    let (reply, answer) = mpsc::channel();
    let gone = || io::Error::other("the thread that starts programs is gone");
    RUNNER
        .spawner
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .send((command, reply))
        .map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}

/// The words to put before a command so that it dies with this process.
pub fn tether() -> [&'static str; 4] {
    ["setpriv", "--pdeathsig", "KILL", "--"]
}

/// Lets everything outlive this process; `tag` is a pod of it.
pub(crate) fn keep_everything(tag: &str) -> io::Result<()> {
    fs::write(Path::new(STATE).join(tag).join("keep"), "")?;
    let mut janitor = RUNNER.janitor.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pipe) = janitor.as_mut() {
        pipe.write_all(b"keep\n")?;
    }
    Ok(())
}

/// On Ctrl-C and its kin: removes everything, then ends this process as the signal would have.
pub fn remove_on_signals() -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    LazyLock::force(&RUNNER);
    thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            let _ = RUNNER.interrupted.set(());
            eprintln!("\ninterrupted: removing the pod");
            remove(&prefix());
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

/// Whether a signal is about to end this process: what fails now fails because of that.
pub fn interrupted() -> bool {
    RUNNER.interrupted.get().is_some()
}

/// Removes what runners that are gone have left behind, with `kept` also what they were told to keep. Returns how many
/// runners that were.
pub fn sweep(kept: bool) -> usize {
    let mut prefixes = BTreeSet::new();
    for directory in [NAMESPACES, STATE, SHARED_MEMORY] {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let pid = name.strip_prefix("wadi-").and_then(|rest| rest.split('-').next());
            if let Some(pid) = pid.and_then(|pid| pid.parse::<u32>().ok()) {
                prefixes.insert(pid);
            }
        }
    }
    prefixes.retain(|pid| {
        let alive = Path::new("/proc").join(pid.to_string()).exists();
        let keep = Path::new(STATE).join(format!("wadi-{pid}")).join("keep").exists();
        // A kept pod is marked: its runner is gone, and its process id may be somebody else's by now.
        if keep { kept } else { !alive }
    });
    for pid in &prefixes {
        remove(&format!("wadi-{pid}"));
    }
    prefixes.len()
}

/// The namespaces and files whose name begins with `tag` and `-`, or is `tag`. What only begins likewise is another runner's, whose
/// process id is longer.
pub fn traces(tag: &str) -> Vec<PathBuf> {
    [NAMESPACES, STATE, SHARED_MEMORY]
        .iter()
        .flat_map(|directory| fs::read_dir(directory).into_iter().flatten().flatten())
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.strip_prefix(tag).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
        })
        .collect()
}

/// Removes everything whose name begins with `prefix`, as the janitor does.
fn remove(prefix: &str) {
    let _ = Command::new("sh")
        .args(["-c", JANITOR, "janitor", prefix])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
}

fn start_janitor() -> Option<ChildStdin> {
    // Without one, Drop and the next runner's sweep still clean up.
    let mut child = Command::new("sh")
        .args(["-c", JANITOR, "janitor", &format!("wadi-{}", std::process::id())])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .ok()?;
    child.stdin.take()
}

/// The kernel kills a tethered child when the *thread* that started it ends, and tests come and go in threads: all
/// children are started by one thread that stays.
fn start_spawner() -> Sender<SpawnRequest> {
    let (sender, requests) = mpsc::channel::<SpawnRequest>();
    thread::spawn(move || {
        for (mut command, reply) in requests {
            // Whoever asked may have given up: then the child is dropped, and dies with us.
            let _ = reply.send(command.spawn());
        }
    });
    sender
}

/// A failure says what the daemons said.
fn report_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        usual(info);
        crate::process::show_logs();
    }));
}
