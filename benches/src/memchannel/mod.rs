//! `memchannel`: sharing the bandwidth of a modelled CXL fabric, against the paper's measurements on a real one.

mod choice;
mod control;
mod experiments;
mod fabric;
mod figures;
mod in_a_pod;
mod loads;
mod parameters;
mod scale;
mod sliced;
mod summary;
mod topology;

use std::path::Path;

use anyhow::Result;
use clap::Args;

use self::control::Setting;
use self::parameters::Fabric;

/// The bandwidth of a CXL fabric: without control and with MemChannel, against the paper's figures (NSDI '26).
///
/// The fabric is simulated event by event, a cache line at a time: virtual lanes, credits, head-of-line blocking, prefetches.
/// Its parameters are fitted to measurements without control. Three only matter to control: how many waiting lines count as overload, δ, and what control is
/// told that a link carries. These are chosen on one program, Bwaves of Figure 9, for use of the link and its slowdown; what all others do with control is held out. Control is the very code
/// that hosts run. Simulated time does not depend on the machine; the cost of a scheduling step does.
#[derive(Args, Default)]
pub(crate) struct Options {
    /// Leave out what each parameter does.
    #[arg(long)]
    no_sensitivity: bool,
}

/// Runs it.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    let apps = figures::fit_apps(&Fabric::PAPER)?;
    let tried = choice::tried(&Fabric::PAPER, &apps.bwaves)?;
    // Programs are fitted without control, for which it does not matter.
    let fabric = choice::chosen(&tried)?;
    let rows = figures::all(&fabric, &apps)?;
    let curves = summary::curves(&fabric, &apps)?;
    let levels = [Setting::Uncontrolled, Setting::Paper]
        .map(|setting| experiments::levels(&fabric, &apps.bwaves, setting));
    let [without, with] = levels;
    let levels = [without?, with?];
    let scale = scale::run()?;
    let mut sensitivity = Vec::new();
    if !options.no_sensitivity {
        for (number, parameter) in parameters::KNOWN.iter().enumerate() {
            for factor in [0.8, 1.2] {
                let mut changed = fabric;
                *(parameter.of)(&mut changed) *= factor;
                let apps = figures::fit_apps(&changed)?;
                sensitivity.push((number, factor, figures::key(&changed, &apps)?));
            }
        }
    }
    summary::write(
        &summary::Findings { fabric, tried, apps, rows, curves, levels, scale, sensitivity },
        output,
    )
}
