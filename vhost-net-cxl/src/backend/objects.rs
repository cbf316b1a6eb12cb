//! What the controller wants this backend to have: channels, running NICs, registrations.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cxl_pool::{Area, Memory};
use pod_protocol::ids::{ChannelId, LeaseId};
use pod_protocol::objects::{
    ChannelObject, NicObject, Object, ObjectId, REGISTRATIONS_MAX, RegistrationObject, RegistrationState,
};
use pod_protocol::worker::{Sources, Token};

use super::Backend;
use super::port::Port;
use super::receive_buffers::ReceiveBuffers;
use super::registration::{Numbers, Registration, RegistrationIndex};
use super::wire::answer;
use crate::channel_end::whole_pool;
use crate::message::Status;
use crate::nic::{Nic, NicError};
use crate::offloads::Offloads;

/// How far apart the numbers begin that frames to different leases get: odd, so that all are used.
const NUMBERS_APART: u16 = 0x4e35;
/// For how long at least a NIC is told nothing else about what frontends say that drivers accept.
const AGREED_FOR: Duration = Duration::from_millis(10);

impl<M: Memory> Backend<M> {
    /// Has this object from now on.
    pub fn apply(&mut self, object: Object, sources: Option<&mut Sources>) -> Result<(), String> {
        match object {
            Object::Channel(object) => self.apply_channel(&object),
            Object::Nic(object) => self.start_nic(&object, sources),
            Object::Registration(object) => self.register(object),
            other => Err(format!("a net backend has no {}", other.id())),
        }
    }

    /// Has this object no longer.
    pub fn remove(&mut self, id: &ObjectId) {
        match id {
            ObjectId::Channel(channel) => {
                self.forget_frontend(*channel);
                self.channels.retain(|end| end.object().id != *channel);
            }
            ObjectId::Registration { lease, nic } => self.unregister(*lease, nic),
            // A NIC goes on running without users: nothing reaches it, and its link stays watched.
            _ => {}
        }
    }

    /// Whether any of this area is in use.
    pub fn uses(&self, area: Area) -> bool {
        let registered = |port: &Port| {
            let mut registrations = port.registrations.iter().flatten();
            registrations.any(|registration| {
                let RegistrationObject { tx_area, ram_area, .. } = &registration.object;
                tx_area.overlaps(&area) || ram_area.is_some_and(|ram| ram.overlaps(&area))
            })
        };
        self.ports.iter().any(|port| port.area.is_some_and(|own| own.overlaps(&area)) || registered(port))
    }

    fn apply_channel(&mut self, object: &ChannelObject) -> Result<(), String> {
        // The frontend, or we, begin anew: what the old one held is not coming back.
        self.forget_frontend(object.id);
        self.channels.retain(|end| end.object().id != object.id);
        self.channels.push((self.open_channel)(object)?);
        Ok(())
    }

    /// Takes back what the frontend behind a channel holds.
    fn forget_frontend(&mut self, channel: ChannelId) {
        self.told.forget(channel);
        self.too_early.forget(channel);
        for port in &mut self.ports {
            for index in 0..port.registrations.len() {
                let behind = |it: &Registration| it.object.channel == channel;
                if port.registrations[index].as_ref().is_some_and(behind) {
                    port.take_back(index);
                }
            }
            port.backlog.retain(|packet| packet.channel != channel);
        }
        self.registrations_changed = true;
    }

    fn start_nic(&mut self, object: &NicObject, sources: Option<&mut Sources>) -> Result<(), String> {
        let place = self.ports.iter().position(|port| port.nic.identity().name == object.nic);
        let place = place.ok_or_else(|| format!("this host has no nic {}", object.nic))?;
        let port = &mut self.ports[place];
        if port.area == Some(object.rx_area) {
            return Ok(());
        }
        if port.area.is_some() {
            return Err(format!("nic {} runs already, in another receive area", object.nic));
        }
        if !whole_pool(&self.memory).contains_area(&object.rx_area) {
            return Err(format!("the receive area of nic {} lies outside of the pool", object.nic));
        }
        let mut buffers = ReceiveBuffers::new(object.rx_area);
        if buffers.is_empty() {
            return Err(format!("the receive area of nic {} is too small", object.nic));
        }
        let tagging = buffers.set_aside();
        let mut started = port.nic.start(&mut buffers);
        (port.buffers, port.tagging, port.area) = (Some(buffers), tagging, Some(object.rx_area));
        port.counters.driver.set(port.nic.troubles());
        if started.is_ok()
            && let Some(sources) = sources
        {
            let nic = || object.nic.clone();
            let failed = |source| NicError::System { nic: nic(), doing: "watch it", hint: "", source };
            started = watch_descriptors(port.nic.as_ref(), place, sources).map_err(failed);
        }
        if started.is_ok() {
            tracing::info!(nic = object.nic, area = %object.rx_area, "NIC started");
        }
        // One that cannot be started has failed as any other: its leases move, and it is opened again by and by.
        port.check(started, &self.tell);
        Ok(())
    }

    fn register(&mut self, object: RegistrationObject) -> Result<(), String> {
        let place = self.ports.iter().position(|port| port.nic.identity().name == object.nic);
        let place = place.ok_or_else(|| format!("this host has no nic {}", object.nic))?;
        let lease = object.lease;
        if !whole_pool(&self.memory).contains_area(&object.tx_area) {
            return Err(format!("the transmit area of {lease} lies outside of the pool"));
        }
        if object.ram_area.is_some_and(|ram| !whole_pool(&self.memory).contains_area(&ram)) {
            return Err(format!("the guest memory of {lease} lies outside of the pool"));
        }
        let numbers = self.numbers_of(lease);
        let known = self.leases.get(&lease).and_then(|all| all.iter().find(|(port, _)| *port == place));
        let known = known.map(|(_, index)| *index);
        if object.state == RegistrationState::Draining && known.is_some_and(|it| self.is_active(place, it)) {
            // It may lie there from before the NIC that the lease moves to began to serve it, and flooded frames come from that one only
            // from here on.
            self.serve_nic_so_far(place);
        }
        let port = &mut self.ports[place];
        let index = if let Some(index) = known {
            index
        } else {
            let free = port.registrations.iter().position(Option::is_none);
            let free = free.unwrap_or(port.registrations.len());
            let index = u16::try_from(free).ok().and_then(RegistrationIndex::new);
            let index = index
                .ok_or_else(|| format!("nic {} has {REGISTRATIONS_MAX} registrations already", object.nic))?;
            if free == port.registrations.len() {
                port.registrations.push(None);
            }
            self.leases.entry(lease).or_default().push((place, index));
            index
        };
        port.switch.set(index, object.mac, object.policy.vlan, object.state);
        let tag = port.next_tag(index);
        port.backlog.admit(index, (&object.policy.transmit, object.priority), Instant::now());
        let (state, of) = (object.state, (object.channel, lease));
        let told = self.told.get(of);
        // What is only to take over sends nothing: it is given more of that back.
        let sends = state != RegistrationState::Standby;
        let too_early = if sends { self.too_early.take(of, object.generation) } else { None };
        tracing::info!(%lease, nic = object.nic, ?state, generation = object.generation.get(), "registered");
        match &mut port.registrations[index.get()] {
            Some(registration) => {
                let (before, after) = (registration.object.channel, object.channel);
                registration.update(object);
                if before != after {
                    let taken_back = port.take_back(index.get());
                    if let Some(registration) = &mut port.registrations[index.get()] {
                        registration.told = told;
                    }
                    self.completed(before, taken_back);
                }
            }
            slot @ None => {
                let new = Registration::new(object, self.book.open(lease), numbers, tag);
                *slot = Some(Registration { told, ..new });
            }
        }
        let port = &mut self.ports[place];
        if let Some(registration) = &mut port.registrations[index.get()]
            && let Some(too_early) = too_early
        {
            registration.given_back = too_early;
        }
        port.announcing = true;
        port.flows_changed = true;
        self.registrations_changed = true;
        Ok(())
    }

    fn is_active(&self, place: usize, index: RegistrationIndex) -> bool {
        let registration = self.ports[place].registrations[index.get()].as_ref();
        registration.is_some_and(|it| it.object.state == RegistrationState::Active)
    }

    fn unregister(&mut self, lease: LeaseId, nic: &str) {
        let Some(all) = self.leases.get_mut(&lease) else { return };
        let ports = &self.ports;
        let Some(at) = all.iter().position(|(port, _)| ports[*port].nic.identity().name == nic) else {
            return;
        };
        let (place, index) = all.swap_remove(at);
        if all.is_empty() {
            self.leases.remove(&lease);
            self.book.close(lease);
        }
        let port = &mut self.ports[place];
        let taken_back = port.take_back(index.get());
        port.switch.remove(index);
        let registration = port.registrations[index.get()].take();
        port.flows_changed = true;
        // Their frontend has another route by now, but it counts what it awaits over the channel, which others use too.
        let channels = &mut self.channels;
        port.backlog.dismiss(index, |packet| answer(channels, packet, Status::Stale));
        if let Some(registration) = registration {
            self.completed(registration.object.channel, taken_back);
        }
        tracing::info!(%lease, nic, "unregistered");
        self.registrations_changed = true;
    }

    /// Looks over all registrations where any has changed: once in a turn, for many change at once where a NIC fails.
    pub(super) fn look_over(&mut self) {
        if !std::mem::take(&mut self.registrations_changed) {
            return;
        }
        for port in &mut self.ports {
            if std::mem::take(&mut port.flows_changed) {
                port.tell_flows();
            }
        }
        self.look_at_promises();
        self.agree_on_offloads();
    }

    fn look_at_promises(&mut self) {
        let mut registrations = self.ports.iter().flat_map(|port| port.registrations.iter().flatten());
        self.promises_receiving = registrations.any(|it| it.receive_minimum.is_some());
    }

    /// Notes that receive buffers that a frontend was told of over this channel are not to be given back any more.
    fn completed(&mut self, channel: ChannelId, buffers: usize) {
        if let Some(end) = self.channels.iter_mut().find(|end| end.object().id == channel) {
            end.completed(buffers);
        }
    }

    /// What numbers the frames to a lease. A lease that comes back does not begin anew: what its frontend says about frames of
    /// before must not be taken for those of now.
    fn numbers_of(&mut self, lease: LeaseId) -> Arc<Numbers> {
        let registrations = self.leases.get(&lease).into_iter().flatten();
        let mut known =
            registrations.filter_map(|(port, index)| self.ports[*port].registrations[index.get()].as_ref());
        if let Some(registration) = known.next() {
            return Arc::clone(&registration.numbers);
        }
        self.first_number = self.first_number.wrapping_add(NUMBERS_APART);
        Arc::new(Numbers::starting_at(self.first_number))
    }

    /// Tells the NICs what drivers have come to accept, but not each time that a frontend has it otherwise: for a NIC that is a
    /// system call under a lock of the kernel. Until then what a receiver does not accept is done here.
    pub(super) fn agree_by_and_by(&mut self) {
        if !self.offloads_changed {
            return;
        }
        let now = *self.now.get_or_insert_with(Instant::now);
        if self.offloads_agreed.is_none_or(|last| now.saturating_duration_since(last) >= AGREED_FOR) {
            self.offloads_agreed = Some(now);
            self.agree_on_offloads();
        }
    }

    /// Tells each NIC what all of its receivers accept: the kernel segments and checksums for those who cannot. Those of which nothing was heard
    /// do not count. What they get is finished here.
    pub(super) fn agree_on_offloads(&mut self) {
        self.offloads_changed = false;
        for port in &mut self.ports {
            let receiving = port.registrations.iter().flatten().filter(|it| it.sends());
            let common = receiving.filter_map(|it| it.told).reduce(Offloads::intersection);
            let common = common.unwrap_or(Offloads::NONE).intersection(port.nic.identity().offloads);
            let outcome = port.nic.set_receiver_offloads(common);
            port.check(outcome, &self.tell);
        }
    }
}

pub(super) fn watch_descriptors(nic: &dyn Nic, place: usize, sources: &mut Sources) -> io::Result<()> {
    nic.descriptors().into_iter().try_for_each(|descriptor| sources.add(descriptor, Token(place as u64)))
}
