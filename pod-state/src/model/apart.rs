//! Volumes that have to lie apart, counted anew, by nothing that placement uses.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::HostId;
use pod_protocol::ids::VolumeId;

use crate::State;

/// What lay where its group does not want it, and which groups volumes were in, when it was looked last.
#[derive(Debug, Default)]
pub struct Apart {
    contrary: BTreeSet<(VolumeId, VolumeId, HostId)>,
    groups: BTreeMap<VolumeId, Option<String>>,
}

impl Apart {
    /// Volumes of a group share a host only if they did when one of them was put into it, whatever has become of them since.
    pub fn check(&mut self, state: &State) -> Result<(), String> {
        let there = || state.volumes.values().filter(|volume| !volume.deleted);
        let mut owners: BTreeMap<(&str, HostId), BTreeSet<VolumeId>> = BTreeMap::new();
        for volume in there() {
            let Some(group) = &volume.groups.apart else { continue };
            for place in volume.replicas.iter().chain(&volume.beside) {
                owners.entry((group, place.device.host)).or_default().insert(volume.id);
            }
        }
        let mut contrary = BTreeSet::new();
        for ((_, host), owners) in &owners {
            for one in owners {
                contrary.extend(owners.range(..one).map(|other| (*other, *one, *host)));
            }
        }
        let groups: BTreeMap<_, _> = there().map(|it| (it.id, it.groups.apart.clone())).collect();
        let was_put = |id: &VolumeId| self.groups.get(id).is_some_and(|before| before != &groups[id]);
        let wrong =
            contrary.difference(&self.contrary).find(|(one, other, _)| !was_put(one) && !was_put(other));
        if let Some((one, other, host)) = wrong {
            let name = |id| state.volumes.get(id).map_or("", |volume| &volume.name);
            let host = state.host_name(*host);
            return Err(format!(
                "{} has come to lie on {host}, where {} of its group does",
                name(other),
                name(one)
            ));
        }
        (self.contrary, self.groups) = (contrary, groups);
        Ok(())
    }
}
