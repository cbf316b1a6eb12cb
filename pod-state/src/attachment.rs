//! VMMs that come and go at the sockets of leased devices.

use cxl_pool::EndpointId;
use pod_api::EventKind;
use pod_protocol::ids::LeaseId;
use serde::{Deserialize, Serialize};

use super::{Effect, Lease, State};

/// What a frontend says of the VMM at a lease's socket.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct Attached {
    pub(super) connected: bool,
    pub(super) running: bool,
    pub(super) write_through: bool,
    pub(super) untold: bool,
}

/// How a VMM used a device in the life before of its frontend, as long as the life that came after has not said whether one does. The
/// VMM most likely lives, and is about to connect again: its guest has the device all the while.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UsedBefore {
    /// It was connected.
    Connected,
    /// Its queues ran.
    Running,
}

impl UsedBefore {
    /// What is remembered when the life ends in which this was so. One that ended before it said anything leaves what it found.
    pub(super) fn of(connected: bool, running: bool, found: Option<Self>) -> Option<Self> {
        let connected = connected.then_some(Self::Connected);
        found.max(connected).max(running.then_some(Self::Running))
    }
}

impl Lease {
    /// Whether a VMM uses its device, or most likely does, here or where its instance moves to.
    pub(super) fn is_in_use(&self) -> bool {
        let there = self.incoming.as_ref();
        self.connected
            || self.used_before.is_some()
            || there.is_some_and(|incoming| incoming.connected || incoming.used_before.is_some())
    }

    /// Whether that is known only of lives before of its frontends.
    pub(super) fn is_unheard_of(&self) -> bool {
        self.is_in_use() && !self.connected && !self.incoming.as_ref().is_some_and(|it| it.connected)
    }

    /// Whether its queues run here, or did when somebody said so last.
    pub(super) fn may_run(&self) -> bool {
        self.running || self.used_before == Some(UsedBefore::Running)
    }
}

impl State {
    /// Only the frontend that serves the lease knows, and the one that will, of its own side.
    pub(super) fn attachment(
        &mut self,
        endpoint: EndpointId,
        id: LeaseId,
        now: Attached,
        effects: &mut Vec<Effect>,
    ) {
        let Some(known) = self.leases.get(&id) else { return };
        let (serves, will) =
            (self.frontend_of(known) == Some(endpoint), self.incoming_frontend(known) == Some(endpoint));
        let host = self.host_name(endpoint.host);
        let Some(lease) = self.leases.get_mut(&id) else { return };
        let (connected, used_before) = match &mut lease.incoming {
            _ if serves => {
                (lease.running, lease.write_through, lease.untold) =
                    (now.running, now.write_through, now.untold);
                (std::mem::replace(&mut lease.connected, now.connected), lease.used_before.take())
            }
            Some(incoming) if will => {
                incoming.running = now.running;
                (std::mem::replace(&mut incoming.connected, now.connected), incoming.used_before.take())
            }
            _ => return,
        };
        // One that did not come back has gone, though nobody saw it go.
        if now.connected == (connected || used_before.is_some() && !now.connected) {
            return;
        }
        let device = lease.device.clone();
        if serves {
            lease.plugged &= now.connected;
        }
        let name = self.instances.get(&lease.instance).map_or_else(String::new, |it| it.name.clone());
        let (kind, message) = if now.connected {
            (EventKind::Attached, format!("a VMM on {host} uses {device}"))
        } else {
            (EventKind::Detached, format!("the VMM on {host} does not use {device} any more"))
        };
        effects.push(Effect::event(kind, name, message));
        // A frontend that starts anew says nothing of the kind before its VMM has had time to connect again.
        if serves && !now.connected {
            self.end_if_left(id, effects);
        }
    }

    /// Keeps nothing of lives before.
    pub(super) fn forget_vmms(&mut self) {
        let is_kept = |lease: &&Lease| {
            lease.used_before.is_some() || lease.incoming.as_ref().is_some_and(|it| it.used_before.is_some())
        };
        let kept: Vec<LeaseId> = self.leases.values().filter(is_kept).map(|lease| lease.id).collect();
        for id in kept {
            let Some(lease) = self.leases.get_mut(&id) else { continue };
            lease.used_before = None;
            if let Some(incoming) = &mut lease.incoming {
                incoming.used_before = None;
            }
        }
    }
}
