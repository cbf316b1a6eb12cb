//! The `[[ssd]]` tables of a host's configuration.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use super::vhost_user::RECONNECT_PATIENCE;
use crate::backend::QUEUE_DEPTH;

/// One device, as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SsdConfig {
    /// Its name on this host.
    pub name: String,
    /// What runs it.
    pub driver: DriverKind,
    /// How long it may keep a request before it is taken for failed. Without a limit guests wait for it.
    pub request_timeout: Option<Duration>,
    /// How many requests per second it can do, for placement. Without it, none are promised and none are refused.
    pub iops: Option<u64>,
    /// The same in bytes per second.
    pub bytes_per_second: Option<u64>,
    /// How many requests it is given at a time while several volumes want it, from 1 on; one alone has as many as the driver takes.
    pub queue_depth: u32,
}

/// A driver and what it needs to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DriverKind {
    /// A file or block device.
    File {
        /// Where it is.
        path: PathBuf,
        /// With which size to create it if it does not exist.
        size_bytes: Option<u64>,
        /// Puts a write cache before it that is lost with the process, driven by this seed: for tests.
        volatile_cache: Option<u64>,
    },
    /// Another program's disk, by vhost-user-blk.
    VhostUser {
        /// The program's socket.
        socket: PathBuf,
        /// How long it is waited for when it is gone.
        patience: Duration,
    },
    /// Takes everything and gives nothing, for benchmarks.
    Null {
        /// How large it claims to be.
        size_bytes: u64,
    },
}

/// A table that says something else than it may.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A key is missing, unknown or of the wrong type.
    #[error("[[ssd]] table {index}: {what}")]
    Table {
        /// Counted from 1.
        index: usize,
        /// What is wrong, and where.
        what: String,
    },
    /// A size that is none.
    #[error("ssd {ssd}: {key} {text:?} is not a number of bytes: write for example \"8G\"")]
    Size {
        /// Which device.
        ssd: String,
        /// What it should say.
        key: &'static str,
        /// What is written there.
        text: String,
    },
    /// Something that the driver needs.
    #[error("ssd {ssd}: driver {driver} needs `{key}`")]
    Needs {
        /// Which device.
        ssd: String,
        /// Its driver.
        driver: &'static str,
        /// The missing key.
        key: &'static str,
    },
    /// Two devices of one name.
    #[error("ssd {0} is configured twice: names are unique on a host")]
    Twice(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Table {
    name: String,
    driver: Driver,
    path: Option<PathBuf>,
    size: Option<Size>,
    volatile_cache: Option<u64>,
    #[serde(default)]
    request_timeout_ms: u64,
    reconnect_ms: Option<u64>,
    iops: Option<u64>,
    bandwidth: Option<Size>,
    queue_depth: Option<NonZeroU32>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Driver {
    File,
    VhostUser,
    Null,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Size {
    Bytes(u64),
    Text(String),
}

impl SsdConfig {
    /// Reads all `[[ssd]]` tables.
    pub fn parse_all(tables: &[toml::Table]) -> Result<Vec<Self>, ConfigError> {
        let mut parsed: Vec<Self> = Vec::with_capacity(tables.len());
        for (position, table) in tables.iter().enumerate() {
            let ssd = Self::parse(table.clone()).map_err(|error| match error {
                ConfigError::Table { what, .. } => ConfigError::Table { index: position + 1, what },
                other => other,
            })?;
            if parsed.iter().any(|other| other.name == ssd.name) {
                return Err(ConfigError::Twice(ssd.name));
            }
            parsed.push(ssd);
        }
        Ok(parsed)
    }

    fn parse(table: toml::Table) -> Result<Self, ConfigError> {
        let table: Table = table.try_into().map_err(|error: toml::de::Error| ConfigError::Table {
            index: 0,
            what: error.message().replace('\n', " "),
        })?;
        let name = table.name;
        let bytes_of = |key, size| match size {
            None => Ok(None),
            Some(Size::Bytes(bytes)) => Ok(Some(bytes)),
            Some(Size::Text(text)) => match parse_size(&text) {
                Some(bytes) => Ok(Some(bytes)),
                None => Err(ConfigError::Size { ssd: name.clone(), key, text }),
            },
        };
        let size_bytes = bytes_of("size", table.size)?;
        let bytes_per_second = bytes_of("bandwidth", table.bandwidth)?;
        let needs = |driver, key| ConfigError::Needs { ssd: name.clone(), driver, key };
        let driver = match table.driver {
            Driver::File => {
                let path = table.path.ok_or_else(|| needs("file", "path"))?;
                DriverKind::File { path, size_bytes, volatile_cache: table.volatile_cache }
            }
            Driver::VhostUser => {
                let socket = table.path.ok_or_else(|| needs("vhost-user", "path"))?;
                let patience = table.reconnect_ms.map_or(RECONNECT_PATIENCE, Duration::from_millis);
                DriverKind::VhostUser { socket, patience }
            }
            Driver::Null => DriverKind::Null { size_bytes: size_bytes.ok_or_else(|| needs("null", "size"))? },
        };
        // Zero, as without it: no limit.
        let timeout_ms = table.request_timeout_ms;
        let request_timeout = (timeout_ms > 0).then(|| Duration::from_millis(timeout_ms));
        let queue_depth = table.queue_depth.map_or(QUEUE_DEPTH, NonZeroU32::get);
        Ok(Self { name, driver, request_timeout, iops: table.iops, bytes_per_second, queue_depth })
    }
}

/// Reads a size such as `4096`, `512M` or `8G` (powers of 1024).
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|letter: char| !letter.is_ascii_digit());
    let unit = match text[digits.len()..].trim() {
        "" | "B" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1u64 << 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<SsdConfig>, ConfigError> {
        #[derive(Deserialize)]
        struct Host {
            ssd: Vec<toml::Table>,
        }
        SsdConfig::parse_all(&toml::from_str::<Host>(text).unwrap().ssd)
    }

    #[test]
    fn sizes_are_read() {
        assert_eq!(parse_size("4096"), Some(4096));
        assert_eq!(parse_size(" 8G "), Some(8 << 30));
        assert_eq!(parse_size("512 MiB"), Some(512 << 20));
        for nonsense in ["", "G", "-1", "8X", "1.5G", "99999999999T"] {
            assert_eq!(parse_size(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn both_drivers_are_read() {
        let ssds = parse(
            "[[ssd]]\nname = \"a\"\ndriver = \"file\"\npath = \"/x\"\nsize = \"1G\"\n[[ssd]]\nname = \"b\"\ndriver = \"null\"\nsize = 4096\nrequest-timeout-ms = 2000\nqueue-depth = 32\niops = 90000\nbandwidth = \"2G\"\n",
        );
        let ssds = ssds.unwrap();
        assert_eq!(
            ssds[0].driver,
            DriverKind::File { path: "/x".into(), size_bytes: Some(1 << 30), volatile_cache: None }
        );
        assert_eq!(ssds[1].driver, DriverKind::Null { size_bytes: 4096 });
        let limits: Vec<Option<Duration>> = ssds.iter().map(|ssd| ssd.request_timeout).collect();
        assert_eq!(limits, [None, Some(Duration::from_secs(2))]);
        assert_eq!((ssds[0].queue_depth, ssds[1].queue_depth), (QUEUE_DEPTH, 32));
        assert_eq!((ssds[0].iops, ssds[1].iops), (None, Some(90_000)));
        assert_eq!((ssds[0].bytes_per_second, ssds[1].bytes_per_second), (None, Some(2 << 30)));
    }

    #[test]
    fn how_long_a_target_is_waited_for_is_read() {
        let table =
            |more: &str| format!("[[ssd]]\nname = \"a\"\ndriver = \"vhost-user\"\npath = \"/x\"\n{more}");
        for (more, patience) in
            [("", RECONNECT_PATIENCE), ("reconnect-ms = 1500", Duration::from_millis(1500))]
        {
            let driver = DriverKind::VhostUser { socket: "/x".into(), patience };
            assert_eq!(parse(&table(more)).unwrap()[0].driver, driver);
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (table, expected) in [
            ("name = \"a\"\ndriver = \"nvme\"", "nvme"),
            ("name = \"a\"\ndriver = \"file\"", "needs `path`"),
            ("name = \"a\"\ndriver = \"vhost-user\"", "needs `path`"),
            ("name = \"a\"\ndriver = \"null\"", "needs `size`"),
            ("name = \"a\"\ndriver = \"null\"\nsize = \"big\"", "big"),
            ("name = \"a\"\ndriver = \"null\"\nsize = 1\nbandwidth = \"fast\"", "bandwidth \"fast\""),
            ("name = \"a\"\ndriver = \"null\"\nsize = 1\nqueue-depth = 0", "nonzero"),
            ("name = \"a\"\ndriver = \"null\"\nsize = 1\ncolour = 1", "colour"),
        ] {
            let error = parse(&format!("[[ssd]]\n{table}\n")).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let twice = "[[ssd]]\nname = \"a\"\ndriver = \"null\"\nsize = 4096\n".repeat(2);
        assert_eq!(parse(&twice), Err(ConfigError::Twice("a".to_owned())));
    }
}
