//! Puts the initramfs together from unpacked packages.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::GuestError;
use crate::cpio::{Archive, Entry};
use crate::elf::Linkage;
use crate::modules::{self, Modules, WANTED};
use crate::stub;

/// The first process and the agent, as the guest gets them.
pub(crate) const INIT: &str = include_str!("../guest/init.sh");
/// Serves commands on the virtio-serial port.
pub(crate) const AGENT: &str = include_str!("../guest/agent.sh");

/// Programs, where they lie in their packages and the names they get in the guest.
const PROGRAMS: [(&str, &[&str]); 14] = [
    ("usr/bin/fio", &["fio"]),
    ("usr/bin/iperf3", &["iperf3"]),
    ("usr/sbin/ethtool", &["ethtool"]),
    ("usr/bin/memcached", &["memcached"]),
    ("usr/bin/cyclictest", &["cyclictest"]),
    ("usr/sbin/mke2fs", &["mke2fs", "mkfs.ext4"]),
    ("usr/sbin/e2fsck", &["e2fsck", "fsck.ext4"]),
    ("usr/sbin/tune2fs", &["tune2fs"]),
    ("usr/sbin/dumpe2fs", &["dumpe2fs"]),
    ("usr/bin/lsattr", &["lsattr"]),
    ("usr/bin/chattr", &["chattr"]),
    ("usr/sbin/badblocks", &["badblocks"]),
    ("usr/sbin/mkfs.xfs", &["mkfs.xfs"]),
    ("usr/sbin/xfs_repair", &["xfs_repair"]),
];

const LOADER: &str = "ld-linux-x86-64.so.2";

/// The kernel and the initramfs's bytes from what is unpacked at `root`. `scratch` is for the stand-ins.
pub(crate) fn assemble(root: &Path, scratch: &Path) -> Result<(PathBuf, Vec<u8>), GuestError> {
    let mut archive = Archive::new();
    for directory in ["dev", "proc", "sys", "tmp", "root", "mnt", "etc", "run", "var/tmp"] {
        archive.put(directory, Entry::Directory);
    }
    archive.put("dev/console", Entry::CharacterDevice { major: 5, minor: 1 });
    archive.put_file("init", 0o755, INIT.as_bytes().to_vec());
    archive.put_file("sbin/wadi-agent", 0o755, AGENT.as_bytes().to_vec());
    archive.put_file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n".to_vec());
    archive.put_file("etc/group", 0o644, b"root:x:0:\n".to_vec());
    archive.put_file("etc/hosts", 0o644, b"127.0.0.1 localhost wadi-guest\n".to_vec());
    archive.put("etc/mtab", Entry::Link("/proc/mounts".to_owned()));

    add_busybox(&mut archive, root)?;
    add_programs(&mut archive, root, scratch)?;
    let mke2fs_conf = root.join("etc/mke2fs.conf");
    archive.put_file("etc/mke2fs.conf", 0o644, read(&mke2fs_conf)?);
    let kernel = add_modules(&mut archive, root, &WANTED)?;
    Ok((kernel, archive.into_bytes()))
}

fn add_busybox(archive: &mut Archive, root: &Path) -> Result<(), GuestError> {
    let busybox = find(root, "usr/bin/busybox")?;
    let applets = crate::run(Command::new(&busybox).arg("--list"))?;
    archive.put_file("bin/busybox", 0o755, read(&busybox)?);
    for applet in applets.lines().filter(|name| *name != "busybox") {
        archive.put(&format!("bin/{applet}"), Entry::Link("busybox".to_owned()));
    }
    Ok(())
}

/// Programs, the libraries that they need, and stand-ins for those that they do not.
fn add_programs(archive: &mut Archive, root: &Path, scratch: &Path) -> Result<(), GuestError> {
    let mut programs = Vec::new();
    for (path, names) in PROGRAMS {
        let file = find(root, path)?;
        let content = read(&file)?;
        programs.push(linkage(&file, &content)?);
        archive.put_file(&format!("usr/bin/{}", names[0]), 0o755, content);
        for name in &names[1..] {
            archive.put(&format!("usr/bin/{name}"), Entry::Link(names[0].to_owned()));
        }
    }
    let mut present: BTreeMap<String, Linkage> = BTreeMap::new();
    let mut pending: Vec<String> = programs.iter().flat_map(|program| program.needed.clone()).collect();
    while let Some(soname) = pending.pop() {
        if present.contains_key(&soname) {
            continue;
        }
        let Ok(file) = find(root, &format!("usr/lib/x86_64-linux-gnu/{soname}")) else { continue };
        let content = read(&file)?;
        let linkage = linkage(&file, &content)?;
        pending.extend(linkage.needed.iter().cloned());
        present.insert(soname.clone(), linkage);
        if soname == LOADER {
            archive.put_file(&format!("lib64/{LOADER}"), 0o755, content);
        } else {
            archive.put_file(&format!("lib/{soname}"), 0o755, content);
        }
    }
    let loader = format!("lib64/{LOADER}");
    if !archive.contains(&loader) {
        let file = find(root, &format!("usr/lib/x86_64-linux-gnu/{LOADER}"))?;
        archive.put_file(&loader, 0o755, read(&file)?);
    }
    for (soname, stub) in stub::plan(&programs, &present) {
        archive.put_file(&format!("lib/{soname}"), 0o755, stub.build(&soname, scratch)?);
    }
    Ok(())
}

/// What is wanted of the only kernel below `root`, in load order; returns the kernel's path.
pub(crate) fn add_modules(
    archive: &mut Archive,
    root: &Path,
    wanted: &[&str],
) -> Result<PathBuf, GuestError> {
    let base = find(root, "usr/lib/modules")?;
    let mut versions = fs::read_dir(&base).map_err(|e| GuestError::io("read", &base, e))?;
    let home = versions
        .next()
        .and_then(Result::ok)
        .map(|entry| entry.path())
        .ok_or_else(|| GuestError::Packages { reason: "the kernel's package has no modules".into() })?;
    let modules = Modules::scan(&home)?;
    let mut order = String::new();
    for path in modules.load_order(wanted)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = name.trim_end_matches(modules::PACKED);
        archive.put_file(&format!("lib/modules/{name}"), 0o644, modules::read(&path)?);
        order.push_str(name);
        order.push('\n');
    }
    archive.put_file("lib/modules/order", 0o644, order.into_bytes());
    // Beside its modules since Linux 7.3's packages.
    let beside = home.join("vmlinuz");
    let version = home.file_name().unwrap_or_default().to_string_lossy();
    Ok(if beside.exists() { beside } else { root.join("boot").join(format!("vmlinuz-{version}")) })
}

/// A file of the packages, whether they still separate `/bin`, `/sbin` and `/lib` from `/usr` or not.
fn find(root: &Path, path: &str) -> Result<PathBuf, GuestError> {
    let short = path.strip_prefix("usr/").unwrap_or(path);
    [path, short]
        .iter()
        .map(|path| root.join(path))
        .find(|path| path.exists())
        .ok_or_else(|| GuestError::Packages { reason: format!("no package brought {path}") })
}

fn read(path: &Path) -> Result<Vec<u8>, GuestError> {
    fs::read(path).map_err(|e| GuestError::io("read", path, e))
}

fn linkage(path: &Path, content: &[u8]) -> Result<Linkage, GuestError> {
    Linkage::read(content).ok_or_else(|| GuestError::Packages {
        reason: format!("{} is no ELF file of this machine's kind", path.display()),
    })
}

/// Makes a file readable for everybody, so that QEMU may run as somebody else.
pub(crate) fn publish(path: &Path) -> Result<(), GuestError> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).map_err(|e| GuestError::io("chmod", path, e))
}
