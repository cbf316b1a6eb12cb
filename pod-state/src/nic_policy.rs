use std::net::IpAddr;
use std::ops::RangeInclusive;

use pod_api::EventKind;
use pod_protocol::ids::LeaseId;
use pod_protocol::objects::{NicPolicy, RateLimit};

use super::loads::BYTES_PER_MBIT;
use super::{DeviceId, Effect, Kind, LeaseKind, Refusal, RefusalKind, State};

/// The longest time for which an instance may save up its share.
const BURST_MS_MAX: u32 = 60_000;
/// The numbers that a VLAN may have (IEEE 802.1Q).
const VLANS: RangeInclusive<u16> = 1..=4094;
/// The most addresses of a NIC.
const ADDRESSES_MAX: usize = 64;

impl State {
    /// Says anew what an instance may do with one of its NICs, which may be in use.
    pub(super) fn change_nic(
        &mut self,
        instance: &str,
        device: &str,
        policy: &NicPolicy,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        check_policy(policy)?;
        let known = self.instance_named(instance).ok_or_else(|| Refusal::not_found("instance", instance))?;
        let nics = known.nics.clone();
        let lease = nics.iter().find(|id| self.leases.get(id).is_some_and(|it| it.device == device));
        let lease = lease.and_then(|id| self.leases.get(id));
        let Some((id, LeaseKind::Nic { active, reserved_mbps, .. })) = lease.map(|it| (it.id, &it.kind))
        else {
            return Err(Refusal::not_found("NIC of that instance", device));
        };
        // What was reserved stays.
        let policy = &with_reservation(policy, *reserved_mbps);
        check_policy(policy)?;
        self.check_promises(active, policy, id)?;
        let Some(LeaseKind::Nic { policy: current, .. }) =
            self.leases.get_mut(&id).map(|lease| &mut lease.kind)
        else {
            return Err(Refusal::not_found("NIC of that instance", device));
        };
        if current != policy {
            current.clone_from(policy);
            let message = format!(
                "{device} may send {}, receive {}, and use {}, in {}",
                shown(&policy.transmit),
                shown(&policy.receive),
                addresses(&policy.addresses),
                policy.vlan.map_or_else(|| "no VLAN".to_owned(), |vlan| format!("VLAN {vlan}"))
            );
            effects.push(Effect::event(EventKind::NicChanged, instance, message));
        }
        Ok(())
    }
}

impl State {
    /// What a NIC's instances are promised to send and to receive, in bytes per second, but for one of them. Those of its group may have
    /// to be carried by it alone.
    fn promised_on(&self, nic: &DeviceId, without: Option<LeaseId>) -> [u64; 2] {
        let rails = self.rails_of(nic);
        let others = self.leases.iter().filter(|(id, _)| Some(**id) != without);
        others.fold([0, 0], |[send, receive], (_, lease)| match &lease.kind {
            LeaseKind::Nic { active, policy, .. } if rails.contains(active) => [
                send.saturating_add(promised(&policy.transmit)),
                receive.saturating_add(promised(&policy.receive)),
            ],
            _ => [send, receive],
        })
    }

    /// Whether a NIC is fast enough for what its instances are promised and this besides.
    fn can_promise(&self, nic: &DeviceId, policy: &NicPolicy, without: Option<LeaseId>) -> bool {
        let wanted = promises(policy);
        let most = self.bytes_per_second(nic);
        let others = self.promised_on(nic, without);
        // Who wants nothing promised can go anywhere.
        wanted
            .iter()
            .zip(others)
            .all(|(wanted, others)| *wanted == 0 || others.saturating_add(*wanted) <= most)
    }

    fn bytes_per_second(&self, nic: &DeviceId) -> u64 {
        let percent = u64::from(self.options.placement.nic_overcommit_percent);
        match self.devices.get(nic).map(|device| &device.kind) {
            Some(Kind::Nic { speed_mbps, .. }) => {
                (speed_mbps.saturating_mul(percent) / 100).saturating_mul(BYTES_PER_MBIT)
            }
            _ => 0,
        }
    }

    /// Refuses what a NIC, or another one of its group, has not got.
    fn check_promises(&self, active: &DeviceId, policy: &NicPolicy, lease: LeaseId) -> Result<(), Refusal> {
        let rails = self.rails_of(active);
        let Some(nic) = rails.iter().find(|nic| !self.can_promise(nic, policy, Some(lease))) else {
            return Ok(());
        };
        let [send, receive] = self.promised_on(nic, Some(lease));
        let detail = format!(
            "{} carries {} B/s each way, of which others are promised {send} to send and {receive} to receive: ask for less, or \
             move an instance with `podctl instances migrate-nic`",
            self.device_name(nic),
            self.bytes_per_second(nic)
        );
        Err(Refusal::new(RefusalKind::NoRoom, detail))
    }
}

/// What a policy promises to send and to receive, in bytes per second.
pub(super) fn promises(policy: &NicPolicy) -> [u64; 2] {
    [promised(&policy.transmit), promised(&policy.receive)]
}

/// A policy that promises what is reserved, so that the engines see to it.
pub(super) fn with_reservation(policy: &NicPolicy, reserved_mbps: u64) -> NicPolicy {
    let reserved = reserved_mbps.saturating_mul(BYTES_PER_MBIT);
    let at_least = |limit: RateLimit| match promised(&limit).max(reserved) {
        0 => limit,
        minimum => RateLimit { minimum_bytes_per_second: Some(minimum), ..limit },
    };
    NicPolicy { transmit: at_least(policy.transmit), receive: at_least(policy.receive), ..policy.clone() }
}

fn promised(limit: &RateLimit) -> u64 {
    limit.minimum_bytes_per_second.unwrap_or(0)
}

/// Whether a policy makes sense.
pub(super) fn check_policy(policy: &NicPolicy) -> Result<(), Refusal> {
    let invalid = |detail: String| Err(Refusal::new(RefusalKind::InvalidValue, detail));
    for limit in [&policy.transmit, &policy.receive] {
        if limit.bytes_per_second == Some(0) || limit.packets_per_second == Some(0) {
            return invalid(
                "a limit of zero would cut the NIC off: leave it out, or use 1 at least".to_owned(),
            );
        }
        if limit.minimum_bytes_per_second == Some(0) {
            return invalid("a minimum of zero promises nothing: leave it out".to_owned());
        }
        if let (Some(minimum), Some(most)) = (limit.minimum_bytes_per_second, limit.bytes_per_second)
            && minimum > most
        {
            return invalid(format!(
                "minimum_bytes_per_second {minimum} is more than bytes_per_second {most}"
            ));
        }
        if !(1..=BURST_MS_MAX).contains(&limit.burst_ms) {
            return invalid(format!("burst_ms = {}: use 1 to {BURST_MS_MAX}", limit.burst_ms));
        }
    }
    if let Some(vlan) = policy.vlan.filter(|vlan| !VLANS.contains(vlan)) {
        return invalid(format!("there is no VLAN {vlan}: use {} to {}", VLANS.start(), VLANS.end()));
    }
    if policy.addresses.len() > ADDRESSES_MAX {
        return invalid(format!("a NIC can have {ADDRESSES_MAX} addresses at most"));
    }
    if let Some(address) = policy.addresses.iter().find(|it| it.is_multicast() || it.is_unspecified()) {
        return invalid(format!("{address} cannot be the address of a NIC"));
    }
    Ok(())
}

fn shown(limit: &RateLimit) -> String {
    let limits = match (limit.bytes_per_second, limit.packets_per_second) {
        (None, None) => "without limit".to_owned(),
        (Some(bytes), None) => format!("{bytes} B/s"),
        (None, Some(packets)) => format!("{packets} packets/s"),
        (Some(bytes), Some(packets)) => format!("{bytes} B/s and {packets} packets/s"),
    };
    match limit.minimum_bytes_per_second {
        None => limits,
        Some(minimum) => format!("{limits}, {minimum} B/s before others"),
    }
}

fn addresses(addresses: &[IpAddr]) -> String {
    if addresses.is_empty() {
        return "any address".to_owned();
    }
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
