//! What the kernel, the PCIe device and the driver count of a NIC's troubles.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
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

/// Of a TAP device beside its uplink: what the kernel dropped on the way to us (`tx`), who were too slow, and on the way from us.
const TAP_FIELDS: [(usize, &str); 4] =
    [(4, "tap-rx-errors"), (5, "tap-tx-errors"), (6, "tap-rx-dropped"), (7, "tap-tx-dropped")];
/// So many interfaces may lie below each other: a VLAN of a bond of ports.
const LOWER_MAX: u32 = 4;

/// Counts by name.
pub type Troubles = BTreeMap<String, u64>;

/// Adds what a NIC's driver knows of its troubles, on another thread than the NIC's and for as long as there is that NIC.
pub type LookAtDriver = Box<dyn Fn(&mut Troubles) + Send>;

/// What the driver of a NIC knows of its troubles, whichever of those that were opened one after the other is in use.
#[derive(Default)]
pub struct DriverTroubles(Mutex<Option<LookAtDriver>>);

impl DriverTroubles {
    /// From now on it is this one that is looked at.
    pub fn set(&self, look: Option<LookAtDriver>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = look;
    }

    fn note(&self, troubles: &mut Troubles) {
        if let Some(look) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            look(troubles);
        }
    }
}

impl fmt::Debug for DriverTroubles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverTroubles").finish_non_exhaustive()
    }
}

/// Looks at the interfaces of a NIC now and then. An interface that was removed and made again counts from zero.
#[derive(Debug, Default)]
pub struct TroubleWatch {
    /// The one whose link is the NIC's; none if this is empty.
    interface: String,
    /// The TAP device, if that is another one.
    tap: Option<String>,
    netlink: Option<Netlink>,
    last: Option<Instant>,
    troubles: Troubles,
}

impl TroubleWatch {
    /// For the interfaces of a NIC.
    pub fn new(config: &NicConfig) -> Self {
        let interface = config.interface().to_owned();
        let uplink = config.uplink.clone().filter(|uplink| *uplink != interface);
        let tap = uplink.is_some().then(|| interface.clone());
        Self { interface: uplink.unwrap_or(interface), tap, ..Self::default() }
    }

    /// For no interface.
    pub fn nothing() -> Self {
        Self::default()
    }

    /// The counts, a second old at most. Nothing that cannot be found out is among them.
    pub fn counts(&mut self, now: Instant, driver: &DriverTroubles) -> &Troubles {
        let due = self.last.is_none_or(|last| now.saturating_duration_since(last) >= EVERY);
        if due {
            self.last = Some(now);
            self.look();
            driver.note(&mut self.troubles);
        }
        &self.troubles
    }

    fn look(&mut self) {
        if self.interface.is_empty() {
            return;
        }
        if self.netlink.is_none() {
            self.netlink = Netlink::open().ok();
        }
        let Some(netlink) = &mut self.netlink else { return };
        if let Ok(interface) = netlink.by_name(&self.interface) {
            self.troubles.insert("carrier-changes".to_owned(), interface.carrier_changes.into());
            note(&interface, &FIELDS, &mut self.troubles);
        }
        if let Some(Ok(tap)) = self.tap.as_ref().map(|tap| netlink.by_name(tap)) {
            note(&tap, &TAP_FIELDS, &mut self.troubles);
        }
        note_aer(&Path::new("/sys/class/net").join(&self.interface), &mut self.troubles);
    }
}

fn note(interface: &Interface, fields: &[(usize, &str)], troubles: &mut Troubles) {
    for (place, name) in fields {
        troubles.insert((*name).to_owned(), interface.statistics[*place]);
    }
}

/// What the PCIe devices of an interface count together, which has this directory in sysfs.
fn note_aer(interface: &Path, troubles: &mut Troubles) {
    let mut counts = Troubles::new();
    add_aer(interface, LOWER_MAX, &mut counts);
    troubles.append(&mut counts);
}

/// There is a `device` below an interface of hardware, and below others the interfaces that they consist of, such as the ports of a bond.
fn add_aer(interface: &Path, deeper: u32, counts: &mut Troubles) {
    let device = interface.join("device");
    for (file, line, name) in AER {
        let Ok(text) = fs::read_to_string(device.join(file)) else { continue };
        let total: Option<u64> = text.lines().find_map(|it| it.strip_prefix(line)?.trim().parse().ok());
        if let Some(total) = total {
            *counts.entry(name.to_owned()).or_default() += total;
        }
    }
    if deeper == 0 || device.exists() {
        return;
    }
    let entries = fs::read_dir(interface).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"lower_")) {
        add_aer(&entry.path(), deeper - 1, counts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_has_counts_and_no_pcie_device() {
        let table = "name='nic0'\ndriver='tap'\ninterface='lo'".parse().expect("TOML");
        let mut watch = TroubleWatch::new(&NicConfig::parse(&table).expect("valid"));
        let troubles = watch.counts(Instant::now(), &DriverTroubles::default()).clone();
        for (_, name) in FIELDS {
            assert!(troubles.contains_key(name), "{name} is missing");
        }
        assert!(!troubles.contains_key("aer-fatal"));
        let driver = DriverTroubles::default();
        assert!(TroubleWatch::nothing().counts(Instant::now(), &driver).is_empty());
        driver.set(Some(Box::new(|troubles| _ = troubles.insert("told".to_owned(), 3))));
        let told = TroubleWatch::nothing().counts(Instant::now(), &driver).clone();
        assert_eq!(told, Troubles::from([("told".to_owned(), 3)]));
    }

    #[test]
    fn pcie_errors_are_summed_up() {
        let directory = tempfile::tempdir().expect("a directory");
        let interface = |name: &str, correctable: &str| {
            let device = directory.path().join(name).join("device");
            fs::create_dir_all(&device).expect("made");
            let write = |file: &str, text: &str| fs::write(device.join(file), text).expect("written");
            write("aer_dev_correctable", correctable);
            write("aer_dev_fatal", "Undefined 0\nnonsense");
        };
        interface("eth0", "RxErr 3\nBadTLP 1\nTOTAL_ERR_COR 4\n");
        interface("eth1", "TOTAL_ERR_COR 5\n");
        let below = |upper: &str, lower: &str| {
            let link = directory.path().join(upper).join(format!("lower_{lower}"));
            fs::create_dir_all(link.parent().expect("there is one")).expect("made");
            std::os::unix::fs::symlink(directory.path().join(lower), link).expect("linked");
        };
        below("bond0", "eth0");
        below("bond0", "eth1");
        below("bond0.7", "bond0");
        for (name, correctable) in [("eth0", 4), ("bond0", 9), ("bond0.7", 9)] {
            let mut troubles = Troubles::new();
            note_aer(&directory.path().join(name), &mut troubles);
            assert_eq!(troubles, Troubles::from([("aer-correctable".to_owned(), correctable)]), "{name}");
        }
    }
}
