use pod_protocol::objects::{Priority, Qos};
use proptest::prelude::*;

use super::*;
use crate::model::{MIB, check, guest, guest_with_volume, pod_with_ssds, ssd_of};
use crate::{Command, Groups};

const LIMITS: VolumeRelief =
    VolumeRelief { relief: Relief { high_percent: 80, low_percent: 60, moves_max: 4 }, bytes_max: 32 * MIB };

const fn of(iops: u64) -> Rates {
    Rates { iops, bytes_per_second: iops << 12 }
}

/// SSDs that can do 1000 requests per second each, and nobody knows how many bytes.
fn pod(ssds: usize) -> (State, DiskRates) {
    let state = pod_with_ssds(&vec![(Some(1000), None); ssds]);
    let ssds = state.devices.keys().map(|ssd| (ssd.clone(), Rates::default())).collect();
    (state, DiskRates { ssds, leases: BTreeMap::new() })
}

/// A guest's volume on the SSD of a host, which does so much for it.
fn volume(it: &mut (State, DiskRates), name: &str, mib: u64, host: u16, does: Rates) -> VolumeId {
    let lease = guest_with_volume(&mut it.0, name, mib, host, 1).expect("there is room");
    let ssd = it.1.ssds.get_mut(&ssd_of(host)).expect("known");
    *ssd = ssd.plus(does);
    it.1.leases.insert((HostId::new(host), lease), does);
    it.0.volume_named(name).expect("it was made").id
}

fn plan(it: &(State, DiskRates), hot: &[u16]) -> Vec<(String, u16, u16)> {
    plan_with(it, hot, &BTreeSet::new(), LIMITS)
}

fn plan_with(
    (state, measured): &(State, DiskRates),
    hot: &[u16],
    resting: &BTreeSet<VolumeId>,
    limits: VolumeRelief,
) -> Vec<(String, u16, u16)> {
    let hot = hot.iter().map(|host| ssd_of(*host)).collect();
    let moves = state.plan_volume_moves(&hot, measured, resting, limits).into_iter();
    let shown =
        |it: VolumeMove| (state.volumes[&it.volume].name.clone(), it.from.host.get(), it.to.host.get());
    moves.map(shown).collect()
}

fn must(state: &mut State, command: &Command) {
    state.apply(command).unwrap_or_else(|refusal| panic!("{command:?}: {refusal}"));
    check(state);
}

#[test]
fn the_smallest_volume_that_is_enough_moves_to_the_least_loaded_ssd() {
    let mut it = pod(3);
    volume(&mut it, "big", 16, 2, of(500));
    volume(&mut it, "small", 4, 2, of(350));
    volume(&mut it, "tiny", 1, 2, of(100));
    volume(&mut it, "other", 1, 3, of(200));
    assert_eq!(plan(&it, &[2]), [("small".to_owned(), 2, 4)]);
    // Without its largest one, the SSD would do little enough: then there is nothing to plan.
    it.1.ssds.insert(ssd_of(2), of(600));
    assert!(plan(&it, &[2]).is_empty());
}

#[test]
fn of_volumes_that_are_enough_one_of_the_lowest_priority_moves() {
    let mut it = pod(3);
    volume(&mut it, "small", 1, 2, of(400));
    volume(&mut it, "large", 16, 2, of(450));
    // Alone it is not enough.
    volume(&mut it, "little", 1, 2, of(10));
    assert_eq!(plan(&it, &[2]), [("small".to_owned(), 2, 3)]);
    let prioritize = |state: &mut State, volume: &str, priority| {
        let name = state.instance_of_volume(state.volume_named(volume).unwrap().id).unwrap().to_owned();
        must(state, &Command::SetPriority { name, priority: Priority::new(priority).unwrap() });
    };
    prioritize(&mut it.0, "small", 101);
    assert_eq!(plan(&it, &[2]), [("large".to_owned(), 2, 3)]);
    prioritize(&mut it.0, "little", 1);
    assert_eq!(plan(&it, &[2]), [("large".to_owned(), 2, 3)], "it would not help");
}

#[test]
fn where_no_volume_is_enough_the_one_moves_that_relieves_most() {
    let mut it = pod(2);
    volume(&mut it, "a", 16, 2, of(300));
    volume(&mut it, "b", 4, 2, of(200));
    volume(&mut it, "c", 4, 2, of(450));
    volume(&mut it, "d", 4, 2, of(250));
    it.1.ssds.insert(ssd_of(2), of(1200));
    assert_eq!(plan(&it, &[2]), [("c".to_owned(), 2, 3)]);
    // It would be too much for the other one.
    it.1.ssds.insert(ssd_of(3), of(200));
    assert_eq!(plan(&it, &[2]), [("a".to_owned(), 2, 3)]);
}

#[test]
fn bytes_count_as_requests_do() {
    let mut it = pod(0);
    it.0 = pod_with_ssds(&[(Some(1000), Some(10 << 20)), (Some(1000), Some(10 << 20)), (None, None)]);
    it.1.ssds = it.0.devices.keys().map(|ssd| (ssd.clone(), Rates::default())).collect();
    volume(&mut it, "long", 4, 2, Rates { iops: 50, bytes_per_second: 5 << 20 });
    volume(&mut it, "longer", 8, 2, Rates { iops: 50, bytes_per_second: 4 << 20 });
    volume(&mut it, "short", 1, 2, Rates { iops: 400, bytes_per_second: 0 });
    // Of requests it does few enough, and to move them would not help.
    assert_eq!(plan(&it, &[2]), [("long".to_owned(), 2, 3)]);
    // Nobody knows what the third one can do: it is no target, and never does too much.
    it.1.ssds.insert(ssd_of(3), Rates { iops: 0, bytes_per_second: 3 << 20 });
    assert!(plan(&it, &[2]).is_empty());
    volume(&mut it, "somewhere", 1, 4, of(100_000));
    assert!(plan(&it, &[4]).is_empty());
}

#[test]
fn nothing_moves_where_there_is_no_good_place() {
    let hot = || {
        let mut it = pod(2);
        volume(&mut it, "one", 8, 2, of(500));
        volume(&mut it, "two", 8, 2, of(500));
        it
    };
    assert_eq!(plan(&hot(), &[2]), [("one".to_owned(), 2, 3)]);
    // It would do too much.
    let mut it = hot();
    it.1.ssds.insert(ssd_of(3), of(101));
    assert!(plan(&it, &[2]).is_empty());
    // Nothing is known of it.
    let mut it = hot();
    it.1.ssds.remove(&ssd_of(3));
    assert!(plan(&it, &[2]).is_empty());
    // There is no room.
    let mut it = hot();
    volume(&mut it, "full", 60, 3, of(0));
    assert!(plan(&it, &[2]).is_empty());
    // It is to be empty, or does not work.
    let mut it = hot();
    must(&mut it.0, &Command::Drain { host: HostId::new(3), device: None, on: true });
    assert!(plan(&it, &[2]).is_empty());
    let mut it = hot();
    must(&mut it.0, &Command::DeviceFailed { device: ssd_of(3), reason: "broken".to_owned() });
    assert!(plan(&it, &[2]).is_empty());
    // It would not hold what the volumes are sure of.
    let mut it = hot();
    volume(&mut it, "sure", 1, 3, of(0));
    for (name, iops) in [("one", 400), ("two", 400), ("sure", 700)] {
        let qos = Some(Qos { minimum_iops: Some(iops), ..Qos::default() });
        must(
            &mut it.0,
            &Command::ChangeVolume {
                name: name.to_owned(),
                size_bytes: None,
                qos,
                groups: None,
                read_only: None,
            },
        );
    }
    assert!(plan(&it, &[2]).is_empty());
}

#[test]
fn volumes_that_cannot_move_or_shall_not_stay() {
    // It has several places.
    for striped in [false, true] {
        let mut it = pod(3);
        if striped {
            let (name, size_bytes) = ("several".to_owned(), 4 * MIB);
            must(
                &mut it.0,
                &Command::CreateStriped {
                    name,
                    size_bytes,
                    columns: 2,
                    stripe_bytes: 1 << 20,
                    minimum_iops: None,
                    minimum_bytes_per_second: None,
                    groups: Groups::default(),
                },
            );
            must(&mut it.0, &guest("vm", &["several"]));
        } else {
            guest_with_volume(&mut it.0, "several", 4, 2, 2).expect("there is room");
        }
        let volume = it.0.volume_named("several").expect("it was made");
        let lease = it.0.lease_of_volume(volume.id).expect("a guest has it").id;
        let hot = volume.replicas[0].device.clone();
        it.1.leases.insert((hot.host, lease), of(900));
        it.1.ssds.insert(hot.clone(), of(900));
        assert!(plan(&it, &[hot.host.get()]).is_empty());
    }
    // Nobody uses it: its frontend, which would copy it, is missing.
    let mut it = pod(2);
    let id = volume(&mut it, "vol", 4, 2, of(500));
    volume(&mut it, "rest", 33, 2, of(400));
    assert_eq!(plan(&it, &[2]), [("vol".to_owned(), 2, 3)]);
    assert!(plan_with(&it, &[2], &[id].into(), LIMITS).is_empty(), "the large one moved");
    let large = VolumeRelief { bytes_max: 64 * MIB, ..LIMITS };
    assert_eq!(plan_with(&it, &[2], &[id].into(), large), [("rest".to_owned(), 2, 3)]);
    let none = VolumeRelief { relief: Relief { moves_max: 0, ..LIMITS.relief }, ..LIMITS };
    assert!(plan_with(&it, &[2], &BTreeSet::new(), none).is_empty());
    must(&mut it.0, &Command::DeleteInstance { name: "vm-vol".to_owned(), force: true });
    assert!(plan(&it, &[2]).is_empty());
}

#[test]
fn an_ssd_has_one_move_at_a_time() {
    let mut it = pod(4);
    for (name, host) in [("a", 2), ("b", 2), ("c", 3), ("d", 3)] {
        volume(&mut it, name, 4, host, of(if host == 2 { 450 } else { 500 }));
    }
    it.1.ssds.insert(ssd_of(5), of(50));
    // The one that does most comes first, and has the best place; the other one has the next, though the first would do.
    assert_eq!(plan(&it, &[2, 3]), [("c".to_owned(), 3, 4), ("a".to_owned(), 2, 5)]);
    let one = VolumeRelief { relief: Relief { moves_max: 1, ..LIMITS.relief }, ..LIMITS };
    assert_eq!(plan_with(&it, &[2, 3], &BTreeSet::new(), one).len(), 1);
    // While one is copied, its SSD and where it goes are left alone.
    let (device, replaces) = (Some(ssd_of(4)), Some(ssd_of(3)));
    must(&mut it.0, &Command::AddReplica { name: "c".to_owned(), device, replaces });
    assert!(it.0.is_copying(&ssd_of(3)) && it.0.is_copying(&ssd_of(4)) && !it.0.is_copying(&ssd_of(2)));
    assert_eq!(plan(&it, &[2, 3]), [("a".to_owned(), 2, 5)]);
}

proptest! {
    /// Whatever there is: what is planned is not refused, fills no SSD, and no SSD is an end of two moves.
    #[test]
    fn plans_are_sound(
        able in prop::collection::vec(
            (prop::option::weighted(0.8, 200_u64..3000), prop::option::weighted(0.4, 1_u64 << 20..20 << 20)),
            2..6,
        ),
        volumes in prop::collection::vec((1_u64..40, 0_u16..6, 1_u8..4, 0_u64..1500, 0_u64..4 << 20), 1..12),
        hot in prop::collection::btree_set(0_u16..6, 1..6),
        resting in prop::collection::btree_set(0_usize..12, 0..3),
        drained in prop::option::weighted(0.2, 0_u16..6),
        moving in prop::option::weighted(0.4, 0_usize..12),
        moves_max in 1_u32..4,
    ) {
        let mut state = pod_with_ssds(&able);
        let mut measured = DiskRates::default();
        let hosts = u16::try_from(able.len()).expect("few");
        measured.ssds = state.devices.keys().map(|ssd| (ssd.clone(), Rates::default())).collect();
        for (number, (mib, host, replicas, iops, bytes_per_second)) in volumes.iter().enumerate() {
            let (host, does) = (2 + host % hosts, Rates { iops: *iops, bytes_per_second: *bytes_per_second });
            let name = format!("vol{number}");
            let Some(lease) = guest_with_volume(&mut state, &name, *mib, host, *replicas) else { continue };
            for ssd in state.volume_named(&name).expect("it was made").devices() {
                let there = measured.ssds.get_mut(ssd).expect("known");
                *there = there.plus(does);
                measured.leases.insert((ssd.host, lease), does);
            }
        }
        if let Some(host) = drained {
            let _ = state.apply(&Command::Drain { host: HostId::new(2 + host % hosts), device: None, on: true });
        }
        if let Some(volume) = moving.and_then(|number| state.volume_named(&format!("vol{number}"))) {
            let (name, replaces) = (volume.name.clone(), volume.devices().next().cloned());
            let _ = state.apply(&Command::AddReplica { name, device: None, replaces });
        }
        let hot = hot.into_iter().map(|host| ssd_of(2 + host % hosts)).collect();
        let resting = resting.into_iter().filter_map(|number| state.volumes.keys().nth(number).copied()).collect();
        let limits = VolumeRelief { relief: Relief { moves_max, ..LIMITS.relief }, ..LIMITS };
        let plan = state.plan_volume_moves(&hot, &measured, &resting, limits);
        // A copy of the state looks nothing up, and finds the same.
        prop_assert_eq!(&plan, &state.clone().plan_volume_moves(&hot, &measured, &resting, limits));
        prop_assert!(plan.len() <= moves_max as usize);
        let mut ends = BTreeSet::new();
        let mut after = state.clone();
        for it in &plan {
            prop_assert!(ends.insert(&it.from) && ends.insert(&it.to), "an SSD has two moves: {:?}", plan);
            prop_assert!(!state.is_copying(&it.from) && !state.is_copying(&it.to) && hot.contains(&it.from));
            let volume = &state.volumes[&it.volume];
            prop_assert!(volume.replicas.len() == 1 && volume.size_bytes <= limits.bytes_max);
            prop_assert!(!resting.contains(&it.volume));
            let low = state.devices[&it.to].can_do().part(limits.relief.low_percent);
            prop_assert!(low.is_known() && low.has(measured.ssds[&it.to].plus(it.rates)), "{:?} is filled", it);
            let command = Command::AddReplica {
                name: volume.name.clone(),
                device: Some(it.to.clone()),
                replaces: Some(it.from.clone()),
            };
            let done = after.apply(&command);
            prop_assert!(done.is_ok(), "{:?}: {:?}", command, done);
            check(&after);
        }
    }
}

#[test]
fn what_relieves_an_ssd_keeps_groups() {
    let mut it = pod(3);
    let speaks = it.0.speaking(1);
    must(&mut it.0, &speaks);
    let in_group = |it: &mut (State, DiskRates), name: &str, host: u16, does: Rates, groups: Groups| {
        let create = Command::CreateVolume {
            name: name.to_owned(),
            size_bytes: 4 * MIB,
            device: Some(ssd_of(host)),
            replicas: 1,
            minimum_iops: None,
            minimum_bytes_per_second: None,
            groups,
        };
        must(&mut it.0, &create);
        must(&mut it.0, &guest(&format!("vm-{name}"), &[name]));
        let lease = it.0.instance_named(&format!("vm-{name}")).expect("it was made").disks[0];
        let ssd = it.1.ssds.get_mut(&ssd_of(host)).expect("known");
        *ssd = ssd.plus(does);
        it.1.leases.insert((HostId::new(host), lease), does);
    };
    let apart = || Groups { apart: Some("db".to_owned()), together: None };
    in_group(&mut it, "a", 2, of(500), apart());
    in_group(&mut it, "b", 3, of(20), apart());
    in_group(&mut it, "rest", 2, of(450), Groups { apart: None, together: Some("app".to_owned()) });
    in_group(&mut it, "much", 4, of(50), Groups::default());
    assert_eq!(
        plan(&it, &[2]),
        [("a".to_owned(), 2, 4)],
        "not to h3, which does less, and not the other one"
    );
    in_group(&mut it, "c", 4, of(10), apart());
    assert!(plan(&it, &[2]).is_empty(), "there is no host without one of its group");
}

#[test]
fn two_of_a_group_do_not_move_to_one_host_in_one_plan() {
    let mut state = pod_with_ssds(&[(Some(1000), None), (Some(1000), None)]);
    let speaks = state.speaking(1);
    must(&mut state, &speaks);
    // h4 has two SSDs that do nothing.
    let mut devices = vec![crate::model::ssd("ssd0", 64), crate::model::ssd("ssd1", 64)];
    for device in &mut devices {
        if let pod_protocol::reports::DeviceReport::Ssd { iops, bytes_per_second, .. } = device {
            (*iops, *bytes_per_second) = (Some(1000), None);
        }
    }
    let join = Command::Join {
        endpoint: crate::model::endpoint(4, cxl_pool::Role::BlkBackend),
        incarnation: 1,
        join: crate::model::join(4, devices),
    };
    must(&mut state, &join);
    let ssds = state.devices.keys().map(|ssd| (ssd.clone(), Rates::default())).collect();
    let mut it = (state, DiskRates { ssds, leases: BTreeMap::new() });
    for (group, moves) in [(None, 2), (Some("db".to_owned()), 1)] {
        for (name, host) in [("a", 2), ("b", 3)] {
            let name = format!("{name}{moves}");
            let create = Command::CreateVolume {
                name: name.clone(),
                size_bytes: 4 * MIB,
                device: Some(ssd_of(host)),
                replicas: 1,
                minimum_iops: None,
                minimum_bytes_per_second: None,
                groups: Groups { apart: group.clone(), together: None },
            };
            must(&mut it.0, &create);
            must(&mut it.0, &guest(&format!("vm-{name}"), &[&name]));
            let lease = it.0.instance_named(&format!("vm-{name}")).expect("it was made").disks[0];
            it.1.ssds.insert(ssd_of(host), of(900));
            it.1.leases.retain(|(at, _), _| at.get() != host);
            it.1.leases.insert((HostId::new(host), lease), of(500));
        }
        let planned = plan(&it, &[2, 3]);
        assert_eq!(planned.len(), moves, "{planned:?}");
    }
}
