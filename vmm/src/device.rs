//! How QEMU is told of a device of the pod: on its command line, or by its monitor while it runs.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::words::escape;
use crate::{Accelerator, Disk, Network, QemuVersion};

/// What the names of ports begin with.
pub(crate) const PORT: &str = "port.";

/// The PCIe port that is a device's slot: behind one, it can come and go while the machine runs.
pub(crate) fn port_name(slot: u8) -> String {
    format!("{PORT}{slot}")
}

/// Whether this is the name of a PCIe port for devices of the pod.
pub(crate) fn is_port(name: &str) -> bool {
    name.starts_with(PORT)
}

/// What the names of devices begin with that QEMU would not take as they are. The name of no device has a dot.
const DIGIT: &str = "d.";

/// What QEMU calls a device. It wants a letter first, and a device may be named after a volume that begins with a digit.
pub(crate) fn qdev_name(device: &str) -> String {
    let plain = device.starts_with(|first: char| first.is_ascii_alphabetic());
    if plain { device.to_owned() } else { format!("{DIGIT}{device}") }
}

/// The device that QEMU calls that.
pub(crate) fn device_of_qdev(name: &str) -> &str {
    name.strip_prefix(DIGIT).unwrap_or(name)
}

/// The character device through which a device speaks with its frontend.
pub(crate) fn chardev_name(device: &str) -> String {
    format!("{CHARDEV}{device}")
}

/// The device that speaks through this character device, if one of the pod does.
pub(crate) fn device_of_chardev(chardev: &str) -> Option<&str> {
    chardev.strip_prefix(CHARDEV)
}

const CHARDEV: &str = "wadi-";

/// The network backend of a NIC.
pub(crate) fn netdev_name(device: &str) -> String {
    format!("host-{device}")
}

/// The QEMU that a device is for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Host {
    pub(crate) version: QemuVersion,
    pub(crate) accelerator: Accelerator,
    /// It listens on the sockets of its devices, and the frontends connect to it.
    pub(crate) listens: bool,
}

/// Properties in the order in which they are written.
#[derive(Debug, Default)]
pub(crate) struct Properties(Vec<(&'static str, Value)>);

impl Properties {
    fn set(&mut self, name: &'static str, value: impl Into<Value>) {
        self.0.push((name, value.into()));
    }

    /// For a command line: `name=value`, with commas between.
    pub(crate) fn line(&self) -> String {
        let word = |value: &Value| match value {
            Value::Bool(on) => if *on { "on" } else { "off" }.to_owned(),
            Value::String(text) => escape(text),
            other => other.to_string(),
        };
        self.0.iter().map(|(name, value)| format!("{name}={}", word(value))).collect::<Vec<_>>().join(",")
    }

    /// For the monitor.
    pub(crate) fn object(self) -> Map<String, Value> {
        self.0.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// A device, and what it speaks through.
#[derive(Debug)]
pub(crate) struct Parts {
    /// The device's name in the instance.
    pub(crate) name: String,
    socket: String,
    host: Host,
    /// For NICs.
    pub(crate) netdev: Option<Properties>,
    pub(crate) driver: &'static str,
    pub(crate) device: Properties,
}

impl Parts {
    fn new(name: &str, socket: &Path, host: Host, driver: &'static str) -> Self {
        let mut device = Properties::default();
        device.set("id", qdev_name(name));
        Self {
            name: name.to_owned(),
            socket: socket.display().to_string(),
            host,
            netdev: None,
            driver,
            device,
        }
    }

    /// A NIC, which the firmware may try to boot from.
    pub(crate) fn network(network: &Network, host: Host, boot: Option<usize>) -> Self {
        let name = &network.device;
        let mut parts = Self::new(name, &network.socket, host, "virtio-net-pci");
        let mut netdev = Properties::default();
        netdev.set("id", netdev_name(name));
        netdev.set("chardev", chardev_name(name));
        netdev.set("queues", network.queue_pairs);
        parts.netdev = Some(netdev);
        let device = &mut parts.device;
        device.set("netdev", netdev_name(name));
        device.set("mac", network.mac.as_str());
        device.set("host_mtu", network.mtu);
        device.set("rx_queue_size", 1024);
        device.set("tx_queue_size", 1024);
        if network.queue_pairs > 1 {
            device.set("mq", true);
        }
        if !network.guest_announces {
            device.set("guest_announce", false);
        }
        if host.version.crashes_on_nic_vectors(host.accelerator) {
            device.set("vectors", 0);
        }
        match boot {
            Some(index) => device.set("bootindex", index),
            // No network boot, so no ROM for it, which may not be installed.
            None => device.set("romfile", ""),
        }
        device.set("bus", port_name(network.slot));
        parts
    }

    /// A disk, which the firmware may try to boot from.
    pub(crate) fn disk(disk: &Disk, host: Host, boot: Option<usize>) -> Self {
        let mut parts = Self::new(&disk.device, &disk.socket, host, "vhost-user-blk-pci");
        let device = &mut parts.device;
        device.set("chardev", chardev_name(&disk.device));
        device.set("num-queues", disk.queues);
        if let Some(index) = boot {
            device.set("bootindex", index);
        }
        device.set("bus", port_name(disk.slot));
        parts
    }

    /// The words of a command line.
    pub(crate) fn words(&self) -> Vec<String> {
        let side = if self.host.listens {
            // One that listens accepts again by itself.
            "server=on".to_owned()
        } else {
            let (option, value) = self.host.version.reconnect_option();
            format!("{option}={value}")
        };
        let chardev = escape(&chardev_name(&self.name));
        let mut words =
            vec!["-chardev".to_owned(), format!("socket,id={chardev},path={},{side}", escape(&self.socket))];
        if let Some(netdev) = &self.netdev {
            words.extend(["-netdev".to_owned(), format!("vhost-user,{}", netdev.line())]);
        }
        words.extend(["-device".to_owned(), format!("{},{}", self.driver, self.device.line())]);
        words
    }

    /// What `chardev-add` takes.
    pub(crate) fn chardev(&self) -> Value {
        let address = json!({"type": "unix", "data": {"path": self.socket}});
        let mut socket = json!({"addr": address, "server": self.host.listens});
        if self.host.listens {
            socket["wait"] = false.into();
        } else {
            let (option, value) = self.host.version.reconnect_option();
            socket[option] = value.into();
        }
        json!({"id": chardev_name(&self.name), "backend": {"type": "socket", "data": socket}})
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::tests::spec;

    const HOST: Host =
        Host { version: QemuVersion { major: 7, minor: 2 }, accelerator: Accelerator::Tcg, listens: false };

    #[test]
    fn the_command_line_and_the_monitor_say_the_same() {
        let spec = spec();
        let parts = Parts::network(&Network { slot: 3, ..spec.networks[0].clone() }, HOST, None);
        let [_, chardev, _, netdev, _, device] = &parts.words()[..] else { panic!("three options") };
        assert_eq!(chardev, "socket,id=wadi-net0,path=/run/wadi/sockets/vm1-net0.sock,reconnect=1");
        assert_eq!(netdev, "vhost-user,id=host-net0,chardev=wadi-net0,queues=1");
        assert_eq!(
            device,
            "virtio-net-pci,id=net0,netdev=host-net0,mac=52:54:00:00:00:01,host_mtu=1500,rx_queue_size=1024,\
             tx_queue_size=1024,vectors=0,romfile=,bus=port.3"
        );
        let socket = &parts.chardev()["backend"]["data"];
        assert_eq!(socket["addr"]["data"]["path"], "/run/wadi/sockets/vm1-net0.sock");
        assert_eq!((&socket["reconnect"], &socket["server"]), (&json!(1), &json!(false)));
        let object = parts.device.object();
        assert_eq!((&object["vectors"], &object["host_mtu"]), (&json!(0), &json!(1500)));
    }

    #[test]
    fn qemu_has_a_letter_first_in_what_it_calls_a_device() {
        let disk = |name: &str| Disk { device: name.to_owned(), ..spec().disks[0].clone() };
        let [_, chardev, _, device] = &Parts::disk(&disk("0vol"), HOST, None).words()[..] else {
            panic!("two options")
        };
        assert!(chardev.starts_with("socket,id=wadi-0vol,"), "{chardev}");
        assert!(device.contains(",id=d.0vol,chardev=wadi-0vol,"), "{device}");
        // Machines that run have their devices called as they are.
        for name in ["vol0", "d", "d0", "d-0"] {
            assert_eq!(qdev_name(name), name);
        }
        for name in ["vol0", "0vol", "7", "d0"] {
            assert_eq!(device_of_qdev(&qdev_name(name)), name);
        }
    }

    #[test]
    fn a_nic_with_several_queues_says_so() {
        let network = Network { queue_pairs: 4, ..spec().networks[0].clone() };
        let line = Parts::network(&network, HOST, None).words().join(" ");
        assert!(line.contains("chardev=wadi-net0,queues=4") && line.contains(",mq=on,"), "{line}");
    }

    #[test]
    fn one_that_listens_does_not_wait_for_its_frontend() {
        let host = Host { listens: true, version: QemuVersion { major: 10, minor: 0 }, ..HOST };
        let parts = Parts::disk(&spec().disks[0], host, Some(1));
        let socket = &parts.chardev()["backend"]["data"];
        assert_eq!((&socket["server"], &socket["wait"]), (&json!(true), &json!(false)));
        assert!(socket.get("reconnect-ms").is_none(), "{socket}");
        assert!(parts.words()[3].ends_with("num-queues=2,bootindex=1,bus=port.1"), "{:?}", parts.words());
    }
}
