use std::time::Instant;

use pod_api::EventKind;
use pod_state::{Command, Effect, VolumeMove};

use super::conductor::Conductor;
use super::inbox::Inbox;
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
