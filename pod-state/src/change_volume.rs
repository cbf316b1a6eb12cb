use pod_api::{ByteSize, EventKind};
use pod_protocol::ids::VolumeId;
use pod_protocol::objects::Qos;

use super::rates::Rates;
use super::ssd_loads::SsdLoad;
use super::volume::{check_size, place_bytes};
use super::{DeviceId, Effect, Groups, Kind, Refusal, RefusalKind, State, Volume};

/// The longest time for which a volume may save up its share.
const BURST_MS_MAX: u32 = 60_000;

/// What somebody wants changed of a volume; what is absent stays.
pub(super) struct VolumeChange<'a> {
    pub(super) size_bytes: Option<u64>,
    pub(super) qos: Option<Qos>,
    pub(super) groups: Option<&'a Groups>,
    pub(super) read_only: Option<bool>,
}

impl State {
    /// Changes a volume, also while it is in use, but for whether guests only read it. Either all of it or nothing.
    pub(super) fn change_volume(
        &mut self,
        name: &str,
        VolumeChange { size_bytes, qos, groups, read_only }: VolumeChange<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let id = self.volume_named(name).ok_or_else(|| Refusal::not_found("volume", name))?.id;
        if let Some(size_bytes) = size_bytes {
            self.check_growth(id, size_bytes)?;
        }
        if let Some(qos) = &qos {
            check_qos(qos)?;
            if let Some(volume) = self.volumes.get(&id) {
                check_promise(volume, qos)?;
                self.check_rates(volume, qos)?;
            }
        }
        let groups = groups.filter(|groups| self.volumes.get(&id).is_some_and(|it| it.groups != **groups));
        groups.map_or(Ok(()), Groups::check)?;
        let read_only =
            read_only.filter(|it| self.volumes.get(&id).is_some_and(|volume| volume.read_only != *it));
        if read_only.is_some() {
            self.check_unused(id)?;
        }
        if read_only.is_some() {
            self.end_copier_of(id, effects)?;
        }
        let Some(volume) = self.volumes.get_mut(&id) else { return Ok(()) };
        let mut changes = Vec::new();
        if let Some(size_bytes) = size_bytes.filter(|&size| size != volume.size_bytes) {
            volume.size_bytes = size_bytes;
            changes.push(format!("it has {} now", ByteSize::new(size_bytes)));
        }
        if let Some(qos) = qos.filter(|&qos| qos != volume.qos) {
            volume.qos = qos;
            changes.push(shown(&qos));
        }
        if let Some(read_only) = read_only {
            volume.read_only = read_only;
            changes.push(if read_only { "guests only read it" } else { "guests may write to it" }.to_owned());
        }
        if let Some(groups) = groups {
            volume.groups.clone_from(groups);
            changes.push(groups.to_string());
            // What lies otherwise stays: that it is copied is for whoever asked to say.
            self.follow();
            changes.extend(self.volumes.get(&id).into_iter().flat_map(|volume| self.contrary(volume)));
        }
        if !changes.is_empty() {
            effects.push(Effect::event(EventKind::VolumeChanged, name, changes.join("; ")));
        }
        Ok(())
    }

    /// Refuses to change what a guest is told once, when it begins with a disk.
    fn check_unused(&self, id: VolumeId) -> Result<(), Refusal> {
        let Some(lease) = self.lease_of_volume(id).filter(|lease| !self.is_copiers(lease)) else {
            return Ok(());
        };
        let holder = self.instances.get(&lease.instance).map_or("an instance", |it| it.name.as_str());
        let detail = format!(
            "{holder} uses the volume, and a guest is told whether it may write when it begins with a disk: detach it first (podctl \
             instances detach {holder} {})",
            lease.device
        );
        Err(Refusal::new(RefusalKind::Leased, detail))
    }

    /// Has guests write to volumes again that they only read, since not all of the pod knows of such volumes. Whoever uses one goes on only
    /// reading it.
    pub(super) fn forget_protection(&mut self, effects: &mut Vec<Effect>) {
        let protected = self.volumes.values().filter(|it| it.read_only);
        let protected: Vec<VolumeId> = protected.map(|it| it.id).collect();
        for volume in protected {
            let Some(volume) = self.volumes.get_mut(&volume) else { continue };
            volume.read_only = false;
            if !volume.deleted {
                let message = "it is not read only any more, since not all of the pod knows of such volumes";
                effects.push(Effect::event(EventKind::VolumeChanged, volume.name.clone(), message));
            }
        }
    }

    /// Whether the SSDs of a volume can do what it is to be sure of.
    pub(super) fn check_rates(&self, volume: &Volume, qos: &Qos) -> Result<(), Refusal> {
        let Some((ssd, wanted, left)) = self.short_of(volume, qos) else { return Ok(()) };
        let left = Rates {
            iops: left.iops.filter(|_| wanted.iops > 0).unwrap_or(0),
            bytes_per_second: left.bytes_per_second.filter(|_| wanted.bytes_per_second > 0).unwrap_or(0),
        };
        let detail = format!(
            "{} has {left} left for {}, not {wanted}: reserve less, or move the volume (podctl volumes move)",
            self.device_name(ssd),
            volume.name
        );
        Err(Refusal::new(RefusalKind::NoRoom, detail))
    }

    fn check_growth(&self, id: VolumeId, size_bytes: u64) -> Result<(), Refusal> {
        check_size(size_bytes)?;
        let Some(volume) = self.volumes.get(&id) else { return Ok(()) };
        if size_bytes < volume.size_bytes {
            return Err(Refusal::new(
                RefusalKind::InvalidValue,
                format!(
                    "the volume has {} and only ever grows: copy its data to a smaller one instead",
                    ByteSize::new(volume.size_bytes)
                ),
            ));
        }
        if volume.beside.is_some() {
            let detail = format!("a column of {} is moving: wait until it has arrived", volume.name);
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        if self.decides_by_more() {
            self.check_surroundings(volume)?;
        }
        let needed = place_bytes(size_bytes, volume.columns(), volume.stripe_bytes);
        let taken = self.ssd_loads_now();
        for replica in &volume.replicas {
            let others = taken.get(&replica.device).into_iter().flat_map(SsdLoad::extents);
            let behind = |start: &u64| *start > replica.start_bytes;
            let next = others.map(|(start, _)| start).find(behind);
            let device_end = match self.devices.get(&replica.device).map(|device| &device.kind) {
                Some(Kind::Ssd { size_bytes, .. }) => *size_bytes,
                _ => 0,
            };
            let room = next.unwrap_or(device_end).saturating_sub(replica.start_bytes);
            if needed > room {
                return Err(Refusal::new(
                    RefusalKind::NoRoom,
                    format!(
                        "a volume is one piece, and there is room for {} from where this one begins on {}: move it to an SSD with more \
                         room first (podctl volumes move {} --to HOST/SSD)",
                        ByteSize::new(room),
                        self.device_name(&replica.device),
                        volume.name
                    ),
                ));
            }
        }
        Ok(())
    }
}

impl State {
    /// Refuses to have a volume grow into what is not known well enough.
    fn check_surroundings(&self, volume: &Volume) -> Result<(), Refusal> {
        if let Some(left) = volume.former.first() {
            // It is wiped as far as the volume reaches, which would be into its neighbour.
            let detail = format!(
                "what {} has left on {} has yet to be wiped: wait for that, or delete that device if it is gone for good",
                volume.name,
                self.device_name(&left.device)
            );
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        let has_strangers = |device: &&DeviceId| {
            let kind = self.devices.get(*device).map(|device| &device.kind);
            matches!(kind, Some(Kind::Ssd { strangers, .. }) if !strangers.is_empty())
        };
        if let Some(device) = volume.replicas.iter().map(|replica| &replica.device).find(has_strangers) {
            let detail = format!(
                "{} has volumes that nobody has adopted, which may lie where {} would grow: adopt them first (podctl devices adopt)",
                self.device_name(device),
                volume.name
            );
            return Err(Refusal::new(RefusalKind::Busy, detail));
        }
        Ok(())
    }
}

/// Refuses a limit below what the kind of the instance promises that has leased the volume.
fn check_promise(volume: &Volume, qos: &Qos) -> Result<(), Refusal> {
    match (volume.promised_iops, qos.iops) {
        (Some(promised), Some(most)) if promised > most => {
            let detail = format!(
                "the type of the instance that has leased {} promises {promised} requests/s, which is more than iops {most}: allow as \
                 many, or detach the volume first",
                volume.name
            );
            Err(Refusal::new(RefusalKind::InvalidValue, detail))
        }
        _ => Ok(()),
    }
}

pub(super) fn check_qos(qos: &Qos) -> Result<(), Refusal> {
    let invalid = |detail: String| Err(Refusal::new(RefusalKind::InvalidValue, detail));
    let rates = [
        ("iops", qos.iops),
        ("bytes_per_second", qos.bytes_per_second),
        ("minimum_iops", qos.minimum_iops),
        ("minimum_bytes_per_second", qos.minimum_bytes_per_second),
    ];
    for (name, rate) in rates {
        if rate == Some(0) {
            return invalid(format!("{name} must be 1 at least; leave it out for no limit"));
        }
    }
    if qos.burst_ms > BURST_MS_MAX {
        return invalid(format!("burst_ms must be {BURST_MS_MAX} at most"));
    }
    if let (Some(minimum), Some(most)) = (qos.minimum_iops, qos.iops)
        && minimum > most
    {
        return invalid(format!("minimum_iops {minimum} is more than iops {most}"));
    }
    if let (Some(minimum), Some(most)) = (qos.minimum_bytes_per_second, qos.bytes_per_second)
        && minimum > most
    {
        return invalid(format!("minimum_bytes_per_second {minimum} is more than bytes_per_second {most}"));
    }
    Ok(())
}

fn shown(qos: &Qos) -> String {
    let mut parts = Vec::new();
    parts.extend(qos.iops.map(|iops| format!("at most {iops} requests/s")));
    parts.extend(qos.bytes_per_second.map(|bytes| format!("at most {}/s", ByteSize::new(bytes))));
    parts.extend(qos.minimum_iops.map(|iops| format!("{iops} requests/s before others")));
    let minimum_bytes = qos.minimum_bytes_per_second.map(ByteSize::new);
    parts.extend(minimum_bytes.map(|bytes| format!("{bytes}/s before others")));
    if parts.is_empty() { "no limits".to_owned() } else { parts.join(", ") }
}

#[cfg(test)]
mod tests {
    use cxl_pool::Role;
    use pod_protocol::objects::Object;

    use super::super::model::{MIB, check, devices_of, endpoint, guest, join, options};
    use super::super::{Command, Groups};
    use super::*;

    fn change(name: &str, mib: Option<u64>, qos: Option<Qos>) -> Command {
        Command::ChangeVolume {
            name: name.to_owned(),
            size_bytes: mib.map(|mib| mib * MIB),
            qos,
            groups: None,
            read_only: None,
        }
    }

    /// Two volumes side by side on one SSD, the first one in use.
    fn pod() -> State {
        let mut state = State::new(options(256));
        for id in [endpoint(1, Role::BlkFrontend), endpoint(2, Role::BlkBackend)] {
            let join = join(id.host.get(), devices_of(id, true));
            state.apply(&Command::Join { endpoint: id, incarnation: 1, join }).unwrap();
        }
        for (name, mib) in [("a", 8), ("b", 8)] {
            let (name, size_bytes) = (name.to_owned(), mib * MIB);
            state
                .apply(&Command::CreateVolume {
                    name,
                    size_bytes,
                    device: None,
                    replicas: 1,
                    minimum_iops: None,
                    minimum_bytes_per_second: None,
                    groups: Groups::default(),
                })
                .unwrap();
        }
        state.apply(&guest("vm", &["b"])).unwrap();
        check(&state);
        state
    }

    #[test]
    fn a_volume_grows_under_its_guest_as_far_as_there_is_room() {
        let mut state = pod();
        for refused in [change("a", Some(9), None), change("b", Some(7), None), change("b", Some(60), None)] {
            let before = state.clone();
            assert!(state.apply(&refused).is_err(), "{refused:?}");
            assert_eq!(state, before);
        }
        let effects = state.apply(&change("b", Some(32), None)).unwrap();
        assert!(
            matches!(&effects[..], [Effect::Event { kind: EventKind::VolumeChanged, .. }]),
            "{effects:?}"
        );
        check(&state);
        let sizes = [endpoint(1, Role::BlkFrontend), endpoint(2, Role::BlkBackend)].map(|id| {
            state.desired(id).into_values().find_map(|object| match object {
                Object::Disk(disk) => Some(disk.size_bytes),
                Object::Volume(volume) => Some(volume.size_bytes),
                _ => None,
            })
        });
        assert_eq!(sizes, [Some(32 * MIB); 2]);
        // To the size that it has: nothing happens.
        assert_eq!(state.apply(&change("b", Some(32), None)).unwrap(), Vec::new());
    }

    #[test]
    fn a_share_that_makes_no_sense_is_refused() {
        let mut state = pod();
        let good = Qos {
            iops: Some(100),
            minimum_iops: Some(50),
            minimum_bytes_per_second: Some(1 << 20),
            ..Qos::default()
        };
        for bad in [
            Qos { iops: Some(0), ..good },
            Qos { bytes_per_second: Some(0), ..good },
            Qos { minimum_iops: Some(101), ..good },
            Qos { minimum_bytes_per_second: Some(0), ..good },
            Qos { bytes_per_second: Some(100), minimum_bytes_per_second: Some(101), ..good },
            Qos { burst_ms: 60_001, ..good },
        ] {
            assert!(state.apply(&change("b", Some(16), Some(bad))).is_err(), "{bad:?}");
        }
        state.apply(&change("b", None, Some(good))).unwrap();
        let served = state.desired(endpoint(2, Role::BlkBackend)).into_values();
        let served =
            served.filter_map(|object| if let Object::Volume(it) = object { Some(it) } else { None });
        let found: Vec<(u64, Qos)> = served.map(|it| (it.size_bytes, it.qos)).collect();
        assert_eq!(found, [(8 * MIB, good)], "neither half of a refused change was made");
    }
}
