//! What the kind of an instance promises of the volumes that it leases, for as long as it does.

use std::collections::BTreeSet;

use pod_protocol::ids::VolumeId;
use pod_protocol::objects::Qos;

use super::change_volume::check_qos;
use super::{Lease, Refusal, State, Volume};

impl Volume {
    /// How much of its SSDs it may use, and is sure of, as long as whoever has leased it does.
    pub(super) fn qos_while_leased(&self) -> Qos {
        Qos { minimum_iops: self.qos.minimum_iops.max(self.promised_iops), ..self.qos }
    }
}

impl State {
    /// Volumes are sure of as much as instances of the kind are promised.
    pub(super) fn promise_iops(&mut self, volumes: &[String], iops: Option<u64>) -> Result<(), Refusal> {
        let Some(iops) = iops else { return Ok(()) };
        let ends = self.ends_promises();
        let ids: BTreeSet<VolumeId> =
            volumes.iter().filter_map(|name| self.volume_named(name)).map(|volume| volume.id).collect();
        for id in ids {
            let Some(volume) = self.volumes.get(&id) else { continue };
            if volume.qos.minimum_iops.is_some_and(|sure| sure >= iops) && !ends {
                continue;
            }
            let qos = Qos { minimum_iops: volume.qos.minimum_iops.max(Some(iops)), ..volume.qos };
            check_qos(&qos)?;
            self.check_rates(volume, &qos)?;
            match self.volumes.get_mut(&id) {
                // Also where its own share is enough: that may be made smaller while it is leased.
                Some(volume) if ends => volume.promised_iops = Some(iops),
                Some(volume) => volume.qos = qos,
                None => {}
            }
        }
        Ok(())
    }

    /// A lease has ended, and what was promised with it.
    pub(super) fn end_promise(&mut self, lease: &Lease) {
        let promised = |id: &VolumeId| self.volumes.get(id).is_some_and(|it| it.promised_iops.is_some());
        if let Some(id) = lease.volume().filter(promised)
            && let Some(volume) = self.volumes.get_mut(&id)
        {
            volume.promised_iops = None;
        }
    }

    /// Makes what is promised the volumes' own, as some of the pod know no other promises.
    pub(super) fn keep_promises(&mut self) {
        let promised = self.volumes.values().filter(|volume| volume.promised_iops.is_some());
        let promised: Vec<VolumeId> = promised.map(|volume| volume.id).collect();
        for id in promised {
            let Some(volume) = self.volumes.get_mut(&id) else { continue };
            (volume.qos, volume.promised_iops) = (volume.qos_while_leased(), None);
        }
    }
}
