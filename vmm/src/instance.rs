//! From an instance, as the controller describes it, to a virtual machine.

use pod_controller::api;

use crate::{Disk, Network, VmSpec};

impl VmSpec {
    /// Gives the machine the name and the devices that `instance` has leased.
    pub fn take_devices(&mut self, instance: &api::Instance) {
        self.name.clone_from(&instance.name);
        self.networks = instance
            .nics
            .iter()
            .map(|nic| Network {
                device: nic.device.clone(),
                socket: nic.socket.clone().into(),
                mac: nic.mac.clone(),
                mtu: nic.mtu,
                queue_pairs: nic.queue_pairs,
            })
            .collect();
        self.disks = instance
            .disks
            .iter()
            .map(|disk| Disk {
                device: disk.device.clone(),
                socket: disk.socket.clone().into(),
                queues: disk.queues,
            })
            .collect();
    }
}
