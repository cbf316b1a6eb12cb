//! Following an instance for the machine that runs it: when the controller leases a device to it, or wants one back, the machine
//! gets it or loses it, and its NICs have a link as long as something carries their packets.
//!
//! Only what there is is looked at: what the instance has leased, and what QEMU has, or libvirt's domain. So it does not matter who died in between,
//! and looking twice changes nothing more.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use pod_api::client::Client;
use pod_api::{DeviceAnswer, Disk, Event, EventKind, Instance, Nic};
use pod_protocol::daemon::LockFile;

use crate::instance::{disk, network};
use crate::links::Links;
use crate::plug::{Device, DomainPlugger, Inventory, Plug, Plugger};
use crate::{MonitorAddress, Registry, RunningVm, VmmError};

/// How long a guest may take to let go of a device before that is told, and it is asked again.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often is looked again for what is under way, while it is news, and after that.
const POLL: Duration = Duration::from_millis(100);
const LOOK: Duration = Duration::from_secs(1);
/// For how long it is news.
const NEWS: Duration = Duration::from_secs(5);
/// How often is looked where nothing is known to be under way.
const REGULARLY: Duration = Duration::from_secs(30);
/// How long to wait for a controller, or a QEMU, that does not answer.
const AWAY: Duration = Duration::from_secs(1);

/// Follows an instance. One at a time does so for a machine.
#[derive(Debug)]
pub struct Follower {
    client: Client,
    machine: RunningVm,
    /// Where the frontends serve the sockets of devices, once one was leased.
    sockets: OnceLock<PathBuf>,
    /// The host that the machine runs on, by the controller's name.
    host: String,
    _only: LockFile,
}

/// What a look has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// The machine has what it is to have.
    InLine,
    /// Something is under way.
    UnderWay,
    /// The guest runs on another host.
    Elsewhere,
}

/// A device that is leased to the instance.
struct Leased<'a> {
    name: &'a str,
    leaving: bool,
    plugged: bool,
    refused: Option<&'a str>,
    kind: Kind<'a>,
}

enum Kind<'a> {
    Nic(&'a Nic),
    Disk(&'a Disk),
}

fn leased(instance: &Instance) -> Vec<Leased<'_>> {
    let nics = instance.nics.iter().map(|it| Leased {
        name: &it.device,
        leaving: it.leaving,
        plugged: it.plugged,
        refused: it.refused.as_deref(),
        kind: Kind::Nic(it),
    });
    let disks = instance.disks.iter().map(|it| Leased {
        name: &it.device,
        leaving: it.leaving,
        plugged: it.plugged,
        refused: it.refused.as_deref(),
        kind: Kind::Disk(it),
    });
    nics.chain(disks).collect()
}

/// Devices that the guest was asked for, and when.
type Asked = BTreeMap<String, Instant>;

impl Follower {
    /// Is to follow the instance of a machine, which runs on `host`.
    pub fn new(
        client: Client,
        registry: &Registry,
        machine: RunningVm,
        host: String,
    ) -> Result<Self, VmmError> {
        let only = registry.lock_machine(&machine)?;
        Ok(Self { client, machine, sockets: OnceLock::new(), host, _only: only })
    }

    /// Follows it until the machine ends, or its guest runs on another host. `say` is told what happens, once each.
    pub fn follow(&self, mut say: impl FnMut(&str)) {
        let mut said = String::new();
        let mut links = Links::default();
        while self.machine.process.runs() {
            match self.follow_controller(&mut said, &mut links, &mut say) {
                Ok(Seen::Elsewhere) => return,
                Ok(_) => {}
                Err(error) => {
                    let error = error.to_string();
                    if said != error {
                        say(&format!("devices of {} are not brought in line: {error}", self.machine.name));
                        said = error;
                    }
                }
            }
            thread::sleep(AWAY);
        }
    }

    /// Until the machine ends, the guest is elsewhere, or the controller or QEMU does not answer.
    fn follow_controller(
        &self,
        said: &mut String,
        links: &mut Links,
        say: &mut impl FnMut(&str),
    ) -> Result<Seen, VmmError> {
        let mut events = self.client.follow_new_events()?;
        let mut asked = Asked::new();
        let mut news = Instant::now();
        let mut looked = Instant::now();
        // What happened before, and nobody followed.
        let mut seen = self.look(&mut asked, links, say)?;
        said.clear();
        while self.machine.process.runs() && seen != Seen::Elsewhere {
            let prompt = seen == Seen::UnderWay && news.elapsed() < NEWS;
            let event = events.next_within(if prompt { POLL } else { LOOK })?;
            let concerned = event.is_some_and(|event| self.concerns(&event) || links.hang_on(&event.subject));
            if concerned {
                news = Instant::now();
            }
            // A guest can also give a device up by itself.
            if concerned || seen == Seen::UnderWay || looked.elapsed() > REGULARLY {
                looked = Instant::now();
                seen = self.look(&mut asked, links, say)?;
            }
        }
        Ok(seen)
    }

    fn concerns(&self, event: &Event) -> bool {
        // That comes of what was told from here.
        event.subject == self.machine.name && event.kind != EventKind::DeviceRefused
    }

    /// A way to the machine of `instance`.
    fn connect(&self, instance: &Instance) -> Result<Box<dyn Plug + '_>, VmmError> {
        match &self.machine.monitor {
            MonitorAddress::Socket { path } => {
                let over = || !self.machine.process.runs();
                Ok(Box::new(Plugger::connect(path, instance.vmm_listens, over)?))
            }
            MonitorAddress::Domain { domain, uri } => {
                let nics = instance.nics.iter().map(|nic| &nic.socket);
                let mut sockets = nics.chain(instance.disks.iter().map(|disk| &disk.socket));
                if let Some(directory) = sockets.next().and_then(|socket| Path::new(socket).parent()) {
                    self.sockets.get_or_init(|| directory.to_owned());
                }
                Ok(Box::new(DomainPlugger {
                    domain,
                    uri: uri.as_deref(),
                    instance: &self.machine.name,
                    process: self.machine.process,
                    sockets: self.sockets.get().map(PathBuf::as_path),
                    listens: instance.vmm_listens,
                }))
            }
        }
    }

    /// Brings the machine in line with the instance as it is now, and tells the controller what became of it.
    fn look(
        &self,
        asked: &mut Asked,
        links: &mut Links,
        say: &mut impl FnMut(&str),
    ) -> Result<Seen, VmmError> {
        let instance = self.client.instance(&self.machine.name)?;
        if instance.migration.is_some() {
            return Ok(Seen::InLine);
        }
        if instance.host != self.host {
            return Ok(Seen::Elsewhere);
        }
        let leased = leased(&instance);
        let mut plugger = self.connect(&instance)?;
        let before = plugger.inventory()?;
        if !before.has_ports() {
            let reason = "it has no PCIe ports for devices of the pod: `vmm run` starts machines with them, and `vmm qemu-args` and `vmm xml` print how";
            return Err(VmmError::Machine { reason: reason.to_owned() });
        }
        // libvirt leaves nothing of a device that is gone.
        asked.retain(|device, _| {
            let there = before.has_some_of(device);
            if !there {
                say(&format!("{device} is unplugged"));
            }
            there
        });
        let mut under_way = false;
        let mut failed = None;
        for device in before.pod_devices() {
            let lease = leased.iter().find(|it| it.name == device);
            if lease.is_some_and(|it| !it.leaving && before.has(device)) {
                continue;
            }
            if before.has(device) {
                under_way = true;
                self.ask_for(&mut *plugger, device, lease, asked)?;
            } else if let Err(error) = plugger.remove_rest(device) {
                // The others do not wait for it.
                failed = Some(error);
            } else {
                asked.remove(device);
                say(&format!("{device} is unplugged"));
            }
        }
        for lease in &leased {
            // It was asked for while it was not leased, and comes again once it is gone.
            if !lease.leaving && before.has(lease.name) && asked.contains_key(lease.name) {
                under_way = true;
                self.ask_for(&mut *plugger, lease.name, Some(lease), asked)?;
                continue;
            }
            under_way |= self.bring(&instance, lease, &before, &mut *plugger, say)?;
        }
        under_way |= links.bring(&instance.nics, &before, &mut *plugger, Instant::now(), say)?;
        match failed {
            Some(error) => Err(error),
            None => Ok(if under_way { Seen::UnderWay } else { Seen::InLine }),
        }
    }

    /// Has the guest asked for a device, again after a while, and tells the controller if it keeps it: then one that is to leave is still
    /// there, and one that is to come again is not plugged in.
    fn ask_for(
        &self,
        plugger: &mut dyn Plug,
        device: &str,
        lease: Option<&Leased<'_>>,
        asked: &mut Asked,
    ) -> Result<(), VmmError> {
        match asked.get(device) {
            Some(since) if since.elapsed() < PATIENCE => return Ok(()),
            Some(_) => {
                if let Some(lease) = lease.filter(|it| it.refused.is_none()) {
                    let reason =
                        format!("the guest was asked {} s ago and has not let go of it", PATIENCE.as_secs());
                    self.answer(device, lease.leaving, Some(reason))?;
                }
            }
            None => {}
        }
        plugger.ask_for(device)?;
        asked.insert(device.to_owned(), Instant::now());
        Ok(())
    }

    /// Brings a leased device into the machine, if it is not there and is to be, and tells the controller. Says whether that has to
    /// wait.
    fn bring(
        &self,
        instance: &Instance,
        lease: &Leased<'_>,
        before: &Inventory,
        plugger: &mut dyn Plug,
        say: &mut impl FnMut(&str),
    ) -> Result<bool, VmmError> {
        let name = lease.name;
        if lease.leaving {
            if !before.has(name) {
                self.answer(name, false, None)?;
            }
            return Ok(false);
        }
        if before.has(name) {
            if !lease.plugged || lease.refused.is_some() {
                self.answer(name, true, None)?;
            }
            return Ok(false);
        }
        // QEMU would wait for a frontend that does not serve the socket yet, and its guest with it.
        if instance.waiting_for.iter().any(|it| it.strip_prefix(name).is_some_and(|it| it.starts_with(": ")))
        {
            return Ok(true);
        }
        let device = match lease.kind {
            Kind::Nic(nic) => Device::Network(network(nic, Path::new(&nic.socket).to_owned())),
            Kind::Disk(it) => Device::Disk(disk(it, Path::new(&it.socket).to_owned())),
        };
        let outcome = plugger.plug(&device);
        match outcome {
            Ok(()) => {
                say(&format!("{name} is plugged in"));
                self.answer(name, true, None)?;
            }
            // It may be there a moment later: the next look shows that.
            Err(error @ VmmError::Silent { .. }) => return Err(error),
            Err(error) => {
                let reason = error.to_string();
                if lease.refused != Some(&reason) {
                    say(&format!("{name} is not plugged in: {reason}"));
                    self.answer(name, false, Some(reason))?;
                }
            }
        }
        Ok(false)
    }

    fn answer(&self, device: &str, plugged: bool, refused: Option<String>) -> Result<(), VmmError> {
        match self.client.answer_device(&self.machine.name, device, &DeviceAnswer { plugged, refused }) {
            // The lease has ended meanwhile: nobody waits for the answer.
            Err(error) if error.status() != Some(404) => Err(error.into()),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use serde_json::json;

    use super::*;
    use crate::fake_controller::Controller;
    use crate::monitor::fake::Qemu;

    /// A guest that lets go of nothing has vol0.
    fn qemu() -> Qemu {
        Qemu::start(|name, arguments| {
            let answer = match name {
                "query-version" => json!({"qemu": {"major": 7, "minor": 2, "micro": 0}, "package": ""}),
                "query-kvm" => json!({"enabled": false, "present": false}),
                "query-chardev" => json!([{"label": "wadi-vol0", "filename": "", "frontend-open": true}]),
                "qom-list" => json!([
                    {"name": "port.0", "type": "child<pcie-root-port>"},
                    {"name": "vol0", "type": "child<vhost-user-blk-pci>"},
                ]),
                "qom-get" if arguments["path"] == "/machine/peripheral/vol0" => {
                    json!("/machine/peripheral/port.0/port.0")
                }
                "qom-get" => json!("/machine/q35/pcie.0"),
                _ => json!({}),
            };
            Some(json!({"return": answer}).to_string())
        })
    }

    #[test]
    fn what_is_gone_as_a_whole_is_not_asked_for_when_it_comes_again() {
        let qemu = Qemu::start(|name, _| {
            let answer = match name {
                "query-version" => json!({"qemu": {"major": 7, "minor": 2, "micro": 0}, "package": ""}),
                "query-kvm" => json!({"enabled": false, "present": false}),
                "query-chardev" => json!([]),
                "qom-list" => json!([{"name": "port.0", "type": "child<pcie-root-port>"}]),
                "qom-get" => json!("/machine/q35/pcie.0"),
                other => panic!("it is asked {other}"),
            };
            Some(json!({"return": answer}).to_string())
        });
        let controller = Controller::start(|_| {
            let instance =
                json!({"name": "vm1", "id": 1, "host": "h1", "ready": true, "nics": [], "disks": []});
            (200, instance.to_string())
        });
        let directory = tempfile::tempdir().unwrap();
        let machine = RunningVm::of_this_process(qemu.path.clone());
        let registry = Registry::new(directory.path());
        registry.add(&machine).unwrap();
        let follower = Follower::new(controller.client(), &registry, machine, "h1".to_owned()).unwrap();
        let (mut asked, mut said) = (Asked::from([("vol0".to_owned(), Instant::now())]), Vec::new());
        let mut say = |what: &str| said.push(what.to_owned());
        assert_eq!(follower.look(&mut asked, &mut Links::default(), &mut say).unwrap(), Seen::InLine);
        assert!(asked.is_empty());
        assert_eq!(said, ["vol0 is unplugged"]);
    }

    #[test]
    fn a_guest_that_keeps_what_comes_again_is_asked_again_and_it_is_told() {
        let (qemu, (tell, told)) = (qemu(), channel());
        let controller = Controller::listening(move |_, body| {
            if !body.is_empty() {
                tell.send(serde_json::from_str::<DeviceAnswer>(body).unwrap()).unwrap();
                return (204, String::new());
            }
            let disk = json!({
                "device": "vol0", "socket": "/s", "lease": 2, "generation": 2, "connected": true, "slot": 0, "volume": "vol0",
                "serial": "vol0", "size_bytes": 1, "block_bytes": 512, "queues": 1, "read_only": false, "ssd": "h2/ssd0",
            });
            let instance =
                json!({"name": "vm1", "id": 1, "host": "h1", "ready": true, "nics": [], "disks": [disk]});
            (200, instance.to_string())
        });
        let directory = tempfile::tempdir().unwrap();
        let machine = RunningVm::of_this_process(qemu.path.clone());
        let registry = Registry::new(directory.path());
        registry.add(&machine).unwrap();
        let follower = Follower::new(controller.client(), &registry, machine, "h1".to_owned()).unwrap();
        // It was taken by force, and the guest was asked for it then.
        let mut asked = Asked::from([("vol0".to_owned(), Instant::now())]);
        let is_asked = |asked: &mut Asked| {
            assert_eq!(follower.look(asked, &mut Links::default(), &mut |_| {}).unwrap(), Seen::UnderWay);
            qemu.asked().contains(&"device_del".to_owned())
        };
        assert!(!is_asked(&mut asked), "it has time");
        assert_eq!(told.try_iter().count(), 0);
        asked.insert("vol0".to_owned(), Instant::now().checked_sub(PATIENCE).unwrap());
        assert!(is_asked(&mut asked));
        let [answer] = &told.try_iter().collect::<Vec<_>>()[..] else { panic!("one answer") };
        assert!(
            !answer.plugged && answer.refused.as_ref().unwrap().contains("has not let go of it"),
            "{answer:?}"
        );
    }
}
