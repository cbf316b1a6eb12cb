//! What a reservation is worth: it was accepted, so it holds, also when a host fails.

use pod_protocol::protocol::Protocol;

use crate::{Command, DeviceId, Kind, Lease, LeaseKind, State, Volume};

/// Everything that an instance reserves holds in the moment in which it is accepted.
pub fn check_reservations(state: &State, instance: &str) {
    let id = state.instance_named(instance).expect("it was just accepted").id;
    for lease in state.leases.values().filter(|lease| lease.instance == id) {
        let LeaseKind::Nic { active, apart, .. } = &lease.kind else {
            check_volume(state, lease);
            continue;
        };
        let is_apart = |other: &&Lease| {
            let theirs = if let LeaseKind::Nic { apart, .. } = &other.kind { apart.as_ref() } else { None };
            other.id != lease.id && theirs.is_some() && theirs == apart.as_ref()
        };
        let close = state.leases.values().filter(is_apart);
        let close = close.filter(|other| other.active_nic().is_some_and(|nic| nic.host == active.host));
        assert_eq!(close.count(), 0, "{instance} is not apart from others of its group");
        check_nic(state, lease);
    }
}

/// Everything that leases reserve that moved in order holds as if it was new where they are.
pub fn check_moved(before: &State, state: &State) {
    let proves = state.options.protocol_minor >= Protocol::PROVES_MOVES;
    if !proves || !state.options.placement.prove_failover {
        return;
    }
    let has_moved = |lease: &&Lease| {
        let old = before.leases.get(&lease.id);
        lease.draining_nic().is_some_and(|left| old.and_then(Lease::active_nic) == Some(left))
            && old.is_some_and(|old| old.draining_nic().is_none())
    };
    for lease in state.leases.values().filter(has_moved) {
        // Whoever has lost its backup takes what there is: that may cost others what was proven.
        let is_crowding = |other: &&Lease| {
            let host = |lease: &Lease| lease.active_nic().map(|nic| nic.host);
            let old = before.leases.get(&other.id);
            other.standby_nic() == lease.standby_nic()
                && host(other) == host(lease)
                && old.and_then(Lease::standby_nic) != other.standby_nic()
                && !has_moved(other)
        };
        if !state.leases.values().any(|other| is_crowding(&other)) {
            check_nic(state, lease);
        }
    }
}

/// What a lease on a NIC reserves holds, also when the NIC's host fails.
fn check_nic(state: &State, lease: &Lease) {
    let LeaseKind::Nic { active, reserved_mbps: 1.., .. } = &lease.kind else { return };
    let instance = &state.instances[&lease.instance].name;
    assert!(carries(state, active), "{active:?} does not carry what {instance} reserves");
    let mut after = state.clone();
    let nics: Vec<DeviceId> = state.devices.keys().filter(|id| id.host == active.host).cloned().collect();
    for device in nics {
        let reason = "its host failed".to_owned();
        after.apply(&Command::Link { device, up: false, reason }).expect("never refused");
    }
    let moved = after.leases[&lease.id].active_nic().expect("a NIC").clone();
    assert_ne!(moved.host, active.host, "{instance} stays on a host that failed");
    assert!(carries(&after, &moved), "{moved:?} does not carry what {instance} reserves after a failure");
}

/// Whether a NIC can do what its leases reserve: counted anew, by nothing that placement uses.
fn carries(state: &State, nic: &DeviceId) -> bool {
    let Kind::Nic { speed_mbps, .. } = state.devices[nic].kind else { return false };
    let on = state.leases.values().filter_map(|lease| match &lease.kind {
        LeaseKind::Nic { active, reserved_mbps, .. } if active == nic => Some(*reserved_mbps),
        _ => None,
    });
    on.sum::<u64>() * 100 <= speed_mbps * u64::from(state.options.placement.nic_overcommit_percent)
}

fn check_volume(state: &State, lease: &Lease) {
    let volume = &state.volumes[&lease.volume().expect("a disk")];
    for ssd in volume.devices() {
        let Kind::Ssd { iops, bytes_per_second, .. } = state.devices[ssd].kind else { continue };
        let reserved = |of: fn(&Volume) -> Option<u64>| -> u64 {
            let on = state.volumes.values().filter(|it| !it.deleted && it.replica_on(ssd).is_some());
            let share = |it: &Volume| match it.stripe_bytes {
                Some(_) => of(it).unwrap_or(0).div_ceil(u64::from(it.next_number)),
                None => of(it).unwrap_or(0),
            };
            on.map(share).sum()
        };
        let requests = reserved(|it| it.qos.minimum_iops.max(it.promised_iops));
        assert!(iops.is_none_or(|most| requests <= most), "{ssd:?} has no {requests} requests/s to reserve");
        let bytes = reserved(|it| it.qos.minimum_bytes_per_second);
        assert!(bytes_per_second.is_none_or(|most| bytes <= most), "{ssd:?} has no {bytes} B/s to reserve");
    }
}
