//! Which NIC takes over from a lease's, and whether that is sure to carry what the lease reserves.

use cxl_pool::HostId;

use super::loads::NicLoad;
use super::{DeviceId, Lease, LeaseKind, Loads, State};

/// What a backup is wanted for.
#[derive(Clone, Copy, Debug)]
pub(super) struct StandbyWish<'a> {
    /// What it has to carry, without the Ethernet header.
    pub(super) mtu: u16,
    /// What the guest was offered.
    pub(super) features: u64,
    /// What is reserved, in Mbit/s.
    pub(super) reserved_mbps: u64,
    /// The lease that moves, which counts where it is now.
    pub(super) of: Option<&'a Lease>,
}

/// What speaks against a backup, the worst first: it fails with the NIC that it is to take over from, and it does not carry what would come.
type Faults = (bool, bool);

impl State {
    /// The backup of a lease once it is on this NIC, and whether that is proven: sure to carry what the lease reserves when the host of
    /// that NIC fails.
    pub(super) fn standby_after(
        &self,
        loads: &Loads,
        lease: &Lease,
        to: &DeviceId,
    ) -> (Option<DeviceId>, bool) {
        let host = self.instances.get(&lease.instance).map(|instance| instance.host);
        let known = host.map_or_else(Vec::new, |host| self.backends_known_to(host));
        loads.standby_after(lease, to, &known)
    }

    /// Whether a lease that moves to this NIC in order is as sure of what it reserves as one that is new there.
    pub(super) fn keeps_failover(&self, loads: &Loads, lease: &Lease, to: &DeviceId) -> bool {
        let reserves = matches!(&lease.kind, LeaseKind::Nic { reserved_mbps, .. } if *reserved_mbps > 0);
        let is_asked_for = reserves && self.options.placement.prove_failover && self.proves_moves();
        !is_asked_for || self.standby_after(loads, lease, to).1
    }
}

impl Loads {
    /// The backup NIC for a lease: another one than the active, marked as backup; on another host if there is one, since
    /// hosts fail too; one that could carry what the lease reserves; one that can do what the guest was offered, since another
    /// one's backend has to do that in software; the one that least leans on; among equals one of the known hosts. And whether that
    /// is certain to carry the lease when the host of the active one fails.
    pub(super) fn place_standby(
        &self,
        (active, known): (&DeviceId, &[HostId]),
        wish: &StandbyWish<'_>,
    ) -> Option<(DeviceId, bool)> {
        let faults = |id: &DeviceId, nic: &NicLoad| {
            let (own_host, no_spare) = self.faults((id, nic), active, wish)?;
            Some((own_host, no_spare, nic.features & wish.features != wish.features))
        };
        let mut best: Option<((bool, bool, bool), &DeviceId)> = None;
        for (id, nic) in self.backups() {
            let Some(rank) = faults(id, nic) else { continue };
            if rank == (false, false, false) {
                let mut alike = self.backups_like(nic, known).filter(|(id, it)| faults(id, it) == Some(rank));
                best = Some((rank, alike.next().map_or(id, |(id, _)| id)));
                break;
            }
            if best.as_ref().is_none_or(|(known, _)| rank < *known) {
                best = Some((rank, id));
            }
        }
        best.map(|((own_host, no_spare, _), id)| (id.clone(), !own_host && !no_spare))
    }

    /// What speaks against a NIC as the backup of this one; nothing is said of one that cannot be it at all.
    fn faults(
        &self,
        (id, nic): (&DeviceId, &NicLoad),
        active: &DeviceId,
        wish: &StandbyWish<'_>,
    ) -> Option<Faults> {
        if id == active || nic.lag.is_some() && self.are_rails(id, active) || nic.mtu < wish.mtu {
            return None;
        }
        // What it leaves, or would have brought, it does not bring once more.
        let counts = |lease: &Lease| {
            let leaves = lease.active_nic() == Some(id);
            let brings = lease.standby_nic() == Some(id)
                && lease.active_nic().is_some_and(|before| before.host == active.host);
            leaves || brings
        };
        let counted = if wish.of.is_some_and(counts) { wish.reserved_mbps } else { 0 };
        Some((id.host == active.host, !nic.has_spare(wish.reserved_mbps, active.host, counted)))
    }

    /// The one that it has stays, or where the lease moves to that the one that it leaves takes its place, unless another one is better.
    fn standby_after(&self, lease: &Lease, to: &DeviceId, known: &[HostId]) -> (Option<DeviceId>, bool) {
        let LeaseKind::Nic { active, standby, mtu, features, reserved_mbps, .. } = &lease.kind else {
            return (None, false);
        };
        let wish =
            StandbyWish { mtu: *mtu, features: *features, reserved_mbps: *reserved_mbps, of: Some(lease) };
        let faults = |id: &DeviceId| self.faults((id, self.get(id).filter(|nic| nic.usable)?), to, &wish);
        let kept = standby.as_ref().map(|standby| if standby == to { active } else { standby });
        let of_kept = kept.and_then(faults);
        if of_kept == Some((false, false)) {
            return (kept.cloned(), true);
        }
        match self.place_standby((to, known), &wish) {
            // One that does not work now is no better than any that does.
            Some((found, proven)) if of_kept.is_none_or(|kept| faults(&found) < Some(kept)) => {
                (Some(found), proven)
            }
            _ => (kept.cloned(), false),
        }
    }
}
