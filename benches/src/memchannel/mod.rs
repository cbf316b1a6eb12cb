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

use std::panic::resume_unwind;
use std::path::Path;
use std::thread::ScopedJoinHandle;

use anyhow::Result;
use clap::Args;

use self::control::Setting;
use self::parameters::Fabric;

/// The bandwidth of a CXL fabric: without control and with MemChannel, against the paper's figures (NSDI '26).
///
/// The fabric is simulated event by event, a cache line at a time: virtual lanes, credits, head-of-line blocking, prefetches.
/// Its parameters are fitted to measurements without control. Three only matter to control: how many waiting lines count as overload, δ, and what control is
/// told that a link carries. These are chosen on one program, Bwaves of Figure 9, for use of the link and its slowdown; what all others do with control is held out. Control is the very code
/// that hosts run, with the paper's windows around it, and once more with all that a pod has there. Simulated time does not depend on the machine; the cost of a scheduling step does.
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
    let sensitivity = if options.no_sensitivity { Vec::new() } else { figures::sensitivity(&fabric)? };
    summary::write(
        &summary::Findings { fabric, tried, apps, rows, curves, levels, scale, sensitivity },
        output,
    )
}

/// Does the same with each of a few things at once, on a thread each; what comes of them in their order.
fn side_by_side<T: Sync, R: Send>(all: &[T], work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    std::thread::scope(|scope| {
        let running: Vec<_> = all.iter().map(|it| scope.spawn(|| work(it))).collect();
        let join = |it: ScopedJoinHandle<'_, _>| it.join().unwrap_or_else(|panic| resume_unwind(panic));
        running.into_iter().map(join).collect()
    })
}
