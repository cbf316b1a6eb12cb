//! The test guest with a kernel of the next Debian's backports, for what the current one's cannot do yet.

use std::fs;
use std::path::Path;

use crate::cpio::Archive;
use crate::initramfs::add_modules;
use crate::suite::Suite;
use crate::{Guest, GuestError, Progress, initramfs, lock};

const SUITE: &str = "trixie-backports";
/// The metapackage that depends on the newest kernel for virtual machines.
const KERNEL: &str = "linux-image-cloud-amd64";
/// A kernel's package depends on others that bring its parts, of this kind.
const PARTS: [&str; 3] = ["linux-base-", "linux-binary-", "linux-modules-"];
/// What a guest uses of it that has no disks of a pod.
const WANTED: [&str; 4] = ["virtio_pci", "virtio_console", "virtio_net", "af_packet"];

impl Guest {
    /// This guest with the newest kernel of Debian's backports, which is fetched if it has not been before. Builds at the same time wait
    /// for each other.
    ///
    /// # Errors
    ///
    /// The kernel is not to be had, or lacks something.
    pub fn with_newer_kernel(&self, progress: &mut dyn Progress) -> Result<Self, GuestError> {
        let guests = self.kernel.parent().and_then(Path::parent).unwrap_or(Path::new("."));
        let directory = guests.join("newer-kernel");
        fs::create_dir_all(&directory).map_err(|e| GuestError::io("create", &directory, e))?;
        // The kernel's modules come behind the guest's own initramfs.
        let home = directory.join(&self.manifest()?.initrd_sha256[..16]);
        let _locked = lock(&directory)?;
        if !home.exists() {
            let own = fs::read(&self.initrd).map_err(|e| GuestError::io("read", &self.initrd, e))?;
            build(&directory, &home, own, progress)?;
        }
        Ok(Self::at(&home))
    }
}

fn build(
    directory: &Path,
    home: &Path,
    mut initrd: Vec<u8>,
    progress: &mut dyn Progress,
) -> Result<(), GuestError> {
    progress.step("fetching a newer kernel");
    let root = directory.join("root");
    let unfinished = directory.join("unfinished");
    for path in [&root, &unfinished] {
        let _ = fs::remove_dir_all(path);
        fs::create_dir_all(path).map_err(|e| GuestError::io("create", path, e))?;
    }
    let suite = Suite::update(SUITE, directory)?;
    let packages = packages(&suite)?;
    suite.unpack(&packages.iter().map(String::as_str).collect::<Vec<_>>(), &root)?;
    let mut archive = Archive::new();
    let kernel = add_modules(&mut archive, &root, &WANTED)?;
    // What comes later stands in the place of what has the same name.
    initrd.extend(archive.into_bytes());
    let copy = Guest::at(&unfinished);
    fs::copy(&kernel, &copy.kernel).map_err(|e| GuestError::io("copy", &kernel, e))?;
    fs::write(&copy.initrd, initrd).map_err(|e| GuestError::io("write", &copy.initrd, e))?;
    for path in [&copy.kernel, &copy.initrd] {
        initramfs::publish(path)?;
    }
    fs::rename(&unfinished, home).map_err(|e| GuestError::io("rename", &unfinished, e))?;
    let _ = fs::remove_dir_all(&root);
    Ok(())
}

/// The kernel's package, and those of its parts.
fn packages(suite: &Suite) -> Result<Vec<String>, GuestError> {
    let mut images = suite.dependencies(KERNEL)?;
    images.retain(|name| name.starts_with("linux-image-"));
    let image = images
        .pop()
        .ok_or_else(|| GuestError::Packages { reason: format!("{KERNEL} of {SUITE} names no kernel") })?;
    let mut packages = suite.dependencies(&image)?;
    packages.retain(|name| PARTS.iter().any(|part| name.starts_with(part)));
    packages.push(image);
    Ok(packages)
}
