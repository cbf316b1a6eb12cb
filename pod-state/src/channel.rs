use std::collections::BTreeSet;

use cxl_channel::RingPlacement;
use cxl_pool::{EndpointId, Generation, LineCount, LineOffset, Role};
use pod_protocol::ids::{ChannelId, RegionId};
use pod_protocol::objects::Engine;
use serde::{Deserialize, Serialize};

use super::wanting::Wanting;
use super::{Effect, Lease, LeaseKind, Purpose, State};

/// A pair of rings between a frontend and a backend, shared by all leases that join the two.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channel {
    /// Its number, which stays through restarts of either side.
    pub id: ChannelId,
    /// The frontend.
    pub frontend: EndpointId,
    /// The backend.
    pub backend: EndpointId,
    /// Grows each time the rings are made.
    pub generation: Generation,
    /// The rings, once they were made.
    pub rings: Option<Rings>,
}

/// The rings of one generation of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rings {
    /// From the frontend to the backend.
    pub to_backend: RegionId,
    /// From the backend to the frontend.
    pub to_frontend: RegionId,
    /// How many slots each has.
    pub slots: u32,
    /// The life of the frontend that they were made for.
    pub frontend_incarnation: u64,
    /// The life of the backend that they were made for.
    pub backend_incarnation: u64,
}

impl Channel {
    /// Which messages it carries.
    pub const fn engine(&self) -> Engine {
        match self.frontend.role {
            Role::BlkFrontend => Engine::Blk,
            _ => Engine::Net,
        }
    }
}

impl State {
    /// The channel between two endpoints.
    pub(super) fn channel_between(&self, frontend: EndpointId, backend: EndpointId) -> Option<&Channel> {
        let is_it = |channel: &&Channel| channel.frontend == frontend && channel.backend == backend;
        match self.found().filter(|_| self.channels.is_followed()) {
            Some(found) => self.channels.get(found.channels.get(&frontend)?.get(&backend)?),
            None => self.channels.values().find(is_it),
        }
    }

    /// The pairs of endpoints that a lease joins.
    fn pairs_of(&self, lease: &Lease) -> impl Iterator<Item = (EndpointId, EndpointId)> {
        let backends: Vec<EndpointId> = self.backends_of(lease).collect();
        self.frontends_of(lease)
            .flat_map(move |frontend| backends.clone().into_iter().map(move |it| (frontend, it)))
    }

    /// Ends the channels that no lease needs any more.
    pub(super) fn drop_channels(&mut self) {
        let frontends: Vec<EndpointId> = self.work().flat_map(|work| &work.frontends).copied().collect();
        for frontend in frontends {
            let known = self.found().and_then(|found| found.channels.get(&frontend)).into_iter().flatten();
            let mut unneeded: Vec<(EndpointId, ChannelId)> = known.map(|(it, id)| (*it, *id)).collect();
            let served = self.found().into_iter().flat_map(|found| self.leases_at(found, frontend));
            for backend in served.flat_map(|lease| self.backends_of(lease)) {
                if let Ok(place) = unneeded.binary_search_by_key(&backend, |it| it.0) {
                    unneeded.remove(place);
                    if unneeded.is_empty() {
                        break;
                    }
                }
            }
            for (_, id) in unneeded {
                let rings = self.channels.remove(&id).and_then(|channel| channel.rings);
                for region in rings.iter().flat_map(|rings| [rings.to_backend, rings.to_frontend]) {
                    self.regions.retire(region);
                }
            }
        }
    }

    /// Makes the channels that leases need. Returns the new ones.
    pub(super) fn add_channels(&mut self) -> BTreeSet<ChannelId> {
        let known = |(frontend, backend): &(EndpointId, EndpointId)| {
            let channels = self.found().and_then(|found| found.channels.get(frontend));
            channels.is_some_and(|channels| channels.contains_key(backend))
        };
        let needed = self.touched().flat_map(|lease| self.pairs_of(lease));
        let new: BTreeSet<(EndpointId, EndpointId)> = needed.filter(|pair| !known(pair)).collect();
        let mut made = BTreeSet::new();
        for (frontend, backend) in new {
            self.last.channel += 1;
            let id = ChannelId::new(self.last.channel);
            let generation = Generation::default();
            self.channels.insert(id, Channel { id, frontend, backend, generation, rings: None });
            made.insert(id);
        }
        made
    }

    /// The channels of the disks that were touched: what was flushed since may let them have rings.
    fn channels_of_touched(&self) -> impl Iterator<Item = ChannelId> {
        let disks = self.touched().filter(|lease| lease.volume().is_some());
        let served = disks.flat_map(|lease| self.pairs_of(lease));
        let served =
            served.filter_map(|(frontend, backend)| Some(self.channel_between(frontend, backend)?.id));
        let left = self.work().flat_map(|work| &work.frontends).filter(|id| id.role == Role::BlkFrontend);
        let left = left.filter_map(|id| self.found()?.channels.get(id)).flat_map(|it| it.values().copied());
        served.chain(left)
    }

    /// Makes rings for each pair of lives. Until then the side that lives on keeps the old ones: it loses nothing by
    /// waiting, and resubmits when the new ones come.
    ///
    /// `new` are channels that nobody needed before this was settled. Returns the channels that have new rings.
    pub(super) fn make_rings(
        &mut self,
        new: &BTreeSet<ChannelId>,
        wanting: &mut Wanting,
        effects: &mut Vec<Effect>,
    ) -> Vec<ChannelId> {
        let mut made = Vec::new();
        let touched = self.work().flat_map(|work| &work.channels).copied();
        let ids: BTreeSet<ChannelId> = touched.chain(self.channels_of_touched()).collect();
        for id in ids {
            let Some(channel) = self.channels.get(&id) else { continue };
            let (Some(frontend_incarnation), Some(backend_incarnation)) =
                (self.life_of(channel.frontend), self.life_of(channel.backend))
            else {
                continue;
            };
            let current = channel.rings.is_some_and(|rings| {
                rings.frontend_incarnation == frontend_incarnation
                    && rings.backend_incarnation == backend_incarnation
            });
            if current || self.is_unclean(channel, new.contains(&id)) {
                continue;
            }
            let (frontend, backend, engine) = (channel.frontend, channel.backend, channel.engine());
            let lines = self.options.ring_lines(engine);
            let Some((to_backend, first)) = self.make_ring(id, lines, frontend, backend) else {
                wanting.channels.insert(id);
                continue;
            };
            let Some((to_frontend, second)) = self.make_ring(id, lines, backend, frontend) else {
                self.regions.withdraw(to_backend);
                wanting.channels.insert(id);
                continue;
            };
            let slots = self.options.slots(engine);
            effects.extend([first, second].map(|start| Effect::Clear(RingPlacement { start, slots })));
            let rings = Rings { to_backend, to_frontend, slots, frontend_incarnation, backend_incarnation };
            let Some(channel) = self.channels.get_mut_aside(&id) else { continue };
            channel.generation = channel.generation.next();
            if let Some(old) = channel.rings.replace(rings) {
                self.regions.retire(old.to_backend);
                self.regions.retire(old.to_frontend);
            }
            made.push(id);
        }
        made
    }

    /// Takes the place of a ring, given to both sides. Returns where it begins.
    fn make_ring(
        &mut self,
        id: ChannelId,
        lines: LineCount,
        writer: EndpointId,
        reader: EndpointId,
    ) -> Option<(RegionId, LineOffset)> {
        let region = self.regions.allocate(lines, Purpose::Ring(id), writer)?;
        region.holders.insert(reader);
        Some((region.id, region.area.start))
    }

    /// Whether a storage backend has yet to flush what it would share with a frontend over their channel. A new channel is needed by
    /// leases that were touched alone: had another one needed it, it would have been there.
    fn is_unclean(&self, channel: &Channel, new: bool) -> bool {
        if channel.frontend.role != Role::BlkFrontend {
            return false;
        }
        let all = || self.leases_served_by(channel.frontend).into_iter();
        if !new {
            return all().any(|lease| self.is_unclean_for(lease, channel));
        }
        let unclean = self.touched().any(|lease| self.is_unclean_for(lease, channel));
        debug_assert_eq!(unclean, all().any(|lease| self.is_unclean_for(lease, channel)), "{channel:?}");
        unclean
    }

    /// Whether that is so of what one lease shares.
    fn is_unclean_for(&self, lease: &Lease, channel: &Channel) -> bool {
        let Channel { frontend, backend, .. } = *channel;
        let LeaseKind::Disk { clean_for, .. } = &lease.kind else { return false };
        if lease.area.is_none()
            || self.frontend_of(lease) != Some(frontend)
            || !self.backends_of(lease).any(|it| it == backend)
        {
            return false;
        }
        let life = self.life_of(backend);
        life.is_none_or(|life| clean_for.get(&backend.host) != Some(&life))
            || self.unclean_ram(lease, backend).is_some()
    }
}
