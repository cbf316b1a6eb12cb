//! What is going to happen to daemons and to what they say, and how it does.

use cxl_pool::{EndpointId, HostId};
use pod_protocol::controller::PortEvent;
use pod_protocol::reports::Join;
use pod_state::State;

use super::daemon::{Mail, newest};
use super::kinds::Kind;
use super::physical::Physical;
use super::port::{Event, Port};

/// What a controller lets an endpoint do: to talk to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) connection: u64,
    /// Of the controller's office.
    pub(crate) term: u64,
}

/// What is going to happen.
#[derive(Debug)]
pub(crate) enum Happening {
    /// An order arrives.
    Arrives(EndpointId, Box<Mail>),
    /// A word of a daemon arrives at the controller of this term, over this connection.
    Says(EndpointId, u64, Box<Event>),
    /// Nobody has answered an order.
    Late(EndpointId, u64, u64),
    /// A daemon learns that it was granted a connection.
    Granted(EndpointId, Grant),
    /// A daemon of this incarnation does what it may before it has to look at its fence again, and then looks.
    ActsAndLooks(EndpointId, u64),
    /// A process is started.
    Starts(EndpointId),
    /// A frozen process goes on.
    Thaws(EndpointId, u64),
    /// What was wrong with a device is mended.
    Mended(HostId, String),
    /// A controller is started.
    ControllerStarts,
}

impl Happening {
    /// Whose conversation it is a part of: where it is known to a controller.
    pub(crate) fn conversation(&self) -> Option<(EndpointId, u64)> {
        match self {
            Self::Says(id, connection, _) | Self::Late(id, connection, _) => Some((*id, *connection)),
            Self::Granted(id, grant) => Some((*id, grant.connection)),
            _ => None,
        }
    }
}

impl Physical {
    /// The next thing that is due until then; the time is then its time.
    pub(crate) fn next_until(&mut self, until_us: u64) -> Option<Happening> {
        let first = self.agenda.first_entry().filter(|entry| entry.key().0 <= until_us)?;
        let (due, _) = *first.key();
        let what = first.remove();
        self.now_us = due;
        Some(what)
    }

    /// Lets something happen, in a conversation of this port if it is one that a controller knows. `state` is what is committed.
    pub(crate) fn happens(&mut self, what: Happening, port: Option<&mut Port>, state: &State) {
        match what {
            Happening::Arrives(id, mail) => self.arrives(id, *mail),
            Happening::Says(_, _, event) => match port {
                Some(port) => port.hear(self, *event),
                None => self.seen.lost += 1,
            },
            Happening::Late(endpoint, _, command) => {
                if let Some(port) = port {
                    port.give_up(endpoint, command);
                }
            }
            Happening::Granted(endpoint, grant) if port.is_some() => self.granted(endpoint, grant),
            Happening::Granted(..) => {}
            Happening::ActsAndLooks(id, incarnation) => {
                let daemon = &self.daemons[&id];
                if daemon.is_running() && daemon.incarnation == incarnation {
                    self.act(id, state);
                    self.look(id, state);
                }
            }
            Happening::Starts(id) => self.start(id),
            Happening::Thaws(id, incarnation) => {
                let daemon = &self.daemons[&id];
                if daemon.alive && daemon.incarnation == incarnation {
                    self.thaw(id, state);
                }
            }
            Happening::Mended(host, device) => self.mend(host, &device),
            Happening::ControllerStarts => unreachable!("whoever has the controller does that"),
        }
    }

    /// An endpoint sees that it may talk to a controller, and asks to join.
    fn granted(&mut self, endpoint: EndpointId, grant: Grant) {
        if self.daemons[&endpoint].frozen {
            // It reads its grant when it goes on.
            self.schedule(5000, Happening::Granted(endpoint, grant));
            return;
        }
        let devices = self.devices_of(endpoint);
        let Some(daemon) = self.daemons.get_mut(&endpoint).filter(|it| it.is_running()) else { return };
        if !daemon.begin(grant) {
            return;
        }
        let join = Join {
            host_name: format!("h{}", endpoint.host.get()),
            software: "simulated 1".to_owned(),
            pid: 1,
            devices,
            memory_failures: self.memory.told_by(endpoint),
            fence_ms: None,
        };
        let request = (endpoint, grant.connection);
        self.says(endpoint, PortEvent::Joined { endpoint, request, join });
    }

    /// A controller has answered a join.
    pub(crate) fn join_answered(
        &mut self,
        (endpoint, connection): (EndpointId, u64),
        answer: &Result<(), String>,
    ) {
        let Some(daemon) = self.daemons.get_mut(&endpoint) else { return };
        if daemon.connection == connection && daemon.alive {
            if answer.is_ok() {
                daemon.joined = true;
                daemon.joined_us = self.now_us;
                self.memory.keep(endpoint);
            } else {
                self.kill(endpoint);
                self.schedule(50_000, Happening::Starts(endpoint));
            }
        }
    }

    /// A newer fence generation of a life of an endpoint is visible.
    pub(crate) fn fence(&mut self, endpoint: EndpointId, meant: u64) {
        let fences = self.fences.entry(endpoint).or_default();
        fences.insert(meant, newest(fences) + 1);
        let daemon = &self.daemons[&endpoint];
        let (incarnation, clock) = (daemon.incarnation, daemon.clock_permille);
        let meets = daemon.alive && incarnation == meant;
        self.seen.faults.note(Kind::FencedSlow, meets && clock < 1000);
        self.seen.faults.note(Kind::FencedFast, meets && clock > 1000);
        // It looked a moment ago, and either hears the bell or goes on for as long as its clock lets it.
        let looked = self.random.below(10_000);
        let now = self.now_us;
        if let Some(daemon) = self.daemons.get_mut(&endpoint).filter(|daemon| !daemon.frozen) {
            daemon.looked_us = now.saturating_sub(looked);
        }
        let may_act = self.may_act_for(&self.daemons[&endpoint]);
        let after = if self.random.once_in(2) { self.random.below(may_act) } else { may_act };
        self.schedule(after, Happening::ActsAndLooks(endpoint, incarnation));
    }
}
