//! The links of NICs, as the guest sees them: a NIC has one as long as something in the pod carries its packets.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use pod_api::Nic;

use crate::VmmError;
use crate::plug::{Inventory, Plug};

/// How long nothing carries a NIC's packets before the guest sees no link. For as long a backend keeps them in front of a link that is down,
/// so a daemon that is started anew, or a cable that moves in its plug, is nothing that a guest has to know of.
const GRACE: Duration = Duration::from_secs(1);

/// What the guest was shown.
#[derive(Debug, Default)]
pub(crate) struct Links {
    /// Nothing of a NIC at which nobody has looked yet.
    shown: BTreeMap<String, Link>,
    /// What has carried packets at the last look: devices, and the daemons that own them.
    carriers: BTreeSet<String>,
}

#[derive(Debug, Clone, Copy)]
enum Link {
    Up,
    /// Since then nothing carries its packets.
    Lost(Instant),
    /// And the guest knows.
    Down(Instant),
}

impl Links {
    /// Whether a guest may have to see what has happened to this device or daemon.
    pub(crate) fn hang_on(&self, subject: &str) -> bool {
        self.carriers.contains(subject)
    }

    /// Has the guest see of its NICs what is so `now`. Says whether one of them has no link, which has to be looked at again.
    pub(crate) fn bring(
        &mut self,
        nics: &[Nic],
        there: &Inventory,
        plugger: &mut dyn Plug,
        now: Instant,
        say: &mut impl FnMut(&str),
    ) -> Result<bool, VmmError> {
        self.carriers.clear();
        for nic in nics {
            for device in nic.rails.iter().map(|rail| &rail.nic).chain([&nic.nic]) {
                let host = device.split_once('/').map_or(device.as_str(), |(host, _)| host);
                self.carriers.extend([device.clone(), format!("{host}/net-backend")]);
            }
        }
        // One that comes again has a link at first.
        self.shown.retain(|device, _| there.has(device));
        let mut lost = false;
        for nic in nics.iter().filter(|nic| there.has(&nic.device)) {
            let device = &nic.device;
            let shown = self.shown.get(device).copied();
            let next = match (nic.link, shown) {
                (true, Some(Link::Up)) => continue,
                (true, _) => {
                    // Whoever followed before may have taken it. QEMU shows none while it does not reach the frontend, and one once it does.
                    if there.is_served(device) {
                        plugger.set_link(device, true)?;
                    }
                    if let Some(Link::Down(_)) = shown {
                        say(&format!("{device} has its link again, over {}", nic.nic));
                    }
                    Link::Up
                }
                (false, None | Some(Link::Up)) => Link::Lost(now),
                (false, Some(Link::Lost(since) | Link::Down(since))) => {
                    if now.saturating_duration_since(since) < GRACE {
                        Link::Lost(since)
                    } else {
                        // Each time: a frontend that comes back has QEMU show a link.
                        plugger.set_link(device, false)?;
                        if let Some(Link::Lost(_)) = shown {
                            say(&format!(
                                "{device} has no link: {} does not work, and no backup does",
                                nic.nic
                            ));
                        }
                        Link::Down(since)
                    }
                }
            };
            lost |= !nic.link;
            self.shown.insert(device.clone(), next);
        }
        Ok(lost)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use serde_json::json;

    use super::*;
    use crate::monitor::fake::Qemu;
    use crate::plug::Plugger;

    fn nic(link: bool) -> Nic {
        serde_json::from_value(json!({
            "device": "net0", "socket": "/s", "mac": "52:54:00:00:00:01", "mtu": 1500, "queue_pairs": 1, "nic": "h2/nic0",
            "link": link, "lease": 1, "generation": 1, "connected": true, "slot": 0,
        }))
        .unwrap()
    }

    #[test]
    fn a_guest_is_told_what_lasts_and_again_while_it_has_no_link() {
        let (tell, told) = channel();
        let (reach, reached) = channel();
        let mut is_reached = true;
        let qemu = Qemu::start(move |name, arguments| {
            is_reached = reached.try_iter().last().unwrap_or(is_reached);
            let filename = if is_reached { "unix:/s" } else { "disconnected:unix:/s" };
            let answer = match name {
                "query-version" => json!({"qemu": {"major": 7, "minor": 2, "micro": 0}, "package": ""}),
                "query-kvm" => json!({"enabled": false, "present": false}),
                "query-chardev" => {
                    json!([{"label": "wadi-net0", "filename": filename, "frontend-open": true}])
                }
                "qom-list" => json!([{"name": "net0", "type": "child<virtio-net-pci>"}]),
                "qom-get" => json!("/machine/peripheral/port.0/port.0"),
                "set_link" => {
                    assert_eq!(arguments["name"], "net0");
                    tell.send(arguments["up"].as_bool().unwrap()).unwrap();
                    json!({})
                }
                other => panic!("it is asked {other}"),
            };
            Some(json!({"return": answer}).to_string())
        });
        let mut plugger = Plugger::connect(&qemu.path, false, || false).unwrap();
        let (mut links, began, mut said) = (Links::default(), Instant::now(), Vec::new());
        let mut look = |links: &mut Links, link: bool, after: Duration| {
            let there = plugger.inventory().unwrap();
            let mut say = |what: &str| said.push(what.to_owned());
            let lost = links.bring(&[nic(link)], &there, &mut plugger, began + after, &mut say).unwrap();
            assert_eq!(lost, !link);
            told.try_iter().collect::<Vec<_>>()
        };
        let at = Duration::from_millis;
        // Whoever followed before may have taken its link.
        assert_eq!(look(&mut links, true, at(0)), [true]);
        assert!(look(&mut links, true, at(1)).is_empty());
        assert!(
            links.hang_on("h2/nic0") && links.hang_on("h2/net-backend") && !links.hang_on("h3/net-backend")
        );
        // Not for long.
        assert!(look(&mut links, false, at(10)).is_empty());
        assert!(look(&mut links, false, at(900)).is_empty());
        assert_eq!(look(&mut links, true, at(1000)), [true]);
        for after in [2000, 2900] {
            assert!(look(&mut links, false, at(after)).is_empty());
        }
        for after in [3000, 4000] {
            assert_eq!(look(&mut links, false, at(after)), [false]);
        }
        assert_eq!(look(&mut links, true, at(5000)), [true]);
        // QEMU shows a link by itself when it reaches the frontend.
        reach.send(false).unwrap();
        assert!(look(&mut Links::default(), true, at(6000)).is_empty());
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].contains("no link") && said[1].contains("again"), "{said:?}");
    }
}
