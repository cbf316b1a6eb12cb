use cxl_pool::{EndpointId, HostId, Role};
use pod_api::EventKind;

use super::{DeviceId, Effect, LeaseKind, Presence, Refusal, RefusalKind, State};

impl State {
    /// Believes that nothing of a host is left in any cache or device: frees what waits for it.
    pub(super) fn reset_host(&mut self, name: &str, effects: &mut Vec<Effect>) -> Result<(), Refusal> {
        let host = self.host_named(name).ok_or_else(|| Refusal::not_found("host", name))?;
        self.check_not_alive(host)?;
        for id in Role::ALL.map(|role| EndpointId::new(host, role)) {
            // Should it be merely frozen after all, it must not go on.
            if self.endpoints.get(&id).is_some_and(|endpoint| !endpoint.presence.is_over())
                && let Some(endpoint) = self.endpoints.get_mut(&id)
            {
                endpoint.presence = Presence::Fenced;
                effects.push(Effect::Fence { endpoint: id, incarnation: endpoint.incarnation });
            }
        }
        let freed = self.regions.forget(host);
        self.everyone_is_stale();
        let message = format!("it is known to hold nothing any more; {freed} regions waited for it alone");
        effects.push(Effect::event(EventKind::HostReset, name, message));
        Ok(())
    }

    /// Forgets a host that nothing depends on.
    pub(super) fn delete_host(&mut self, name: &str, effects: &mut Vec<Effect>) -> Result<(), Refusal> {
        let host = self.host_named(name).ok_or_else(|| Refusal::not_found("host", name))?;
        self.check_not_alive(host)?;
        let leased =
            |detail: String| Err(Refusal::new(RefusalKind::Leased, format!("the host {name} {detail}")));
        if let Some(instance) =
            self.instances.values().find(|it| it.host == host || it.incoming == Some(host))
        {
            return leased(format!("runs the instance {}, or will: delete that first", instance.name));
        }
        if let Some(volume) =
            self.volumes.values().find(|it| !it.deleted && it.devices().any(|ssd| ssd.host == host))
        {
            return leased(format!("has the volume {} on its SSD: delete that first", volume.name));
        }
        let on_its_nic = self.leases.values().find(|it| it.active_nic().is_some_and(|nic| nic.host == host));
        if let Some(instance) = on_its_nic.and_then(|lease| self.instances.get(&lease.instance)) {
            return leased(format!("has the NIC of the instance {}: delete that first", instance.name));
        }
        if self.endpoints.keys().any(|id| id.host == host && !self.is_let_go(host)) {
            return Err(Refusal::new(
                RefusalKind::NotReset,
                format!(
                    "the host {name} may still hold regions of the pool in its caches: reset it or take it away, then \
                     say so with `podctl hosts reset {name}`"
                ),
            ));
        }
        for lease in self.leases.values_mut() {
            if let LeaseKind::Nic { standby, home, draining, .. } = &mut lease.kind {
                *home = home.take().filter(|nic| nic.host != host);
                *draining = draining.take().filter(|it| it.nic.host != host);
                if standby.as_ref().is_some_and(|nic| nic.host == host) {
                    *standby = None;
                }
            }
        }
        let devices: Vec<DeviceId> = self.devices.keys().filter(|id| id.host == host).cloned().collect();
        for device in devices {
            self.forget_device(&device);
        }
        // Deleted ones, which nobody will wipe.
        for volume in self.volumes.values_mut() {
            volume.replicas.retain(|replica| replica.device.host != host);
            volume.former.retain(|replica| replica.device.host != host);
        }
        self.volumes.retain(|_, volume| !volume.replicas.is_empty() || !volume.former.is_empty());
        self.endpoints.retain(|id, _| id.host != host);
        self.hosts.remove(&host);
        self.drained_hosts.remove(&host);
        self.host_labels.remove(&host);
        self.look_again();
        effects.push(Effect::event(EventKind::HostDeleted, name, "it is not part of the pod any more"));
        Ok(())
    }

    fn is_let_go(&self, host: HostId) -> bool {
        self.regions.iter().all(|region| region.holders.iter().all(|holder| holder.host != host))
    }

    fn check_not_alive(&self, host: HostId) -> Result<(), Refusal> {
        let alive = self.endpoints.iter().find(|(id, it)| id.host == host && it.presence == Presence::Joined);
        match alive {
            None => Ok(()),
            Some((id, _)) => Err(Refusal::new(
                RefusalKind::HostAlive,
                format!("{} beats: stop the daemons of that host first", self.endpoint_name(*id)),
            )),
        }
    }
}
