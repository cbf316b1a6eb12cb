//! From an instance, as the controller describes it, to a virtual machine.

use std::path::PathBuf;

use pod_api as api;

use crate::{Disk, Network, PoolRam, VmSpec};

impl VmSpec {
    /// Gives the machine the name, the devices and the memory in the pool that `instance` has leased: those on the host to which
    /// it moves, if this machine is to receive its guest. Memory that has no place yet is left out.
    pub fn take_devices(&mut self, instance: &api::Instance) {
        let moving = instance.migration.as_ref().filter(|_| self.incoming.is_some());
        let socket = |device: &str, here: &str| {
            let there = moving.and_then(|it| it.devices.iter().find(|it| it.device == device));
            there.map_or(here, |there| &there.socket).into()
        };
        let ram = moving.map_or(&instance.ram, |moving| &moving.ram).as_ref();
        self.pool_ram = ram.and_then(|ram| {
            Some(PoolRam {
                pool: ram.pool.clone().into(),
                uuid: ram.pool_uuid.clone(),
                start_bytes: ram.start_bytes?,
                size_bytes: ram.size_bytes,
            })
        });
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
