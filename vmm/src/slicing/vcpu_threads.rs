//! Which threads run the vCPUs of a machine that runs.

use std::io;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use pod_protocol::daemon::StopSignal;

use super::failed;
use crate::{RunningVm, VmmError};

/// How often the monitor is asked.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Tells of vCPU threads that come and go. A thread asks the monitor for them again and again: a monitor that somebody else talks to
/// keeps that thread waiting, and nobody else.
#[derive(Debug)]
pub struct VcpuThreads {
    changes: Receiver<Vec<u32>>,
    stop: StopSignal,
}

impl VcpuThreads {
    /// The ids of those that there are now, each once.
    pub fn look(machine: &RunningVm) -> Result<Vec<u32>, VmmError> {
        let mut threads: Vec<u32> = machine.vcpus()?.iter().map(|vcpu| vcpu.thread_id).collect();
        threads.sort_unstable();
        // Several vCPUs may have one.
        threads.dedup();
        if threads.is_empty() {
            return Err(failed(format!("{} has no vCPU threads", machine.name)));
        }
        Ok(threads)
    }

    /// Watches those of `machine` until it is dropped; these are known.
    pub fn watch(machine: &RunningVm, known: Vec<u32>) -> Result<Self, VmmError> {
        let machine = machine.clone();
        Self::begin(LOOK_EVERY, known, move || Self::look(&machine))
    }

    fn begin(
        every: Duration,
        mut known: Vec<u32>,
        mut look: impl FnMut() -> Result<Vec<u32>, VmmError> + Send + 'static,
    ) -> Result<Self, VmmError> {
        let unwatched = |error: io::Error| failed(format!("the vCPUs cannot be watched: {error}"));
        let stop = StopSignal::manual().map_err(unwatched)?;
        let (tell, changes) = channel();
        let told = stop.clone();
        let watch = move || {
            while !told.is_set() {
                // A monitor that does not answer has nothing new to tell.
                if let Ok(threads) = look()
                    && threads != known
                {
                    known.clone_from(&threads);
                    if tell.send(threads).is_err() {
                        return;
                    }
                }
                told.wait_for(every);
            }
        };
        thread::Builder::new().name("vcpu-threads".to_owned()).spawn(watch).map_err(unwatched)?;
        Ok(Self { changes, stop })
    }

    /// All that there are now, if vCPUs were plugged in or unplugged since the last call.
    pub fn changed(&self) -> Option<Vec<u32>> {
        self.changes.try_iter().last()
    }
}

impl Drop for VcpuThreads {
    fn drop(&mut self) {
        // A monitor may keep it waiting: it ends by itself.
        self.stop.stop();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Instant;

    use super::*;
    use crate::monitor::fake::Qemu;
    use crate::{MonitorAddress, Origin, Process};

    #[test]
    fn a_thread_with_several_vcpus_is_one() {
        let process = Process::with_id(std::process::id()).unwrap();
        let qemu = Qemu::start(move |_, _| {
            let vcpu = |index: u32| {
                format!(
                    r#"{{"thread-id": {}, "qom-path": "/a", "cpu-index": {index}, "target": "x86_64"}}"#,
                    process.pid
                )
            };
            Some(format!(r#"{{"return": [{}, {}]}}"#, vcpu(0), vcpu(1)))
        });
        let machine = RunningVm {
            name: "vm1".to_owned(),
            process,
            origin: Origin::Run,
            monitor: MonitorAddress::Socket { path: qemu.path.clone() },
            vcpu_control: None,
            files: Vec::new(),
        };
        assert_eq!(VcpuThreads::look(&machine).unwrap(), [process.pid]);
    }

    #[test]
    fn threads_that_come_and_go_are_told_of_once() {
        // Nothing: the monitor does not answer.
        let there = Arc::new(Mutex::new(None));
        let asked = Arc::clone(&there);
        let look = move || asked.lock().unwrap().clone().ok_or_else(|| failed("busy".to_owned()));
        let threads = VcpuThreads::begin(Duration::from_millis(1), vec![4], look).unwrap();
        for now in [vec![4, 7], vec![4, 7, 8], vec![4]] {
            thread::sleep(Duration::from_millis(5));
            assert_eq!(threads.changed(), None);
            *there.lock().unwrap() = Some(now.clone());
            let began = Instant::now();
            let changed = loop {
                if let Some(changed) = threads.changed() {
                    break changed;
                }
                assert!(began.elapsed() < Duration::from_secs(20), "nobody tells of {now:?}");
                thread::sleep(Duration::from_millis(1));
            };
            assert_eq!(changed, now);
            *there.lock().unwrap() = None;
        }
    }
}
