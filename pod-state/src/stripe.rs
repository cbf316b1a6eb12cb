//! Striped volumes: several SSDs do what one cannot.

use pod_api::{ByteSize, EventKind};
use pod_protocol::ids::VolumeId;
use pod_protocol::objects::Qos;
use pod_protocol::volume_table::StripeEntry;

use super::change_volume::check_qos;
use super::rates::Rates;
use super::volume::{check_size, place_bytes};
use super::{Effect, Groups, Refusal, RefusalKind, State, Volume, check_name};

/// The most columns of a volume.
const COLUMNS_MAX: u8 = 4;
/// The least and the most that may lie in one column before the next has its turn.
const STRIPE_BYTES: std::ops::RangeInclusive<u64> = 64 << 10..=16 << 20;

/// A striped volume as somebody wants it.
pub(super) struct StripedWish<'a> {
    pub(super) size_bytes: u64,
    pub(super) columns: u8,
    pub(super) stripe_bytes: u64,
    /// What all of it is to be sure of.
    pub(super) qos: Qos,
    pub(super) groups: &'a Groups,
}

impl State {
    pub(super) fn create_striped(
        &mut self,
        name: &str,
        wanted: &StripedWish<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let StripedWish { size_bytes, columns, stripe_bytes, qos, groups } = *wanted;
        let invalid = |detail: String| Err(Refusal::new(RefusalKind::InvalidValue, detail));
        check_name("a volume", name)?;
        if self.volume_named(name).is_some() {
            let detail = format!("there is a volume named {name:?} already");
            return Err(Refusal::new(RefusalKind::Exists, detail));
        }
        check_size(size_bytes)?;
        if !(2..=COLUMNS_MAX).contains(&columns) {
            return invalid(format!("a striped volume can have 2 to {COLUMNS_MAX} columns, not {columns}"));
        }
        if !STRIPE_BYTES.contains(&stripe_bytes) || !stripe_bytes.is_power_of_two() {
            let (least, most) = (ByteSize::new(*STRIPE_BYTES.start()), ByteSize::new(*STRIPE_BYTES.end()));
            return invalid(format!("stripes can be {least} to {most} long, a power of two"));
        }
        check_qos(&qos)?;
        let share = place_bytes(size_bytes, columns.into(), Some(stripe_bytes));
        let rates = Rates::sure_of(&share_of_column(qos, columns.into()));
        groups.check()?;
        let neighbours = self.neighbours(groups, None);
        let places = self.places((share, rates), None, columns, &neighbours);
        if places.len() < usize::from(columns) {
            let detail = format!(
                "there is no room for {}{} on SSDs of {columns} hosts that are up, in one piece on each: delete volumes, \
                 or ask for less{}",
                ByteSize::new(share),
                rates.as_well(),
                neighbours.as_well(groups)
            );
            return Err(Refusal::new(RefusalKind::NoRoom, detail));
        }
        self.last.volume += 1;
        let id = VolumeId::new(self.last.volume);
        let names: Vec<String> = places.iter().map(|place| self.device_name(&place.device)).collect();
        let message = format!("{} striped over {}", ByteSize::new(size_bytes), names.join(", "));
        effects.push(Effect::event(EventKind::VolumeCreated, name, message));
        let mut volume = Volume::new(id, name.to_owned(), places, size_bytes);
        volume.stripe_bytes = Some(stripe_bytes);
        volume.qos = qos;
        volume.groups.clone_from(groups);
        self.volumes.insert(id, volume);
        Ok(())
    }

    /// What the SSD of a column keeps about the volume.
    pub(super) fn stripe_entry(&self, volume: &Volume, number: u32) -> Option<StripeEntry> {
        let ssds = volume.replicas.iter().map(|column| self.device_name(&column.device)).collect();
        let volume_bytes = volume.size_bytes;
        volume.stripe_bytes.map(|unit_bytes| StripeEntry { unit_bytes, number, ssds, volume_bytes })
    }
}

impl Volume {
    /// How much each of its SSDs lets it do: of a striped volume, each its share.
    pub fn share_of_place(&self) -> Qos {
        let qos = self.qos_while_leased();
        if self.stripe_bytes.is_none() {
            return qos;
        }
        share_of_column(qos, self.columns().into())
    }
}

/// What one of so many columns has of what all of them have.
fn share_of_column(all: Qos, columns: u64) -> Qos {
    let share = |all: Option<u64>| all.map(|all| all.div_ceil(columns.max(1)));
    let Qos { iops, bytes_per_second, burst_ms, minimum_iops, minimum_bytes_per_second } = all;
    Qos {
        iops: share(iops),
        bytes_per_second: share(bytes_per_second),
        burst_ms,
        minimum_iops: share(minimum_iops),
        minimum_bytes_per_second: share(minimum_bytes_per_second),
    }
}

#[cfg(test)]
mod tests {
    use cxl_pool::{HostId, Role};
    use pod_protocol::objects::{Object, Qos};
    use pod_protocol::protocol::Protocol;
    use pod_protocol::reports::DeviceReport;
    use pod_protocol::volume_table::VolumeTable;

    use super::super::model::{MIB, check, devices_of, endpoint, guest, join, options, scrub_all};
    use super::super::{Command, Labels};
    use super::*;

    const UNIT: u64 = 64 << 10;

    fn create(columns: u8, stripe_bytes: u64, mib: u64) -> Command {
        Command::CreateStriped {
            name: "wide".to_owned(),
            size_bytes: mib * MIB,
            columns,
            stripe_bytes,
            minimum_iops: None,
            minimum_bytes_per_second: None,
            groups: Groups::default(),
        }
    }

    /// The same, sure of something.
    fn reserving(name: &str, iops: Option<u64>, bytes: Option<u64>) -> Command {
        Command::CreateStriped {
            name: name.to_owned(),
            size_bytes: MIB,
            columns: 2,
            stripe_bytes: UNIT,
            minimum_iops: iops,
            minimum_bytes_per_second: bytes,
            groups: Groups::default(),
        }
    }

    fn pod() -> State {
        pod_with(None)
    }

    /// A pod whose SSDs keep such tables of what lies on them.
    fn pod_with(kept: Option<&VolumeTable>) -> State {
        let mut state = State::new(options(256));
        for id in
            [endpoint(1, Role::BlkFrontend), endpoint(2, Role::BlkBackend), endpoint(3, Role::BlkBackend)]
        {
            let mut devices = devices_of(id, true);
            for device in &mut devices {
                if let DeviceReport::Ssd { table, .. } = device {
                    *table = kept.cloned();
                }
            }
            let join = join(id.host.get(), devices);
            state.apply(&Command::Join { endpoint: id, incarnation: 1, join }).unwrap();
        }
        state
    }

    #[test]
    fn a_striped_volume_has_a_share_on_each_of_its_hosts() {
        let mut state = pod();
        state.apply(&create(2, UNIT, 9)).unwrap();
        state.apply(&guest("vm", &["wide"])).unwrap();
        for command in scrub_all(&state) {
            state.apply(&command).unwrap();
        }
        let qos = Some(Qos { iops: Some(101), ..Qos::default() });
        state
            .apply(&Command::ChangeVolume {
                name: "wide".to_owned(),
                size_bytes: None,
                qos,
                groups: None,
                read_only: None,
            })
            .unwrap();
        check(&state);
        for host in [2, 3] {
            let objects = state.desired(endpoint(host, Role::BlkBackend));
            let volume = objects.into_values().find_map(|object| match object {
                Object::Volume(volume) => Some(volume),
                _ => None,
            });
            let volume = volume.unwrap();
            assert_eq!((volume.size_bytes, volume.qos.iops), (9 * MIB / 2, Some(51)));
        }
        let objects = state.desired(endpoint(1, Role::BlkFrontend));
        let disk = objects.into_values().find_map(|object| match object {
            Object::Disk(disk) => Some(disk),
            _ => None,
        });
        let disk = disk.unwrap();
        assert_eq!((disk.size_bytes, disk.stripe_bytes, disk.replicas.len()), (9 * MIB, Some(UNIT), 2));
        assert!(!disk.failed);
        // Without one of them there is nothing.
        let device = super::super::DeviceId { host: HostId::new(3), name: "ssd0".into() };
        state.apply(&Command::DeviceFailed { device, reason: "broken".to_owned() }).unwrap();
        check(&state);
        let lease = state.leases.values().next().unwrap();
        assert!(state.is_failed_disk(lease));
    }

    /// Each SSD can do 10000 requests and 30 MiB in a second.
    #[test]
    fn what_it_is_sure_of_is_reserved_on_each_of_its_ssds_from_the_beginning() {
        let mut state = pod();
        let speaking = state.speaking(Protocol::RESERVES_STRIPED);
        state.apply(&speaking).unwrap();
        state.apply(&reserving("wide", Some(15_001), Some(40 * MIB))).unwrap();
        check(&state);
        let wide = state.volume_named("wide").unwrap();
        let kept = (wide.qos.minimum_iops, wide.qos.minimum_bytes_per_second);
        assert_eq!(kept, (Some(15_001), Some(40 * MIB)));
        for place in &wide.replicas {
            let reserved = state.ssd_loads().get(&place.device).unwrap().rates();
            assert_eq!(reserved, Rates { iops: 7501, bytes_per_second: 20 * MIB });
        }
        // What is left is 2499 requests and 10 MiB of each.
        for (refused, kind) in [
            (reserving("more", Some(5000), None), RefusalKind::NoRoom),
            (reserving("more", None, Some(20 * MIB + 1)), RefusalKind::NoRoom),
            (reserving("more", Some(0), None), RefusalKind::InvalidValue),
        ] {
            let before = state.clone();
            let refusal = state.apply(&refused).unwrap_err();
            assert_eq!(refusal.kind, kind, "{refused:?}");
            assert_eq!(state, before);
        }
        let refusal = state.apply(&reserving("more", Some(5000), None)).unwrap_err();
        assert!(refusal.detail.contains("and 2500 requests/s"), "{refusal}");
        state.apply(&reserving("more", Some(4998), Some(20 * MIB))).unwrap();
        check(&state);
    }

    #[test]
    fn controllers_of_the_version_before_are_not_asked_to_reserve_for_it() {
        let mut state = pod();
        for refused in [reserving("wide", Some(1), None), reserving("wide", None, Some(1))] {
            let asked = Box::new(refused.clone());
            let request = Command::Request { key: None, labels: Labels::default(), expected: None, asked };
            for command in [refused, request] {
                let refusal = state.apply(&command).unwrap_err();
                assert_eq!(refusal.kind, RefusalKind::Busy, "{refusal:?}");
                assert_eq!(state.check_spoken(&command).unwrap_err(), refusal);
            }
        }
        // Without it they read what they always did.
        let text = serde_json::to_string(&create(2, UNIT, 9)).unwrap();
        assert!(!text.contains("minimum"), "{text}");
        assert_eq!(serde_json::from_str::<Command>(&text).unwrap(), create(2, UNIT, 9));
        state.apply(&create(2, UNIT, 9)).unwrap();
    }

    #[test]
    fn a_column_cannot_be_taken_away_and_none_is_added() {
        let mut state = pod();
        state.apply(&create(2, UNIT, 9)).unwrap();
        let before = state.volume_named("wide").unwrap().clone();
        let device = before.replicas[0].device.clone();
        for command in [
            Command::RemoveReplica { name: "wide".to_owned(), device },
            Command::AddReplica { name: "wide".to_owned(), device: None, replaces: None },
        ] {
            let refusal = state.apply(&command).unwrap_err();
            assert_eq!(refusal.kind, RefusalKind::InvalidValue, "{refusal:?}");
        }
        assert_eq!(*state.volume_named("wide").unwrap(), before);
    }

    #[test]
    fn a_column_that_is_wiped_later_takes_no_more_room_meanwhile() {
        let mut state = pod_with(Some(&VolumeTable::default()));
        state.apply(&create(2, UNIT, 9)).unwrap();
        let wide = state.volume_named("wide").unwrap().clone();
        let (name, size_bytes) = ("behind".to_owned(), MIB);
        state
            .apply(&Command::CreateVolume {
                name,
                size_bytes,
                device: None,
                replicas: 2,
                minimum_iops: None,
                minimum_bytes_per_second: None,
                groups: Groups::default(),
            })
            .unwrap();
        state.apply(&Command::DeleteVolume { name: "wide".to_owned() }).unwrap();
        let device = wide.replicas[0].device.clone();
        state.apply(&Command::VolumeWiped { device, volume: wide.id }).unwrap();
        let left = &state.volumes[&wide.id];
        assert_eq!((left.replicas.len(), left.place_bytes()), (1, wide.place_bytes()));
        check(&state);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let mut state = pod();
        for (refused, kind) in [
            (create(1, UNIT, 8), RefusalKind::InvalidValue),
            (create(5, UNIT, 8), RefusalKind::InvalidValue),
            (create(2, UNIT / 2, 8), RefusalKind::InvalidValue),
            (create(2, UNIT * 3, 8), RefusalKind::InvalidValue),
            (create(3, UNIT, 8), RefusalKind::NoRoom),
            (create(2, UNIT, 80), RefusalKind::NoRoom),
        ] {
            let before = state.clone();
            assert_eq!(state.apply(&refused).unwrap_err().kind, kind, "{refused:?}");
            assert_eq!(state, before);
        }
        state.apply(&create(2, UNIT, 60)).unwrap();
        let grown = |mib: u64| Command::ChangeVolume {
            name: "wide".to_owned(),
            size_bytes: Some(mib * MIB),
            qos: None,
            groups: None,
            read_only: None,
        };
        assert_eq!(state.apply(&grown(68)).unwrap_err().kind, RefusalKind::NoRoom);
        state.apply(&grown(64)).unwrap();
        let name = "wide".to_owned();
        let more = Command::AddReplica { name, device: None, replaces: None };
        assert_eq!(state.apply(&more).unwrap_err().kind, RefusalKind::InvalidValue);
        check(&state);
    }
}
