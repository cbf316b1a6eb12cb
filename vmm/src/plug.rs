//! Plugging devices of the pod into a QEMU that runs, and unplugging them, by its monitor.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use qapi::{Command, qmp};
use serde::Serialize;
use serde_json::Value;

use crate::device::{self, Host, Parts};
use crate::monitor::{Monitor, connect, failed};
use crate::{Accelerator, QemuVersion, VmmError};

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

/// What a QEMU has.
#[derive(Debug)]
pub(crate) struct Inventory {
    /// Devices that have a name, ports included, and the bus that each is on.
    devices: BTreeMap<String, String>,
    /// The devices of the pod for which QEMU speaks with a frontend, by their character devices: these are made first and removed
    /// last.
    speaking: BTreeSet<String>,
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
        self.speaking.contains(device) && self.devices.contains_key(device)
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
        let mut monitor = connect(monitor, over)?;
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

    /// What QEMU has.
    pub(crate) fn inventory(&mut self) -> Result<Inventory, VmmError> {
        let chardevs = self.execute(&qmp::query_chardev {})?;
        let speaking = chardevs.iter().filter_map(|chardev| device::device_of_chardev(&chardev.label));
        let speaking = speaking.map(str::to_owned).collect();
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
        Ok(Inventory { devices, speaking })
    }

    /// Plugs a device in. What fails half-way is there to be removed ([`Plugger::remove_rest`]).
    pub(crate) fn plug(&mut self, slot: u8, parts: impl FnOnce(Host) -> Parts) -> Result<(), VmmError> {
        self.inventory()?.check_slot(slot)?;
        let parts = parts(self.host);
        self.execute(&ChardevAdd(parts.chardev()))?;
        if let Some(netdev) = parts.netdev {
            let mut netdev = netdev.object();
            netdev.insert("type".to_owned(), "vhost-user".into());
            self.execute(&NetdevAdd(netdev.into()))?;
        }
        let mut arguments = parts.device.object();
        arguments.remove("id");
        let add =
            qmp::device_add { bus: None, id: Some(parts.id), driver: parts.driver.to_owned(), arguments };
        self.execute(&add).map(drop)
    }

    /// Asks the guest to let go of a device, once more if it was asked before.
    pub(crate) fn ask_for(&mut self, device: &str) -> Result<(), VmmError> {
        match self.execute(&qmp::device_del { id: device.to_owned() }) {
            // An older QEMU asks once, and the guest may still let go.
            Err(error) if error.to_string().contains("in the process of unplug") => Ok(()),
            asked => asked.map(drop),
        }
    }

    /// Removes what a device spoke through that the guest does not have any more, or never had.
    pub(crate) fn remove_rest(&mut self, device: &str) -> Result<(), VmmError> {
        // Disks have no network backend. One of a NIC takes the character device along.
        let _ = self.execute(&qmp::netdev_del { id: device::netdev_name(device) });
        if self.inventory()?.has_some_of(device) {
            self.execute(&qmp::chardev_remove { id: device::chardev_name(device) })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_there_and_free_or_it_is_said_what_to_do() {
        let devices = [("port.0", "pcie.0"), ("port.1", "pcie.0"), ("vol0", "port.1"), ("serial", "pcie.0")];
        let inventory = Inventory {
            devices: devices.map(|(name, bus)| (name.to_owned(), bus.to_owned())).into(),
            speaking: ["vol0".to_owned(), "vol1".to_owned()].into(),
        };
        assert!(inventory.has_ports() && inventory.has("vol0"));
        assert!(inventory.has_some_of("vol1") && !inventory.has("vol1") && !inventory.has("serial"));
        inventory.check_slot(0).unwrap();
        let error = inventory.check_slot(1).unwrap_err().to_string();
        assert!(error.contains("still taken by vol0"), "{error}");
        let error = inventory.check_slot(2).unwrap_err().to_string();
        assert!(error.contains("no PCIe port is free") && error.contains("--ports 3"), "{error}");
    }
}
