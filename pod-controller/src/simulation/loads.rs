//! What guests have devices do, and what daemons count of it and tell.
//!
//! Whether a guest is busy follows from its lease's number and the time, and changes now and then, so that now and then a device has to do too
//! much. In the end each goes on as it is: whoever moves leases for that comes to an end.

use std::collections::BTreeMap;

use cxl_pool::{EndpointId, Role};
use pod_protocol::ids::LeaseId;
use pod_protocol::objects::{Object, RegistrationState};
use pod_protocol::reports::Report;
use pod_protocol::telemetry::{DeviceTelemetry, LeaseTelemetry, Telemetry};
use pod_state::{DeviceId, DiskRates, Measured, Rates};

use super::daemon::Daemon;
use super::physical::Physical;
use super::random::Random;

/// How often daemons tell what they have counted.
pub(crate) const TOLD_EVERY_US: u64 = 100_000;
/// For how long a guest is busy, or not.
const SPELL_US: u64 = 4_000_000;
/// What passes through a NIC for a guest that is not busy and for one that is, in Mbit/s. Two of these are too much for one NIC.
const MBPS: [u64; 2] = [20, 4500];
/// What such guests have SSDs do in a second. Two that are busy are too much for one SSD.
const IOPS: [u64; 2] = [20, 4500];
/// A copy ends about once in so many times that loads are told.
const COPIED_ONCE_IN: u64 = 3;
const REQUEST_BYTES: u64 = 1024;

/// How rarely guests are busy: once in so many spells.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Busy {
    pub(crate) nics: u64,
    pub(crate) ssds: u64,
}

/// How much grew: bytes of NICs, or requests of SSDs.
type Grown = u64;

/// What a life of a daemon has counted.
#[derive(Debug, Default)]
struct Counted {
    incarnation: u64,
    at_us: u64,
    devices: BTreeMap<String, Grown>,
    leases: BTreeMap<LeaseId, Grown>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Loads {
    seed: u64,
    busy: Busy,
    /// Since when guests go on as they are.
    settled_us: Option<u64>,
    counted: BTreeMap<EndpointId, Counted>,
}

impl Loads {
    pub(crate) fn new(seed: u64, busy: Busy) -> Self {
        Self { seed, busy, settled_us: None, counted: BTreeMap::new() }
    }

    /// From now on guests go on as they are.
    pub(super) fn settle(&mut self, now_us: u64) {
        self.settled_us = Some(now_us);
    }

    /// Since when guests go on as they are, in ms.
    pub(super) fn settled_ms(&self) -> Option<u64> {
        Some(self.settled_us? / 1000)
    }

    fn is_busy(&self, lease: LeaseId, now_us: u64, once_in: u64) -> bool {
        let spell = now_us.min(self.settled_us.unwrap_or(u64::MAX)) / SPELL_US;
        Random::new(self.seed ^ (u64::from(lease.get()) << 32) ^ spell).once_in(once_in)
    }

    /// What a frontend says of copies that are done by now: each is at some time.
    fn copied(&self, daemon: &Daemon, now_us: u64) -> Vec<Report> {
        let disks = daemon.objects.values().filter_map(|object| match object {
            Object::Disk(disk) if !disk.replicas.is_empty() && !disk.incoming => Some(disk),
            _ => None,
        });
        let places =
            disks.flat_map(|disk| disk.replicas.iter().chain(&disk.beside).map(move |it| (disk, it)));
        let done = places.filter_map(|(disk, place)| {
            let (lease, epoch, replica) = (disk.lease, disk.epoch, place.number);
            let report = if place.leaving {
                Report::ReplicaLeft { lease, replica, epoch }
            } else if place.in_sync {
                return None;
            } else {
                Report::ReplicaSynced { lease, replica, epoch }
            };
            let which = (u64::from(lease.get()) << 32) ^ (u64::from(replica) << 24);
            Random::new(self.seed ^ which ^ now_us).once_in(COPIED_ONCE_IN).then_some(report)
        });
        done.collect()
    }

    fn mbps(&self, lease: LeaseId, now_us: u64) -> u64 {
        MBPS[usize::from(self.is_busy(lease, now_us, self.busy.nics))]
    }

    fn iops(&self, lease: LeaseId, now_us: u64) -> u64 {
        IOPS[usize::from(self.is_busy(lease, now_us, self.busy.ssds))]
    }

    /// What a daemon does now that guests have it do: of which of its devices, if any, for which lease, and how much of it in a second.
    fn doing(&self, daemon: &Daemon, now_us: u64) -> Vec<(Option<String>, LeaseId, u64)> {
        let does = |object: &Object| match object {
            Object::Port(it) if !it.incoming => Some((None, it.lease, self.mbps(it.lease, now_us))),
            Object::Registration(it) if it.state == RegistrationState::Active => {
                Some((Some(it.nic.clone()), it.lease, self.mbps(it.lease, now_us)))
            }
            Object::Volume(it) => Some((Some(it.ssd.clone()), it.lease, self.iops(it.lease, now_us))),
            _ => None,
        };
        daemon.objects.values().filter_map(does).collect()
    }

    /// What a daemon tells that has these devices, if it runs.
    fn count(&mut self, daemon: &Daemon, devices: Vec<String>, now_us: u64) -> Option<Telemetry> {
        let doing = self.doing(daemon, now_us);
        let counted = self.counted.entry(daemon.id).or_default();
        if counted.incarnation != daemon.incarnation {
            *counted = Counted { incarnation: daemon.incarnation, at_us: now_us, ..Counted::default() };
        }
        let elapsed_us = now_us - std::mem::replace(&mut counted.at_us, now_us);
        if !daemon.is_running() || !daemon.joined {
            return None;
        }
        let is_net = matches!(daemon.id.role, Role::NetFrontend | Role::NetBackend);
        // A million bits in a second is one in a microsecond.
        let grown = |rate: u64| if is_net { rate * elapsed_us / 8 } else { rate * elapsed_us / 1_000_000 };
        for device in devices {
            counted.devices.entry(device).or_default();
        }
        for (device, lease, rate) in doing {
            if let Some(grows) = device.and_then(|device| counted.devices.get_mut(&device)) {
                *grows += grown(rate);
            }
            *counted.leases.entry(lease).or_default() += grown(rate);
        }
        let (devices, leases) = (counted.devices.iter(), counted.leases.iter());
        let of_device = |(name, grown): (&String, &Grown)| {
            let device = DeviceTelemetry { name: name.clone(), up: true, ..DeviceTelemetry::default() };
            if is_net {
                DeviceTelemetry { tx_bytes: *grown, ..device }
            } else {
                DeviceTelemetry { operations: *grown, read_bytes: grown * REQUEST_BYTES, ..device }
            }
        };
        let of_lease = |(lease, grown): (&LeaseId, &Grown)| {
            let lease = LeaseTelemetry::new(*lease);
            if is_net {
                LeaseTelemetry { tx_bytes: *grown, ..lease }
            } else {
                LeaseTelemetry { reads: *grown, read_bytes: grown * REQUEST_BYTES, ..lease }
            }
        };
        Some(Telemetry {
            devices: devices.map(of_device).collect(),
            leases: leases.map(of_lease).collect(),
            ..Telemetry::default()
        })
    }
}

impl Physical {
    /// Daemons count what guests have had them do since the last time, and tell it.
    pub(crate) fn tell_loads(&mut self) {
        let Some(mut loads) = self.loads.take() else { return };
        let mut told = Vec::new();
        let mut copied = Vec::new();
        for daemon in self.daemons.values() {
            if daemon.id.role == Role::BlkFrontend {
                copied.extend(loads.copied(daemon, self.now_us).into_iter().map(|it| (daemon.id, it)));
                continue;
            }
            let devices = self.devices_of(daemon.id).iter().map(|it| it.name().to_owned()).collect();
            let telemetry = loads.count(daemon, devices, self.now_us);
            told.extend(telemetry.map(|telemetry| (daemon.id, telemetry)));
        }
        self.loads = Some(loads);
        for (id, telemetry) in told {
            self.report(id, Report::Telemetry(telemetry));
        }
        for (id, report) in copied {
            self.report(id, report);
        }
    }

    /// What NICs and SSDs do now, as they would be measured if nothing were late.
    pub(crate) fn true_loads(&self) -> (Measured, DiskRates) {
        let (mut nics, mut ssds) = (Measured::default(), DiskRates::default());
        let Some(loads) = &self.loads else { return (nics, ssds) };
        for daemon in self.daemons.values() {
            let id = |name: &str| DeviceId { host: daemon.id.host, name: name.into() };
            // Those that do nothing are known to do nothing.
            for device in self.devices_of(daemon.id) {
                match daemon.id.role {
                    Role::NetBackend => {
                        nics.nics.insert(id(device.name()), 0);
                    }
                    _ => {
                        ssds.ssds.insert(id(device.name()), Rates::default());
                    }
                }
            }
            for (device, lease, rate) in loads.doing(daemon, self.now_us) {
                let rates = Rates { iops: rate, bytes_per_second: rate * REQUEST_BYTES };
                match (daemon.id.role, device) {
                    (Role::NetBackend, Some(nic)) => *nics.nics.entry(id(&nic)).or_default() += rate,
                    (_, Some(ssd)) => {
                        let there = ssds.ssds.entry(id(&ssd)).or_default();
                        *there = there.plus(rates);
                        let of_lease = ssds.leases.entry((daemon.id.host, lease)).or_default();
                        *of_lease = of_lease.plus(rates);
                    }
                    (_, None) => {
                        nics.leases.insert(lease, rate);
                    }
                }
            }
        }
        (nics, ssds)
    }
}
