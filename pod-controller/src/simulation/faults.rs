//! What goes wrong in a pod.

use cxl_pool::{Area, EndpointId, HostId, LineOffset, Role};
use pod_protocol::objects::Object;
use pod_protocol::reports::{DeviceReport, Report};
use pod_state::State;

use super::daemon::areas_of;
use super::happening::Happening;
use super::kinds::Kind;
use super::physical::Physical;
use super::random::Random;

pub(crate) const ROLES: [Role; 4] =
    [Role::NetFrontend, Role::NetBackend, Role::BlkFrontend, Role::BlkBackend];
/// How many kinds of faults there are in a pod.
pub(crate) const FAULTS: u64 = 17;
/// One more, where memory of the pool fails. The two between are of the controller.
pub(crate) const MEMORY: u64 = FAULTS + 2;

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

    pub(super) fn random_nic(&mut self) -> Option<(HostId, String)> {
        self.random_device("nic")
    }

    /// A device whose name begins so.
    pub(super) fn random_device(&mut self, kind: &str) -> Option<(HostId, String)> {
        let host = self.random_daemon().host;
        let names: Vec<String> = {
            let devices = self.physical.devices.get(&host)?;
            devices.keys().filter(|name| name.starts_with(kind)).cloned().collect()
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
            8..=10 => {
                if let Some((host, nic)) = self.random_nic() {
                    self.note(Kind::LinkDown, |physical| {
                        let device = physical.devices.get(&host).and_then(|devices| devices.get(&nic));
                        matches!(device, Some(DeviceReport::Nic { up: true, .. }))
                    });
                    self.physical.set_link(host, &nic, false);
                    self.physical.schedule(away, Happening::Mended(host, nic));
                }
            }
            11 | 12 => self.fail_device("nic", Kind::NicFailed, away),
            13 => self.replica_report(),
            14 | 15 => self.fail_device("ssd", Kind::SsdFailed, away),
            16 => {
                // It is not there when its backend is started next.
                if let Some((host, device)) = self.random_device("")
                    && let Some(backend) = self.physical.backend_of(host, &device)
                    && self.physical.lacking.insert((host, device.clone()))
                {
                    self.note(Kind::DeviceLacking, |physical| physical.daemons[&backend].alive);
                    self.physical.kill(backend);
                    self.physical.schedule(0, Happening::Starts(backend));
                    self.physical.schedule(away, Happening::Mended(host, device));
                }
            }
            MEMORY => self.fail_memory(id, away),
            _ => {}
        }
    }

    /// A line of what a daemon uses cannot be read any more: it notes that, and ends.
    fn fail_memory(&mut self, id: EndpointId, away_us: u64) {
        let daemon = &self.physical.daemons[&id];
        let areas: Vec<Area> = daemon.objects.values().flat_map(areas_of).collect();
        let meets = daemon.is_running() && self.physical.memory.may_fail();
        let Some(area) = self.dice.pick(&areas).copied().filter(|_| meets) else { return };
        let line = LineOffset::new(area.start.get() + self.dice.below(area.lines.get()));
        self.note(Kind::MemoryFailed, |_| true);
        self.physical.memory.note(id, line);
        self.physical.kill(id);
        self.physical.schedule(away_us, Happening::Starts(id));
    }

    /// The driver of a device whose name begins so says that it does not work, until it is opened again.
    fn fail_device(&mut self, kind: &str, counts_as: Kind, away_us: u64) {
        if let Some((host, device)) = self.random_device(kind)
            && let Some(backend) = self.physical.backend_of(host, &device)
            && self.physical.failed.insert((host, device.clone()))
        {
            self.note(counts_as, |physical| physical.is_heard(backend));
            let reason = "its driver says so".to_owned();
            self.physical.report(backend, Report::DeviceFailed { device: device.clone(), reason });
            self.physical.schedule(away_us, Happening::Mended(host, device));
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
}
