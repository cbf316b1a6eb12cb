//! The host's NICs and SSDs, and what their drivers need of the kernel.

use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::path::Path;

use pod_protocol::config::HostConfig;

use super::{Finding, Machine, caches};

pub(super) fn examine(host: &HostConfig, machine: &Machine) -> Vec<Finding> {
    let mut findings: Vec<Finding> = host.nic.iter().map(|table| nic(table, machine)).collect();
    findings.extend(host.ssd.iter().map(ssd));
    if host.ssd.iter().any(|table| text(table, "driver") == "file") {
        findings.extend(io_uring(machine));
    }
    findings
}

/// What a device's table says; the engines complain themselves about what does not belong there.
fn text<'a>(table: &'a toml::Table, key: &str) -> &'a str {
    table.get(key).and_then(toml::Value::as_str).unwrap_or_default()
}

fn nic(table: &toml::Table, machine: &Machine) -> Finding {
    let subject = format!("nic {}", text(table, "name"));
    let (driver, interface) = (text(table, "driver"), text(table, "interface"));
    let there = |name: &str| !name.is_empty() && machine.path(&format!("/sys/class/net/{name}")).exists();
    let creates = table.get("create").and_then(toml::Value::as_bool).unwrap_or(true);
    let bypasses = table.get("cache-bypassing").and_then(toml::Value::as_bool).unwrap_or(false);
    match driver {
        "tap" | "af-xdp" if bypasses => {
            let found = format!("{driver} does not write past the caches, and refuses cache-bypassing");
            Finding::broken(&subject, found, "leave cache-bypassing out")
        }
        "null" if bypasses => Finding::good(&subject, "null, plays a device that writes past the caches"),
        _ if bypasses => caches::bypassed(&subject, interface, machine),
        "tap" if !machine.path("/dev/net/tun").exists() => {
            Finding::broken(&subject, "/dev/net/tun is missing", "modprobe tun")
        }
        "tap" if !creates && !there(interface) => {
            let advice = format!("ip tuntap add {interface} mode tap vnet_hdr multi_queue");
            Finding::broken(&subject, format!("the TAP device {interface} is missing"), advice)
        }
        "tap" => link(&subject, [text(table, "uplink"), interface], machine, "tap"),
        "af-xdp" if !there(interface) => {
            let found = format!("the interface {interface:?} is missing");
            Finding::broken(&subject, found, "see `ip link`, and set interface to one of them")
        }
        "af-xdp" => link(&subject, [interface, interface], machine, "af-xdp"),
        other => Finding::good(&subject, other),
    }
}

/// The first of these interfaces that is there, and its carrier.
fn link(subject: &str, names: [&str; 2], machine: &Machine, driver: &str) -> Finding {
    let state = |name: &&str| machine.read(&format!("/sys/class/net/{name}/operstate"));
    let Some((name, state)) = names.iter().find_map(|name| Some((name, state(name)?))) else {
        return Finding::good(subject, format!("{driver}, not made yet"));
    };
    if state == "down" || state == "lowerlayerdown" {
        let found = format!("{driver}: the link of {name} is {state}");
        return Finding::poor(subject, found, format!("plug in its cable, or ip link set {name} up"));
    }
    Finding::good(subject, format!("{driver}, {name} is {state}"))
}

fn ssd(table: &toml::Table) -> Finding {
    let subject = format!("ssd {}", text(table, "name"));
    match text(table, "driver") {
        "file" => file(&subject, Path::new(text(table, "path")), table.contains_key("size")),
        "vhost-user" => {
            let socket = text(table, "socket");
            if Path::new(socket).exists() {
                Finding::good(&subject, format!("vhost-user, {socket}"))
            } else {
                let advice = "start the program that serves it before the backend";
                Finding::broken(&subject, format!("there is no socket {socket}"), advice)
            }
        }
        other => Finding::good(&subject, other),
    }
}

fn file(subject: &str, path: &Path, sized: bool) -> Finding {
    let shown = path.display();
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => match fs::metadata(path) {
            Ok(metadata) if metadata.is_file() && metadata.len() == 0 && !sized => {
                drop(file);
                Finding::broken(subject, format!("{shown} is empty"), "give it a size in the configuration")
            }
            _ => Finding::good(subject, format!("file, {shown}")),
        },
        Err(error) if error.kind() == ErrorKind::NotFound && sized => {
            let parent = path.parent().filter(|parent| parent.is_dir());
            match parent {
                Some(_) => Finding::good(subject, format!("file, {shown}, not made yet")),
                None => Finding::broken(subject, format!("{shown} has no directory"), "make it: mkdir -p"),
            }
        }
        Err(error) => {
            let advice = "correct its path, give it a size if it shall be made, and run the backend as root";
            Finding::broken(subject, format!("{shown}: {error}"), advice)
        }
    }
}

/// Kernels since 6.6 can forbid it.
fn io_uring(machine: &Machine) -> Option<Finding> {
    let setting = machine.read("/proc/sys/kernel/io_uring_disabled")?;
    Some(match setting.as_str() {
        "0" => Finding::good("io_uring", "allowed"),
        _ => Finding::broken(
            "io_uring",
            format!("forbidden (kernel.io_uring_disabled = {setting})"),
            "sysctl kernel.io_uring_disabled=0",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::super::tests::machine;
    use super::*;

    fn verdicts(text: &str, machine: &Machine) -> Vec<(String, Verdict)> {
        let text = format!("[host]\nid = 1\nname = 'h1'\n[pool]\npath = '/p'\n{text}");
        let host = HostConfig::parse(&text, Path::new("host.toml")).expect("a configuration");
        examine(&host, machine).into_iter().map(|finding| (finding.subject, finding.verdict)).collect()
    }

    #[test]
    fn nics_are_looked_for() {
        let files = [
            ("/dev/net/tun", ""),
            ("/sys/class/net/eth0/operstate", "up\n"),
            ("/sys/class/net/eth1/operstate", "down\n"),
        ];
        let (_directory, machine) = machine(&files);
        let text = "[[nic]]\nname = 'a'\ndriver = 'tap'\ninterface = 'tap0'\n\
                    [[nic]]\nname = 'b'\ndriver = 'tap'\ninterface = 'tap0'\nuplink = 'eth1'\n\
                    [[nic]]\nname = 'c'\ndriver = 'tap'\ninterface = 'tap0'\ncreate = false\n\
                    [[nic]]\nname = 'd'\ndriver = 'af-xdp'\ninterface = 'eth0'\n\
                    [[nic]]\nname = 'e'\ndriver = 'af-xdp'\ninterface = 'eth7'\n";
        let found =
            |text| verdicts(text, &machine).into_iter().map(|(_, verdict)| verdict).collect::<Vec<_>>();
        assert_eq!(
            found(text),
            [Verdict::Good, Verdict::Poor, Verdict::Broken, Verdict::Good, Verdict::Broken]
        );
        let bypassing = "[[nic]]\nname = 'a'\ndriver = 'af-xdp'\ninterface = 'eth0'\ncache-bypassing = true\n\
                         [[nic]]\nname = 'b'\ndriver = 'null'\ncache-bypassing = true\n\
                         [[nic]]\nname = 'c'\ndriver = 'another'\ninterface = 'eth0'\ncache-bypassing = true\n";
        assert_eq!(found(bypassing), [Verdict::Broken, Verdict::Good, Verdict::Poor]);
    }

    #[test]
    fn ssds_are_looked_for_and_io_uring_once() {
        let (directory, machine) = machine(&[
            ("/proc/sys/kernel/io_uring_disabled", "2\n"),
            ("/srv/disk", "data"),
            ("/srv/empty", ""),
        ]);
        let srv = directory.path().join("srv");
        let srv = srv.display();
        let text = format!(
            "[[ssd]]\nname = 'a'\ndriver = 'file'\npath = '{srv}/disk'\n\
             [[ssd]]\nname = 'b'\ndriver = 'file'\npath = '{srv}/empty'\n\
             [[ssd]]\nname = 'c'\ndriver = 'file'\npath = '{srv}/new'\nsize = '1G'\n\
             [[ssd]]\nname = 'd'\ndriver = 'file'\npath = '{srv}/new'\n\
             [[ssd]]\nname = 'e'\ndriver = 'vhost-user'\nsocket = '{srv}/none'\n"
        );
        let found = verdicts(&text, &machine);
        let of = |subject: &str| found.iter().find(|(it, _)| it == subject).map(|(_, verdict)| *verdict);
        assert_eq!(of("ssd a"), Some(Verdict::Good));
        assert_eq!(of("ssd b"), Some(Verdict::Broken));
        assert_eq!(of("ssd c"), Some(Verdict::Good));
        assert_eq!(of("ssd d"), Some(Verdict::Broken));
        assert_eq!(of("ssd e"), Some(Verdict::Broken));
        assert_eq!(found.iter().filter(|(subject, _)| subject == "io_uring").count(), 1);
        assert_eq!(of("io_uring"), Some(Verdict::Broken));
    }
}
