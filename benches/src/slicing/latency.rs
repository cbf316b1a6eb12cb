//! How late timers fire, and how long echo requests take, inside a guest whose vCPU is held to a share of its time.

use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guest_images::{Guest, Silent};
use vmm::slicing::{self, Choice, HOLDS_FOR, Kind, Share, find_shim};
use vmm::{RunningVm, VmSpec};
use wadi_tests::pod::{GUEST_ADDRESS, HostPlan, Pod, PodBuilder, PodVm, VmShape};
use wadi_tests::probe::Probe;

use super::SETTLE;

/// The shares that are asked for, in percent.
const SHARES: [f64; 3] = [80.0, 50.0, 20.0];
/// In µs. A multiple of no window: each timer is due at another time of its window.
const TIMER_EVERY_US: u64 = 3700;
/// What the guest does meanwhile: nothing that timers and packets would have to wait for, had it all of its vCPU.
const ALWAYS_BUSY: &str = "renice -n 19 -p $$ && while :; do :; done";

/// How the vCPU is held.
#[derive(Clone, Copy)]
pub(super) struct Held {
    pub(super) kind: Kind,
    pub(super) window: Duration,
    /// In percent.
    pub(super) share: f64,
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} us {:.0} %", self.kind, self.window.as_micros(), self.share)
    }
}

/// What was seen of one kind of event.
#[derive(Clone, Copy)]
pub(super) struct Latencies {
    pub(super) median: Duration,
    pub(super) p99: Duration,
    pub(super) worst: Duration,
}

/// What the guest of one setting saw.
pub(super) struct Latency {
    /// None where nobody held it.
    pub(super) held: Option<Held>,
    /// From when a timer was due until its thread ran, which comes before all else in the guest.
    pub(super) timers: Latencies,
    /// From a host beyond the pod's NIC to the guest and back.
    pub(super) echoes: Latencies,
    /// Echo requests that were not answered.
    pub(super) lost: usize,
}

/// Boots a guest with a NIC on another host, and measures it under each of these windows for so long.
pub(super) fn measure(windows: &[Duration], length: Duration) -> Result<Vec<Latency>> {
    let image = Guest::ensure(&mut Silent)?;
    let pod = PodBuilder::new()
        .coherence("hardware")
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0"))
        .start()?;
    let instance = pod.create_instance("vm1", "h1", &[])?;
    let shim = find_shim().context("the shim is not built: build vmm with cargo")?;
    let shape = VmShape { cpus: 1, ..VmShape::default() };
    let spec = VmSpec { vcpu_shim: Some(shim), ..pod.machine(&instance, &image, shape) };
    let mut vm = pod.begin_machine(&instance, spec)?.arrived()?;
    vm.exec(&format!("ip address add {GUEST_ADDRESS}/24 dev eth0 && ip link set eth0 up"))?;
    let running = vm.qemu().running().context("QEMU has ended")?.clone();
    let busy = vm.start(ALWAYS_BUSY)?;
    let mut settings = vec![None];
    for share in SHARES {
        for window in windows {
            let held = |kind| Some(Held { kind, window: *window, share });
            settings.extend([held(Kind::Shim), held(Kind::Cgroup)]);
        }
    }
    let latencies = settings.into_iter().map(|held| one(&pod, &vm, &running, held, length)).collect();
    ensure!(busy.outcome().is_none(), "the guest was not busy all the time");
    latencies
}

fn one(pod: &Pod, vm: &PodVm, running: &RunningVm, held: Option<Held>, length: Duration) -> Result<Latency> {
    let mut order = held.map(|held| Order::give(running, held)).transpose()?;
    let mut hold_while = |going_on: &mut dyn FnMut() -> bool| -> Result<()> {
        while going_on() {
            if let Some(order) = &mut order {
                order.renew()?;
            }
            thread::sleep(HOLDS_FOR / 20);
        }
        Ok(())
    };

    let timers = length.as_micros() / u128::from(TIMER_EVERY_US);
    let job = vm.start(&format!(
        "cyclictest --quiet --verbose --policy=fifo --priority=80 --interval={TIMER_EVERY_US} --loops={timers}"
    ))?;
    let mut outcome = None;
    hold_while(&mut || {
        outcome = job.outcome();
        outcome.is_none()
    })?;
    let outcome = outcome.context("cyclictest has no end")?;
    ensure!(outcome.success(), "cyclictest: {}", String::from_utf8_lossy(&outcome.stderr));
    let timers = Latencies::of(late_timers(&outcome.text()))?;

    let (probe, began) = (Probe::start(pod.client_namespace(), GUEST_ADDRESS)?, Instant::now());
    hold_while(&mut || began.elapsed() < length)?;
    let echoes = probe.echoes()?;
    let lost = echoes.iter().filter(|echo| echo.round_trip.is_none()).count();
    let echoes = Latencies::of(echoes.iter().filter_map(|echo| echo.round_trip).collect())?;
    Ok(Latency { held, timers, echoes, lost })
}

/// An order that is renewed while it is to hold.
struct Order {
    choice: Choice,
    duty: slicing::Duty,
    renewed: Instant,
}

impl Order {
    fn give(running: &RunningVm, held: Held) -> Result<Self> {
        let duty = slicing::duty(held.share / 100.0, held.window);
        let mut choice = slicing::choose(running, Some(held.kind), Share::Percent(held.share))
            .with_context(|| format!("the {} cannot be measured", held.kind))?;
        choice.actuator.set(duty)?;
        thread::sleep(SETTLE);
        Ok(Self { choice, duty, renewed: Instant::now() })
    }

    fn renew(&mut self) -> Result<()> {
        if self.renewed.elapsed() > HOLDS_FOR / 10 {
            self.renewed = Instant::now();
            self.choice.actuator.set(self.duty)?;
        }
        Ok(())
    }
}

/// What cyclictest says of each timer: a thread, a number, and µs.
fn late_timers(said: &str) -> Vec<Duration> {
    let late = said.lines().filter_map(|line| {
        let mut fields = line.split(':').map(|field| field.trim().parse::<u64>());
        match (fields.next(), fields.next(), fields.next(), fields.next()) {
            (Some(Ok(_)), Some(Ok(_)), Some(Ok(late)), None) => Some(Duration::from_micros(late)),
            _ => None,
        }
    });
    // The first one is due before its thread is ready.
    late.skip(1).collect()
}

impl Latencies {
    fn of(mut seen: Vec<Duration>) -> Result<Self> {
        seen.sort_unstable();
        ensure!(!seen.is_empty(), "nothing was seen in the guest: measure for longer");
        let at = |percent: usize| seen[(seen.len() * percent / 100).min(seen.len() - 1)];
        Ok(Self { median: at(50), p99: at(99), worst: at(100) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cyclictest_says_is_understood() {
        let said = "# /dev/cpu_dma_latency set to 0us\nMax CPUs = 1\nThread 0 Interval: 3700\n       0:       0:   14993\n       \
                    0:       1:      67\n       0:       2:     106\nT: 0 (   72) P:80 I:3700 C:      3 Min:     67 Act:   93\n";
        assert_eq!(late_timers(said), [67, 106].map(Duration::from_micros));
    }

    #[test]
    fn percentiles_are_those_of_what_was_seen() {
        let seen = (1..=200).rev().map(Duration::from_micros).collect();
        let Latencies { median, p99, worst } = Latencies::of(seen).expect("some");
        assert_eq!([median, p99, worst], [101, 199, 200].map(Duration::from_micros));
        assert!(Latencies::of(Vec::new()).is_err());
    }
}
