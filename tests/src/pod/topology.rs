//! Hosts, the switch, the client, and the cables between them.

use anyhow::{Context as _, Result};

use super::aggregation::Group;
use super::{CLIENT_ADDRESS, HostPlan, NicDriver};
use crate::namespace::{Namespace, bridge, complete_frames, connect};

/// The namespaces of a pod.
#[derive(Debug)]
pub(super) struct Topology {
    hosts: Vec<(String, Namespace)>,
    control: Namespace,
    client: Namespace,
    groups: Vec<Group>,
    switch: Namespace,
}

/// The bridge that plays the switch.
const SWITCH: &str = "tor";

impl Topology {
    pub(super) fn build(tag: &str, plans: &[HostPlan], driver: NicDriver) -> Result<Self> {
        let switch = Namespace::create(&format!("{tag}-tor"))?;
        bridge(&switch, SWITCH)?;
        let client = Namespace::create(&format!("{tag}-client"))?;
        connect((&switch, "client"), (&client, "eth0"))?;
        switch.ip(&["link", "set", "client", "master", SWITCH])?;
        client.ip(&["address", "add", &format!("{CLIENT_ADDRESS}/24"), "dev", "eth0"])?;
        let control = Namespace::create(&format!("{tag}-ctl"))?;
        let mut hosts = Vec::new();
        for plan in plans {
            let host = Namespace::create(&format!("{tag}-{}", plan.name))?;
            for (index, nic) in plan.nics.iter().enumerate() {
                build_nic(&switch, &host, &port(&plan.name, &nic.name), index, nic.driver(driver))?;
            }
            hosts.push((plan.name.clone(), host));
        }
        let groups = Group::build_all(&switch, plans)?;
        Ok(Self { hosts, control, client, groups, switch })
    }

    pub(super) fn host(&self, name: &str) -> Result<&Namespace> {
        let found = self.hosts.iter().find(|(host, _)| host == name);
        found.map(|(_, namespace)| namespace).with_context(|| format!("the pod has no host {name}"))
    }

    /// Where the controller runs.
    pub(super) fn control(&self) -> &Namespace {
        &self.control
    }

    pub(super) fn client(&self) -> &Namespace {
        &self.client
    }

    pub(super) fn set_cable(&self, host: &str, nic: &str, plugged: bool) -> Result<()> {
        let port = port(host, nic);
        let note = || self.groups.iter().try_for_each(|group| group.note(&self.switch, &port, plugged));
        let set = |state: &str| self.switch.ip(&["link", "set", &port, state]);
        // A switch notices at once where it cannot send any more; a bridge has to be told, and is told before.
        if plugged { set("up").and_then(|()| note()) } else { note().and_then(|()| set("down")) }
    }

    /// The host and the NIC to which the switch sends what is for an address.
    pub(super) fn cable_towards(&self, mac: &str) -> Result<(String, String)> {
        let output = self.switch.command("bridge".as_ref()).args(["fdb", "show", "br", SWITCH]).output()?;
        let table = String::from_utf8_lossy(&output.stdout);
        let learnt = |line: &str| {
            let mut words = line.split_whitespace();
            let found = words.next() == Some(mac) && words.next() == Some("dev");
            words
                .next()
                .filter(|_| found)?
                .split_once('-')
                .map(|(host, nic)| (host.to_owned(), nic.to_owned()))
        };
        table.lines().find_map(learnt).with_context(|| format!("the switch has not learnt {mac}: {table}"))
    }
}

/// The host's end of the cable is `eth<index>`. For the TAP driver, a bridge joins it with the TAP device that the
/// backend opens.
fn build_nic(
    switch: &Namespace,
    host: &Namespace,
    port: &str,
    index: usize,
    driver: NicDriver,
) -> Result<()> {
    let (uplink, tap, joint) = (format!("eth{index}"), format!("tap{index}"), format!("br{index}"));
    connect((switch, port), (host, &uplink))?;
    switch.ip(&["link", "set", port, "master", SWITCH])?;
    if driver == NicDriver::AfXdp {
        return complete_frames(switch, port);
    }
    bridge(host, &joint)?;
    host.ip(&["tuntap", "add", "dev", &tap, "mode", "tap"])?;
    for member in [&uplink, &tap] {
        host.ip(&["link", "set", member, "master", &joint])?;
    }
    host.ip(&["link", "set", &tap, "up"])
}

/// The switch's end of a cable.
pub(super) fn port(host: &str, nic: &str) -> String {
    format!("{host}-{nic}")
}
