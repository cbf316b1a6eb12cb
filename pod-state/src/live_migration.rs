//! Instances that move to another host while they run.
//!
//! The devices stay where they are; only the frontends change. Before, the frontends of the other host are given an
//! *incoming* attachment of each lease: a socket, an area and channels, and no right to use any of it. The VMM there
//! negotiates with them while the guest still runs here. When the VMM here has stopped the guest, its frontends have
//! drained and released all rings; when the VMM there has started it, its frontends have rings. Then, and only then, the
//! leases change hands: with a new generation, so that backends refuse whatever the old side might still send.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{EndpointId, HostId};
use pod_api::EventKind;
use pod_protocol::ids::{InstanceId, LeaseId};
use serde::{Deserialize, Serialize};

use super::{Effect, Hold, Lease, LeaseKind, Presence, Refusal, RefusalKind, State, UsedBefore};

/// The attachment of a lease on the host to which its instance moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incoming {
    /// The file of its vhost-user socket there.
    pub socket: String,
    /// Whether a VMM is connected there.
    pub connected: bool,
    /// Whether its queues run there.
    pub running: bool,
    /// How a VMM used it in the life before of the frontend there, until this life says whether one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_before: Option<UsedBefore>,
    /// The TX or data area, made for one life of the frontend there.
    pub area: Option<Hold>,
}

impl State {
    /// The frontend that will serve a lease when its instance has moved.
    pub fn incoming_frontend(&self, lease: &Lease) -> Option<EndpointId> {
        lease.incoming.as_ref()?;
        let host = self.instances.get(&lease.instance)?.incoming?;
        Some(EndpointId::new(host, lease.kind.frontend_role()))
    }

    /// The frontend that serves a lease, and the one that will.
    pub fn frontends_of(&self, lease: &Lease) -> impl Iterator<Item = EndpointId> {
        self.frontend_of(lease).into_iter().chain(self.incoming_frontend(lease))
    }

    /// Lets the frontends of another host get ready for an instance.
    pub(super) fn prepare_migration(
        &mut self,
        name: &str,
        to: HostId,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let id = self.check_migration(name, to)?;
        let host_name = self.host_name(to);
        self.attempt(effects, |state, effects| {
            if let Some(instance) = state.instances.get_mut(&id) {
                instance.incoming = Some(to);
            }
            for lease in state.lease_ids_of(id) {
                let Some(lease) = state.leases.get_mut(&lease) else { continue };
                // Another name than here: hosts of one machine keep their sockets in one place.
                let socket = format!("{name}-{}-{host_name}.sock", lease.device);
                let (connected, running, used_before, area) = (false, false, None, None);
                lease.incoming = Some(Incoming { socket, connected, running, used_before, area });
            }
            let message = format!("{host_name} gets ready for it");
            effects.push(Effect::event(EventKind::MigrationPrepared, name, message));
            state.settle(effects);
            state.check_sockets(id)?;
            state.check_incoming_made(id)?;
            state.check_ram_made(id, true)
        })
    }

    /// The leases of an instance, NICs first.
    pub(super) fn lease_ids_of(&self, id: InstanceId) -> Vec<LeaseId> {
        let instance = self.instances.get(&id);
        instance.into_iter().flat_map(|it| it.nics.iter().chain(&it.disks)).copied().collect()
    }

    fn own_leases(&self, id: InstanceId) -> impl Iterator<Item = &Lease> {
        self.instances.get(&id).into_iter().flat_map(|instance| self.leases_of(instance))
    }

    fn check_migration(&self, name: &str, to: HostId) -> Result<InstanceId, Refusal> {
        let instance = self.instance_named(name).ok_or_else(|| Refusal::not_found("instance", name))?;
        self.check_no_copier(instance)?;
        if let Some(host) = instance.incoming {
            let detail = format!(
                "{name} is moving to {} already: wait, or abort that (podctl instances abort-migration {name})",
                self.host_name(host)
            );
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        if instance.host == to {
            let detail = format!("{name} is on {} already", self.host_name(to));
            return Err(Refusal::new(RefusalKind::InvalidValue, detail));
        }
        self.check_may_come(to)?;
        if let Some(lease) = self.leases_of(instance).find(|it| it.leaving) {
            let detail = format!("{} is leaving {name}: wait until its VMM has unplugged it", lease.device);
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        // The machine there would have it, and the one here not.
        let own: Vec<&Lease> = self.leases_of(instance).collect();
        let is_followed = own.iter().any(|lease| lease.plugged);
        if let Some(lease) = own.iter().find(|it| is_followed && !it.plugged && !it.connected) {
            let detail = format!(
                "{} is not plugged into {name} yet: wait for that, or detach it (podctl instances get {name})",
                lease.device
            );
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        let roles = own.into_iter();
        let needed: BTreeSet<EndpointId> =
            roles.map(|lease| EndpointId::new(to, lease.kind.frontend_role())).collect();
        for endpoint in needed {
            if self.endpoints.get(&endpoint).is_none_or(|it| it.presence != Presence::Joined) {
                let detail = format!(
                    "{} is not there: start it, or choose another host",
                    self.endpoint_name(endpoint)
                );
                return Err(Refusal::new(RefusalKind::HostNotReady, detail));
            }
        }
        Ok(instance.id)
    }

    fn check_sockets(&self, id: InstanceId) -> Result<(), Refusal> {
        for socket in self.own_leases(id).filter_map(|lease| Some(&lease.incoming.as_ref()?.socket)) {
            let uses = |lease: &Lease| {
                let incoming = lease.incoming.iter().filter(|incoming| incoming.socket == *socket).count();
                incoming + usize::from(lease.socket == *socket)
            };
            let having = self.found().into_iter().flat_map(|found| found.leases_with_socket(socket));
            if having.filter_map(|id| self.leases.get(&id)).map(uses).sum::<usize>() > 1 {
                let detail = format!("another device has the socket {socket} already");
                return Err(Refusal::new(RefusalKind::Exists, detail));
            }
            if socket.len() > self.options.socket_name_bytes_max {
                let detail = format!("the socket {socket} would have a longer path than the kernel allows");
                return Err(Refusal::new(RefusalKind::InvalidName, detail));
            }
        }
        Ok(())
    }

    /// Whether the pool had room for a second side of everything.
    fn check_incoming_made(&self, id: InstanceId) -> Result<(), Refusal> {
        let made = self.own_leases(id).all(|lease| {
            let channels = self.incoming_frontend(lease).is_some_and(|frontend| {
                self.backends_of(lease).all(|backend| {
                    let channel = self.channel_between(frontend, backend);
                    self.life_of(backend).is_none() || channel.is_some_and(|channel| channel.rings.is_some())
                })
            });
            channels && lease.incoming.as_ref().is_some_and(|incoming| incoming.area.is_some())
        });
        if made {
            return Ok(());
        }
        let detail = "the pool has no room for a second side of the instance's devices, or a daemon has yet to let go \
                      of what is needed: look at `podctl pool`, delete instances, or try again";
        Err(Refusal::new(RefusalKind::NoRoom, detail))
    }

    /// The instance stays where it is.
    pub(super) fn abort_migration(&mut self, name: &str, effects: &mut Vec<Effect>) -> Result<(), Refusal> {
        let id = self.migrating(name)?;
        let Some(to) = self.instances.get_mut(&id).and_then(|instance| instance.incoming.take()) else {
            return Ok(());
        };
        for lease in self.lease_ids_of(id) {
            let incoming = self.leases.get_mut(&lease).and_then(|lease| lease.incoming.take());
            if let Some(area) = incoming.and_then(|incoming| incoming.area) {
                self.regions.retire(area.region);
            }
        }
        if let Some(ram) = self.instances.get_mut(&id).and_then(|instance| instance.ram.as_mut())
            && let Some(incoming) = ram.incoming.take()
        {
            self.regions.retire(incoming);
        }
        let message = format!("it does not move to {}", self.host_name(to));
        effects.push(Effect::event(EventKind::MigrationAborted, name, message));
        Ok(())
    }

    /// Somebody knows that the guest runs on the other host: no need to wait until its driver starts a queue. By force, what
    /// the old side says is not believed, since it may be dead; the backends refuse it in any case.
    pub(super) fn activate_migration(
        &mut self,
        name: &str,
        force: bool,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let id = self.migrating(name)?;
        if let Some(lease) = self.own_leases(id).find(|lease| lease.may_run() && !force) {
            let device = &lease.device;
            let detail = if lease.running {
                format!(
                    "the guest still uses {device} on the host that it is to leave; if that host is dead, activate by force"
                )
            } else {
                format!(
                    "the guest used {device} on the host that it is to leave until the frontend there started anew, which has yet to \
                     say whether it still does: ask again in a few seconds; if that host is dead, activate by force"
                )
            };
            return Err(Refusal::new(RefusalKind::Connected, detail));
        }
        let short = |lease: &&Lease| lease.incoming.as_ref().is_none_or(|incoming| incoming.area.is_none());
        if let Some(lease) = self.own_leases(id).find(short) {
            let detail =
                format!("the other host is not ready for {}: is its frontend running?", lease.device);
            return Err(Refusal::new(RefusalKind::HostNotReady, detail));
        }
        self.check_ram_made(id, true)?;
        self.hand_over(id, effects);
        Ok(())
    }

    fn migrating(&self, name: &str) -> Result<InstanceId, Refusal> {
        let instance = self.instance_named(name).ok_or_else(|| Refusal::not_found("instance", name))?;
        if instance.incoming.is_none() {
            let detail = format!("{name} is not moving to another host");
            return Err(Refusal::new(RefusalKind::NotFound, detail));
        }
        Ok(instance.id)
    }

    /// Hands over what was released on one side and is wanted on the other. Returns whether there was any.
    pub(super) fn finish_migrations(&mut self, effects: &mut Vec<Effect>) -> bool {
        let touched = self.work().flat_map(|work| &work.instances).filter_map(|id| self.instances.get(id));
        let moving = touched.filter(|instance| instance.incoming.is_some());
        let ready = moving.filter(|instance| {
            let mut own = self.leases_of(instance);
            let wanted = |lease: &Lease| {
                lease.incoming.as_ref().is_some_and(|incoming| incoming.running && incoming.area.is_some())
            };
            self.leases_of(instance).any(wanted) && own.all(|lease| !lease.running)
        });
        let ready: Vec<InstanceId> = ready.map(|instance| instance.id).collect();
        for id in &ready {
            self.hand_over(*id, effects);
        }
        !ready.is_empty()
    }

    fn hand_over(&mut self, id: InstanceId, effects: &mut Vec<Effect>) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let Some(to) = instance.incoming.take() else { return };
        let from = std::mem::replace(&mut instance.host, to);
        let name = instance.name.clone();
        self.hand_over_ram(id);
        for lease_id in self.lease_ids_of(id) {
            let Some(lease) = self.leases.get(&lease_id) else { continue };
            // Nobody has used the new area yet, so nothing of it is in a cache of the backends that are there now.
            let backends = self.backends_of(lease);
            let lives: BTreeMap<HostId, u64> =
                backends.filter_map(|backend| Some((backend.host, self.life_of(backend)?))).collect();
            let Some(lease) = self.leases.get_mut(&lease_id) else { continue };
            let Some(incoming) = lease.incoming.take() else { continue };
            if let Some(old) = std::mem::replace(&mut lease.area, incoming.area) {
                self.regions.retire(old.region);
            }
            lease.socket = incoming.socket;
            lease.connected = incoming.connected;
            (lease.running, lease.used_before) = (incoming.running, incoming.used_before);
            lease.generation = lease.generation.next();
            match &mut lease.kind {
                // What the old side sent through the NIC that it had left is not coming back to the new one.
                LeaseKind::Nic { draining, .. } => *draining = None,
                LeaseKind::Disk { clean_for, .. } => *clean_for = lives,
            }
        }
        let message = format!("from {} to {}", self.host_name(from), self.host_name(to));
        effects.push(Effect::event(EventKind::InstanceMigrated, name, message));
    }
}
