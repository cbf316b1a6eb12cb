//! VMMs that come and go at the sockets of leased devices.

use cxl_pool::EndpointId;
use pod_api::EventKind;
use pod_protocol::ids::LeaseId;

use super::{Effect, State};

/// What a frontend says of the VMM at a lease's socket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attached {
    pub(super) connected: bool,
    pub(super) running: bool,
    pub(super) write_through: bool,
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
        let before = match &mut lease.incoming {
            _ if serves => {
                (lease.running, lease.write_through) = (now.running, now.write_through);
                std::mem::replace(&mut lease.connected, now.connected)
            }
            Some(incoming) if will => {
                incoming.running = now.running;
                std::mem::replace(&mut incoming.connected, now.connected)
            }
            _ => return,
        };
        if before == now.connected {
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
        // A frontend that starts anew says nothing of the kind: its VMM is about to connect again.
        if serves && !now.connected {
            self.end_if_left(id, effects);
        }
    }
}
