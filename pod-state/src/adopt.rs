use pod_api::EventKind;

use super::{Effect, Kind, LeaseKind, Options, Presence, Regions, State, UsedBefore};

impl State {
    /// Goes on with a new pool: what the pod is made of stays, and what lay in the old pool is made afresh as its
    /// daemons join.
    pub(super) fn adopt_pool(&mut self, options: &Options, effects: &mut Vec<Effect>) {
        let old = self.options.pool;
        self.options = options.clone();
        self.forget_newer(effects);
        // Numbers of regions and channels go on, so that nothing late is taken for something new.
        self.regions = Regions::after(&self.regions, options.data);
        self.channels.clear();
        self.forget_boards();
        self.forget_rams();
        for endpoint in self.endpoints.values_mut() {
            // Whoever it was had mapped the old pool. It cannot be granted anything in this one.
            endpoint.presence = Presence::Gone;
        }
        for device in self.devices.values_mut() {
            if let Kind::Nic { rx, .. } = &mut device.kind {
                *rx = None;
            }
        }
        let remembers = self.remembers_vmms();
        for lease in self.leases.values_mut() {
            lease.generation = lease.generation.next();
            let used = UsedBefore::of(lease.connected, lease.running, lease.used_before);
            lease.used_before = used.filter(|_| remembers);
            lease.connected = false;
            lease.area = None;
            if let LeaseKind::Disk { clean_for, .. } = &mut lease.kind {
                clean_for.clear();
            }
        }
        self.look_again();
        let message = format!("it takes the place of {old}; every daemon has to join again");
        effects.push(Effect::event(EventKind::PoolAdopted, options.pool.to_string(), message));
    }
}
