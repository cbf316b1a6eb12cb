//! `vmm slice`: holds the vCPUs of a machine to a part of their time, or to their VM's share of the fabric.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use pod_protocol::daemon::StopSignal;
use vmm::slicing::{self, Choice, HOLDS_FOR, Kind, RESCTRL, Share, VcpuThreads, VcpuUse, WakeUp};
use vmm::{Registry, RunningVm, VmmError};

use crate::{fair, print};

/// How often a machine is looked for that does not run yet.
const LOOK_FOR_MACHINE: Duration = Duration::from_millis(500);
/// How often what was missing is tried again.
const TRY_AGAIN: Duration = Duration::from_secs(2);

#[derive(Args)]
pub(crate) struct Slice {
    /// The machine, as `vmm list` names it.
    name: String,
    /// How much of its time a vCPU may run, in percent; 100 frees it. `fair`: so much that what it loads and stores is its VM's share of
    /// the fabric, as `podctl mchannel` gives it.
    #[arg(long, value_name = "PERCENT|fair")]
    pub(crate) share: Share,
    /// The window in µs; without it, the smallest that costs at most 1.7 % on this host, and for `--share fair` no shorter than the
    /// fabric's.
    #[arg(long, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u64).range(50..=1_000_000))]
    pub(crate) window: Option<u64>,
    /// How it is done; without it, the best that the machine allows.
    #[arg(long, value_enum)]
    pub(crate) actuator: Option<Kind>,
    /// Where the resctrl file system is by which `--share fair` counts; a control group in it, if the vCPUs are in one.
    #[arg(long, value_name = "DIRECTORY", default_value = RESCTRL)]
    pub(crate) resctrl: PathBuf,
    /// With `--share fair`: also for a guest of which no memory lies in the pool, whose loads and stores do not go over the fabric.
    #[arg(long)]
    pub(crate) any_ram: bool,
    /// Wait until the machine runs here, and with `--share fair` until its share, the counters and a frontend are there, however long that
    /// takes. What is missing is said once.
    #[arg(long)]
    pub(crate) wait: bool,
    /// This host's configuration, by which `--share fair` finds the frontends.
    #[arg(long, value_name = "FILE", default_value = "/etc/wadi/host.toml")]
    pub(crate) config: PathBuf,
    /// End after so many seconds.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) seconds: Option<u64>,
    /// Where machines are noted.
    #[arg(long, default_value = "/run/wadi/vm")]
    directory: PathBuf,
}

pub(crate) fn slice(asked: &Slice) -> Result<()> {
    let registry = Registry::new(&asked.directory);
    let stop = StopSignal::on_signals()?;
    let Some(machine) = find(asked, &registry, &stop)? else { return Ok(()) };
    let _alone = registry.lock_vcpus(&machine)?;
    match asked.share {
        Share::Percent(percent) => hold(asked, &machine, percent, &stop),
        Share::Fair => fair::hold(asked, &machine, &stop),
    }
}

/// The machine; nothing if it is waited for and that was to end.
fn find(asked: &Slice, registry: &Registry, stop: &StopSignal) -> Result<Option<RunningVm>> {
    let mut waits = false;
    loop {
        match registry.find(&asked.name) {
            Err(VmmError::Machine { reason }) if asked.wait => {
                if !std::mem::replace(&mut waits, true) {
                    eprintln!("{reason}; it is waited for");
                }
                if stop.wait_for(LOOK_FOR_MACHINE) {
                    return Ok(None);
                }
            }
            found => return Ok(Some(found?)),
        }
    }
}

/// Begins, again and again as long as it is worth waiting for what is missing; why it does not is said when that is something else than before, so that
/// no journal is filled with a processor that counts nothing. Nothing if it was to end meanwhile.
pub(crate) fn until_it_begins<T>(
    stop: &StopSignal,
    waits: impl Fn() -> bool,
    begin: impl FnMut() -> Result<T>,
) -> Result<Option<T>> {
    try_until_it_begins(
        || stop.wait_for(TRY_AGAIN),
        waits,
        begin,
        |reason| eprintln!("{reason}; it is waited for"),
    )
}

fn try_until_it_begins<T>(
    mut is_to_end: impl FnMut() -> bool,
    waits: impl Fn() -> bool,
    mut begin: impl FnMut() -> Result<T>,
    mut say: impl FnMut(&str),
) -> Result<Option<T>> {
    let mut before = None;
    loop {
        match begin() {
            Err(error) if waits() => {
                let reason = format!("{error:#}");
                if before.as_ref() != Some(&reason) {
                    say(&reason);
                    before = Some(reason);
                }
                if is_to_end() {
                    return Ok(None);
                }
            }
            result => return result.map(Some),
        }
    }
}

/// The machine, what holds it, and why that.
pub(crate) fn chosen(machine: &RunningVm, choice: &Choice) -> String {
    format!("{}: {} ({})", machine.name, choice.actuator.name(), choice.reason)
}

fn hold(asked: &Slice, machine: &RunningVm, percent: f64, stop: &StopSignal) -> Result<()> {
    let cost = WakeUp::measure();
    let window = asked.window.map_or_else(|| cost.window(), Duration::from_micros);
    let mut choice = slicing::choose(machine, asked.actuator, asked.share)?;
    // The shim may slice a machine whose monitor somebody else has.
    let threads = VcpuThreads::watch(machine, Vec::new())?;
    let duty = slicing::duty(percent / 100.0, window);
    let used = choice.actuator.set(duty).context("the vCPUs run freely")?;
    print(&format!("{}; {}\n", chosen(machine, &choice), cost.describe(used)))?;
    let began = Instant::now();
    let limit = asked.seconds.map(Duration::from_secs);
    let mut renew = || -> Result<()> {
        while !stop.wait_for(HOLDS_FOR / 10) {
            if limit.is_some_and(|limit| began.elapsed() >= limit) || !machine.process.runs() {
                return Ok(());
            }
            let followed = threads.changed();
            if let Some(threads) = &followed {
                choice.actuator.follow(threads)?;
            }
            if !duty.is_full() || followed.is_some() {
                choice.actuator.set(duty)?;
            }
        }
        Ok(())
    };
    let ended = renew();
    let usage = choice.actuator.usage();
    // Whatever happened, they run freely again.
    drop(choice);
    print(&table(&usage?))?;
    ended
}

pub(crate) fn table(usage: &[VcpuUse]) -> String {
    let mut text = "THREAD   RAN %  SLEPT %    SLEEPS  RETRIES  MISSED  SPREAD OF A WINDOW\n".to_owned();
    for vcpu in usage {
        let part = |time: Duration| 100.0 * time.as_secs_f64() / vcpu.elapsed.as_secs_f64().max(1e-9);
        let spread = vcpu.spread_points().map_or("-".to_owned(), |points| format!("{points:.1} points"));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:<8} {:>5.1} {:>8.1} {:>9} {:>8} {:>7}  {spread}",
            vcpu.thread,
            part(vcpu.ran),
            part(vcpu.slept),
            vcpu.sleeps,
            vcpu.retries,
            vcpu.missed
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    /// Tries until that works or is to end at the look with this number; what was said, and what came of it.
    fn tried(waits: bool, end_at: usize) -> (Vec<String>, Result<Option<usize>>) {
        let (mut reasons, mut tries, mut looks) = (Vec::new(), 0, 0);
        let begin = || {
            tries += 1;
            match tries {
                1 | 2 => bail!("no counters"),
                3..=5 => bail!("no frontend"),
                _ => Ok(tries),
            }
        };
        let is_to_end = || {
            looks += 1;
            looks == end_at
        };
        let result =
            try_until_it_begins(is_to_end, || waits, begin, |reason| reasons.push(reason.to_owned()));
        (reasons, result)
    }

    #[test]
    fn what_is_missing_is_said_once_however_often_it_is_tried() {
        let (said, begun) = tried(true, usize::MAX);
        assert_eq!(said, ["no counters", "no frontend"]);
        assert_eq!(begun.unwrap(), Some(6));
    }

    #[test]
    fn who_does_not_wait_fails_and_who_is_to_end_does() {
        let (said, begun) = tried(false, usize::MAX);
        assert!(said.is_empty());
        assert_eq!(begun.unwrap_err().to_string(), "no counters");
        assert_eq!(tried(true, 2).1.unwrap(), None);
    }
}
