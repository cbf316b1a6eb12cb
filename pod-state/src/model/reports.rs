//! What daemons and the balance tell a state.

use std::collections::BTreeSet;

use crate::{Command, DeviceId, Measured, Presence, Relief, State};

/// So much passes through a NIC, by even shares for its leases, and nothing through the others.
pub fn relieve(state: &State, nic: DeviceId, mbps: u64) -> Command {
    let mut measured = Measured::default();
    let nics = state.devices.iter().filter(|(_, device)| device.is_nic());
    measured.nics = nics.map(|(id, _)| (id.clone(), if *id == nic { mbps } else { 0 })).collect();
    let here = || state.leases.values().filter(|lease| lease.active_nic() == Some(&nic));
    let each = mbps / u64::try_from(here().count()).unwrap_or(1).max(1);
    measured.leases = here().map(|lease| (lease.id, each)).collect();
    let relief = Relief { high_percent: 80, low_percent: 60, moves_max: 2 };
    Command::Relieve { nics: [nic].into(), measured, resting: BTreeSet::new(), relief }
}

/// What SSDs say that overwrite what nobody may read any more.
pub fn wipe_all(state: &State) -> Vec<Command> {
    let wiped = state.volumes.values().flat_map(|volume| {
        let deleted = volume.replicas.iter().filter(|_| volume.deleted);
        let places = deleted.chain(&volume.former).map(|place| place.device.clone());
        places.map(|device| Command::VolumeWiped { device, volume: volume.id })
    });
    wiped.collect()
}

/// Every endpoint that is there lets go of what it has to.
pub fn scrub_all(state: &State) -> Vec<Command> {
    let there = state.endpoints.iter().filter(|(_, known)| known.presence == Presence::Joined);
    there
        .flat_map(|(id, known)| {
            state.scrubs(*id).into_keys().map(|region| Command::Scrubbed {
                endpoint: *id,
                incarnation: known.incarnation,
                region,
            })
        })
        .collect()
}
