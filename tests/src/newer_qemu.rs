//! A QEMU that finds a guest's memory in the middle of a file: Debian 12's own does not, the one of its backports does.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use guest_images::Guest;
use rustix::fs::{FlockOperation, flock};

/// Debian signs its archives with one of these, and the mirror is the one that a bare Debian 12 knows.
const SOURCE: &str = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian \
                      bookworm-backports main\n";
/// QEMU, and the firmware that it loads. The libraries that it needs are those of the installed one.
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-system-data", "seabios"];

/// The installed QEMU if that will do; else one of Debian's backports, fetched and unpacked beside the guests, not installed.
pub fn with_offset() -> Result<PathBuf> {
    if knows_offset(Path::new(vmm::QEMU))? {
        return Ok(vmm::QEMU.into());
    }
    let guests = Guest::default_directory();
    let home = guests.parent().unwrap_or(&guests).join("newer-qemu");
    fs::create_dir_all(&home)?;
    let lock = File::create(home.join("lock"))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    let root = home.join("root");
    let qemu = root.join("usr/bin").join(vmm::QEMU);
    if !qemu.exists() {
        let unfinished = home.join("unfinished");
        let _ = fs::remove_dir_all(&unfinished);
        fetch(&home, &unfinished)?;
        let _ = fs::remove_dir_all(&root);
        fs::rename(&unfinished, &root)?;
    }
    if !knows_offset(&qemu)? {
        bail!("{} does not know offsets either", qemu.display());
    }
    Ok(qemu)
}

fn knows_offset(qemu: &Path) -> Result<bool> {
    let mut asked = Command::new(qemu);
    let output = asked.args(["-object", "memory-backend-file,help"]).output();
    let output = output.with_context(|| format!("cannot run {}", qemu.display()))?;
    Ok(String::from_utf8_lossy(&output.stdout).contains("offset="))
}

fn fetch(home: &Path, root: &Path) -> Result<()> {
    let (lists, archives) = (home.join("lists"), home.join("archives"));
    fs::create_dir_all(lists.join("partial"))?;
    fs::create_dir_all(archives.join("partial"))?;
    fs::write(home.join("sources.list"), SOURCE)?;
    // apt with lists of its own: those of the machine stay as they are.
    let apt = |words: &[&str]| {
        let mut command = Command::new("apt-get");
        for (option, value) in [
            ("Dir::Etc::SourceList", home.join("sources.list").as_path()),
            ("Dir::Etc::SourceParts", Path::new("/nonexistent")),
            ("Dir::State::Lists", &lists),
            ("Dir::Cache::Archives", &archives),
            ("Dir::Cache::pkgcache", Path::new("")),
            ("Dir::Cache::srcpkgcache", Path::new("")),
            ("APT::Sandbox::User", Path::new("root")),
        ] {
            command.arg("-o").arg(format!("{option}={}", value.display()));
        }
        run(command.arg("-q").args(words).current_dir(&archives))
    };
    apt(&["update"])?;
    apt(&[&["download"], &PACKAGES[..]].concat())?;
    fs::create_dir_all(root)?;
    for entry in fs::read_dir(&archives)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            run(Command::new("dpkg-deb").arg("-x").arg(&path).arg(root))?;
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
