//! Which QEMU is installed, and which accelerator works.

use std::fmt;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::VmmError;

/// The program that runs virtual machines.
pub const QEMU: &str = "qemu-system-x86_64";

/// How long a kernel may take to show that it boots.
const PROBE_DEADLINE: Duration = Duration::from_secs(4);

/// A version of QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct QemuVersion {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl QemuVersion {
    /// Asks a QEMU.
    pub fn detect(qemu: &Path) -> Result<Self, VmmError> {
        let output = Command::new(qemu).arg("--version").output().map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => VmmError::NoQemu,
            _ => VmmError::Start { program: qemu.display().to_string(), source },
        })?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Self::parse(&text)
            .ok_or_else(|| VmmError::UnknownVersion { answer: text.lines().next().unwrap_or("").into() })
    }

    /// Reads `QEMU emulator version 7.2.17 (Debian …)`.
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split("version ").nth(1)?.split(['.', ' ', '\n']);
        Some(Self { major: numbers.next()?.parse().ok()?, minor: numbers.next()?.parse().ok()? })
    }

    /// How a socket is told to connect again: the option was renamed.
    pub fn reconnect_option(self) -> (&'static str, u32) {
        if self >= (Self { major: 9, minor: 2 }) { ("reconnect-ms", 1000) } else { ("reconnect", 1) }
    }

    /// Whether a vhost-user NIC with MSI-X crashes this QEMU once the guest's driver starts: 7.2 under TCG
    /// does so in `msix_set_vector_notifiers`, 10.0 does not.
    pub fn crashes_on_nic_vectors(self, accelerator: Accelerator) -> bool {
        accelerator == Accelerator::Tcg && self < (Self { major: 10, minor: 0 })
    }
}

impl fmt::Display for QemuVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Accelerator {
    /// The processor.
    Kvm,
    /// QEMU's translator.
    #[default]
    Tcg,
}

impl Accelerator {
    /// KVM if `kernel` really boots with it in this QEMU, else TCG. That `/dev/kvm` exists proves nothing: nested and
    /// paravirtual variants open, and then abort or hang.
    pub fn probe(qemu: &Path, kernel: &Path) -> Self {
        if !Path::new("/dev/kvm").exists() {
            return Self::Tcg;
        }
        if boots_with_kvm(qemu, kernel).unwrap_or(false) { Self::Kvm } else { Self::Tcg }
    }

    /// QEMU's `-accel` value.
    pub fn accel(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg,thread=multi",
        }
    }

    /// QEMU's `-cpu` value.
    pub fn cpu(self) -> &'static str {
        match self {
            Self::Kvm => "host",
            Self::Tcg => "max",
        }
    }

    /// libvirt's name for it.
    pub fn domain_type(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "qemu",
        }
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "KVM",
            Self::Tcg => "TCG",
        })
    }
}

/// Boots the kernel without anything to mount: it has booted when it complains of that.
fn boots_with_kvm(qemu: &Path, kernel: &Path) -> io::Result<bool> {
    let mut child = Command::new(qemu)
        .args(["-machine", "q35", "-accel", "kvm", "-cpu", "host", "-m", "256", "-smp", "1"])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"])
        .arg("-kernel")
        .arg(kernel)
        .args(["-append", "console=ttyS0 panic=-1"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let console = child.stdout.take().map(|mut stdout| {
        thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stdout.read_to_end(&mut text);
            String::from_utf8_lossy(&text).contains("Kernel panic - not syncing: VFS")
        })
    });
    let started = Instant::now();
    while child.try_wait()?.is_none() {
        if started.elapsed() > PROBE_DEADLINE {
            child.kill()?;
            child.wait()?;
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(console.is_some_and(|reader| reader.join().unwrap_or(false)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn versions_are_read() {
        let text = "QEMU emulator version 7.2.17 (Debian 1:7.2+dfsg-7+deb12u13)\nCopyright (c) 2003-2022";
        assert_eq!(QemuVersion::parse(text), Some(QemuVersion { major: 7, minor: 2 }));
        let text = "QEMU emulator version 10.0.2\n";
        assert_eq!(QemuVersion::parse(text), Some(QemuVersion { major: 10, minor: 0 }));
        assert_eq!(QemuVersion::parse("something else"), None);
    }

    #[test]
    fn the_qemu_that_is_to_run_the_machine_is_the_one_that_is_tried() {
        let directory = tempfile::tempdir().unwrap();
        let qemu = directory.path().join("qemu");
        let script = "#!/bin/sh\n[ \"$4\" = kvm ] && echo 'Kernel panic - not syncing: VFS: no root'\n";
        std::fs::write(&qemu, script).unwrap();
        std::fs::set_permissions(&qemu, std::fs::Permissions::from_mode(0o755)).unwrap();
        let boots = || loop {
            match boots_with_kvm(&qemu, Path::new("/kernel")) {
                // A process that another test was just forking still has it open.
                Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {}
                said => return said,
            }
        };
        assert!(boots().unwrap());
        std::fs::write(&qemu, "#!/bin/sh\n").unwrap();
        assert!(!boots().unwrap());
    }

    #[test]
    fn options_follow_the_version() {
        let old = QemuVersion { major: 7, minor: 2 };
        let new = QemuVersion { major: 10, minor: 0 };
        assert_eq!(old.reconnect_option(), ("reconnect", 1));
        assert_eq!(new.reconnect_option(), ("reconnect-ms", 1000));
        assert_eq!(QemuVersion { major: 9, minor: 1 }.reconnect_option(), ("reconnect", 1));
        assert_eq!(QemuVersion { major: 9, minor: 2 }.reconnect_option(), ("reconnect-ms", 1000));
        assert!(old.crashes_on_nic_vectors(Accelerator::Tcg));
        assert!(!old.crashes_on_nic_vectors(Accelerator::Kvm));
        assert!(!new.crashes_on_nic_vectors(Accelerator::Tcg));
    }
}
