//! Files that a guest writes, one after another, and what it was promised about each.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::pod::PodVm;

/// Longer than anything takes that is done here.
const PATIENCE: Duration = Duration::from_mins(2);
/// What the guest's lines begin with.
const KEPT: &str = "KEPT";

/// A guest's file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    /// ext4, with a journal.
    Ext4,
    /// XFS, with a log.
    Xfs,
}

impl FileSystem {
    fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }

    fn directory(self) -> String {
        format!("/mnt/{}", self.name())
    }

    /// Makes one on a disk of the guest, such as `vda`.
    pub fn make(self, vm: &PodVm, disk: &str) -> Result<()> {
        let force = match self {
            Self::Ext4 => "-q -F",
            Self::Xfs => "-q -f",
        };
        vm.exec_within(&format!("mkfs.{} {force} /dev/{disk}", self.name()), PATIENCE)?;
        Ok(())
    }

    /// Mounts it, with what a journal has yet to bring in.
    pub fn mount(self, vm: &PodVm, disk: &str, options: &str) -> Result<()> {
        let (name, directory) = (self.name(), self.directory());
        vm.exec_within(
            &format!("mkdir -p {directory} && mount -t {name} -o {options} /dev/{disk} {directory}"),
            PATIENCE,
        )?;
        Ok(())
    }

    /// Unmounts it and has its own program look for anything that is wrong.
    pub fn unmount_and_check(self, vm: &PodVm, disk: &str) -> Result<()> {
        vm.exec_within(&format!("umount {}", self.directory()), PATIENCE)?;
        let check = match self {
            Self::Ext4 => "fsck.ext4 -f -n",
            Self::Xfs => "xfs_repair -n",
        };
        vm.exec_within(&format!("{check} /dev/{disk}"), PATIENCE)?;
        Ok(())
    }
}

/// The files of one file system whose `fsync` ended well, by name, with their checksums.
#[derive(Debug, Clone)]
pub struct Files {
    file_system: FileSystem,
    kept: BTreeMap<String, String>,
}

impl Files {
    /// None yet.
    pub fn on(file_system: FileSystem) -> Self {
        Self { file_system, kept: BTreeMap::new() }
    }

    /// How many are known.
    pub fn count(&self) -> usize {
        self.kept.len()
    }

    /// Has the guest write files whose names begin with `run`, from two processes, until [`Files::stop`] or until one
    /// fails. Each that is on the disk for good is said on the serial console: that reaches the host although the guest
    /// is killed right after.
    pub fn start(&self, vm: &PodVm, run: &str) -> Result<()> {
        let (name, directory) = (self.file_system.name(), self.file_system.directory());
        vm.exec(&format!(
            "rm -f /tmp/{name}.*; \
             for job in a b; do \
               (i=0; \
                while [ ! -e /tmp/{name}.stop ]; do \
                  i=$((i + 1)); file={run}-$job-$i; \
                  head -c $((i * 7919 % 90000 + 1000)) /dev/urandom > /tmp/{name}.$job; \
                  sum=$(md5sum < /tmp/{name}.$job); \
                  dd if=/tmp/{name}.$job of={directory}/$file bs=32k conv=fsync 2>> /tmp/{name}.said.$job \
                    || {{ touch /tmp/{name}.failed; break; }}; \
                  echo \"{KEPT} {name} $file ${{sum%% *}} .\" > /dev/ttyS0; \
                done; touch /tmp/{name}.ended.$job) < /dev/null > /dev/null 2>&1 & \
             done"
        ))?;
        Ok(())
    }

    /// Has it stop, and fails if a file could not be written.
    pub fn stop(&self, vm: &PodVm) -> Result<()> {
        let name = self.file_system.name();
        vm.exec_within(
            &format!(
                "touch /tmp/{name}.stop; \
                 while [ ! -e /tmp/{name}.ended.a ] || [ ! -e /tmp/{name}.ended.b ]; do sleep 0.1; done"
            ),
            PATIENCE,
        )?;
        if self.has_failed(vm)? {
            bail!("a file could not be written: {}", vm.exec(&format!("tail -n 3 /tmp/{name}.said.*"))?);
        }
        Ok(())
    }

    /// Whether a file could not be written.
    pub fn has_failed(&self, vm: &PodVm) -> Result<bool> {
        let failed = format!("if [ -e /tmp/{}.failed ]; then echo yes; fi", self.file_system.name());
        Ok(!vm.exec(&failed)?.is_empty())
    }

    /// Learns from what the console has shown. The last line may have been cut off.
    pub fn hear(&mut self, console: &str) {
        for line in console.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            if let [KEPT, system, file, sum, "."] = words[..]
                && system == self.file_system.name()
            {
                self.kept.insert(file.to_owned(), sum.to_owned());
            }
        }
    }

    /// Fails unless each of them is there, as it was written.
    pub fn check(&self, vm: &PodVm) -> Result<()> {
        let mut sums = String::new();
        for (file, sum) in &self.kept {
            // Writing to a String cannot fail.
            let _ = writeln!(sums, "{sum}  {file}");
        }
        let directory = self.file_system.directory();
        let command = format!(
            "echo 3 > /proc/sys/vm/drop_caches; cd {directory} && md5sum -c <<'SUMS' 2>&1\n{sums}SUMS"
        );
        let outcome = vm.run(&command, PATIENCE)?;
        if outcome.success() {
            return Ok(());
        }
        let said = outcome.text();
        let wrong: Vec<&str> = said.lines().filter(|line| !line.ends_with(": OK")).take(5).collect();
        bail!("of {} files that were promised, not all are there: {}", self.count(), wrong.join("; "));
    }

    /// As [`Files::check`], after the file system was mounted, then has its own program look at it.
    pub fn check_all(&self, vm: &PodVm, disk: &str) -> Result<()> {
        self.check(vm)?;
        self.file_system.unmount_and_check(vm, disk).with_context(|| format!("/dev/{disk} is not whole"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lines_count() {
        let mut files = Files::on(FileSystem::Xfs);
        files.hear("noise\r\nKEPT xfs r1-a-1 0123 .\r\nKEPT ext4 r1-a-1 0124 .\r\nKEPT xfs r1-a-2 01");
        assert_eq!(files.kept, BTreeMap::from([("r1-a-1".to_owned(), "0123".to_owned())]));
    }
}
