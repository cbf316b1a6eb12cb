use std::collections::BTreeSet;

use pod_api::EventKind;
use pod_protocol::ids::VolumeId;
use pod_protocol::volume_table::{VolumeEntry, VolumeTable};

use super::ssd_loads::SsdLoad;
use super::{DeviceId, Effect, Kind, Refusal, RefusalKind, Replica, State, Volume};

impl State {
    /// What an SSD should keep about its volumes.
    pub(super) fn volume_table(&self, device: &DeviceId) -> VolumeTable {
        let former = |volume: &'_ Volume| volume.former.iter().find(|it| it.device == *device).cloned();
        let on = self.volumes_near(device).into_iter().filter_map(|volume| {
            let former = former(volume);
            let is_former = former.is_some();
            Some((volume, former.or_else(|| volume.replica_on(device).cloned())?, is_former))
        });
        let mut volumes: Vec<VolumeEntry> = on
            .map(|(volume, replica, is_former)| VolumeEntry {
                id: volume.id,
                name: volume.name.clone(),
                start_bytes: replica.start_bytes,
                size_bytes: volume.place_bytes(),
                deleted: volume.deleted || is_former,
                mirror: self.mirror_entry(volume, replica.number).filter(|_| !is_former),
                stripe: self.stripe_entry(volume, replica.number),
            })
            .collect();
        volumes.sort_by_key(|entry| entry.start_bytes);
        VolumeTable { volumes }
    }

    /// The volumes of a table that this state knows nothing of. Deleted ones are nobody's loss. One that was adopted has the number from before
    /// in a table that was read before its backend could keep the new one.
    pub(super) fn strangers<'a>(&'a self, device: &'a DeviceId, table: &VolumeTable) -> Vec<VolumeEntry> {
        let is_on = |volume: &Volume, entry: &VolumeEntry| {
            let mut places = volume.all_places();
            volume.name == entry.name
                && places.any(|it| it.device == *device && it.start_bytes == entry.start_bytes)
        };
        let is_known =
            |entry: &&VolumeEntry| self.volumes.get(&entry.id).is_some_and(|volume| is_on(volume, entry));
        let living = table.volumes.iter().filter(|entry| !entry.deleted);
        let mut strangers: Vec<VolumeEntry> = living.filter(|entry| !is_known(entry)).cloned().collect();
        if !strangers.is_empty() {
            // Two SSDs may bear the same numbers, each of another controller.
            let adopted = self.volumes_near(device).into_iter().filter_map(|it| Some((it, it.adopted?)));
            let places = |(volume, number): (&'a Volume, VolumeId)| {
                let here = volume.all_places().filter(|it| it.device == *device);
                here.map(move |it| (number, volume.name.as_str(), it.start_bytes))
            };
            let adopted: BTreeSet<(VolumeId, &str, u64)> = adopted.flat_map(places).collect();
            strangers.retain(|it| !adopted.contains(&(it.id, it.name.as_str(), it.start_bytes)));
        }
        strangers
    }

    /// Takes over the volumes that were found on an SSD: of a controller whose state is lost, for example.
    pub(super) fn adopt_volumes(
        &mut self,
        device: &DeviceId,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let name = self.device_name(device);
        let Some(Kind::Ssd { strangers, size_bytes, .. }) = self.devices.get(device).map(|known| &known.kind)
        else {
            return Err(Refusal::not_found("SSD", &name));
        };
        let (strangers, device_bytes) = (strangers.clone(), *size_bytes);
        let taken = self.ssd_loads_now();
        for entry in &strangers {
            let conflict = |what: &str| {
                Err(Refusal::new(RefusalKind::Exists, format!("the volume {} on {name} {what}", entry.name)))
            };
            if self.volume_named(&entry.name).is_some() {
                return conflict("has the name of another one: delete that one first");
            }
            if let Some(stripe) = &entry.stripe {
                return conflict(&format!(
                    "is a share of a striped volume, whose others are on {}: put them together by hand",
                    stripe.ssds.join(", ")
                ));
            }
            if let Some(mirror) = &entry.mirror {
                let others: Vec<&str> = mirror
                    .replicas
                    .iter()
                    .filter(|it| it.number != mirror.number && !it.stale)
                    .map(|it| it.ssd.as_str())
                    .collect();
                // Alone it does not know whether it was left behind since.
                if mirror.is_stale() || !others.is_empty() {
                    return conflict(&format!(
                        "is a replica of a mirror, and what {} holds may be newer: copy from there what is needed, \
                         and clear this one",
                        others.join(", ")
                    ));
                }
            }
            if entry.end_bytes() > device_bytes {
                return conflict("ends beyond the device");
            }
            if taken
                .get(device)
                .into_iter()
                .flat_map(SsdLoad::extents)
                .any(|(start, size)| start < entry.end_bytes() && entry.start_bytes < start + size)
            {
                return conflict("overlaps another one");
            }
        }
        for entry in strangers {
            // Its number may be another one's by now.
            self.last.volume += 1;
            let id = VolumeId::new(self.last.volume);
            let VolumeEntry { name, start_bytes, size_bytes, id: before, .. } = entry;
            effects.push(Effect::event(
                EventKind::VolumeCreated,
                name.clone(),
                "it was found on its SSD and adopted",
            ));
            let replicas = vec![Replica::new(0, device.clone(), start_bytes)];
            let adopted = self.decides_by_more().then_some(before);
            self.volumes.insert(id, Volume { adopted, ..Volume::new(id, name, replicas, size_bytes) });
        }
        if let Some(Kind::Ssd { strangers, .. }) = self.devices.get_mut(device).map(|known| &mut known.kind) {
            strangers.clear();
        }
        Ok(())
    }

    /// Forgets which numbers volumes had that were adopted, since not all of the pod remembers them.
    pub(super) fn forget_adoptions(&mut self) {
        let adopted = self.volumes.values().filter(|it| it.adopted.is_some());
        let adopted: Vec<VolumeId> = adopted.map(|it| it.id).collect();
        for volume in adopted {
            if let Some(volume) = self.volumes.get_mut(&volume) {
                volume.adopted = None;
            }
        }
    }

    /// A deleted volume was wiped: its place is free.
    pub(super) fn volume_wiped(&mut self, device: &DeviceId, id: VolumeId) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        volume.former.retain(|replica| replica.device != *device);
        if volume.deleted {
            volume.replicas.retain(|replica| replica.device != *device);
            if volume.replicas.is_empty() && volume.former.is_empty() {
                self.volumes.remove(&id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use cxl_pool::{EndpointId, HostId, Role};
    use pod_protocol::objects::Object;
    use pod_protocol::protocol::Protocol;
    use pod_protocol::reports::DeviceReport;

    use super::super::model::{MIB, check, endpoint, join, options};
    use super::super::{Command, Groups};
    use super::*;

    fn backend() -> EndpointId {
        endpoint(2, Role::BlkBackend)
    }

    fn device() -> DeviceId {
        DeviceId { host: HostId::new(2), name: "ssd0".into() }
    }

    fn joined(state: &mut State, incarnation: u64, table: VolumeTable) {
        joined_with(state, incarnation, [("ssd0", table)]);
    }

    fn joined_with<const N: usize>(state: &mut State, incarnation: u64, ssds: [(&str, VolumeTable); N]) {
        let report = |(name, table): (&str, VolumeTable)| DeviceReport::Ssd {
            name: name.to_owned(),
            driver: "file".to_owned(),
            size_bytes: 64 * MIB,
            block_bytes: 512,
            discard_granularity_bytes: None,
            table: Some(table),
            reserved_bytes: MIB,
            identity: None,
            iops: None,
            bytes_per_second: None,
        };
        let join = join(2, ssds.map(report).into());
        state.apply(&Command::Join { endpoint: backend(), incarnation, join }).unwrap();
        check(state);
    }

    fn create(state: &mut State, name: &str) -> Result<(), Refusal> {
        let command = Command::CreateVolume {
            name: name.to_owned(),
            size_bytes: 8 * MIB,
            device: Some(device()),
            replicas: 1,
            minimum_iops: None,
            minimum_bytes_per_second: None,
            groups: Groups::default(),
        };
        state.apply(&command).map(|_| check(state))
    }

    fn kept(state: &State) -> Option<VolumeTable> {
        state.desired(backend()).into_values().find_map(|object| match object {
            Object::Table(it) => Some(it.table),
            _ => None,
        })
    }

    #[test]
    fn a_deleted_volume_keeps_its_place_until_it_is_wiped() {
        let mut state = State::new(options(256));
        joined(&mut state, 1, VolumeTable::default());
        create(&mut state, "a").unwrap();
        assert_eq!(
            state.volume_named("a").unwrap().replicas[0].start_bytes,
            MIB,
            "the table's place stays free"
        );
        let id = state.volume_named("a").unwrap().id;
        state.apply(&Command::DeleteVolume { name: "a".to_owned() }).unwrap();
        assert!(kept(&state).unwrap().volumes[0].deleted);
        create(&mut state, "a").unwrap();
        assert_eq!(state.volume_named("a").unwrap().replicas[0].start_bytes, 9 * MIB);
        let wiped = Command::VolumeWiped { device: device(), volume: id };
        state.apply(&wiped).unwrap();
        assert_eq!(kept(&state).unwrap().volumes.len(), 1);
        create(&mut state, "b").unwrap();
        assert_eq!(state.volume_named("b").unwrap().replicas[0].start_bytes, MIB);
        // Said twice, or of a volume that lives.
        state.apply(&wiped).unwrap();
        let living = state.volume_named("b").unwrap().id;
        state.apply(&Command::VolumeWiped { device: device(), volume: living }).unwrap();
        assert_eq!(kept(&state).unwrap().volumes.len(), 2);
    }

    #[test]
    fn a_controller_that_lost_its_state_touches_nothing_until_it_is_told_to_adopt() {
        let mut old = State::new(options(256));
        joined(&mut old, 1, VolumeTable::default());
        create(&mut old, "a").unwrap();
        create(&mut old, "b").unwrap();
        old.apply(&Command::DeleteVolume { name: "a".to_owned() }).unwrap();
        let table = kept(&old).unwrap();
        // Its own backend that comes back has no strangers.
        joined(&mut old, 2, table.clone());
        assert_eq!(kept(&old), Some(table.clone()));

        let mut new = State::new(options(256));
        joined(&mut new, 1, table.clone());
        assert_eq!(kept(&new), None, "the table is not overwritten");
        assert!(create(&mut new, "c").is_err());
        new.apply(&Command::AdoptVolumes { device: device() }).unwrap();
        check(&new);
        let adopted = new.volume_named("b").unwrap();
        assert_eq!((adopted.replicas[0].start_bytes, adopted.size_bytes), (9 * MIB, 8 * MIB));
        let used = |id: VolumeId| table.volumes.iter().any(|entry| entry.id == id);
        assert!(!used(adopted.id), "{} is a number of the table that was found", adopted.id);
        assert_eq!(kept(&new).unwrap().volumes.len(), 1, "what was deleted stays deleted");
        create(&mut new, "c").unwrap();
        let table = kept(&new).unwrap();
        joined(&mut new, 2, table);
        assert_eq!(kept(&new).unwrap().volumes.len(), 2);
    }

    #[test]
    fn a_backend_that_ends_before_it_keeps_what_was_adopted_shows_no_strangers_again() {
        let mut old = State::new(options(256));
        joined(&mut old, 1, VolumeTable::default());
        create(&mut old, "a").unwrap();
        create(&mut old, "b").unwrap();
        let table = kept(&old).unwrap();
        let mut new = State::new(options(256));
        new.options.protocol_minor = Protocol::DECIDES_BY_MORE;
        // Its numbers are others'.
        new.last.volume = 1;
        joined(&mut new, 1, table.clone());
        new.apply(&Command::AdoptVolumes { device: device() }).unwrap();
        let adopted = kept(&new);
        joined(&mut new, 2, table.clone());
        assert_eq!(kept(&new), adopted, "it is told once more what to keep");
        create(&mut new, "c").unwrap();
        // Nor does one that was deleted meanwhile, and is wiped then.
        new.apply(&Command::DeleteVolume { name: "a".to_owned() }).unwrap();
        joined(&mut new, 3, table.clone());
        assert!(kept(&new).unwrap().volumes[0].deleted);
        // Another one of that name elsewhere is none that is known.
        let mut moved = table;
        moved.volumes[1].start_bytes += 16 * MIB;
        joined(&mut new, 4, moved);
        assert_eq!(kept(&new), None);
    }

    /// They were kept by two controllers, each of which counted from one.
    #[test]
    fn ssds_that_bear_the_same_numbers_are_told_apart() {
        let entry = |name: &str| VolumeEntry {
            id: VolumeId::new(1),
            name: name.to_owned(),
            start_bytes: MIB,
            size_bytes: 8 * MIB,
            deleted: false,
            mirror: None,
            stripe: None,
        };
        let found = [("ssd0", "a"), ("ssd1", "b")];
        let found = found.map(|(ssd, volume)| (ssd, VolumeTable { volumes: vec![entry(volume)] }));
        let mut state = State::new(options(256));
        state.options.protocol_minor = Protocol::DECIDES_BY_MORE;
        joined_with(&mut state, 1, found.clone());
        let ssds = found.clone().map(|(ssd, _)| DeviceId { name: ssd.into(), ..device() });
        for device in ssds.clone() {
            state.apply(&Command::AdoptVolumes { device }).unwrap();
        }
        joined_with(&mut state, 2, found);
        let strangers = |ssd: &DeviceId| match &state.devices[ssd].kind {
            Kind::Ssd { strangers, .. } => strangers.len(),
            Kind::Nic { .. } => unreachable!("an SSD"),
        };
        assert_eq!(ssds.each_ref().map(strangers), [0, 0]);
    }

    /// A state from a backup knows less than the SSD: what lies there by now is not what lay there then, whatever it is called.
    #[test]
    fn a_volume_that_took_anothers_name_and_place_is_a_stranger_to_an_older_state() {
        for is_deleted in [false, true] {
            let mut now = State::new(options(256));
            now.options.protocol_minor = Protocol::DECIDES_BY_MORE;
            joined(&mut now, 1, VolumeTable::default());
            create(&mut now, "a").unwrap();
            let id = now.volume_named("a").unwrap().id;
            let mut before = now.clone();
            let delete = Command::DeleteVolume { name: "a".to_owned() };
            now.apply(&delete).unwrap();
            if is_deleted {
                before = now.clone();
            }
            now.apply(&Command::VolumeWiped { device: device(), volume: id }).unwrap();
            create(&mut now, "a").unwrap();
            let table = kept(&now).unwrap();
            assert_eq!(table.volumes[0].start_bytes, MIB, "where the other one lay");
            joined(&mut before, 2, table);
            assert_eq!(kept(&before), None, "it is neither overwritten nor wiped");
        }
    }

    #[test]
    fn a_volume_does_not_grow_over_one_that_nobody_has_adopted() {
        let mut state = State::new(options(256));
        state.options.protocol_minor = Protocol::DECIDES_BY_MORE;
        joined(&mut state, 1, VolumeTable::default());
        create(&mut state, "a").unwrap();
        let mut volumes = state.volume_table(&device()).volumes;
        let stranger = VolumeEntry {
            id: VolumeId::new(77),
            name: "z".to_owned(),
            start_bytes: 32 * MIB,
            size_bytes: 8 * MIB,
            deleted: false,
            mirror: None,
            stripe: None,
        };
        volumes.push(stranger);
        joined(&mut state, 2, VolumeTable { volumes });
        let grow = |mib: u64| Command::ChangeVolume {
            name: "a".to_owned(),
            size_bytes: Some(mib * MIB),
            qos: None,
            groups: None,
            read_only: None,
        };
        assert_eq!(state.apply(&grow(48)).unwrap_err().kind, RefusalKind::Busy);
        state.apply(&Command::AdoptVolumes { device: device() }).unwrap();
        assert_eq!(state.apply(&grow(48)).unwrap_err().kind, RefusalKind::NoRoom, "it is in the way");
        state.apply(&grow(16)).unwrap();
    }

    #[test]
    fn names_that_meet_are_not_mixed_up() {
        let mut state = State::new(options(256));
        let entry = |name: &str, start: u64| VolumeEntry {
            id: VolumeId::new(77),
            name: name.to_owned(),
            start_bytes: start * MIB,
            size_bytes: 8 * MIB,
            deleted: false,
            mirror: None,
            stripe: None,
        };
        joined(&mut state, 1, VolumeTable::default());
        create(&mut state, "a").unwrap();
        for stranger in [entry("a", 32), entry("z", 4), entry("z", 60)] {
            let mut volumes = state.volume_table(&device()).volumes;
            volumes.push(stranger);
            let mut state = state.clone();
            joined(&mut state, 2, VolumeTable { volumes });
            let before = state.clone();
            assert!(state.apply(&Command::AdoptVolumes { device: device() }).is_err());
            assert_eq!(state, before);
        }
    }
}
