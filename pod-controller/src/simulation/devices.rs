//! The NICs and SSDs of hosts, and what becomes of them.

use std::collections::BTreeMap;

use cxl_pool::{EndpointId, HostId, Role};
use pod_protocol::reports::{DeviceReport, Report};
use pod_state::DeviceId;

use super::happening::Happening;
use super::physical::{HEARD_WITHIN_US, Physical};

impl Physical {
    pub(crate) fn devices_of(&self, id: EndpointId) -> Vec<DeviceReport> {
        let of_role = |device: &&DeviceReport| {
            matches!(
                (id.role, device),
                (Role::NetBackend, DeviceReport::Nic { .. }) | (Role::BlkBackend, DeviceReport::Ssd { .. })
            )
        };
        let is_there = |device: &&DeviceReport| !self.lacking.contains(&(id.host, device.name().to_owned()));
        let devices = self.devices.get(&id.host).into_iter().flat_map(BTreeMap::values);
        devices.filter(of_role).filter(is_there).cloned().collect()
    }

    /// Who serves a device.
    pub(crate) fn backend_of(&self, host: HostId, device: &str) -> Option<EndpointId> {
        let role = match self.devices.get(&host)?.get(device)? {
            DeviceReport::Nic { .. } => Role::NetBackend,
            DeviceReport::Ssd { .. } => Role::BlkBackend,
        };
        Some(EndpointId::new(host, role))
    }

    /// Sets the link of a NIC, and lets its daemon say so.
    pub(crate) fn set_link(&mut self, host: HostId, nic: &str, now_up: bool) {
        let devices = self.devices.entry(host).or_default();
        if let Some(DeviceReport::Nic { up, .. }) = devices.get_mut(nic)
            && *up != now_up
        {
            *up = now_up;
            if now_up {
                self.down.remove(&(host, nic.to_owned()));
            } else {
                self.down.insert((host, nic.to_owned()), self.now_us);
            }
            let backend = EndpointId::new(host, Role::NetBackend);
            let reason = "its cable".to_owned();
            self.report(backend, Report::Link { device: nic.to_owned(), up: now_up, reason });
        }
    }

    /// Whether a NIC has had no link for so long that a controller that has been there since then must know.
    pub(crate) fn has_been_down(&self, id: &DeviceId, controller_since_us: u64) -> bool {
        let Some(down) = self.down.get(&(id.host, id.name.to_string())) else { return false };
        let daemon = &self.daemons[&id.net_backend()];
        let since = controller_since_us.max(*down).max(daemon.joined_us);
        daemon.is_running() && daemon.joined && self.now_us.saturating_sub(since) > HEARD_WITHIN_US
    }

    /// A link comes up again, a failed device is opened again, or one is back, which its backend sees when it is started anew.
    pub(super) fn mend(&mut self, host: HostId, name: &str) {
        let (device, backend) = ((host, name.to_owned()), self.backend_of(host, name));
        if self.failed.remove(&device) {
            let report = self.devices.get(&host).and_then(|devices| devices.get(name)).cloned();
            if let (Some(device), Some(backend)) = (report, backend) {
                self.report(backend, Report::DeviceBack { device });
            }
        }
        if self.lacking.remove(&device)
            && let Some(backend) = backend
        {
            self.kill(backend);
            self.schedule(0, Happening::Starts(backend));
        }
        self.set_link(host, name, true);
    }
}
