//! A block device over a file.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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

    /// The same with one partition, which is all of it but its first MiB; and that.
    pub fn with_partition(backing: &Path) -> Option<(Self, PathBuf)> {
        let sectors = u32::try_from(fs::metadata(backing).unwrap().len() / 512).unwrap();
        // Of type Linux; where it lies in cylinders nobody asks.
        let mut entry = vec![0, 0, 0, 0, 0x83, 0, 0, 0];
        entry.extend(2048_u32.to_le_bytes());
        entry.extend((sectors - 2048).to_le_bytes());
        let file = File::options().write(true).open(backing).unwrap();
        file.write_all_at(&entry, 446).unwrap();
        file.write_all_at(&[0x55, 0xaa], 510).unwrap();
        let device = Self::over(backing)?;
        let partition = PathBuf::from(format!("{}p1", device.path.display()));
        let added = Command::new("partx").arg("--add").arg(&device.path).status();
        if !added.is_ok_and(|status| status.success()) || !partition.exists() {
            println!("SKIPPED: no partition of a loop device: util-linux and a kernel with them make some");
            return None;
        }
        Some((device, partition))
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
        // Those that were added stay otherwise.
        let _ = Command::new("partx").arg("--delete").arg(&self.path).stderr(Stdio::null()).status();
        // Now, or when the last one closes it that has it open.
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}
