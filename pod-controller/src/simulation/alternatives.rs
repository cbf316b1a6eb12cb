//! Nobody is left with what does not work while something works that would do.

use std::collections::BTreeMap;

use pod_protocol::objects::Object;
use pod_protocol::protocol::Protocol;
use pod_protocol::reports::DeviceReport;
use pod_state::{Device, DeviceId, Kind, LeaseKind, Objects, Part, Presence, Replica, State, Volume};

use super::physical::Physical;
use super::pod::{FENCE_DELAY_US, Pod, SLICE_MAX_US, SWEEP_US};
use super::port::SILENT_AFTER_US;

/// How long a mirrored disk may wait for a backend that stands still while another replica works: until that is seen, until the
/// backend has stopped for certain, and a few turns.
const DROPPED_WITHIN_US: u64 = SILENT_AFTER_US + 2 * SWEEP_US + FENCE_DELAY_US + 4 * SLICE_MAX_US;

/// No lease stays on a NIC that does not work while it could be on one that does. What daemons have had the time to say to a controller
/// that has been there since then, counts as known; without one, only what the state says.
pub(crate) fn alternatives_are_used(
    state: &State,
    physical: &Physical,
    since_us: Option<u64>,
) -> Result<(), String> {
    for lease in state.leases.values() {
        let LeaseKind::Nic { active, mtu: needed, .. } = &lease.kind else { continue };
        let heard = |id: &DeviceId| {
            let device = physical.devices.get(&id.host).and_then(|devices| devices.get(id.name.as_str()));
            matches!(device, Some(DeviceReport::Nic { up: true, .. }))
        };
        // One that is to be empty or is not trusted is better than none, and controllers of 1.1 know that.
        let in_need = state.protocol().minor >= Protocol::DECIDES_BY_MORE;
        let works = |id: &DeviceId| (state.is_usable(id) || in_need && state.is_up(id)) && heard(id);
        let fits = |device: &Device| matches!(&device.kind, Kind::Nic { mtu, .. } if mtu >= needed);
        // Whether the controller knows is one thing; whether it is so, another. Once it has heard all, both.
        let silent = state
            .endpoints
            .get(&active.net_backend())
            .is_some_and(|backend| backend.presence == Presence::Silent);
        let down = || since_us.is_some_and(|since_us| physical.has_been_down(active, since_us));
        let lost = state.is_lost(active) || silent || down();
        if !lost {
            continue;
        }
        // No NIC of its own group takes over from the others.
        let better = state
            .devices
            .iter()
            .find(|(id, it)| *id != active && fits(it) && works(id) && !state.are_rails(id, active));
        if let Some((better, _)) = better {
            return Err(format!(
                "{} stays on {}, which does not work, while {} does",
                lease.id,
                state.device_name(active),
                state.device_name(better)
            ));
        }
    }
    Ok(())
}

impl Pod {
    /// See [`alternatives_are_used`].
    pub(super) fn alternatives_are_used(&self) -> Result<(), String> {
        let Some(conductor) = &self.conductor else { return Ok(()) };
        alternatives_are_used(&conductor.state, &conductor.world.physical, Some(self.controller_since_us))
    }

    /// No guest waits for a replica that does not work while another one does: it is served by that, and what is lost is not
    /// relied on any more. A backend that merely stands still is given as long as it takes to see that and to fence it.
    pub(super) fn disks_wait_for_nobody(&mut self) -> Result<(), String> {
        let Some(conductor) = &self.conductor else { return Ok(()) };
        let (state, physical) = (&conductor.state, &conductor.world.physical);
        let mut waits = BTreeMap::new();
        for volume in state.volumes.values().filter(|volume| volume.is_mirrored()) {
            let good = || volume.replicas.iter().filter(|replica| !replica.stale);
            let troubled = |it: &Replica| {
                physical.still.contains_key(&it.device.blk_backend()) || state.is_lost(&it.device)
            };
            if !volume.replicas.iter().any(troubled) || state.lease_of_volume(volume.id).is_none() {
                continue;
            }
            let works = |it: &&Replica| state.is_up(&it.device) && physical.is_heard(it.device.blk_backend());
            let Some(works) = good().find(works) else { continue };
            let ssd = |of: &Replica| state.device_name(&of.device);
            for replica in good().filter(|replica| troubled(replica)) {
                if state.is_lost(&replica.device) {
                    return Err(format!(
                        "{} counts on {}, which is lost, while {} works",
                        volume.name,
                        ssd(replica),
                        ssd(works)
                    ));
                }
                let backend = replica.device.blk_backend();
                let still = physical.still.get(&backend).copied().unwrap_or(physical.now_us);
                let since =
                    self.waits.get(&(volume.id, backend)).copied().unwrap_or(physical.now_us).max(still);
                if physical.now_us - since > DROPPED_WITHIN_US {
                    return Err(format!(
                        "{} waits for {}, which stands still, while {} works",
                        volume.name,
                        ssd(replica),
                        ssd(works)
                    ));
                }
                waits.insert((volume.id, backend), since);
            }
            is_served_by(state, volume, works)?;
        }
        self.waits = waits;
        Ok(())
    }
}

/// The frontend of a volume is told to use this replica of it, and not to answer errors.
fn is_served_by(state: &State, volume: &Volume, replica: &Replica) -> Result<(), String> {
    let Some(lease) = state.lease_of_volume(volume.id) else { return Ok(()) };
    let Some(frontend) = state.frontend_of(lease) else { return Ok(()) };
    let mut objects = Objects::new();
    state.renew(frontend, &Part::Lease(lease.id), &mut objects);
    let disk = objects.into_values().find_map(|object| match object {
        Object::Disk(disk) => Some(disk),
        _ => None,
    });
    // While its frontend is away, or the pool is full, there is none.
    let Some(disk) = disk else { return Ok(()) };
    let is_used =
        |it: &pod_protocol::objects::ReplicaObject| it.number == replica.number && it.in_sync && !it.away;
    if disk.failed || !disk.replicas.iter().any(is_used) {
        let ssd = state.device_name(&replica.device);
        return Err(format!("{} is not served by {ssd}, which works: {disk:?}", volume.name));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use cxl_pool::{HostId, Role};
    use pod_state::model::{create_instance, endpoint, join, nic, options};
    use pod_state::{Command, NicWish};

    use super::*;

    /// An instance on host 1, and NICs of hosts 2 and 3.
    fn pod() -> (State, Physical) {
        let (mut state, mut physical) = (State::new(options(512)), Physical::new(1, 0));
        let join =
            |id, devices| Command::Join { endpoint: id, incarnation: 1, join: join(id.host.get(), devices) };
        state.apply(&join(endpoint(1, Role::NetFrontend), Vec::new())).expect("a free slot");
        for host in [2, 3] {
            state
                .apply(&join(endpoint(host, Role::NetBackend), vec![nic("nic0", true, false)]))
                .expect("a free slot");
            physical
                .devices
                .entry(HostId::new(host))
                .or_default()
                .insert("nic0".to_owned(), nic("nic0", true, false));
        }
        let create = create_instance("vm", 1, vec![NicWish::default()], &[]);
        state.apply(&create).expect("there is room");
        (state, physical)
    }

    fn place(state: &State) -> DeviceId {
        state.leases.values().find_map(|lease| lease.active_nic()).expect("a NIC").clone()
    }

    /// From the state alone, as where several controllers take turns: this is not luck with what one of them has heard.
    #[test]
    fn a_lease_that_is_left_behind_is_noticed_whatever_became_of_its_nic() {
        let lost = place(&pod().0);
        let backend = lost.net_backend();
        let reason = || "gone".to_owned();
        let down = Command::Link { device: lost.clone(), up: false, reason: reason() };
        let failed = Command::DeviceFailed { device: lost.clone(), reason: reason() };
        let silent = Command::Silent { endpoint: backend };
        let fenced = Command::FenceExpired { endpoint: backend, incarnation: 1 };
        for loss in
            [vec![down], vec![failed], vec![silent, fenced], vec![Command::Gone { endpoint: backend }]]
        {
            let (mut state, mut physical) = pod();
            assert_eq!(alternatives_are_used(&state, &physical, None), Ok(()));
            for command in &loss {
                state.apply(command).expect("it is known");
            }
            assert_ne!(place(&state), lost, "after {loss:?}");
            assert_eq!(alternatives_are_used(&state, &physical, None), Ok(()), "after {loss:?}");
            let other = place(&state);
            for lease in state.leases.values_mut() {
                if let LeaseKind::Nic { active, .. } = &mut lease.kind {
                    active.clone_from(&lost);
                }
            }
            let noticed = alternatives_are_used(&state, &physical, None).expect_err("it is left behind");
            assert!(noticed.contains("which does not work, while"), "after {loss:?}: {noticed}");
            // Where there is no better one it has to stay.
            let devices = physical.devices.get_mut(&other.host).expect("its devices");
            devices.insert("nic0".to_owned(), nic("nic0", false, false));
            assert_eq!(alternatives_are_used(&state, &physical, None), Ok(()), "after {loss:?}");
        }
    }
}
