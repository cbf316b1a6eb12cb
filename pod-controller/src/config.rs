//! The controller's configuration file.

mod balance;
mod etcd;
mod listen;
mod replication;
/// How long an endpoint may still act that looks at its fence within this bound, by the controller's clock: a tenth more, for clocks that
/// drift apart.
pub(crate) fn fence_wait(bound: Duration) -> Duration {
    bound * 11 / 10 + Duration::from_millis(10)
}

#[cfg(test)]
pub(crate) mod testing;
mod tls;

use std::path::{Path, PathBuf};
use std::time::Duration;

use cxl_pool::{Area, LineCount, Pool};
use pod_api::ByteSize;
use pod_protocol::config::{ConfigError, PoolSection, RunSection, parse_toml};
use pod_protocol::daemon::check_log_level;
use pod_protocol::run_directory::RunDirectory;
use pod_state::{Filling, Options, PlacementPolicy};
use serde::Deserialize;
use uuid::Uuid;

use crate::balance::BalancePolicy;
use crate::link_policy::{FailBack, LinkPolicy};
use crate::rest::{AccessPolicy, TcpPolicy};
use crate::store::etcd::EtcdAddress;

pub use balance::{BalanceSection, VolumesSection};
pub use etcd::EtcdSection;
pub use listen::ListenTcp;
pub use replication::{ParseReplicaAddressError, ReplicaAddress, ReplicationSection, TcpSection};
pub use tls::TlsSection;

/// A UNIX socket's path has this many bytes at most, its final zero not counted.
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// The paper's ring.
const SLOTS: u32 = 8192;
/// The least that frontends take for the data of a disk: as much as a guest that keeps to the limits it is shown asks for at once.
const DATA_AREA_MIN: u64 = 4032 << 10;

/// Everything in the file.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Config {
    /// What only the controller has.
    pub controller: ControllerSection,
    /// Where the pool is.
    pub pool: PoolSection,
    /// Where sockets and doorbells are, and how endpoints wait; the same as in the hosts' files.
    pub run: RunSection,
    /// What is done about NICs and SSDs that carry too much.
    #[serde(default)]
    pub balance: BalanceSection,
    /// Where this is one of several controllers.
    #[serde(default)]
    pub replication: Option<ReplicationSection>,
    /// How an etcd is spoken to that keeps the state.
    #[serde(default)]
    pub etcd: Option<EtcdSection>,
}

/// What only the controller has.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct ControllerSection {
    /// The file that survives a restart.
    pub state: PathBuf,
    /// An etcd that keeps the state instead.
    #[serde(default)]
    pub store: Option<EtcdAddress>,
    /// What is logged, such as `debug` or `info,pod_controller=debug`; `RUST_LOG`, or `info`, unless given.
    #[serde(default)]
    pub log: Option<String>,
    /// A new pool to go on with where the one of the state is gone.
    #[serde(default)]
    pub adopt_pool: Option<Uuid>,
    /// The UNIX socket of the API; `controller.sock` in the run directory unless given.
    #[serde(default)]
    pub listen: Option<PathBuf>,
    /// A TCP address of the API, on the loopback interface unless there is TLS; or `none`. Unless given, it is port 8480 of the loopback
    /// interface, and only for looking where there are no tokens.
    #[serde(default)]
    pub listen_tcp: ListenTcp,
    /// TLS on that address.
    #[serde(default)]
    pub tls: Option<TlsSection>,
    /// The address may be one that other hosts reach although what is said there is not encrypted.
    #[serde(default)]
    pub plain_tcp: bool,
    /// Who may do what over TCP; without it and without certificates, whoever reaches an address that is given may do everything.
    #[serde(default)]
    pub tokens: Option<PathBuf>,
    /// Where changes are written down that somebody asks for, and who was refused.
    #[serde(default)]
    pub audit_log: Option<PathBuf>,
    /// How many requests per second somebody may send over TCP, and as many at once; 0: any number.
    #[serde(default = "default_requests_per_second")]
    pub requests_per_second: u32,
    /// How long an endpoint's heartbeat may stand still before the endpoint is silent, in ms, 50 to 60000. A controller that
    /// keeps up looks every 20 ms.
    #[serde(default = "default_detect_ms")]
    pub detect_ms: u64,
    /// How long guests wait for a storage backend that is away until their requests fail.
    #[serde(default = "default_blk_grace_ms")]
    pub blk_grace_ms: u64,
    /// How often a NIC may lose its link within `flap-window-ms`; more often, and nothing moves to it for a while. Zero:
    /// as often as it likes.
    #[serde(default = "default_flaps_max")]
    pub flaps_max: u32,
    /// The time within which losses of a link count together.
    #[serde(default = "default_flap_window_ms")]
    pub flap_window_ms: u64,
    /// How long a link that was lost too often has to be calm; twice as long each time.
    #[serde(default = "default_hold_down_ms")]
    pub hold_down_ms: u64,
    /// Whether leases go back to the NIC where they belong once it works again.
    #[serde(default)]
    pub fail_back: FailBack,
    /// How long that NIC has to work before they do.
    #[serde(default = "default_fail_back_after_ms")]
    pub fail_back_after_ms: u64,
    /// How long a lease that was moved still receives from the NIC that it left.
    #[serde(default = "default_drain_ms")]
    pub drain_ms: u64,
    /// What an instance's NIC sends from.
    #[serde(default = "default_tx_area")]
    pub tx_area: ByteSize,
    /// What a NIC receives into.
    #[serde(default = "default_rx_area")]
    pub rx_area: ByteSize,
    /// What the data of a disk's requests lies in.
    #[serde(default = "default_data_area")]
    pub data_area: ByteSize,
    /// The most receive buffers that an instance may hold.
    #[serde(default = "default_rx_quota_buffers")]
    pub rx_quota_buffers: u32,
    /// Request queues of a disk.
    #[serde(default = "default_disk_queues")]
    pub disk_queues: u16,
    /// Of a NIC's speed, how much instances may reserve, in percent.
    #[serde(default = "default_overcommit_percent")]
    pub nic_overcommit_percent: u32,
    /// Of an SSD's requests per second, how much volumes may reserve, in percent.
    #[serde(default = "default_overcommit_percent")]
    pub ssd_overcommit_percent: u32,
    /// Which NIC an instance gets beside what is nearer: `spread` for the least loaded one, `pack` for the most loaded one with room.
    #[serde(default)]
    pub nic_placement: Filling,
    /// Which SSD a volume gets: `spread` for the one with the largest share free, `pack` for that with the smallest that has room.
    #[serde(default)]
    pub ssd_placement: Filling,
    /// Whether bandwidth is reserved only where a backup NIC of another host could carry it too.
    #[serde(default = "default_prove_failover")]
    pub prove_failover: bool,
    /// Whether guests may have their RAM in the pool. Their VMMs can reach all of it then.
    #[serde(default = "default_guest_ram")]
    pub guest_ram: bool,
}

const fn default_overcommit_percent() -> u32 {
    100
}

const fn default_prove_failover() -> bool {
    true
}

const fn default_guest_ram() -> bool {
    true
}

const fn default_requests_per_second() -> u32 {
    500
}

const fn default_detect_ms() -> u64 {
    300
}

const fn default_blk_grace_ms() -> u64 {
    30_000
}

const fn default_flaps_max() -> u32 {
    3
}

const fn default_flap_window_ms() -> u64 {
    10_000
}

const fn default_hold_down_ms() -> u64 {
    10_000
}

const fn default_fail_back_after_ms() -> u64 {
    30_000
}

const fn default_drain_ms() -> u64 {
    5000
}

const fn default_tx_area() -> ByteSize {
    ByteSize::new(16 << 20)
}

const fn default_rx_area() -> ByteSize {
    ByteSize::new(32 << 20)
}

const fn default_data_area() -> ByteSize {
    ByteSize::new(16 << 20)
}

const fn default_rx_quota_buffers() -> u32 {
    4096
}

const fn default_disk_queues() -> u16 {
    1
}

impl Config {
    /// Reads and checks a file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    /// As [`Config::load`], from text; `path` is for messages.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let config: Self = parse_toml(text, path)?;
        config.check().map_err(|message| ConfigError::Invalid { path: path.to_owned(), message })?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        self.run.check()?;
        self.balance.check()?;
        if let Some(replication) = &self.replication {
            replication.check()?;
        }
        self.etcd()?;
        let controller = &self.controller;
        tls::check(controller)?;
        if let Some(log) = &controller.log {
            check_log_level(log).map_err(|error| format!("controller.log: {error}"))?;
        }
        if !(50..=60_000).contains(&controller.detect_ms) {
            return Err(format!("controller.detect-ms = {}: use 50 to 60000", controller.detect_ms));
        }
        let times = [
            ("flap-window-ms", controller.flap_window_ms),
            ("hold-down-ms", controller.hold_down_ms),
            ("fail-back-after-ms", controller.fail_back_after_ms),
            ("drain-ms", controller.drain_ms),
        ];
        for (name, ms) in times {
            if !(10..=86_400_000).contains(&ms) {
                return Err(format!("controller.{name} = {ms}: use 10 to 86400000"));
            }
        }
        let areas = [
            ("tx-area", controller.tx_area, (1 << 20, "1M")),
            ("rx-area", controller.rx_area, (1 << 20, "1M")),
            ("data-area", controller.data_area, (DATA_AREA_MIN, "4032K")),
        ];
        for (name, size, (least, shown)) in areas {
            if size.get() < least || size.get() > 1 << 40 {
                return Err(format!("controller.{name} = {size}: use {shown} to 1T"));
            }
        }
        if !(64..=SLOTS).contains(&controller.rx_quota_buffers) {
            return Err(format!(
                "controller.rx-quota-buffers = {}: use 64 to {SLOTS}",
                controller.rx_quota_buffers
            ));
        }
        let shares = [
            ("nic-overcommit-percent", controller.nic_overcommit_percent),
            ("ssd-overcommit-percent", controller.ssd_overcommit_percent),
        ];
        for (name, percent) in shares {
            if !(1..=10_000).contains(&percent) {
                return Err(format!("controller.{name} = {percent}: use 1 to 10000"));
            }
        }
        if !(1..=16).contains(&controller.disk_queues) {
            return Err(format!("controller.disk-queues = {}: use 1 to 16", controller.disk_queues));
        }
        Ok(())
    }

    /// Whether this is a replica outside of the pod, which does not open the pool.
    pub fn is_outside(&self) -> bool {
        self.replication.as_ref().is_some_and(|section| section.outside)
    }

    /// Where a replica's log is.
    pub fn replica_log(&self) -> PathBuf {
        let log = self.replication.as_ref().and_then(|section| section.log.clone());
        log.unwrap_or_else(|| {
            let mut name = self.controller.state.clone().into_os_string();
            name.push(".replica");
            PathBuf::from(name)
        })
    }

    /// Where sockets and doorbells are.
    pub fn run_directory(&self) -> RunDirectory {
        RunDirectory::new(self.run.directory.clone())
    }

    /// Where the API listens.
    pub fn listen(&self) -> PathBuf {
        self.controller.listen.clone().unwrap_or_else(|| self.run.directory.join("controller.sock"))
    }

    /// Where and how the API listens over TCP.
    pub fn listen_tcp(&self) -> Option<TcpPolicy> {
        let (address, is_required) = match self.controller.listen_tcp {
            ListenTcp::ByDefault => (listen::BY_DEFAULT, false),
            ListenTcp::At(address) => (address, true),
            ListenTcp::Nowhere => return None,
        };
        Some(TcpPolicy { address, tls: self.controller.tls.as_ref().map(TlsSection::policy), is_required })
    }

    /// Who may do what.
    pub fn access_policy(&self) -> AccessPolicy<'_> {
        AccessPolicy {
            tokens: self.controller.tokens.as_deref(),
            certificates: self.controller.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some()),
            // Whoever wants more than that from everybody on this host has to say so.
            looks_only: self.controller.listen_tcp == ListenTcp::ByDefault,
            audit_log: self.controller.audit_log.as_deref(),
            requests_per_second: self.controller.requests_per_second,
        }
    }

    /// How long an endpoint's heartbeat may stand still.
    pub fn detect(&self) -> Duration {
        Duration::from_millis(self.controller.detect_ms)
    }

    /// How long guests wait for a storage backend that is away.
    pub fn blk_grace(&self) -> Duration {
        Duration::from_millis(self.controller.blk_grace_ms)
    }

    /// When links are trusted.
    pub fn link_policy(&self) -> LinkPolicy {
        let controller = &self.controller;
        LinkPolicy {
            flaps: if controller.flaps_max == 0 { 0 } else { controller.flaps_max.saturating_add(1) },
            flap_window: Duration::from_millis(controller.flap_window_ms),
            hold: Duration::from_millis(controller.hold_down_ms),
            fail_back: controller.fail_back,
            stable: Duration::from_millis(controller.fail_back_after_ms),
        }
    }

    /// What is done about NICs and SSDs that carry too much.
    pub fn balance_policy(&self) -> BalancePolicy {
        self.balance.policy()
    }

    /// How long a NIC that a lease left is listened to.
    pub fn drain(&self) -> Duration {
        Duration::from_millis(self.controller.drain_ms)
    }

    /// How long a fenced endpoint may still act that keeps the same bound.
    pub fn fence_wait(&self) -> Duration {
        fence_wait(self.run.fence())
    }

    /// The core's options for a pool; without one they are of no pod.
    pub fn options(&self, pool: Option<&Pool>) -> Options {
        let sockets = self.run_directory().sockets();
        Options {
            pool: pool.map_or(Uuid::nil(), |pool| pool.superblock().uuid),
            data: pool.map_or(Area::default(), |pool| pool.layout().data()),
            tx_area: LineCount::covering(self.controller.tx_area.get()),
            rx_area: LineCount::covering(self.controller.rx_area.get()),
            data_area: LineCount::covering(self.controller.data_area.get()),
            net_slots: SLOTS,
            blk_slots: SLOTS,
            rx_quota_buffers: self.controller.rx_quota_buffers,
            disk_queues: self.controller.disk_queues,
            socket_name_bytes_max: SOCKET_PATH_BYTES_MAX.saturating_sub(sockets.as_os_str().len() + 1),
            regions_max: pool.map_or(0, |pool| pool.layout().region_slots() as usize),
            nic_leases_max: pod_state::NIC_LEASES_MAX,
            placement: PlacementPolicy {
                nic_overcommit_percent: self.controller.nic_overcommit_percent,
                ssd_overcommit_percent: self.controller.ssd_overcommit_percent,
                prove_failover: self.controller.prove_failover,
                guest_ram: self.controller.guest_ram,
                nics: self.controller.nic_placement,
                ssds: self.controller.ssd_placement,
            },
            // Whoever leads works it out.
            protocol_minor: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALLEST: &str =
        "[controller]\nstate = '/s'\n[pool]\npath = '/p'\n[run]\ndirectory = '/run/wadi'\n";

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("controller.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn smallest_file_has_defaults() {
        let config = parse(SMALLEST).expect("a configuration");
        assert_eq!(config.listen(), Path::new("/run/wadi/controller.sock"));
        assert_eq!(config.detect(), Duration::from_millis(300));
        assert!(config.fence_wait() > config.run.fence());
    }

    #[test]
    fn mistakes_are_named() {
        let with = |line: &str| parse(&SMALLEST.replace("state = '/s'", &format!("state = '/s'\n{line}")));
        for (line, word) in [
            ("detect-ms = 1", "detect-ms"),
            ("log = 'loud'", "controller.log"),
            ("tx-area = '1K'", "tx-area"),
            ("rx-area = 'big'", "big"),
            ("data-area = '4031K'", "controller.data-area = 3.9 MiB: use 4032K to 1T"),
            ("disk-queues = 0", "disk-queues"),
            ("rx-quota-buffers = 1", "rx-quota-buffers"),
            ("drain-ms = 1", "drain-ms"),
            ("nic-overcommit-percent = 0", "nic-overcommit-percent"),
            ("ssd-overcommit-percent = 99999", "ssd-overcommit-percent"),
            ("fail-back = 'perhaps'", "perhaps"),
            ("nic-placement = 'heap'", "heap"),
        ] {
            let error = with(line).expect_err(line);
            assert!(error.contains(word), "{line}: {error}");
        }
        with("data-area = '4032K'").expect("frontends take it");
        for ms in [0, 60_001] {
            let error = parse(&format!("{SMALLEST}fence-ms = {ms}\n")).expect_err("not in its range");
            assert!(error.contains(&format!("run.fence-ms = {ms}: use 20 to 60000")), "{error}");
        }
        for (line, word) in [
            ("mode = 'wild'", "wild"),
            ("high-percent = 50", "low-percent = 60"),
            ("high-percent = 101", "high-percent"),
            ("rest-ms = 1", "rest-ms"),
            ("moves-max = 0", "moves-max"),
        ] {
            for section in ["balance", "balance.volumes"] {
                let error = parse(&format!("{SMALLEST}[{section}]\n{line}\n")).expect_err(line);
                assert!(error.contains(word), "{section}: {line}: {error}");
            }
        }
        for (line, word) in
            [("bytes-max = '1K'", "balance.volumes.bytes-max"), ("window-ms = 500", "window-ms")]
        {
            let error = parse(&format!("{SMALLEST}[balance.volumes]\n{line}\n")).expect_err(line);
            assert!(error.contains(word), "{line}: {error}");
        }
    }
}
