//! A block device over a file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A loop device, which goes with this.
pub struct LoopDevice {
    pub path: PathBuf,
}

/// What a device has done since it was made, in requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    pub writes: u64,
    pub discards: u64,
    pub flushes: u64,
}

impl LoopDevice {
    /// Over this file, which is there; none, and why not is said, where this machine has none to give.
    pub fn over(backing: &Path) -> Option<Self> {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(backing).output();
        match output {
            Ok(output) if output.status.success() => {
                let path = String::from_utf8(output.stdout).unwrap().trim().into();
                Some(Self { path })
            }
            Ok(output) => {
                println!("SKIPPED: no loop device: {}", String::from_utf8_lossy(&output.stderr));
                None
            }
            Err(error) => {
                println!("SKIPPED: no losetup: {error}");
                None
            }
        }
    }

    /// Where the kernel says of it what it is.
    pub fn sysfs(&self) -> PathBuf {
        Path::new("/sys/block").join(self.path.file_name().unwrap())
    }

    pub fn done(&self) -> Done {
        let statistics = fs::read_to_string(self.sysfs().join("stat")).unwrap();
        let fields: Vec<u64> = statistics.split_whitespace().map(|field| field.parse().unwrap()).collect();
        Done { writes: fields[4], discards: fields[11], flushes: fields[15] }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // Now, or when the last one closes it that has it open.
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}
