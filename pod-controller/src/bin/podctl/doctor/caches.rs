//! Whether a device really writes past the caches of its host, where the configuration says so.
//!
//! Intel's processors let writes of devices into their caches ("DDIO"). On those of the first two generations of Xeon Scalable the PCIe root
//! port of the device says whether it does, in a register that root can read; others do not tell without their model-specific registers.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::{Finding, Machine};

/// `perfctrlsts_0` in the configuration space of these root ports.
const REGISTER: u64 = 0x180;
/// Its bit for writes that may stay in a cache.
const ALLOCATING: u8 = 0x80;
const INTEL: &str = "0x8086";
/// Root ports of Skylake-SP and Cascade Lake-SP.
const PORTS: [&str; 4] = ["0x2030", "0x2031", "0x2032", "0x2033"];

/// Of a NIC behind this interface of which is said that its device bypasses the caches.
pub(super) fn bypassed(subject: &str, interface: &str, machine: &Machine) -> Finding {
    let by_hand = |why: String| {
        let advice = "make sure that allocating writes (DDIO) are off for its root port, in the firmware's settings or with a tool of the \
                      processor's vendor, or leave cache-bypassing out: while they are on, packets are corrupted";
        Finding::poor(subject, format!("cache-bypassing, and {why}"), advice)
    };
    let Some(port) = root_port(interface, machine) else {
        return by_hand(format!("{interface:?} is behind no PCIe root port here that could tell"));
    };
    let read = |file: &str| fs::read_to_string(port.join(file)).unwrap_or_default().trim().to_owned();
    let shown = port.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if read("vendor") != INTEL || !PORTS.contains(&read("device").as_str()) {
        return by_hand(format!("its root port {shown} does not tell whether writes stay in caches"));
    }
    let mut byte = [0];
    let register = File::open(port.join("config")).and_then(|it| it.read_exact_at(&mut byte, REGISTER));
    match register {
        Ok(()) if byte[0] & ALLOCATING == 0 => {
            Finding::good(subject, format!("cache-bypassing, and {shown} writes past the caches"))
        }
        Ok(()) => {
            let off = byte[0] & !ALLOCATING;
            let advice = format!("setpci -s {shown} 180.b={off:02x}, or leave cache-bypassing out");
            Finding::broken(subject, format!("cache-bypassing, but {shown} writes into caches"), advice)
        }
        Err(error) => {
            let advice = "run podctl doctor as root";
            Finding::poor(subject, format!("cache-bypassing, and of {shown} cannot be read: {error}"), advice)
        }
    }
}

/// The directory of the root port that the device of an interface is behind.
fn root_port(interface: &str, machine: &Machine) -> Option<PathBuf> {
    let device = machine.path(&format!("/sys/class/net/{interface}/device"));
    let device = fs::canonicalize(device).ok().filter(|_| !interface.is_empty())?;
    // As /sys/devices/pci0000:17/0000:17:00.0/0000:18:00.0: a port, maybe switches, and the device.
    let is_bus = |name: &OsStr| name.to_string_lossy().starts_with("pci");
    let port =
        device.ancestors().find(|it| it.parent().and_then(|bus| bus.file_name()).is_some_and(is_bus))?;
    (port != device).then(|| port.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::Verdict;
    use super::super::tests::machine;
    use super::*;

    /// What is found where the port is this one and its register has this value.
    fn found(device: &str, value: u8) -> Finding {
        let port = "/sys/devices/pci0000:17/0000:17:00.0";
        let (vendor, name) = (format!("{port}/vendor"), format!("{port}/device"));
        let (directory, machine) = machine(&[
            (&vendor, "0x8086\n"),
            (&name, device),
            (&format!("{port}/0000:18:00.0/vendor"), "0x15b3\n"),
            ("/sys/class/net/eth0/operstate", "up\n"),
        ]);
        let mut config = vec![0; 4096];
        config[0x180] = value;
        fs::write(directory.path().join(&port[1..]).join("config"), config).expect("a file");
        let link = directory.path().join("sys/class/net/eth0/device");
        symlink(directory.path().join(&port[1..]).join("0000:18:00.0"), link).expect("a link");
        bypassed("nic nic0", "eth0", &machine)
    }

    #[test]
    fn the_root_port_is_asked_whether_writes_stay_in_caches() {
        assert_eq!(found("0x2030\n", 0x51).verdict, Verdict::Good);
        let on = found("0x2033\n", 0xd1);
        assert_eq!(on.verdict, Verdict::Broken);
        assert!(on.advice.is_some_and(|advice| advice.contains("setpci -s 0000:17:00.0 180.b=51")));
        let another = found("0x352a\n", 0x51);
        assert_eq!(another.verdict, Verdict::Poor);
        assert!(another.advice.is_some_and(|advice| advice.contains("DDIO")));
    }

    #[test]
    fn of_what_is_behind_no_root_port_nobody_can_tell() {
        let (_directory, machine) = machine(&[("/sys/class/net/tap0/operstate", "up\n")]);
        for interface in ["tap0", "eth7", ""] {
            assert_eq!(bypassed("nic nic0", interface, &machine).verdict, Verdict::Poor, "{interface}");
        }
    }
}
