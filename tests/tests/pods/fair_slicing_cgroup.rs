//! Virtual machines whose vCPUs load and store more than their shares of the fabric are held back for it by the kernel's quota; so are
//! vCPUs that are plugged in meanwhile.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use vmm::slicing::Kind;
use vmm::{Registry, RunningVm};
use wadi_tests::fair_vcpus::{CAPACITY, FairVcpus, HUNGRY, PATIENCE, WINDOW, near, shares_are};
use wadi_tests::held_vcpus::has_quota;
use wadi_tests::monitor::plug_vcpu;

/// Runs for a small part of the time, again and again.
const MODEST: &str = "while :; do sleep 0.2; i=0; while [ $i -lt 100 ]; do i=$((i+1)); done; done";

/// K, in ms: the kernel's quota is exact only on average over some of its corrections, of which there are ten in a second.
const SAMPLE_MS: u32 = 500;

fn machine(fair: &FairVcpus, name: &str) -> RunningVm {
    Registry::new(&fair.pod.directory().join("vm")).find(name).unwrap()
}

/// Which of its vCPU threads are in a group of an agent.
fn held(machine: &RunningVm) -> Vec<bool> {
    let group = |thread: u32| fs::read_to_string(format!("/proc/{thread}/cgroup")).unwrap_or_default();
    let vcpus = machine.monitor.vcpus().unwrap();
    vcpus.iter().map(|vcpu| group(vcpu.thread_id).contains(&format!("wadi-{}-", machine.name))).collect()
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < PATIENCE, "never: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn the_kernels_quota_holds_vcpus_to_their_vms_share_of_the_fabric() {
    if !has_quota() {
        eprintln!("not tried: no processor controller is mounted");
        return;
    }
    let fair = FairVcpus::boot(Kind::Cgroup, |spec| spec.cpus_max = Some(2)).unwrap();
    let machines = ["vm1", "vm2"].map(|name| machine(&fair, name));
    fair.share_out(SAMPLE_MS).unwrap();
    let mut agents = [0, 1].map(|place| fair.start_agent(place).unwrap());
    assert!(machines.iter().all(|machine| held(machine) == [true]));

    // One wants less than its share: it gets that and is never held back. The other one has the rest.
    let modest = fair.vms[0].start(MODEST).unwrap();
    let hungry = fair.vms[1].start(HUNGRY).unwrap();
    #[allow(clippy::cast_precision_loss)]
    let takes_the_rest = |rates: [f64; 2]| rates[0] > 0.0 && near(rates[0] + rates[1], CAPACITY as f64);
    fair.until("the rest", WINDOW, takes_the_rest).unwrap();
    assert_eq!(fair.vcpus(0).unwrap().slept_ms, 0, "below its share a VM is never held back");
    modest.signal("KILL").unwrap();

    // Both want all they can get.
    let _hungry_too = fair.vms[0].start(HUNGRY).unwrap();
    fair.until("5:15", WINDOW, |rates| shares_are(rates, [1.0, 3.0])).unwrap();
    for place in [0, 1] {
        wait_for("each to be held back", || fair.vcpus(place).unwrap().slept_ms > 0);
    }

    // A second vCPU wants as much: both together have what one had.
    plug_vcpu(&fair.monitor(0), "plugged").unwrap();
    wait_for("the new vCPU to be counted", || fair.counted_threads(0).len() == 2);
    wait_for("the new vCPU to be held", || held(&machines[0]) == [true, true]);
    wait_for("the guest to use it", || {
        let online = fair.vms[0].run("echo 1 > /sys/devices/system/cpu/cpu1/online", Duration::from_secs(20));
        online.is_ok_and(|outcome| outcome.success())
    });
    let _second = fair.vms[0].start(HUNGRY).unwrap();
    fair.until("5:15 with two vCPUs", WINDOW, |rates| shares_are(rates, [1.0, 3.0])).unwrap();

    // An agent dies: its VM runs freely, and the next one holds it again.
    agents[0].kill().unwrap();
    wait_for("vm1 to be let go", || held(&machines[0]) == [false, false]);
    agents[0] = fair.start_agent(0).unwrap();
    fair.until("5:15 with another agent", WINDOW, |rates| shares_are(rates, [1.0, 3.0])).unwrap();

    // Where shares follow from less time than the quota needs to be exact, that is said.
    let said = "podctl mchannel fabric --sample-us 500000";
    assert!(agents.iter().all(|agent| !agent.said().contains(said)));
    fair.share_out(100).unwrap();
    wait_for("it to be said", || agents.iter().all(|agent| agent.said().contains(said)));

    assert!(hungry.outcome().is_none(), "it has ended: {:?}", hungry.outcome());
    for agent in &mut agents {
        agent.check().unwrap();
        assert!(agent.stop().unwrap().success(), "{}", agent.said());
        assert!(agent.said().contains("SPREAD OF A WINDOW"), "{}", agent.said());
    }
    assert!(machines.iter().all(|machine| !held(machine).contains(&true)));
}
