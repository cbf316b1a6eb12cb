//! Plugging by libvirt, which has the only session with the monitor of its domains and notes what these have: so it is told of devices
//! in its own words, and what is there is read from its description of the domain that runs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use roxmltree::Document;
use serde_json::{Value, json};

use super::{DISCONNECTED, Device, Inventory, Plug, UNPLUGGING};
use crate::hook::{child, vhost_user};
use crate::libvirt::{NO_VECTORS, QEMU, disk_name, disk_xml, network_xml};
use crate::virsh::{ask, virsh};
use crate::xml::Xml;
use crate::{Accelerator, Network, Process, QemuVersion, VmmError, device};

/// What a guest takes for the MTU of a NIC that says none. libvirt has no way to say one of a NIC that comes later: for `<mtu>` it looks for an
/// interface of the host, and it overrides nothing of such a NIC.
const MTU: u16 = 1500;

/// What libvirt says when all ports are taken.
const NO_PORT: &str = "No more available PCI";

/// A domain of libvirt's.
#[derive(Debug)]
pub(crate) struct DomainPlugger<'a> {
    pub(crate) domain: &'a str,
    /// libvirt's URI; none for its default.
    pub(crate) uri: Option<&'a str>,
    /// The instance whose devices it has.
    pub(crate) instance: &'a str,
    /// Its QEMU: another one has the domain's name once it was started anew.
    pub(crate) process: Process,
    /// Where frontends serve the sockets of devices. While that is not known, none is the pod's.
    pub(crate) sockets: Option<&'a Path>,
    /// It listens on the sockets of its devices, and the frontends connect to it.
    pub(crate) listens: bool,
}

/// What libvirt says of a domain that runs.
#[derive(Debug, Default)]
struct Live {
    /// What libvirt calls the pod's devices, and QEMU as well.
    aliases: BTreeMap<String, String>,
    /// What it calls disks, the pod's or not.
    targets: BTreeSet<String>,
    ports: usize,
    emulates: bool,
    /// NICs that come later have no MSI-X.
    without_vectors: bool,
}

impl Live {
    fn parse(xml: &str, instance: &str, sockets: Option<&Path>) -> Result<Self, String> {
        let document =
            Document::parse(xml).map_err(|error| format!("libvirt's description is no XML: {error}"))?;
        let root = document.root_element();
        if root.attribute("id").is_none() {
            return Err("it does not run".to_owned());
        }
        let passed_on = root.children().find(|it| it.has_tag_name((QEMU, "commandline")));
        let mut live = Self {
            emulates: root.attribute("type") == Some("qemu"),
            without_vectors: passed_on
                .is_some_and(|it| it.children().any(|it| it.attribute("value") == Some(NO_VECTORS))),
            ..Self::default()
        };
        for node in child(root, "devices").into_iter().flat_map(|it| it.children()) {
            if node.attribute("model") == Some("pcie-root-port") {
                live.ports += 1;
            }
            let said = |element, name| child(node, element).and_then(|it| it.attribute(name));
            if node.has_tag_name("disk") {
                live.targets.extend(said("target", "dev").map(str::to_owned));
            }
            let Some(found) = vhost_user(node)? else { continue };
            if sockets.is_some_and(|sockets| found.socket.parent() == Some(sockets))
                && let (Some(name), Some(alias)) = (found.name_within(instance), said("alias", "name"))
            {
                live.aliases.insert(name.to_owned(), alias.to_owned());
            }
        }
        Ok(live)
    }

    /// The first of libvirt's names of disks that none has.
    fn free_target(&self) -> String {
        // One of these is free.
        (0..=self.targets.len()).map(disk_name).find(|name| !self.targets.contains(name)).unwrap_or_default()
    }

    /// Refuses a NIC that would not work in a domain that runs this QEMU.
    fn check(&self, network: &Network, version: QemuVersion) -> Result<(), String> {
        if network.mtu < MTU {
            return Err(format!(
                "libvirt cannot tell the guest of its MTU of {}, and frames of {MTU} bytes would be lost: start the domain with it, or                  attach one with mtu={MTU}",
                network.mtu
            ));
        }
        self.check_vectors(network, version)
    }

    /// Refuses one on which QEMU would crash, and the guest with it.
    fn check_vectors(&self, network: &Network, version: QemuVersion) -> Result<(), String> {
        let accelerator = if self.emulates { Accelerator::Tcg } else { Accelerator::Kvm };
        if !version.crashes_on_nic_vectors(accelerator) {
            Ok(())
        } else if network.queue_pairs > 1 {
            Err(format!(
                "QEMU {version} crashes without KVM on a NIC with MSI-X, and libvirt gives one to each NIC with several queues that comes \
                 later: attach it with one pair, or start the domain with it"
            ))
        } else if self.without_vectors {
            Ok(())
        } else {
            Err(format!(
                "QEMU {version} crashes without KVM on a NIC with MSI-X: define the domain as `vmm xml` prints it now (with \
                 -global {NO_VECTORS}), and start it anew"
            ))
        }
    }
}

/// The element that libvirt has of a device, with a target for a disk.
fn element(device: &Device, listens: bool, target: &str) -> String {
    let mut xml = Xml::default();
    match device {
        Device::Network(network) => network_xml(network, listens, None, &mut xml),
        Device::Disk(disk) => disk_xml(disk, target, None, &mut xml),
    }
    xml.text
}

impl DomainPlugger<'_> {
    fn virsh(&self, words: &[&str], input: &str) -> Result<String, VmmError> {
        virsh(self.uri, words, input)
    }

    fn ask(&self, command: &str, arguments: Option<Value>) -> Result<Value, VmmError> {
        ask(self.domain, self.uri, command, arguments)
    }

    fn refuse(&self, reason: String) -> VmmError {
        VmmError::Domain { domain: self.domain.to_owned(), reason }
    }

    fn live(&self) -> Result<Live, VmmError> {
        let xml = self.virsh(&["dumpxml", self.domain], "")?;
        if !self.process.runs() {
            return Err(self.refuse("its QEMU has ended".to_owned()));
        }
        Live::parse(&xml, self.instance, self.sockets).map_err(|reason| self.refuse(reason))
    }

    fn alias(&self, device: &str) -> Result<String, VmmError> {
        let alias = self.live()?.aliases.remove(device);
        alias.ok_or_else(|| self.refuse(format!("{device} is gone by itself")))
    }

    fn version(&self) -> Result<QemuVersion, VmmError> {
        let answer = self.ask("query-version", None)?;
        let number = |part: &str| answer["qemu"][part].as_u64().and_then(|it| u32::try_from(it).ok());
        Ok(QemuVersion { major: number("major").unwrap_or(0), minor: number("minor").unwrap_or(0) })
    }
}

impl Plug for DomainPlugger<'_> {
    fn inventory(&mut self) -> Result<Inventory, VmmError> {
        let live = self.live()?;
        let chardevs = self.ask("query-chardev", None)?;
        let is_unserved = |alias: &str| {
            let label = format!("char{alias}");
            chardevs.as_array().is_some_and(|all| {
                let own = all.iter().find(|it| it["label"].as_str() == Some(&label));
                own.and_then(|it| it["filename"].as_str()).is_some_and(|it| it.starts_with(DISCONNECTED))
            })
        };
        // libvirt chooses ports by itself; whether there are any is all that counts.
        let ports = (0..live.ports).map(|port| format!("{}libvirt-{port}", device::PORT));
        let names = live.aliases.keys().map(|name| device::qdev_name(name));
        let devices = ports.chain(names).map(|name| (name, String::new())).collect();
        let unserved = live.aliases.iter().filter(|(_, alias)| is_unserved(alias));
        let unserved = unserved.map(|(name, _)| name.clone()).collect();
        Ok(Inventory { devices, speaking: live.aliases.into_keys().collect(), unserved })
    }

    fn plug(&mut self, device: &Device) -> Result<(), VmmError> {
        let live = self.live()?;
        let refuse = |reason: String| VmmError::Monitor { reason };
        match device {
            Device::Network(network) => live.check(network, self.version()?).map_err(refuse)?,
            Device::Disk(_) if self.listens => {
                let reason = "libvirt cannot let a machine listen for its disks: create the instance without --vmm-listens";
                return Err(refuse(reason.to_owned()));
            }
            Device::Disk(_) => {}
        }
        let xml = element(device, self.listens, &live.free_target());
        match self.virsh(&["attach-device", self.domain, "/dev/stdin", "--live"], &xml) {
            Err(VmmError::Monitor { reason }) if reason.contains(NO_PORT) => Err(refuse(format!(
                "no PCIe port is free for it: the domain has {}; detach something, or define it with more (vmm xml --ports)",
                live.ports
            ))),
            done => done.map(drop),
        }
    }

    fn set_link(&mut self, device: &str, up: bool) -> Result<(), VmmError> {
        // virsh domif-setlink does not know NICs of this kind.
        let name = self.alias(device)?;
        self.ask("set_link", Some(json!({"name": name, "up": up}))).map(drop)
    }

    fn ask_for(&mut self, device: &str) -> Result<(), VmmError> {
        // It does not wait for the guest.
        match self.virsh(&["detach-device-alias", self.domain, &self.alias(device)?, "--live"], "") {
            // An older QEMU asks once, and the guest may still let go.
            Err(error) if error.to_string().contains(UNPLUGGING) => Ok(()),
            asked => asked.map(drop),
        }
    }

    fn remove_rest(&mut self, _: &str) -> Result<(), VmmError> {
        // libvirt does that, and shows no device of which only the rest is there.
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::tests::spec;

    const SOCKETS: &str = "/run/wadi/sockets";

    fn live(root: &str, devices: &str) -> Result<Live, String> {
        let xml = format!(
            "<domain {root} xmlns:qemu='{QEMU}'><name>web</name><devices>
               <controller type='pci' index='0' model='pcie-root'/>
               <controller type='pci' index='1' model='pcie-root-port'/>
               <disk type='file' device='disk'><source file='/a'/><target dev='vda' bus='virtio'/></disk>{devices}
             </devices></domain>"
        );
        Live::parse(&xml, "vm1", Some(Path::new(SOCKETS)))
    }

    #[test]
    fn what_the_pod_serves_is_found_in_a_domain_that_runs() {
        let disk = |path: &str, target: &str, alias: &str| {
            format!(
                "<disk type='vhostuser' device='disk'><source type='unix' path='{path}'><reconnect enabled='yes' timeout='1'/></source>\
                 <target dev='{target}' bus='virtio'/><alias name='{alias}'/></disk>"
            )
        };
        let ours = disk("/run/wadi/sockets/vm1-vol0.sock", "vdb", "virtio-disk1");
        let others = disk("/run/wadi/sockets/vm2-vol1.sock", "vdd", "virtio-disk3")
            + &disk("/run/spdk/vm1-vol2.sock", "vde", "virtio-disk4");
        let nic = "<interface type='vhostuser'><mac address='52:54:00:00:00:01'/>
             <source type='unix' path='/run/wadi/sockets/vm1-net0.sock' mode='client'/><alias name='ua-net0'/></interface>";
        let live = live("type='qemu' id='4'", &format!("{ours}{others}{nic}")).unwrap();
        let found: Vec<_> =
            live.aliases.iter().map(|(name, alias)| (name.as_str(), alias.as_str())).collect();
        assert_eq!(found, [("net0", "ua-net0"), ("vol0", "virtio-disk1")]);
        assert_eq!((live.ports, live.emulates, live.free_target().as_str()), (1, true, "vdc"));
        // Not of the domain as it would start.
        assert_eq!(self::live("type='qemu'", &ours).unwrap_err(), "it does not run");
    }

    #[test]
    fn libvirt_is_told_of_a_device_as_of_one_that_a_domain_starts_with() {
        use crate::hook::Metadata;
        let spec = spec();
        let whole =
            crate::libvirt::domain_xml(&spec, &Metadata::default(), QemuVersion { major: 10, minor: 0 });
        let plain = |xml: &str| xml.lines().map(str::trim).collect::<Vec<_>>().join("\n");
        let whole = plain(&whole.unwrap());
        let disk = element(&Device::Disk(spec.disks[0].clone()), false, "vda");
        assert!(whole.contains(&plain(&disk)), "{disk}{whole}");
        let nic = element(&Device::Network(spec.networks[0].clone()), false, "");
        assert!(whole.contains(&plain(&nic)), "{nic}{whole}");
    }

    #[test]
    fn a_nic_that_would_not_work_or_crash_the_guest_is_refused() {
        let (old, new) = (QemuVersion { major: 7, minor: 2 }, QemuVersion { major: 10, minor: 0 });
        let one = spec().networks[0].clone();
        let several = Network { queue_pairs: 2, ..one.clone() };
        let plain = live("type='qemu' id='4'", "").unwrap();
        assert!(plain.check_vectors(&one, old).unwrap_err().contains("`vmm xml`"));
        plain.check(&several, new).unwrap();
        plain.check(&Network { mtu: 9000, ..one.clone() }, new).unwrap();
        let small = plain.check(&Network { mtu: 1400, ..one.clone() }, new).unwrap_err();
        assert!(small.contains("MTU of 1400"), "{small}");
        live("type='kvm' id='4'", "").unwrap().check_vectors(&several, old).unwrap();
        let without = Live { without_vectors: true, ..plain };
        without.check_vectors(&one, old).unwrap();
        assert!(without.check_vectors(&several, old).unwrap_err().contains("one pair"));
    }
}
