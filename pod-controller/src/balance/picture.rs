use std::collections::BTreeSet;

use pod_state::{DeviceId, DiskRates, Measured, Move, State, VolumeMove};

use super::BalancePolicy;
use super::load::Load;
use super::recent::Recent;

/// What is known of the load, for others to see.
#[derive(Clone, Debug)]
pub struct LoadPicture {
    /// What is done about it.
    pub policy: BalancePolicy,
    /// NICs that have carried too much for a while.
    pub overloaded: BTreeSet<DeviceId>,
    /// SSDs that have done too much for a while.
    pub overloaded_ssds: BTreeSet<DeviceId>,
    pub(super) recent: Recent,
}

impl LoadPicture {
    /// What passes through NICs.
    pub fn measured(&self) -> Measured {
        self.recent.measured()
    }

    /// What SSDs do.
    pub fn disks(&self) -> DiskRates {
        self.recent.disks()
    }

    /// Which leases would move off NICs that carry too much, were nothing waited for.
    pub fn plan(&self, state: &State, measured: &Measured) -> Vec<Move> {
        let relief = self.policy.nics.relief;
        let now = measured.nics.iter();
        let now = now.filter(|(nic, mbps)| Load::of_nic(state, nic, **mbps, relief) == Some(Load::High));
        let nics = now.map(|(nic, _)| nic).chain(&self.overloaded).cloned().collect();
        state.plan_relief(&nics, measured, &BTreeSet::new(), relief)
    }

    /// Which volumes would move off SSDs that do too much, were nothing waited for but what is being copied.
    pub fn plan_volumes(&self, state: &State, disks: &DiskRates) -> Vec<VolumeMove> {
        let limits = self.policy.volume_relief();
        let now = disks.ssds.iter();
        let now =
            now.filter(|(ssd, does)| Load::of_ssd(state, ssd, **does, limits.relief) == Some(Load::High));
        let ssds = now.map(|(ssd, _)| ssd).chain(&self.overloaded_ssds).cloned().collect();
        state.plan_volume_moves(&ssds, disks, &BTreeSet::new(), limits)
    }
}
