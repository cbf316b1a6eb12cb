//! Moves between two SSDs of one host.
//!
//! No two places of a volume lie on one host, since they would fail with it; but for as long as one of both is to go, it does not
//! matter. The engines tell the two apart by a number: the place that was there before is the first, and the one that comes the
//! second. When one of them is gone, the other one is the first again, in a new generation of the lease: what was sent before to
//! either of them is refused from then on, so that none of it lands in the other.
//!
//! Nor may it where a place comes to a host after another one has left it: both are the first. What was left is wiped before, of which
//! the backend says that it is done, so it knows by then; but SSDs without a table are not wiped.

use cxl_pool::HostId;
use pod_protocol::ids::{PlaceNumber, VolumeId};
use pod_protocol::protocol::Protocol;

use super::{DeviceId, Effect, Refusal, RefusalKind, Replica, State, Volume};

impl State {
    /// Whether a volume may get a place on an SSD, in place of an old one if it comes in place of one.
    pub(super) fn may_come_to(&self, volume: &Volume, ssd: &DeviceId, old: Option<&DeviceId>) -> bool {
        self.check_free_of(volume, ssd, old).is_ok()
    }

    /// Whether a volume may move to an SSD from where it lies, or from one of the places where it does.
    pub fn may_move_to(&self, volume: &Volume, ssd: &DeviceId) -> bool {
        volume.devices().any(|old| self.may_come_to(volume, ssd, Some(old)))
    }

    /// Refuses an SSD that a volume must not get another place on.
    pub(super) fn check_free_of(
        &self,
        volume: &Volume,
        ssd: &DeviceId,
        old: Option<&DeviceId>,
    ) -> Result<(), Refusal> {
        let invalid = |detail: String| Err(Refusal::new(RefusalKind::InvalidValue, detail));
        let name = &volume.name;
        if volume.all_places().any(|place| place.device == *ssd) {
            let ssd = self.device_name(ssd);
            return invalid(format!(
                "{name} lies on {ssd}, or what it left there has yet to be wiped: take another SSD"
            ));
        }
        let is_old = |place: &Replica| Some(&place.device) == old;
        let mut there = volume.places().filter(|place| place.device.host == ssd.host);
        let within = old.is_some_and(|old| old.host == ssd.host) && there.all(is_old);
        if within && !self.moves_within_hosts() {
            let detail = format!(
                "volumes move between SSDs of one host once all of the pod speaks {}: upgrade what podctl hosts and podctl \
                 controllers show with another version, or take another host's",
                Protocol::of_minor(Protocol::MOVES_WITHIN_HOSTS)
            );
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        if !within && volume.touches(ssd.host) {
            let host = self.host_name(ssd.host);
            return invalid(format!(
                "{name} lies on an SSD of {host} already, or what it left there has yet to be wiped: take another host's"
            ));
        }
        Ok(())
    }

    /// Of a volume's places on a host one is gone, which will be wiped or not. If there is another, it is the only one now; and nothing that
    /// was sent to the one that is gone may land in the next one there.
    pub(super) fn is_gone_from(&mut self, id: VolumeId, host: HostId, is_wiped: bool) {
        // Controllers of 1.0 do not mind.
        let lands_elsewhere = !is_wiped && self.decides_by_more();
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        match volume.places_mut().find(|place| place.device.host == host) {
            Some(other) => other.place = PlaceNumber::FIRST,
            None if lands_elsewhere => {}
            None => return,
        }
        let lease = self.lease_of_volume(id).map(|lease| lease.id);
        if let Some(lease) = lease.and_then(|lease| self.leases.get_mut(&lease)) {
            lease.generation = lease.generation.next();
        }
    }

    /// Ends moves of which not all of the pod knows. The place stays that has everything, the new one if both have.
    pub(super) fn end_moves_within_hosts(&mut self, effects: &mut Vec<Effect>) {
        if self.moves_within_hosts() {
            return;
        }
        let touched = self.work().flat_map(|work| &work.volumes).filter_map(|id| self.volumes.get(id));
        let ended = touched.filter_map(|volume| Some((volume.id, volume.to_go_from_shared_host()?)));
        let ended: Vec<(VolumeId, u32)> = ended.collect();
        for (volume, number) in ended {
            self.leave(volume, number, effects);
        }
    }
}

impl Volume {
    /// What the engines call its next place on a host.
    pub(super) fn next_place_on(&self, host: HostId) -> PlaceNumber {
        let is_there = self.places().any(|place| place.device.host == host);
        if is_there { PlaceNumber::SECOND } else { PlaceNumber::FIRST }
    }

    /// Of two replicas on one host the one that goes if only one may stay.
    fn to_go_from_shared_host(&self) -> Option<u32> {
        if self.deleted {
            return None;
        }
        let new = self.replicas.iter().find(|place| !place.place.is_first())?;
        let old =
            self.replicas.iter().find(|it| it.number != new.number && it.device.host == new.device.host)?;
        let has_all = |it: &Replica| it.number != old.number && !it.stale && !it.leaving;
        let new_stays = old.leaving && self.replicas.iter().any(has_all);
        Some(if new_stays { old.number } else { new.number })
    }
}

#[cfg(test)]
mod tests;
