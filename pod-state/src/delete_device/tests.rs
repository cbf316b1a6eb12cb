use cxl_pool::{HostId, Role};
use pod_protocol::ids::LeaseId;
use pod_protocol::protocol::Protocol;
use pod_protocol::reports::DeviceReport;

use super::super::model::{check, endpoint, guest, join, nic, options, scrub_all, ssd, ssd_of, volume};
use super::super::{Command, Groups, Options};
use super::*;

/// What a host has: a NIC and an SSD, or less.
fn devices(role: Role, has: bool) -> Vec<DeviceReport> {
    match role {
        Role::NetBackend if has => vec![nic("nic0", true, false)],
        Role::BlkBackend if has => vec![keeping(ssd("ssd0", 64))],
        _ => Vec::new(),
    }
}

/// The same with a table of its volumes: what is deleted there is wiped.
fn keeping(mut report: DeviceReport) -> DeviceReport {
    if let DeviceReport::Ssd { table, .. } = &mut report {
        *table = Some(pod_protocol::volume_table::VolumeTable::default());
    }
    report
}

fn comes(state: &mut State, host: u16, role: Role, has: bool) {
    let id = endpoint(host, role);
    let incarnation = state.endpoints.get(&id).map_or(0, |known| known.incarnation) + 1;
    must(state, &Command::Join { endpoint: id, incarnation, join: join(host, devices(role, has)) });
}

fn must(state: &mut State, command: &Command) -> Vec<Effect> {
    let effects = state.apply(command).expect("it is carried out");
    check(state);
    effects
}

fn refused(state: &mut State, command: &Command) -> Refusal {
    let before = state.clone();
    let refusal = state.apply(command).expect_err("it is refused");
    assert_eq!(*state, before);
    refusal
}

/// h1 with guests, h2 and h3 with a NIC and an SSD each.
fn pod() -> State {
    let mut state = State::new(Options { protocol_minor: Protocol::DELETES_DEVICES, ..options(256) });
    for role in [Role::NetFrontend, Role::BlkFrontend] {
        comes(&mut state, 1, role, true);
    }
    for host in [2, 3] {
        comes(&mut state, host, Role::BlkBackend, true);
        comes(&mut state, host, Role::NetBackend, true);
    }
    state
}

fn delete(host: u16, lose_data: bool) -> Command {
    Command::DeleteDevice { device: ssd_of(host), lose_data }
}

#[test]
fn what_its_host_has_stays() {
    let mut state = pod();
    let refusal = refused(&mut state, &delete(2, true));
    assert!(refusal.kind == RefusalKind::Busy && refusal.detail.contains("configuration of h2"), "{refusal}");
    // Away, it may come back with it.
    must(&mut state, &Command::Gone { endpoint: endpoint(2, Role::BlkBackend) });
    refused(&mut state, &delete(2, true));
    assert_eq!(refused(&mut state, &delete(7, true)).kind, RefusalKind::NotFound);
}

#[test]
fn an_ssd_goes_with_what_only_it_had_if_that_is_said() {
    let mut state = pod();
    must(&mut state, &volume("lost", (Some(2), 1), Groups::default()));
    must(&mut state, &guest("vm1", &["lost"]));
    comes(&mut state, 2, Role::BlkBackend, false);
    let refusal = refused(&mut state, &delete(2, false));
    assert!(refusal.detail.contains("volume lost") && refusal.detail.contains("--lose-data"), "{refusal}");
    let refusal = refused(&mut state, &delete(2, true));
    assert!(refusal.kind == RefusalKind::Leased && refusal.detail.contains("vm1"), "{refusal}");
    must(&mut state, &Command::DeleteInstance { name: "vm1".to_owned(), force: true });
    must(&mut state, &delete(2, true));
    assert!(state.volumes.is_empty() && !state.devices.contains_key(&ssd_of(2)));
    for command in scrub_all(&state) {
        must(&mut state, &command);
    }
    // Should it come back, it is like a new one.
    comes(&mut state, 2, Role::BlkBackend, true);
    must(&mut state, &volume("lost", (Some(2), 1), Groups::default()));
}

#[test]
fn what_was_deleted_and_nobody_will_wipe_is_forgotten_with_it() {
    let mut state = pod();
    must(&mut state, &volume("old", (Some(2), 1), Groups::default()));
    must(&mut state, &Command::DeleteVolume { name: "old".to_owned() });
    comes(&mut state, 2, Role::BlkBackend, false);
    assert!(state.devices.contains_key(&ssd_of(2)) && !state.volumes.is_empty());
    must(&mut state, &delete(2, false));
    assert!(state.volumes.is_empty() && !state.devices.contains_key(&ssd_of(2)));
}

#[test]
fn a_mirrored_volume_goes_on_without_its_replica_there() {
    let mut state = pod();
    must(&mut state, &volume("pair", (None, 2), Groups::default()));
    must(&mut state, &guest("vm1", &["pair"]));
    comes(&mut state, 2, Role::BlkBackend, false);
    let refusal = refused(&mut state, &delete(2, false));
    assert!(refusal.detail.contains("remove-replica pair --device h2/ssd0"), "{refusal}");
    let mut asked = state.clone();
    // As the refusal says.
    let remove = Command::RemoveReplica { name: "pair".to_owned(), device: ssd_of(2) };
    must(&mut asked, &remove);
    must(&mut asked, &delete(2, false));
    must(&mut state, &delete(2, true));
    for state in [asked, state] {
        let volume = state.volume_named("pair").expect("it is there");
        let left: Vec<&DeviceId> = volume.all_places().map(|it| &it.device).collect();
        assert_eq!(left, [&ssd_of(3)]);
        assert!(!state.devices.contains_key(&ssd_of(2)));
    }
}

#[test]
fn a_nic_goes_once_no_lease_has_to_be_on_it() {
    let mut state = pod();
    let mut command = guest("vm1", &[]);
    if let Command::CreateInstance { nics, .. } = &mut command {
        nics.push(crate::NicWish::default());
    }
    must(&mut state, &command);
    let lease: LeaseId = *state.leases.keys().next().expect("a lease");
    let active = state.leases[&lease].active_nic().expect("a NIC").clone();
    let other = HostId::new(5 - active.host.get());
    comes(&mut state, other.get(), Role::NetBackend, false);
    comes(&mut state, active.host.get(), Role::NetBackend, false);
    let refusal = refused(&mut state, &Command::DeleteDevice { device: active.clone(), lose_data: true });
    assert!(refusal.kind == RefusalKind::Leased && refusal.detail.contains("vm1"), "{refusal}");
    comes(&mut state, other.get(), Role::NetBackend, true);
    assert_eq!(state.leases[&lease].active_nic().map(|nic| nic.host), Some(other));
    must(&mut state, &Command::DeleteDevice { device: active.clone(), lose_data: false });
    assert!(!state.devices.contains_key(&active));
    let knows = |it: &crate::Lease| it.nics().any(|nic| *nic == active);
    assert!(!state.leases.values().any(knows));
}

#[test]
fn only_pods_of_which_everybody_knows_how_delete_devices() {
    let mut state = pod();
    comes(&mut state, 2, Role::BlkBackend, false);
    let old = state.speaking(0);
    must(&mut state, &old);
    let command = delete(2, true);
    assert!(state.check_spoken(&command).is_err());
    refused(&mut state, &command);
}
