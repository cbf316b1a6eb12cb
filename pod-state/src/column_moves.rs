//! Columns of striped volumes that move from one SSD to another while the volume is used.
//!
//! The place that a column moves to is *beside* the column: it is stale, and gets what the frontend writes and copies. The move
//! goes in steps:
//!
//! 1. The frontend says that the place has everything. From then on it acknowledges nothing without it.
//! 2. Both change places: the new one is the column, and the old one is beside it and leaving. The tables on the columns' SSDs say
//!    so before the frontend hears of it.
//! 3. The frontend has let go of the old place: nothing of it is in flight there. It is wiped, and then given on.
//!
//! Where the new place is lost before the second step, it is the one that leaves, and the column stays where it is. Nobody else
//! has what a column has, so a column that is lost before then is waited for, as without a move.

use cxl_pool::EndpointId;
use pod_api::EventKind;
use pod_protocol::ids::{LeaseId, VolumeId};
use pod_protocol::protocol::Protocol;

use super::protocol::not_yet;
use super::{DeviceId, Effect, Refusal, RefusalKind, Replica, State, Volume};

impl State {
    /// Has a column of a striped volume move.
    pub(super) fn move_column(
        &mut self,
        id: VolumeId,
        device: Option<&DeviceId>,
        old: Option<&DeviceId>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let Some(volume) = self.volumes.get(&id) else { return Ok(()) };
        let name = volume.name.clone();
        let Some(old) = old else {
            let detail =
                format!("{name} is striped: its columns can move (podctl volumes move), and none is added");
            return Err(Refusal::new(RefusalKind::InvalidValue, detail));
        };
        let number = self.place_of(volume, old)?.number;
        if !self.moves_columns() {
            return Err(not_yet("columns move", Protocol::MOVES_COLUMNS));
        }
        if let Some(going) = &volume.beside {
            let detail = format!(
                "a column of {name} is moving already: wait until {} has everything or is gone, or take the new place away again \
                 (podctl volumes remove-replica)",
                self.device_name(&going.device)
            );
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        self.check_instance_stays(volume)?;
        let (device, start_bytes) = self.place_another(volume, device, Some(old))?;
        let place = volume.next_place_on(device.host);
        if !self.is_up(&device) {
            let detail =
                format!("{} does not work now: choose another SSD, or none", self.device_name(&device));
            return Err(Refusal::new(RefusalKind::NoDevice, detail));
        }
        let message =
            format!("a column of it moves from {} to {}", self.device_name(old), self.device_name(&device));
        if let Some(volume) = self.volumes.get_mut(&id) {
            let beside = Replica::new(number, device, start_bytes);
            volume.beside = Some(Replica { stale: true, place, ..beside });
            volume.epoch += 1;
        }
        effects.push(Effect::event(EventKind::MigrationPrepared, name, message));
        Ok(())
    }

    /// Has a column stay where it is.
    pub(super) fn call_column_move_off(
        &mut self,
        id: VolumeId,
        device: &DeviceId,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let Some(volume) = self.volumes.get(&id) else { return Ok(()) };
        let place = self.place_of(volume, device)?;
        if place.leaving {
            return Ok(());
        }
        if !place.stale {
            let detail = format!(
                "nobody else has what {} has of {}: have it moved (podctl volumes move), or delete the volume",
                self.device_name(device),
                volume.name
            );
            return Err(Refusal::new(RefusalKind::InvalidValue, detail));
        }
        self.turn_away(id, "that was called off", effects);
        Ok(())
    }

    /// The striped volume of a lease that this frontend serves.
    pub(super) fn striped_at(&self, endpoint: EndpointId, lease: LeaseId) -> Option<VolumeId> {
        let lease = self.leases.get(&lease)?;
        let id = lease.volume().filter(|_| self.frontend_of(lease) == Some(endpoint))?;
        self.volumes.get(&id).is_some_and(|volume| volume.stripe_bytes.is_some()).then_some(id)
    }

    /// The place beside the column of this number has everything: it is the column now.
    pub(super) fn column_copied(
        &mut self,
        id: VolumeId,
        (number, epoch): (u32, u64),
        effects: &mut Vec<Effect>,
    ) {
        let Some(volume) = self.volumes.get_mut(&id).filter(|it| it.is_moving_to(number, epoch)) else {
            return;
        };
        let Some(column) = volume.replicas.iter_mut().find(|it| it.number == number) else { return };
        let Some(beside) = &mut volume.beside else { return };
        std::mem::swap(column, beside);
        column.stale = false;
        (beside.stale, beside.leaving) = (true, true);
        volume.epoch += 1;
        let (name, new, old) = (volume.name.clone(), column.device.clone(), beside.device.clone());
        effects.push(self.has_everything(name, &new, Some(&old)));
    }

    /// The column of this number cannot move to the place beside it.
    pub(super) fn column_not_copied(
        &mut self,
        id: VolumeId,
        (number, epoch): (u32, u64),
        reason: &str,
        effects: &mut Vec<Effect>,
    ) {
        if self.volumes.get(&id).is_some_and(|volume| volume.is_moving_to(number, epoch)) {
            self.turn_away(id, reason, effects);
        }
    }

    /// A frontend has let go of the place beside the column of this number.
    pub(super) fn column_left(
        &mut self,
        id: VolumeId,
        (number, epoch): (u32, u64),
        effects: &mut Vec<Effect>,
    ) {
        let is_it = |it: &Replica| it.number == number && it.leaving;
        let known = self.volumes.get(&id).filter(|volume| volume.epoch == epoch);
        if known.and_then(|volume| volume.beside.as_ref()).is_some_and(is_it) {
            self.leave_beside(id, effects);
        }
    }

    /// What a predecessor of a frontend said of a column that moves counts no more: what it had under way may have reached one
    /// place and not the other.
    pub(super) fn begin_column_move_anew(&mut self, lease: LeaseId) {
        let volume = self.leases.get(&lease).and_then(super::Lease::volume);
        let moves = |id: &VolumeId| self.volumes.get(id).is_some_and(|volume| volume.beside.is_some());
        if let Some(volume) = volume.filter(moves).and_then(|id| self.volumes.get_mut(&id)) {
            volume.epoch += 1;
        }
    }

    /// Ends moves that cannot go on, and those of whose other place nobody has to let go: the volume is not in use, or the backend
    /// is over.
    pub(super) fn end_column_moves(&mut self, effects: &mut Vec<Effect>) {
        let touched = self.work().flat_map(|work| &work.volumes).filter_map(|id| self.volumes.get(id));
        let moving: Vec<VolumeId> = touched.filter(|it| it.beside.is_some()).map(|it| it.id).collect();
        for id in moving {
            let place = |state: &Self| state.volumes.get(&id).and_then(|volume| volume.beside.clone());
            let Some(beside) = place(self) else { continue };
            let is_lost = self.is_lost(&beside.device);
            if !beside.leaving && (is_lost || !self.moves_columns()) {
                let reason = if is_lost { "it does not work" } else { "not all of the pod knows how" };
                self.turn_away(id, reason, effects);
            }
            let nobody_has_it = is_lost || !self.moves_columns() || self.lease_of_volume(id).is_none();
            if nobody_has_it && place(self).is_some_and(|beside| beside.leaving) {
                self.leave_beside(id, effects);
            }
        }
    }

    /// The column stays where it is, and the place that it would have moved to goes.
    fn turn_away(&mut self, id: VolumeId, reason: &str, effects: &mut Vec<Effect>) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        let Some(beside) = &mut volume.beside else { return };
        beside.leaving = true;
        volume.epoch += 1;
        let (name, device) = (volume.name.clone(), beside.device.clone());
        let message = format!("its column does not move to {}: {reason}", self.device_name(&device));
        effects.push(Effect::event(EventKind::MigrationAborted, name, message));
    }

    fn leave_beside(&mut self, id: VolumeId, effects: &mut Vec<Effect>) {
        if let Some(gone) = self.volumes.get_mut(&id).and_then(|volume| volume.beside.take()) {
            self.left(id, gone, effects);
        }
    }
}

impl Volume {
    /// Whether the column of this number is being copied to the place beside it, in this epoch.
    fn is_moving_to(&self, number: u32, epoch: u64) -> bool {
        let moves = |it: &Replica| it.number == number && !it.leaving;
        self.epoch == epoch && self.beside.as_ref().is_some_and(moves)
    }
}

#[cfg(test)]
mod tests;
