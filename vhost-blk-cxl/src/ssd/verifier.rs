//! Telling whether what was not flushed may have been lost.

use std::fs;
use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};

/// Where a process's status says when it started, counted behind its name.
const STARTED_AT: usize = 19;

/// Of devices whose caches outlive a process: the same until the host is started anew.
pub(super) fn boot_verifier() -> u64 {
    verifier_after(&[])
}

/// Of a device whose cache is another process's: the same as long as that lives. What listens for another, as a supervisor does, says
/// nothing of who has the cache.
pub(super) fn process_verifier(pid: Option<i32>) -> u64 {
    let started = pid.filter(|&pid| pid > 1).and_then(|pid| Some((pid, started(pid)?)));
    started.map_or_else(random, |(pid, started)| {
        verifier_after(&[pid.to_le_bytes().as_slice(), started.as_bytes()].concat())
    })
}

/// When a process started, in ticks since the host did. A number that is used again belongs to one that started later.
fn started(pid: i32) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its name, in parentheses, may be anything.
    status.rsplit_once(')')?.1.split_whitespace().nth(STARTED_AT).map(str::to_owned)
}

/// The same, of a device of which it may have been noted there that it lost writes all the same.
pub(super) fn noted_verifier(path: &Path) -> u64 {
    verifier_after(&noted(path))
}

/// Notes that a device lost writes, so that whoever opens it next has another verifier.
pub(super) fn note_loss(path: &Path) -> io::Result<()> {
    note(path, &random().to_le_bytes())
}

/// What is noted there of losses: nothing if there was none.
fn noted(path: &Path) -> Vec<u8> {
    match fs::read(path) {
        Ok(noted) => noted,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        // Not knowing is taken for a loss.
        Err(_) => random().to_le_bytes().to_vec(),
    }
}

fn note(path: &Path, loss: &[u8]) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    // As a whole: half of it would be another number after the other half came.
    let whole = path.with_extension("lost.new");
    fs::write(&whole, loss)?;
    fs::rename(whole, path)
}

/// What a device has lost that lives on.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Where it is noted for whoever opens the device next.
    path: Option<PathBuf>,
    /// The latest, as it is noted; nothing if there was none.
    latest: Vec<u8>,
}

impl Losses {
    /// Those that are noted there, where others will be.
    pub(super) fn noted_in(path: PathBuf) -> Self {
        Self { latest: noted(&path), path: Some(path) }
    }

    /// There is another one. Here it is known also if it cannot be noted.
    pub(super) fn add(&mut self) -> io::Result<()> {
        self.latest = random().to_le_bytes().to_vec();
        self.path.as_ref().map_or(Ok(()), |path| note(path, &self.latest))
    }

    /// The verifier of the device, which would have this one if it had lost nothing.
    pub(super) fn verifier(&self, unharmed: u64) -> u64 {
        if self.latest.is_empty() {
            return unharmed;
        }
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(unharmed);
        hasher.write(&self.latest);
        hasher.finish()
    }
}

fn verifier_after(losses: &[u8]) -> u64 {
    match fs::read("/proc/sys/kernel/random/boot_id") {
        Ok(id) => {
            let mut hasher = DefaultHasher::new();
            hasher.write(&id);
            hasher.write(losses);
            hasher.finish()
        }
        // Not knowing is taken for a new start.
        Err(_) => random(),
    }
}

fn random() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    const CHILD: &str = "WADI_TEST_VERIFIER_CHILD";

    #[test]
    fn a_restarted_process_finds_the_same() {
        let verifier = format!("verifier {}", boot_verifier());
        if std::env::var_os(CHILD).is_some() {
            println!("{verifier}");
            return;
        }
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "ssd::verifier::tests::a_restarted_process_finds_the_same"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && said.contains(&verifier), "{said}, and not {verifier}");
    }

    #[test]
    fn a_process_is_told_from_others() {
        let mut children = [(); 2].map(|()| Command::new("cat").stdin(Stdio::piped()).spawn().unwrap());
        let of = |child: &Child| process_verifier(Some(i32::try_from(child.id()).unwrap()));
        assert_eq!(of(&children[0]), of(&children[0]));
        assert_ne!(of(&children[0]), of(&children[1]));
        for child in &mut children {
            drop(child.stdin.take());
            child.wait().unwrap();
            assert_ne!(of(child), of(child), "nobody knows");
        }
        assert_ne!(process_verifier(None), process_verifier(None));
    }

    #[test]
    fn a_loss_is_known_until_the_next_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("locks/h1-ssd-a.lost");
        assert_eq!(noted_verifier(&path), boot_verifier());
        note_loss(&path).unwrap();
        let once = noted_verifier(&path);
        assert!(once != boot_verifier() && once == noted_verifier(&path));
        note_loss(&path).unwrap();
        assert_ne!(noted_verifier(&path), once);
    }

    #[test]
    fn a_loss_of_what_lives_on_is_known_here_and_to_whoever_comes_next() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("locks/h1-ssd-a.lost");
        let mut losses = Losses::noted_in(path.clone());
        assert_eq!(losses.verifier(7), 7);
        losses.add().unwrap();
        let once = losses.verifier(7);
        assert!(once != 7 && once != losses.verifier(8));
        assert_eq!(Losses::noted_in(path.clone()).verifier(7), once);
        losses.add().unwrap();
        assert!(losses.verifier(7) != once && losses.verifier(7) != 7);
        let file = directory.path().join("file");
        fs::write(&file, []).unwrap();
        let mut nowhere = Losses::noted_in(file.join("h1-ssd-a.lost"));
        let unknown = nowhere.verifier(7);
        assert_ne!(unknown, 7, "not knowing is taken for a loss");
        assert!(nowhere.add().is_err() && nowhere.verifier(7) != unknown);
        let mut unnoted = Losses::default();
        unnoted.add().unwrap();
        assert_ne!(unnoted.verifier(7), 7);
    }
}
