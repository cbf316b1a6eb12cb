//! What the kernel lets this process do, and so the daemons if they are started alike. Systemd's units say themselves what they need.

use pod_protocol::config::HostConfig;

use super::{Finding, Machine};

/// Bits of a set of capabilities (`linux/capability.h`).
const NET_ADMIN: (u32, &str) = (12, "CAP_NET_ADMIN");
const NET_RAW: (u32, &str) = (13, "CAP_NET_RAW");
const BPF: (u32, &str) = (39, "CAP_BPF");
const IPC_LOCK: u32 = 14;
const SYS_ADMIN: u32 = 21;

/// What engines have the kernel pin: the buffers of a few instances.
const LOCKED_BYTES: u64 = 64 << 20;

pub(super) fn examine(host: &HostConfig, machine: &Machine) -> Vec<Finding> {
    let Some(held) = capabilities(machine) else { return Vec::new() };
    let drivers = || host.nic.iter().filter_map(|table| table.get("driver").and_then(toml::Value::as_str));
    let wanted: &[(u32, &str)] = if drivers().any(|driver| driver == "af-xdp") {
        &[NET_ADMIN, NET_RAW, BPF]
    } else if drivers().any(|driver| driver == "tap") {
        &[NET_ADMIN]
    } else {
        &[]
    };
    let has = |bit: u32| held & (1 << bit) != 0;
    let mut findings = Vec::new();
    if !wanted.is_empty() {
        // Whatever may be done with BPF was SYS_ADMIN's before.
        let missing = |(bit, _): &&(u32, &str)| !(has(*bit) || *bit == BPF.0 && has(SYS_ADMIN));
        let missing: Vec<&str> = wanted.iter().filter(missing).map(|(_, name)| *name).collect();
        findings.push(if missing.is_empty() {
            Finding::good("capabilities", "what the NICs' drivers need")
        } else {
            let advice =
                "run this, and vhost-net-cxl, as root, or have its unit give it AmbientCapabilities=";
            Finding::broken("capabilities", format!("{} missing", missing.join(", ")), advice)
        });
    }
    findings.extend(locked_memory(machine, has(IPC_LOCK)));
    findings
}

/// The capabilities in force.
fn capabilities(machine: &Machine) -> Option<u64> {
    let status = machine.read("/proc/self/status")?;
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(set.trim(), 16).ok()
}

/// How much memory may be pinned: io_uring and AF_XDP do so with buffers in the pool.
fn locked_memory(machine: &Machine, is_unlimited: bool) -> Option<Finding> {
    const SUBJECT: &str = "locked memory";
    let limits = machine.read("/proc/self/limits")?;
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    let soft = limit.split_whitespace().next()?;
    if is_unlimited || soft == "unlimited" {
        return Some(Finding::good(SUBJECT, "as much as is wanted"));
    }
    let bytes: u64 = soft.parse().ok()?;
    let found = format!("{} at most", pod_api::ByteSize::new(bytes));
    if bytes >= LOCKED_BYTES {
        return Some(Finding::good(SUBJECT, found));
    }
    let advice = "ulimit -l unlimited, or LimitMEMLOCK=infinity in the units: buffers that cannot be registered with the kernel cost CPU time \
                  with every request";
    Some(Finding::poor(SUBJECT, found, advice))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Verdict;
    use super::super::tests::machine;
    use super::*;

    fn verdicts(driver: &str, capabilities: u64, locked: &str) -> Vec<(String, Verdict)> {
        let text = format!(
            "[host]\nid = 1\nname = 'h1'\n[pool]\npath = '/p'\n[[nic]]\nname = 'a'\ndriver = '{driver}'\ninterface = 'eth0'\n"
        );
        let host = HostConfig::parse(&text, Path::new("host.toml")).expect("a configuration");
        let status = format!("Name:\tpodctl\nCapEff:\t{capabilities:016x}\n");
        let limits = format!(
            "Limit   Soft Limit  Hard Limit  Units\nMax locked memory         {locked}  {locked}  bytes\n"
        );
        let (_directory, machine) =
            machine(&[("/proc/self/status", &status), ("/proc/self/limits", &limits)]);
        examine(&host, &machine).into_iter().map(|finding| (finding.subject, finding.verdict)).collect()
    }

    #[test]
    fn drivers_need_capabilities() {
        let of = |driver: &str, capabilities: u64| {
            let found = verdicts(driver, capabilities, "unlimited");
            found.into_iter().find(|(subject, _)| subject == "capabilities").map(|(_, verdict)| verdict)
        };
        assert_eq!(of("null", 0), None);
        assert_eq!(of("tap", 0), Some(Verdict::Broken));
        assert_eq!(of("tap", 1 << 12), Some(Verdict::Good));
        assert_eq!(of("af-xdp", 1 << 12 | 1 << 13), Some(Verdict::Broken));
        assert_eq!(of("af-xdp", 1 << 12 | 1 << 13 | 1 << 39), Some(Verdict::Good));
        assert_eq!(of("af-xdp", 1 << 12 | 1 << 13 | 1 << 21), Some(Verdict::Good));
    }

    #[test]
    fn little_locked_memory_is_poor() {
        let of = |capabilities: u64, locked: &str| {
            let found = verdicts("null", capabilities, locked);
            found.into_iter().find(|(subject, _)| subject == "locked memory").map(|(_, verdict)| verdict)
        };
        assert_eq!(of(0, "8388608"), Some(Verdict::Poor));
        assert_eq!(of(1 << 14, "8388608"), Some(Verdict::Good));
        assert_eq!(of(0, "unlimited"), Some(Verdict::Good));
        assert_eq!(of(0, "1073741824"), Some(Verdict::Good));
    }
}
