use std::time::Instant;

use pod_api::EventKind;
use pod_protocol::ids::LeaseId;
use pod_state::{Command, DeviceId, Effect, VolumeMove};

use super::conductor::Conductor;
use super::inbox::{Inbox, Waiting};
use super::world::World;
use crate::balance::Verdict;

impl<W: World> Conductor<W> {
    /// What is due of NICs and SSDs that carry too much.
    pub(super) fn due_load(&mut self, now: Instant, inbox: &mut Inbox<W>) {
        if self.world.balance_policy().is_some_and(|policy| self.load.obey(policy)) {
            self.world.load(self.load.picture(now));
        }
        if self.load.next().is_none_or(|at| at > now) {
            return;
        }
        for verdict in self.load.due(&self.state, now) {
            match verdict {
                Verdict::Tell(device, message) => {
                    inbox.tell(EventKind::Overloaded, self.state.device_name(&device), message);
                }
                Verdict::Relieve { nics, measured, resting, relief } => {
                    inbox.add(Command::Relieve { nics, measured, resting, relief });
                }
                Verdict::MoveVolume(it) => self.move_volume(it, inbox),
            }
        }
        self.world.load(self.load.picture(now));
    }

    /// Where leases are that a command may move, for the load's sake, before it is carried out.
    pub(super) fn may_leave(&self, command: &Command) -> Vec<(LeaseId, DeviceId)> {
        match command {
            Command::Relieve { nics, measured, .. } => Verdict::may_move(&self.state, nics, measured),
            _ => Vec::new(),
        }
    }

    /// Notes what moves for the load's sake, once that was decided, or refused.
    pub(super) fn note_balanced(
        &mut self,
        (command, waiting): (&Command, &Waiting<W>),
        were: &[(LeaseId, DeviceId)],
        refused: bool,
        now: Instant,
    ) {
        self.load.note_relief(were, &self.state, now);
        // Of volumes only those moves are told by whoever had them done.
        let Waiting::Events { .. } = waiting else { return };
        let Command::AddReplica { name, replaces: Some(from), .. } = command else { return };
        let Some(volume) = self.state.volume_named(name).map(|volume| volume.id) else { return };
        if refused {
            self.load.note_volume_refusal(volume, now);
        } else {
            self.load.note_volume_move(volume, from, now);
        }
    }

    /// Has a volume move, and tells that it does, or why not.
    fn move_volume(&self, VolumeMove { volume, from, to, .. }: VolumeMove, inbox: &mut Inbox<W>) {
        let Some(name) = self.state.volumes.get(&volume).map(|volume| volume.name.clone()) else { return };
        let (left, reached) = (self.state.device_name(&from), self.state.device_name(&to));
        let instance = self.state.instance_of_volume(volume).unwrap_or(&name);
        let message = format!("{name} moves from {left} to {reached}");
        let moved = Effect::Event { kind: EventKind::Balanced, subject: instance.to_owned(), message };
        let stays = (EventKind::Overloaded, left, format!("{name} does not move to {reached}"));
        let command = Command::AddReplica { name, device: Some(to), replaces: Some(from) };
        inbox.add_told(command, moved, stays);
    }
}

#[cfg(test)]
mod tests;
