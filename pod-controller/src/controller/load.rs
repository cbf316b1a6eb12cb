use std::time::Instant;

use super::conductor::{Conductor, Inbox};
use super::world::World;
use crate::api::EventKind;
use crate::balance::Verdict;
use crate::state::Command;

impl<W: World> Conductor<W> {
    /// What is due of NICs that carry too much.
    pub(super) fn due_load(&mut self, now: Instant, inbox: &mut Inbox<W>) {
        if self.load.next().is_none_or(|at| at > now) {
            return;
        }
        for verdict in self.load.due(&self.state, now) {
            match verdict {
                Verdict::Tell(nic, message) => {
                    inbox.tell(EventKind::Overloaded, self.state.device_name(&nic), message);
                }
                Verdict::Relieve { nics, measured, resting, relief } => {
                    inbox.add(Command::Relieve { nics, measured, resting, relief });
                }
            }
        }
        self.world.load(self.load.picture(now));
    }
}
