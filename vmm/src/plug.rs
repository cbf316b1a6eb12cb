//! Plugging devices of the pod into a QEMU that runs, and unplugging them: by its monitor, or by libvirt where that has it.

mod domain;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use qapi::{Command, qmp};
use serde::Serialize;
use serde_json::Value;

use crate::device::{self, Host, Parts};
use crate::monitor::{Monitor, connect, failed};
use crate::{Accelerator, Disk, Network, QemuVersion, VmmError};

pub(crate) use domain::DomainPlugger;

/// What QEMU begins the description of a socket with whose other end it does not reach.
const DISCONNECTED: &str = "disconnected:";

#[derive(Serialize)]
#[serde(transparent)]
struct ChardevAdd(Value);

impl Command for ChardevAdd {
    type Ok = Value;
    const NAME: &'static str = "chardev-add";
    const ALLOW_OOB: bool = false;
}

#[derive(Serialize)]
#[serde(transparent)]
struct NetdevAdd(Value);

impl Command for NetdevAdd {
    type Ok = Value;
    const NAME: &'static str = "netdev_add";
    const ALLOW_OOB: bool = false;
}

/// A device of the pod that a machine is to get.
#[derive(Debug, Clone)]
pub(crate) enum Device {
    Network(Network),
    Disk(Disk),
}

impl Device {
    fn slot(&self) -> u8 {
        match self {
            Self::Network(network) => network.slot,
            Self::Disk(disk) => disk.slot,
        }
    }

    fn parts(&self, host: Host) -> Parts {
        match self {
            Self::Network(network) => Parts::network(network, host, None),
            Self::Disk(disk) => Parts::disk(disk, host, None),
        }
    }
}

/// A way to change what a machine has while it runs.
pub(crate) trait Plug {
    /// What the machine has.
    fn inventory(&mut self) -> Result<Inventory, VmmError>;

    /// Plugs a device in. What is refused half-way is removed again. Of one that does not answer ([`VmmError::Silent`]) nobody knows what
    /// it has done, or will do yet: another look shows that.
    fn plug(&mut self, device: &Device) -> Result<(), VmmError>;

    /// Says what the guest is to see of a NIC's link. It sees nothing of what it was told before.
    fn set_link(&mut self, device: &str, up: bool) -> Result<(), VmmError>;

    /// Asks the guest to let go of a device, once more if it was asked before.
    fn ask_for(&mut self, device: &str) -> Result<(), VmmError>;

    /// Removes what a device spoke through that the guest does not have any more, or never had.
    fn remove_rest(&mut self, device: &str) -> Result<(), VmmError>;
}

/// What QEMU says of a device that it was told to unplug before, and is waiting for.
pub(crate) const UNPLUGGING: &str = "in the process of unplug";

/// What a QEMU has.
#[derive(Debug)]
pub(crate) struct Inventory {
    /// Devices that have a name, ports included, and the bus that each is on.
    devices: BTreeMap<String, String>,
    /// The devices of the pod for which QEMU speaks with a frontend, by their character devices: these are made first and removed
    /// last.
    speaking: BTreeSet<String>,
    /// Those of them whose frontend QEMU does not reach.
    unserved: BTreeSet<String>,
}

impl Inventory {
    /// Whether devices of the pod can be plugged in at all.
    pub(crate) fn has_ports(&self) -> bool {
        self.devices.keys().any(|name| device::is_port(name))
    }

    /// The devices of the pod, also those that are half there.
    pub(crate) fn pod_devices(&self) -> &BTreeSet<String> {
        &self.speaking
    }

    /// Whether something of this device is there.
    pub(crate) fn has_some_of(&self, device: &str) -> bool {
        self.speaking.contains(device)
    }

    /// Whether the guest has this device.
    pub(crate) fn has(&self, device: &str) -> bool {
        self.speaking.contains(device) && self.devices.contains_key(&device::qdev_name(device))
    }

    /// Whether QEMU reaches the frontend of this device.
    pub(crate) fn is_served(&self, device: &str) -> bool {
        self.speaking.contains(device) && !self.unserved.contains(device)
    }

    /// Refuses a slot that the machine does not have, or where something is.
    fn check_slot(&self, slot: u8) -> Result<(), VmmError> {
        let port = device::port_name(slot);
        let refuse = |reason: String| Err(VmmError::Monitor { reason });
        if !self.devices.contains_key(&port) {
            let ports = self.devices.keys().filter(|name| device::is_port(name)).count();
            return refuse(format!(
                "no PCIe port is free for it: the machine was started with {ports}; detach something, or start it anew with more \
                 (vmm run --ports {})",
                u16::from(slot) + 1
            ));
        }
        match self.devices.iter().find(|(_, bus)| **bus == port) {
            Some((other, _)) => {
                let other = device::device_of_qdev(other);
                refuse(format!("its PCIe port is still taken by {other}, which the guest has not let go of"))
            }
            None => Ok(()),
        }
    }
}

/// A session with the monitor of a QEMU.
pub(crate) struct Plugger {
    monitor: Monitor,
    host: Host,
}

impl Plugger {
    /// Begins a session. `listens` is the machine's way with its sockets; `over` says whether QEMU has ended.
    pub(crate) fn connect(
        monitor: &Path,
        listens: bool,
        over: impl FnMut() -> bool,
    ) -> Result<Self, VmmError> {
        Self::begin(connect(monitor, over)?, listens)
    }

    fn begin(mut monitor: Monitor, listens: bool) -> Result<Self, VmmError> {
        let version = monitor.execute(&qmp::query_version {}).map_err(failed)?.qemu;
        let number = |part: i64| u32::try_from(part).unwrap_or(0);
        let version = QemuVersion { major: number(version.major), minor: number(version.minor) };
        let kvm = monitor.execute(&qmp::query_kvm {}).map_err(failed)?.enabled;
        let accelerator = if kvm { Accelerator::Kvm } else { Accelerator::Tcg };
        Ok(Self { monitor, host: Host { version, accelerator, listens } })
    }

    fn execute<C: Command>(&mut self, command: &C) -> Result<C::Ok, VmmError> {
        self.monitor.execute(command).map_err(failed)
    }

    fn add(&mut self, parts: Parts) -> Result<(), VmmError> {
        self.execute(&ChardevAdd(parts.chardev()))?;
        if let Some(netdev) = parts.netdev {
            let mut netdev = netdev.object();
            netdev.insert("type".to_owned(), "vhost-user".into());
            self.execute(&NetdevAdd(netdev.into()))?;
        }
        let mut arguments = parts.device.object();
        arguments.remove("id");
        let id = Some(device::qdev_name(&parts.name));
        let add = qmp::device_add { bus: None, id, driver: parts.driver.to_owned(), arguments };
        self.execute(&add).map(drop)
    }
}

impl Plug for Plugger {
    fn inventory(&mut self) -> Result<Inventory, VmmError> {
        let chardevs = self.execute(&qmp::query_chardev {})?;
        let (mut speaking, mut unserved) = (BTreeSet::new(), BTreeSet::new());
        for chardev in chardevs {
            let Some(device) = device::device_of_chardev(&chardev.label) else { continue };
            if chardev.filename.starts_with(DISCONNECTED) {
                unserved.insert(device.to_owned());
            }
            speaking.insert(device.to_owned());
        }
        let children = self.execute(&qmp::qom_list { path: "/machine/peripheral".to_owned() })?;
        let mut devices = BTreeMap::new();
        for child in children.into_iter().filter(|child| child.type_.starts_with("child<")) {
            let path = format!("/machine/peripheral/{}", child.name);
            // It may be gone by now.
            if let Ok(bus) = self.execute(&qmp::qom_get { path, property: "parent_bus".to_owned() }) {
                let bus = bus.as_str().and_then(|bus| bus.rsplit('/').next()).unwrap_or_default();
                devices.insert(child.name, bus.to_owned());
            }
        }
        Ok(Inventory { devices, speaking, unserved })
    }

    fn plug(&mut self, device: &Device) -> Result<(), VmmError> {
        self.inventory()?.check_slot(device.slot())?;
        let parts = device.parts(self.host);
        let device = parts.name.clone();
        match self.add(parts) {
            Err(error @ VmmError::Monitor { .. }) => {
                self.remove_rest(&device)?;
                Err(error)
            }
            done => done,
        }
    }

    fn set_link(&mut self, device: &str, up: bool) -> Result<(), VmmError> {
        self.execute(&qmp::set_link { name: device::qdev_name(device), up }).map(drop)
    }

    fn ask_for(&mut self, device: &str) -> Result<(), VmmError> {
        match self.execute(&qmp::device_del { id: device::qdev_name(device) }) {
            // An older QEMU asks once, and the guest may still let go.
            Err(error) if error.to_string().contains(UNPLUGGING) => Ok(()),
            asked => asked.map(drop),
        }
    }

    fn remove_rest(&mut self, device: &str) -> Result<(), VmmError> {
        match self.execute(&qmp::netdev_del { id: device::netdev_name(device) }) {
            // Disks have no network backend. One of a NIC takes the character device along.
            Ok(_) | Err(VmmError::Monitor { .. }) => {}
            Err(error) => return Err(error),
        }
        if self.inventory()?.has_some_of(device) {
            self.execute(&qmp::chardev_remove { id: device::chardev_name(device) })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;
    use crate::monitor::fake::Qemu;
    use crate::monitor::open;
    use crate::spec::tests::spec;

    /// A QEMU with a free port, which says this to `device_add`, or nothing; what it was asked then, and what became of the device.
    fn plug(answer: &'static str) -> (Vec<String>, Result<(), VmmError>) {
        let qemu = Qemu::start(move |name, arguments| {
            let list = |entries: &str| Some(format!(r#"{{"return": [{entries}]}}"#));
            match name {
                "query-version" => Some(
                    r#"{"return": {"qemu": {"major": 7, "minor": 2, "micro": 0}, "package": ""}}"#.into(),
                ),
                "query-kvm" => Some(r#"{"return": {"enabled": false, "present": false}}"#.into()),
                "query-chardev" => list(""),
                "qom-list" => {
                    assert_eq!(arguments["path"], "/machine/peripheral");
                    list(r#"{"name": "port.0", "type": "child<pcie-root-port>"}"#)
                }
                "qom-get" => Some(r#"{"return": "/machine/q35/pcie.0"}"#.into()),
                "device_add" => Some(answer.to_owned()),
                _ => Some(r#"{"return": {}}"#.into()),
            }
        });
        let stream = UnixStream::connect(&qemu.path).unwrap();
        let monitor = open(stream, "a QEMU", Duration::from_millis(300)).unwrap();
        let mut plugger = Plugger::begin(monitor, false).unwrap();
        let done = plugger.plug(&Device::Network(spec().networks[0].clone()));
        let asked = qemu.asked();
        let added = asked.iter().position(|name| name == "device_add").unwrap();
        (asked[added + 1..].to_vec(), done)
    }

    #[test]
    fn what_qemu_refuses_half_way_is_removed_and_what_it_may_do_yet_is_not() {
        let (asked, done) = plug(r#"{"return": {}}"#);
        assert!(done.is_ok() && asked.is_empty(), "{asked:?}");
        let (asked, done) = plug(r#"{"error": {"class": "GenericError", "desc": "no such bus"}}"#);
        assert!(asked.contains(&"netdev_del".to_owned()), "{asked:?}");
        assert!(done.unwrap_err().to_string().contains("no such bus"));
        // The guest would lose a device that it gets a moment later.
        let (asked, done) = plug("");
        assert!(asked.is_empty(), "{asked:?}");
        assert!(matches!(done, Err(VmmError::Silent { .. })), "{done:?}");
    }

    #[test]
    fn a_slot_is_there_and_free_or_it_is_said_what_to_do() {
        let devices = [
            ("port.0", "pcie.0"),
            ("port.1", "pcie.0"),
            ("port.3", "pcie.0"),
            ("vol0", "port.1"),
            ("d.3rd", "port.3"),
            ("serial", "pcie.0"),
        ];
        let inventory = Inventory {
            devices: devices.map(|(name, bus)| (name.to_owned(), bus.to_owned())).into(),
            speaking: ["vol0".to_owned(), "vol1".to_owned(), "3rd".to_owned()].into(),
            unserved: ["vol1".to_owned()].into(),
        };
        assert!(inventory.is_served("vol0") && !inventory.is_served("vol1") && !inventory.is_served("vol2"));
        assert!(inventory.has("3rd"));
        let error = inventory.check_slot(3).unwrap_err().to_string();
        assert!(error.contains("still taken by 3rd"), "{error}");
        assert!(inventory.has_ports() && inventory.has("vol0"));
        assert!(inventory.has_some_of("vol1") && !inventory.has("vol1") && !inventory.has("serial"));
        inventory.check_slot(0).unwrap();
        let error = inventory.check_slot(1).unwrap_err().to_string();
        assert!(error.contains("still taken by vol0"), "{error}");
        let error = inventory.check_slot(2).unwrap_err().to_string();
        assert!(error.contains("no PCIe port is free") && error.contains("--ports 3"), "{error}");
    }
}
