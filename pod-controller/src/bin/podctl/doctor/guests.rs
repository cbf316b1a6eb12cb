//! What virtual machines on this host need. A host without any needs none of it.

use std::fs::OpenOptions;
use std::process::Command;

use super::{Finding, Machine};

const QEMU: &str = "qemu-system-x86_64";
/// The oldest that is tested.
const OLDEST: (u32, u32) = (7, 2);

pub(super) fn examine(machine: &Machine) -> Vec<Finding> {
    let said = Command::new(QEMU).arg("--version").output().ok();
    let said = said.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    vec![qemu(said.as_deref()), kvm(machine)]
}

fn qemu(said: Option<&str>) -> Finding {
    let Some(said) = said else {
        return Finding::poor(
            "qemu",
            format!("{QEMU} is not installed: no VMs here"),
            "apt-get install qemu-system-x86",
        );
    };
    let first = said.lines().next().unwrap_or_default();
    match version(first) {
        Some(version) if version < OLDEST => {
            let advice = format!("use QEMU {}.{} or later", OLDEST.0, OLDEST.1);
            Finding::poor("qemu", first, advice)
        }
        _ => Finding::good("qemu", first),
    }
}

/// Of "QEMU emulator version 7.2.22 (Debian …)".
fn version(line: &str) -> Option<(u32, u32)> {
    let (_, rest) = line.split_once("version ")?;
    let mut numbers = rest.split(|character: char| !character.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn kvm(machine: &Machine) -> Finding {
    match OpenOptions::new().read(true).write(true).open(machine.path("/dev/kvm")) {
        Ok(_) => Finding::good("kvm", "/dev/kvm opens; `vmm` tries it out before it relies on it"),
        Err(error) => {
            let found = format!("/dev/kvm: {error}: VMs are emulated, and slow");
            let advice =
                "switch virtualization on in the firmware (in a VM: nested), and load kvm_intel or kvm_amd";
            Finding::poor("kvm", found, advice)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn old_and_missing_emulators_are_found() {
        let verdict = |said| qemu(said).verdict;
        assert_eq!(verdict(None), Verdict::Poor);
        assert_eq!(
            verdict(Some("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)\nCopyright")),
            Verdict::Good
        );
        assert_eq!(verdict(Some("QEMU emulator version 10.0.2")), Verdict::Good);
        assert_eq!(verdict(Some("QEMU emulator version 7.1.0")), Verdict::Poor);
        assert_eq!(verdict(Some("something else")), Verdict::Good);
    }
}
