//! From an instance, as the controller describes it, to a virtual machine.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use pod_api as api;
use pod_api::client::Client;

use crate::{Disk, Network, PoolRam, VmSpec, VmmError};

/// How long frontends, and the controller, may take to see that a VMM has ended.
const GONE: Duration = Duration::from_secs(2);
/// How often is looked whether they have.
const POLL: Duration = Duration::from_millis(20);

impl VmSpec {
    /// Gives the machine the name, the devices and the memory in the pool that `instance` has leased: those on the host to which
    /// it moves, if this machine is to receive its guest. Memory that has no place yet is left out.
    pub fn take_devices(&mut self, instance: &api::Instance) {
        let moving = instance.migration.as_ref().filter(|_| self.incoming.is_some());
        let socket = |device: &str, here: &str| {
            let there = moving.and_then(|it| it.devices.iter().find(|it| it.device == device));
            there.map_or(here, |there| &there.socket).into()
        };
        self.pool_ram = ram(instance, self.incoming.is_some());
        if let Some(mib) = self.pool_ram.as_ref().and_then(|ram| u32::try_from(ram.size_bytes >> 20).ok()) {
            self.memory_mib = mib;
        }
        self.name.clone_from(&instance.name);
        self.listens = instance.vmm_listens;
        // What is about to leave does not come to a new machine.
        let nics = instance.nics.iter().filter(|nic| !nic.leaving);
        self.networks = nics.map(|nic| network(nic, socket(&nic.device, &nic.socket))).collect();
        let disks = instance.disks.iter().filter(|disk| !disk.leaving);
        self.disks = disks.map(|it| disk(it, socket(&it.device, &it.socket))).collect();
    }
}

/// The memory in the pool that an instance has, or gets where it is moving, once it has a place.
fn ram(instance: &api::Instance, incoming: bool) -> Option<PoolRam> {
    let moving = instance.migration.as_ref().filter(|_| incoming);
    let ram = moving.map_or(&instance.ram, |moving| &moving.ram).as_ref()?;
    Some(PoolRam {
        pool: ram.pool.clone().into(),
        uuid: ram.pool_uuid.clone(),
        start_bytes: ram.start_bytes?,
        size_bytes: ram.size_bytes,
    })
}

/// Asks the controller whether the memory in the pool is still the instance's that it said was when it described `before`. That is
/// what [`crate::Vm::start_with`] wants to know; `incoming` says that the machine is to receive the guest of an instance that moves.
pub fn confirm_ram(client: &Client, before: &api::Instance, incoming: bool) -> Result<(), VmmError> {
    unchanged_ram(before, &client.instance(&before.name)?, incoming)
}

/// Refuses to start a VMM for an instance that another one uses, whoever has started that: what the two wrote would get mixed. One that
/// has just ended is given a moment to be gone. `incoming` says that the new one is to receive the guest of an instance that moves: then
/// its devices there are looked at.
pub fn refuse_a_second_vmm(client: &Client, instance: &str, incoming: bool) -> Result<(), VmmError> {
    refuse_after(GONE, client, instance, incoming)
}

fn refuse_after(patience: Duration, client: &Client, name: &str, incoming: bool) -> Result<(), VmmError> {
    let until = Instant::now() + patience;
    loop {
        let instance = client.instance(name)?;
        let Some(device) = used_device(&instance, incoming) else { return Ok(()) };
        if Instant::now() >= until {
            let reason = format!(
                "a VMM uses {device} of {name} already: end that first (vmm list, virsh list, podctl instances get {name})"
            );
            return Err(VmmError::Machine { reason });
        }
        thread::sleep(POLL);
    }
}

/// A device of which a VMM is known to use it. One that is about to leave is one as well.
fn used_device(instance: &api::Instance, incoming: bool) -> Option<&str> {
    if incoming {
        let there = &instance.migration.as_ref()?.devices;
        return there.iter().find(|it| it.connected).map(|it| it.device.as_str());
    }
    let nics = instance.nics.iter().map(|it| (&it.device, it.connected));
    let disks = instance.disks.iter().map(|it| (&it.device, it.connected));
    nics.chain(disks).find(|(_, connected)| *connected).map(|(device, _)| device.as_str())
}

fn unchanged_ram(before: &api::Instance, now: &api::Instance, incoming: bool) -> Result<(), VmmError> {
    let place =
        |of: &api::Instance| ram(of, incoming).map(|it| (of.id, it.uuid, it.start_bytes, it.size_bytes));
    if place(now) == place(before) {
        return Ok(());
    }
    let reason = format!(
        "the memory in the pool that {} had is not its own any more, and may be somebody else's: run it again",
        before.name
    );
    Err(VmmError::Spec { reason })
}

pub(crate) fn network(nic: &api::Nic, socket: PathBuf) -> Network {
    Network {
        device: nic.device.clone(),
        socket,
        slot: nic.slot,
        mac: nic.mac.clone(),
        mtu: nic.mtu,
        queue_pairs: nic.queue_pairs,
        guest_announces: true,
    }
}

pub(crate) fn disk(disk: &api::Disk, socket: PathBuf) -> Disk {
    Disk { device: disk.device.clone(), socket, slot: disk.slot, queues: disk.queues }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fake_controller::Controller;
    use crate::spec::tests::spec;

    #[test]
    fn a_machine_has_what_is_leased_and_stays() {
        let device = |name: &str, slot: u8, leaving: bool| {
            json!({
                "device": name, "socket": format!("/here/{name}"), "lease": 1, "generation": 1, "connected": false,
                "slot": slot, "leaving": leaving, "mac": "52:54:00:00:00:01", "mtu": 1500, "queue_pairs": 2,
                "nic": "h2/nic0", "volume": name, "serial": name, "size_bytes": 1, "block_bytes": 512, "queues": 3,
                "read_only": false, "ssd": "h2/ssd0",
            })
        };
        let moved =
            |name: &str| json!({"device": name, "socket": format!("/there/{name}"), "connected": false});
        let mut instance: api::Instance = serde_json::from_value(json!({
            "name": "web", "id": 1, "host": "h1", "ready": true,
            "nics": [device("net0", 2, false), device("net1", 3, true)],
            "disks": [device("vol0", 4, true), device("vol1", 5, false)],
        }))
        .unwrap();
        let sockets = |spec: &VmSpec| -> Vec<String> {
            let networks = spec.networks.iter().map(|it| &it.socket);
            let all = networks.chain(spec.disks.iter().map(|it| &it.socket));
            all.map(|socket| socket.display().to_string()).collect()
        };
        let mut spec = spec();
        spec.take_devices(&instance);
        assert_eq!(
            (spec.name.as_str(), sockets(&spec)),
            ("web", vec!["/here/net0".into(), "/here/vol1".into()])
        );
        assert_eq!((spec.networks[0].slot, spec.disks[0].slot, spec.disks[0].queues), (2, 5, 3));
        instance.migration = serde_json::from_value(json!({
            "to": "h2", "ready": true, "waiting_for": [], "devices": [moved("net0"), moved("vol1")],
        }))
        .unwrap();
        spec.take_devices(&instance);
        assert_eq!(sockets(&spec), ["/here/net0", "/here/vol1"], "the one that leaves stays as it is");
        spec.incoming = Some("tcp:0.0.0.0:4444".to_owned());
        spec.take_devices(&instance);
        assert_eq!(sockets(&spec), ["/there/net0", "/there/vol1"]);
    }

    /// An instance that moves, with a disk that VMMs use here, or there.
    fn used(here: bool, there: bool) -> (u16, String) {
        let disk = json!({
            "device": "vol0", "socket": "/s", "lease": 1, "generation": 1, "connected": here, "slot": 0, "volume": "vol0",
            "serial": "vol0", "size_bytes": 1, "block_bytes": 512, "queues": 1, "read_only": false, "ssd": "h2/ssd0",
        });
        let moving = json!({"to": "h2", "ready": true, "devices": [{"device": "vol0", "socket": "/t", "connected": there}]});
        let instance = json!({
            "name": "vm1", "id": 1, "host": "h1", "ready": true, "nics": [], "disks": [disk], "migration": moving,
        });
        (200, instance.to_string())
    }

    #[test]
    fn an_instance_that_a_vmm_uses_gets_no_second_one() {
        for (here, there, incoming) in [(true, false, false), (false, true, true)] {
            let controller = Controller::start(move |_| used(here, there));
            let refused = |incoming| refuse_after(Duration::ZERO, &controller.client(), "vm1", incoming);
            let error = refused(incoming).unwrap_err().to_string();
            assert!(
                error.contains("a VMM uses vol0 of vm1 already") && error.contains("virsh list"),
                "{error}"
            );
            // It has its devices on the other host.
            refused(!incoming).unwrap();
        }
        // One has just ended.
        let mut looks = 0;
        let controller = Controller::start(move |_| {
            looks += 1;
            used(looks < 3, false)
        });
        refuse_after(Duration::from_mins(1), &controller.client(), "vm1", false).unwrap();
        assert_eq!(controller.asked().len(), 3);
    }

    #[test]
    fn memory_is_only_whose_it_was() {
        let ram =
            |start: u64| json!({"pool": "/p", "pool_uuid": "u", "start_bytes": start, "size_bytes": 4096});
        let instance = |id: u32, ram: serde_json::Value| -> api::Instance {
            let text = json!({"name": "vm1", "id": id, "host": "h1", "ready": true, "nics": [], "disks": [], "ram": ram});
            serde_json::from_value(text).unwrap()
        };
        let moving = |to: serde_json::Value| api::Instance {
            migration: serde_json::from_value(
                json!({"to": "h2", "ready": true, "waiting_for": [], "devices": [], "ram": to}),
            )
            .unwrap(),
            ..instance(1, ram(0))
        };
        let before = instance(1, ram(0));
        unchanged_ram(&before, &before, false).unwrap();
        unchanged_ram(&before, &moving(ram(8192)), false).unwrap();
        unchanged_ram(&moving(ram(8192)), &moving(ram(8192)), true).unwrap();
        // The guest arrived.
        unchanged_ram(&moving(ram(8192)), &instance(1, ram(8192)), true).unwrap();
        let longer = json!({"pool": "/p", "pool_uuid": "u", "start_bytes": 0, "size_bytes": 8192});
        let nowhere = json!({"pool": "/p", "pool_uuid": "u", "size_bytes": 4096});
        for now in [instance(2, ram(0)), instance(1, ram(4096)), instance(1, longer), instance(1, nowhere)] {
            let error = unchanged_ram(&before, &now, false).unwrap_err().to_string();
            assert!(error.contains("vm1") && error.contains("not its own any more"), "{error}");
        }
        unchanged_ram(&moving(ram(8192)), &before, true).unwrap_err();
        unchanged_ram(&before, &instance(1, json!(null)), false).unwrap_err();
    }
}
