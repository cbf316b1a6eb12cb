//! The pool, and the directory where daemons meet.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use cxl_pool::Pool;
use pod_api::ByteSize;
use pod_protocol::config::HostConfig;
use rustix::fs::{Access, access, statfs};

use super::{Finding, Machine};

/// File systems that are memory.
const TMPFS: i64 = 0x0102_1994;
const HUGETLBFS: i64 = 0x9584_58f6;

pub(super) fn examine(host: &HostConfig, machine: &Machine) -> Vec<Finding> {
    let path = &host.pool.path;
    let mut findings = vec![match Pool::open(path) {
        Ok(pool) => {
            let superblock = pool.superblock();
            let size = ByteSize::new(superblock.size_bytes);
            let found = format!("{}: {size}, coherence {}", path.display(), superblock.mode);
            Finding::good("pool", found)
        }
        // The error says what to do.
        Err(error) => Finding::broken("pool", "cannot be used", error.to_string()),
    }];
    findings.extend(memory(path, machine));
    findings.push(run_directory(&host.run.directory));
    findings
}

/// What the pool is made of.
fn memory(path: &Path, machine: &Machine) -> Option<Finding> {
    const SUBJECT: &str = "pool's memory";
    let metadata = fs::metadata(path).ok()?;
    if metadata.file_type().is_char_device() {
        return Some(Finding::good(SUBJECT, "a DAX device"));
    }
    // Its type is signed on some machines.
    #[allow(clippy::unnecessary_cast, reason = "not everywhere")]
    let kind = statfs(path).ok()?.f_type as i64;
    Some(match kind {
        HUGETLBFS => Finding::good(SUBJECT, "huge pages"),
        TMPFS => {
            let setting = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
            let huge =
                machine.read(setting).is_some_and(|it| !it.contains("[never]") && !it.contains("[deny]"));
            if huge {
                Finding::good(SUBJECT, "shared memory of this host, in huge pages where they can be had")
            } else {
                let found =
                    "shared memory of this host, in small pages: addresses are translated more slowly";
                Finding::poor(SUBJECT, found, format!("echo advise > {setting}"))
            }
        }
        _ => Finding::broken(
            SUBJECT,
            "a file on a disk",
            "create the pool on a DAX device, or in /dev/shm where all hosts are on this machine",
        ),
    })
}

fn run_directory(directory: &Path) -> Finding {
    const SUBJECT: &str = "run directory";
    let shown = directory.display();
    // It is made when it is missing.
    let nearest = directory.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(directory);
    if !nearest.is_dir() {
        let advice = format!("remove {}, or set run.directory", nearest.display());
        return Finding::broken(SUBJECT, format!("{} is no directory", nearest.display()), advice);
    }
    if access(nearest, Access::WRITE_OK | Access::EXEC_OK).is_err() {
        let found = format!("{} cannot be written", nearest.display());
        return Finding::broken(SUBJECT, found, "run this, and the daemons, as root");
    }
    Finding::good(SUBJECT, shown.to_string())
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::super::tests::machine;
    use super::*;

    #[test]
    fn a_pool_on_a_disk_and_a_missing_one_are_broken() {
        let (directory, machine) = machine(&[("/srv/pool", "x")]);
        let text = format!(
            "[host]\nid = 1\nname = 'h1'\n[pool]\npath = '{0}/srv/pool'\n[run]\ndirectory = '{0}/srv/pool/run'\n",
            directory.path().display()
        );
        let mut host = HostConfig::parse(&text, Path::new("host.toml")).expect("a configuration");
        let findings = examine(&host, &machine);
        assert_eq!(findings[0].verdict, Verdict::Broken, "it is no pool");
        assert_eq!(findings.last().map(|it| it.verdict), Some(Verdict::Broken), "a file is in the way");

        host.pool.path = directory.path().join("none");
        host.run.directory = directory.path().join("run");
        let findings = examine(&host, &machine);
        assert_eq!(findings.len(), 2);
        assert!(findings[0].advice.as_ref().is_some_and(|advice| advice.contains("wadi-pool create")));
        assert_eq!(findings[1].verdict, Verdict::Good);
    }

    #[test]
    fn small_pages_are_slow() {
        let setting = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
        let directory = tempfile::tempdir_in("/dev/shm").expect("shared memory");
        let pool = directory.path().join("pool");
        fs::write(&pool, "").expect("a file");
        for (value, verdict) in [("always [never]", Verdict::Poor), ("[advise] never", Verdict::Good)] {
            let (_directory, machine) = machine(&[(setting, value)]);
            assert_eq!(memory(&pool, &machine).map(|it| it.verdict), Some(verdict));
        }
    }
}
