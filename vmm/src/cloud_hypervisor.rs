//! Cloud Hypervisor's command line for a virtual machine.

use std::path::{Path, PathBuf};

use crate::words::{Words, shell_line};
use crate::{VmSpec, VmmError};

/// The program that runs them.
pub const CLOUD_HYPERVISOR: &str = "cloud-hypervisor";

/// The words after `cloud-hypervisor` for `spec`. Without a kernel it boots from its first disk by this firmware, which is one of Cloud
/// Hypervisor's own: it knows neither SeaBIOS nor QEMU's OVMF.
///
/// `spec` says which program, memory, vCPUs, kernel and devices; what else it says is QEMU's.
pub fn arguments(spec: &VmSpec, firmware: Option<&Path>) -> Result<Vec<String>, VmmError> {
    check(spec, firmware)?;
    let mut words = Words::default();
    words.option("--api-socket", &format!("path={}", plain(&api_socket(spec))?));
    let most = spec.cpus_max.map_or_else(String::new, |most| format!(",max={most}"));
    words.option("--cpus", &format!("boot={}{most}", spec.cpus));
    // The frontends read and write the guest's memory, so it is shared.
    let room = spec.memory_max_mib.map(|most| format!(",hotplug_size={}M", most - spec.memory_mib));
    words
        .option("--memory", &format!("size={}M,shared=on{}", spec.memory_mib, room.as_deref().unwrap_or("")));
    match &spec.kernel {
        Some(kernel) => {
            words.option("--kernel", &kernel.kernel.display().to_string());
            if let Some(initrd) = &kernel.initrd {
                words.option("--initramfs", &initrd.display().to_string());
            }
            words.option("--cmdline", &kernel.command_line);
        }
        None => {
            // It is there: checked above.
            words.option("--firmware", &firmware.map(|path| path.display().to_string()).unwrap_or_default());
        }
    }
    // It takes a machine with fewer vCPUs than queues for a mistake.
    let queues_max = u16::try_from(spec.cpus).unwrap_or(u16::MAX);
    // Several values of one option are its words.
    let mut disks = Vec::new();
    for disk in &spec.disks {
        let (socket, queues) = (plain(&disk.socket)?, disk.queues.min(queues_max));
        disks.push(format!("vhost_user=on,socket={socket},num_queues={queues},id={}", disk.device));
    }
    let mut networks = Vec::new();
    for network in &spec.networks {
        let (socket, pairs) = (plain(&network.socket)?, network.queue_pairs.min(queues_max));
        let mode = if spec.listens { "server" } else { "client" };
        networks.push(format!(
            "vhost_user=on,socket={socket},vhost_mode={mode},num_queues={},mac={},mtu={},id={}",
            2 * pairs,
            network.mac,
            network.mtu,
            network.device
        ));
    }
    for (option, values) in [("--disk", disks), ("--net", networks)] {
        if !values.is_empty() {
            words.flag(option);
            words.0.extend(values);
        }
    }
    words.option("--serial", "tty");
    words.option("--console", "off");
    Ok(words.0)
}

/// The command line that starts `spec`.
pub fn command_line(spec: &VmSpec, firmware: Option<&Path>) -> Result<String, VmmError> {
    Ok(shell_line(&spec.qemu.display().to_string(), &arguments(spec, firmware)?))
}

/// Where `ch-remote` reaches it.
fn api_socket(spec: &VmSpec) -> PathBuf {
    spec.directory.join(format!("{}-cloud-hypervisor.sock", spec.name))
}

fn check(spec: &VmSpec, firmware: Option<&Path>) -> Result<(), VmmError> {
    let refuse = |reason: &str| Err(VmmError::Spec { reason: reason.to_owned() });
    if spec.pool_ram.is_some() {
        return refuse(
            "Cloud Hypervisor cannot begin a guest's memory in the middle of a file: run the instance with `vmm run`, or create \
             it without --ram",
        );
    }
    if spec.listens && !spec.disks.is_empty() {
        return refuse(
            "Cloud Hypervisor cannot let a machine listen for its disks: create the instance without --vmm-listens, or run it with \
             `vmm run`",
        );
    }
    if spec.kernel.is_none() && firmware.is_none() {
        return refuse(
            "it has neither a kernel nor a firmware: give --kernel, or --firmware with one of Cloud Hypervisor's own, such as \
             CLOUDHV.fd",
        );
    }
    spec.check()
}

/// A path in a value: Cloud Hypervisor ends values at commas, and not all of its versions know quotes.
fn plain(path: &Path) -> Result<String, VmmError> {
    let text = path.display().to_string();
    if text.contains([',', '"', '[', ']']) {
        let reason = format!(
            "Cloud Hypervisor cannot be told of {text}: have paths without commas, quotes and brackets"
        );
        return Err(VmmError::Spec { reason });
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PoolRam;

    /// A machine whose frontends are there.
    fn machine(directory: &Path) -> VmSpec {
        let mut spec = crate::spec::tests::spec();
        spec.qemu = CLOUD_HYPERVISOR.into();
        spec.networks[0].socket = directory.join("vm1-net0.sock");
        spec.disks[0].socket = directory.join("vm1-vol0.sock");
        for socket in [&spec.networks[0].socket, &spec.disks[0].socket] {
            std::fs::write(socket, "").unwrap();
        }
        spec
    }

    #[test]
    fn devices_are_the_pods_and_memory_is_shared() {
        let directory = tempfile::tempdir().unwrap();
        let spec = VmSpec { cpus_max: Some(4), memory_max_mib: Some(1024), ..machine(directory.path()) };
        let at = directory.path().display();
        let expected = [
            "--api-socket",
            "path=/run/wadi/vm/vm1-cloud-hypervisor.sock",
            "--cpus",
            "boot=2,max=4",
            "--memory",
            "size=512M,shared=on,hotplug_size=512M",
            "--kernel",
            "/boot/vmlinuz",
            "--initramfs",
            "/boot/initrd",
            "--cmdline",
            "console=ttyS0 quiet",
            "--disk",
            &format!("vhost_user=on,socket={at}/vm1-vol0.sock,num_queues=2,id=vol0"),
            "--net",
            &format!(
                "vhost_user=on,socket={at}/vm1-net0.sock,vhost_mode=client,num_queues=2,mac=52:54:00:00:00:01,mtu=1500,id=net0"
            ),
            "--serial",
            "tty",
            "--console",
            "off",
        ];
        assert_eq!(arguments(&spec, None).unwrap(), expected);
        let line = command_line(&spec, None).unwrap();
        assert!(line.starts_with("cloud-hypervisor \\\n  --api-socket "), "{line}");
        assert!(line.contains("--cmdline 'console=ttyS0 quiet'"), "{line}");
    }

    #[test]
    fn no_device_has_more_queues_than_there_are_vcpus() {
        let directory = tempfile::tempdir().unwrap();
        let mut spec = machine(directory.path());
        spec.networks[0].queue_pairs = 8;
        spec.disks[0].queues = 16;
        let line = arguments(&spec, None).unwrap().join(" ");
        assert!(line.contains("num_queues=4,mac=") && line.contains("num_queues=2,id=vol0"), "{line}");
    }

    #[test]
    fn a_disk_boots_by_a_firmware_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let spec = VmSpec { kernel: None, ..machine(directory.path()) };
        let line = arguments(&spec, Some(Path::new("/usr/share/CLOUDHV.fd"))).unwrap().join(" ");
        assert!(
            line.contains("--firmware /usr/share/CLOUDHV.fd --disk ") && !line.contains("--kernel"),
            "{line}"
        );
        assert!(arguments(&spec, None).unwrap_err().to_string().contains("--firmware"));
    }

    #[test]
    fn machines_that_it_cannot_run_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let spec = machine(directory.path());
        let refused = |spec: &VmSpec| arguments(spec, None).unwrap_err().to_string();
        let ram = PoolRam {
            pool: "/dev/dax0.0".into(),
            uuid: String::new(),
            start_bytes: 0,
            size_bytes: 512 << 20,
        };
        assert!(refused(&VmSpec { pool_ram: Some(ram), ..spec.clone() }).contains("without --ram"));
        assert!(refused(&VmSpec { listens: true, ..spec.clone() }).contains("--vmm-listens"));
        let mut odd = spec.clone();
        odd.disks[0].socket = directory.path().join("a,b");
        std::fs::write(&odd.disks[0].socket, "").unwrap();
        assert!(refused(&odd).contains("commas"));
        odd.disks.clear();
        odd.networks[0].socket = directory.path().join("none");
        assert!(refused(&odd).contains("is the frontend on this host running?"));
        // It listens for its NICs.
        odd.listens = true;
        assert!(arguments(&odd, None).unwrap().join(" ").contains("vhost_mode=server"));
    }
}
