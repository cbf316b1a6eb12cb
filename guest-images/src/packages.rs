//! Fetches Debian packages with apt, without installing them.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{GuestError, Progress};

/// The metapackage that depends on Debian's current kernel for virtual machines.
const KERNEL: &str = "linux-image-cloud-amd64";

/// Whose files the guest's userland is made of. Libraries that are not here are stood in for.
pub(crate) const USERLAND: [&str; 22] = [
    "busybox-static",
    "e2fsprogs",
    "ethtool",
    "fio",
    "iperf3",
    "libaio1",
    "libblkid1",
    "libc6",
    "libcom-err2",
    "libevent-2.1-7",
    "libext2fs2",
    "libinih1",
    "libiperf0",
    "libmnl0",
    "libnuma1",
    "libss2",
    "liburcu8",
    "libuuid1",
    "memcached",
    "rt-tests",
    "xfsprogs",
    "zlib1g",
];

/// A package as apt would fetch it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Package {
    /// File name, with name, version and architecture.
    pub file: String,
    /// Size of that file.
    pub bytes: u64,
    /// SHA-256 of that file, in hexadecimal.
    pub sha256: String,
}

/// Asks apt for the current kernel and userland.
pub(crate) fn resolve(progress: &mut dyn Progress) -> Result<Vec<Package>, GuestError> {
    let names = || -> Result<Vec<String>, GuestError> {
        let mut names: Vec<String> = USERLAND.iter().map(|name| (*name).to_owned()).collect();
        names.push(kernel_package()?);
        Ok(names)
    };
    let names = if let Ok(names) = names() {
        names
    } else {
        update(progress)?;
        names()?
    };
    uris(&names)
}

/// What apt would fetch for these names.
pub(crate) fn uris(names: &[String]) -> Result<Vec<Package>, GuestError> {
    let mut command = apt_get();
    command.args(["download", "--print-uris"]).args(names);
    let mut packages = parse_uris(&crate::run(&mut command)?);
    if packages.len() != names.len() {
        return Err(GuestError::Packages {
            reason: format!("apt knows only {} of {}: {}", packages.len(), names.len(), names.join(" ")),
        });
    }
    packages.sort();
    Ok(packages)
}

/// Fetches `packages` into `directory`, unless they are there already.
pub(crate) fn fetch(
    packages: &[Package],
    directory: &Path,
    progress: &mut dyn Progress,
) -> Result<(), GuestError> {
    let missing: Vec<&Package> =
        packages.iter().filter(|package| !is_whole(&directory.join(&package.file), package)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let total = missing.iter().map(|package| package.bytes).sum();
    progress.step(&format!("fetching {} Debian packages", missing.len()));
    if let Err(first) = download(&missing, directory, total, progress) {
        // Lists that have aged name files that the mirror no longer has.
        update(progress).map_err(|_| first)?;
        download(&missing, directory, total, progress)?;
    }
    for package in missing {
        let path = directory.join(&package.file);
        if !is_whole(&path, package) {
            let _ = fs::remove_file(&path);
            return Err(GuestError::Packages {
                reason: format!("{} is not what apt's lists promise; run apt-get update", package.file),
            });
        }
    }
    Ok(())
}

/// Unpacks `packages` below `root`.
pub(crate) fn unpack(packages: &[Package], directory: &Path, root: &Path) -> Result<(), GuestError> {
    for package in packages {
        crate::run(Command::new("dpkg-deb").arg("-x").arg(directory.join(&package.file)).arg(root))?;
    }
    Ok(())
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    // The download goes to a directory of ours, which apt's unprivileged helper cannot enter.
    command.args(["-o", "APT::Sandbox::User=root", "-q"]);
    command
}

fn update(progress: &mut dyn Progress) -> Result<(), GuestError> {
    progress.step("fetching Debian's package lists");
    crate::run(Command::new("apt-get").args(["-q", "update"])).map(drop)
}

fn kernel_package() -> Result<String, GuestError> {
    let answer = crate::run(Command::new("apt-cache").args(["show", "--no-all-versions", KERNEL]))?;
    answer
        .lines()
        .find_map(|line| line.strip_prefix("Depends: "))
        .and_then(|depends| depends.split([' ', ',']).find(|name| name.starts_with("linux-image-")))
        .map(str::to_owned)
        .ok_or_else(|| GuestError::Packages { reason: format!("{KERNEL} names no kernel") })
}

/// Lines such as `'http://…' fio_3.33-3_amd64.deb 537684 SHA256:dc79…`.
fn parse_uris(answer: &str) -> Vec<Package> {
    answer
        .lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace().skip(1);
            Some(Package {
                file: fields.next()?.to_owned(),
                bytes: fields.next()?.parse().ok()?,
                sha256: fields.next()?.strip_prefix("SHA256:")?.to_owned(),
            })
        })
        .collect()
}

/// Runs apt and shows how much has arrived meanwhile.
fn download(
    packages: &[&Package],
    directory: &Path,
    total: u64,
    progress: &mut dyn Progress,
) -> Result<(), GuestError> {
    let mut command = apt_get();
    command.arg("download").current_dir(directory);
    // "name=version", so that apt fetches what was resolved, and not what has appeared since.
    for package in packages {
        command.arg(selector(package));
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| GuestError::io("start", Path::new("apt-get"), e))?;
    let mut stderr = child.stderr.take();
    let reader = thread::spawn(move || {
        let mut text = String::new();
        if let Some(stderr) = stderr.as_mut() {
            let _ = stderr.read_to_string(&mut text);
        }
        text
    });
    let status = loop {
        let here: u64 = packages
            .iter()
            .filter_map(|package| fs::metadata(directory.join(&package.file)).ok())
            .map(|metadata| metadata.len())
            .sum();
        progress.bytes(here, total);
        match child.try_wait().map_err(|e| GuestError::io("wait for", Path::new("apt-get"), e))? {
            Some(status) => break status,
            None => thread::sleep(Duration::from_millis(50)),
        }
    };
    let text = reader.join().unwrap_or_default();
    if status.success() {
        return Ok(());
    }
    Err(GuestError::Packages { reason: format!("apt-get download failed: {}", text.trim()) })
}

/// `name=version` of a package file; apt writes the colon of an epoch as %3a.
fn selector(package: &Package) -> String {
    let mut fields = package.file.split('_');
    let name = fields.next().unwrap_or_default();
    let version = fields.next().unwrap_or_default().replace("%3a", ":");
    format!("{name}={version}")
}

fn is_whole(path: &Path, package: &Package) -> bool {
    let matches_size = fs::metadata(path).is_ok_and(|metadata| metadata.len() == package.bytes);
    matches_size && fs::read(path).is_ok_and(|bytes| crate::hex(&Sha256::digest(&bytes)) == package.sha256)
}

/// The directory that packages are kept in between builds.
pub(crate) fn store(base: &Path) -> Result<PathBuf, GuestError> {
    let directory = base.join("packages");
    fs::create_dir_all(&directory).map_err(|e| GuestError::io("create", &directory, e))?;
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_understood() {
        let answer = "'http://deb.debian.org/z.deb' zlib1g_1%3a1.2.13.dfsg-1_amd64.deb 86684 SHA256:ab12\n\
                      a line that is something else\n";
        let packages = parse_uris(answer);
        assert_eq!(packages.len(), 1);
        assert_eq!(packages[0].bytes, 86684);
        assert_eq!(packages[0].sha256, "ab12");
        assert_eq!(selector(&packages[0]), "zlib1g=1:1.2.13.dfsg-1");
    }
}
