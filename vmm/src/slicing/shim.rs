//! The first choice: a library inside QEMU puts vCPU threads to sleep, in windows down to 100 µs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Actuator, ControlFile, Duty, HOLDS_FOR, VcpuUse, failed};
use crate::{RunningVm, VmmError};

const LIBRARY: &str = "libvcpu_shim.so";

/// Commands the shim in one QEMU. When it is dropped, the vCPUs run freely.
#[derive(Debug)]
pub struct ShimActuator {
    file: ControlFile,
    /// The order that was written last, by this one.
    ordered: Option<Duty>,
}

impl ShimActuator {
    /// Commands the shim in the QEMU of `machine`, if there is one.
    pub fn new(machine: &RunningVm) -> Result<Self, VmmError> {
        let path = machine
            .vcpu_control
            .as_deref()
            .ok_or_else(|| failed("its QEMU was started without the shim".to_owned()))?;
        let file = ControlFile::open(path)?;
        if let Some(why) = file.failure()? {
            return Err(failed(format!("the shim cannot slice: {why}")));
        }
        // A QEMU with threads that have no names says through its monitor which are vCPUs.
        if file.process()? != Some(machine.process.pid) {
            return Err(failed(
                "the shim was not loaded into its QEMU, or has not seen a vCPU yet".to_owned(),
            ));
        }
        let actuator = Self { file, ordered: None };
        if let Ok(vcpus) = machine.vcpus() {
            let threads: Vec<u32> = vcpus.iter().map(|vcpu| vcpu.thread_id).collect();
            actuator.file.ask(&threads)?;
        }
        Ok(actuator)
    }

    /// Whether the shim has taken up the last order.
    pub fn taken(&self) -> Result<bool, VmmError> {
        self.file.taken()
    }
}

impl Actuator for ShimActuator {
    fn name(&self) -> &'static str {
        "shim"
    }

    /// Each window's error is carried into the next one.
    fn exact_over(&self) -> Duration {
        Duration::ZERO
    }

    fn set(&mut self, duty: Duty) -> Result<Duration, VmmError> {
        if let Some(why) = self.file.failure()? {
            return Err(failed(format!("the shim cannot slice: {why}")));
        }
        match self.ordered {
            // Threads that run freely do so for ever.
            Some(before) if duty.is_full() && before.is_full() => {}
            Some(before) if duty == before => self.file.renew(HOLDS_FOR)?,
            _ => {
                // Whatever of it was written, if that fails.
                self.ordered = None;
                self.file.command(duty, HOLDS_FOR)?;
                self.ordered = Some(duty);
            }
        }
        Ok(Duration::from_nanos(duty.window_ns))
    }

    fn follow(&mut self, threads: &[u32]) -> Result<(), VmmError> {
        // It sees by itself when one ends, and knows most others by their names before they are plugged in.
        self.file.ask(threads)
    }

    fn usage(&self) -> Result<Vec<VcpuUse>, VmmError> {
        self.file.usage()
    }
}

impl Drop for ShimActuator {
    fn drop(&mut self) {
        // Otherwise it ends by its deadline.
        let _ = self.file.command(Duty::FULL, Duration::ZERO);
    }
}

/// Where the shim is: beside this program, or where it is installed.
pub fn find_shim() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let beside = program.parent()?;
    let places = [
        // Cargo leaves there what a program depends on.
        beside.join("deps").join(LIBRARY),
        beside.join(LIBRARY),
        beside.join("../lib/wadi").join(LIBRARY),
        Path::new("/usr/lib/wadi").join(LIBRARY),
    ];
    places.into_iter().find(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::os::unix::fs::FileExt as _;

    use rustix::time::{ClockId, clock_gettime};
    use vcpu_slicing::{Command, Control, Order};

    use super::*;

    #[test]
    fn the_shim_of_another_process_is_not_commanded() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vm1-vcpus");
        ControlFile::create(&path).unwrap();
        let machine =
            RunningVm { vcpu_control: Some(path.clone()), ..RunningVm::of_this_process("/nowhere".into()) };
        for (word, fits) in [(0, false), (machine.process.pid + 1, false), (machine.process.pid, true)] {
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.write_all_at(&word.to_ne_bytes(), offset_of!(Control, process) as u64).unwrap();
            let found = ShimActuator::new(&machine);
            assert_eq!(found.is_ok(), fits, "{word}");
            let error = found.err().map_or(String::new(), |error| error.to_string());
            assert!(fits || error.contains("not loaded into its QEMU"), "{error}");
        }
    }

    #[test]
    fn who_is_commanded_no_more_runs_freely() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vm1-vcpus");
        ControlFile::create(&path).unwrap();
        let mut shim = ShimActuator { file: ControlFile::open(&path).unwrap(), ordered: None };
        let order = || {
            let bytes = std::fs::read(&path).unwrap();
            let word = |at: usize| {
                let at = offset_of!(Control, order) + at;
                u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
            };
            let version = word(offset_of!(Order, ended));
            assert_eq!(word(offset_of!(Order, begun)), version, "it is whole");
            let duty = Duty {
                run_ns: word(offset_of!(Order, run_ns)),
                window_ns: word(offset_of!(Order, window_ns)),
            };
            Command { version, duty, until_ns: word(offset_of!(Order, until_ns)) }
        };
        let now = || {
            let now = clock_gettime(ClockId::Monotonic);
            u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec).unwrap()
        };
        let (duty, before) = (Duty { run_ns: 1, window_ns: 4 }, now());
        shim.set(duty).unwrap();
        let (first, holds_ns) = (order(), u64::try_from(HOLDS_FOR.as_nanos()).unwrap());
        assert!(first.duty == duty && first.slices(before), "{first:?}");
        assert!((before + holds_ns..=now() + holds_ns).contains(&first.until_ns), "it ends by itself");
        // Renewed it is the same order, and holds for longer.
        let bytes = || std::fs::read(&path).unwrap();
        let (written, at) = (bytes(), offset_of!(Control, order) + offset_of!(Order, until_ns));
        shim.set(duty).unwrap();
        let renewed = Command { until_ns: order().until_ns, ..first };
        assert!(order() == renewed && renewed.until_ns > first.until_ns, "{renewed:?}");
        let differ: Vec<usize> = (0..written.len()).filter(|byte| written[*byte] != bytes()[*byte]).collect();
        assert!(differ.iter().all(|byte| (at..at + 8).contains(byte)), "one word: {differ:?}");
        let another = Duty { run_ns: 2, ..duty };
        shim.set(another).unwrap();
        assert!(order().version > first.version && order().duty == another, "it is news");
        // Who runs freely is not told so again and again.
        shim.set(Duty::FULL).unwrap();
        let freed = (order(), bytes());
        assert!(freed.0.duty.is_full() && !freed.0.slices(before), "{:?}", freed.0);
        shim.set(super::super::duty(1.0, Duration::from_millis(10))).unwrap();
        assert!(freed.1 == bytes(), "nothing was written");
        shim.set(duty).unwrap();
        assert!(order().slices(before) && order().version > freed.0.version, "{:?}", order());
        drop(shim);
        assert!(!order().slices(before), "{:?}", order());
    }

    #[test]
    fn it_is_told_of_vcpus_that_come_and_go() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vm1-vcpus");
        ControlFile::create(&path).unwrap();
        let mut shim = ShimActuator { file: ControlFile::open(&path).unwrap(), ordered: None };
        let told = || -> Vec<u32> {
            let bytes = std::fs::read(&path).unwrap();
            let list = bytes[offset_of!(Control, asked)..offset_of!(Control, slots)].chunks_exact(4);
            let list = list.map(|word| u32::from_ne_bytes(word.try_into().unwrap()));
            list.take_while(|thread| *thread != 0).collect()
        };
        for threads in [&[7][..], &[7, 8, 9], &[7, 9]] {
            shim.follow(threads).unwrap();
            assert_eq!(told(), threads);
        }
    }
}
