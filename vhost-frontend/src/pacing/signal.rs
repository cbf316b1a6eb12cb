//! How congested the fabric is, as this host sees it.
//!
//! What a device says in each of its responses (DevLoad) no software sees. So the host loads a line of its own past its caches now and then, and
//! looks how much longer that takes than it once did; or asks the device's mailbox, where it has one.

use std::time::Duration;

use cxl_pool::mailbox::Mailbox;
use cxl_pool::{ByteOffset, Memory};
use mem_channel::DevLoad;
use pod_protocol::objects::Signal;

/// In each K it is looked so often.
const PROBES: u32 = 8;
/// Of so many loads in a row the shortest counts: what an interrupt, or another thread of the host, held up is not the fabric's fault.
const LOADS: u32 = 4;
/// A device is asked no more often than that: for its mailbox each question is work, and others have questions too.
const ASKED_EVERY_US: f64 = 100_000.0;

/// What was seen since the last look.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Load {
    /// The highest level that was seen at least half of the time.
    pub(super) level: DevLoad,
    /// L of Eq. 6: the part with moderate or severe overload, or of time with backpressure.
    pub(super) overloaded_part: f64,
}

/// Tells how loaded the way to the pool is.
pub(super) trait LoadSignal: Send {
    /// What it is like now; nothing if that cannot be told.
    fn look(&mut self, now_us: f64) -> Option<Load>;
}

/// All signals that a frontend has, by what operators call them.
pub(super) struct Signals {
    pub(super) probe: Box<dyn LoadSignal>,
    pub(super) device: Box<dyn LoadSignal>,
}

impl Signals {
    /// Of a pool, of which this line is this host's own.
    pub(super) fn new<M: Memory>(memory: M, line: ByteOffset) -> Self {
        let probe = Probe::new(move || memory.time_load(line));
        Self { probe: Box::new(probe), device: Box::new(Device::default()) }
    }

    /// The one that was chosen.
    pub(super) fn chosen(&mut self, signal: Signal) -> Option<&mut dyn LoadSignal> {
        match signal {
            Signal::Off => None,
            Signal::Probe => Some(self.probe.as_mut()),
            Signal::Device => Some(self.device.as_mut()),
        }
    }
}

/// Times loads of a line past all caches of this host.
pub(super) struct Probe<F> {
    load: F,
    /// The shortest time that a load ever took: that of an idle path.
    least: Duration,
}

impl<F: FnMut() -> Option<Duration> + Send> Probe<F> {
    pub(super) fn new(load: F) -> Self {
        Self { load, least: Duration::MAX }
    }
}

impl<F: FnMut() -> Option<Duration> + Send> LoadSignal for Probe<F> {
    fn look(&mut self, _now_us: f64) -> Option<Load> {
        let mut levels = [DevLoad::Light; PROBES as usize];
        for level in &mut levels {
            let mut took = Duration::MAX;
            for _ in 0..LOADS {
                took = took.min((self.load)()?);
            }
            // A clock that stands still says nothing.
            let took = took.max(Duration::from_nanos(1));
            self.least = self.least.min(took);
            *level = DevLoad::of_ratio(took.as_secs_f64() / self.least.as_secs_f64());
        }
        levels.sort_unstable();
        let overloaded = levels.iter().filter(|level| level.is_overload()).count();
        let part = f64::from(u32::try_from(overloaded).unwrap_or(PROBES)) / f64::from(PROBES);
        Some(Load { level: levels[levels.len() / 2], overloaded_part: part })
    }
}

/// Asks the memory devices of the host for how much of the time they hold back responses.
#[derive(Default)]
struct Device {
    mailboxes: Option<Vec<Mailbox>>,
    last: Option<(f64, Option<Load>)>,
}

impl LoadSignal for Device {
    fn look(&mut self, now_us: f64) -> Option<Load> {
        if let Some((at_us, load)) = self.last
            && now_us - at_us < ASKED_EVERY_US
        {
            return load;
        }
        let mailboxes = self.mailboxes.get_or_insert_with(|| {
            let found = Mailbox::all();
            if found.is_empty() {
                tracing::warn!(
                    "this host has no CXL memory device whose mailbox may be asked (/dev/cxl/mem*): the load of the fabric is not known here"
                );
            }
            found
        });
        let load = worst(mailboxes.iter().filter_map(Mailbox::backpressure_percent));
        self.last = Some((now_us, load));
        load
    }
}

/// What several devices together come to, of each the percentage of time with backpressure: the path is as congested as the worst of them.
fn worst(percentages: impl Iterator<Item = u8>) -> Option<Load> {
    let part = f64::from(percentages.max()?.min(100)) / 100.0;
    Some(Load { level: DevLoad::of_part(part), overloaded_part: part })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn a_probe_compares_with_the_shortest_time_that_it_has_seen() {
        let now_ns = Arc::new(AtomicU64::new(400));
        let seen = Arc::clone(&now_ns);
        let mut probe = Probe::new(move || Some(Duration::from_nanos(seen.load(Ordering::Relaxed))));
        let mut look = |ns| {
            now_ns.store(ns, Ordering::Relaxed);
            let load = probe.look(0.0).unwrap();
            (load.level, load.overloaded_part)
        };
        assert_eq!(look(400), (DevLoad::Light, 0.0), "the first look has nothing to compare with");
        assert_eq!(look(900), (DevLoad::Moderate, 1.0));
        assert_eq!(look(300), (DevLoad::Light, 0.0));
        assert_eq!(look(450), (DevLoad::Optimal, 0.0));
        assert_eq!(look(1200), (DevLoad::Severe, 1.0));
    }

    #[test]
    fn what_holds_up_some_of_the_loads_is_not_the_fabrics_fault() {
        let mut number = 0_u64;
        let mut probe = Probe::new(move || {
            number += 1;
            // Three of four are preempted.
            Some(Duration::from_nanos(if number.is_multiple_of(4) { 300 } else { 1_000_000 }))
        });
        for _ in 0..3 {
            assert_eq!(probe.look(0.0), Some(Load { level: DevLoad::Light, overloaded_part: 0.0 }));
        }
        assert_eq!(Probe::new(|| None).look(0.0), None);
    }

    #[test]
    fn of_devices_the_worst_counts() {
        assert_eq!(worst([].into_iter()), None);
        assert_eq!(worst([3, 60].into_iter()), Some(Load { level: DevLoad::Moderate, overloaded_part: 0.6 }));
        assert_eq!(worst([255].into_iter()), Some(Load { level: DevLoad::Severe, overloaded_part: 1.0 }));
    }
}
