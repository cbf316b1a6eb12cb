//! A controller's port to its endpoints, for one life of it or one term of office.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cxl_pool::{Area, EndpointId};
use pod_protocol::commands::Command as Order;
use pod_protocol::controller::{CommandFailure, PortError, PortEvent};
use pod_protocol::ids::RegionId;
use pod_state::{Region, RegionUse, Regions};

use super::daemon::{Mail, areas_of, newest};
use super::happening::{Grant, Happening};
use super::physical::Physical;

/// How long a controller waits for an answer.
const ANSWER_WITHIN_US: u64 = 1_000_000;
pub(crate) const SILENT_AFTER_US: u64 = 200_000;

pub(crate) type Event = PortEvent<u64, (EndpointId, u64)>;

/// What a controller's port remembers of an endpoint; it is lost with the controller.
#[derive(Clone, Copy, Debug, Default)]
struct Peer {
    /// It has been looked at.
    seen: bool,
    incarnation: Option<u64>,
    silent: bool,
    appeared: bool,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Port {
    /// Of the controller's office.
    pub(crate) term: u64,
    peers: BTreeMap<EndpointId, Peer>,
    pub(crate) events: VecDeque<Event>,
    connections: BTreeMap<EndpointId, u64>,
    pub(crate) unanswered: BTreeMap<u64, EndpointId>,
    /// What endpoints have yet to hear: in which conversation, how it is called, and the order.
    queued: BTreeMap<EndpointId, Vec<(u64, u64, Order)>>,
    published: BTreeMap<u64, (RegionId, Area)>,
    /// All that was ever said to be published of them.
    table: BTreeMap<RegionId, Region>,
    /// How often something was published.
    publications: u64,
}

impl Port {
    pub(crate) fn new(term: u64) -> Self {
        Self {
            term,
            peers: BTreeMap::new(),
            events: VecDeque::new(),
            connections: BTreeMap::new(),
            unanswered: BTreeMap::new(),
            queued: BTreeMap::new(),
            published: BTreeMap::new(),
            table: BTreeMap::new(),
            publications: 0,
        }
    }

    /// Whether a conversation is one of this port's.
    pub(crate) fn has(&self, endpoint: EndpointId, connection: u64) -> bool {
        self.connections.get(&endpoint) == Some(&connection)
    }

    /// Whether nobody has anything to hear.
    pub(crate) fn is_calm(&self) -> bool {
        self.events.is_empty()
    }

    /// A conversation ends: nobody will answer what was said in it.
    fn disconnect(&mut self, endpoint: EndpointId) {
        self.connections.remove(&endpoint);
        self.queued.remove(&endpoint);
        let lost: Vec<u64> =
            self.unanswered.iter().filter(|(_, to)| **to == endpoint).map(|(ticket, _)| *ticket).collect();
        for command in lost {
            self.unanswered.remove(&command);
            let result = Err(CommandFailure::Disconnected);
            self.events.push_back(PortEvent::Answered { endpoint, command, result });
        }
    }

    /// Looks at every slot of the pool.
    pub(crate) fn sweep(&mut self, physical: &Physical) {
        let mut gone = Vec::new();
        for daemon in physical.daemons.values() {
            let endpoint = daemon.id;
            let peer = self.peers.entry(endpoint).or_default();
            if daemon.left {
                // Also when it left while no controller ran.
                if !peer.seen || peer.incarnation.is_some() {
                    *peer = Peer { seen: true, ..Peer::default() };
                    gone.push(endpoint);
                }
                continue;
            }
            if peer.incarnation != Some(daemon.incarnation) {
                if peer.appeared {
                    gone.push(endpoint);
                }
                *peer = Peer { seen: true, incarnation: Some(daemon.incarnation), ..Peer::default() };
            } else if let Some(still) = physical.still.get(&endpoint) {
                if !peer.silent && physical.now_us.saturating_sub(*still) >= SILENT_AFTER_US {
                    peer.silent = true;
                    self.events.push_back(PortEvent::Silent { endpoint, for_ms: 200 });
                }
            } else if !peer.appeared {
                peer.appeared = true;
                peer.silent = false;
                let incarnation = daemon.incarnation;
                self.events.push_back(PortEvent::Appeared { endpoint, incarnation, pid: 1 });
            } else if std::mem::take(&mut peer.silent) {
                self.events.push_back(PortEvent::Back { endpoint });
            }
        }
        for endpoint in gone {
            self.disconnect(endpoint);
            self.events.push_back(PortEvent::Gone { endpoint });
        }
    }

    /// A daemon's word arrives in one of this port's conversations.
    pub(crate) fn hear(&mut self, physical: &mut Physical, event: Event) {
        if let PortEvent::Answered { command, .. } = &event
            && self.unanswered.remove(command).is_none()
        {
            physical.seen.late += 1;
            return;
        }
        self.events.push_back(event);
    }

    /// Nobody has answered an order.
    pub(crate) fn give_up(&mut self, endpoint: EndpointId, command: u64) {
        if self.unanswered.remove(&command).is_some() {
            let result = Err(CommandFailure::Unanswered);
            self.events.push_back(PortEvent::Answered { endpoint, command, result });
        }
    }

    fn regions_of(&self, order: &Order) -> Vec<(RegionId, Area)> {
        let Order::Apply { object, .. } = order else { return Vec::new() };
        let place = |area: Area| self.published.get(&area.start.get()).copied();
        areas_of(object).into_iter().filter_map(place).collect()
    }

    /// Lets an endpoint join.
    pub(crate) fn grant(&mut self, physical: &mut Physical, endpoint: EndpointId) -> Result<(), PortError> {
        let fences = physical.fences.get(&endpoint).cloned().unwrap_or_default();
        let Some(daemon) = physical.daemons.get_mut(&endpoint).filter(|daemon| daemon.alive) else {
            return Err(PortError::Absent(endpoint));
        };
        if self.peers.get(&endpoint).is_none_or(|peer| peer.incarnation != Some(daemon.incarnation)) {
            return Err(PortError::Absent(endpoint));
        }
        if daemon.is_fenced(&fences) {
            return Err(PortError::Fenced(endpoint));
        }
        if !std::mem::replace(&mut daemon.granted, true) {
            daemon.granted_fence = newest(&fences);
        }
        self.disconnect(endpoint);
        let connection = physical.new_connection();
        self.connections.insert(endpoint, connection);
        let grant = Grant { connection, term: self.term };
        physical.send(endpoint, false, Happening::Granted(endpoint, grant));
        Ok(())
    }

    /// Queues something that an endpoint is told to do. Returns how that is called until it is answered.
    pub(crate) fn send(&mut self, physical: &mut Physical, to: EndpointId, order: &Order) -> u64 {
        let ticket = physical.new_ticket();
        let Some(connection) = self.connections.get(&to).copied() else {
            let result = Err(CommandFailure::Disconnected);
            self.events.push_back(PortEvent::Answered { endpoint: to, command: ticket, result });
            return ticket;
        };
        if let Order::Apply { object, .. } = order
            && let Some(area) = physical.memory.is_in(object)
        {
            physical.blame(|| format!("{to} is to use {area:?}, which is known to have failed: {object:?}"));
        }
        self.unanswered.insert(ticket, to);
        self.queued.entry(to).or_default().push((connection, ticket, order.clone()));
        ticket
    }

    /// Has an endpoint hear what was queued for it. Returns of which state that is the outcome, at the latest.
    pub(crate) fn let_hear(&mut self, physical: &mut Physical, to: EndpointId) -> Option<u64> {
        let queued = self.queued.remove(&to)?;
        let last = queued.iter().map(|(.., order)| order.version().index).max();
        for (connection, ticket, order) in queued {
            let regions = self.regions_of(&order);
            physical.send(
                to,
                false,
                Happening::Arrives(to, Box::new(Mail { connection, ticket, order, regions })),
            );
            physical.schedule(ANSWER_WITHIN_US, Happening::Late(to, connection, ticket));
        }
        last
    }

    /// Takes back everything from a life of an endpoint.
    pub(crate) fn fence(&mut self, physical: &mut Physical, endpoint: EndpointId, incarnation: u64) {
        let daemon = &physical.daemons[&endpoint];
        if daemon.left || daemon.incarnation == incarnation {
            self.disconnect(endpoint);
            physical.fence(endpoint, incarnation);
        }
    }

    /// Remembers which places in the pool are whose now.
    pub(crate) fn publish(&mut self, regions: &Regions, changed: Option<BTreeSet<RegionId>>) {
        if let Some(changed) = changed {
            for id in changed {
                let now = regions.get(id);
                let old = match now {
                    Some(region) => self.table.insert(id, region.clone()),
                    None => self.table.remove(&id),
                };
                // Another one may be there by now.
                if let Some(start) = old.map(|old| old.area.start.get())
                    && self.published.get(&start).is_some_and(|(there, _)| *there == id)
                {
                    self.published.remove(&start);
                }
                if let Some(it) = now.filter(|region| region.usage == RegionUse::InUse) {
                    self.published.insert(it.area.start.get(), (it.id, it.area));
                }
            }
        } else {
            self.table = regions.iter().map(|region| (region.id, region.clone())).collect();
            let in_use = regions.iter().filter(|region| region.usage == RegionUse::InUse);
            self.published = in_use.map(|it| (it.area.start.get(), (it.id, it.area))).collect();
        }
        // To compare all takes as long as there are regions.
        self.publications += 1;
        if self.publications.is_multiple_of(self.table.len().div_ceil(400).max(1) as u64) {
            assert!(self.table.values().eq(regions.iter()), "a region changed, and nobody was told");
        }
    }
}
