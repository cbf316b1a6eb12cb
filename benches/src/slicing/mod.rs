//! `slicing`: what share of its time a vCPU gets that is held to one, by the shim in its QEMU and by the kernel's quota, and how late
//! timers and packets are inside its guest.

mod latency;
mod machine;
mod summary;
mod windows;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use vmm::slicing::{self, HOLDS_FOR, Kind, Share, WakeUp};

use self::machine::BusyMachine;

/// The shares that are asked for, in percent.
const SHARES: [f64; 9] = [5.0, 10.0, 20.0, 35.0, 50.0, 65.0, 80.0, 90.0, 95.0];
/// The part of the time that slicing may cost.
const OVERHEAD_MAX: f64 = 0.017;
/// How long a new order may take to settle.
const SETTLE: Duration = Duration::from_millis(100);

/// Requested against obtained share of a vCPU that always wants to run (an emulated guest with one vCPU): by the shim and, as its
/// rival, by the kernel's processor quota.
///
/// Then the same inside a guest of a pod that has a NIC on another host: how late its timers fire (cyclictest), and how long echo
/// requests take to it and back.
#[derive(Args)]
pub(crate) struct Options {
    /// For how many seconds each share is measured.
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    seconds: f64,
    /// Measure windows of 100 µs although wake-ups cost too much here.
    #[arg(long)]
    shortest: bool,
    /// Hold a vCPU that KVM runs, in place of an emulated one: it counts, for which KVM on a virtual machine may be good enough. Timers
    /// and packets are left out.
    #[arg(long)]
    kvm: bool,
    /// For how many seconds timers, and then packets, of a guest are looked at under each setting.
    #[arg(long, default_value_t = 5.0, value_name = "SECONDS")]
    latency_seconds: f64,
    /// Leave out the shares: only how late timers and packets are.
    #[arg(long, conflicts_with = "kvm")]
    latency_only: bool,
}

impl Options {
    /// Within all benchmarks.
    pub(crate) fn short() -> Self {
        Self { seconds: 10.0, shortest: false, kvm: false, latency_seconds: 5.0, latency_only: false }
    }
}

/// A way to slice.
#[derive(Clone, Copy)]
struct Setting {
    kind: Kind,
    window: Duration,
}

/// For how long single windows are looked at, apart from the share: looking costs the vCPU a little.
const SPREAD_MOST: Duration = Duration::from_secs(2);

/// What was obtained for one share.
struct Obtained {
    /// What was asked for, in percent.
    requested: f64,
    /// Processor time over time, in percent.
    percent: f64,
    /// The standard deviation of a window's share, in points.
    spread: f64,
    /// The window that was really used.
    window: Duration,
}

struct Measured {
    setting: Setting,
    obtained: Vec<Obtained>,
}

struct Findings {
    wake_up: WakeUp,
    /// What a vCPU gets that nobody holds, in percent.
    free: f64,
    /// How often the shim looked at a vCPU that nobody held.
    looks_at_full_duty: u64,
    measured: Vec<Measured>,
}

/// Windows that are asked for, in µs.
const WINDOWS: [u64; 2] = [10_000, 1000];

/// Runs it.
pub(crate) fn run(options: &Options, output: &Path) -> Result<()> {
    if !options.latency_only {
        shares(options, output)?;
    }
    if options.kvm {
        return Ok(());
    }
    let length = Duration::from_secs_f64(options.latency_seconds.clamp(0.5, 600.0));
    summary::write_latencies(&latency::measure(&WINDOWS.map(Duration::from_micros), length)?, output)
}

fn shares(options: &Options, output: &Path) -> Result<()> {
    let length = Duration::from_secs_f64(options.seconds.clamp(0.1, 600.0));
    let wake_up = WakeUp::measure();
    let machine = if options.kvm { BusyMachine::count_in_kvm()? } else { BusyMachine::boot()? };
    let free = machine.share(length, || Ok(()))?;
    let name = if options.kvm { "slicing-kvm" } else { "slicing" };
    let mut settings: Vec<Setting> = WINDOWS
        .into_iter()
        .flat_map(|us| [Kind::Shim, Kind::Cgroup].map(|kind| (kind, us)))
        .map(|(kind, us)| Setting { kind, window: Duration::from_micros(us) })
        .collect();
    let shortest = Duration::from_micros(100);
    if options.shortest || wake_up.overhead(shortest) <= OVERHEAD_MAX {
        settings.push(Setting { kind: Kind::Shim, window: shortest });
    }
    let mut measured: Vec<Measured> =
        settings.into_iter().map(|setting| Measured { setting, obtained: Vec::new() }).collect();
    let looks_at_full_duty = machine.looks()?;
    // Rivals take turns.
    for requested in SHARES {
        for one in &mut measured {
            one.obtained.push(measure(&machine, one.setting, requested, length)?);
        }
    }
    summary::write(&Findings { wake_up, free, looks_at_full_duty, measured }, name, output)
}

fn measure(machine: &BusyMachine, setting: Setting, requested: f64, length: Duration) -> Result<Obtained> {
    let duty = slicing::duty(requested / 100.0, setting.window);
    let mut choice = slicing::choose(machine.running(), Some(setting.kind), Share::Percent(requested))
        .with_context(|| format!("the {} cannot be measured", setting.kind))?;
    let window = choice.actuator.set(duty)?;
    thread::sleep(SETTLE);
    let mut renewed = Instant::now();
    let mut renew = || {
        if renewed.elapsed() > HOLDS_FOR / 10 {
            renewed = Instant::now();
            choice.actuator.set(duty)?;
        }
        Ok(())
    };
    let percent = machine.share(length, &mut renew)?;
    let spread = windows::spread_points(machine.thread(), window, length.min(SPREAD_MOST), renew)?;
    Ok(Obtained { requested, percent, spread, window })
}
