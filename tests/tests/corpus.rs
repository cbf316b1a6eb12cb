//! The fuzz targets without a fuzzer: over their corpus, and over mutations of it.

#[path = "../fuzz/src/lib.rs"]
#[allow(unreachable_pub, reason = "it is a library for the fuzzer")]
mod targets;

use std::fmt::Write as _;
use std::panic::{RefUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// Mutations of each file for each round.
const MUTATIONS: u64 = 1000;
/// Numbers on whose other side things are different.
const EDGES: [u64; 8] = [0, 1, 0x7f, 0xff, 0x7fff_ffff, 0xffff_ffff, 1 << 63, u64::MAX];

fn rounds() -> u64 {
    std::env::var("WADI_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1)
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus")
}

/// A small generator: the same mutations each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % (limit.max(1) as u64)).expect("below a usize")
    }
}

/// Changes an input in a few places, now and then with a piece of another one.
fn mutate(random: &mut Random, input: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() + 1);
        match random.below(6) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, random.next().to_le_bytes()[0]),
            2 => {
                let edge = EDGES[random.below(EDGES.len())].to_le_bytes();
                let end = bytes.len().min(at + (1 << random.below(4)));
                bytes[at..end].copy_from_slice(&edge[..end - at]);
            }
            3 => {
                let from = random.below(other.len() + 1);
                let piece = &other[from..other.len().min(from + 1 + random.below(32))];
                bytes.splice(at..at, piece.iter().copied());
            }
            _ if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            _ => {}
        }
    }
    bytes
}

fn run(name: &str, what: &str, target: impl Fn(&[u8]) + RefUnwindSafe, input: &[u8]) {
    if catch_unwind(|| target(input)).is_err() {
        let mut text = String::new();
        for byte in input {
            let _ = write!(text, "\\x{byte:02x}");
        }
        panic!(
            "target {name} fails on {what}; the input, for the corpus once this is mended: printf '{text}' > \
             tests/fuzz/corpus/{name}/NAME"
        );
    }
}

fn files(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let entries =
        std::fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut files: Vec<_> = entries
        .map(|entry| {
            let path = entry.expect("a directory entry").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            (name, std::fs::read(&path).expect("a file of the corpus"))
        })
        .collect();
    files.sort();
    files
}

#[test]
fn every_target_survives_its_corpus_and_mutations_of_it() {
    for (seed, (name, target)) in (1..).zip(targets::TARGETS) {
        let files = files(&corpus().join(name));
        assert!(files.len() >= 5, "the corpus of {name} is too small");
        run(name, "nothing", target, &[]);
        let mut random = Random(seed);
        for (file, input) in &files {
            run(name, file, target, input);
            for _ in 0..MUTATIONS * rounds() {
                let (_, other) = &files[random.below(files.len())];
                run(name, &format!("a mutation of {file}"), target, &mutate(&mut random, input, other));
            }
        }
    }
}

#[test]
fn every_corpus_and_every_fuzz_target_belongs_to_a_function() {
    let names: Vec<_> = targets::TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let directories: Vec<_> = {
        let entries = std::fs::read_dir(corpus()).expect("the corpus");
        let mut names: Vec<_> = entries
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    };
    assert_eq!(directories, names);
    let programs: Vec<_> = files(&corpus().with_file_name("fuzz_targets"))
        .into_iter()
        .map(|(file, text)| {
            let name = file.trim_end_matches(".rs").to_owned();
            assert!(String::from_utf8_lossy(&text).contains(&format!("wadi_fuzz::{name}(data)")), "{file}");
            name
        })
        .collect();
    assert_eq!(programs, names);
}
