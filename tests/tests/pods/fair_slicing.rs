//! Virtual machines whose vCPUs load and store more than their shares of the fabric are put to sleep for it, by the shim.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use pod_api::Fabric;
use vmm::slicing::{Kind, find_shim};
use wadi_tests::fair_vcpus::{CAPACITY, FairVcpus, HUNGRY, PATIENCE, WINDOW, near, shares_are};
use wadi_tests::steady::judge;

/// Runs for a small part of the time, again and again.
const MODEST: &str = "while :; do sleep 0.5; i=0; while [ $i -lt 10 ]; do i=$((i+1)); done; done";

/// Reads a disk, again and again.
const READS: &str = "while :; do dd if=/dev/vda of=/dev/null bs=128k iflag=direct 2>/dev/null; done";

fn failed(output: &Output) -> String {
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The same command without one of its words.
fn without(command: &Command, word: &str) -> Command {
    let mut other = Command::new(command.get_program());
    other.args(command.get_args().filter(|it| *it != word));
    other
}

#[test]
fn vcpus_sleep_for_their_vms_share_of_the_fabric() {
    let fair = FairVcpus::boot(Kind::Shim, |spec| {
        spec.vcpu_shim = Some(find_shim().expect("cargo builds the shim with vmm"));
    })
    .unwrap();
    let pod = &fair.pod;

    // What is missing is said, with what to do.
    let error = failed(&fair.agent_command(0, Path::new("/nonexistent")).output().unwrap());
    assert!(error.contains("mount -t resctrl") && error.contains("--share PERCENT"), "{error}");
    let error = failed(&fair.agent_command(0, fair.resctrl()).output().unwrap());
    assert!(error.contains("podctl mchannel fabric"), "{error}");
    let error = failed(&without(&fair.agent_command(0, fair.resctrl()), "--any-ram").output().unwrap());
    assert!(error.contains("no memory of vm1 lies in the pool") && error.contains("--ram"), "{error}");
    // In windows of 10 ms: with fewer of them in a K, vCPUs move together what chance adds to it.
    fair.share_out(400).unwrap();
    let mut agents = [0, 1].map(|place| fair.start_agent(place).unwrap());
    let error = failed(&fair.agent_command(0, fair.resctrl()).output().unwrap());
    assert!(error.contains(&format!("process {}", agents[0].pid().unwrap())), "one at a time: {error}");

    // One wants less than its share: it gets that and never sleeps. The other one has the rest.
    let modest = fair.vms[0].start(MODEST).unwrap();
    let hungry = fair.vms[1].start(HUNGRY).unwrap();
    #[allow(clippy::cast_precision_loss)]
    let takes_the_rest = |rates: [f64; 2]| rates[0] > 0.0 && near(rates[0] + rates[1], CAPACITY as f64);
    fair.until("the rest", WINDOW, takes_the_rest).unwrap();
    fair.until("the rest, again", WINDOW, takes_the_rest).unwrap();
    assert_eq!(fair.vcpus(0).unwrap().slept_ms, 0, "below its share a VM never sleeps");
    // Nor is anything said to the shim in its QEMU, or armed there.
    let control = || fs::read(pod.directory().join("vm/vm1-vcpus")).unwrap();
    let before = control();
    fair.rates(WINDOW);
    assert!(control() == before, "who runs freely is left alone");
    assert!(fair.vcpus(1).unwrap().slept_ms > 0, "the other one does");
    modest.signal("KILL").unwrap();

    // Both want all they can get.
    let _hungry_too = fair.vms[0].start(HUNGRY).unwrap();
    #[allow(clippy::cast_precision_loss)]
    let capacity = CAPACITY as f64;
    let quarters = |_: &[f64]| [0.25, 0.75].map(|part| part * capacity).to_vec();
    judge("5:15", PATIENCE, capacity, || fair.rates(WINDOW / 2).to_vec(), quarters);
    let shown = fair.vcpus(0).unwrap();
    assert!(shown.run_percent < 50 && shown.slept_ms > 0 && shown.window_us >= 10_000, "{shown:?}");
    assert!(fair.shown(0).unwrap().share.is_some());
    let list = pod.podctl(&["mchannel", "list"]).unwrap();
    assert!(list.to_lowercase().contains("slept") && list.contains(" of 10000 µs"), "{list}");
    let top = pod.podctl(&["top", "--once"]).unwrap();
    assert!(top.to_lowercase().contains("vcpus run"), "{top}");
    let metrics = pod.api().metrics().unwrap();
    assert!(metrics.contains("wadi_mchannel_vcpu_slept_seconds_total{"), "{metrics}");

    // Weights change under VMs that run.
    pod.podctl(&["mchannel", "set", "vm1", "--weight", "3", "--path", "pool"]).unwrap();
    fair.until("10:10", WINDOW, |rates| shares_are(rates, [3.0, 3.0])).unwrap();
    pod.podctl(&["mchannel", "set", "vm1", "--weight", "1", "--path", "pool"]).unwrap();

    // An agent dies: its VM runs freely, and the next one holds it again.
    agents[0].kill().unwrap();
    let free = |rates: [f64; 2]| rates[0] > 3.0 * 5e6;
    fair.until("vm1 to run freely", Duration::from_millis(500), free).unwrap();
    assert_eq!(fair.shown(0).unwrap().vcpus, None);
    agents[0] = fair.start_agent(0).unwrap();
    fair.until("5:15 with another agent", WINDOW, |rates| shares_are(rates, [1.0, 3.0])).unwrap();

    for agent in &mut agents {
        agent.check().unwrap();
    }
    assert!(hungry.outcome().is_none(), "it has ended: {:?}", hungry.outcome());
    for agent in &mut agents {
        assert!(agent.stop().unwrap().success(), "{}", agent.said());
        assert!(agent.said().contains("SPREAD OF A WINDOW"), "{}", agent.said());
    }
    let both_free = |rates: [f64; 2]| rates.iter().sum::<f64>() > 30e6;
    fair.until("both to run freely", Duration::from_millis(500), both_free).unwrap();

    hungry.signal("KILL").unwrap();
    queues_are_held_alone(&fair);
}

/// vCPUs that are not to be touched run on, and the queues of their VM have what they leave of its share.
fn queues_are_held_alone(fair: &FairVcpus) {
    let carries = 50_000_000;
    let elements = [("pool".to_owned(), carries)].into();
    let fabric = Fabric { window_us: 10_000, sample_us: 100_000, elements, ..Fabric::default() };
    fair.pod.api().set_fabric(&fabric).unwrap();
    let _reads = fair.vms[0].start(READS).unwrap();
    #[allow(clippy::cast_precision_loss)]
    let rates = || {
        let queues = || {
            let shown = fair.shown(0).unwrap();
            shown.bytes - shown.vcpus.map_or(0, |it| it.bytes)
        };
        let (before, began) = (queues(), Instant::now());
        let [vcpus, _] = fair.rates(WINDOW / 2);
        [vcpus, (queues() - before) as f64 / began.elapsed().as_secs_f64()]
    };
    let until = |what: &str, is_so: &dyn Fn([f64; 2]) -> bool| {
        let began = Instant::now();
        loop {
            let rates = rates();
            eprintln!("{what}: {:.2?} MB/s", rates.map(|rate| rate / 1e6));
            if is_so(rates) {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "never: {what}; last {rates:?}");
        }
    };
    until("the disk to have the path for itself", &|[_, queues]| queues > 25e6);
    let mut agent = fair.start_agent_of(Kind::Pacing, 0).unwrap();
    #[allow(clippy::cast_precision_loss)]
    let leaves = |[vcpus, queues]: [f64; 2]| vcpus > 25e6 && near(vcpus + queues, carries as f64);
    until("what its vCPUs leave", &leaves);
    until("what its vCPUs leave, again", &leaves);
    let vcpus = fair.vcpus(0).unwrap();
    assert_eq!((vcpus.slept_ms, vcpus.run_percent), (0, 100), "{vcpus:?}");
    agent.check().unwrap();
    assert!(agent.stop().unwrap().success(), "{}", agent.said());
    assert!(agent.said().contains("vm1: pacing (it was asked for)"), "{}", agent.said());
    let mut command = Command::new(fair.pod.binary("vmm"));
    command.args(["slice", "vm1", "--share", "50", "--actuator", "pacing", "--directory"]);
    let error = failed(&command.arg(fair.pod.directory().join("vm")).output().unwrap());
    assert!(error.contains("say --share fair"), "{error}");
}
