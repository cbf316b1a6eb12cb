//! Link aggregation groups: NICs of several hosts whose ports the switch treats as one.
//!
//! The switch sends what is for an instance over any port of the group, and takes its address from each. So a lease on one NIC of
//! a group is on all of them: each has it registered, with the same generation, and its frontend spreads flows over those that
//! work. When one dies nothing has to be moved, and nothing has to be learnt by the switch. Among them one is the lease's
//! active NIC, as of any other lease.

use pod_protocol::objects::{RAILS_MAX, RailObject, RailState};

use cxl_pool::EndpointId;

use super::{DeviceId, Health, Kind, Lease, LeaseKind, Presence, State};

impl State {
    /// The NICs of a NIC's group, itself among them, in an order that stays: one of each host at most. Of a NIC without a
    /// group, itself.
    pub fn rails_of(&self, nic: &DeviceId) -> Vec<DeviceId> {
        let Some(group) = self.lag_of(nic) else { return vec![nic.clone()] };
        let mut rails: Vec<DeviceId> = Vec::new();
        for (id, device) in &self.devices {
            let same = id.host != nic.host
                && device.health != Health::Absent
                && matches!(&device.kind, Kind::Nic { lag: Some(lag), .. } if lag == group);
            if id == nic || same && rails.last().is_none_or(|last| last.host != id.host) {
                rails.push(id.clone());
            }
        }
        // Whatever is left out, the NIC itself is not.
        while rails.len() > RAILS_MAX {
            let last = rails.iter().rposition(|id| id != nic);
            let Some(last) = last else { break };
            rails.remove(last);
        }
        rails
    }

    fn lag_of(&self, nic: &DeviceId) -> Option<&str> {
        // Most pods have none.
        let has_none = self.found().is_some_and(|found| found.groups.is_empty());
        if has_none && self.devices.is_followed() {
            return None;
        }
        match &self.devices.get(nic)?.kind {
            Kind::Nic { lag, .. } => lag.as_deref(),
            Kind::Ssd { .. } => None,
        }
    }

    /// The other NICs of its group.
    pub fn other_rails(&self, nic: &DeviceId) -> Vec<DeviceId> {
        if self.lag_of(nic).is_none() {
            return Vec::new();
        }
        let mut rails = self.rails_of(nic);
        rails.retain(|id| id != nic);
        rails
    }

    /// Whether two NICs are in one group, or the same.
    pub fn are_rails(&self, one: &DeviceId, other: &DeviceId) -> bool {
        one == other || self.lag_of(one).is_some() && self.other_rails(one).contains(other)
    }

    /// Whether a lease uses several NICs at the same time.
    pub fn has_rails(&self, lease: &Lease) -> bool {
        lease.active_nic().is_some_and(|active| !self.other_rails(active).is_empty())
    }

    /// Whether something carries what a lease sends: its NIC works, or another one that it uses at the same time. A NIC whose owner is
    /// silent carries nothing, although it is not known to be lost.
    pub fn has_link(&self, lease: &Lease) -> bool {
        lease.active_nic().is_some_and(|active| self.rails_of(active).iter().any(|rail| self.is_up(rail)))
    }

    /// What the frontend of a lease is told of the NICs that it uses at the same time; nothing if there is only one.
    pub(super) fn rail_objects(&self, lease: &Lease, frontend: EndpointId) -> Vec<RailObject> {
        let LeaseKind::Nic { active, mtu, .. } = &lease.kind else { return Vec::new() };
        let rails = self.rails_of(active);
        if rails.len() < 2 {
            return Vec::new();
        }
        let fits = |id: &DeviceId| self.devices.get(id).is_some_and(|it| it.can_carry(*mtu));
        let good = |id: &DeviceId| fits(id) && self.is_usable(id);
        let any_good = rails.iter().any(good);
        let object = |id: &DeviceId| {
            let over = |endpoint: &super::Endpoint| endpoint.presence.is_over();
            let state = match self.endpoints.get(&id.net_backend()) {
                None => RailState::Gone,
                Some(endpoint) if over(endpoint) => RailState::Gone,
                // One that is not trusted, or is to be empty, is better than none. A silent one may still be at work.
                Some(_) if good(id) || fits(id) && !any_good && self.is_up(id) => RailState::Up,
                Some(endpoint) if endpoint.presence != Presence::Joined && fits(id) && !self.is_lost(id) => {
                    RailState::Up
                }
                Some(_) => RailState::Down,
            };
            Some(RailObject { route: self.route(lease, frontend, id.net_backend())?, state })
        };
        rails.iter().filter_map(object).collect()
    }

    /// Makes another NIC of its group the active one of each lease whose active one does not work, or is to be empty. Its
    /// packets go over the others already.
    pub(super) fn change_rails(&mut self) {
        let changes: Vec<_> = self
            .touched()
            .filter_map(|lease| {
                let active = lease.active_nic()?;
                let others = self.other_rails(active);
                if others.is_empty() {
                    return None;
                }
                let lost = self.is_lost(active);
                if !lost && !self.is_drained(active) {
                    return None;
                }
                let good = others.iter().find(|id| self.is_usable(id));
                let found = good.or_else(|| others.iter().find(|id| lost && self.is_up(id)))?;
                Some((lease.id, found.clone()))
            })
            .collect();
        for (id, found) in changes {
            let lease = self.leases.get_mut(&id).map(|lease| &mut lease.kind);
            let Some(LeaseKind::Nic { active, standby, draining, .. }) = lease else { continue };
            // Its backup and the NIC that it leaves may have come into the group since.
            standby.take_if(|standby| *standby == found);
            draining.take_if(|draining| draining.nic == found);
            *active = found;
        }
    }

    /// Whether a lease goes on without a NIC: another one of its group works, or its backup does.
    pub(super) fn goes_on_without(&self, lease: &Lease, nic: &DeviceId) -> bool {
        let Some(active) = lease.active_nic() else { return false };
        // One that is not trusted is better than none.
        let other = self.rails_of(active).iter().any(|id| id != nic && self.is_up(id));
        other || lease.standby_nic().is_some_and(|standby| standby != nic && self.is_up(standby))
    }
}
