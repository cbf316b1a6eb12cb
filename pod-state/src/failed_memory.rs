//! Parts of the pool that failed: nobody is given them again, and whoever uses them is made to let go.

use cxl_pool::{Area, EndpointId};
use pod_api::EventKind;
use pod_protocol::ids::{ChannelId, LeaseId, RegionId};

use super::{DeviceId, Effect, Hold, Kind, Purpose, RegionUse, Rings, State};

impl State {
    /// An endpoint met memory that cannot be read. What is known already changes nothing.
    ///
    /// The whole region goes: to flush it, as holders of other regions do before these are given on, would meet the same lines.
    /// Everybody else who has it is fenced, since the next look may end it anyway, at a worse moment: it comes back in another
    /// life, which gets other regions. Guests keep their requests meanwhile, or are told of errors, as after any restart.
    pub(super) fn memory_failed(&mut self, id: EndpointId, areas: &[Area], effects: &mut Vec<Effect>) {
        for area in areas {
            let Some(failed) = self.regions.fail(*area, id) else { continue };
            self.everyone_is_stale();
            let found = format!(
                "{} bytes from byte {} on cannot be read, as {} found",
                area.bytes(),
                area.start_byte().get(),
                self.endpoint_name(id)
            );
            for region in failed {
                self.give_up(region.id);
                let message = format!("{found}: the region is given to nobody any more");
                effects.push(Effect::event(EventKind::MemoryFailed, region.id.to_string(), message));
                // Whoever reads a board is told of another one before it can be made to begin a new life.
                let is_board = matches!(region.purpose, Purpose::Board(_));
                if region.usage == RegionUse::InUse && !is_board {
                    region.holders.iter().filter(|it| **it != id).for_each(|it| self.end(*it, effects));
                }
            }
        }
    }

    /// Nothing refers to the region any more. What it was for gets another one in the next lives of those who had it.
    fn give_up(&mut self, region: RegionId) {
        self.give_up_board(region);
        self.give_up_ram(region);
        let is_it = |hold: Option<Hold>| hold.is_some_and(|hold| hold.region == region);
        let leases = self.leases.values().filter(|it| is_it(it.area)).map(|it| it.id);
        for id in leases.collect::<Vec<LeaseId>>() {
            if let Some(lease) = self.leases.get_mut(&id) {
                lease.area = None;
                lease.generation = lease.generation.next();
            }
        }
        let receives = |kind: &Kind| matches!(kind, Kind::Nic { rx, .. } if is_it(*rx));
        let devices = self.devices.iter().filter(|(_, device)| receives(&device.kind)).map(|it| it.0.clone());
        for id in devices.collect::<Vec<DeviceId>>() {
            if let Some(Kind::Nic { rx, .. }) = self.devices.get_mut(&id).map(|device| &mut device.kind) {
                *rx = None;
            }
        }
        let uses = |rings: &Rings| [rings.to_backend, rings.to_frontend].contains(&region);
        let channels =
            self.channels.values().filter(|it| it.rings.as_ref().is_some_and(uses)).map(|it| it.id);
        for id in channels.collect::<Vec<ChannelId>>() {
            let rings = self.channels.get_mut(&id).and_then(|channel| channel.rings.take());
            for region in rings.iter().flat_map(|rings| [rings.to_backend, rings.to_frontend]) {
                self.regions.retire(region);
            }
        }
    }

    fn end(&mut self, id: EndpointId, effects: &mut Vec<Effect>) {
        if self.life_of(id).is_none() {
            return;
        }
        self.fence(id, "it has memory that failed; started again, it gets other memory", effects);
    }
}

#[cfg(test)]
mod tests {
    use cxl_pool::{HostId, LineCount, LineOffset, Role};

    use super::*;
    use crate::model::{MIB, check, create_instance, devices_of, join, options, scrub_all};
    use crate::{Command, Groups, Lease, NicWish, Region};

    const NET_FRONTEND: EndpointId = EndpointId::new(HostId::new(1), Role::NetFrontend);
    const BLK_FRONTEND: EndpointId = EndpointId::new(HostId::new(1), Role::BlkFrontend);
    const NET_BACKEND: EndpointId = EndpointId::new(HostId::new(2), Role::NetBackend);
    const BLK_BACKEND: EndpointId = EndpointId::new(HostId::new(2), Role::BlkBackend);

    fn must(state: &mut State, command: &Command) -> Vec<Effect> {
        let effects = state.apply(command).unwrap_or_else(|refusal| panic!("{command:?}: {refusal}"));
        check(state);
        effects
    }

    fn join_with(state: &mut State, id: EndpointId, incarnation: u64, failures: &[Area]) -> Vec<Effect> {
        let mut join = join(id.host.get(), devices_of(id, true));
        join.memory_failures = failures.to_vec();
        must(state, &Command::Join { endpoint: id, incarnation, join })
    }

    fn pod_with_vm() -> State {
        let mut state = State::new(options(256));
        for id in [NET_FRONTEND, BLK_FRONTEND, NET_BACKEND, BLK_BACKEND] {
            join_with(&mut state, id, 1, &[]);
        }
        must(
            &mut state,
            &Command::CreateVolume {
                name: "vol0".to_owned(),
                size_bytes: 8 * MIB,
                device: None,
                replicas: 1,
                minimum_iops: None,
                minimum_bytes_per_second: None,
                groups: Groups::default(),
            },
        );
        let create = create_instance("vm", 1, vec![NicWish::default()], &["vol0"]);
        must(&mut state, &create);
        state
    }

    fn disk(state: &State) -> &Lease {
        state.leases.values().find(|lease| lease.volume().is_some()).expect("a disk")
    }

    fn region_of_disk(state: &State) -> Region {
        state.regions.get(disk(state).area.expect("an area").region).expect("a region").clone()
    }

    fn page_in(area: Area) -> Area {
        Area::new(area.start.checked_add(LineCount::new(128)).expect("inside"), LineCount::new(64))
    }

    fn fenced(effects: &[Effect]) -> Vec<EndpointId> {
        effects.iter().filter_map(Effect::fenced).collect()
    }

    #[test]
    fn region_with_failed_memory_is_given_to_nobody_again() {
        let mut state = pod_with_vm();
        let (old, generation) = (region_of_disk(&state), disk(&state).generation);
        let failed = [page_in(old.area)];
        let effects = join_with(&mut state, BLK_FRONTEND, 2, &failed);
        assert_eq!(fenced(&effects), [BLK_BACKEND], "it would read the same lines");
        assert!(effects.iter().any(
            |effect| matches!(effect, Effect::Event { kind: EventKind::MemoryFailed, message, .. } if message.contains("h1/blk-frontend"))
        ));
        assert_eq!(state.regions.get(old.id).expect("kept for good").usage, RegionUse::Failed);
        join_with(&mut state, BLK_BACKEND, 2, &[]);
        let new = region_of_disk(&state);
        assert!(new.id != old.id && !new.area.overlaps(&old.area));
        assert_ne!(disk(&state).generation, generation);
        for id in [BLK_FRONTEND, BLK_BACKEND] {
            assert!(!state.scrubs(id).contains_key(&old.id), "to flush it would meet the failed lines");
        }
        for command in scrub_all(&state) {
            must(&mut state, &command);
        }
        must(&mut state, &Command::DeleteInstance { name: "vm".to_owned(), force: true });
        for command in scrub_all(&state) {
            must(&mut state, &command);
        }
        assert_eq!(state.regions.get(old.id).expect("kept for good").usage, RegionUse::Failed);
    }

    #[test]
    fn what_was_told_before_changes_nothing() {
        let mut state = pod_with_vm();
        let failed = [page_in(region_of_disk(&state).area)];
        join_with(&mut state, BLK_FRONTEND, 2, &failed);
        join_with(&mut state, BLK_BACKEND, 2, &failed);
        let before = (state.regions.clone(), state.leases.clone(), state.channels.clone());
        assert_eq!(join_with(&mut state, BLK_FRONTEND, 2, &failed), Vec::new());
        assert_eq!((state.regions, state.leases, state.channels), before);
    }

    #[test]
    fn failed_rings_and_receive_areas_end_those_who_have_them() {
        let mut state = pod_with_vm();
        for purpose in ["rings", "receive"] {
            let is_wanted = |region: &&Region| match &region.purpose {
                crate::Purpose::Ring(channel) => {
                    purpose == "rings" && state.channels[channel].frontend == NET_FRONTEND
                }
                crate::Purpose::Receive(_) => purpose == "receive" && region.holders.len() > 1,
                _ => false,
            };
            let in_use = state.regions.iter().filter(|region| region.usage == RegionUse::InUse);
            let region = in_use.into_iter().find(is_wanted).expect("one").clone();
            let life = state.endpoints[&NET_FRONTEND].incarnation + 1;
            let effects = join_with(&mut state, NET_FRONTEND, life, &[page_in(region.area)]);
            assert_eq!(fenced(&effects), [NET_BACKEND], "{purpose}");
            let life = state.endpoints[&NET_BACKEND].incarnation + 1;
            join_with(&mut state, NET_BACKEND, life, &[]);
            assert!(!state.desired(NET_FRONTEND).is_empty() && !state.desired(NET_BACKEND).is_empty());
        }
    }

    #[test]
    fn failed_memory_that_is_free_or_not_for_regions_is_not_given_out_either() {
        let mut state = pod_with_vm();
        let gap = *state.regions.gaps().last().expect("room");
        let failed = page_in(gap);
        let fixed = Area::new(LineOffset::new(0), LineCount::new(64));
        let beyond = Area::new(LineOffset::new(u64::MAX - 3), LineCount::new(u64::MAX));
        let effects = join_with(&mut state, BLK_FRONTEND, 2, &[failed, fixed, beyond]);
        assert_eq!(fenced(&effects), []);
        assert!(state.regions.gaps().iter().all(|gap| !gap.overlaps(&failed)));
    }
}
