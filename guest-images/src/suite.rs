//! Packages of a suite of Debian that this machine does not follow, with lists of their own: the machine's stay as they are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{GuestError, run};

/// A suite, such as `bookworm-backports`, as its archive has it now.
#[derive(Debug)]
pub struct Suite {
    sources: PathBuf,
    lists: PathBuf,
    archives: PathBuf,
}

impl Suite {
    /// Fetches the lists of the suite called `name`. What is kept of it goes below `home`, which one process uses at a time.
    ///
    /// # Errors
    ///
    /// Its archive cannot be reached, or is not signed by a key that Debian's keyring has.
    pub fn update(name: &str, home: &Path) -> Result<Self, GuestError> {
        let suite = Self {
            sources: home.join("sources.list"),
            lists: home.join("lists"),
            archives: home.join("archives"),
        };
        // Somebody who was killed may have left packages there, of another version perhaps.
        let _ = fs::remove_dir_all(&suite.archives);
        for directory in [suite.lists.join("partial"), suite.archives.join("partial")] {
            fs::create_dir_all(&directory).map_err(|e| GuestError::io("create", &directory, e))?;
        }
        // Debian signs its archives with one of these, and the mirror is the one that a bare Debian knows.
        let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
        let source = format!("deb [signed-by={keys}] http://deb.debian.org/debian {name} main\n");
        fs::write(&suite.sources, source).map_err(|e| GuestError::io("write", &suite.sources, e))?;
        suite.apt("apt-get", &["-q", "update"])?;
        Ok(suite)
    }

    /// The names of the packages that the newest version of this one depends on, alternatives left out.
    ///
    /// # Errors
    ///
    /// The suite has no such package.
    pub fn dependencies(&self, package: &str) -> Result<Vec<String>, GuestError> {
        let said = self.apt("apt-cache", &["show", "--no-all-versions", package])?;
        let all = said.lines().find_map(|line| line.strip_prefix("Depends: ")).unwrap_or_default();
        let first_word = |dependency: &str| dependency.split_whitespace().next().map(str::to_owned);
        Ok(all.split(',').filter_map(first_word).collect())
    }

    /// Fetches these packages and unpacks them below `root`.
    ///
    /// # Errors
    ///
    /// One of them is not to be had, or there is no room.
    pub fn unpack(&self, packages: &[&str], root: &Path) -> Result<(), GuestError> {
        self.apt("apt-get", &[&["-q", "download"], packages].concat())?;
        fs::create_dir_all(root).map_err(|e| GuestError::io("create", root, e))?;
        let entries = fs::read_dir(&self.archives).map_err(|e| GuestError::io("read", &self.archives, e))?;
        for entry in entries {
            let path = entry.map_err(|e| GuestError::io("read", &self.archives, e))?.path();
            if path.extension().is_some_and(|extension| extension == "deb") {
                run(Command::new("dpkg-deb").arg("-x").arg(&path).arg(root))?;
                fs::remove_file(&path).map_err(|e| GuestError::io("remove", &path, e))?;
            }
        }
        Ok(())
    }

    fn apt(&self, program: &str, words: &[&str]) -> Result<String, GuestError> {
        let mut command = Command::new(program);
        for (option, value) in [
            ("Dir::Etc::SourceList", self.sources.as_path()),
            ("Dir::Etc::SourceParts", Path::new("/nonexistent")),
            ("Dir::State::Lists", &self.lists),
            ("Dir::Cache::Archives", &self.archives),
            ("Dir::Cache::pkgcache", Path::new("")),
            ("Dir::Cache::srcpkgcache", Path::new("")),
            ("APT::Sandbox::User", Path::new("root")),
        ] {
            command.arg("-o").arg(format!("{option}={}", value.display()));
        }
        run(command.args(words).current_dir(&self.archives))
    }
}
