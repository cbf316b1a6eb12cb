//! What is asked of a pod while things go wrong in it.

use cxl_pool::{EndpointId, HostId};
use pod_api::DEFAULT_TENANT;
use pod_protocol::objects::{NicPolicy, Priority, Qos, RateLimit};
use pod_state::model::{MIB, fabric, relieve};
use pod_state::{Command, DeviceId, Groups, Lease, Mchannel, NicWish, Volume};

use super::faults::{Around, ROLES};
use super::random::Random;

/// Pods with more hosts do not share their fabric: all others hear of each frontend that comes or goes then, and whoever looks at all of a
/// pod would look at little else.
const SHARING_HOSTS_MAX: u16 = 16;

impl Around<'_> {
    /// A NIC, for which a third reserve something. Where there are groups, some are to be apart from others or together with them, or on
    /// several at the same time.
    fn nic_wish(&mut self) -> NicWish {
        let reserved_mbps = if self.dice.once_in(3) { 1000 } else { 0 };
        let mut wish = NicWish { reserved_mbps, ..NicWish::default() };
        if self.grouped && self.dice.once_in(3) {
            let Groups { apart, together } = self.groups_of_eight();
            (wish.apart, wish.together) = (apart, together);
            wish.rails = self.dice.once_in(4).then_some(2);
        }
        wish
    }

    fn groups_of_eight(&mut self) -> Groups {
        let number = self.dice.below(self.names);
        self.groups(number)
    }

    pub(crate) fn wish(&mut self) -> Command {
        if self.grouped
            && self.dice.once_in(12)
            && let Some(command) = self.regroup()
        {
            return command;
        }
        if self.grouped && self.dice.once_in(8) {
            return self.chore();
        }
        let number = self.dice.below(self.names);
        let host = self.random_daemon().host;
        let (vm, vol) = (format!("vm{number}"), format!("vol{number}"));
        match self.dice.below(36) {
            0..=3 => self.create_volume(number),
            4..=8 => self.create_instance(number, host),
            9 => Command::DeleteInstance { name: vm, force: true },
            10 => Command::DeleteVolume { name: vol },
            11 | 12 => Command::MigrateNic { instance: vm, device: "net0".to_owned(), to: None },
            13 | 14 => Command::PrepareMigration { name: vm, to: host },
            15 => Command::AbortMigration { name: vm },
            16 | 17 => {
                self.attach();
                Command::ActivateMigration { name: vm, force: self.dice.once_in(2) }
            }
            18 => self.reset(host),
            19 | 20 => {
                let nic = self.random_nic().filter(|_| self.dice.once_in(2));
                let (host, device) = nic.map_or((host, None), |(host, nic)| (host, Some(nic)));
                Command::Drain { host, device, on: self.dice.once_in(2) }
            }
            21 | 22 => self.move_volume(vol),
            23..=26 => self.plug(vm, vol),
            27 => self.remove_replica(vol),
            28 => self.change_volume(vol),
            29 => self.change_nic(vm),
            30..=32 if self.hosts <= SHARING_HOSTS_MAX => self.share(vm),
            33 => self.stripe(number),
            34 => match self.random_device("") {
                // One that its host has, or that has volumes, is not deleted.
                Some((host, name)) => {
                    Command::DeleteDevice { device: DeviceId { host, name: name.into() }, lose_data: false }
                }
                None => Command::AbortMigration { name: vm },
            },
            _ => match self.random_nic() {
                Some((host, name)) if number.is_multiple_of(2) => {
                    Command::FailBack { device: DeviceId { host, name: name.into() } }
                }
                // As if so much passed through it, where nobody measures; which that is does not matter to what must hold.
                Some((host, name)) => match self.state.filter(|_| self.physical.loads.is_none()) {
                    Some(state) => relieve(state, DeviceId { host, name: name.into() }, 4000 + 500 * number),
                    None => Command::AbortMigration { name: vm },
                },
                None => Command::AbortMigration { name: vm },
            },
        }
    }

    /// A place of a volume is to move: anywhere, or to the other SSD of its host.
    fn move_volume(&mut self, name: String) -> Command {
        let (pick, anywhere) = (self.dice.next(), self.dice.once_in(3));
        let volume = self.state.and_then(|state| state.volume_named(&name));
        let places: Vec<DeviceId> = volume.into_iter().flat_map(Volume::devices).cloned().collect();
        let replaces = Random::new(pick).pick(&places).cloned();
        let other = |from: &DeviceId| {
            let name = if from.name == "ssd0" { "ssd1" } else { "ssd0" };
            DeviceId { host: from.host, name: name.into() }
        };
        let device = replaces.as_ref().filter(|_| !anywhere).map(other);
        Command::AddReplica { name, device, replaces }
    }

    pub(crate) fn create_volume(&mut self, number: u64) -> Command {
        Command::CreateVolume {
            name: format!("vol{number}"),
            size_bytes: self.dice.between(1, 6) * MIB,
            device: None,
            replicas: if self.dice.once_in(3) { 2 } else { 1 },
            minimum_iops: self.minimum_iops(),
            minimum_bytes_per_second: None,
            groups: if self.grouped { self.groups(number) } else { Groups::default() },
        }
    }

    fn stripe(&mut self, number: u64) -> Command {
        Command::CreateStriped {
            name: format!("vol{number}"),
            size_bytes: self.dice.between(1, 6) * MIB,
            columns: 2,
            stripe_bytes: 64 << 10,
            minimum_iops: self.minimum_iops(),
            minimum_bytes_per_second: None,
            groups: if self.grouped { self.groups(number) } else { Groups::default() },
        }
    }

    /// A device comes to an instance, or leaves it; or its VMM says that the guest has let go of one.
    fn plug(&mut self, instance: String, volume: String) -> Command {
        let (comes, nic, force) = (self.dice.once_in(2), self.dice.once_in(2), self.dice.once_in(3));
        if comes {
            let nic = nic.then(|| Box::new(self.nic_wish()));
            let volume = nic.is_none().then_some(volume);
            return Command::AttachDevice { instance, nic, volume };
        }
        let pick = self.dice.next();
        let id = self.state.and_then(|state| Some(state.instance_named(&instance)?.id));
        let leases = self.state.into_iter().flat_map(|state| state.leases.values());
        let leases: Vec<&Lease> = leases.filter(|lease| Some(lease.instance) == id).collect();
        match Random::new(pick).pick(&leases) {
            Some(lease) if lease.leaving => {
                let (device, refused) = (lease.device.clone(), None);
                Command::DeviceAnswered { instance, device, plugged: false, refused }
            }
            Some(lease) => Command::DetachDevice { instance, device: lease.device.clone(), force },
            None => Command::DetachDevice { instance, device: "net0".to_owned(), force },
        }
    }

    /// A volume shall not lie on one of its SSDs any more.
    fn remove_replica(&mut self, name: String) -> Command {
        let pick = self.dice.next();
        let volume = self.state.and_then(|state| state.volume_named(&name));
        let places: Vec<DeviceId> = volume.into_iter().flat_map(Volume::devices).cloned().collect();
        match Random::new(pick).pick(&places) {
            Some(device) => Command::RemoveReplica { name, device: device.clone() },
            None => Command::DeleteVolume { name },
        }
    }

    /// A volume grows, gets another share, or is to be read only.
    fn change_volume(&mut self, name: String) -> Command {
        let size_bytes = self.dice.once_in(2).then(|| self.dice.between(1, 9) * MIB);
        let qos =
            self.dice.once_in(2).then(|| Qos { iops: Some(self.dice.between(1, 9000)), ..Qos::default() });
        let read_only = self.dice.once_in(3).then(|| self.dice.once_in(2));
        Command::ChangeVolume { name, size_bytes, qos, groups: None, read_only }
    }

    fn change_nic(&mut self, instance: String) -> Command {
        let bytes_per_second = Some(self.dice.between(1, 1000) << 20);
        let minimum_bytes_per_second = bytes_per_second.filter(|_| self.dice.once_in(2));
        let limit = RateLimit { bytes_per_second, minimum_bytes_per_second, ..RateLimit::default() };
        let policy =
            NicPolicy { transmit: limit, vlan: self.dice.once_in(2).then_some(7), ..NicPolicy::default() };
        Command::ChangeNic { instance, device: "net0".to_owned(), policy }
    }

    /// The fabric is another one, or an instance gets another share of it, or none.
    fn share(&mut self, instance: String) -> Command {
        match self.dice.below(6) {
            0 => {
                let elements = u8::try_from(self.dice.below(4)).unwrap_or(0);
                let tenant = self.dice.once_in(2);
                Command::SetFabric { fabric: fabric(elements, tenant, self.dice.between(1, 9) << 30) }
            }
            1 => Command::ClearMchannel { instance },
            _ => {
                let weight = u32::try_from(self.dice.between(1, 9)).unwrap_or(1);
                let tenant = if self.dice.once_in(2) { "red" } else { DEFAULT_TENANT }.to_owned();
                let path = vec![format!("link{}", self.dice.below(4))];
                Command::SetMchannel { instance, mchannel: Mchannel { weight, tenant, path } }
            }
        }
    }

    /// The groups of a volume: of eight that follow each other some are to be apart, and some together.
    fn groups(&mut self, number: u64) -> Groups {
        let name = |kind: &str| format!("{kind}{}", number / 8);
        let apart = self.dice.once_in(3).then(|| name("apart"));
        Groups { apart, together: self.dice.once_in(4).then(|| name("together")) }
    }

    /// A volume that is there is to be in other groups.
    fn regroup(&mut self) -> Option<Command> {
        let names: Vec<&String> = {
            let there = self.state?.volumes.values().filter(|volume| !volume.deleted);
            there.map(|volume| &volume.name).collect()
        };
        let name = (*self.dice.pick(&names)?).clone();
        let groups = self.groups(name.trim_start_matches("vol").parse().ok()?);
        Some(Command::ChangeVolume {
            name,
            size_bytes: None,
            qos: None,
            groups: Some(groups),
            read_only: None,
        })
    }

    pub(crate) fn create_instance(&mut self, number: u64, host: HostId) -> Command {
        Command::CreateInstance {
            name: format!("vm{number}"),
            host,
            nics: (0..self.dice.between(1, 3)).map(|_| self.nic_wish()).collect(),
            volumes: if self.dice.once_in(3) { Vec::new() } else { vec![format!("vol{number}")] },
            instance_type: self.known_type(),
            vmm_listens: false,
            ram_bytes: if self.dice.once_in(3) { Some(self.dice.between(1, 3) * 2 * MIB) } else { None },
            priority: u16::try_from(number % 1000).ok().and_then(Priority::new),
        }
    }

    /// An operator says so only of a host that has no power.
    fn reset(&mut self, host: HostId) -> Command {
        let physical = &mut *self.physical;
        if ROLES.iter().any(|role| physical.daemons[&EndpointId::new(host, *role)].alive) {
            return Command::DeleteHost { name: format!("h{}", host.get()) };
        }
        physical.lose_caches(host);
        Command::ResetHost { name: format!("h{}", host.get()) }
    }

    /// VMMs come and go at some devices.
    fn attach(&mut self) {
        let Some(state) = self.state else { return };
        let leases: Vec<_> = state.leases.values().map(|lease| lease.id).collect();
        for _ in 0..3 {
            let Some(lease) = self.dice.pick(&leases).and_then(|id| state.leases.get(id)) else {
                return;
            };
            let frontends: Vec<EndpointId> = state.frontends_of(lease).collect();
            let (connected, running) = (!self.dice.once_in(4), self.dice.once_in(2));
            let lease = lease.id;
            if let Some(frontend) = self.dice.pick(&frontends) {
                self.physical.attach(*frontend, lease, connected, connected && running);
            }
        }
    }
}
