use std::collections::BTreeMap;

use cxl_pool::{EndpointId, HostId, Role};
use pod_protocol::ids::{InstanceId, LeaseGeneration, LeaseId, MacAddress, VolumeId};

use super::nic_policy::{check_policy, promises};
use super::refusal::shown;
use super::volume::check_size;
use super::{
    DeviceId, Effect, Instance, Kind, Lease, LeaseKind, NicWish, Presence, Refusal, RefusalKind, State,
    Volume, check_name,
};
use crate::api::{ByteSize, EventKind};

/// The most NICs of an instance.
const NICS_MAX: usize = 8;
/// The most volumes of an instance.
const VOLUMES_MAX: usize = 16;
/// The most pairs of queues of a NIC.
const QUEUE_PAIRS_MAX: u16 = 8;
/// The smallest MTU that IPv4 allows.
const MTU_MIN: u16 = 68;
/// The most that a guest reads of a disk's serial number.
const SERIAL_BYTES_MAX: usize = 20;

impl State {
    pub(super) fn create_volume(
        &mut self,
        name: &str,
        size_bytes: u64,
        device: Option<&DeviceId>,
        replicas: u8,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        check_name("a volume", name)?;
        if self.volume_named(name).is_some() {
            return Err(Refusal::new(
                RefusalKind::Exists,
                format!("there is a volume named {name:?} already"),
            ));
        }
        check_size(size_bytes)?;
        if let Some(id) = device
            && !self.devices.get(id).is_some_and(|known| matches!(known.kind, Kind::Ssd { .. }))
        {
            return Err(Refusal::new(
                RefusalKind::NotFound,
                format!("there is no SSD {}", self.device_name(id)),
            ));
        }
        let places = self.place_replicas(size_bytes, device, replicas)?;
        if places.len() < usize::from(replicas) {
            let place = match device {
                Some(id) if places.is_empty() => format!("not on {}", self.device_name(id)),
                _ if places.is_empty() => "no SSD that is up".to_owned(),
                _ => format!("SSDs of {} that are up, not of {replicas},", count(places.len(), "host")),
            };
            return Err(Refusal::new(
                RefusalKind::NoRoom,
                format!(
                    "there is no room for {} in one piece: {place} has that much free; delete volumes, or ask for less",
                    ByteSize::new(size_bytes)
                ),
            ));
        }
        self.last.volume += 1;
        let id = VolumeId::new(self.last.volume);
        let names: Vec<String> = places.iter().map(|place| self.device_name(&place.device)).collect();
        let message = format!("{} on {}", ByteSize::new(size_bytes), names.join(", "));
        effects.push(Effect::event(EventKind::VolumeCreated, name, message));
        self.volumes.insert(id, Volume::new(id, name.to_owned(), places, size_bytes));
        Ok(())
    }

    pub(super) fn create_instance(
        &mut self,
        name: &str,
        host: HostId,
        nics: &[NicWish],
        volumes: &[String],
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        self.check_instance(name, host, nics, volumes)?;
        // Whether everything fits shows only when it was tried.
        let before = self.clone();
        let effects_before = effects.len();
        self.last.instance += 1;
        let id = InstanceId::new(self.last.instance);
        let instance =
            Instance { id, name: name.to_owned(), host, incoming: None, nics: Vec::new(), disks: Vec::new() };
        self.instances.insert(id, instance);
        effects.push(Effect::event(
            EventKind::InstanceCreated,
            name,
            format!(
                "on {}, with {} and {}",
                self.host_name(host),
                count(nics.len(), "NIC"),
                count(volumes.len(), "volume")
            ),
        ));
        let tried = self
            .add_nics(id, name, host, nics)
            .and_then(|()| self.add_disks(id, name, volumes))
            .and_then(|()| {
                self.settle(effects);
                self.check_made(id)
            });
        if tried.is_err() {
            *self = before;
            effects.truncate(effects_before);
        }
        tried
    }

    fn check_instance(
        &self,
        name: &str,
        host: HostId,
        nics: &[NicWish],
        volumes: &[String],
    ) -> Result<(), Refusal> {
        check_name("an instance", name)?;
        if self.instance_named(name).is_some() {
            return Err(Refusal::new(
                RefusalKind::Exists,
                format!("there is an instance named {name:?} already"),
            ));
        }
        let invalid = |detail: String| Err(Refusal::new(RefusalKind::InvalidValue, detail));
        if nics.len() > NICS_MAX || volumes.len() > VOLUMES_MAX {
            return invalid(format!(
                "an instance can have {NICS_MAX} NICs and {VOLUMES_MAX} volumes at most"
            ));
        }
        for wish in nics {
            if wish.queue_pairs.is_some_and(|pairs| pairs == 0 || pairs > QUEUE_PAIRS_MAX) {
                return invalid(format!("queue_pairs must be 1 to {QUEUE_PAIRS_MAX}"));
            }
            if wish.mtu.is_some_and(|mtu| mtu < MTU_MIN) {
                return invalid(format!("an MTU must be {MTU_MIN} at least"));
            }
            check_policy(&wish.policy)?;
            if let Some(mac) = wish.mac.filter(|mac| mac.is_multicast() || mac.bytes() == [0; 6]) {
                return invalid(format!("{mac} cannot be the address of a NIC: its first byte must be even"));
            }
        }
        let needed = [(Role::NetFrontend, !nics.is_empty()), (Role::BlkFrontend, !volumes.is_empty())];
        for (role, _) in needed.into_iter().filter(|(_, needed)| *needed) {
            let endpoint = EndpointId::new(host, role);
            if self.endpoints.get(&endpoint).is_none_or(|it| it.presence != Presence::Joined) {
                return Err(Refusal::new(
                    RefusalKind::HostNotReady,
                    format!(
                        "{} is not there: start it, or choose another host",
                        self.endpoint_name(endpoint)
                    ),
                ));
            }
        }
        Ok(())
    }

    fn add_nics(
        &mut self,
        instance: InstanceId,
        name: &str,
        host: HostId,
        wishes: &[NicWish],
    ) -> Result<(), Refusal> {
        for (number, wish) in wishes.iter().enumerate() {
            let active = self.place_nic(host, wish.mtu, &wish.policy).ok_or_else(|| {
                let mtu = wish.mtu.map_or_else(String::new, |mtu| format!(" that can carry an MTU of {mtu}"));
                Refusal::new(
                    RefusalKind::NoDevice,
                    format!(
                        "there is no NIC with a link{mtu}{}: look at the NICs with `podctl devices list`",
                        if promises(&wish.policy) { " and free of promises as wanted here" } else { "" }
                    ),
                )
            })?;
            let (nic_mtu, features) = self.nic_limits(&active);
            let standby = self.place_standby(&active, wish.mtu.unwrap_or(MTU_MIN), features);
            let standby_mtu = standby.as_ref().map_or(u16::MAX, |standby| self.nic_limits(standby).0);
            let mac = self.choose_mac(wish.mac)?;
            let kind = LeaseKind::Nic {
                mac,
                mtu: wish.mtu.unwrap_or_else(|| nic_mtu.min(standby_mtu)),
                queue_pairs: wish.queue_pairs.unwrap_or(1),
                features,
                home: Some(active.clone()),
                active,
                standby,
                draining: None,
                policy: wish.policy.clone(),
            };
            let lease = self.add_lease(instance, name, format!("net{number}"), kind)?;
            if let Some(instance) = self.instances.get_mut(&instance) {
                instance.nics.push(lease);
            }
        }
        Ok(())
    }

    fn nic_limits(&self, id: &DeviceId) -> (u16, u64) {
        match self.devices.get(id).map(|device| &device.kind) {
            Some(Kind::Nic { mtu, features, .. }) => (*mtu, *features),
            _ => (0, 0),
        }
    }

    fn add_disks(&mut self, instance: InstanceId, name: &str, volumes: &[String]) -> Result<(), Refusal> {
        for volume_name in volumes {
            let volume =
                self.volume_named(volume_name).ok_or_else(|| Refusal::not_found("volume", volume_name))?;
            let id = volume.id;
            if let Some(lease) = self.lease_of_volume(id) {
                let holder =
                    self.instances.get(&lease.instance).map_or("another instance", |it| it.name.as_str());
                return Err(Refusal::new(
                    RefusalKind::Leased,
                    format!(
                        "the volume {} is leased to {holder}: delete that instance first",
                        shown(volume_name)
                    ),
                ));
            }
            let serial =
                if volume_name.len() <= SERIAL_BYTES_MAX { volume_name.clone() } else { id.to_string() };
            let queues = self.options.disk_queues;
            let kind =
                LeaseKind::Disk { volume: id, serial, queues, read_only: false, clean_for: BTreeMap::new() };
            let lease = self.add_lease(instance, name, volume_name.clone(), kind)?;
            if let Some(instance) = self.instances.get_mut(&instance) {
                instance.disks.push(lease);
            }
        }
        Ok(())
    }

    fn add_lease(
        &mut self,
        instance: InstanceId,
        name: &str,
        device: String,
        kind: LeaseKind,
    ) -> Result<LeaseId, Refusal> {
        let socket = format!("{name}-{device}.sock");
        let host = self.instances.get(&instance).map(|instance| instance.host);
        let same = self.leases.values().find(|lease| {
            let instance = self.instances.get(&lease.instance);
            let incoming = lease.incoming.as_ref().is_some_and(|incoming| incoming.socket == socket);
            lease.socket == socket && instance.map(|instance| instance.host) == host
                || incoming && instance.and_then(|instance| instance.incoming) == host
        });
        if same.is_some() {
            return Err(Refusal::new(
                RefusalKind::Exists,
                format!("another device on that host has the socket {socket} already: choose another name"),
            ));
        }
        if socket.len() > self.options.socket_name_bytes_max {
            return Err(Refusal::new(
                RefusalKind::InvalidName,
                format!(
                    "the socket {socket} would have a longer path than the kernel allows: take names that are {} \
                     shorter, or a shorter run directory",
                    count(socket.len() - self.options.socket_name_bytes_max, "character")
                ),
            ));
        }
        let id = self.next_lease()?;
        let generation = LeaseGeneration::new(1);
        self.leases.insert(
            id,
            Lease {
                id,
                instance,
                device,
                socket,
                generation,
                connected: false,
                running: false,
                write_through: false,
                area: None,
                incoming: None,
                kind,
            },
        );
        Ok(id)
    }

    /// Lease ids have 24 bits and come round again, long after the last message that bore them.
    fn next_lease(&mut self) -> Result<LeaseId, Refusal> {
        for _ in 0..=self.leases.len() {
            self.last.lease = if self.last.lease >= LeaseId::MAX.get() { 1 } else { self.last.lease + 1 };
            if let Some(id) = LeaseId::new(self.last.lease).filter(|id| !self.leases.contains_key(id)) {
                return Ok(id);
            }
        }
        Err(Refusal::new(RefusalKind::NoRoom, "all leases are in use: delete instances first"))
    }

    fn choose_mac(&mut self, wish: Option<MacAddress>) -> Result<MacAddress, Refusal> {
        let owner = |state: &Self, wanted: MacAddress| {
            let lease = state
                .leases
                .values()
                .find(|lease| matches!(lease.kind, LeaseKind::Nic { mac, .. } if mac == wanted));
            lease.map(|lease| {
                state.instances.get(&lease.instance).map_or_else(String::new, |it| it.name.clone())
            })
        };
        if let Some(mac) = wish {
            return match owner(self, mac) {
                None => Ok(mac),
                Some(name) => Err(Refusal::new(
                    RefusalKind::Exists,
                    format!("the MAC address {mac} belongs to the instance {name}"),
                )),
            };
        }
        // Two pods on one network hand out different addresses.
        let [first, second, ..] = *self.options.pool.as_bytes();
        for _ in 0..=self.leases.len() {
            self.last.mac = (self.last.mac + 1) & 0x00ff_ffff;
            let [_, a, b, c] = self.last.mac.to_be_bytes();
            let mac = MacAddress::new([0x02, first, second, a, b, c]);
            if owner(self, mac).is_none() {
                return Ok(mac);
            }
        }
        Err(Refusal::new(RefusalKind::NoRoom, "all MAC addresses are in use: delete instances first"))
    }

    /// Whether the pool had room for everything. What waits for a daemon that is away may come later.
    fn check_made(&self, id: InstanceId) -> Result<(), Refusal> {
        let mut leases = self.leases.values().filter(|lease| lease.instance == id);
        let made = leases.all(|lease| {
            let channels = self.frontend_of(lease).is_some_and(|frontend| {
                self.backends_of(lease).all(|backend| {
                    self.life_of(backend).is_none()
                        || self
                            .channel_between(frontend, backend)
                            .is_some_and(|channel| channel.rings.is_some())
                        || !self.scrubs(backend).is_empty()
                })
            });
            lease.area.is_some() && channels
        });
        if made {
            return Ok(());
        }
        let largest = self.regions.gaps().into_iter().map(|gap| gap.lines.bytes()).max().unwrap_or(0);
        Err(Refusal::new(
            RefusalKind::NoRoom,
            format!(
                "the pool has no room for what the instance needs (its largest free range is {}): delete instances, \
                 or look at `podctl pool` for quarantined regions",
                ByteSize::new(largest)
            ),
        ))
    }
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}
