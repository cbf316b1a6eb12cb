//! `podctl mchannel`: who shares the fabric, and how.

use std::collections::BTreeMap;
use std::io::Write;

use pod_api::client::Client;
use pod_api::{Fabric, FabricSignal, Mchannel, MchannelSpec, MchannelVcpus};

use crate::Failure;
use crate::arguments::{Mchannels, Output};
use crate::show::{done, show};
use crate::table::plain;
use crate::top::amount;

/// Carries out a command and shows the answer.
pub(crate) fn run(
    client: &Client,
    command: &Mchannels,
    format: Output,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    match command {
        Mchannels::List { tenant, host } => {
            let tenant = tenant.iter().map(|tenant| ("tenant", tenant.as_str()));
            let fields: Vec<_> = tenant.chain(host.iter().map(|host| ("host", host.as_str()))).collect();
            show(out, format, &client.mchannels_with(&fields)?, |all| table(all))
        }
        Mchannels::Show { instance } => {
            show(out, format, &client.mchannel(instance)?, |it| table(std::slice::from_ref(it)))
        }
        Mchannels::Set { instance, weight, tenant, path } => {
            let spec = MchannelSpec { weight: *weight, tenant: tenant.clone(), path: path.clone() };
            client.set_mchannel(instance, &spec)?;
            done(client, out, format, ("mchannel of", instance), ("set", "would be set"))
        }
        Mchannels::Clear { instance } => {
            client.clear_mchannel(instance)?;
            done(client, out, format, ("mchannel of", instance), ("cleared", "would be cleared"))
        }
        Mchannels::Fabric { elements, signals, tenants, remove, window_us, sample_us } => {
            let before = client.fabric()?;
            let mut after = before.clone();
            after.elements.extend(elements.iter().cloned());
            after.tenants.extend(tenants.iter().cloned());
            after.signals.extend(signals.iter().cloned());
            after.signals.retain(|_, signal| *signal != FabricSignal::Off);
            for name in remove {
                let (element, tenant) = (after.elements.remove(name), after.tenants.remove(name));
                after.signals.remove(name);
                if element.is_none() && tenant.is_none() {
                    return Err(Failure::Usage(format!(
                        "{name:?} is no element and no tenant of the fabric"
                    )));
                }
            }
            after.window_us = window_us.unwrap_or(after.window_us);
            after.sample_us = sample_us.unwrap_or(after.sample_us);
            if after != before {
                // Only what was looked at is changed: it says which version that is. What is measured is not set.
                client.set_fabric(&Fabric { loads: BTreeMap::new(), ..after.clone() })?;
                // What was only tried is not there to be read.
                if !client.is_trying_only() {
                    after = client.fabric()?;
                }
            }
            show(out, format, &after, fabric)
        }
    }
}

fn per_second(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let bytes = bytes as f64;
    format!("{}/s", amount(bytes))
}

/// What a share is; free where nobody has to be held back.
fn share(share: Option<u64>) -> String {
    share.map_or_else(|| "free".to_owned(), per_second)
}

/// T_R of T_W.
fn window(vcpus: &MchannelVcpus) -> String {
    format!("{} of {} µs", vcpus.run_us, vcpus.window_us)
}

/// Of an instance whose vCPUs nobody holds, or an element that nobody looks at.
fn none() -> String {
    "-".to_owned()
}

/// How long its vCPUs may run. Of an instance with memory in the pool it matters that nobody counts them.
fn vcpus_run(it: &Mchannel) -> String {
    let nobody = || if it.vcpus_uncounted { "not counted".to_owned() } else { none() };
    it.vcpus.as_ref().map_or_else(nobody, window)
}

fn table(all: &[Mchannel]) -> String {
    if all.is_empty() {
        return "no instance has a share of the fabric: see podctl mchannel set".to_owned();
    }
    let rows = all.iter().map(|it| {
        vec![
            it.instance.clone(),
            it.host.clone(),
            it.tenant.clone(),
            it.weight.to_string(),
            it.path.join(","),
            per_second(it.rate),
            per_second(it.demand),
            share(it.share),
            format!("{} %", it.run_percent),
            format!("{} ms", it.held_ms),
            vcpus_run(it),
            it.vcpus.as_ref().map_or_else(none, |vcpus| format!("{} ms", vcpus.slept_ms)),
        ]
    });
    let header = [
        "instance",
        "host",
        "tenant",
        "weight",
        "path",
        "moves",
        "demand",
        "share",
        "runs",
        "held back",
        "vcpus run",
        "slept",
    ];
    let shown = plain(&header, &[3, 5, 6, 7, 8, 9, 10, 11], rows.collect());
    let uncounted = all.iter().filter(|it| it.vcpus_uncounted);
    match uncounted.map(|it| it.instance.as_str()).collect::<Vec<_>>().as_slice() {
        [] => shown,
        [first, ..] => format!(
            "{shown}\n\nnot counted: memory in the pool that vCPUs load and store beside all shares. On its host: systemctl enable --now wadi-slice@{first}"
        ),
    }
}

fn fabric(fabric: &Fabric) -> String {
    let elements = fabric.elements.iter().map(|(name, rate)| {
        let signal = fabric.signals.get(name).map_or_else(none, ToString::to_string);
        let load = fabric.loads.get(name);
        let level = load.and_then(|load| load.level).map_or_else(none, |level| level.to_string());
        let now = load.map_or_else(none, |load| per_second(load.capacity));
        vec![name.clone(), per_second(*rate), signal, level, now]
    });
    let elements = if fabric.elements.is_empty() {
        "nothing is shared out: see podctl mchannel fabric --element".to_owned()
    } else {
        plain(&["element", "carries", "signal", "load", "carries now"], &[1, 4], elements.collect())
    };
    let tenants = fabric.tenants.iter().map(|(name, weight)| vec![name.clone(), weight.to_string()]);
    let tenants = plain(&["tenant", "weight"], &[1], tenants.collect());
    format!(
        "shares are computed every {} µs, and {} µs of a share may be saved up\n\n{elements}\n\n{tenants}",
        fabric.sample_us, fabric.window_us
    )
}

#[cfg(test)]
mod tests {
    use pod_api::{ElementLoad, LoadLevel};

    use super::*;

    #[test]
    fn how_loaded_an_element_is_shows() {
        let load = ElementLoad { level: Some(LoadLevel::Moderate), capacity: 15_000_000_000 };
        let shown = fabric(&Fabric {
            elements: [("pool".to_owned(), 20_000_000_000), ("port1".to_owned(), 10_000_000_000)].into(),
            signals: [("pool".to_owned(), FabricSignal::Probe)].into(),
            loads: [("pool".to_owned(), load)].into(),
            ..Fabric::default()
        });
        let lines: Vec<String> =
            shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert!(lines.contains(&"pool 20.0 GB/s probe moderate overload 15.0 GB/s".to_owned()), "{shown}");
        assert!(lines.contains(&"port1 10.0 GB/s - - -".to_owned()), "{shown}");
    }

    #[test]
    fn who_is_held_back_shows() {
        let it = Mchannel {
            resource_version: String::new(),
            instance: "vm1".to_owned(),
            host: "h1".to_owned(),
            weight: 3,
            tenant: "red".to_owned(),
            path: vec!["port1".to_owned(), "pool".to_owned()],
            rate: 75_000_000,
            demand: 100_000_000,
            share: Some(75_000_000),
            run_percent: 75,
            bytes: 1,
            messages: 1,
            held_ms: 12,
            vcpus: Some(MchannelVcpus {
                run_us: 1250,
                window_us: 10_000,
                slept_ms: 34,
                ..MchannelVcpus::default()
            }),
            vcpus_uncounted: false,
        };
        let free =
            Mchannel { instance: "vm2".to_owned(), share: None, run_percent: 100, vcpus: None, ..it.clone() };
        let shown = table(&[it, free.clone()]);
        let lines: Vec<Vec<&str>> = shown.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1][..9].join(" "), "vm1 h1 red 3 port1,pool 75.0 MB/s 100.0 MB/s");
        assert_eq!(lines[1][9..].join(" "), "75.0 MB/s 75 % 12 ms 1250 of 10000 µs 34 ms");
        assert!(lines[2].contains(&"free") && lines[2].ends_with(&["-", "-"]), "{shown}");
        let shown =
            table(&[free.clone(), Mchannel { vcpus_uncounted: true, instance: "vm3".to_owned(), ..free }]);
        let words: Vec<&str> = shown.lines().nth(2).unwrap().split_whitespace().collect();
        assert!(words.ends_with(&["ms", "not", "counted", "-"]), "{shown}");
        assert!(shown.ends_with("wadi-slice@vm3"), "{shown}");
    }
}
