//! Instances whose guest has its RAM in the pool, where the engines find it without a copy.
//!
//! The region is the instance's. Unlike the areas of its leases it is not made anew for each life of a frontend: the guest
//! goes on while daemons are started again. What a storage backend left of it in its host's cache must not land on what the
//! guest has there by then, so each life of a backend flushes it before it serves the guest again.

use std::collections::BTreeMap;

use cxl_pool::{Area, EndpointId, HostId, LineCount};
use pod_api::ByteSize;
use pod_protocol::ids::{InstanceId, RegionId};
use serde::{Deserialize, Serialize};

use super::create::Wanted;
use super::wanting::Wanting;
use super::{Instance, Lease, Purpose, Refusal, RefusalKind, State};

/// A VMM maps it by huge pages.
const UNIT_BYTES: u64 = 2 << 20;

/// The part of the pool that is the RAM of an instance's guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestRam {
    /// How much there is.
    pub lines: LineCount,
    /// Where it lies; nothing while there is no room.
    pub region: Option<RegionId>,
    /// Where the guest gets its RAM on the host to which it moves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incoming: Option<RegionId>,
    /// The life of the storage backend of each host that has flushed it, or got it fresh.
    #[serde(with = "super::pairs")]
    pub clean_for: BTreeMap<HostId, u64>,
}

impl GuestRam {
    pub(super) const fn new(lines: LineCount) -> Self {
        Self { lines, region: None, incoming: None, clean_for: BTreeMap::new() }
    }

    /// All that it takes of the pool now.
    pub(super) fn regions(&self) -> impl Iterator<Item = RegionId> {
        self.region.into_iter().chain(self.incoming)
    }
}

impl State {
    /// Whether an instance can have so much.
    pub(super) fn check_ram(&self, wanted: &Wanted<'_>, devices: usize) -> Result<(), Refusal> {
        let Some(bytes) = wanted.ram_bytes else { return Ok(()) };
        let invalid = |detail: String| Err(Refusal::new(RefusalKind::InvalidValue, detail));
        if !self.options.placement.guest_ram {
            return invalid(
                "this pod keeps guests' RAM out of the pool: leave it out, or allow it with `guest-ram = true` in the \
                 controller's configuration"
                    .to_owned(),
            );
        }
        if bytes == 0 || !bytes.is_multiple_of(UNIT_BYTES) {
            return invalid(format!(
                "{bytes} bytes of RAM are not a multiple of {}: ask for whole MiB, an even number of them",
                ByteSize::new(UNIT_BYTES)
            ));
        }
        if devices == 0 {
            return invalid(
                "RAM in the pool is of use to NICs and disks only: ask for one as well".to_owned(),
            );
        }
        Ok(())
    }

    /// Takes what instances want for their guests, here and where they move to.
    pub(super) fn make_guest_rams(&mut self, wanting: &mut Wanting) {
        let touched = self.work().flat_map(|work| &work.instances).filter_map(|id| self.instances.get(id));
        let ids: Vec<InstanceId> = touched.filter(|it| it.ram.is_some()).map(|it| it.id).collect();
        for id in ids {
            let Some(instance) = self.instances.get(&id) else { continue };
            let Some(ram) = &instance.ram else { continue };
            let lines = ram.lines;
            let here = if ram.region.is_none() { self.frontend_at(instance, instance.host) } else { None };
            let to = instance.incoming.filter(|_| ram.incoming.is_none());
            let there = to.and_then(|to| self.frontend_at(instance, to));
            let clean_for = if here.is_some() { self.lives_of_backends(id) } else { BTreeMap::new() };
            let mut take = |frontend: EndpointId| {
                let region = self.regions.allocate(lines, Purpose::Ram(id), frontend);
                if region.is_none() {
                    wanting.instances.insert(id);
                }
                region.map(|region| region.id)
            };
            let (region, incoming) = (here.and_then(&mut take), there.and_then(&mut take));
            let Some(ram) = self.instances.get_mut(&id).and_then(|it| it.ram.as_mut()) else { continue };
            if region.is_some() {
                (ram.region, ram.clean_for) = (region, clean_for);
            }
            ram.incoming = ram.incoming.or(incoming);
        }
    }

    /// One of the frontends that serve an instance on a host, if it is there.
    fn frontend_at(&self, instance: &Instance, host: HostId) -> Option<EndpointId> {
        let roles = self.leases_of(instance).map(|lease| lease.kind.frontend_role());
        let mut frontends = roles.map(|role| EndpointId::new(host, role));
        frontends.find(|frontend| self.life_of(*frontend).is_some())
    }

    /// The leases of an instance, NICs first.
    pub(super) fn leases_of(&self, instance: &Instance) -> impl Iterator<Item = &Lease> {
        instance.nics.iter().chain(&instance.disks).filter_map(|lease| self.leases.get(lease))
    }

    /// The storage backends of an instance that are there: fresh RAM is in none of their caches.
    pub(super) fn lives_of_backends(&self, id: InstanceId) -> BTreeMap<HostId, u64> {
        let leases = self.instances.get(&id).into_iter().flat_map(|instance| self.leases_of(instance));
        let disks = leases.filter(|lease| lease.volume().is_some());
        let backends = disks.flat_map(|lease| self.backends_of(lease));
        backends.filter_map(|backend| Some((backend.host, self.life_of(backend)?))).collect()
    }

    /// Where the guest of a lease has its RAM, if that is in the pool.
    pub(super) fn ram_of(&self, lease: &Lease) -> Option<Area> {
        self.area(self.instances.get(&lease.instance)?.ram.as_ref()?.region?)
    }

    /// Where it has its RAM on the host to which it moves.
    pub(super) fn incoming_ram_of(&self, lease: &Lease) -> Option<Area> {
        self.area(self.instances.get(&lease.instance)?.ram.as_ref()?.incoming?)
    }

    /// The RAM of a lease's guest, if this life of a storage backend has yet to flush it before it serves the lease.
    pub(super) fn unclean_ram(&self, lease: &Lease, backend: EndpointId) -> Option<(RegionId, Area)> {
        let ram = self.instances.get(&lease.instance)?.ram.as_ref()?;
        let region = ram.region?;
        let life = self.life_of(backend);
        if life.is_some() && ram.clean_for.get(&backend.host).copied() == life {
            return None;
        }
        Some((region, self.area(region)?))
    }

    /// A storage backend has flushed the RAM of an instance's guest.
    pub(super) fn ram_flushed(&mut self, id: InstanceId, region: RegionId, backend: (HostId, u64)) {
        if let Some(ram) = self.instances.get_mut(&id).and_then(|it| it.ram.as_mut())
            && ram.region == Some(region)
        {
            ram.clean_for.insert(backend.0, backend.1);
        }
    }

    /// The guest runs on the other host, in the RAM that it has there.
    pub(super) fn hand_over_ram(&mut self, id: InstanceId) {
        let lives = self.lives_of_backends(id);
        let Some(ram) = self.instances.get_mut(&id).and_then(|it| it.ram.as_mut()) else { return };
        let Some(new) = ram.incoming.take() else { return };
        ram.clean_for = lives;
        if let Some(old) = ram.region.replace(new) {
            self.regions.retire(old);
        }
    }

    /// Nothing refers to the region any more. Its guest is not served any longer: it gets other RAM when it is started again.
    pub(super) fn give_up_ram(&mut self, region: RegionId) {
        let lies_there =
            |it: &Instance| it.ram.as_ref().is_some_and(|ram| ram.regions().any(|it| it == region));
        let users: Vec<InstanceId> =
            self.instances.values().filter(|it| lies_there(it)).map(|it| it.id).collect();
        for id in users {
            let Some(ram) = self.instances.get_mut(&id).and_then(|it| it.ram.as_mut()) else { continue };
            ram.incoming.take_if(|it| *it == region);
            if ram.region.take_if(|it| *it == region).is_none() {
                continue;
            }
            for lease in self.lease_ids_of(id) {
                if let Some(lease) = self.leases.get_mut(&lease) {
                    lease.generation = lease.generation.next();
                }
            }
        }
    }

    /// Whether everything that was asked for is there, on the host where the guest runs or on the one to which it moves.
    pub(super) fn check_ram_made(&self, id: InstanceId, incoming: bool) -> Result<(), Refusal> {
        let ram = self.instances.get(&id).and_then(|it| it.ram.as_ref());
        let Some(ram) = ram.filter(|it| if incoming { it.incoming } else { it.region }.is_none()) else {
            return Ok(());
        };
        let another = if incoming { "another " } else { "" };
        Err(self.no_room(&format!("{another}{} of RAM in one piece", ByteSize::new(ram.lines.bytes()))))
    }

    /// The pool that it lay in is gone.
    pub(super) fn forget_rams(&mut self) {
        for ram in self.instances.values_mut().filter_map(|it| it.ram.as_mut()) {
            *ram = GuestRam::new(ram.lines);
        }
    }
}
