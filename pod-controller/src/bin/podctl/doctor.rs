//! Looks at this host, without a controller: what its daemons need, what is missing, and how to mend it.

mod caches;
mod devices;
mod guests;
mod permissions;
mod pool;
mod processor;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use pod_protocol::config::HostConfig;
use serde::Serialize;

use crate::Failure;
use crate::arguments::Output;
use crate::table;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    /// As it should be.
    Good,
    /// It works, but slower or with less than it could.
    Poor,
    /// A daemon that needs it does not work.
    Broken,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    /// What was looked at.
    subject: String,
    verdict: Verdict,
    /// What was found.
    found: String,
    /// What to do about it; nothing where nothing is to be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

impl Finding {
    fn good(subject: &str, found: impl Into<String>) -> Self {
        Self { subject: subject.to_owned(), verdict: Verdict::Good, found: found.into(), advice: None }
    }

    fn poor(subject: &str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { verdict: Verdict::Poor, advice: Some(advice.into()), ..Self::good(subject, found) }
    }

    fn broken(subject: &str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { verdict: Verdict::Broken, ..Self::poor(subject, found, advice) }
    }
}

/// Where the kernel's files are: a test has its own.
struct Machine {
    root: PathBuf,
}

impl Machine {
    fn path(&self, absolute: &str) -> PathBuf {
        self.root.join(absolute.trim_start_matches('/'))
    }

    /// A file of the kernel, without the line's end; nothing if it is not there.
    fn read(&self, absolute: &str) -> Option<String> {
        fs::read_to_string(self.path(absolute)).ok().map(|text| text.trim_end().to_owned())
    }
}

/// Looks at everything, and shows it. Fails if something is broken.
pub(crate) fn run(config: &Path, format: Output, out: &mut dyn Write) -> Result<(), Failure> {
    let findings = examine(config, &Machine { root: "/".into() });
    match format {
        Output::Json => {
            let text = serde_json::to_string_pretty(&findings).map_err(std::io::Error::from)?;
            writeln!(out, "{text}")?;
        }
        Output::Yaml => write!(out, "{}", crate::show::yaml(&findings)?)?,
        Output::Table | Output::Wide => writeln!(out, "{}", show(&findings))?,
    }
    match findings.iter().filter(|finding| finding.verdict == Verdict::Broken).count() {
        0 => Ok(()),
        1 => Err(Failure::Broken("something is broken on this host".to_owned())),
        many => Err(Failure::Broken(format!("{many} things are broken on this host"))),
    }
}

fn examine(config: &Path, machine: &Machine) -> Vec<Finding> {
    let mut findings = processor::examine(machine);
    match HostConfig::load(config) {
        Ok(host) => {
            let found = format!("{} is host {}", host.host.name, host.host.id.get());
            findings.push(Finding::good("configuration", found));
            findings.extend(processor::examine_cores(&host));
            findings.extend(pool::examine(&host, machine));
            findings.extend(devices::examine(&host, machine));
            findings.extend(permissions::examine(&host, machine));
        }
        Err(error) => {
            let advice = format!("write {}, or name another file with --config", config.display());
            findings.push(Finding::broken("configuration", error.to_string(), advice));
        }
    }
    findings.extend(guests::examine(machine));
    findings
}

fn show(findings: &[Finding]) -> String {
    let word = |verdict| match verdict {
        Verdict::Good => "good",
        Verdict::Poor => "poor",
        Verdict::Broken => "BROKEN",
    };
    let rows = findings.iter().map(|finding| {
        vec![finding.subject.clone(), word(finding.verdict).to_owned(), finding.found.clone()]
    });
    let mut text = table::plain(&["what", "state", "found"], &[], rows.collect());
    let advised = findings.iter().filter_map(|finding| Some((finding, finding.advice.as_ref()?)));
    for (number, (finding, advice)) in advised.enumerate() {
        text.push_str(if number == 0 { "\n\nTo mend:\n" } else { "\n" });
        text.extend(["  ", &finding.subject, ": ", advice]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of files.
    pub(super) fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let directory = tempfile::tempdir().expect("a directory");
        for (path, text) in files {
            let path = directory.path().join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().expect("not the root")).expect("a directory");
            fs::write(path, text).expect("a file");
        }
        let machine = Machine { root: directory.path().to_owned() };
        (directory, machine)
    }

    #[test]
    fn a_missing_configuration_is_one_broken_thing_among_others() {
        let (directory, machine) = machine(&[]);
        let findings = examine(&directory.path().join("host.toml"), &machine);
        let finding = findings.iter().find(|finding| finding.subject == "configuration").expect("one");
        assert_eq!(finding.verdict, Verdict::Broken);
        assert!(finding.advice.as_ref().is_some_and(|advice| advice.contains("--config")));
        assert!(findings.len() > 3);
    }

    #[test]
    fn advice_follows_the_table() {
        let text = show(&[Finding::good("a", "one"), Finding::broken("bc", "two", "do this")]);
        assert_eq!(
            text,
            "WHAT  STATE   FOUND\na     good    one\nbc    BROKEN  two\n\nTo mend:\n  bc: do this"
        );
    }
}
