//! The configuration file of a host, read by every daemon that runs on it.

use std::collections::BTreeSet;
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cxl_pool::HostId;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::daemon::check_log_level;
use crate::protocol::Protocol;
use crate::run_directory::RunDirectory;

/// For how long a holder may act without having looked at its fence, at least and at most, in ms.
pub const FENCE_MS: RangeInclusive<u64> = 20..=60_000;

/// What `host.toml` says. Unknown keys are refused: a misspelt one would otherwise be a setting that never takes
/// effect.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct HostConfig {
    /// Who this host is.
    pub host: HostSection,
    /// Which pool it shares.
    pub pool: PoolSection,
    /// How its daemons run.
    #[serde(default)]
    pub run: RunSection,
    /// Its NICs; [`HostConfig::nics`] reads them as the network engine defines them.
    #[serde(default)]
    pub nic: Vec<toml::Table>,
    /// Its SSDs; [`HostConfig::ssds`] reads them as the storage engine defines them.
    #[serde(default)]
    pub ssd: Vec<toml::Table>,
    /// The network engine's daemons.
    #[serde(default)]
    pub net: EngineSection,
    /// The storage engine's daemons.
    #[serde(default)]
    pub blk: BlkSection,
}

/// `[host]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct HostSection {
    /// Its slot in the pool, from 1. Unique in the pod.
    pub id: HostId,
    /// Its name in the controller's API. Unique in the pod.
    pub name: String,
    /// What its daemons log: `error`, `warn`, `info`, `debug` or `trace`, or one for each part; as the environment says without it.
    #[serde(default)]
    pub log: Option<String>,
}

/// `[pool]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct PoolSection {
    /// A DAX device, or a file in shared memory.
    pub path: PathBuf,
}

/// `[run]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct RunSection {
    /// Where sockets, doorbells and locks lie. Hosts that share a kernel share it.
    pub directory: PathBuf,
    /// How a daemon that has nothing to do learns that it has.
    pub wakeup: Wakeup,
    /// How long a worker goes on polling after its last work.
    pub busy_poll_us: u64,
    /// How long it does while others have in hand what it has begun, such as an SSD, as long as that ends within this time. What is less
    /// than `busy-poll-us` changes nothing.
    pub poll_in_flight_us: u64,
    /// How long a holder may act without having looked at its fence, within [`FENCE_MS`]. The same in the whole pod: controllers wait for as long as an
    /// endpoint says, or as they are told here, whichever is longer.
    pub fence_ms: u64,
    /// How long a worker may be busy with one and the same thing before its daemon is taken for stuck and ends, so that it is
    /// started again. Zero: for ever.
    pub worker_timeout_ms: u64,
    /// Which version of the protocol is spoken. It is no key of the file: the option `--protocol-minor` says it, to each
    /// daemon for itself.
    #[serde(skip)]
    pub protocol: Protocol,
}

impl Default for RunSection {
    fn default() -> Self {
        Self {
            directory: "/run/wadi".into(),
            wakeup: Wakeup::default(),
            busy_poll_us: 50,
            poll_in_flight_us: 200,
            fence_ms: 250,
            worker_timeout_ms: 5000,
            protocol: Protocol::CURRENT,
        }
    }
}

impl RunSection {
    /// Says what is outside of its range. Controllers have this section too.
    pub fn check(&self) -> Result<(), String> {
        if !FENCE_MS.contains(&self.fence_ms) {
            let (least, most) = (FENCE_MS.start(), FENCE_MS.end());
            return Err(format!("run.fence-ms = {}: use {least} to {most}", self.fence_ms));
        }
        if !matches!(self.worker_timeout_ms, 0 | 500..=600_000) {
            return Err(format!(
                "run.worker-timeout-ms = {}: use 500 to 600000, or 0 for no limit",
                self.worker_timeout_ms
            ));
        }
        let polls = [("busy-poll-us", self.busy_poll_us), ("poll-in-flight-us", self.poll_in_flight_us)];
        match polls.into_iter().find(|&(_, us)| us > 1_000_000) {
            Some((key, us)) => Err(format!("run.{key} = {us}: use at most 1000000")),
            None => Ok(()),
        }
    }

    /// How long a worker goes on polling after its last work.
    pub fn busy_poll(&self) -> Duration {
        Duration::from_micros(self.busy_poll_us)
    }

    /// How long it does while others have in hand what it has begun.
    pub fn poll_in_flight(&self) -> Duration {
        Duration::from_micros(self.poll_in_flight_us)
    }

    /// How long a holder may act without having looked at its fence.
    pub fn fence(&self) -> Duration {
        Duration::from_millis(self.fence_ms)
    }

    /// How long a worker may be busy with one and the same thing, if there is a limit.
    pub fn worker_timeout(&self) -> Option<Duration> {
        (self.worker_timeout_ms > 0).then(|| Duration::from_millis(self.worker_timeout_ms))
    }
}

/// How a daemon that has nothing to do learns that it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wakeup {
    /// Doorbells: sockets in the run directory. For hosts that share one kernel.
    Socket,
    /// It sleeps in short steps and looks. Works everywhere.
    #[default]
    Poll,
}

/// `[net]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct EngineSection {
    /// A core for the frontend's worker alone; it then polls always.
    pub frontend_cpu: Option<usize>,
    /// A core for the backend's worker alone; it then polls always.
    pub backend_cpu: Option<usize>,
}

/// `[blk]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct BlkSection {
    /// A core for the frontend's worker alone; it then polls always.
    pub frontend_cpu: Option<usize>,
    /// A core for the backend's worker alone; it then polls always.
    pub backend_cpu: Option<usize>,
    /// How long a replica of a mirrored volume may keep a request before the frontend goes on without that replica. Zero: for
    /// ever.
    pub replica_timeout_ms: u64,
}

impl Default for BlkSection {
    fn default() -> Self {
        Self { frontend_cpu: None, backend_cpu: None, replica_timeout_ms: 30_000 }
    }
}

impl BlkSection {
    /// How long a replica of a mirrored volume may keep a request, if there is a limit.
    pub fn replica_timeout(&self) -> Option<Duration> {
        (self.replica_timeout_ms > 0).then(|| Duration::from_millis(self.replica_timeout_ms))
    }
}

/// A configuration that cannot be used. One line, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not what was expected.
    #[error("{}, line {line}: {message}", path.display())]
    Parse {
        /// Which file.
        path: PathBuf,
        /// Where in it.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// It can be read but makes no sense.
    #[error("{}: {message}", path.display())]
    Invalid {
        /// Which file.
        path: PathBuf,
        /// What is wrong and what would be right.
        message: String,
    },
    /// A device's table is not what its engine expects.
    #[error("[[{kind}]] {name:?}: {message}")]
    Device {
        /// `nic` or `ssd`.
        kind: &'static str,
        /// The device's name.
        name: String,
        /// What is wrong.
        message: String,
    },
}

impl HostConfig {
    /// Reads and checks a configuration file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text =
            fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    /// As [`HostConfig::load`], from text; `path` is for messages.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let config: Self = parse_toml(text, path)?;
        config.check().map_err(|message| ConfigError::Invalid { path: path.to_owned(), message })?;
        Ok(config)
    }

    /// The host's NICs as the network engine defines them.
    pub fn nics<T: DeserializeOwned>(&self) -> Result<Vec<T>, ConfigError> {
        devices("nic", &self.nic)
    }

    /// The host's SSDs as the storage engine defines them.
    pub fn ssds<T: DeserializeOwned>(&self) -> Result<Vec<T>, ConfigError> {
        devices("ssd", &self.ssd)
    }

    /// Where this host's sockets, doorbells and locks lie.
    pub fn run_directory(&self) -> RunDirectory {
        RunDirectory::new(&self.run.directory).with_wakeup(self.run.wakeup)
    }

    fn check(&self) -> Result<(), String> {
        if self.host.id.get() == 0 {
            return Err("host.id = 0: host ids begin at 1".into());
        }
        check_name("host.name", &self.host.name)?;
        if let Some(log) = &self.host.log {
            check_log_level(log).map_err(|error| format!("host.log: {error}"))?;
        }
        self.run.check()?;
        let mut names = BTreeSet::new();
        for (kind, table) in
            self.nic.iter().map(|nic| ("nic", nic)).chain(self.ssd.iter().map(|ssd| ("ssd", ssd)))
        {
            let name = table
                .get("name")
                .and_then(toml::Value::as_str)
                .ok_or_else(|| format!("a [[{kind}]] has no name: add name = \"{kind}0\""))?;
            check_name(&format!("the name of a [[{kind}]]"), name)?;
            if !names.insert(name) {
                return Err(format!("two devices are named {name:?}: names of devices are unique in a host"));
            }
        }
        Ok(())
    }
}

/// Parses TOML of any shape with errors of one line that name the file and the line in it.
pub fn parse_toml<T: DeserializeOwned>(text: &str, path: &Path) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|error| {
        let start = error.span().map_or(0, |span| span.start).min(text.len());
        let line = text.get(..start).map_or(1, |before| before.matches('\n').count() + 1);
        ConfigError::Parse { path: path.to_owned(), line, message: one_line(error.message()) }
    })
}

fn devices<T: DeserializeOwned>(kind: &'static str, tables: &[toml::Table]) -> Result<Vec<T>, ConfigError> {
    tables
        .iter()
        .map(|table| {
            toml::Value::Table(table.clone()).try_into().map_err(|error: toml::de::Error| {
                ConfigError::Device {
                    kind,
                    name: table.get("name").and_then(toml::Value::as_str).unwrap_or_default().to_owned(),
                    message: one_line(error.message()),
                }
            })
        })
        .collect()
}

/// Names travel in URLs, file names and metrics.
fn check_name(what: &str, name: &str) -> Result<(), String> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let starts_well = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if starts_well && name.len() <= 63 && name.bytes().all(good) {
        Ok(())
    } else {
        Err(format!(
            "{what} = {name:?}: use 1 to 63 letters, digits, '-', '_' or '.', a letter or digit first"
        ))
    }
}

fn one_line(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests;
