//! Static link aggregation at the switch, with what a bridge has for it.
//!
//! Nothing that comes from a port of a group goes out over another one of it, and what is for an address that is not learnt, or
//! for all, goes out over one of those that have a cable. What is for one that is learnt goes where it was last heard from. (A
//! switch would spread its flows over the ports. So guests receive over less than all of them at a time here.)

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use anyhow::Result;

use super::HostPlan;
use super::topology::port;
use crate::namespace::Namespace;

/// Ports of the switch that are one for it.
#[derive(Debug)]
pub(super) struct Group {
    /// Which have a cable.
    plugged: Mutex<BTreeMap<String, bool>>,
}

impl Group {
    /// Those of the hosts' NICs.
    pub(super) fn build_all(switch: &Namespace, plans: &[HostPlan]) -> Result<Vec<Self>> {
        let mut members = BTreeMap::<&str, BTreeMap<String, bool>>::new();
        for plan in plans {
            for nic in &plan.nics {
                if let Some(group) = &nic.group {
                    members.entry(group).or_default().insert(port(&plan.name, &nic.name), true);
                }
            }
        }
        let groups: Vec<Self> = members.into_values().map(|it| Self { plugged: Mutex::new(it) }).collect();
        for group in &groups {
            let ports = group.plugged.lock().unwrap_or_else(PoisonError::into_inner);
            for port in ports.keys() {
                set(switch, port, &["isolated", "on"])?;
            }
            choose_flooded(switch, &ports)?;
        }
        Ok(groups)
    }

    /// A port's cable was pulled, or plugged in again. Nothing happens if it is not one of these.
    pub(super) fn note(&self, switch: &Namespace, port: &str, plugged: bool) -> Result<()> {
        let mut ports = self.plugged.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(has_cable) = ports.get_mut(port) else { return Ok(()) };
        *has_cable = plugged;
        choose_flooded(switch, &ports)
    }
}

/// What is flooded goes to the first port that has a cable.
fn choose_flooded(switch: &Namespace, ports: &BTreeMap<String, bool>) -> Result<()> {
    let chosen = ports.iter().find(|(_, plugged)| **plugged).map(|(port, _)| port);
    // First those that are not to have it any more: rather lost than doubled.
    let (others, chosen): (Vec<_>, Vec<_>) = ports.keys().partition(|port| Some(*port) != chosen);
    for (ports, flooded) in [(others, "off"), (chosen, "on")] {
        for port in ports {
            set(switch, port, &["flood", flooded, "mcast_flood", flooded, "bcast_flood", flooded])?;
        }
    }
    Ok(())
}

fn set(switch: &Namespace, port: &str, options: &[&str]) -> Result<()> {
    let mut words = vec!["link", "set", port, "type", "bridge_slave"];
    words.extend_from_slice(options);
    switch.ip(&words)
}
