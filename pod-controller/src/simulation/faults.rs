//! What goes wrong in a pod, and what is asked of it meanwhile.

use cxl_pool::{EndpointId, HostId, Role};
use pod_protocol::objects::{Object, Priority};
use pod_protocol::reports::{DeviceReport, Report};
use pod_state::model::{MIB, relieve};
use pod_state::{Command, DeviceId, Groups, NicWish, State, Volume};

use super::happening::Happening;
use super::kinds::Kind;
use super::physical::Physical;
use super::random::Random;

pub(crate) const ROLES: [Role; 4] =
    [Role::NetFrontend, Role::NetBackend, Role::BlkFrontend, Role::BlkBackend];
/// How many kinds of faults there are in a pod.
pub(crate) const FAULTS: u64 = 14;

/// A pod to which something is to happen, and the dice that say what.
pub(crate) struct Around<'a> {
    pub(crate) dice: &'a mut Random,
    pub(crate) physical: &'a mut Physical,
    /// What a controller knows, where there is one.
    pub(crate) state: Option<&'a State>,
    pub(crate) hosts: u16,
    /// How many names there are for instances, and as many for volumes.
    pub(crate) names: u64,
    /// Whether volumes are in groups.
    pub(crate) grouped: bool,
}

/// What goes wrong, with whom, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: u64,
    pub(crate) whom: EndpointId,
    pub(crate) away_us: u64,
}

impl Around<'_> {
    pub(crate) fn random_daemon(&mut self) -> EndpointId {
        let host = HostId::new(u16::try_from(self.dice.between(1, u64::from(self.hosts) + 1)).unwrap_or(1));
        let role = *self.dice.pick(&ROLES).unwrap_or(&Role::NetFrontend);
        EndpointId::new(host, role)
    }

    fn random_nic(&mut self) -> Option<(HostId, String)> {
        let host = self.random_daemon().host;
        let names: Vec<String> = {
            let devices = self.physical.devices.get(&host)?;
            devices.keys().filter(|name| name.starts_with("nic")).cloned().collect()
        };
        Some((host, self.dice.pick(&names)?.clone()))
    }

    /// One of so many kinds. Those from [`FAULTS`] on are not a pod's.
    pub(crate) fn draw_fault(&mut self, kinds: u64) -> Fault {
        let whom = self.random_daemon();
        let long = self.dice.once_in(4);
        let away_us = if long { self.dice.below(2_500_000) } else { self.dice.below(150_000) };
        Fault { kind: self.dice.below(kinds), whom, away_us }
    }

    pub(crate) fn fault(&mut self, Fault { kind, whom: id, away_us: away }: Fault) {
        match kind {
            0 | 1 => {
                self.note(Kind::Died, |physical| physical.daemons[&id].alive);
                self.physical.kill(id);
                self.physical.schedule(away, Happening::Starts(id));
            }
            2 => {
                self.note(Kind::Left, |physical| physical.daemons[&id].alive);
                self.physical.kill(id);
                if let Some(daemon) = self.physical.daemons.get_mut(&id) {
                    daemon.left = true;
                }
                self.physical.schedule(away, Happening::Starts(id));
            }
            3 | 4 => self.freeze(id, away),
            // Long enough to be taken for dead, and short enough to act before it looks at its fence.
            5 | 6 => {
                let away = self.dice.between(190_000, 300_000);
                self.freeze(id, away);
            }
            7 => {
                // The power of a host fails.
                let of_host = ROLES.map(|role| EndpointId::new(id.host, role));
                self.note(Kind::PowerFailed, |it| of_host.iter().any(|id| it.daemons[id].alive));
                for role in ROLES {
                    self.physical.kill(EndpointId::new(id.host, role));
                }
                self.physical.lose_caches(id.host);
                for role in ROLES {
                    let start = Happening::Starts(EndpointId::new(id.host, role));
                    self.physical.schedule(300_000 + away, start);
                }
            }
            8..=11 => {
                if let Some((host, nic)) = self.random_nic() {
                    self.note(Kind::LinkDown, |physical| {
                        let device = physical.devices.get(&host).and_then(|devices| devices.get(&nic));
                        matches!(device, Some(DeviceReport::Nic { up: true, .. }))
                    });
                    self.physical.set_link(host, &nic, false);
                    self.physical.schedule(away, Happening::Mended(host, nic));
                }
            }
            12 => {
                if let Some((host, nic)) = self.random_nic()
                    && self.physical.failed.insert((host, nic.clone()))
                {
                    let backend = EndpointId::new(host, Role::NetBackend);
                    self.note(Kind::NicFailed, |physical| physical.is_heard(backend));
                    let reason = "its driver says so".to_owned();
                    self.physical.report(backend, Report::DeviceFailed { device: nic.clone(), reason });
                    self.physical.schedule(away, Happening::Mended(host, nic));
                }
            }
            13 => self.replica_report(),
            _ => {}
        }
    }

    /// Counts a fault that is about to be, if it is going to hit anybody.
    fn note(&mut self, kind: Kind, hits: impl FnOnce(&Physical) -> bool) {
        let happens = hits(self.physical);
        self.physical.seen.faults.note(kind, happens);
    }

    fn freeze(&mut self, id: EndpointId, away_us: u64) {
        self.note(Kind::Froze, |physical| physical.daemons[&id].is_running());
        self.physical.freeze(id, away_us);
    }

    /// A frontend of a mirrored volume says that a replica failed, or is in line again.
    fn replica_report(&mut self) {
        let failed = self.dice.once_in(3);
        let id = EndpointId::new(self.random_daemon().host, Role::BlkFrontend);
        let pick = self.dice.next();
        let daemon = &self.physical.daemons[&id];
        let disks = daemon.objects.values().filter_map(|object| match object {
            Object::Disk(disk) if !disk.replicas.is_empty() && !disk.incoming => Some(disk),
            _ => None,
        });
        let reports: Vec<Report> = disks
            .flat_map(|disk| {
                let places = disk.replicas.iter().chain(&disk.beside);
                places.filter(|it| it.in_sync == failed || it.leaving).map(|place| {
                    let (lease, epoch, replica) = (disk.lease, disk.epoch, place.number);
                    if place.leaving {
                        Report::ReplicaLeft { lease, replica, epoch }
                    } else if failed {
                        Report::ReplicaFailed { lease, replica, epoch, reason: "a write".to_owned() }
                    } else {
                        Report::ReplicaSynced { lease, replica, epoch }
                    }
                })
            })
            .collect();
        if let Some(report) = Random::new(pick).pick(&reports).cloned() {
            self.note(Kind::ReplicaChanged, |physical| physical.is_heard(id));
            self.physical.report(id, report);
        }
    }

    /// A NIC, for which a third reserve something.
    fn nic_wish(&mut self) -> NicWish {
        let reserved_mbps = if self.dice.once_in(3) { 1000 } else { 0 };
        NicWish { reserved_mbps, ..NicWish::default() }
    }

    pub(crate) fn wish(&mut self) -> Command {
        if self.grouped
            && self.dice.once_in(12)
            && let Some(command) = self.regroup()
        {
            return command;
        }
        let number = self.dice.below(self.names);
        let host = self.random_daemon().host;
        let (vm, vol) = (format!("vm{number}"), format!("vol{number}"));
        match self.dice.below(24) {
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
            _ => match self.random_nic() {
                Some((host, name)) if number.is_multiple_of(2) => {
                    Command::FailBack { device: DeviceId { host, name: name.into() } }
                }
                // As if so much passed through it; which that is does not matter to what must hold.
                Some((host, name)) => match self.state {
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
            minimum_iops: None,
            minimum_bytes_per_second: None,
            groups: if self.grouped { self.groups(number) } else { Groups::default() },
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
        Some(Command::ChangeVolume { name, size_bytes: None, qos: None, groups: Some(groups) })
    }

    pub(crate) fn create_instance(&mut self, number: u64, host: HostId) -> Command {
        Command::CreateInstance {
            name: format!("vm{number}"),
            host,
            nics: (0..self.dice.between(1, 3)).map(|_| self.nic_wish()).collect(),
            volumes: if self.dice.once_in(3) { Vec::new() } else { vec![format!("vol{number}")] },
            instance_type: None,
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
