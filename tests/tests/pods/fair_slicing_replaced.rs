//! The frontend that an agent of vCPUs reports to dies, and another one takes its place: what the vCPUs loaded and stored is counted once
//! whatever happens, and shares stay as they are.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use vmm::slicing::{Kind, find_shim};
use wadi_tests::fair_vcpus::{FairVcpus, HUNGRY, PATIENCE, WINDOW, shares_are};
use wadi_tests::fake_resctrl::BYTES_PER_SECOND;
use wadi_tests::monitor::tell;
use wadi_tests::pod::Role;

/// Counters that do not move for so long do not move any more: an agent reports ten times a second, and so do frontends.
const STILL: Duration = Duration::from_secs(1);

/// Lets vm1's vCPUs stand still, or go on.
fn run(fair: &FairVcpus, runs: bool) {
    tell(&fair.monitor(0), &json!({"execute": if runs { "cont" } else { "stop" }})).unwrap();
}

/// What was counted of vm1's vCPUs, and what they did, in bytes, once all of that was reported.
fn settled(fair: &FairVcpus) -> (u64, u64) {
    let look = || (fair.shown(0).unwrap().vcpus.map(|vcpus| vcpus.bytes), fair.bytes(0));
    let (began, mut before, mut since) = (Instant::now(), look(), Instant::now());
    loop {
        thread::sleep(Duration::from_millis(20));
        let now = look();
        if now != before {
            (before, since) = (now, Instant::now());
        }
        if let (Some(counted), did) = before
            && since.elapsed() > STILL
        {
            return (counted, did);
        }
        assert!(began.elapsed() < PATIENCE, "counters never stand still: {now:?}");
    }
}

/// Watches what is said of vm1 until its vCPUs are known as those that have moved less than `before` since they are: to another frontend.
fn until_known_anew(fair: &FairVcpus, before: u64) {
    let began = Instant::now();
    loop {
        let shown = fair.shown(0).unwrap();
        // One vCPU cannot do more; counts come every 5 ms, and reports every 100.
        assert!(
            shown.rate.max(shown.demand) <= BYTES_PER_SECOND * 3 / 2,
            "more than there can be: {shown:?}"
        );
        if shown.vcpus.is_some_and(|vcpus| vcpus.bytes < before && vcpus.demand > 0) {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "no frontend takes the place of the one that died");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn vcpus_are_counted_once_and_held_while_their_frontend_is_replaced() {
    let mut fair = FairVcpus::boot(Kind::Shim, |spec| {
        spec.vcpu_shim = Some(find_shim().expect("cargo builds the shim with vmm"));
    })
    .unwrap();
    fair.share_out(100).unwrap();
    let mut agents = [0, 1].map(|place| fair.start_agent(place).unwrap());
    let hungry = [0, 1].map(|place| fair.vms[place].start(HUNGRY).unwrap());
    let fair_shares = |rates: [f64; 2]| shares_are(rates, [1.0, 3.0]);
    fair.until("5:15", WINDOW, fair_shares).unwrap();

    // Killed and started again, as by systemd; then for good, so that the other frontend of the host has to take its place.
    for comes_again in [true, false] {
        run(&fair, false);
        let (counted, did) = settled(&fair);
        fair.pod.daemon("h1", Role::BlkFrontend).unwrap().kill().unwrap();
        run(&fair, true);
        // They go on while nobody counts them.
        let began = Instant::now();
        while fair.bytes(0) == did {
            assert!(began.elapsed() < PATIENCE, "vm1 does not go on");
            thread::sleep(Duration::from_millis(5));
        }
        if comes_again {
            fair.pod.start_daemon("h1", Role::BlkFrontend).unwrap();
        }
        until_known_anew(&fair, counted);
        run(&fair, false);
        let (counted_anew, did_all) = settled(&fair);
        assert_eq!(counted_anew, did_all - did, "counted once, by one of them");
        run(&fair, true);
        fair.until("5:15 after that", WINDOW, fair_shares).unwrap();
    }
    for agent in &mut agents {
        agent.check().unwrap();
        assert!(agent.stop().unwrap().success(), "{}", agent.said());
    }
    assert!(hungry.iter().all(|job| job.outcome().is_none()));
}
