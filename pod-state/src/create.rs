use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use cxl_pool::{EndpointId, HostId, LineCount, Role};
use pod_api::{ByteSize, EventKind};
use pod_protocol::ids::{InstanceId, LeaseGeneration, LeaseId, MacAddress, VolumeId};
use pod_protocol::objects::{Priority, Qos, RAILS_MAX};

use super::change_volume::check_qos;
use super::copiers::COPIERS_DISK;
use super::groups::check_group_name;
use super::nic_policy::check_policy;
use super::place_nic::{MTU_MIN, NicPlace};
use super::rates::Rates;
use super::refusal::shown;
use super::volume::check_size;
use super::{
    Command, DeviceId, Effect, Groups, GuestRam, Instance, Kind, Labels, Lease, LeaseKind, NicWish, Presence,
    Refusal, RefusalKind, State, Volume, check_name,
};

/// The most NICs of an instance.
pub(super) const NICS_MAX: usize = 8;
/// The most volumes of an instance.
const VOLUMES_MAX: usize = 16;
/// The most pairs of queues of a NIC.
pub(super) const QUEUE_PAIRS_MAX: u16 = 8;
/// The most that a guest reads of a disk's serial number.
const SERIAL_BYTES_MAX: usize = 20;

/// An instance as somebody wants it.
pub(super) struct Wanted<'a> {
    pub(super) name: &'a str,
    pub(super) host: HostId,
    pub(super) nics: &'a [NicWish],
    pub(super) volumes: &'a [String],
    pub(super) instance_type: Option<&'a str>,
    pub(super) vmm_listens: bool,
    pub(super) ram_bytes: Option<u64>,
    pub(super) priority: Option<Priority>,
    pub(super) copier: bool,
}

impl<'a> Wanted<'a> {
    /// What a command asks for, if it asks for an instance.
    pub(super) fn of(command: &'a Command) -> Option<Self> {
        let Command::CreateInstance {
            name,
            host,
            nics,
            volumes,
            instance_type,
            vmm_listens,
            ram_bytes,
            priority,
        } = command
        else {
            return None;
        };
        let instance_type = instance_type.as_deref();
        let (host, vmm_listens, ram_bytes, priority) = (*host, *vmm_listens, *ram_bytes, *priority);
        let copier = false;
        Some(Self { name, host, nics, volumes, instance_type, vmm_listens, ram_bytes, priority, copier })
    }
}

/// A volume as somebody wants it.
pub(super) struct VolumeWish<'a> {
    pub(super) size_bytes: u64,
    pub(super) replicas: u8,
    pub(super) qos: Qos,
    pub(super) groups: &'a Groups,
}

impl State {
    pub(super) fn create_volume(
        &mut self,
        name: &str,
        device: Option<&DeviceId>,
        wanted: &VolumeWish<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let VolumeWish { size_bytes, replicas, qos, groups } = *wanted;
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
        check_qos(&qos)?;
        groups.check()?;
        let (rates, neighbours) = (Rates::sure_of(&qos), self.neighbours(groups, None));
        if let Some(device) = device {
            self.check_apart(&neighbours, groups, device)?;
        }
        let places = self.place_replicas((size_bytes, rates), device, replicas, &neighbours)?;
        if places.len() < usize::from(replicas) {
            let place = match device {
                Some(id) if places.is_empty() => format!("not on {}", self.device_name(id)),
                _ if places.is_empty() => "no SSD that is up".to_owned(),
                _ => format!("SSDs of {} that are up, not of {replicas},", Count(places.len(), "host")),
            };
            return Err(Refusal::new(
                RefusalKind::NoRoom,
                format!(
                    "there is no room for {}{} in one piece: {place} has that much free; delete volumes, or ask for less{}",
                    ByteSize::new(size_bytes),
                    rates.as_well(),
                    neighbours.as_well(groups)
                ),
            ));
        }
        self.last.volume += 1;
        let id = VolumeId::new(self.last.volume);
        let names: Vec<String> = places.iter().map(|place| self.device_name(&place.device)).collect();
        let message = format!("{} on {}", ByteSize::new(size_bytes), names.join(", "));
        effects.push(Effect::event(EventKind::VolumeCreated, name, message));
        let volume = Volume::new(id, name.to_owned(), places, size_bytes);
        self.volumes.insert(id, Volume { qos, groups: groups.clone(), ..volume });
        Ok(())
    }

    pub(super) fn create_instance(
        &mut self,
        wanted: &Wanted<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let Wanted { name, volumes, .. } = *wanted;
        let instance_type = self.type_named(wanted.instance_type)?;
        let nics = &instance_type.complete(wanted.nics)[..];
        self.check_instance(wanted, self.instance_named(name).is_some(), nics)?;
        self.attempt(effects, |state, effects| {
            let priority = wanted.priority.or(instance_type.priority).unwrap_or_default();
            let id = state.begin_instance(wanted, (nics.len(), priority), effects);
            state.add_nics(id, wanted, nics)?;
            state.add_disks(id, wanted, effects)?;
            state.promise_iops(volumes, instance_type.volume_iops)?;
            state.settle(effects);
            state.check_made(id)
        })
    }

    /// An instance that has nothing yet.
    fn begin_instance(
        &mut self,
        wanted: &Wanted<'_>,
        (nics, priority): (usize, Priority),
        effects: &mut Vec<Effect>,
    ) -> InstanceId {
        self.last.instance += 1;
        let id = InstanceId::new(self.last.instance);
        let instance = Instance {
            id,
            name: wanted.name.to_owned(),
            host: wanted.host,
            incoming: None,
            instance_type: wanted.instance_type.map(str::to_owned),
            vmm_listens: wanted.vmm_listens,
            copier: wanted.copier,
            labels: Labels::new(),
            priority,
            ram: wanted.ram_bytes.map(|bytes| GuestRam::new(LineCount::covering(bytes))),
            nics: Vec::new(),
            disks: Vec::new(),
        };
        self.instances.insert(id, instance);
        let ram = wanted.ram_bytes.map(|bytes| format!(", its RAM of {} in the pool", ByteSize::new(bytes)));
        let has = match wanted.volumes {
            [volume] if wanted.copier => format!("for it to copy {volume}, which no instance uses"),
            volumes => format!(
                "with {} and {}{}",
                Count(nics, "NIC"),
                Count(volumes.len(), "volume"),
                ram.unwrap_or_default()
            ),
        };
        let message = format!("on {}, {has}", self.host_name(wanted.host));
        effects.push(Effect::event(EventKind::InstanceCreated, wanted.name, message));
        id
    }

    fn check_instance(&self, wanted: &Wanted<'_>, is_known: bool, nics: &[NicWish]) -> Result<(), Refusal> {
        let Wanted { name, .. } = *wanted;
        check_name("an instance", name)?;
        if is_known {
            return Err(Refusal::new(
                RefusalKind::Exists,
                format!("there is an instance named {name:?} already"),
            ));
        }
        self.check_may_come(wanted.host)?;
        self.check_devices(wanted, nics, None)
    }

    /// Whether these NICs and volumes make sense, for a new instance or for one that is there.
    pub(super) fn check_devices(
        &self,
        wanted: &Wanted<'_>,
        nics: &[NicWish],
        there: Option<InstanceId>,
    ) -> Result<(), Refusal> {
        let Wanted { host, volumes, .. } = *wanted;
        let invalid = |detail: String| Err(Refusal::new(RefusalKind::InvalidValue, detail));
        let there = there.and_then(|id| self.instances.get(&id));
        let (nics_there, disks_there) = there.map_or((0, 0), |it| (it.nics.len(), it.disks.len()));
        if nics.len() + nics_there > NICS_MAX || volumes.len() + disks_there > VOLUMES_MAX {
            return invalid(format!(
                "an instance can have {NICS_MAX} NICs and {VOLUMES_MAX} volumes at most"
            ));
        }
        self.check_ram(wanted, nics.len() + volumes.len())?;
        for wish in nics {
            if wish.queue_pairs.is_some_and(|pairs| pairs == 0 || pairs > QUEUE_PAIRS_MAX) {
                return invalid(format!("queue_pairs must be 1 to {QUEUE_PAIRS_MAX}"));
            }
            if let Some(device) = &wish.device {
                check_name("a NIC", device)?;
            }
            if wish.rails.is_some_and(|rails| rails == 0 || usize::from(rails) > RAILS_MAX) {
                return invalid(format!("rails must be 1 to {RAILS_MAX}"));
            }
            if wish.mtu.is_some_and(|mtu| mtu < MTU_MIN) {
                return invalid(format!("an MTU must be {MTU_MIN} at least"));
            }
            check_policy(&wish.policy)?;
            for group in wish.apart.iter().chain(&wish.together) {
                check_group_name(group)?;
            }
            if let Some(mac) = wish.mac.filter(|mac| mac.is_multicast() || mac.bytes() == [0; 6]) {
                return invalid(format!("{mac} cannot be the address of a NIC: its first byte must be even"));
            }
        }
        let needed = [(Role::NetFrontend, !nics.is_empty()), (Role::BlkFrontend, !volumes.is_empty())];
        for (role, _) in needed.into_iter().filter(|(_, needed)| *needed) {
            let endpoint = EndpointId::new(host, role);
            if self.look_at(endpoint).is_none_or(|it| it.presence != Presence::Joined) {
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

    pub(super) fn add_nics(
        &mut self,
        instance: InstanceId,
        wanted: &Wanted<'_>,
        wishes: &[NicWish],
    ) -> Result<(), Refusal> {
        for wish in wishes {
            // Those before it count.
            if !self.leases.is_followed() {
                self.follow();
            }
            let NicPlace { active, standby } = self.place_nic(&self.loads_now(), wanted.host, wish)?;
            let limits = self.rails_of(&active).into_iter().map(|rail| self.nic_limits(&rail));
            let common = |(mtu, features): (u16, u64), it: (u16, u64)| (mtu.min(it.0), features & it.1);
            let (nic_mtu, features) = limits.reduce(common).unwrap_or_default();
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
                reserved_mbps: wish.reserved_mbps,
                apart: wish.apart.clone(),
                together: wish.together.clone(),
            };
            let name = match &wish.device {
                Some(name) => name.clone(),
                None => self.free_nic_name(instance),
            };
            let lease = self.add_lease(instance, wanted, name, kind)?;
            if let Some(instance) = self.instances.get_mut(&instance) {
                instance.nics.push(lease);
            }
        }
        Ok(())
    }

    /// The first of `net0`, `net1`, … that no NIC of the instance has.
    fn free_nic_name(&self, instance: InstanceId) -> String {
        let nics = self.instances.get(&instance).map_or(&[][..], |it| &it.nics);
        let taken: BTreeSet<&str> =
            nics.iter().filter_map(|id| self.leases.get(id)).map(|lease| lease.device.as_str()).collect();
        let mut names = (0..=nics.len()).map(|number| format!("net{number}"));
        names.find(|name| !taken.contains(name.as_str())).unwrap_or_default()
    }

    fn nic_limits(&self, id: &DeviceId) -> (u16, u64) {
        match self.devices.get(id).map(|device| &device.kind) {
            Some(Kind::Nic { mtu, features, .. }) => (*mtu, *features),
            _ => (0, 0),
        }
    }

    pub(super) fn add_disks(
        &mut self,
        instance: InstanceId,
        wanted: &Wanted<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        for volume_name in wanted.volumes {
            // As for NICs: those before it count, and are looked up rather than sought among all of the pod's.
            if !self.leases.is_followed() {
                self.follow();
            }
            let volume =
                self.volume_named(volume_name).ok_or_else(|| Refusal::not_found("volume", volume_name))?;
            let (id, read_only) = (volume.id, volume.read_only);
            self.end_copier_of(id, effects)?;
            if let Some(lease) = self.lease_of_volume(id) {
                let holder =
                    self.instances.get(&lease.instance).map_or("another instance", |it| it.name.as_str());
                let advice = if lease.leaving {
                    format!("it leaves once the guest has let go of it (podctl instances get {holder})")
                } else {
                    format!("detach it first (podctl instances detach {holder} {})", lease.device)
                };
                return Err(Refusal::new(
                    RefusalKind::Leased,
                    format!("the volume {} is leased to {holder}: {advice}", shown(volume_name)),
                ));
            }
            let serial =
                if volume_name.len() <= SERIAL_BYTES_MAX { volume_name.clone() } else { id.to_string() };
            let queues = self.options.disk_queues;
            let kind = LeaseKind::Disk { volume: id, serial, queues, read_only, clean_for: BTreeMap::new() };
            let device = if wanted.copier { COPIERS_DISK } else { volume_name.as_str() };
            let lease = self.add_lease(instance, wanted, device.to_owned(), kind)?;
            if let Some(instance) = self.instances.get_mut(&instance) {
                instance.disks.push(lease);
            }
        }
        Ok(())
    }

    fn add_lease(
        &mut self,
        instance: InstanceId,
        wanted: &Wanted<'_>,
        device: String,
        kind: LeaseKind,
    ) -> Result<LeaseId, Refusal> {
        let has_name = |instance: &Instance| self.leases_of(instance).any(|lease| lease.device == device);
        // Its socket says so as well, but has another name where the instance has moved to.
        if self.decides_by_more() && self.instances.get(&instance).is_some_and(has_name) {
            let detail = format!("{} has a device {device} already: choose another name", wanted.name);
            return Err(Refusal::new(RefusalKind::Exists, detail));
        }
        let socket = format!("{}-{device}.sock", wanted.name);
        if self.has_socket(wanted.host, &socket) {
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
                    Count(socket.len() - self.options.socket_name_bytes_max, "character")
                ),
            ));
        }
        let id = self.next_lease()?;
        let generation = LeaseGeneration::new(1);
        let lease = Lease {
            id,
            instance,
            device,
            socket,
            generation,
            connected: false,
            running: false,
            used_before: None,
            write_through: false,
            untold: false,
            slot: self.free_slot(instance),
            leaving: false,
            plugged: false,
            refused: None,
            area: None,
            incoming: None,
            kind,
        };
        self.leases.insert(id, lease);
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
        if let Some(mac) = wish {
            return match self.owner_of_mac(mac) {
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
            if self.owner_of_mac(mac).is_none() {
                return Ok(mac);
            }
        }
        Err(Refusal::new(RefusalKind::NoRoom, "all MAC addresses are in use: delete instances first"))
    }

    /// The name of the instance with this address.
    fn owner_of_mac(&self, wanted: MacAddress) -> Option<String> {
        let has = |lease: &&Lease| matches!(lease.kind, LeaseKind::Nic { mac, .. } if mac == wanted);
        let lease = match self.found().filter(|_| self.leases.is_followed()) {
            Some(found) => found.lease_with_mac(wanted).and_then(|id| self.leases.get(&id)),
            None => self.leases.values().find(has),
        };
        lease.map(|it| self.instances.get(&it.instance).map_or_else(String::new, |it| it.name.clone()))
    }

    /// Whether a device on this host, or on its way there, has a socket of this name.
    fn has_socket(&self, host: HostId, socket: &str) -> bool {
        let is_here = |lease: &Lease| {
            let Some(instance) = self.instances.get(&lease.instance) else { return false };
            let incoming = lease.incoming.as_ref().filter(|_| instance.incoming == Some(host));
            instance.host == host && lease.socket == socket || incoming.is_some_and(|it| it.socket == socket)
        };
        match self.found().filter(|_| self.leases.is_followed()) {
            Some(found) => {
                found.leases_with_socket(socket).filter_map(|id| self.leases.get(&id)).any(is_here)
            }
            None => self.leases.values().any(is_here),
        }
    }
}

/// So many of them, in words.
struct Count(usize, &'static str);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(number, what) = self;
        write!(f, "{number} {what}{}", if *number == 1 { "" } else { "s" })
    }
}
