//! Disks of controllers' processes that are full or slow when they are told to be.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A library that stands before a process's C library.
pub(crate) struct FaultyDisk {
    library: PathBuf,
}

impl FaultyDisk {
    /// Compiles it below this directory.
    pub(crate) fn compile(root: &Path) -> Self {
        let library = root.join("faulty_disk.so");
        let mut compiler = Command::new("gcc");
        compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]).arg(&library);
        compiler.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/service/support/faulty_disk.c"));
        assert!(compiler.status().expect("gcc is installed").success(), "it is compiled");
        Self { library }
    }

    /// Lies below one of the files of a process that is yet to be started.
    pub(crate) fn lie_below(&self, file: &Path, process: &mut Command) {
        process.env("LD_PRELOAD", &self.library).env("FAULTY_FILE", file).env("FAULTY_HOW", told(file));
    }

    /// From now on what lies below this file is `full`, `slow` by so many milliseconds, or as it should be.
    pub(crate) fn fault(file: &Path, how: Option<&str>) {
        match how {
            // As a whole: it is read at any time.
            Some(how) => {
                let partial = file.with_extension("fault-new");
                std::fs::write(&partial, how).expect("written");
                std::fs::rename(&partial, told(file)).expect("renamed");
            }
            None => std::fs::remove_file(told(file)).expect("there is a fault"),
        }
    }
}

fn told(file: &Path) -> PathBuf {
    file.with_extension("fault")
}
