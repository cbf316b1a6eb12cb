//! The pool, and the directory where daemons meet.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use cxl_pool::Pool;
use pod_api::ByteSize;
use pod_protocol::config::HostConfig;
use rustix::fs::{Access, access, major, minor, statfs};

use super::{Finding, Machine};

/// File systems that are memory.
const TMPFS: i64 = 0x0102_1994;
const HUGETLBFS: i64 = 0x9584_58f6;

const SUBJECT: &str = "pool's memory";

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
    let Ok(metadata) = fs::metadata(path) else { return huge_pages_to_be_had(path.parent()?, machine) };
    if metadata.file_type().is_char_device() {
        return Some(character_device(metadata.rdev(), machine));
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

/// Where a pool of huge pages has yet to be made: whether there are any.
fn huge_pages_to_be_had(directory: &Path, machine: &Machine) -> Option<Finding> {
    #[allow(clippy::unnecessary_cast, reason = "signed on some machines")]
    let is_huge = statfs(directory).ok()?.f_type as i64 == HUGETLBFS;
    if is_huge { Some(free_huge_pages(&machine.read("/proc/meminfo")?)) } else { None }
}

/// What `/proc/meminfo` says of huge pages.
fn free_huge_pages(meminfo: &str) -> Finding {
    let free = meminfo.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
    match free.and_then(|pages| pages.trim().parse::<u64>().ok()) {
        Some(pages) if pages > 0 => Finding::good(SUBJECT, format!("{pages} huge pages are free for a pool")),
        _ => Finding::broken(
            SUBJECT,
            "no huge page is free",
            "sysctl vm.nr_hugepages=N, so that the pool fits, or hugepages=N on the kernel's command line",
        ),
    }
}

/// What the kernel says of a device, by its number.
fn character_device(device: u64, machine: &Machine) -> Finding {
    let directory = format!("/sys/dev/char/{}:{}", major(device), minor(device));
    let subsystem = fs::read_link(machine.path(&format!("{directory}/subsystem"))).ok();
    if subsystem.as_deref().and_then(Path::file_name).is_none_or(|name| name != "dax") {
        let advice = "name a DAX device, such as /dev/dax0.0; `daxctl list` shows those of this host";
        return Finding::broken(SUBJECT, "a character device that is no memory", advice);
    }
    let number = |file: &str| machine.read(&format!("{directory}/{file}"))?.parse::<u64>().ok();
    let (Some(size), align) = (number("size"), number("align").unwrap_or(0)) else {
        let advice = "see `daxctl list`: it has to be in mode devdax, and enabled";
        return Finding::broken(SUBJECT, "a DAX device that does not say its size", advice);
    };
    let node = machine.read(&format!("{directory}/target_node")).filter(|node| node != "-1");
    let node = node.map_or_else(String::new, |node| format!(", node {node}"));
    let found =
        format!("a DAX device of {}, in pages of {}{node}", ByteSize::new(size), ByteSize::new(align));
    if align < 2 << 20 {
        let advice = "daxctl reconfigure-device --mode=devdax --align=2M: addresses are translated more slowly in small pages";
        return Finding::poor(SUBJECT, found, advice);
    }
    Finding::good(SUBJECT, found)
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
    fn dax_devices_are_told_from_others() {
        let device = rustix::fs::makedev(252, 3);
        let of = |subsystem: Option<&str>, files: &[(&str, &str)]| {
            let (directory, machine) = machine(&[]);
            let place = directory.path().join("sys/dev/char/252:3");
            fs::create_dir_all(&place).expect("a directory");
            if let Some(subsystem) = subsystem {
                std::os::unix::fs::symlink(format!("../../../bus/{subsystem}"), place.join("subsystem"))
                    .expect("a link");
            }
            for (name, value) in files {
                fs::write(place.join(name), value).expect("a file");
            }
            let finding = character_device(device, &machine);
            (finding.verdict, finding.found)
        };
        assert_eq!(of(None, &[]).0, Verdict::Broken);
        assert_eq!(of(Some("mem"), &[("size", "1073741824\n")]).0, Verdict::Broken);
        assert_eq!(of(Some("dax"), &[]).0, Verdict::Broken);
        let files = [("size", "1073741824\n"), ("align", "2097152\n"), ("target_node", "2\n")];
        let good = "a DAX device of 1.0 GiB, in pages of 2.0 MiB, node 2".to_owned();
        assert_eq!(of(Some("dax"), &files), (Verdict::Good, good));
        let files = [("size", "1073741824\n"), ("align", "4096\n"), ("target_node", "-1\n")];
        assert_eq!(of(Some("dax"), &files).0, Verdict::Poor);
    }

    #[test]
    fn huge_pages_may_have_run_out() {
        assert_eq!(free_huge_pages("MemFree: 1 kB\nHugePages_Free:     512\n").verdict, Verdict::Good);
        assert_eq!(free_huge_pages("HugePages_Free:        0\n").verdict, Verdict::Broken);
        assert_eq!(free_huge_pages("").verdict, Verdict::Broken);
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
