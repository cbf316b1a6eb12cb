//! Which instances come before others where devices are short: at the devices themselves, and when the controller gives out what is
//! left of them.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use pod_api::EventKind;
use pod_protocol::ids::LeaseId;
use pod_protocol::objects::Priority;

use super::{Effect, Lease, Refusal, State};

impl State {
    /// Gives an instance another priority, which holds at once for all its devices.
    pub(super) fn set_priority(
        &mut self,
        name: &str,
        priority: Priority,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let known = self.instance_named(name).ok_or_else(|| Refusal::not_found("instance", name))?;
        let (id, before) = (known.id, known.priority);
        if before == priority {
            return Ok(());
        }
        if let Some(instance) = self.instances.get_mut(&id) {
            instance.priority = priority;
        }
        let message = format!("its priority is {priority}, and was {before}");
        effects.push(Effect::event(EventKind::PriorityChanged, name, message));
        Ok(())
    }

    /// The priority of the instance that has a lease.
    pub fn priority_of(&self, lease: &Lease) -> Priority {
        self.instances.get(&lease.instance).map_or_else(Priority::default, |instance| instance.priority)
    }

    /// Leases in the order in which they get what there may not be enough of: those of the highest priority first.
    pub(super) fn highest_first(&self, leases: BTreeSet<LeaseId>) -> Vec<LeaseId> {
        let mut leases: Vec<LeaseId> = leases.into_iter().collect();
        leases.sort_by_cached_key(|id| Reverse(self.leases.get(id).map(|lease| self.priority_of(lease))));
        leases
    }
}
