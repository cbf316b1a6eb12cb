//! Which leases are given a backup, and when.
//!
//! A guest whose NIC has failed waits until its frontend is told of the other one, and for nothing else. So a failover leaves the
//! backups for the next command, whichever that is ([`State::lacks_backups`]): there are more leases to find one for than there are that
//! move, since others had the NIC that failed as their backup, and each may need channels of its own to the new one.

use std::collections::BTreeSet;

use pod_protocol::ids::LeaseId;
use pod_protocol::protocol::Protocol;

use super::standby::StandbyWish;
use super::{Command, DeviceId, Lease, LeaseKind, State};

/// Whom a backup is sought for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InNeed {
    /// Those that cannot do without: their own NIC does not work.
    Stranded,
    /// Whoever has none, but for those that wait for the next command.
    All,
}

impl Command {
    /// Whether leases may have to move because of it.
    pub const fn tells_of_failure(&self) -> bool {
        matches!(
            self,
            Self::Link { up: false, .. }
                | Self::DeviceFailed { .. }
                | Self::HoldLink { .. }
                | Self::Silent { .. }
                | Self::Gone { .. }
                | Self::FenceExpired { .. }
        )
    }
}

impl State {
    /// Whether a failover has left leases without a backup that works. The next command gives them one, be it one that does
    /// [nothing](Command::nothing) else.
    pub fn lacks_backups(&self) -> bool {
        !self.unbacked.is_empty()
    }

    /// Whether backups are chosen with the command after a failover. Replicas of 1.0 choose them with the failover, and all have to decide
    /// alike.
    pub(super) fn defers_backups(&self) -> bool {
        self.options.protocol_minor >= Protocol::DEFERS_BACKUPS
    }

    /// Has whatever the failover before left without a backup be looked at now.
    pub(super) fn touch_unbacked(&mut self) {
        let unbacked = std::mem::take(&mut self.unbacked);
        if unbacked.is_empty() {
            return;
        }
        self.follow();
        let Some(mut found) = self.known.0.take() else { return };
        // Some may be deleted by now.
        for id in unbacked.into_iter().filter(|id| self.leases.contains_key(id)) {
            found.work.lease(self, id);
        }
        self.known.0 = Some(found);
    }

    /// Leaves whoever has come to need a backup for the next command. Who needed one before has had to wait already, or found none.
    pub(super) fn defer_backups(&mut self) {
        let waited = |id: &LeaseId| self.found().is_some_and(|found| found.bare.contains(id));
        let new: Vec<LeaseId> = self.in_need(InNeed::All).into_iter().filter(|id| !waited(id)).collect();
        self.unbacked.extend(new);
    }

    /// Looks for a backup where there is none that works. One that fails and has no better stays: it may come back. A lease
    /// whose own NIC does not work either takes what there is, an ordinary NIC too.
    pub(super) fn choose_backups(&mut self, whose: InNeed) {
        for id in self.in_need(whose) {
            let Some(lease) = self.leases.get(&id) else { continue };
            let LeaseKind::Nic { active, mtu, features, reserved_mbps, .. } = &lease.kind else { continue };
            let loads = self.loads_now();
            let host = self.instances.get(&lease.instance).map(|instance| instance.host);
            let known = host.map_or_else(Vec::new, |host| self.backends_known_to(host));
            let wish =
                StandbyWish { mtu: *mtu, features: *features, reserved_mbps: *reserved_mbps, of: None };
            let found = loads.place_standby((active, &known), &wish).map(|it| it.0);
            let any = || if self.is_up(active) { None } else { self.place_move(&loads, lease, false) };
            let Some(found) = found.or_else(any) else { continue };
            if let Some(LeaseKind::Nic { standby, .. }) = self.leases.get_mut(&id).map(|it| &mut it.kind) {
                *standby = Some(found);
            }
            // It leans on that one now.
            self.follow();
        }
    }

    fn in_need(&self, whose: InNeed) -> BTreeSet<LeaseId> {
        // Who found none before finds one only among other NICs, or one on which too many leaned.
        let waiting = self.found().filter(|found| found.work.has_other_nics);
        let waiting = waiting.into_iter().flat_map(|it| &it.bare).filter_map(|id| self.leases.get(id));
        let is_asked_for = |lease: &&Lease| match whose {
            InNeed::Stranded => self.is_degraded(lease),
            InNeed::All => !self.unbacked.contains(&lease.id) || self.is_degraded(lease),
        };
        let in_need = self.touched().chain(waiting).filter(is_asked_for);
        in_need.filter(|lease| self.needs_standby(lease)).map(|lease| lease.id).collect()
    }

    /// Whether a lease has no backup that would work.
    pub(super) fn needs_standby(&self, lease: &Lease) -> bool {
        let LeaseKind::Nic { active, standby, mtu, .. } = &lease.kind else { return false };
        let works = |id: &DeviceId| {
            let device = self.devices.get(id).filter(|device| device.held.is_none());
            let presence = device.and_then(|device| self.presence_of_owner(id, device));
            let Some((device, presence)) = device.zip(presence) else { return false };
            let (is_up, is_lost) = (device.is_up(presence), device.is_lost(presence));
            // A NIC of its own group does not take over from the others: it fails with them, or works with them.
            let takes_over = is_up || !is_lost && self.is_up(active);
            let carries = device.can_carry(*mtu) || !self.decides_by_more();
            takes_over && carries && !self.is_drained(id) && !self.are_rails(active, id)
        };
        !standby.as_ref().is_some_and(works)
    }
}
