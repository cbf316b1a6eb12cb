//! The shape of a pod.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::Release;

/// A pod that is still to be built.
#[derive(Debug, Clone)]
pub struct PodBuilder {
    pub(super) hosts: Vec<HostPlan>,
    pub(super) coherence: &'static str,
    pub(super) pool_size: &'static str,
    pub(super) nic_driver: NicDriver,
    pub(super) keep: bool,
    pub(super) guests_announce: bool,
    pub(super) release: Release,
    pub(super) controller_settings: &'static str,
    pub(super) controller_sections: &'static str,
    pub(super) clocks: Clocks,
    pub(super) blk_grace_ms: u64,
    pub(super) disk_queues: u16,
}

/// Which clocks processes have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Clocks {
    /// The machine's.
    Machines,
    /// The time of day is its own for each process.
    OfEachProcess,
    /// What only goes on is its own for each host.
    OfEachHost,
}

/// Which driver runs the NICs of a pod, all of which are ends of cables to the switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NicDriver {
    /// `tap`: a bridge joins a TAP device with the cable.
    Tap,
    /// `af-xdp`: on the end of the cable itself, which carries complete frames as a real one does.
    AfXdp,
}

impl NicDriver {
    /// What `[[nic]]` says of the NIC in this place of its host.
    fn config(self, index: usize) -> String {
        match self {
            Self::Tap => {
                format!("driver = \"tap\"\ninterface = \"tap{index}\"\nuplink = \"eth{index}\"")
            }
            Self::AfXdp => format!("driver = \"af-xdp\"\ninterface = \"eth{index}\""),
        }
    }
}

/// One host of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPlan {
    pub(super) name: String,
    pub(super) runs_vms: bool,
    pub(super) nics: Vec<NicPlan>,
    pub(super) ssds: Vec<SsdPlan>,
    /// More sections of its configuration.
    sections: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NicPlan {
    pub(super) name: String,
    pub(super) backup: bool,
    /// The link aggregation group of its port at the switch.
    pub(super) group: Option<String>,
    /// Another driver than the pod's other NICs have.
    driver: Option<NicDriver>,
    /// More lines of its table.
    settings: &'static str,
}

impl NicPlan {
    /// Which driver runs it in a pod whose NICs have this one.
    pub(super) fn driver(&self, common: NicDriver) -> NicDriver {
        self.driver.unwrap_or(common)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SsdPlan {
    pub(super) name: String,
    pub(super) size: String,
    /// How many requests per second it says that it can do.
    iops: Option<u64>,
    /// Has a write cache that is lost with its backend, driven by this seed.
    volatile_cache: Option<u64>,
    /// More lines of its table.
    settings: &'static str,
    /// Another program has it.
    is_foreign: bool,
}

impl HostPlan {
    /// A host with a name, and with nothing else yet. Its number in the pod is its place among the hosts.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), runs_vms: false, nics: Vec::new(), ssds: Vec::new(), sections: "" }
    }

    /// It runs virtual machines.
    #[must_use]
    pub fn vms(mut self) -> Self {
        self.runs_vms = true;
        self
    }

    /// Its configuration has these sections, too.
    #[must_use]
    pub fn sections(mut self, lines: &'static str) -> Self {
        self.sections = lines;
        self
    }

    /// It owns a NIC.
    #[must_use]
    pub fn nic(mut self, name: &str) -> Self {
        self.nics.push(NicPlan {
            name: name.to_owned(),
            backup: false,
            group: None,
            driver: None,
            settings: "",
        });
        self
    }

    /// It owns a NIC that is kept free for failover.
    #[must_use]
    pub fn backup_nic(mut self, name: &str) -> Self {
        self.nics.push(NicPlan {
            name: name.to_owned(),
            backup: true,
            group: None,
            driver: None,
            settings: "",
        });
        self
    }

    /// Its NICs' ports belong to this link aggregation group at the switch.
    #[must_use]
    pub fn in_group(mut self, group: &str) -> Self {
        self.nics.iter_mut().for_each(|nic| nic.group = Some(group.to_owned()));
        self
    }

    /// Its NICs have another driver than the pod's other ones.
    #[must_use]
    pub fn driven_by(mut self, driver: NicDriver) -> Self {
        self.nics.iter_mut().for_each(|nic| nic.driver = Some(driver));
        self
    }

    /// It owns an SSD of this size, such as `2G`.
    #[must_use]
    pub fn ssd(mut self, name: &str, size: &str) -> Self {
        self.ssds.push(SsdPlan {
            name: name.to_owned(),
            size: size.to_owned(),
            iops: None,
            volatile_cache: None,
            settings: "",
            is_foreign: false,
        });
        self
    }

    /// It owns an SSD that another program has, and serves on the socket [`Pod::ssd_socket`](super::Pod::ssd_socket) as vhost-user-blk.
    #[must_use]
    pub fn foreign_ssd(mut self, name: &str) -> Self {
        self = self.ssd(name, "");
        self.ssds.iter_mut().filter(|ssd| ssd.name == name).for_each(|ssd| ssd.is_foreign = true);
        self
    }

    /// The tables of its NICs have these lines, too.
    #[must_use]
    pub fn nic_settings(mut self, lines: &'static str) -> Self {
        self.nics.iter_mut().for_each(|nic| nic.settings = lines);
        self
    }

    /// The tables of its SSDs have these lines, too.
    #[must_use]
    pub fn ssd_settings(mut self, lines: &'static str) -> Self {
        self.ssds.iter_mut().for_each(|ssd| ssd.settings = lines);
        self
    }

    /// Its SSDs say that they can do so many requests per second each.
    #[must_use]
    pub fn iops(mut self, iops: u64) -> Self {
        self.ssds.iter_mut().for_each(|ssd| ssd.iops = Some(iops));
        self
    }

    /// It owns an SSD whose write cache is lost with its backend; what of it is lost, this seed says.
    #[must_use]
    pub fn volatile_ssd(mut self, name: &str, size: &str, seed: u64) -> Self {
        self.ssds.push(SsdPlan {
            name: name.to_owned(),
            size: size.to_owned(),
            iops: None,
            volatile_cache: Some(seed),
            settings: "",
            is_foreign: false,
        });
        self
    }

    /// What `host.toml` says. `directory` is the pod's state.
    pub(super) fn config(&self, id: usize, pool: &Path, directory: &Path, driver: NicDriver) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "[host]\nid = {id}\nname = \"{}\"\n\n[pool]\npath = \"{}\"\n\n[run]\ndirectory = \"{}\"\nwakeup = \"socket\"\n",
            self.name,
            pool.display(),
            directory.join("run").display(),
        );
        for (index, nic) in self.nics.iter().enumerate() {
            let _ = write!(
                text,
                "\n[[nic]]\nname = \"{}\"\n{}\nbackup = {}\n{}\n",
                nic.name,
                nic.driver(driver).config(index),
                nic.backup,
                nic.settings,
            );
            if let Some(group) = &nic.group {
                let _ = writeln!(text, "lag = \"{group}\"");
            }
        }
        for ssd in &self.ssds {
            let _ = write!(text, "\n[[ssd]]\nname = \"{}\"\n{}\n", ssd.name, ssd.settings);
            let _ = if ssd.is_foreign {
                let socket = foreign_socket(directory, &self.name, &ssd.name);
                writeln!(text, "driver = \"vhost-user\"\npath = \"{}\"", socket.display())
            } else {
                let path = directory.join(format!("{}-{}.img", self.name, ssd.name));
                let path = path.display();
                writeln!(text, "driver = \"file\"\npath = \"{path}\"\nsize = \"{}\"", ssd.size)
            };
            if let Some(iops) = ssd.iops {
                let _ = writeln!(text, "iops = {iops}");
            }
            if let Some(seed) = ssd.volatile_cache {
                let _ = writeln!(text, "volatile-cache = {seed}");
            }
        }
        text.push_str(self.sections);
        text
    }
}

/// Where another program serves an SSD of a host.
pub(super) fn foreign_socket(directory: &Path, host: &str, ssd: &str) -> PathBuf {
    directory.join(format!("{host}-{ssd}.sock"))
}

impl PodBuilder {
    /// A pod without hosts.
    pub fn new() -> Self {
        Self {
            hosts: Vec::new(),
            coherence: "software",
            pool_size: "1G",
            nic_driver: NicDriver::Tap,
            keep: false,
            guests_announce: true,
            release: Release::This,
            controller_settings: "",
            controller_sections: "",
            clocks: Clocks::Machines,
            blk_grace_ms: 30_000,
            disk_queues: 1,
        }
    }

    /// The pod that the demo shows: `h1` runs VMs and owns no device, `h2` owns a NIC and an SSD, `h3` the backup NIC and
    /// another SSD.
    pub fn three_hosts() -> Self {
        Self::new()
            .host(HostPlan::new("h1").vms())
            .host(HostPlan::new("h2").nic("nic0").ssd("ssd0", "2G"))
            .host(HostPlan::new("h3").backup_nic("nic1").ssd("ssd1", "2G"))
    }

    /// Each process has a clock of its own for the time of day, which [`Pod::set_clock`](super::Pod::set_clock) changes.
    #[must_use]
    pub fn own_clocks(mut self) -> Self {
        self.clocks = Clocks::OfEachProcess;
        self
    }

    /// The clocks of each host that only go on stand somewhere else, as they do where hosts were not started at the same moment; the
    /// controller's somewhere else each time it is started.
    #[must_use]
    pub fn far_clocks(mut self) -> Self {
        self.clocks = Clocks::OfEachHost;
        self
    }

    /// With one more host.
    #[must_use]
    pub fn host(mut self, host: HostPlan) -> Self {
        self.hosts.push(host);
        self
    }

    /// With this coherence of the pool, `software` or `hardware`.
    #[must_use]
    pub fn coherence(mut self, mode: &'static str) -> Self {
        self.coherence = mode;
        self
    }

    /// With its NICs run by this driver.
    #[must_use]
    pub fn nic_driver(mut self, driver: NicDriver) -> Self {
        self.nic_driver = driver;
        self
    }

    /// Its guests' drivers do not announce their addresses themselves after a live migration.
    #[must_use]
    pub fn silent_guests(mut self) -> Self {
        self.guests_announce = false;
        self
    }

    /// Its daemons are of this release.
    #[must_use]
    pub fn release(mut self, release: Release) -> Self {
        self.release = release;
        self
    }

    /// The controller's own section has these lines, too.
    #[must_use]
    pub fn controller_settings(mut self, lines: &'static str) -> Self {
        self.controller_settings = lines;
        self
    }

    /// The controller's configuration has these sections, too.
    #[must_use]
    pub fn controller_sections(mut self, sections: &'static str) -> Self {
        self.controller_sections = sections;
        self
    }

    /// Guests wait for so long for a storage backend that is away.
    #[must_use]
    pub fn blk_grace_ms(mut self, milliseconds: u64) -> Self {
        self.blk_grace_ms = milliseconds;
        self
    }

    /// Its disks have so many queues.
    #[must_use]
    pub fn disk_queues(mut self, queues: u16) -> Self {
        self.disk_queues = queues;
        self
    }

    /// The pod stays when this process ends.
    #[must_use]
    pub fn keep(mut self, keep: bool) -> Self {
        self.keep = keep;
        self
    }
}

impl Default for PodBuilder {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pod_protocol::config::HostConfig;

    #[test]
    fn daemons_can_read_what_is_written() {
        let pod = PodBuilder::three_hosts()
            .host(HostPlan::new("h4").nic("nic2").in_group("rack1").ssd("ssd2", "1G").iops(500))
            .host(HostPlan::new("h5").foreign_ssd("ssd3").ssd_settings("queue-depth = 4"));
        let drivers = [NicDriver::Tap, NicDriver::AfXdp];
        let hosts = pod.hosts.iter().enumerate();
        for ((index, host), driver) in hosts.flat_map(|host| drivers.map(|driver| (host, driver))) {
            let text = host.config(index + 1, Path::new("/dev/shm/p"), Path::new("/tmp/p"), driver);
            let config = HostConfig::parse(&text, Path::new("host.toml")).unwrap();
            assert_eq!(config.host.name, host.name);
            assert_eq!(config.nic.len(), host.nics.len());
            assert_eq!(config.ssd.len(), host.ssds.len());
        }
    }
}
