//! A QEMU that finds a guest's memory in the middle of a file: Debian 12's own does not, the one of its backports does.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use guest_images::{Guest, Suite};
use rustix::fs::{FlockOperation, flock};

const SUITE: &str = "bookworm-backports";
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
        Suite::update(SUITE, &home)?.unpack(&PACKAGES, &unfinished)?;
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
