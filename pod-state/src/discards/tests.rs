//! What guests are told of discards, one promise each.

use cxl_pool::{EndpointId, HostId, Role};
use pod_protocol::objects::{DiskObject, Object};
use pod_protocol::protocol::Protocol;
use pod_protocol::reports::DeviceReport;

use super::super::model::{MIB, check, endpoint, guest, join, options, scrub_all, ssd};
use super::super::{Command, Groups, Options};
use super::*;

const FRONTEND: EndpointId = EndpointId::new(HostId::new(1), Role::BlkFrontend);
const KIB: u32 = 1 << 10;

fn must(state: &mut State, command: &Command) {
    state.apply(command).unwrap_or_else(|refusal| panic!("{command:?}: {refusal}"));
    check(state);
    for command in scrub_all(state) {
        state.apply(&command).unwrap();
        check(state);
    }
}

/// A backend comes, with an SSD that heeds these discards.
fn comes(state: &mut State, host: u16, incarnation: u64, heeds: Option<u32>) {
    let mut report = ssd("ssd0", 64);
    if let DeviceReport::Ssd { discard_granularity_bytes, .. } = &mut report {
        *discard_granularity_bytes = heeds;
    }
    let endpoint = endpoint(host, Role::BlkBackend);
    must(state, &Command::Join { endpoint, incarnation, join: join(host, vec![report]) });
}

/// A pod of this version with SSDs on h2 and h3.
fn pod(protocol_minor: u16, heed: [Option<u32>; 2]) -> State {
    let mut state = State::new(Options { protocol_minor, ..options(256) });
    must(&mut state, &Command::Join { endpoint: FRONTEND, incarnation: 1, join: join(1, Vec::new()) });
    for (host, heeds) in [2, 3].into_iter().zip(heed) {
        comes(&mut state, host, 1, heeds);
    }
    state
}

/// A VM has a volume on so many of them.
fn with_volume(mut state: State, replicas: u8) -> State {
    let command = Command::CreateVolume {
        name: "vol".to_owned(),
        size_bytes: 8 * MIB,
        device: (replicas == 1).then(|| DeviceId { host: HostId::new(2), name: "ssd0".into() }),
        replicas,
        minimum_iops: None,
        minimum_bytes_per_second: None,
        groups: Groups::default(),
    };
    must(&mut state, &command);
    must(&mut state, &guest("vm", &["vol"]));
    state
}

fn shown(state: &State) -> Option<u32> {
    let disk = state.desired(FRONTEND).into_values().find_map(|object| match object {
        Object::Disk(DiskObject { discard_granularity_bytes, .. }) => Some(discard_granularity_bytes),
        _ => None,
    });
    disk.expect("the frontend has a disk")
}

#[test]
fn a_guest_is_shown_what_its_ssd_heeds_now() {
    let mut state = with_volume(pod(Protocol::SHOWS_DISCARDS, [Some(64 * KIB), Some(KIB)]), 1);
    assert_eq!(shown(&state), Some(64 * KIB));
    comes(&mut state, 2, 2, Some(4 * KIB));
    assert_eq!(shown(&state), Some(4 * KIB), "another life has found out something else");
    comes(&mut state, 2, 3, None);
    assert_eq!(shown(&state), None, "and one of the version before says nothing");
}

#[test]
fn a_mirrored_disk_has_what_all_of_its_ssds_heed() {
    for (heed, all) in [
        ([Some(64 * KIB), Some(KIB)], Some(64 * KIB)),
        ([Some(KIB), Some(64 * KIB)], Some(64 * KIB)),
        ([None, Some(KIB)], Some(KIB)),
        ([None, None], None),
    ] {
        assert_eq!(shown(&with_volume(pod(Protocol::SHOWS_DISCARDS, heed), 2)), all);
    }
}

#[test]
fn a_striped_disk_has_what_each_column_heeds_of_its_share() {
    for (heed, unit, all) in [
        ([Some(4 * KIB), Some(KIB)], 64 * KIB, Some(4 * KIB)),
        ([Some(64 * KIB), Some(KIB)], 64 * KIB, Some(64 * KIB)),
        // Of so many bytes on, each column gets as many in one piece as it heeds.
        ([Some(KIB), Some(256 * KIB)], 64 * KIB, Some(512 * KIB)),
        ([Some(96 * KIB), None], 64 * KIB, Some(384 * KIB)),
        ([Some(1 << 31), None], 64 * KIB, None),
        ([None, None], 64 * KIB, None),
    ] {
        let mut state = pod(Protocol::SHOWS_DISCARDS, heed);
        let command = Command::CreateStriped {
            name: "vol".to_owned(),
            size_bytes: 8 * MIB,
            columns: 2,
            stripe_bytes: unit.into(),
            minimum_iops: None,
            minimum_bytes_per_second: None,
            groups: Groups::default(),
        };
        must(&mut state, &command);
        must(&mut state, &guest("vm", &["vol"]));
        assert_eq!(shown(&state), all, "{heed:?}");
    }
}

#[test]
fn nothing_of_it_is_kept_or_told_where_the_version_before_is_spoken() {
    let heed = [Some(64 * KIB); 2];
    let mut state = with_volume(pod(0, heed), 1);
    assert_eq!(shown(&state), None);
    let speaking = state.speaking(Protocol::SHOWS_DISCARDS);
    must(&mut state, &speaking);
    assert_eq!(shown(&state), None, "the backend says it when it begins anew");
    comes(&mut state, 2, 2, heed[0]);
    assert_eq!(shown(&state), heed[0]);
    let speaking = state.speaking(0);
    must(&mut state, &speaking);
    assert_eq!(shown(&state), None);
    assert!(!serde_json::to_string(&state).unwrap().contains("discard_granularity"));
}
