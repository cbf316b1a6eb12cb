//! Figures 9 to 11 once more, with all that is around the control code in a pod: windows of 1 ms and a K of 10 ms, agents that report and are told once in a K,
//! the shim's own code that puts vCPUs to sleep, and no response that tells how loaded an element is. Nothing is chosen on them.

use anyhow::Result;

use super::control::{Setting, Signal};
use super::experiments::{App, contended, gap};
use super::figures::{Apps, Basis, Rows, no_wider, prediction, well_used};
use super::parameters::Fabric;
use super::side_by_side;

/// A program beside contending threads (Figures 9 and 10), or two programs on a host (Figure 11); and what the paper has with control.
enum Case<'a> {
    Contended { app: &'a App, other_hosts: bool, slowdown: f64, used: f64 },
    Pair { apps: [&'a App; 2], gap: f64 },
}

fn cases(apps: &Apps) -> [(Case<'_>, Signal); 9] {
    let Apps { bwaves, roms, bc, pr, silo, mica } = apps;
    let in_a_host = |app| Case::Contended { app, other_hosts: false, slowdown: 2.5, used: 96.1 };
    let in_the_fabric = |app, slowdown| Case::Contended { app, other_hosts: true, slowdown, used: 97.2 };
    [
        (in_a_host(bwaves), Signal::Off),
        (in_a_host(roms), Signal::Off),
        (in_the_fabric(bc, 3.1), Signal::Off),
        (in_the_fabric(pr, 2.1), Signal::Off),
        (Case::Pair { apps: [bwaves, silo], gap: 1.3 }, Signal::Off),
        (Case::Pair { apps: [bwaves, mica], gap: 1.8 }, Signal::Off),
        (Case::Pair { apps: [mica, silo], gap: 0.1 }, Signal::Off),
        (in_the_fabric(bc, 3.1), Signal::Probe),
        (Case::Pair { apps: [bwaves, mica], gap: 1.8 }, Signal::Probe),
    ]
}

/// Adds a row for each of them.
pub(super) fn add(fabric: &Fabric, apps: &Apps, rows: &mut Rows) -> Result<()> {
    let (fabric, cases) = (&fabric.in_a_pod(), cases(apps));
    // Two at a time: each takes half a minute and more.
    for two in cases.chunks(2) {
        for of_case in side_by_side(two, |(case, signal)| case.rows(fabric, *signal))? {
            rows.extend(of_case);
        }
    }
    Ok(())
}

impl Case<'_> {
    fn rows(&self, fabric: &Fabric, signal: Signal) -> Result<Rows> {
        let (pod, how) = match signal {
            Signal::Off => ("pod", "in a pod"),
            Signal::Probe => ("pod-probe", "in a pod, signal probe"),
        };
        let name = self.name();
        let slug = |what: &str| format!("{pod}-{}-{what}", name.to_lowercase());
        let what = |what: &str| format!("{how}: {name}, {what}");
        let (mut rows, basis, setting) = (Rows::default(), Basis::HeldOut, Setting::Pod(signal));
        match self {
            Self::Contended { app, other_hosts, slowdown, used } => {
                let held = contended(fabric, app, *other_hosts, 1.0, setting)?;
                let (slowed, used) = ([*slowdown, held.slowdown], [*used, held.used * 100.0]);
                rows.add(&slug("slowdown"), &what("slowdown"), "x", slowed, basis, prediction);
                rows.add(&slug("used"), &what("link used"), "%", used, basis, well_used);
            }
            Self::Pair { apps, gap: paper } => {
                let gaps = [*paper, gap(fabric, *apps, setting)?];
                rows.add(&slug("gap"), &what("gap"), "GB/s", gaps, basis, no_wider);
            }
        }
        Ok(rows)
    }

    fn name(&self) -> String {
        match self {
            Self::Contended { app, .. } => app.name.to_owned(),
            Self::Pair { apps, .. } => format!("{}+{}", apps[0].name, apps[1].name),
        }
    }
}
