//! What goes wrong in a pod, and what is asked of it meanwhile.

use cxl_pool::{EndpointId, HostId, Role};
use pod_protocol::objects::{Object, Priority};
use pod_protocol::reports::Report;
use pod_state::model::{MIB, relieve};
use pod_state::{Command, DeviceId, Groups, NicWish, Volume};

use super::Broken;
use super::pod::{Pod, ROLES};
use super::random::Random;
use super::world::Happening;

impl Pod {
    pub(super) fn random_daemon(&mut self) -> EndpointId {
        let host =
            HostId::new(u16::try_from(self.dice.between(1, u64::from(self.size.hosts) + 1)).unwrap_or(1));
        let role = *self.dice.pick(&ROLES).unwrap_or(&Role::NetFrontend);
        EndpointId::new(host, role)
    }

    fn random_nic(&mut self) -> Option<(HostId, String)> {
        let host = self.random_daemon().host;
        let names: Vec<String> = {
            let devices = self.world().physical.devices.get(&host)?;
            devices.keys().filter(|name| name.starts_with("nic")).cloned().collect()
        };
        Some((host, self.dice.pick(&names)?.clone()))
    }

    pub(super) fn fault(&mut self) {
        let id = self.random_daemon();
        let long = self.dice.once_in(4);
        let away = if long { self.dice.below(2_500_000) } else { self.dice.below(150_000) };
        match self.dice.below(16) {
            0 | 1 => {
                let physical = &mut self.world().physical;
                physical.kill(id);
                physical.schedule(away, Happening::Starts(id));
            }
            2 => {
                let physical = &mut self.world().physical;
                physical.kill(id);
                if let Some(daemon) = physical.daemons.get_mut(&id) {
                    daemon.left = true;
                }
                physical.schedule(away, Happening::Starts(id));
            }
            3 | 4 => self.world().physical.freeze(id, away),
            // Long enough to be taken for dead, and short enough to act before it looks at its fence.
            5 | 6 => {
                let away = self.dice.between(190_000, 300_000);
                self.world().physical.freeze(id, away);
            }
            7 => {
                // The power of a host fails.
                let physical = &mut self.world().physical;
                for role in ROLES {
                    physical.kill(EndpointId::new(id.host, role));
                }
                physical.lose_caches(id.host);
                for role in ROLES {
                    physical.schedule(300_000 + away, Happening::Starts(EndpointId::new(id.host, role)));
                }
            }
            8..=11 => {
                if let Some((host, nic)) = self.random_nic() {
                    let physical = &mut self.world().physical;
                    physical.set_link(host, &nic, false);
                    physical.schedule(away, Happening::Mended(host, nic));
                }
            }
            12 => {
                if let Some((host, nic)) = self.random_nic() {
                    let physical = &mut self.world().physical;
                    if physical.failed.insert((host, nic.clone())) {
                        let backend = EndpointId::new(host, Role::NetBackend);
                        let reason = "its driver says so".to_owned();
                        physical.report(backend, Report::DeviceFailed { device: nic.clone(), reason });
                        physical.schedule(away, Happening::Mended(host, nic));
                    }
                }
            }
            13 => self.replica_report(),
            14 if self.may_crash() && self.dice.once_in(8) => self.crash_controller(),
            15 if self.may_crash() && self.dice.once_in(4) => {
                let after = self.dice.once_in(2);
                if let Some(conductor) = &mut self.conductor {
                    conductor.world.crash_at_commit = Some(after);
                }
            }
            _ => {}
        }
    }

    /// A controller that is broken inside would not survive its own log.
    fn may_crash(&self) -> bool {
        !matches!(self.broken, Some(Broken::KeepsGenerations | Broken::DoesNotWaitForScrubs))
    }

    pub(super) fn mend(&mut self, host: HostId, name: &str) {
        let physical = &mut self.world().physical;
        if physical.failed.remove(&(host, name.to_owned())) {
            let report = physical.devices.get(&host).and_then(|devices| devices.get(name)).cloned();
            if let Some(device) = report {
                physical.report(EndpointId::new(host, Role::NetBackend), Report::DeviceBack { device });
            }
        }
        physical.set_link(host, name, true);
    }

    /// A frontend of a mirrored volume says that a replica failed, or is in line again.
    fn replica_report(&mut self) {
        let failed = self.dice.once_in(3);
        let id = EndpointId::new(self.random_daemon().host, Role::BlkFrontend);
        let pick = self.dice.next();
        let daemon = &self.world().physical.daemons[&id];
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
            self.world().physical.report(id, report);
        }
    }

    /// A NIC, for which a third reserve something.
    fn nic_wish(&mut self) -> NicWish {
        let reserved_mbps = if self.dice.once_in(3) { 1000 } else { 0 };
        NicWish { reserved_mbps, ..NicWish::default() }
    }

    pub(super) fn wish(&mut self) -> Command {
        let number = self.dice.below(self.size.names);
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
                Some((host, name)) => match &self.conductor {
                    Some(it) => relieve(&it.state, DeviceId { host, name: name.into() }, 4000 + 500 * number),
                    None => Command::AbortMigration { name: vm },
                },
                None => Command::AbortMigration { name: vm },
            },
        }
    }

    /// A place of a volume is to move: anywhere, or to the other SSD of its host.
    fn move_volume(&mut self, name: String) -> Command {
        let (pick, anywhere) = (self.dice.next(), self.dice.once_in(3));
        let state = self.conductor.as_ref().map(|it| &it.state);
        let volume = state.and_then(|state| state.volume_named(&name));
        let places: Vec<DeviceId> = volume.into_iter().flat_map(Volume::devices).cloned().collect();
        let replaces = Random::new(pick).pick(&places).cloned();
        let other = |from: &DeviceId| {
            let name = if from.name == "ssd0" { "ssd1" } else { "ssd0" };
            DeviceId { host: from.host, name: name.into() }
        };
        let device = replaces.as_ref().filter(|_| !anywhere).map(other);
        Command::AddReplica { name, device, replaces }
    }

    pub(super) fn create_volume(&mut self, number: u64) -> Command {
        Command::CreateVolume {
            name: format!("vol{number}"),
            size_bytes: self.dice.between(1, 6) * MIB,
            device: None,
            replicas: if self.dice.once_in(3) { 2 } else { 1 },
            minimum_iops: None,
            minimum_bytes_per_second: None,
            groups: Groups::default(),
        }
    }

    pub(super) fn create_instance(&mut self, number: u64, host: HostId) -> Command {
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
        let physical = &mut self.world().physical;
        if ROLES.iter().any(|role| physical.daemons[&EndpointId::new(host, *role)].alive) {
            return Command::DeleteHost { name: format!("h{}", host.get()) };
        }
        physical.lose_caches(host);
        Command::ResetHost { name: format!("h{}", host.get()) }
    }

    /// VMMs come and go at some devices.
    fn attach(&mut self) {
        let Some(conductor) = &mut self.conductor else { return };
        let leases: Vec<_> = conductor.state.leases.values().map(|lease| lease.id).collect();
        for _ in 0..3 {
            let Some(lease) = self.dice.pick(&leases).and_then(|id| conductor.state.leases.get(id)) else {
                return;
            };
            let frontends: Vec<EndpointId> = conductor.state.frontends_of(lease).collect();
            let (connected, running) = (!self.dice.once_in(4), self.dice.once_in(2));
            let lease = lease.id;
            if let Some(frontend) = self.dice.pick(&frontends) {
                conductor.world.physical.attach(*frontend, lease, connected, connected && running);
            }
        }
    }
}
