//! What a reservation is worth: it was accepted, so it holds, also when a host fails.

use pod_protocol::objects::Qos;

use crate::{Command, DeviceId, Kind, Lease, LeaseKind, State, Volume};

/// Everything that an instance reserves holds in the moment in which it is accepted.
pub fn check_reservations(state: &State, instance: &str) {
    let id = state.instance_named(instance).expect("it was just accepted").id;
    for lease in state.leases.values().filter(|lease| lease.instance == id) {
        let LeaseKind::Nic { active, reserved_mbps, apart, .. } = &lease.kind else {
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
        if *reserved_mbps == 0 {
            continue;
        }
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
        let reserved = |of: fn(&Qos) -> Option<u64>| -> u64 {
            let on = state.volumes.values().filter(|it| !it.deleted && it.replica_on(ssd).is_some());
            let share = |it: &Volume| match it.stripe_bytes {
                Some(_) => of(&it.qos).unwrap_or(0).div_ceil(u64::from(it.next_number)),
                None => of(&it.qos).unwrap_or(0),
            };
            on.map(share).sum()
        };
        let requests = reserved(|qos| qos.minimum_iops);
        assert!(iops.is_none_or(|most| requests <= most), "{ssd:?} has no {requests} requests/s to reserve");
        let bytes = reserved(|qos| qos.minimum_bytes_per_second);
        assert!(bytes_per_second.is_none_or(|most| bytes <= most), "{ssd:?} has no {bytes} B/s to reserve");
    }
}
