use std::collections::BTreeSet;

use super::BalancePolicy;
use super::load::Load;
use crate::state::{DeviceId, DiskRates, Measured, Move, State, VolumeMove};

/// What is known of the load, for others to see.
#[derive(Clone, Debug)]
pub struct LoadPicture {
    /// What is done about it.
    pub policy: BalancePolicy,
    /// What passes through NICs.
    pub measured: Measured,
    /// What SSDs do.
    pub disks: DiskRates,
    /// NICs that have carried too much for a while.
    pub overloaded: BTreeSet<DeviceId>,
    /// SSDs that have done too much for a while.
    pub overloaded_ssds: BTreeSet<DeviceId>,
}

impl LoadPicture {
    /// Which leases would move off NICs that carry too much now, were nothing waited for.
    pub fn plan(&self, state: &State) -> Vec<Move> {
        let relief = self.policy.nics.relief;
        let now = self.measured.nics.iter();
        let now = now.filter(|(nic, mbps)| Load::of_nic(state, nic, **mbps, relief) == Some(Load::High));
        let nics = now.map(|(nic, _)| nic).chain(&self.overloaded).cloned().collect();
        state.plan_relief(&nics, &self.measured, &BTreeSet::new(), relief)
    }

    /// Which volumes would move off SSDs that do too much now, were nothing waited for but what is being copied.
    pub fn plan_volumes(&self, state: &State) -> Vec<VolumeMove> {
        let limits = self.policy.volume_relief();
        let now = self.disks.ssds.iter();
        let now =
            now.filter(|(ssd, does)| Load::of_ssd(state, ssd, **does, limits.relief) == Some(Load::High));
        let ssds = now.map(|(ssd, _)| ssd).chain(&self.overloaded_ssds).cloned().collect();
        state.plan_volume_moves(&ssds, &self.disks, &BTreeSet::new(), limits)
    }
}
