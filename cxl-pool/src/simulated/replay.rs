//! Tests over many seeds, any of which can be run again alone.

use std::collections::BTreeSet;
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::time::Instant;
use std::{env, thread};

use super::omission::name;
use super::source::files;
use super::{Call, Omission, Site, calls};

/// Names one seed to run instead of all.
const SEED: &str = "WADI_SEED";
/// Names the omission to run with it.
const OMITTED: &str = "WADI_OMITTED";

fn number(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

/// Which seeds to try: so many times `WADI_ROUNDS`, or the one that `WADI_SEED` names.
pub fn seeds(count: u64) -> Range<u64> {
    match number(SEED) {
        Some(seed) => seed..seed + 1,
        None => 0..count * number("WADI_ROUNDS").unwrap_or(1).max(1),
    }
}

/// Runs a check with so many seeds. If one fails, it says how to run that one again; `target` is what follows `cargo test`, such
/// as `-p cxl-channel --test simulated`.
///
/// # Panics
///
/// If a check fails.
pub fn check_seeds(target: &str, count: u64, mut check: impl FnMut(u64) -> Result<(), String>) {
    let (began, mut runs) = (Instant::now(), 0);
    for seed in seeds(count) {
        match caught(|| check(seed)) {
            Ok(()) => runs += 1,
            Err(failure) => panic!("{failure}\nto see it again: {}", command(target, seed)),
        }
    }
    println!("{runs} schedules in {:.1} s", began.elapsed().as_secs_f64());
}

/// What a check found, whether it says so or panics.
fn caught(check: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    panic::catch_unwind(AssertUnwindSafe(check))
        .unwrap_or_else(|_| Err("it panicked, as said above".to_owned()))
}

fn command(target: &str, seed: u64) -> String {
    // The harness names the thread after the test, unless it has only one.
    let current = thread::current();
    let test = current.name().filter(|name| *name != "main").unwrap_or_default();
    format!("{SEED}={seed} cargo test {target} -- --exact {test}")
}

/// Proof that a check is worth something: each thing that code does for coherence is left out, one at a time, wherever the check
/// runs into it, and the check must fail with one of its seeds.
#[derive(Clone, Copy, Debug)]
pub struct Mutilation<'a> {
    /// What follows `cargo test`, such as `-p cxl-channel --test simulated`.
    pub target: &'a str,
    /// Where the workspace lies.
    pub workspace: &'a Path,
    /// Only what is done in these files and directories, seen from the workspace's root. All that their source does for coherence, but
    /// for tests, has to be met.
    pub sources: &'a [&'a str],
    /// With how many seeds the check must pass while nothing is left out, or something excused.
    pub complete: u64,
    /// With how many it may be tried until it fails.
    pub seeds: u64,
    /// The names of sites that it need not notice.
    pub excused: &'a [&'a str],
    /// What the check need not run into, and why: the names of sites, or of files.
    pub unmet: &'a [(&'a str, &'a str)],
}

impl Mutilation<'_> {
    /// Prints with which seed each omission is noticed.
    ///
    /// # Panics
    ///
    /// If the check fails while nothing is left out, or does not run into all that the source does, or if an omission goes unnoticed
    /// that is not excused, or if one is noticed that is: whoever reads the excuse would be misled.
    pub fn prove(&self, check: impl Fn(u64, &Omission)) {
        let complete = Omission::default();
        check_seeds(self.target, self.complete, |seed| {
            check(seed, &complete);
            Ok(())
        });
        let named = |site: Site| (site.name(self.workspace), site);
        let files = self.sources.iter().flat_map(|source| files(self.workspace, source));
        let files: BTreeSet<String> = files.map(|(file, _)| file).collect();
        let is_meant = |site: &Site| files.contains(site.file);
        let sites = complete.seen().into_iter().filter(is_meant);
        let sites: Vec<(String, Site)> = sites.map(named).collect();
        if let (Some(seed), Ok(omitted)) = (number(SEED), env::var(OMITTED)) {
            let (_, site) =
                sites.into_iter().find(|(name, _)| *name == omitted).expect("a site of this name");
            return check(seed, &Omission::of(site));
        }
        if number(SEED).is_none() {
            self.expect_all_met(&sites.iter().map(|(name, _)| name.as_str()).collect());
        }
        println!("to see one of these: {SEED}=… {OMITTED}='…' cargo test {} -- --nocapture", self.target);
        let (mut unnoticed, mut used) = (Vec::new(), Vec::new());
        for (name, site) in sites {
            let excused = self.excused.contains(&name.as_str());
            let omission = Omission::of(site);
            let fails = |seed: &u64| {
                caught(|| {
                    check(*seed, &omission);
                    Ok(())
                })
                .is_err()
            };
            match (0..if excused { self.complete } else { self.seeds }).find(fails) {
                Some(seed) => println!("| `{name}` | seed {seed} |"),
                None if excused => {
                    println!("| `{name}` | not noticed |");
                    used.push(name);
                }
                None => unnoticed.push(name),
            }
        }
        assert_eq!(unnoticed, [""; 0], "left out, and nothing failed");
        assert_eq!(used, self.excused, "excused, and noticed all the same");
    }

    /// Sites are found by running into them. Here is seen that none is missing.
    fn expect_all_met(&self, met: &BTreeSet<&str>) {
        let calls = self.sources.iter().flat_map(|source| calls(self.workspace, source));
        let there: BTreeSet<String> = calls
            .map(|Call { file, line, operation }| name(self.workspace, &file, line, operation))
            .collect();
        let of = |excuse: &str, site: &str| {
            let is_file = Path::new(excuse).extension().is_some_and(|it| it == "rs") || excuse.ends_with('/');
            site == excuse || is_file && site.starts_with(excuse)
        };
        let missing = there.iter().map(String::as_str).filter(|site| !met.contains(site));
        let (excused, missing): (Vec<&str>, Vec<&str>) =
            missing.partition(|site| self.unmet.iter().any(|(excuse, _)| of(excuse, site)));
        assert_eq!(missing, [""; 0], "in the source, and no run meets it");
        let needless = self.unmet.iter().filter(|(excuse, _)| !excused.iter().any(|site| of(excuse, site)));
        let needless: Vec<_> = needless.collect();
        assert!(needless.is_empty(), "said not to be met, and met or not there: {needless:?}");
    }
}
