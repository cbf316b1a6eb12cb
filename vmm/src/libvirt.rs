//! libvirt's description of a virtual machine.

use crate::hook::Metadata;
use crate::machine::CONTROL_VARIABLE;
use crate::words::shell_line;
use crate::xml::{Xml, text};
use crate::{Disk, Firmware, Network, QemuVersion, VmSpec, VmmError};

/// The namespace of what libvirt passes on to QEMU as it is.
pub(crate) const QEMU: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// What keeps a QEMU from crashing on NICs ([`QemuVersion::crashes_on_nic_vectors`]) that come to a domain while it runs.
pub(crate) const NO_VECTORS: &str = "virtio-net-pci.vectors=0";

/// How many ports libvirt's own devices may take: for USB, the balloon, channels, and one more.
const OWN_PORTS: u8 = 4;

/// The domain XML for `spec`, with what the hook of libvirt leases it by. libvirt lets machines listen for NICs only, and knows no
/// memory that begins in the middle of a file.
pub fn domain_xml(spec: &VmSpec, metadata: &Metadata, version: QemuVersion) -> Result<String, VmmError> {
    if spec.listens && !spec.disks.is_empty() {
        let reason = "libvirt cannot let a machine listen for its disks: create the instance without --vmm-listens, or \
                      run it with `vmm run`";
        return Err(VmmError::Spec { reason: reason.to_owned() });
    }
    refuse_pool_ram(spec, "libvirt cannot begin a guest's memory in the middle of a file, and nobody")?;
    if spec.memory_max_mib.is_some() {
        let reason =
            "libvirt plugs memory in by itself: leave --memory-max out, and give the domain a <maxMemory>";
        return Err(VmmError::Spec { reason: reason.to_owned() });
    }
    spec.check_shape()?;
    let mut xml = Xml::default();
    let crashes = version.crashes_on_nic_vectors(spec.accelerator);
    let namespace = if spec.networks.is_empty() && spec.vcpu_shim.is_none() && !crashes {
        ""
    } else {
        &format!(" xmlns:qemu='{QEMU}'")
    };
    xml.open(&format!("<domain type='{}'{namespace}>", spec.accelerator.domain_type()));
    xml.line(&format!("<name>{}</name>", text(&spec.name)));
    metadata.write(&mut xml);
    xml.line(&format!("<memory unit='KiB'>{}</memory>", spec.memory_kib()));
    // The frontends read and write the guest's memory, so it is shared.
    xml.line("<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>");
    xml.line(&match spec.cpus_max {
        Some(most) => format!("<vcpu current='{}'>{most}</vcpu>", spec.cpus),
        None => format!("<vcpu>{}</vcpu>", spec.cpus),
    });
    xml.open("<os>");
    xml.line("<type arch='x86_64' machine='q35'>hvm</type>");
    if let Firmware::Uefi(uefi) = &spec.firmware {
        xml.line(&format!(
            "<loader readonly='yes' type='pflash'>{}</loader>",
            text(&uefi.code.display().to_string())
        ));
        xml.line(&format!(
            "<nvram template='{}'>{}</nvram>",
            text(&uefi.template.display().to_string()),
            text(&uefi.variables.display().to_string())
        ));
    }
    if let Some(kernel) = &spec.kernel {
        xml.line(&format!("<kernel>{}</kernel>", text(&kernel.kernel.display().to_string())));
        if let Some(initrd) = &kernel.initrd {
            xml.line(&format!("<initrd>{}</initrd>", text(&initrd.display().to_string())));
        }
        xml.line(&format!("<cmdline>{}</cmdline>", text(&kernel.command_line)));
    }
    xml.close("</os>");
    xml.line("<features><acpi/><apic/></features>");
    let cpu = if spec.accelerator == crate::Accelerator::Kvm { "host-passthrough" } else { "maximum" };
    xml.open(&format!("<cpu mode='{cpu}'>"));
    // Not needed by the guest. Of a domain without nodes, libvirt 9 knows no longer that its memory is shared once its daemon was started
    // anew, and plugs no disk in.
    let cpus = spec.cpus_max.unwrap_or(spec.cpus) - 1;
    let memory = spec.memory_kib();
    xml.line(&format!(
        "<numa><cell id='0' cpus='0-{cpus}' memory='{memory}' unit='KiB' memAccess='shared'/></numa>"
    ));
    xml.close("</cpu>");
    xml.open("<devices>");
    ports(spec, &mut xml);
    for (index, disk) in spec.disks.iter().enumerate() {
        disk_xml(disk, &disk_name(index), spec.boot_index(&disk.device), &mut xml);
    }
    for network in &spec.networks {
        network_xml(network, spec.listens, spec.boot_index(&network.device), &mut xml);
    }
    xml.line("<serial type='pty'/>");
    xml.line("<console type='pty'/>");
    xml.close("</devices>");
    beyond_libvirt(spec, version, &mut xml);
    xml.close("</domain>");
    Ok(xml.text)
}

/// A disk, which the firmware may try to boot from, and which libvirt calls `target`.
pub(crate) fn disk_xml(disk: &Disk, target: &str, boot: Option<usize>, xml: &mut Xml) {
    xml.open("<disk type='vhostuser' device='disk'>");
    xml.line(&format!("<driver name='qemu' type='raw' queues='{}'/>", disk.queues));
    xml.open(&format!("<source type='unix' path='{}'>", text(&disk.socket.display().to_string())));
    xml.line("<reconnect enabled='yes' timeout='1'/>");
    xml.close("</source>");
    xml.line(&format!("<target dev='{target}' bus='virtio'/>"));
    if let Some(index) = boot {
        xml.line(&format!("<boot order='{}'/>", index + 1));
    }
    xml.close("</disk>");
}

/// A NIC, which the firmware may try to boot from.
pub(crate) fn network_xml(network: &Network, listens: bool, boot: Option<usize>, xml: &mut Xml) {
    xml.open("<interface type='vhostuser'>");
    xml.line(&format!("<mac address='{}'/>", text(&network.mac)));
    let path = text(&network.socket.display().to_string());
    if listens {
        xml.line(&format!("<source type='unix' path='{path}' mode='server'/>"));
    } else {
        xml.open(&format!("<source type='unix' path='{path}' mode='client'>"));
        xml.line("<reconnect enabled='yes' timeout='1'/>");
        xml.close("</source>");
    }
    xml.line("<model type='virtio'/>");
    xml.line(&format!(
        "<driver queues='{}' rx_queue_size='1024' tx_queue_size='1024'/>",
        network.queue_pairs
    ));
    match boot {
        Some(index) => xml.line(&format!("<boot order='{}'/>", index + 1)),
        None => xml.line("<rom enabled='no'/>"),
    }
    xml.line(&format!("<alias name='ua-{}'/>", text(&network.device)));
    xml.close("</interface>");
}

/// What libvirt has no element for and passes on to QEMU.
fn beyond_libvirt(spec: &VmSpec, version: QemuVersion, xml: &mut Xml) {
    let crashes = version.crashes_on_nic_vectors(spec.accelerator);
    if crashes || spec.vcpu_shim.is_some() {
        xml.open("<qemu:commandline>");
    }
    if crashes {
        // For NICs that come later: libvirt overrides nothing of these.
        xml.line("<qemu:arg value='-global'/>");
        xml.line(&format!("<qemu:arg value='{NO_VECTORS}'/>"));
    }
    if let Some(shim) = &spec.vcpu_shim {
        for (name, value) in [("LD_PRELOAD", shim), (CONTROL_VARIABLE, &spec.vcpu_control())] {
            let value = text(&value.display().to_string());
            xml.line(&format!("<qemu:env name='{name}' value='{value}'/>"));
        }
    }
    if crashes || spec.vcpu_shim.is_some() {
        xml.close("</qemu:commandline>");
    }
    if !spec.networks.is_empty() {
        xml.open("<qemu:override>");
        for network in &spec.networks {
            xml.open(&format!("<qemu:device alias='ua-{}'>", text(&network.device)));
            xml.open("<qemu:frontend>");
            // Not by <mtu>: libvirt then looks for an interface of the host, and there is none.
            xml.line(&format!("<qemu:property name='host_mtu' type='unsigned' value='{}'/>", network.mtu));
            if crashes {
                // This QEMU crashes on a vhost-user NIC with MSI-X under TCG.
                xml.line("<qemu:property name='vectors' type='unsigned' value='0'/>");
            }
            xml.close("</qemu:frontend>");
            xml.close("</qemu:device>");
        }
        xml.close("</qemu:override>");
    }
}

/// libvirt makes as many ports as its devices need, and none for what comes later.
fn ports(spec: &VmSpec, xml: &mut Xml) {
    // Of controllers without a number, it would take the first for the root complex.
    xml.line("<controller type='pci' index='0' model='pcie-root'/>");
    for index in 1..=spec.port_count() + OWN_PORTS {
        xml.line(&format!("<controller type='pci' index='{index}' model='pcie-root-port'/>"));
    }
}

/// The command line that starts `spec` without libvirt.
pub fn command_line(spec: &VmSpec, version: QemuVersion) -> Result<String, VmmError> {
    refuse_pool_ram(spec, "nobody")?;
    spec.check_shape()?;
    Ok(shell_line(&spec.qemu.display().to_string(), &spec.arguments(version)))
}

/// The pool gives memory to others when no process has it locked, and a command line locks nothing.
fn refuse_pool_ram(spec: &VmSpec, who: &str) -> Result<(), VmmError> {
    if spec.pool_ram.is_none() {
        return Ok(());
    }
    let reason = format!(
        "the memory of {} lies in the pool: {who} would wipe it of what others left there, and keep it until QEMU has ended. \
         Run it with `vmm run`, or create the instance without --ram",
        spec.name
    );
    Err(VmmError::Spec { reason })
}

/// `vda`, `vdb`, … `vdz`, `vdaa`.
pub(crate) fn disk_name(mut index: usize) -> String {
    let mut letters = Vec::new();
    loop {
        letters.push(char::from(b'a' + u8::try_from(index % 26).unwrap_or(0)));
        if index < 26 {
            break;
        }
        index = index / 26 - 1;
    }
    letters.push('d');
    letters.push('v');
    letters.iter().rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Uefi;
    use crate::spec::tests::spec;

    #[test]
    fn every_element_is_closed() {
        let xml = domain_xml(&spec(), &Metadata::default(), QemuVersion { major: 7, minor: 2 }).unwrap();
        let opened = xml.matches('<').count() - 2 * xml.matches("</").count() - xml.matches("/>").count();
        assert_eq!(opened, 0, "{xml}");
        assert!(xml.contains("<qemu:property name='vectors' type='unsigned' value='0'/>"), "{xml}");
        assert!(xml.contains("<access mode='shared'/>"), "{xml}");
        assert!(xml.contains("index='0' model='pcie-root'/>"), "{xml}");
        assert!(xml.contains("index='1' model='pcie-root-port'/>") && xml.contains("index='8'"), "{xml}");
    }

    #[test]
    fn a_domain_has_the_shim_as_the_machine_would() {
        let version = QemuVersion { major: 10, minor: 0 };
        assert!(!domain_xml(&spec(), &Metadata::default(), version).unwrap().contains("qemu:env"));
        let mut spec = VmSpec { vcpu_shim: Some("/l/shim.so".into()), ..spec() };
        spec.networks.clear();
        let xml = domain_xml(&spec, &Metadata::default(), version).unwrap();
        assert!(xml.contains("<qemu:env name='LD_PRELOAD' value='/l/shim.so'/>"), "{xml}");
        assert!(
            xml.contains("<qemu:env name='WADI_VCPU_CONTROL' value='/") && xml.contains("xmlns:qemu="),
            "{xml}"
        );
    }

    #[test]
    fn what_would_not_run_is_not_printed() {
        let version = QemuVersion { major: 10, minor: 0 };
        let firmware = VmSpec { kernel: None, ..spec() };
        for (wrong, said) in [
            (VmSpec { boot: vec!["vol9".to_owned()], ..firmware.clone() }, "cannot boot from vol9"),
            (VmSpec { cpus: 0, ..spec() }, "at least one vCPU"),
            (VmSpec { cpus: 4, cpus_max: Some(2), ..spec() }, "vCPUs cannot grow"),
            (VmSpec { ports: Some(1), ..spec() }, "give --ports 2"),
            (VmSpec { disks: Vec::new(), ..firmware }, "give --kernel"),
        ] {
            let printed = [domain_xml(&wrong, &Metadata::default(), version), command_line(&wrong, version)];
            for printed in printed {
                let error = printed.unwrap_err().to_string();
                assert!(error.contains(said), "{error}");
            }
        }
        let shrinks = VmSpec { memory_max_mib: Some(256), ..spec() };
        let error = command_line(&shrinks, version).unwrap_err().to_string();
        assert!(error.contains("memory cannot grow"), "{error}");
        // Where it is started, and when, is not known yet: its sockets may be there then.
        command_line(&spec(), version).unwrap();
    }

    #[test]
    fn only_qemu_that_crashes_goes_without_vectors() {
        let xml = domain_xml(&spec(), &Metadata::default(), QemuVersion { major: 10, minor: 0 }).unwrap();
        assert!(xml.contains("name='host_mtu'") && !xml.contains("vectors"), "{xml}");
    }

    #[test]
    fn a_domain_boots_as_the_machine_would() {
        let version = QemuVersion { major: 10, minor: 0 };
        let uefi = Uefi { code: "/c.fd".into(), template: "/t.fd".into(), variables: "/v.fd".into() };
        let mut spec = VmSpec { kernel: None, firmware: Firmware::Uefi(uefi), ..spec() };
        let xml = domain_xml(&spec, &Metadata::default(), version).unwrap();
        assert!(xml.contains("<loader readonly='yes' type='pflash'>/c.fd</loader>"), "{xml}");
        assert!(xml.contains("<nvram template='/t.fd'>/v.fd</nvram>"), "{xml}");
        assert!(
            xml.matches("<boot order='1'/>").count() == 1 && xml.contains("<rom enabled='no'/>"),
            "{xml}"
        );
        spec.boot = vec!["net0".to_owned()];
        let xml = domain_xml(&spec, &Metadata::default(), version).unwrap();
        assert!(xml.matches("<boot order").count() == 1 && !xml.contains("<rom"), "{xml}");
        spec.kernel = crate::spec::tests::spec().kernel;
        assert!(!domain_xml(&spec, &Metadata::default(), version).unwrap().contains("<boot order"));
    }

    #[test]
    fn a_machine_listens_for_nics_only() {
        let mut spec = VmSpec { listens: true, ..spec() };
        let version = QemuVersion { major: 10, minor: 0 };
        assert!(
            domain_xml(&spec, &Metadata::default(), version)
                .unwrap_err()
                .to_string()
                .contains("--vmm-listens")
        );
        spec.disks.clear();
        let xml = domain_xml(&spec, &Metadata::default(), version).unwrap();
        assert!(xml.contains("mode='server'/>") && !xml.contains("<reconnect"), "{xml}");
    }

    #[test]
    fn memory_in_the_pool_is_for_those_who_keep_it() {
        let ram = crate::PoolRam {
            pool: "/dev/dax0.0".into(),
            uuid: String::new(),
            start_bytes: 2 << 20,
            size_bytes: 512 << 20,
        };
        let spec = VmSpec { pool_ram: Some(ram), ..spec() };
        let version = QemuVersion { major: 10, minor: 0 };
        assert!(
            domain_xml(&spec, &Metadata::default(), version)
                .unwrap_err()
                .to_string()
                .contains("libvirt cannot")
        );
        assert!(command_line(&spec, version).unwrap_err().to_string().contains("`vmm run`"));
    }

    #[test]
    fn memory_that_libvirt_would_have_to_plug_in_is_refused() {
        let spec = VmSpec { memory_max_mib: Some(2048), ..spec() };
        let error = domain_xml(&spec, &Metadata::default(), QemuVersion { major: 10, minor: 0 });
        assert!(error.unwrap_err().to_string().contains("--memory-max"));
    }

    #[test]
    fn vcpus_that_may_be_plugged_in_have_room() {
        let version = QemuVersion { major: 10, minor: 0 };
        let xml =
            |cpus_max| domain_xml(&VmSpec { cpus_max, ..spec() }, &Metadata::default(), version).unwrap();
        assert!(xml(None).contains("<vcpu>2</vcpu>"));
        assert!(xml(Some(4)).contains("<vcpu current='2'>4</vcpu>"));
    }

    #[test]
    fn disks_are_named_as_linux_names_them() {
        assert_eq!(disk_name(0), "vda");
        assert_eq!(disk_name(25), "vdz");
        assert_eq!(disk_name(26), "vdaa");
        assert_eq!(disk_name(27), "vdab");
    }

    #[test]
    fn markup_in_names_is_escaped() {
        let mut spec = spec();
        spec.name = "a<b&c".to_owned();
        let xml = domain_xml(&spec, &Metadata::default(), QemuVersion { major: 10, minor: 0 }).unwrap();
        assert!(xml.contains("<name>a&lt;b&amp;c</name>"), "{xml}");
    }
}
