//! Virtual machines whose vCPUs load and store more than their shares of the fabric are put to sleep for it. What they load and store
//! a directory says that looks like resctrl: a fake machine adds bytes in proportion to the processor time that the vCPUs got, so that
//! only vCPUs that really sleep move less.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use guest_images::{Guest, Silent};
use pod_controller::api::{Fabric, Mchannel, MchannelSpec};
use vmm::slicing::find_shim;
use wadi_tests::pod::{HostPlan, Pod, PodBuilder, PodVm, VmShape};
use wadi_tests::process::Daemon;

/// What the path carries, in bytes/s.
const CAPACITY: u64 = 20_000_000;
/// What a vCPU moves in a second of processor time.
const BYTES_PER_SECOND: u64 = 40_000_000;
/// Instance, host, weight.
const VMS: [(&str, &str, u32); 2] = [("vm1", "h1", 1), ("vm2", "h2", 3)];
const SMALL: VmShape = VmShape { memory_mib: 192, cpus: 1 };
/// Over how long rates are looked at.
const WINDOW: Duration = Duration::from_secs(4);
/// How long shares may take until they are as they should be, on a machine that does much else.
const PATIENCE: Duration = Duration::from_mins(2);
/// How exact shares are, on such a machine.
const NEAR: f64 = 0.15;

/// Always wants to run.
const HUNGRY: &str = "while :; do :; done";
/// Runs for a small part of the time, again and again.
const MODEST: &str = "while :; do sleep 0.2; i=0; while [ $i -lt 100 ]; do i=$((i+1)); done; done";

/// Counts what the threads in its monitoring groups load and store, as the kernel would.
struct FakeResctrl {
    directory: PathBuf,
    bytes: [Arc<AtomicU64>; 2],
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl FakeResctrl {
    fn start(pod: &Pod) -> Self {
        // In memory, as the kernel's is: what keeps a disk busy must not keep a count waiting.
        let directory = pod.pool_path().with_file_name("resctrl");
        fs::create_dir_all(directory.join("info/L3_MON")).unwrap();
        fs::write(directory.join("info/L3_MON/mon_features"), "mbm_total_bytes\n").unwrap();
        let groups = VMS.map(|(name, ..)| directory.join("mon_groups").join(format!("wadi-{name}")));
        for group in &groups {
            // The kernel would make them along with the group. Here they are as if an agent that was killed had left them.
            fs::create_dir_all(group.join("mon_data/mon_L3_00")).unwrap();
            fs::write(group.join("tasks"), "").unwrap();
            write_count(group, 0);
        }
        let (bytes, over) = ([0, 1].map(|_| Arc::new(AtomicU64::new(0))), Arc::new(AtomicBool::new(false)));
        let (counts, end) = (bytes.clone(), Arc::clone(&over));
        let thread = thread::spawn(move || {
            let mut ran = [0; 2];
            while !end.load(Ordering::Acquire) {
                for ((group, count), ran) in groups.iter().zip(&counts).zip(&mut ran) {
                    let now = processor_ns(group);
                    let before = std::mem::replace(ran, now);
                    // What they ran before they were in the group does not count.
                    if before > 0 {
                        let more = now.saturating_sub(before) * (BYTES_PER_SECOND / 1_000_000) / 1000;
                        write_count(group, count.fetch_add(more, Ordering::AcqRel) + more);
                    }
                }
                thread::sleep(Duration::from_millis(5));
            }
        });
        Self { directory, bytes, over, thread: Some(thread) }
    }

    fn path(&self) -> &Path {
        &self.directory
    }

    /// Mean rates over so long, in bytes/s.
    fn rates(&self, over: Duration) -> [f64; 2] {
        let counts = || [0, 1].map(|place: usize| self.bytes[place].load(Ordering::Acquire));
        let (before, began) = (counts(), Instant::now());
        thread::sleep(over);
        let (after, seconds) = (counts(), began.elapsed().as_secs_f64());
        #[allow(clippy::cast_precision_loss)]
        std::array::from_fn(|place| (after[place] - before[place]) as f64 / seconds)
    }

    /// Waits until vCPUs load and store what they should.
    fn until(&self, what: &str, over: Duration, is_so: impl Fn([f64; 2]) -> bool) {
        let began = Instant::now();
        loop {
            let rates = self.rates(over);
            eprintln!("{what}: {:.2?} MB/s", rates.map(|rate| rate / 1e6));
            if is_so(rates) {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "never: {what}; last {rates:?}");
        }
    }
}

impl Drop for FakeResctrl {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(thread::panicking() || matches!(ended, Some(Ok(()))), "the fake machine works");
    }
}

/// As a whole or not at all.
fn write_count(group: &Path, bytes: u64) {
    let path = group.join("mon_data/mon_L3_00/mbm_total_bytes");
    let partial = group.join("partial");
    fs::write(&partial, format!("{bytes}\n")).unwrap();
    fs::rename(partial, path).unwrap();
}

/// What the threads of a group have run so far.
fn processor_ns(group: &Path) -> u64 {
    let tasks = fs::read_to_string(group.join("tasks")).unwrap();
    // A second agent writes the same threads once more.
    let mut threads: Vec<&str> = tasks.lines().collect();
    threads.sort_unstable();
    threads.dedup();
    let ran = |thread: &&str| {
        let text = fs::read_to_string(format!("/proc/{thread}/schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    };
    threads.iter().filter_map(ran).sum()
}

fn near(rate: f64, expected: f64) -> bool {
    (rate - expected).abs() <= NEAR * expected
}

#[allow(clippy::cast_precision_loss)]
fn shares_are(rates: [f64; 2], weights: [f64; 2]) -> bool {
    let part = |weight: f64| CAPACITY as f64 * weight / (weights[0] + weights[1]);
    near(rates[0], part(weights[0])) && near(rates[1], part(weights[1]))
}

fn command(pod: &Pod, place: usize, resctrl: &Path) -> Command {
    let (name, host, _) = VMS[place];
    let mut command = Command::new(pod.binary("vmm"));
    command.args(["slice", name, "--share", "fair", "--actuator", "shim", "--resctrl"]).arg(resctrl);
    command.arg("--config").arg(pod.config_path(host));
    command.arg("--directory").arg(pod.directory().join("vm"));
    command
}

fn log(pod: &Pod, place: usize) -> PathBuf {
    pod.directory().join("log").join(format!("{}-slice.log", VMS[place].0))
}

/// An agent for a VM, once a frontend knows it.
fn start_agent(pod: &Pod, place: usize, machine: &FakeResctrl) -> Daemon {
    let began = Instant::now();
    let new = || command(pod, place, machine.path());
    let mut agent = Daemon::start("vmm slice", new(), &log(pod, place)).unwrap();
    while vm(pod, place).vcpus.is_none() {
        if !agent.running() {
            // The frontend may not have heard of the share yet.
            agent = Daemon::start("vmm slice", new(), &log(pod, place)).unwrap();
        }
        assert!(began.elapsed() < PATIENCE, "nobody knows the vCPUs: {}", agent.said());
        thread::sleep(Duration::from_millis(50));
    }
    agent
}

fn failed(output: &Output) -> String {
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn vm(pod: &Pod, place: usize) -> Mchannel {
    pod.api().mchannel(VMS[place].0).unwrap()
}

fn slept_ms(pod: &Pod, place: usize) -> u64 {
    vm(pod, place).vcpus.unwrap().slept_ms
}

fn boot(pod: &Pod) -> [PodVm; 2] {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let waiting = VMS.map(|(name, host, _)| {
        let disk = format!("{name}-disk");
        let instance = pod.create_instance(name, host, &[(&disk, 16 << 20, None)]).unwrap();
        let mut spec = pod.machine(&instance, &guest, SMALL);
        spec.vcpu_shim = Some(find_shim().expect("cargo builds the shim with vmm"));
        pod.begin_machine(&instance, spec).unwrap()
    });
    waiting.map(|vm| vm.arrived().unwrap())
}

#[test]
fn vcpus_sleep_for_their_vms_share_of_the_fabric() {
    let pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").vms())
        .host(HostPlan::new("h3").nic("nic0").ssd("ssd0", "256M"))
        .start()
        .unwrap();
    let machine = FakeResctrl::start(&pod);
    let vms = boot(&pod);

    // What is missing is said, with what to do.
    let error = failed(&command(&pod, 0, Path::new("/nonexistent")).output().unwrap());
    assert!(error.contains("mount -t resctrl") && error.contains("--share PERCENT"), "{error}");
    let error = failed(&command(&pod, 0, machine.path()).output().unwrap());
    assert!(error.contains("podctl mchannel fabric"), "{error}");
    let elements = [("pool".to_owned(), CAPACITY)].into();
    let fabric = Fabric { window_us: 10_000, sample_us: 100_000, elements, ..Fabric::default() };
    pod.api().set_fabric(&fabric).unwrap();
    for (name, _, weight) in VMS {
        let spec = MchannelSpec { weight, tenant: "default".to_owned(), path: vec!["pool".to_owned()] };
        pod.api().set_mchannel(name, &spec).unwrap();
    }
    let mut agents = [0, 1].map(|place| start_agent(&pod, place, &machine));
    let error = failed(&command(&pod, 0, machine.path()).output().unwrap());
    assert!(error.contains(&format!("process {}", agents[0].pid().unwrap())), "one at a time: {error}");

    // One wants less than its share: it gets that and never sleeps. The other one has the rest.
    let modest = vms[0].start(MODEST).unwrap();
    let hungry = vms[1].start(HUNGRY).unwrap();
    #[allow(clippy::cast_precision_loss)]
    let takes_the_rest = |rates: [f64; 2]| rates[0] > 0.0 && near(rates[0] + rates[1], CAPACITY as f64);
    machine.until("the rest", WINDOW, takes_the_rest);
    machine.until("the rest, again", WINDOW, takes_the_rest);
    assert_eq!(slept_ms(&pod, 0), 0, "below its share a VM never sleeps");
    assert!(slept_ms(&pod, 1) > 0, "the other one does");
    modest.signal("KILL").unwrap();

    // Both want all they can get.
    let _hungry_too = vms[0].start(HUNGRY).unwrap();
    for what in ["5:15", "it is still 5:15"] {
        machine.until(what, WINDOW, |rates| shares_are(rates, [1.0, 3.0]));
    }
    let shown = vm(&pod, 0).vcpus.unwrap();
    assert!(shown.run_percent < 50 && shown.slept_ms > 0 && shown.window_us >= 10_000, "{shown:?}");
    assert!(vm(&pod, 0).share.is_some());
    let list = pod.podctl(&["mchannel", "list"]).unwrap();
    assert!(list.to_lowercase().contains("slept") && list.contains(" of 10000 µs"), "{list}");
    let top = pod.podctl(&["top", "--once"]).unwrap();
    assert!(top.to_lowercase().contains("vcpus run"), "{top}");
    let metrics = pod.api().metrics().unwrap();
    assert!(metrics.contains("wadi_mchannel_vcpu_slept_seconds_total{"), "{metrics}");

    // Weights change under VMs that run.
    pod.podctl(&["mchannel", "set", "vm1", "--weight", "3", "--path", "pool"]).unwrap();
    machine.until("10:10", WINDOW, |rates| shares_are(rates, [3.0, 3.0]));
    pod.podctl(&["mchannel", "set", "vm1", "--weight", "1", "--path", "pool"]).unwrap();

    // An agent dies: its VM runs freely, and the next one holds it again.
    agents[0].kill().unwrap();
    let free = |rates: [f64; 2]| rates[0] > 3.0 * 5e6;
    machine.until("vm1 to run freely", Duration::from_millis(500), free);
    assert_eq!(vm(&pod, 0).vcpus, None);
    agents[0] = start_agent(&pod, 0, &machine);
    machine.until("5:15 with another agent", WINDOW, |rates| shares_are(rates, [1.0, 3.0]));

    for agent in &mut agents {
        agent.check().unwrap();
    }
    assert!(hungry.outcome().is_none(), "it has ended: {:?}", hungry.outcome());
    for agent in &mut agents {
        assert!(agent.stop().unwrap().success(), "{}", agent.said());
        assert!(agent.said().contains("SPREAD OF A WINDOW"), "{}", agent.said());
    }
    machine.until("both to run freely", Duration::from_millis(500), |rates| rates.iter().sum::<f64>() > 30e6);
}
