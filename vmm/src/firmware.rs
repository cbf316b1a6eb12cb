//! The firmware that a machine starts with.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use pod_protocol::daemon::close_to_others;
use rustix::fs::{FlockOperation, flock};
use rustix::io::{FdFlags, fcntl_setfd};
use serde::Deserialize;

use crate::VmmError;

/// Where packages describe firmware to whoever runs QEMU (`docs/interop/firmware.json` of QEMU); a file of an earlier
/// directory hides its namesakes.
const DESCRIPTIONS: [&str; 2] = ["/etc/qemu/firmware", "/usr/share/qemu/firmware"];

/// The firmware that a machine starts with.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Firmware {
    /// SeaBIOS, which QEMU brings.
    #[default]
    Bios,
    /// UEFI, such as OVMF.
    Uefi(Uefi),
}

/// A build of UEFI, and the variables that one machine keeps in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uefi {
    /// Its code, which all machines share.
    pub code: PathBuf,
    /// The variables that a new machine begins with.
    pub template: PathBuf,
    /// The machine's own variables: boot entries that its system has made, for example. They outlive it.
    pub variables: PathBuf,
}

impl Firmware {
    /// Makes what a machine with this firmware needs.
    pub fn prepare(&self) -> Result<(), VmmError> {
        match self {
            Self::Bios => Ok(()),
            Self::Uefi(uefi) => uefi.prepare(),
        }
    }

    /// Keeps what one machine at a time may have from others. What is returned is to be inherited by the machine's QEMU: it is
    /// kept until that ends, however its parent does.
    pub(crate) fn reserve(&self) -> Result<Option<File>, VmmError> {
        match self {
            Self::Bios => Ok(None),
            Self::Uefi(uefi) => uefi.reserve().map(Some),
        }
    }
}

impl Uefi {
    /// The first build, by the names of their descriptions, that is installed here and runs on the machines of
    /// [`crate::VmSpec`].
    pub fn find(variables: PathBuf) -> Result<Self, VmmError> {
        Self::find_in(&DESCRIPTIONS.map(Path::new), variables)
    }

    fn find_in(directories: &[&Path], variables: PathBuf) -> Result<Self, VmmError> {
        let mut descriptions: BTreeMap<OsString, PathBuf> = BTreeMap::new();
        for directory in directories {
            for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
                if entry.path().extension().is_some_and(|extension| extension == "json") {
                    descriptions.entry(entry.file_name()).or_insert_with(|| entry.path());
                }
            }
        }
        // One that cannot be read, or is empty, as some are to hide another one, describes nothing.
        let read = |path: PathBuf| serde_json::from_slice(&fs::read(path).ok()?).ok();
        let files = descriptions.into_values().filter_map(read).find_map(Description::files);
        let (code, template) = files.ok_or_else(|| VmmError::Spec {
            reason: format!(
                "{} describe no UEFI that runs on q35 machines without SMM: apt-get install ovmf",
                directories.iter().map(|it| it.display().to_string()).collect::<Vec<_>>().join(" and ")
            ),
        })?;
        Ok(Self { code, template, variables })
    }

    /// Makes the file of the machine's variables, unless it is there. One of another build is refused.
    fn prepare(&self) -> Result<(), VmmError> {
        let failed = |path: &Path, source| VmmError::Directory { path: path.to_owned(), source };
        let size = |path: &Path| fs::metadata(path).map(|metadata| metadata.len());
        let whole = size(&self.template).map_err(|source| failed(&self.template, source))?;
        match size(&self.variables) {
            Ok(there) if there == whole => {
                self.close_to_others().map_err(|source| failed(&self.variables, source))
            }
            Ok(there) => Err(VmmError::Spec {
                reason: format!(
                    "{} has {there} bytes and {} has {whole}: it is of another firmware. Move it away to begin with new \
                     variables",
                    self.variables.display(),
                    self.template.display()
                ),
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.copy_template().map_err(|source| failed(&self.variables, source))
            }
            Err(source) => Err(failed(&self.variables, source)),
        }
    }

    /// Whoever can open the file can lock it as well, and keep the machine from starting. That somebody else's file stays as it is
    /// was its owner's choice, and that of a file system without owners is that of who mounted it.
    fn close_to_others(&self) -> io::Result<()> {
        match close_to_others(&File::open(&self.variables)?) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            done => done,
        }
    }

    /// QEMU itself would let any number of machines write to it.
    fn reserve(&self) -> Result<File, VmmError> {
        let failed = |source| VmmError::Directory { path: self.variables.clone(), source };
        let file = File::open(&self.variables).map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(VmmError::Spec {
                    reason: format!(
                        "another machine runs with the variables in {}: stop it, or give this one its own (--nvram)",
                        self.variables.display()
                    ),
                });
            }
            Err(error) => return Err(failed(error.into())),
        }
        fcntl_setfd(&file, FdFlags::empty()).map_err(|error| failed(error.into()))?;
        Ok(file)
    }

    /// The file is there as a whole or not at all, and one that somebody else made meanwhile stays.
    fn copy_template(&self) -> io::Result<()> {
        if let Some(directory) = self.variables.parent() {
            fs::create_dir_all(directory)?;
        }
        let mut partial = self.variables.clone().into_os_string();
        partial.push(format!(".{}", std::process::id()));
        let content = fs::read(&self.template)?;
        let open = File::options().write(true).create(true).truncate(true).mode(0o600).open(&partial);
        let written = open.and_then(|mut file| {
            file.write_all(&content)?;
            // A machine would not start any more with what a host that loses its power had not written yet.
            file.sync_all()
        });
        let linked = written.and_then(|()| fs::hard_link(&partial, &self.variables));
        let _ = fs::remove_file(&partial);
        match linked {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }
}

/// What is taken from a description.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Description {
    interface_types: Vec<String>,
    mapping: Mapping,
    targets: Vec<Target>,
    features: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Mapping {
    device: String,
    mode: Option<String>,
    executable: Option<Image>,
    nvram_template: Option<Image>,
}

#[derive(Debug, Deserialize)]
struct Image {
    filename: PathBuf,
    format: String,
}

#[derive(Debug, Deserialize)]
struct Target {
    architecture: String,
    machines: Vec<String>,
}

impl Description {
    /// Code and template, if it fits.
    fn files(self) -> Option<(PathBuf, PathBuf)> {
        let q35 = |target: &Target| {
            target.architecture == "x86_64" && target.machines.iter().any(|it| it.starts_with("pc-q35"))
        };
        let fits = self.interface_types.iter().any(|it| it == "uefi")
            && self.mapping.device == "flash"
            && self.mapping.mode.is_none_or(|mode| mode == "split")
            && self.targets.iter().any(q35)
            && !self.features.iter().any(|it| it == "requires-smm");
        let raw = |image: Image| (image.format == "raw").then_some(image.filename);
        fits.then_some((raw(self.mapping.executable?)?, raw(self.mapping.nvram_template?)?))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use rustix::io::fcntl_getfd;

    use super::*;

    fn describe(directory: &Path, name: &str, code: &str, features: &str) {
        let text = format!(
            r#"{{"description": "x", "interface-types": ["uefi"], "mapping": {{"device": "flash",
            "executable": {{"filename": "{code}", "format": "raw"}},
            "nvram-template": {{"filename": "/vars", "format": "raw"}}}},
            "targets": [{{"architecture": "x86_64", "machines": ["pc-i440fx-*", "pc-q35-*"]}}],
            "features": [{features}], "tags": []}}"#
        );
        fs::write(directory.join(name), text).unwrap();
    }

    #[test]
    fn the_first_build_that_fits_is_found() {
        let (own, brought) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let find = || Uefi::find_in(&[own.path(), brought.path()], "/v".into());
        assert!(find().unwrap_err().to_string().contains("apt-get install ovmf"));
        describe(brought.path(), "40-secure.json", "/secure", r#""secure-boot", "requires-smm""#);
        fs::write(brought.path().join("50-odd.json"), "{").unwrap();
        assert!(find().is_err(), "none that needs SMM");
        describe(brought.path(), "60-plain.json", "/plain", r#""acpi-s3""#);
        describe(brought.path(), "70-later.json", "/later", "");
        assert_eq!(find().unwrap().code, Path::new("/plain"));
        describe(own.path(), "60-plain.json", "/own", "");
        assert_eq!(find().unwrap().code, Path::new("/own"));
        fs::write(own.path().join("60-plain.json"), "").unwrap();
        assert_eq!(find().unwrap().code, Path::new("/later"));
    }

    #[test]
    fn variables_are_made_once_and_kept() {
        let directory = tempfile::tempdir().unwrap();
        let template = directory.path().join("template");
        fs::write(&template, "empty").unwrap();
        let variables = directory.path().join("nvram/vm1.fd");
        let uefi = Uefi { code: "/code".into(), template: template.clone(), variables: variables.clone() };
        let mode = || fs::metadata(&variables).unwrap().permissions().mode() & 0o777;
        uefi.prepare().unwrap();
        assert_eq!(fs::read_to_string(&variables).unwrap(), "empty");
        assert_eq!(mode(), 0o600, "who can open it can lock it");
        fs::set_permissions(&variables, fs::Permissions::from_mode(0o644)).unwrap();
        uefi.prepare().unwrap();
        assert_eq!(mode(), 0o600);
        assert_eq!(fs::read_dir(directory.path().join("nvram")).unwrap().count(), 1);
        fs::write(&variables, "entry").unwrap();
        uefi.prepare().unwrap();
        assert_eq!(fs::read_to_string(&variables).unwrap(), "entry");
        let reserved = uefi.reserve().unwrap();
        assert_eq!(fcntl_getfd(&reserved).unwrap(), FdFlags::empty(), "QEMU inherits it");
        assert!(uefi.reserve().unwrap_err().to_string().contains("another machine"));
        drop(reserved);
        uefi.reserve().unwrap();
        fs::write(&template, "of another size").unwrap();
        let error = uefi.prepare().unwrap_err().to_string();
        assert!(error.contains("another firmware") && error.contains("vm1.fd"), "{error}");
        fs::remove_file(&template).unwrap();
        assert!(uefi.prepare().unwrap_err().to_string().contains("template"));
    }

    #[test]
    fn variables_that_may_not_have_reached_the_disk_are_not_there() {
        let directory = tempfile::tempdir().unwrap();
        let [template, variables] = ["template", "vm1.fd"].map(|name| directory.path().join(name));
        fs::write(&template, "empty").unwrap();
        // What is written to a pipe can be synced to no disk.
        let partial = directory.path().join(format!("vm1.fd.{}", std::process::id()));
        mknodat(CWD, &partial, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let _reader = File::options().read(true).write(true).open(&partial).unwrap();
        let uefi = Uefi { code: "/code".into(), template, variables: variables.clone() };
        let error = uefi.prepare().unwrap_err();
        assert!(matches!(error, VmmError::Directory { .. }), "{error}");
        assert!(!variables.exists());
    }
}
