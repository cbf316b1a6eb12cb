//! The `[[nic]]` tables of `host.toml`.

use std::num::NonZeroU32;

use pod_protocol::ids::MacAddress;
use serde::Deserialize;

use super::NicError;

/// Which driver runs a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Driver {
    /// A TAP device.
    Tap,
    /// An AF_XDP socket.
    AfXdp,
    /// No device at all.
    Null,
}

impl Driver {
    /// Its name as the configuration spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tap => "tap",
            Self::AfXdp => "af-xdp",
            Self::Null => "null",
        }
    }
}

/// What the `null` driver does with frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NullMode {
    /// Swallows what is sent and receives nothing.
    #[default]
    Sink,
    /// Receives frames to one address as fast as buffers allow.
    Source,
    /// Receives what is sent, with source and destination exchanged.
    Echo,
}

/// One `[[nic]]` table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is a key of the file")]
pub struct NicConfig {
    /// The NIC's name in the pod, behind its host's.
    pub name: String,
    /// Which driver runs it.
    pub driver: Driver,
    /// `tap`: the TAP device, created if it is missing. `af-xdp`: the interface.
    #[serde(default)]
    pub interface: Option<String>,
    /// `tap`: the port without whose carrier the NIC's link is down, as it is while the interface itself is; only that if not given.
    #[serde(default)]
    pub uplink: Option<String>,
    /// `tap`: whether the TAP device is created if it is missing.
    #[serde(default = "create_default")]
    pub create: bool,
    /// `tap`: so many bytes of packets may be under way in the kernel, with what it needs for each; what is more waits at the backend.
    /// Without it, any number: what the uplink cannot carry is dropped in the kernel.
    #[serde(default)]
    pub send_buffer_bytes: Option<NonZeroU32>,
    /// Whether it is kept free for failover.
    #[serde(default)]
    pub backup: bool,
    /// The link aggregation group at the switch that its port belongs to, if any: the same name at all of the group's hosts.
    #[serde(default)]
    pub lag: Option<String>,
    /// Its speed, for placement.
    #[serde(default = "speed_mbps_default")]
    pub speed_mbps: u64,
    /// Whether its device bypasses this host's caches. Only say so where allocating writes (DDIO) are off.
    #[serde(default)]
    pub cache_bypassing: bool,
    /// After how many ms a NIC whose driver failed is opened again; twice as many after each attempt that fails, up to
    /// 30 s. Zero: never.
    #[serde(default = "reopen_ms_default")]
    pub reopen_ms: u64,
    /// `af-xdp`: the only receive queue of the interface that is the pod's. Without it, all of them are.
    #[serde(default)]
    pub queue: Option<u32>,
    /// `af-xdp`: whether the device is to read and write the pool itself, if its driver can.
    #[serde(default)]
    pub zero_copy: bool,
    /// `null`: what to do with frames.
    #[serde(default)]
    pub mode: NullMode,
    /// `null` as a source: length of its frames.
    #[serde(default = "frame_bytes_default")]
    pub frame_bytes: u32,
    /// `null` as a source: to whom its frames go.
    #[serde(default)]
    pub destination: Option<MacAddress>,
}

const fn speed_mbps_default() -> u64 {
    10_000
}

const fn create_default() -> bool {
    true
}

const fn reopen_ms_default() -> u64 {
    1000
}

const fn frame_bytes_default() -> u32 {
    64
}

/// The most that the name of a link aggregation group can be long.
const LAG_BYTES_MAX: usize = 63;

impl NicConfig {
    /// Reads one table.
    pub fn parse(table: &toml::Table) -> Result<Self, NicError> {
        let name = table.get("name").and_then(toml::Value::as_str).unwrap_or("(unnamed)").to_owned();
        let config: Self = table.clone().try_into().map_err(|error: toml::de::Error| NicError::Config {
            nic: name.clone(),
            // A key that the file quotes may have line breaks in it.
            problem: format!("{} in [[nic]]", error.message().replace('\n', " ")),
        })?;
        let problem = match config.driver {
            Driver::Tap | Driver::AfXdp if config.interface.is_none() => "set interface in [[nic]]",
            Driver::Tap | Driver::AfXdp if config.cache_bypassing => {
                "cache-bypassing in [[nic]] is for devices that write past the caches of their host, and with the drivers tap and af-xdp the \
                 kernel, or a device that may leave what it writes in a cache, does not: leave it out"
            }
            Driver::AfXdp | Driver::Null if config.send_buffer_bytes.is_some() => {
                "send-buffer-bytes in [[nic]] is for the driver tap: others say by themselves when they are full"
            }
            _ if config.send_buffer_bytes.is_some_and(|bytes| i32::try_from(bytes.get()).is_err()) => {
                "send-buffer-bytes in [[nic]] lies between 1 and 2147483647"
            }
            Driver::Null if config.mode == NullMode::Source && config.destination.is_none() => {
                "a null source needs a destination in [[nic]]"
            }
            Driver::Null if !(60..=1514).contains(&config.frame_bytes) => {
                "frame-bytes in [[nic]] lies between 60 and 1514"
            }
            _ if config.lag.as_ref().is_some_and(|lag| !(1..=LAG_BYTES_MAX).contains(&lag.len())) => {
                "the name of a lag in [[nic]] has 1 to 63 bytes"
            }
            _ if config.backup && config.lag.is_some() => {
                "a NIC in a lag cannot be a backup: its switch sends to all of the group's ports"
            }
            _ => return Ok(config),
        };
        Err(NicError::Config { nic: name, problem: problem.to_owned() })
    }

    /// The interface; empty for a NIC without one.
    pub fn interface(&self) -> &str {
        self.interface.as_deref().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<NicConfig, NicError> {
        NicConfig::parse(&text.parse().expect("TOML"))
    }

    #[test]
    fn a_tap_takes_its_uplink() {
        let config = parse("name='nic0'\ndriver='tap'\ninterface='tap0'\nuplink='eth0'").expect("valid");
        assert_eq!((config.driver, config.uplink.as_deref()), (Driver::Tap, Some("eth0")));
        assert!(!config.backup && !config.cache_bypassing);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, word) in [
            ("name='nic0'\ndriver='tap'", "interface"),
            ("name='nic0'\ndriver='af-xdp'", "interface"),
            ("name='nic0'\ndriver='dpdk'", "dpdk"),
            ("name='nic0'\ndriver='null'\nmode='source'", "destination"),
            ("name='nic0'\ndriver='null'\nframe-bytes=9", "frame-bytes"),
            ("name='nic0'\ndriver='null'\ncolour='red'", "colour"),
            ("name='nic0'\ndriver='null'\nsend-buffer-bytes=65536", "for the driver tap"),
            ("name='nic0'\ndriver='tap'\ninterface='t'\nsend-buffer-bytes=0", "nonzero"),
            ("name='nic0'\ndriver='tap'\ninterface='t'\nsend-buffer-bytes=4294967295", "2147483647"),
            ("name='nic0'\ndriver='tap'\ninterface='t'\ncache-bypassing=true", "leave it out"),
            ("name='nic0'\ndriver='af-xdp'\ninterface='t'\ncache-bypassing=true", "leave it out"),
            ("name='nic0'\ndriver='null'\nlag=''", "lag"),
            ("name='nic0'\ndriver='null'\nlag='l'\nbackup=true", "backup"),
        ] {
            let message = parse(text).expect_err(text).to_string();
            assert!(
                message.contains(word) && message.contains("nic0") && !message.contains('\n'),
                "{message}"
            );
        }
    }
}
