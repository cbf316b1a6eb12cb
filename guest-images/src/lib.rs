//! Builds the test guest from Debian packages: a stock kernel and a small initramfs.
//!
//! The packages are fetched and unpacked, never installed. The same packages give the same bytes. A guest is
//! kept under a name that is the hash of its recipe, beside a `manifest.json` that says which packages, in which
//! versions, went into it. [`Guest::boot_disk`] makes a disk of it that boots by itself.
//!
//! In the guest an agent on the virtio-serial port `wadi.exec` runs commands; `guest/agent.sh` describes its
//! protocol.

#![forbid(unsafe_code)]

pub mod agent;
mod boot_disk;
pub mod cpio;
pub mod elf;
mod initramfs;
mod modules;
mod newer_kernel;
mod packages;
mod progress;
mod stub;
mod suite;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thiserror::Error;

pub use boot_disk::Loader;
pub use packages::Package;
pub use progress::{Bar, Progress, Silent};
pub use suite::Suite;

/// Raise it when the code changes what a guest consists of.
const RECIPE: &str = "3";

/// The name of the virtio-serial port on which the agent listens.
pub const EXEC_PORT: &str = "wadi.exec";

/// What its kernel is told.
///
/// `maxcpus=1`: while it starts, a kernel rewrites its own code under its other CPUs' feet: a breakpoint first, then the new bytes. QEMU
/// before 8.1 may translate the breakpoint and keep that after the bytes have changed, and then a translated guest is caught in it for
/// ever, with interrupts off, or dies of it (`docs/decisions/0023-guests-start-with-one-vcpu.md`). `/init` starts the other vCPUs.
/// `nokaslr`: so that a vCPU's address in what a test prints about a guest in trouble names a function.
/// The last line: a tenth of the time that an emulated guest takes to start goes into tests of ciphers that it does not use, into clearing
/// memory twice and into a fifth level of page tables.
const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 tsc=reliable clocksource=tsc net.ifnames=0 maxcpus=1 nokaslr \
    cryptomgr.notests init_on_alloc=0 no5lvl audit=0";

/// Why no guest could be built.
#[derive(Debug, Error)]
pub enum GuestError {
    /// Something with a file.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A program failed.
    #[error("`{program}` failed ({status}): {output}")]
    Program {
        /// Its command line.
        program: String,
        /// How it ended.
        status: String,
        /// What it said.
        output: String,
    },
    /// Packages are not to be had, or not what they should be.
    #[error("Debian packages for the guest: {reason}")]
    Packages {
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The kernel's package lacks something.
    #[error("the guest's kernel has no module {module}")]
    NoModule {
        /// Its name.
        module: String,
    },
}

impl GuestError {
    pub(crate) fn io(what: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { what, path: path.to_owned(), source }
    }
}

/// What a guest was built from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Hash of the recipe.
    pub recipe: String,
    /// The packages.
    pub packages: Vec<Package>,
    /// SHA-256 of the initramfs.
    pub initrd_sha256: String,
}

/// A guest that is ready to boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guest {
    /// The kernel image.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initrd: PathBuf,
    /// The kernel's command line.
    pub command_line: String,
}

impl Guest {
    /// The directory for guests in this source tree: `target/guest`, or what `WADI_GUEST_DIR` says.
    pub fn default_directory() -> PathBuf {
        if let Some(directory) = std::env::var_os("WADI_GUEST_DIR") {
            return directory.into();
        }
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).join("target/guest")
    }

    /// The guest in [`Guest::default_directory`], built if it is not there yet.
    pub fn ensure(progress: &mut dyn Progress) -> Result<Self, GuestError> {
        Self::ensure_in(&Self::default_directory(), progress)
    }

    /// The guest in `directory`, built if it is not there yet. Builds at the same time wait for each other.
    pub fn ensure_in(directory: &Path, progress: &mut dyn Progress) -> Result<Self, GuestError> {
        fs::create_dir_all(directory).map_err(|e| GuestError::io("create", directory, e))?;
        let recipe = recipe();
        let home = directory.join(&recipe[..16]);
        let guest = Self::at(&home);
        if home.exists() {
            return Ok(guest);
        }
        let _locked = lock(directory)?;
        if !home.exists() {
            build(directory, &home, &recipe, progress)?;
        }
        Ok(guest)
    }

    /// Forgets the guest in `directory`, so that the next one is made of the newest packages.
    pub fn forget(directory: &Path) -> Result<(), GuestError> {
        let home = directory.join(&recipe()[..16]);
        match fs::remove_dir_all(&home) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(GuestError::io("remove", &home, e)),
            _ => Ok(()),
        }
    }

    /// What this guest was built from.
    pub fn manifest(&self) -> Result<Manifest, GuestError> {
        let path = self.kernel.with_file_name("manifest.json");
        let text = fs::read(&path).map_err(|e| GuestError::io("read", &path, e))?;
        serde_json::from_slice(&text).map_err(|e| GuestError::io("read", &path, e.into()))
    }

    fn at(home: &Path) -> Self {
        Self {
            kernel: home.join("vmlinuz"),
            initrd: home.join("initrd"),
            command_line: COMMAND_LINE.to_owned(),
        }
    }
}

/// Nobody else builds below `directory` until this is closed.
pub(crate) fn lock(directory: &Path) -> Result<File, GuestError> {
    let path = directory.join("lock");
    let file = File::create(&path).map_err(|e| GuestError::io("create", &path, e))?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive)
        .map_err(|e| GuestError::io("lock", &path, e.into()))?;
    Ok(file)
}

/// Hash of everything that decides what a guest consists of, but for the packages' versions.
fn recipe() -> String {
    let mut hash = Sha256::new();
    let mut parts = vec![RECIPE, initramfs::INIT, initramfs::AGENT];
    parts.extend(packages::USERLAND);
    parts.extend(modules::WANTED);
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hex(&hash.finalize())
}

fn build(directory: &Path, home: &Path, recipe: &str, progress: &mut dyn Progress) -> Result<(), GuestError> {
    let store = packages::store(directory)?;
    let packages = packages::resolve(progress)?;
    packages::fetch(&packages, &store, progress)?;

    progress.step("putting the guest together");
    let work = directory.join("work");
    let _ = fs::remove_dir_all(&work);
    let (root, scratch, result) = (work.join("root"), work.join("stubs"), work.join("guest"));
    for path in [&root, &scratch, &result] {
        fs::create_dir_all(path).map_err(|e| GuestError::io("create", path, e))?;
    }
    packages::unpack(&packages, &store, &root)?;
    let (kernel, initrd) = initramfs::assemble(&root, &scratch)?;
    let manifest =
        Manifest { recipe: recipe.to_owned(), packages, initrd_sha256: hex(&Sha256::digest(&initrd)) };
    let text = serde_json::to_vec_pretty(&manifest).map_err(|e| GuestError::io("write", home, e.into()))?;
    let image = result.join("vmlinuz");
    fs::copy(&kernel, &image).map_err(|e| GuestError::io("copy", &kernel, e))?;
    for (name, content) in [("initrd", initrd), ("manifest.json", text)] {
        let path = result.join(name);
        fs::write(&path, content).map_err(|e| GuestError::io("write", &path, e))?;
        initramfs::publish(&path)?;
    }
    initramfs::publish(&image)?;
    // Only a whole guest ever has the final name.
    fs::rename(&result, home).map_err(|e| GuestError::io("rename", &result, e))?;
    let _ = fs::remove_dir_all(&work);
    Ok(())
}

/// Runs a program to its end and returns what it wrote to its standard output.
pub(crate) fn run(command: &mut Command) -> Result<String, GuestError> {
    let program = || {
        let mut words = vec![command_name(command)];
        words.extend(command.get_args().map(|word| word.to_string_lossy().into_owned()));
        words.join(" ")
    };
    let name = program();
    let output = command
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| GuestError::io("start", Path::new(&name), e))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(GuestError::Program {
        program: name,
        status: output.status.to_string(),
        output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

fn command_name(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
