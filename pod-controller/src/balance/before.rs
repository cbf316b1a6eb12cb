//! What controllers before this one have moved: it rests, and counts, as if this one had moved it.

use std::time::{Duration, Instant};

use pod_api::{Event, EventKind};
use pod_protocol::ids::{LeaseId, VolumeId};
use pod_state::{Kind, State};

use super::LoadHistory;

/// What an event says that was moved.
enum Moved {
    /// A lease, unless it is not there any more.
    Lease(Option<LeaseId>),
    /// A volume, unless it is not there any more.
    Volume(Option<VolumeId>),
}

impl Moved {
    /// Of an event that tells of a move.
    fn of(event: &Event, state: &State) -> Option<Self> {
        let (what, way) = event.message.split_once(" moves from ")?;
        let (from, to) = way.split_once(" to ")?;
        // One of both may be gone by now.
        let device = [from, to].into_iter().find_map(|name| state.device_named(name))?;
        Some(match state.devices.get(&device)?.kind {
            Kind::Nic { .. } => {
                let nics = state.instance_named(&event.subject).map(|instance| &instance.nics);
                let mut leases = nics.into_iter().flatten();
                let is_it = |id: &&LeaseId| state.leases.get(id).is_some_and(|lease| lease.device == what);
                Self::Lease(leases.find(is_it).copied())
            }
            Kind::Ssd { .. } => Self::Volume(state.volume_named(what).map(|volume| volume.id)),
        })
    }
}

impl LoadHistory {
    /// What was told before, in that order, when it is `now` and this time of day in ms. Clocks differ: what was told later than now counts
    /// as told now.
    pub fn remember<'a>(
        &mut self,
        told: impl Iterator<Item = &'a Event>,
        state: &State,
        (now, time_ms): (Instant, u64),
    ) {
        for event in told.filter(|event| event.kind == EventKind::Balanced) {
            let age = Duration::from_millis(time_ms.saturating_sub(event.time_ms));
            let Some(at) = now.checked_sub(age) else { continue };
            match Moved::of(event, state) {
                Some(Moved::Lease(lease)) => self.nics.remember(at, lease),
                Some(Moved::Volume(volume)) => self.ssds.remember(at, volume),
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use pod_state::model::{guest_with_volume, pod_with_ssds};

    use super::*;
    use crate::balance::BalancePolicy;

    #[test]
    fn volumes_that_were_moved_rest_and_count_also_if_they_are_gone() {
        let mut state = pod_with_ssds(&[(Some(1000), None); 2]);
        guest_with_volume(&mut state, "one", 4, 2, 1).expect("there is room");
        let volume = state.volume_named("one").expect("it was made").id;
        let event = |kind, message: &str| Event {
            sequence: 0,
            time_ms: 1_000_000,
            kind,
            subject: "vm-one".to_owned(),
            message: message.to_owned(),
        };
        let told = [
            event(EventKind::Balanced, "one moves from h2/ssd0 to h3/ssd0"),
            event(EventKind::Balanced, "two moves from h2/ssd0 to h9/ssd0"),
            event(EventKind::Balanced, "three moves from h8/ssd0 to h9/ssd0"),
            event(EventKind::Balanced, "four is somewhere else"),
            event(EventKind::Migrated, "one moves from h2/ssd0 to h3/ssd0"),
        ];
        let now = Instant::now() + Duration::from_hours(2);
        for (minutes, rests) in [(-10, true), (59, true), (61, false)] {
            let mut history = LoadHistory::new(BalancePolicy::default());
            let time_ms = 1_000_000_u64.saturating_add_signed(minutes * 60_000);
            history.remember(told.iter(), &state, (now, time_ms));
            let (resting, relief) = history.ssds.leeway(now);
            assert_eq!(resting.contains(&volume), rests, "{minutes}");
            assert_eq!(relief.moves_max, if rests { 2 } else { 4 }, "{minutes}");
            assert_eq!(history.nics.leeway(now).1.moves_max, 4);
        }
    }
}
