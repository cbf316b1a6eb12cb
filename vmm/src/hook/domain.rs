//! A libvirt domain, as far as the pod has to do with it.

use std::path::{Path, PathBuf};
use std::{fs, io};

use pod_api::{CreateInstance, Instance, NicRequest};
use roxmltree::{Document, Node};

use super::LABEL;
use super::metadata::{Metadata, NAMESPACE};
use crate::libvirt::QEMU;
use crate::machine::CONTROL_VARIABLE;
use crate::slicing::ControlFile;
use crate::{Process, VmSpec, VmmError};

/// A domain that asks the pod for devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    name: String,
    /// What libvirt knows it by for good.
    pub(super) uuid: String,
    pub(super) metadata: Metadata,
    /// The file through which the shim in its QEMU is commanded.
    vcpu_control: Option<PathBuf>,
    /// vhost-user devices of all kinds, whoever is at the other end.
    pub(super) devices: Vec<VhostUser>,
}

/// A vhost-user device of a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VhostUser {
    pub(crate) socket: PathBuf,
    /// QEMU listens on the socket.
    pub(crate) listens: bool,
    /// Pairs of queues of a NIC, queues of a disk; one unless said.
    pub(crate) queues: u16,
    /// A NIC's address; disks have none.
    pub(crate) mac: Option<String>,
    pub(crate) is_nic: bool,
}

impl Domain {
    /// Reads what libvirt gives to its hooks. Nothing if the domain has nothing to do with the pod.
    pub fn parse(xml: &str) -> Result<Option<Self>, String> {
        // Whatever libvirt comes up with, a domain that does not speak of us is none of our business.
        if !xml.contains(NAMESPACE) {
            return Ok(None);
        }
        let document =
            Document::parse(xml).map_err(|error| format!("libvirt's description is no XML: {error}"))?;
        let root = document.root_element();
        let ours = child(root, "metadata").and_then(|it| {
            it.children()
                .find(|it| it.tag_name().namespace() == Some(NAMESPACE) && it.has_tag_name("instance"))
        });
        let Some(ours) = ours else { return Ok(None) };
        let metadata = Metadata::read(ours).map_err(|reason| format!("its <metadata>: {reason}"))?;
        let said = |name| child(root, name).and_then(|it| it.text()).map(|it| it.trim().to_owned());
        let (Some(name), Some(uuid)) = (said("name"), said("uuid")) else {
            return Err("libvirt's description has no name, or no uuid".to_owned());
        };
        let devices = child(root, "devices").into_iter().flat_map(|it| it.children());
        let devices = devices.map(vhost_user).collect::<Result<Vec<_>, _>>()?;
        let devices = devices.into_iter().flatten().collect();
        Ok(Some(Self { name, uuid, metadata, vcpu_control: vcpu_control(root), devices }))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name of its instance.
    pub fn instance(&self) -> &str {
        self.metadata.instance.as_deref().unwrap_or(&self.name)
    }

    /// The instance that has its devices, on `host`, whose frontends serve `sockets`.
    pub(super) fn request(&self, host: &str, sockets: &Path) -> Result<CreateInstance, String> {
        let name = self.instance();
        let mut request = CreateInstance {
            name: name.to_owned(),
            host: host.to_owned(),
            instance_type: self.metadata.instance_type.clone(),
            vmm_listens: self.metadata.vmm_listens,
            priority: self.metadata.priority,
            ..CreateInstance::default()
        };
        for device in self.devices_below(sockets) {
            let device_name = device.name_within(name).ok_or_else(|| {
                format!(
                    "its socket {} is not one of the instance {name}: call it {}",
                    device.socket.display(),
                    sockets.join(format!("{name}-DEVICE.sock")).display()
                )
            })?;
            if device.is_nic {
                let wish = self.metadata.nics.iter().find(|it| it.device.as_deref() == Some(device_name));
                request.nics.push(NicRequest {
                    device: Some(device_name.to_owned()),
                    mac: device.mac.clone(),
                    queue_pairs: Some(device.queues),
                    ..wish.cloned().unwrap_or_default()
                });
            } else {
                request.volumes.push(device_name.to_owned());
            }
        }
        let unused =
            self.metadata.nics.iter().find(|wish| !request.nics.iter().any(|it| it.device == wish.device));
        if let Some(device) = unused.and_then(|it| it.device.as_ref()) {
            let socket = sockets.join(format!("{name}-{device}.sock"));
            return Err(format!(
                "its <metadata> speaks of {device}, and it has no <interface type='vhostuser'> with the socket {}",
                socket.display()
            ));
        }
        if request.nics.is_empty() && request.volumes.is_empty() {
            return Err(format!(
                "it has <wadi:instance> in its <metadata>, and no vhost-user device with a socket in {}: `vmm xml` prints \
                 how a domain has them",
                sockets.display()
            ));
        }
        Ok(request)
    }

    /// Whether the instance was made for it.
    pub(super) fn owns(&self, instance: &Instance) -> bool {
        instance.labels.get(LABEL) == Some(&self.uuid)
    }

    /// Says why it cannot start.
    pub(super) fn refusal(&self, reason: String) -> VmmError {
        VmmError::Domain { domain: self.name.clone(), reason }
    }

    /// Makes what its QEMU's shim, if it is to have one, is commanded through. That of another machine that runs stays.
    pub fn make_vcpu_control(&self) -> io::Result<()> {
        let Some(path) = self.vcpu_control() else { return Ok(()) };
        if is_in_use(path) {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "another machine runs with it"));
        }
        fs::create_dir_all(path.parent().unwrap_or(path))?;
        ControlFile::create(path)
    }

    /// Removes that, once its QEMU has ended.
    pub fn remove_vcpu_control(&self) -> io::Result<()> {
        match self.vcpu_control().filter(|path| !is_in_use(path)).map(fs::remove_file) {
            Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// A file that is called otherwise is somebody else's.
    fn vcpu_control(&self) -> Option<&Path> {
        let ours = VmSpec::vcpu_control_of(self.instance());
        self.vcpu_control
            .as_deref()
            .filter(|path| path.is_absolute() && path.file_name() == Some(ours.as_ref()))
    }

    /// Those that the pod's frontends serve.
    pub(super) fn devices_below<'a>(&'a self, sockets: &'a Path) -> impl Iterator<Item = &'a VhostUser> {
        self.devices.iter().filter(move |device| device.socket.parent() == Some(sockets))
    }
}

impl VhostUser {
    /// The device's name within an instance, by that of its socket.
    pub(crate) fn name_within(&self, instance: &str) -> Option<&str> {
        let file = self.socket.file_name()?.to_str()?;
        file.strip_prefix(instance)?.strip_prefix('-')?.strip_suffix(".sock").filter(|name| !name.is_empty())
    }
}

/// The vhost-user device that an element of `<devices>` is, if it is one.
pub(crate) fn vhost_user(node: Node<'_, '_>) -> Result<Option<VhostUser>, String> {
    let is_nic = node.has_tag_name("interface");
    if node.attribute("type") != Some("vhostuser") || !(is_nic || node.has_tag_name("disk")) {
        return Ok(None);
    }
    let attribute = |element, name| child(node, element).and_then(|it| it.attribute(name));
    let Some(socket) = attribute("source", "path") else { return Ok(None) };
    let queues = match attribute("driver", "queues") {
        Some(queues) => queues.parse().map_err(|_| format!("queues='{queues}' of {socket} is no number"))?,
        None => 1,
    };
    Ok(Some(VhostUser {
        socket: socket.into(),
        listens: attribute("source", "mode") == Some("server"),
        queues,
        mac: attribute("mac", "address").filter(|_| is_nic).map(str::to_owned),
        is_nic,
    }))
}

fn vcpu_control(root: Node<'_, '_>) -> Option<PathBuf> {
    let line = root.children().find(|it| it.has_tag_name((QEMU, "commandline")))?;
    let variable = line.children().find(|it| it.attribute("name") == Some(CONTROL_VARIABLE))?;
    variable.attribute("value").map(PathBuf::from)
}

/// Whether a QEMU that runs has its shim commanded through this file.
fn is_in_use(path: &Path) -> bool {
    let user = ControlFile::open(path).and_then(|file| file.process()).ok().flatten();
    let told = user.and_then(Process::with_id).and_then(|user| user.environment(CONTROL_VARIABLE));
    told.is_some_and(|told| path == Path::new(&told))
}

/// The first child of that name.
pub(crate) fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|it| it.has_tag_name(name))
}

#[cfg(test)]
pub(super) mod tests {
    use std::mem::offset_of;
    use std::process::Command;

    use super::*;

    pub(in crate::hook) const SOCKETS: &str = "/run/wadi/sockets";

    /// A domain as libvirt 9 gives it to its hooks, with these devices and this in our element.
    pub(in crate::hook) fn domain(metadata: &str, devices: &str) -> String {
        format!(
            "<domain type='qemu' id='1' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
              <name>web</name>
              <uuid>7a1d1cf5-1f0a-4c41-9a5b-1f2d6a6a1b4e</uuid>
              <metadata>
                <other:app xmlns:other='http://example.org/1'/>
                <wadi:instance xmlns:wadi='{NAMESPACE}' name='vm1'>{metadata}</wadi:instance>
              </metadata>
              <devices><emulator>/usr/bin/qemu-system-x86_64</emulator>{devices}</devices>
            </domain>"
        )
    }

    pub(in crate::hook) const NIC: &str = "<interface type='vhostuser'>
          <mac address='52:54:00:00:00:01'/>
          <source type='unix' path='/run/wadi/sockets/vm1-net0.sock' mode='client'><reconnect enabled='yes' timeout='1'/></source>
          <model type='virtio'/>
          <driver queues='2' rx_queue_size='1024'/>
        </interface>";
    pub(in crate::hook) const DISK: &str = "<disk type='vhostuser' device='disk'>
          <driver name='qemu' type='raw'/>
          <source type='unix' path='/run/wadi/sockets/vm1-vol0.sock'><reconnect enabled='yes' timeout='1'/></source>
          <target dev='vda' bus='virtio'/>
        </disk>";

    pub(in crate::hook) fn parsed(metadata: &str, devices: &str) -> Domain {
        Domain::parse(&domain(metadata, devices)).unwrap().unwrap()
    }

    #[test]
    fn a_domain_says_what_it_needs() {
        let others = "<interface type='vhostuser'><source type='unix' path='/run/ovs/vm1-net0.sock' mode='server'/></interface>
                      <interface type='network'><source network='default'/></interface>
                      <disk type='file' device='disk'><source file='/run/wadi/sockets/vm1-vol1.sock'/></disk>";
        let domain = parsed("<wadi:nic device='net0' mtu='9000' vlan='7'/>", &format!("{others}{NIC}{DISK}"));
        assert_eq!((domain.name.as_str(), domain.instance()), ("web", "vm1"));
        let request = domain.request("h1", Path::new(SOCKETS)).unwrap();
        assert_eq!((request.name.as_str(), request.host.as_str()), ("vm1", "h1"));
        assert_eq!(request.volumes, ["vol0"]);
        let [nic] = &request.nics[..] else { panic!("{request:?}") };
        assert_eq!((nic.device.as_deref(), nic.mac.as_deref()), (Some("net0"), Some("52:54:00:00:00:01")));
        assert_eq!((nic.mtu, nic.queue_pairs, nic.policy.vlan), (Some(9000), Some(2), Some(7)));
        assert_eq!(request.priority, None);
        let xml = self::domain("", NIC).replace("name='vm1'>", "name='vm1' priority='300'>");
        let request = Domain::parse(&xml).unwrap().unwrap().request("h1", Path::new(SOCKETS)).unwrap();
        assert_eq!(request.priority, Some(300));
    }

    #[test]
    fn other_domains_are_left_alone() {
        let domain = domain("", NIC);
        assert_eq!(Domain::parse(&domain.replace(NAMESPACE, "urn:other")), Ok(None));
        // Elsewhere it means nothing.
        assert_eq!(Domain::parse(&domain.replace("metadata>", "elsewhere>")), Ok(None));
        for strange in ["", "<", "<domain/>", "\u{0}"] {
            assert_eq!(Domain::parse(strange), Ok(None), "{strange:?}");
        }
        assert!(Domain::parse(&domain.replace("</domain>", "")).unwrap_err().contains("no XML"));
    }

    #[test]
    fn the_shim_of_a_domain_is_commanded_through_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let with = |path: &Path| {
            let line = format!(
                "<qemu:commandline><qemu:env name='LD_PRELOAD' value='/l.so'/><qemu:env name='{CONTROL_VARIABLE}' value='{}'/></qemu:commandline>",
                path.display()
            );
            Domain::parse(&domain("", NIC).replace("</domain>", &format!("{line}</domain>")))
                .unwrap()
                .unwrap()
        };
        let path = directory.path().join("run/vm1-vcpus");
        let domain = with(&path);
        domain.make_vcpu_control().unwrap();
        domain.make_vcpu_control().unwrap();
        assert_eq!(ControlFile::open(&path).unwrap().process().unwrap(), None);
        domain.remove_vcpu_control().unwrap();
        domain.remove_vcpu_control().unwrap();
        assert!(!path.exists());
        // A domain that may not start, for another one has its name, leaves that one its own.
        domain.make_vcpu_control().unwrap();
        let mut qemu = Command::new("sleep").arg("1000").env(CONTROL_VARIABLE, &path).spawn().unwrap();
        // A process has its environment a moment after it was started.
        while Process::with_id(qemu.id()).and_then(|it| it.environment(CONTROL_VARIABLE)).is_none() {
            assert!(qemu.try_wait().unwrap().is_none());
        }
        let mut said = fs::read(&path).unwrap();
        let word = offset_of!(vcpu_slicing::Control, process);
        said[word..word + 4].copy_from_slice(&qemu.id().to_ne_bytes());
        fs::write(&path, &said).unwrap();
        assert!(domain.make_vcpu_control().unwrap_err().to_string().contains("another machine"));
        domain.remove_vcpu_control().unwrap();
        assert_eq!(fs::read(&path).unwrap(), said);
        qemu.kill().unwrap();
        qemu.wait().unwrap();
        domain.make_vcpu_control().unwrap();
        domain.remove_vcpu_control().unwrap();
        let foreign = directory.path().join("vm2-vcpus");
        fs::write(&foreign, "mine").unwrap();
        with(&foreign).make_vcpu_control().unwrap();
        with(&foreign).remove_vcpu_control().unwrap();
        assert_eq!(fs::read(&foreign).unwrap(), b"mine");
        parsed("", NIC).make_vcpu_control().unwrap();
    }

    #[test]
    fn what_cannot_be_leased_is_refused() {
        let refused = |metadata: &str, devices: &str| {
            parsed(metadata, devices).request("h1", Path::new(SOCKETS)).unwrap_err()
        };
        let error = refused("", &NIC.replace("vm1-net0", "vm2-net0"));
        assert!(error.contains("call it /run/wadi/sockets/vm1-DEVICE.sock"), "{error}");
        let error = refused("<wadi:nic device='net1'/>", NIC);
        assert!(error.contains("/run/wadi/sockets/vm1-net1.sock"), "{error}");
        let error = refused("", &NIC.replace("/run/wadi", "/run/other"));
        assert!(error.contains("no vhost-user device with a socket in /run/wadi/sockets"), "{error}");
        let error = Domain::parse(&domain("", &NIC.replace("'2'", "'two'"))).unwrap_err();
        assert!(error.contains("queues='two'"), "{error}");
        let error = Domain::parse(&domain("<wadi:nic/>", NIC)).unwrap_err();
        assert!(error.contains("its <metadata>"), "{error}");
    }
}
