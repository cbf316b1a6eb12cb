//! What the kernel and the PCIe device count of a NIC's troubles.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::NicConfig;
use super::netlink::{Interface, Netlink};

/// How often is looked: asking the kernel costs more than the rest of telemetry.
const EVERY: Duration = Duration::from_secs(1);
/// Fields of `struct rtnl_link_stats64`, by their place.
const FIELDS: [(usize, &str); 8] = [
    (4, "rx-errors"),
    (5, "tx-errors"),
    (6, "rx-dropped"),
    (7, "tx-dropped"),
    (12, "rx-crc-errors"),
    (13, "rx-frame-errors"),
    (15, "rx-missed"),
    (17, "tx-carrier-errors"),
];
/// Files of PCIe advanced error reporting, and the line in each that sums it up.
const AER: [(&str, &str, &str); 3] = [
    ("aer_dev_correctable", "TOTAL_ERR_COR", "aer-correctable"),
    ("aer_dev_nonfatal", "TOTAL_ERR_NONFATAL", "aer-nonfatal"),
    ("aer_dev_fatal", "TOTAL_ERR_FATAL", "aer-fatal"),
];

/// Counts by name.
pub type Troubles = BTreeMap<String, u64>;

/// Looks at an interface now and then. An interface that was removed and made again counts from zero.
#[derive(Debug)]
pub struct TroubleWatch {
    interface: String,
    /// Of the interface in sysfs; there is a `device` below it if it is one of hardware.
    directory: PathBuf,
    netlink: Option<Netlink>,
    last: Option<Instant>,
    troubles: Troubles,
}

impl TroubleWatch {
    /// For the interface whose link is the NIC's.
    pub fn new(config: &NicConfig) -> Self {
        let interface = config.uplink.as_deref().unwrap_or(config.interface()).to_owned();
        Self {
            directory: Path::new("/sys/class/net").join(&interface),
            interface,
            netlink: None,
            last: None,
            troubles: Troubles::new(),
        }
    }

    /// For no interface.
    pub fn nothing() -> Self {
        Self {
            directory: PathBuf::new(),
            interface: String::new(),
            netlink: None,
            last: None,
            troubles: Troubles::new(),
        }
    }

    /// The counts, a second old at most. Nothing that cannot be found out is among them.
    pub fn counts(&mut self, now: Instant) -> &Troubles {
        let due = self.last.is_none_or(|last| now.saturating_duration_since(last) >= EVERY);
        if due && !self.interface.is_empty() {
            self.last = Some(now);
            if let Ok(interface) = self.look() {
                note(&interface, &mut self.troubles);
            }
            note_aer(&self.directory.join("device"), &mut self.troubles);
        }
        &self.troubles
    }

    fn look(&mut self) -> io::Result<Interface> {
        let netlink = match &mut self.netlink {
            Some(netlink) => netlink,
            none => none.insert(Netlink::open()?),
        };
        netlink.by_name(&self.interface)
    }
}

fn note(interface: &Interface, troubles: &mut Troubles) {
    troubles.insert("carrier-changes".to_owned(), interface.carrier_changes.into());
    for (place, name) in FIELDS {
        troubles.insert(name.to_owned(), interface.statistics[place]);
    }
}

fn note_aer(device: &Path, troubles: &mut Troubles) {
    for (file, line, name) in AER {
        let Ok(text) = fs::read_to_string(device.join(file)) else { continue };
        let total = text.lines().find_map(|it| it.strip_prefix(line)?.trim().parse().ok());
        if let Some(total) = total {
            troubles.insert(name.to_owned(), total);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_has_counts_and_no_pcie_device() {
        let table = "name='nic0'\ndriver='tap'\ninterface='lo'".parse().expect("TOML");
        let mut watch = TroubleWatch::new(&NicConfig::parse(&table).expect("valid"));
        let troubles = watch.counts(Instant::now()).clone();
        for (_, name) in FIELDS {
            assert!(troubles.contains_key(name), "{name} is missing");
        }
        assert!(!troubles.contains_key("aer-fatal"));
        assert!(TroubleWatch::nothing().counts(Instant::now()).is_empty());
    }

    #[test]
    fn pcie_errors_are_summed_up() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = |name: &str, text: &str| fs::write(directory.path().join(name), text).expect("written");
        file("aer_dev_correctable", "RxErr 3\nBadTLP 1\nTOTAL_ERR_COR 4\n");
        file("aer_dev_fatal", "Undefined 0\nnonsense");
        let mut troubles = Troubles::new();
        note_aer(directory.path(), &mut troubles);
        assert_eq!(troubles, Troubles::from([("aer-correctable".to_owned(), 4)]));
    }
}
