//! Random commands, and what must hold after each of them whatever they are.

use std::collections::BTreeMap;

use cxl_pool::EndpointId;
use pod_protocol::ids::{LeaseGeneration, PlaceId, PlaceNumber};
use pod_protocol::objects::{Object, ObjectId};
use proptest::prelude::*;

use super::commands::commands;
use super::step::{everybody, step};
use super::{
    Apart, check, check_moved, check_reservations, devices_of, fabric, join, options, scrub_all, wipe_all,
};
use crate::{
    Command, Filling, NIC_LEASES_MAX, Objects, Options, Parts, PlacementPolicy, Purpose, Stale, State,
};

/// What a run left behind goes away: endpoints return, instances and volumes are deleted, everything is let go of.
fn wind_down(state: &mut State) {
    let hosts: Vec<EndpointId> = state.endpoints.keys().copied().collect();
    for id in hosts {
        let incarnation = state.endpoints[&id].incarnation + 1;
        let join = join(id.host.get(), devices_of(id, true));
        state.apply(&Command::Join { endpoint: id, incarnation, join }).expect("a good join");
        check(state);
    }
    let names: Vec<String> = state.instances.values().map(|instance| instance.name.clone()).collect();
    for name in names {
        state.apply(&Command::DeleteInstance { name, force: true }).expect("it exists");
        check(state);
    }
    let there = state.volumes.values().filter(|volume| !volume.deleted);
    let names: Vec<String> = there.map(|volume| volume.name.clone()).collect();
    for name in names {
        state.apply(&Command::DeleteVolume { name }).expect("it exists and is free");
        check(state);
    }
    for command in wipe_all(state) {
        state.apply(&command).expect("never refused");
        check(state);
    }
    state.apply(&Command::SetFabric { fabric: fabric(0, false, 0) }).expect("nobody uses it");
    check(state);
    for command in scrub_all(state) {
        state.apply(&command).expect("never refused");
        check(state);
    }
}

/// Whoever is not stale has to be told nothing else than before, and whoever is, nothing else than of what is.
fn told_all(state: &mut State, objects: &mut BTreeMap<EndpointId, Objects>) {
    let touched = state.take_stale();
    // A copy looks nothing up: it searches all of the pod.
    let copy = state.clone();
    for id in copy.endpoints.keys() {
        let known = objects.entry(*id).or_default();
        let parts = match &touched {
            Stale::Everyone => Parts::All,
            Stale::These(these) => these.get(id).cloned().unwrap_or_default(),
        };
        match parts {
            Parts::All => *known = state.desired(*id),
            Parts::These(parts) => parts.iter().for_each(|part| {
                state.renew(*id, part, known);
            }),
        }
        assert_eq!(*known, copy.desired(*id), "{id} should have other objects, and of that is not stale");
    }
    objects.retain(|id, _| copy.endpoints.contains_key(id));
}

/// What a place is called in a generation of its lease: a request that says so may be under way for long.
type Names = BTreeMap<(EndpointId, PlaceId, LeaseGeneration), String>;

/// In a generation in which a backend serves two places of a lease, no name that it knew becomes another one's.
fn names_stay(names: &mut Names, objects: &BTreeMap<EndpointId, Objects>) {
    let served = objects.iter().flat_map(|(id, objects)| objects.values().map(move |object| (*id, object)));
    let volumes = served.filter_map(|(id, object)| match object {
        Object::Volume(volume) => Some(((id, volume.id(), volume.generation), &volume.ssd)),
        _ => None,
    });
    let now: Names = volumes.map(|(name, ssd)| (name, ssd.clone())).collect();
    for (name @ (id, place, generation), ssd) in &now {
        let second = (*id, PlaceId { place: PlaceNumber::SECOND, ..*place }, *generation);
        let are_two = [&*names, &now].into_iter().any(|it| it.contains_key(&second));
        let before = names.get(name).filter(|_| are_two).unwrap_or(ssd);
        assert_eq!(ssd, before, "{name:?} is another place than before");
    }
    // A volume that left the host altogether may come back to another SSD of it.
    names.retain(|(id, place, _), _| {
        !place.place.is_first()
            || objects.get(id).is_some_and(|it| it.contains_key(&ObjectId::Volume(*place)))
    });
    names.extend(now);
}

fn rounds() -> u32 {
    std::env::var("WADI_ROUNDS").ok().and_then(|rounds| rounds.parse::<u32>().ok()).unwrap_or(1).max(1)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512 * rounds()))]

    #[test]
    fn invariants_hold_after_every_command(
        pool_mib in prop_oneof![Just(24_u64), Just(64), Just(512)],
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let protocol_minor = u16::from(steps.len() % 4 > 0);
        let filling = if steps.len() % 3 == 0 { Filling::Pack } else { Filling::Spread };
        let placement = PlacementPolicy { nics: filling, ssds: filling, ..PlacementPolicy::default() };
        let options = Options { protocol_minor, placement, nic_leases_max: if pool_mib == 64 { 2 } else { NIC_LEASES_MAX }, ..options(pool_mib) };
        let mut state = State::new(options.clone());
        let mut log: Vec<Command> = Vec::new();
        let (mut objects, mut names, mut apart) = (BTreeMap::new(), Names::new(), Apart::default());
        // Half of the pods begin with everybody there, since little comes of what is asked for where nobody is.
        let begin = if steps.len() % 2 == 0 { everybody() } else { Vec::new() };
        for step in begin.iter().chain(&steps) {
            for command in commands(&state, step) {
                let (before, told) = (state.clone(), format!("{command:?}"));
                let kept = serde_json::to_vec(&command).expect("a command is JSON");
                let read = serde_json::from_slice::<Command>(&kept).map_err(|error| error.to_string());
                prop_assert_eq!(read.as_ref(), Ok(&command), "it does not read back from a log");
                // What a command touched is enough to look at.
                let mut whole = state.clone();
                let expected = whole.apply_to_all(&command);
                let index = state.index;
                let outcome = state.carry_out(&command);
                prop_assert!(
                    outcome.as_ref().is_ok_and(|it| it.changed) || State { index, ..state.clone() } == before,
                    "{} counts for nothing and changed something", told
                );
                if outcome.as_ref().is_ok_and(|it| !it.changed) {
                    // It would have been counted.
                    state.index += 1;
                }
                let applied = outcome.map(|it| it.effects);
                prop_assert_eq!(&applied, &expected, "{} does something else where all is looked at", told);
                prop_assert_eq!(&state, &whole, "{} ends otherwise where all is looked at", told);
                if applied.is_ok() {
                    if let Command::CreateInstance { name, .. } = &command {
                        check_reservations(&state, name);
                    }
                    if matches!(command, Command::MigrateNic { .. } | Command::Drain { .. } | Command::Relieve { .. }) {
                        check_moved(&before, &state);
                    }
                    log.push(command);
                } else {
                    prop_assert_eq!(&state, &before, "a refused command changed something");
                }
                check(&state);
                prop_assert_eq!(apart.check(&state), Ok(()), "after {}", told);
                told_all(&mut state, &mut objects);
                names_stay(&mut names, &objects);
            }
        }

        // The log gives the same state again, and so does a snapshot with the rest of the log.
        let mut replayed = State::new(options);
        for (number, command) in log.iter().enumerate() {
            if number == log.len() / 2 {
                let snapshot = serde_json::to_vec(&replayed).expect("a state is JSON");
                replayed = serde_json::from_slice(&snapshot).expect("it reads back");
            }
            replayed.apply(command).expect("it was not refused before");
        }
        prop_assert_eq!(&replayed, &state);

        wind_down(&mut state);
        prop_assert_eq!(state.leases.len() + state.channels.len() + state.volumes.len(), 0);
        prop_assert!(
            state.regions.iter().all(|region| matches!(region.purpose, Purpose::Receive(_))),
            "what is left is not only what NICs receive into: {:?}", state.regions
        );
    }
}
