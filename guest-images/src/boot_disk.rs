//! A disk that boots the guest by itself, through a BIOS and through UEFI.
//!
//! All of it is one FAT file system with kernel and initramfs. A BIOS runs the code in its first sector, which is SYSLINUX; UEFI runs
//! the program `EFI/BOOT/BOOTX64.EFI`, which is systemd-boot. Both come from Debian's packages, and so do the programs that
//! write the file system without mounting it.
//!
//! There is no partition table, because its code would load that of the partition over itself. An emulating QEMU, which keeps
//! translations of what it has run, does not notice that another process wrote it, and would run the old code again.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::{Guest, GuestError, Progress, initramfs, packages};

/// Whose files are used.
const PACKAGES: [&str; 3] = ["mtools", "syslinux", "systemd-boot-efi"];

/// Raise it when the code changes what a disk consists of.
const RECIPE: &str = "2";

const SECTOR: u64 = 512;
/// Room for the loaders and the file system's own tables.
const SPARE: u64 = 4 << 20;

/// What loaded the guest's kernel from its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loader {
    /// SYSLINUX, by a BIOS.
    Syslinux,
    /// systemd-boot, by UEFI.
    SystemdBoot,
}

impl Loader {
    /// The word that it puts on the kernel's command line.
    pub fn word(self) -> &'static str {
        match self {
            Self::Syslinux => "wadi.loader=syslinux",
            Self::SystemdBoot => "wadi.loader=systemd-boot",
        }
    }
}

impl Guest {
    /// The image of a disk that boots this guest, built if it is not there yet. Builds at the same time wait for each other.
    pub fn boot_disk(&self, progress: &mut dyn Progress) -> Result<PathBuf, GuestError> {
        let home = self.kernel.parent().unwrap_or(Path::new("."));
        let image = home.join(format!("{}.disk", &recipe(self)[..16]));
        if image.exists() {
            return Ok(image);
        }
        let directory = home.parent().unwrap_or(home);
        let _locked = crate::lock(directory)?;
        if !image.exists() {
            build(self, directory, &image, progress)?;
        }
        Ok(image)
    }
}

/// Hash of everything that decides what a disk consists of, but for the packages' versions.
fn recipe(guest: &Guest) -> String {
    let mut hash = Sha256::new();
    for part in [RECIPE, &guest.command_line].into_iter().chain(PACKAGES) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    crate::hex(&hash.finalize())
}

fn build(
    guest: &Guest,
    directory: &Path,
    image: &Path,
    progress: &mut dyn Progress,
) -> Result<(), GuestError> {
    let store = packages::store(directory)?;
    let names: Vec<String> = PACKAGES.map(str::to_owned).into();
    let packages = packages::uris(&names)?;
    packages::fetch(&packages, &store, progress)?;
    progress.step("putting the guest's disk together");
    let work = directory.join("work-disk");
    let _ = fs::remove_dir_all(&work);
    let root = work.join("root");
    fs::create_dir_all(&root).map_err(|e| GuestError::io("create", &root, e))?;
    packages::unpack(&packages, &store, &root)?;
    let disk = Disk { root, image: work.join("disk") };
    disk.write(guest, &work)?;
    initramfs::publish(&disk.image)?;
    // Only a whole disk ever has the final name.
    fs::rename(&disk.image, image).map_err(|e| GuestError::io("rename", &disk.image, e))?;
    let _ = fs::remove_dir_all(&work);
    Ok(())
}

/// A disk in the making, and the tools for it.
struct Disk {
    /// Where the packages are unpacked.
    root: PathBuf,
    image: PathBuf,
}

impl Disk {
    fn write(&self, guest: &Guest, work: &Path) -> Result<(), GuestError> {
        let size =
            |path: &Path| fs::metadata(path).map(|it| it.len()).map_err(|e| GuestError::io("read", path, e));
        let content = size(&guest.kernel)? + size(&guest.initrd)?;
        let bytes = (content + SPARE).next_multiple_of(1 << 20);
        File::create(&self.image)
            .and_then(|file| file.set_len(bytes))
            .map_err(|e| GuestError::io("create", &self.image, e))?;
        // A fixed serial number, for the same bytes each time.
        let sectors = (bytes / SECTOR).to_string();
        self.mtools(
            "mformat",
            &["-T", &sectors, "-h", "255", "-s", "63", "-v", "WADI", "-N", "57414449"],
            &["::"],
        )?;
        let mut command = self.tool("syslinux");
        command.arg("--install").arg(&self.image);
        crate::run(&mut command)?;
        self.mtools("mmd", &[], &["::/EFI", "::/EFI/BOOT", "::/loader", "::/loader/entries"])?;
        let (bios, uefi) = (Loader::Syslinux.word(), Loader::SystemdBoot.word());
        let texts = [
            (
                "::/syslinux.cfg",
                format!(
                    "SERIAL 0 115200\nDEFAULT wadi\nLABEL wadi\n  LINUX /vmlinuz\n  INITRD /initrd\n  APPEND {} {bios}\n",
                    guest.command_line
                ),
            ),
            ("::/loader/loader.conf", "default wadi.conf\ntimeout 0\n".to_owned()),
            (
                "::/loader/entries/wadi.conf",
                format!(
                    "title Wadi\nlinux /vmlinuz\ninitrd /initrd\noptions {} {uefi}\n",
                    guest.command_line
                ),
            ),
        ];
        for (at, text) in texts {
            let file = work.join("text");
            fs::write(&file, text).map_err(|e| GuestError::io("write", &file, e))?;
            self.copy(&file, at)?;
        }
        self.copy(&guest.kernel, "::/vmlinuz")?;
        self.copy(&guest.initrd, "::/initrd")?;
        self.copy(&self.root.join("usr/lib/systemd/boot/efi/systemd-bootx64.efi"), "::/EFI/BOOT/BOOTX64.EFI")
    }

    fn copy(&self, file: &Path, at: &str) -> Result<(), GuestError> {
        self.mtools("mcopy", &[&file.to_string_lossy()], &[at])
    }

    /// One of mtools' programs, on the disk.
    fn mtools(&self, program: &str, before: &[&str], after: &[&str]) -> Result<(), GuestError> {
        let mut command = self.tool(program);
        command.arg("-i").arg(&self.image);
        crate::run(command.args(before).args(after)).map(drop)
    }

    /// SYSLINUX calls mtools by itself.
    fn tool(&self, program: &str) -> Command {
        let bin = self.root.join("usr/bin");
        let mut command = Command::new(bin.join(program));
        command.env("PATH", format!("{}:/usr/bin:/bin", bin.display())).env("SOURCE_DATE_EPOCH", "0");
        command
    }
}
