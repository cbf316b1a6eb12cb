//! Where code does something for coherence, by what its source says: a place that no test runs into is one that no test
//! leaves out.
//!
//! Lines are looked at as `rustfmt` leaves them. What is for tests only is left aside.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::Operation;

/// What is looked for, and what it does. What copies past the cache writes back besides.
const METHODS: [(&str, Operation); 7] = [
    ("write_back", Operation::WriteBack),
    ("stream_from", Operation::WriteBack),
    ("write_streaming", Operation::WriteBack),
    ("invalidate", Operation::Invalidate),
    ("flush", Operation::Flush),
    ("store_fence", Operation::StoreFence),
    ("full_fence", Operation::FullFence),
];

/// A call of a method that is named as one of [`Memory`](crate::Memory)'s.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Call {
    /// Seen from the workspace's root.
    pub file: String,
    /// Its line there.
    pub line: u32,
    /// What it does.
    pub operation: Operation,
}

/// All calls in a file or a directory, seen from the workspace's root, but for what only tests are built with.
///
/// # Panics
///
/// If a file cannot be read.
pub fn calls(workspace: &Path, source: &str) -> Vec<Call> {
    let mut calls = Vec::new();
    for (file, text) in files(workspace, source) {
        let found = calls_in(&text).into_iter();
        calls.extend(found.map(|(line, operation)| Call { file: file.clone(), line, operation }));
    }
    calls.sort();
    calls
}

/// The names of the files there that are not for tests only, and what they say.
pub(super) fn files(workspace: &Path, source: &str) -> Vec<(String, String)> {
    let mut files = Vec::new();
    collect(&workspace.join(source), &mut files);
    let texts: Vec<(PathBuf, String)> = files
        .into_iter()
        .map(|file| {
            let text = fs::read_to_string(&file);
            let text = text.unwrap_or_else(|error| panic!("cannot read {}: {error}", file.display()));
            (file, text)
        })
        .collect();
    let for_tests: BTreeSet<PathBuf> =
        texts.iter().flat_map(|(file, text)| modules_for_tests(file, text)).collect();
    let is_for_tests = |file: &Path| {
        for_tests.iter().any(|module| file.starts_with(module) || file == module.with_extension("rs"))
    };
    let others = texts.into_iter().filter(|(file, _)| !is_for_tests(file));
    let named = |(file, text): (PathBuf, String)| {
        let name = file.strip_prefix(workspace).unwrap_or(&file);
        (name.to_string_lossy().into_owned(), text)
    };
    others.map(named).collect()
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) {
    let Ok(inside) = fs::read_dir(path) else {
        assert!(path.is_file(), "there is no {}", path.display());
        return files.push(path.to_owned());
    };
    for entry in inside.flatten() {
        let path = entry.path();
        if path.is_dir() || path.extension().is_some_and(|extension| extension == "rs") {
            collect(&path, files);
        }
    }
}

/// The lines of a source with their numbers, but for what follows `#[cfg(test)]`; of a module elsewhere only its declaration does.
fn production(text: &str) -> impl Iterator<Item = (u32, &str)> {
    let mut until: Option<String> = None;
    let mut attribute = None;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        if let Some(end) = &until {
            if line == end {
                until = None;
            }
            return false;
        }
        let code = line.trim_start();
        let indent = &line[..line.len() - code.len()];
        if is_for_tests(code) {
            attribute = Some(indent.to_owned());
            return false;
        }
        let Some(begun) = attribute.clone() else { return true };
        // Other attributes may follow, and what it says may take several lines.
        if begun == indent && code.ends_with('{') {
            until = Some(format!("{indent}}}"));
            attribute = None;
        } else if begun == indent && code.ends_with([';', '}', ',']) {
            attribute = None;
        }
        false
    })
}

fn is_for_tests(code: &str) -> bool {
    code == "#[cfg(test)]" || code.starts_with("#[cfg(any(test,") || code.starts_with("#[cfg(all(test,")
}

/// The modules in files of their own that only tests have.
fn modules_for_tests(file: &Path, text: &str) -> Vec<PathBuf> {
    let root =
        file.file_name().is_some_and(|name| ["lib.rs", "main.rs", "mod.rs"].iter().any(|it| name == *it));
    let beside = if root { file.parent().unwrap_or(file).to_owned() } else { file.with_extension("") };
    let mut modules = Vec::new();
    let mut lines = text.lines().map(str::trim);
    while let Some(line) = lines.next() {
        if is_for_tests(line)
            && let Some(declared) = lines.find(|line| !line.starts_with("#["))
            && let Some((_, name)) = declared.trim_end_matches(';').split_once("mod ")
            && declared.ends_with(';')
        {
            modules.push(beside.join(name));
        }
    }
    modules
}

fn calls_in(text: &str) -> Vec<(u32, Operation)> {
    let mut found = BTreeSet::new();
    for (number, line) in production(text) {
        let code = line.split("//").next().unwrap_or_default();
        for (method, operation) in METHODS {
            let named = code.match_indices(method).any(|(at, _)| {
                let called = code[..at].ends_with(['.', ':']);
                // To flush a file or a link takes no argument.
                let arguments = code[at + method.len()..].strip_prefix('(');
                called && arguments.is_some_and(|it| !method.ends_with("flush") || !it.starts_with(')'))
            });
            if named {
                found.insert((number, operation));
            }
        }
    }
    found.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_found_wherever_they_are_not_for_tests() {
        let text = "\
fn one<M: Memory>(memory: &M) {
    memory.write_back(at, 8); // and memory.full_fence()
    // memory.flush(at, 8);
    self.in_guest(|at, bytes| memory.flush(at, bytes));
    io::stdout().flush();
    memory
        .store_fence();
    Memory::invalidate(memory, at, 8);
    my_write_back(at);
}

#[cfg(test)]
mod elsewhere;

#[cfg(test)]
#[expect(unused)]
fn two<M: Memory>(
    memory: &M,
) {
    memory.full_fence();
}

impl<M> Three<M> {
    #[cfg(test)]
    fn four(&self) {
        if true {
            self.memory.full_fence();
        }
    }

    fn five(&self) {
        self.memory.write_streaming(at, &[]);
    }
}
";
        let expected = [
            (2, Operation::WriteBack),
            (4, Operation::Flush),
            (7, Operation::StoreFence),
            (8, Operation::Invalidate),
            (32, Operation::WriteBack),
        ];
        assert_eq!(calls_in(text), expected);
        let at = |path: &str| modules_for_tests(Path::new(path), text);
        assert_eq!(at("a/src/lib.rs"), [Path::new("a/src/elsewhere")]);
        assert_eq!(at("a/src/b.rs"), [Path::new("a/src/b/elsewhere")]);
    }

    #[test]
    fn methods_are_those_of_operations() {
        for (method, operation) in METHODS {
            assert!(method == operation.method() || operation == Operation::WriteBack, "{method}");
        }
    }
}
