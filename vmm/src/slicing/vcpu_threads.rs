//! Which threads run the vCPUs of a machine that runs.

use super::failed;
use super::watch::{LOOK_EVERY, Watch};
use crate::{RunningVm, VmmError};

/// Tells of vCPU threads that come and go: the monitor is asked for them again and again.
#[derive(Debug)]
pub struct VcpuThreads(Watch<Vec<u32>>);

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
        Watch::begin("vcpu-threads", LOOK_EVERY, known, move || Self::look(&machine)).map(Self)
    }

    /// All that there are now, if vCPUs were plugged in or unplugged since the last call.
    pub fn changed(&self) -> Option<Vec<u32>> {
        self.0.changed()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::Process;
    use crate::monitor::fake::Qemu;

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
        let machine = RunningVm::of_this_process(qemu.path.clone());
        assert_eq!(VcpuThreads::look(&machine).unwrap(), [process.pid]);
    }

    #[test]
    fn threads_that_come_and_go_are_told_of_once() {
        // Nothing: the monitor does not answer.
        let there = Arc::new(Mutex::new(None));
        let asked = Arc::clone(&there);
        let look = move || asked.lock().unwrap().clone().ok_or_else(|| failed("busy".to_owned()));
        let threads = Watch::begin("vcpu-threads", Duration::from_millis(1), vec![4], look).unwrap();
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
