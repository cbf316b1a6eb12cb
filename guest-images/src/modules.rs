//! Which kernel modules the guest needs, and the order in which they load.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::GuestError;

/// What the guest uses of its kernel. Whatever is built into the kernel needs no module and is skipped.
pub(crate) const WANTED: [&str; 10] = [
    "virtio_pci",
    "virtio_console",
    "virtio_net",
    "virtio_blk",
    "virtio-rng",
    "crc32c-intel",
    "crc32c_generic",
    "ext4",
    "xfs",
    "af_packet",
];

/// How the name of a module ends that is packed, as newer kernels' are.
pub(crate) const PACKED: &str = ".xz";

/// The modules below one kernel's directory.
pub(crate) struct Modules {
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

impl Modules {
    /// Looks through `directory` (`lib/modules/VERSION`).
    pub(crate) fn scan(directory: &Path) -> Result<Self, GuestError> {
        let mut files = BTreeMap::new();
        let mut pending = vec![directory.join("kernel")];
        while let Some(directory) = pending.pop() {
            let entries = fs::read_dir(&directory).map_err(|e| GuestError::io("read", &directory, e))?;
            for entry in entries {
                let entry = entry.map_err(|e| GuestError::io("read", &directory, e))?;
                let path = entry.path();
                if path.is_dir() {
                    pending.push(path);
                } else if let Some(name) = module_name(&path) {
                    files.insert(name, path);
                }
            }
        }
        let list = directory.join("modules.builtin");
        let builtin = fs::read_to_string(&list)
            .map_err(|e| GuestError::io("read", &list, e))?
            .lines()
            .filter_map(|line| module_name(Path::new(line)))
            .collect();
        Ok(Self { files, builtin })
    }

    /// The files to load for `wanted`, each after what it depends on.
    pub(crate) fn load_order(&self, wanted: &[&str]) -> Result<Vec<PathBuf>, GuestError> {
        let mut order = Vec::new();
        let mut done = BTreeSet::new();
        for name in wanted {
            self.visit(&canonical(name), &mut done, &mut order)?;
        }
        Ok(order)
    }

    fn visit(
        &self,
        name: &str,
        done: &mut BTreeSet<String>,
        order: &mut Vec<PathBuf>,
    ) -> Result<(), GuestError> {
        if self.builtin.contains(name) || !done.insert(name.to_owned()) {
            return Ok(());
        }
        let path = self.files.get(name).ok_or_else(|| GuestError::NoModule { module: name.to_owned() })?;
        let content = read(path)?;
        for dependency in dependencies(&content) {
            self.visit(&dependency, done, order)?;
        }
        order.push(path.clone());
        Ok(())
    }
}

/// A module as the kernel loads it, unpacked if it is packed.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, GuestError> {
    if path.extension().is_none_or(|extension| extension != &PACKED[1..]) {
        return fs::read(path).map_err(|e| GuestError::io("read", path, e));
    }
    let mut command = Command::new("xz");
    let output = command.args(["--decompress", "--stdout", "--"]).arg(path).stdin(Stdio::null()).output();
    let output = output.map_err(|e| GuestError::io("start xz, of package xz-utils, on", path, e))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(GuestError::io("unpack", path, std::io::Error::other(said)))
}

/// A module is named with either dash or underscore: one of them stands for both.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

fn module_name(path: &Path) -> Option<String> {
    path.file_name()?.to_str()?.trim_end_matches(PACKED).strip_suffix(".ko").map(canonical)
}

/// The `depends=` entry of a module's `.modinfo`: a zero-terminated string in the file.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let value = module[at + KEY.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(value).split(',').filter(|name| !name.is_empty()).map(canonical).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(directory: &Path, name: &str, depends: &str) {
        let file = directory.join("kernel/drivers").join(format!("{name}.ko"));
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, format!("code\0license=GPL\0depends={depends}\0more=x\0")).unwrap();
    }

    fn names(order: &[PathBuf]) -> Vec<String> {
        order.iter().filter_map(|path| module_name(path)).collect()
    }

    #[test]
    fn dependencies_load_first_and_builtins_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        module(directory.path(), "virtio_net", "virtio,net-failover");
        module(directory.path(), "net_failover", "failover");
        module(directory.path(), "failover", "");
        module(directory.path(), "virtio", "");
        fs::write(directory.path().join("modules.builtin"), "kernel/fs/ext4/ext4.ko\n").unwrap();
        let modules = Modules::scan(directory.path()).unwrap();
        let order = modules.load_order(&["ext4", "virtio_net", "virtio"]).unwrap();
        assert_eq!(names(&order), ["virtio", "failover", "net_failover", "virtio_net"]);
    }

    #[test]
    fn a_missing_module_is_named() {
        let directory = tempfile::tempdir().unwrap();
        module(directory.path(), "a", "b");
        fs::write(directory.path().join("modules.builtin"), "").unwrap();
        let error = Modules::scan(directory.path()).unwrap().load_order(&["a"]).unwrap_err();
        assert!(error.to_string().contains("module b"), "{error}");
    }
}
