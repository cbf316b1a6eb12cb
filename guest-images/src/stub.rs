//! Stand-ins for libraries that the guest's programs are linked with but never call.
//!
//! Debian's fio is linked with Ceph, Gluster, RDMA and more, which would multiply the guest's size. A program
//! starts as long as every library it names is there with the symbols and versions it wants, so an empty
//! library with those names will do. Whoever calls into one gets a trap.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::GuestError;
use crate::elf::Linkage;

/// What one stand-in must define: symbols by version, `None` for those without.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Stub {
    symbols: BTreeMap<Option<String>, BTreeSet<String>>,
}

/// The stand-ins that `programs` need, by soname, when only the libraries `present` are there.
pub(crate) fn plan(programs: &[Linkage], present: &BTreeMap<String, Linkage>) -> BTreeMap<String, Stub> {
    let mut stubs: BTreeMap<String, Stub> = BTreeMap::new();
    let defined: BTreeSet<&str> =
        present.values().flat_map(|linkage| linkage.defined.iter().map(String::as_str)).collect();
    for program in programs.iter().chain(present.values()) {
        let missing: Vec<&String> =
            program.needed.iter().filter(|name| !present.contains_key(*name)).collect();
        for name in &missing {
            stubs.entry((*name).clone()).or_default();
        }
        for wanted in &program.wanted {
            let (library, version) = match &wanted.version {
                Some((library, version)) if stubs.contains_key(library) => {
                    (library.clone(), Some(version.clone()))
                }
                Some(_) => continue,
                // Without a version the linker takes the first library that has it, so any will do.
                None if defined.contains(wanted.symbol.as_str()) => continue,
                None => match missing.last() {
                    Some(library) => ((*library).clone(), None),
                    None => continue,
                },
            };
            stubs
                .entry(library)
                .or_default()
                .symbols
                .entry(version)
                .or_default()
                .insert(wanted.symbol.clone());
        }
    }
    stubs
}

impl Stub {
    fn source(&self) -> String {
        let mut source = String::new();
        for symbol in self.symbols.values().flatten() {
            // Writing to a String cannot fail.
            let _ = writeln!(source, "void {symbol}(void) {{ __builtin_trap(); }}");
        }
        source
    }

    fn version_script(&self) -> Option<String> {
        let mut script = String::new();
        for (version, symbols) in &self.symbols {
            // Symbols that the script does not mention stay as they are, without a version.
            let Some(version) = version else { continue };
            let names: Vec<&str> = symbols.iter().map(String::as_str).collect();
            let _ = writeln!(script, "{version} {{ {}; }};", names.join("; "));
        }
        (!script.is_empty()).then_some(script)
    }

    /// Compiles the stand-in for `soname` in `directory` and returns its bytes.
    pub(crate) fn build(&self, soname: &str, directory: &Path) -> Result<Vec<u8>, GuestError> {
        let source = directory.join("stub.c");
        let script = directory.join("stub.map");
        let library = directory.join(soname);
        fs::write(&source, self.source()).map_err(|e| GuestError::io("write", &source, e))?;
        let mut compiler = Command::new("gcc");
        compiler
            .args(["-shared", "-nostdlib", "-fPIC", "-O1", "-fno-builtin", "-w", "-Wl,--build-id=none"])
            .arg(format!("-Wl,-soname={soname}"))
            .arg("-s");
        if let Some(text) = self.version_script() {
            fs::write(&script, text).map_err(|e| GuestError::io("write", &script, e))?;
            compiler.arg(format!("-Wl,--version-script={}", script.display()));
        }
        compiler.arg("-o").arg(&library).arg(&source);
        crate::run(&mut compiler)?;
        fs::read(&library).map_err(|e| GuestError::io("read", &library, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elf::Wanted;

    fn wanted(symbol: &str, version: Option<(&str, &str)>) -> Wanted {
        Wanted {
            symbol: symbol.to_owned(),
            version: version.map(|(library, version)| (library.to_owned(), version.to_owned())),
        }
    }

    fn program() -> Linkage {
        Linkage {
            needed: vec!["libheavy.so.1".into(), "libc.so.6".into()],
            wanted: vec![
                wanted("heavy_open", Some(("libheavy.so.1", "HEAVY_1.0"))),
                wanted("heavy_more", Some(("libheavy.so.1", "HEAVY_2.0"))),
                wanted("read", Some(("libc.so.6", "GLIBC_2.2.5"))),
                wanted("inflate", None),
                wanted("heavy_plain", None),
            ],
            defined: vec![],
        }
    }

    fn libraries() -> BTreeMap<String, Linkage> {
        let libc = Linkage { defined: vec!["read".into(), "inflate".into()], ..Linkage::default() };
        BTreeMap::from([("libc.so.6".to_owned(), libc)])
    }

    #[test]
    fn only_missing_libraries_are_stood_in_for() {
        let stubs = plan(&[program()], &libraries());
        assert_eq!(stubs.keys().collect::<Vec<_>>(), ["libheavy.so.1"]);
        let all: Vec<_> = stubs["libheavy.so.1"].symbols.values().flatten().collect();
        assert_eq!(all, ["heavy_plain", "heavy_open", "heavy_more"]);
    }

    #[test]
    fn a_stub_has_the_versions_that_are_asked_for() {
        let directory = tempfile::tempdir().unwrap();
        let stubs = plan(&[program()], &libraries());
        let bytes = stubs["libheavy.so.1"].build("libheavy.so.1", directory.path()).unwrap();
        let linkage = Linkage::read(&bytes).unwrap();
        for symbol in ["heavy_open", "heavy_more", "heavy_plain"] {
            assert!(linkage.defined.contains(&symbol.to_owned()), "{linkage:?}");
        }
        // A version definition is a symbol of its own.
        assert!(linkage.defined.contains(&"HEAVY_2.0".to_owned()), "{linkage:?}");
    }
}
