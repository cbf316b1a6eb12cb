//! Where an instance's devices are served, as one host sees it.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use pod_api::Instance;

use super::Domain;

/// The devices of an instance on a host where it runs, or to which it is about to come.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Place<'a> {
    instance: &'a Instance,
    ready: bool,
    waiting_for: &'a [String],
    devices: Vec<Served<'a>>,
}

/// A device as the host's frontend serves it.
#[derive(Debug, PartialEq, Eq)]
struct Served<'a> {
    name: &'a str,
    socket: &'a str,
    connected: bool,
    queues: u16,
    /// A NIC's address; disks have none.
    mac: Option<&'a str>,
}

impl<'a> Place<'a> {
    /// As `host` sees it; refused where the instance has nothing to do with that.
    pub(super) fn of(instance: &'a Instance, host: &str) -> Result<Self, String> {
        let nics = instance.nics.iter().filter(|it| !it.leaving).map(|it| Served {
            name: &it.device,
            socket: &it.socket,
            connected: it.connected,
            queues: it.queue_pairs,
            mac: Some(&it.mac),
        });
        let disks = instance.disks.iter().filter(|it| !it.leaving).map(|it| Served {
            name: &it.device,
            socket: &it.socket,
            connected: it.connected,
            queues: it.queues,
            mac: None,
        });
        let mut devices: Vec<_> = nics.chain(disks).collect();
        if instance.host == host {
            let (ready, waiting_for) = (instance.ready, &instance.waiting_for[..]);
            return Ok(Self { instance, ready, waiting_for, devices });
        }
        let Some(moving) = instance.migration.as_ref().filter(|it| it.to == host) else {
            return Err(format!(
                "its instance {0} is on {1}, and this host is {host}: if its VM runs there, move it (podctl instances migrate {0} \
                 --to {host}); if not, podctl instances delete {0}",
                instance.name, instance.host
            ));
        };
        for device in &mut devices {
            let there = moving.devices.iter().find(|it| it.device == device.name);
            let there = there.ok_or_else(|| format!("{} does not move along", device.name))?;
            (device.socket, device.connected) = (&there.socket, there.connected);
        }
        Ok(Self { instance, ready: moving.ready, waiting_for: &moving.waiting_for, devices })
    }

    /// Refuses a domain whose devices are not those of its instance: QEMU would say less, or wait for ever.
    pub(super) fn check(&self, domain: &Domain, sockets: &Path) -> Result<(), String> {
        let name = &self.instance.name;
        let anew = format!("`vmm xml --instance {name}` prints how they belong together");
        for served in &self.devices {
            let Served { name: device_name, socket, .. } = served;
            let Some(device) = domain.devices.iter().find(|it| it.socket.as_os_str() == *socket) else {
                return Err(format!(
                    "the pod serves {device_name} of the instance {name} on {socket}, and the domain has no device with that \
                     socket; {anew}"
                ));
            };
            if device.is_nic != served.mac.is_some() {
                let kind = if served.mac.is_some() { "a NIC" } else { "a disk" };
                return Err(format!(
                    "{device_name} is {kind}, and the domain has something else on {socket}; {anew}"
                ));
            }
            if let (Some(theirs), Some(ours)) = (&device.mac, served.mac)
                && !theirs.eq_ignore_ascii_case(ours)
            {
                return Err(format!(
                    "{device_name} has the address {ours}, and in the domain {theirs}; {anew}"
                ));
            }
            if device.listens != self.instance.vmm_listens {
                let mode = if self.instance.vmm_listens { "server" } else { "client" };
                return Err(format!("the socket {socket} needs mode='{mode}' in the domain; {anew}"));
            }
            if device.queues > served.queues {
                return Err(format!(
                    "{device_name} is served with {} queues at most, and the domain asks for queues='{}'; {anew}",
                    served.queues, device.queues
                ));
            }
        }
        let is_served = |socket: &Path| self.devices.iter().any(|it| socket.as_os_str() == it.socket);
        match domain.devices_below(sockets).find(|it| !is_served(&it.socket)) {
            Some(stray) => Err(format!(
                "the domain asks for {}, which the instance {name} does not have: podctl instances attach {name}, or take the \
                 device out of the domain",
                stray.socket.display()
            )),
            None => Ok(()),
        }
    }

    /// Why a VMM cannot be started yet.
    pub(super) fn lacking(&self) -> Option<String> {
        let name = &self.instance.name;
        if let Some(used) = self.devices.iter().find(|it| it.connected) {
            return Some(format!(
                "a VMM still uses {} of the instance {name}: end that one first (vmm list, podctl instances get {name})",
                used.name
            ));
        }
        if !self.ready {
            return Some(format!("the instance {name} still waits for {}", self.waiting_for.join(", ")));
        }
        let is_there = |socket: &str| fs::metadata(socket).is_ok_and(|it| it.file_type().is_socket());
        let absent = self.devices.iter().find(|it| !self.instance.vmm_listens && !is_there(it.socket))?;
        Some(format!(
            "{} is served on {}, the controller says, and there is no such socket here: are host.name and run.directory of this \
             host's configuration those that the controller knows?",
            absent.name, absent.socket
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use serde_json::json;

    use super::super::domain::tests::{DISK, NIC, SOCKETS, parsed};
    use super::*;

    /// What the controller says of the instance of that domain.
    fn instance(changes: &serde_json::Value) -> Instance {
        let device = |name: &str, more: serde_json::Value| {
            let mut device = json!({
                "device": name, "socket": format!("{SOCKETS}/vm1-{name}.sock"), "lease": 1, "generation": 1,
                "connected": false, "slot": 0,
            });
            merge(&mut device, &more);
            device
        };
        let nic = json!({"mac": "52:54:00:00:00:01", "mtu": 1500, "queue_pairs": 2, "nic": "h2/nic0"});
        let disk = json!({
            "volume": "vol0", "serial": "vol0", "size_bytes": 1, "block_bytes": 512, "queues": 1, "read_only": false,
            "ssd": "h2/ssd0",
        });
        let mut instance = json!({
            "name": "vm1", "id": 1, "host": "h1", "ready": true,
            "nics": [device("net0", nic)], "disks": [device("vol0", disk)],
        });
        merge(&mut instance, changes);
        serde_json::from_value(instance).unwrap()
    }

    fn merge(into: &mut serde_json::Value, changes: &serde_json::Value) {
        match (into, changes) {
            (serde_json::Value::Object(into), serde_json::Value::Object(changes)) => {
                for (name, value) in changes {
                    merge(into.entry(name).or_insert(serde_json::Value::Null), value);
                }
            }
            (serde_json::Value::Array(into), serde_json::Value::Array(changes)) => {
                into.iter_mut().zip(changes).for_each(|(into, value)| merge(into, value));
            }
            (into, changes) => *into = changes.clone(),
        }
    }

    fn checked(changes: &serde_json::Value, devices: &str) -> Result<(), String> {
        let instance = instance(changes);
        Place::of(&instance, "h1").unwrap().check(&parsed("", devices), Path::new(SOCKETS))
    }

    #[test]
    fn a_domain_has_the_devices_of_its_instance() {
        let both = format!("{NIC}{DISK}");
        assert_eq!(checked(&json!({}), &both), Ok(()));
        let shouted = both.replace("52:54:00:00:00:01", "52:54:00:00:00:0A");
        assert_eq!(checked(&json!({"nics": [{"mac": "52:54:00:00:00:0a"}]}), &shouted), Ok(()));
        for (changes, devices, said) in [
            (json!({}), NIC.to_owned(), "serves vol0 of the instance vm1 on /run/wadi/sockets/vm1-vol0.sock"),
            (
                json!({"nics": [{"mac": "52:54:00:00:00:02"}]}),
                both.clone(),
                "net0 has the address 52:54:00:00:00:02",
            ),
            (
                json!({"nics": [{"queue_pairs": 1}]}),
                both.clone(),
                "1 queues at most, and the domain asks for queues='2'",
            ),
            (json!({"vmm_listens": true}), both.clone(), "needs mode='server'"),
            (
                json!({"disks": [{"leaving": true}]}),
                both.clone(),
                "the domain asks for /run/wadi/sockets/vm1-vol0.sock",
            ),
            (
                json!({}),
                both.replace("vm1-net0", "x").replace("vm1-vol0", "vm1-net0").replace("/x.", "/vm1-vol0."),
                "net0 is a NIC",
            ),
        ] {
            let error = checked(&changes, &devices).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn a_host_has_what_runs_there_or_comes_there() {
        let elsewhere = instance(&json!({"host": "h2"}));
        let error = Place::of(&elsewhere, "h1").unwrap_err();
        assert!(error.contains("vm1 is on h2, and this host is h1"), "{error}");
        let there = |device: &str| json!({"device": device, "socket": format!("/there/{device}"), "connected": false});
        let moving = json!({"to": "h1", "ready": false, "waiting_for": ["net0: x"], "devices": [there("net0"), there("vol0")]});
        let moving = instance(&json!({"host": "h2", "migration": moving}));
        let place = Place::of(&moving, "h1").unwrap();
        assert_eq!(
            place.devices.iter().map(|it| it.socket).collect::<Vec<_>>(),
            ["/there/net0", "/there/vol0"]
        );
        assert_eq!(place.lacking().as_deref(), Some("the instance vm1 still waits for net0: x"));
        assert_eq!(Place::of(&moving, "h2").unwrap().devices[0].socket, "/run/wadi/sockets/vm1-net0.sock");
    }

    #[test]
    fn a_vmm_starts_when_nothing_is_lacking() {
        let lacking = |changes: serde_json::Value| Place::of(&instance(&changes), "h1").unwrap().lacking();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let sockets = || json!({"nics": [{"socket": path}], "disks": [{"socket": path}]});
        let said = lacking(sockets()).unwrap();
        assert!(said.contains("no such socket here") && said.contains("run.directory"), "{said}");
        fs::write(&path, "").unwrap();
        assert!(lacking(sockets()).is_some(), "a file is no socket");
        fs::remove_file(&path).unwrap();
        let _frontend = UnixListener::bind(&path).unwrap();
        assert_eq!(lacking(sockets()), None);
        // QEMU makes them itself.
        assert_eq!(lacking(json!({"vmm_listens": true})), None);
        let said = lacking(json!({"disks": [{"connected": true}]})).unwrap();
        assert!(said.contains("a VMM still uses vol0"), "{said}");
    }
}
