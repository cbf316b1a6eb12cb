//! Max-min fairness, work conservation, convergence and stability on ideal links.

mod fluid_pod;

use fluid_pod::topologies::{Shape, topologies};
use fluid_pod::{Kind, Pod, Topology, Vm, cases, distributed, progressive_filling};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

const GB: f64 = 1e9;

/// A converged share may be off by this part of it.
const TOLERANCE: f64 = 0.05;

/// Everything has settled after so many K.
const SETTLED_KS: u32 = 80;

fn one_link(hosts: usize, capacity: f64, vms: Vec<Vm>) -> Topology {
    Topology { hosts, capacities: vec![capacity], weights: vec![1.0], vms }
}

fn settled(topology: &Topology) -> (Pod, Vec<f64>) {
    let mut pod = Pod::new(topology);
    pod.run(SETTLED_KS * 10);
    let rates = pod.rates(20);
    (pod, rates)
}

fn close(found: f64, expected: f64, tolerance: f64) -> bool {
    (found - expected).abs() <= tolerance * expected
}

#[test]
fn the_small_one_gets_all_it_wants_and_is_never_stopped() {
    let vms = vec![Vm::new(0, &[0], GB), Vm::new(0, &[0], 20.0 * GB), Vm::new(1, &[0], 20.0 * GB)];
    let (mut pod, rates) = settled(&one_link(2, 11.0 * GB, vms));
    for (rate, expected) in rates.iter().zip([1.0, 5.0, 5.0]) {
        assert!(close(*rate, expected * GB, TOLERANCE), "{rates:?}");
    }
    let before = pod.slept_us()[0];
    pod.run(1000);
    assert!((pod.slept_us()[0] - before).abs() < 1e-9, "below its fair share a VM is not put to sleep");
}

#[test]
fn a_lone_one_of_small_weight_gets_the_whole_link() {
    // Eq. 4 capped at max(D) instead of max(D / w) holds it at w·D: 2 of 10 GB/s.
    for weight in [0.1, 0.2, 3.0] {
        let vms = vec![Vm { weight, ..Vm::new(0, &[0], 10.0 * GB) }];
        let (_, rates) = settled(&one_link(1, 8.0 * GB, vms));
        assert!(close(rates[0], 8.0 * GB, TOLERANCE), "weight {weight}: {rates:?}");
    }
}

#[test]
fn a_share_rises_again_when_others_leave() {
    // With the minimum over all α of the past (line 7 as listed), the first one would stay at half the link.
    let vms = vec![Vm::new(0, &[0], 10.0 * GB), Vm::new(0, &[0], 10.0 * GB)];
    let (mut pod, rates) = settled(&one_link(1, 8.0 * GB, vms));
    assert!(close(rates[0], 4.0 * GB, TOLERANCE), "{rates:?}");
    pod.set_demand(1, 0.0);
    pod.run(100);
    let rates = pod.rates(10);
    assert!(close(rates[0], 8.0 * GB, TOLERANCE), "{rates:?}");
}

#[test]
fn weights_are_kept_across_hosts() {
    let vm = |host, weight| Vm { weight, ..Vm::new(host, &[0], 20.0 * GB) };
    let (_, rates) = settled(&one_link(3, 12.0 * GB, vec![vm(0, 1.0), vm(1, 3.0), vm(2, 2.0)]));
    for (rate, expected) in rates.iter().zip([2.0, 6.0, 4.0]) {
        assert!(close(*rate, expected * GB, TOLERANCE), "{rates:?}");
    }
}

#[test]
fn tenants_share_first_and_their_vms_then() {
    let vm = |host, tenant, demand| Vm { tenant, ..Vm::new(host, &[0], demand * GB) };
    // Tenant 0 has one VM, tenant 1 four on two hosts, tenant 2 wants little.
    let vms =
        vec![vm(0, 0, 20.0), vm(0, 1, 20.0), vm(0, 1, 0.5), vm(1, 1, 20.0), vm(1, 1, 20.0), vm(1, 2, 1.0)];
    let topology = Topology { hosts: 2, capacities: vec![13.0 * GB], weights: vec![1.0, 2.0, 1.0], vms };
    let (_, rates) = settled(&topology);
    for (rate, expected) in rates.iter().zip([4.0, 2.5, 0.5, 2.5, 2.5, 1.0]) {
        assert!(close(*rate, expected * GB, TOLERANCE), "{rates:?}");
    }
}

#[test]
fn hosts_that_began_apart_agree() {
    // The first host is alone and far above its later share when the second one joins.
    let (mut pod, _) = settled(&one_link(2, 8.0 * GB, vec![Vm::new(0, &[0], 30.0 * GB)]));
    pod.add(Vm::new(1, &[0], 8.5 * GB));
    pod.run(300);
    let rates = pod.rates(10);
    assert!(rates.iter().all(|rate| close(*rate, 4.0 * GB, TOLERANCE)), "{rates:?}");
}

#[test]
fn queues_share_with_loads_and_stores() {
    let vms = vec![
        Vm { kind: Kind::Queue(4096), ..Vm::new(0, &[0], 20.0 * GB) },
        Vm::new(0, &[0], 20.0 * GB),
        Vm { kind: Kind::Queue(65536), ..Vm::new(1, &[0], 20.0 * GB) },
    ];
    let (_, rates) = settled(&one_link(2, 9.0 * GB, vms));
    assert!(rates.iter().all(|rate| close(*rate, 3.0 * GB, 0.06)), "{rates:?}");
}

#[test]
fn an_on_off_neighbour_leaves_nothing_unused_where_nobody_hears_of_overload() {
    // It is on for a fifth of the time; whatever it leaves, the other one takes. Bursts shorter than K are not seen for what
    // they are: they overload the link again and again, and where hosts hear of that, its capacity is taken for less than it is.
    for (on, off, least, without_signals) in
        [(100, 400, 0.93, 0.98), (40, 160, 0.89, 0.98), (3, 12, 0.72, 0.98), (1, 4, 0.5, 0.98)]
    {
        let vms =
            vec![Vm::new(0, &[0], 20.0 * GB), Vm { on_off: Some((on, off)), ..Vm::new(1, &[0], 20.0 * GB) }];
        let topology = one_link(2, 8.0 * GB, vms);
        for (mut pod, least) in
            [(Pod::new(&topology), least), (Pod::without_signals(&topology), without_signals)]
        {
            pod.run(SETTLED_KS * 10);
            let rates = pod.rates(100);
            let used = rates.iter().sum::<f64>() / (8.0 * GB);
            println!("{on} on, {off} off: {used:.3} used, {rates:?}");
            assert!(used >= least, "{on} on, {off} off: {used:.3} used, {rates:?}");
            assert!(rates[0] >= least * 4.0 * GB, "{on} on, {off} off: {rates:?}");
        }
    }
}

#[test]
fn it_converges_in_a_few_k_and_stays() {
    let vms = (0..8).map(|host| Vm::new(host % 4, &[0], 10.0 * GB)).collect();
    let mut pod = Pod::new(&one_link(4, 16.0 * GB, vms));
    let mut settled_after = 0;
    for k in 0..100 {
        let rates = pod.rates(1);
        if rates.iter().any(|rate| !close(*rate, 2.0 * GB, TOLERANCE)) {
            settled_after = k + 1;
        }
    }
    assert!(settled_after <= 30, "still moving after {settled_after} K");
}

/// Rates are near those of progressive filling, and what anybody wants and a link can carry is nearly all carried. Not always:
/// with several bottlenecks and up to forty times the demand that fits, hosts whose K begin at different moments can go round
/// in circles, and one topology in some thousand has a VM at a multiple of a small share. So it is the distribution that is
/// asserted, over the same topologies each time (`WADI_ROUNDS` for more of them).
#[test]
fn rates_are_near_max_min_and_links_full() {
    let seed = TestRng::from_seed(RngAlgorithm::ChaCha, &[1; 32]);
    let mut runner = TestRunner::new_with_rng(cases(1000), seed);
    let (mut off, mut off_of_link, mut unused) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..runner.config().cases {
        let topology = topologies(Shape::default()).new_tree(&mut runner).unwrap().current();
        let (_, rates) = settled(&topology);
        let expected = progressive_filling(&topology);
        let (mut worst, mut worst_of_link) = (0.0_f64, 0.0_f64);
        for ((vm, rate), expected) in topology.vms.iter().zip(&rates).zip(&expected) {
            let capacities = vm.path.iter().map(|element| topology.capacities[*element]);
            let narrowest = capacities.fold(f64::INFINITY, f64::min);
            let difference = (rate - expected).abs();
            // A hundredth of a link is nothing, however small the share.
            worst = worst.max((difference - 0.01 * narrowest).max(0.0) / expected);
            worst_of_link = worst_of_link.max(difference / narrowest);
        }
        off.push(worst);
        off_of_link.push(worst_of_link);
        unused.push(1.0 - rates.iter().sum::<f64>() / expected.iter().sum::<f64>());
    }
    // Of a small share the worst is a multiple; of a link it is a part all the same.
    let multiples = off.iter().filter(|off| **off > 1.0).count();
    println!("{multiples} of {} by more than all of a share", off.len());
    assert!(1000 * multiples <= 3 * off.len(), "{multiples} of {}", off.len());
    distributed("off, of a share", &mut off, [0.5, 0.9, 0.99], [0.005, 0.02, 0.23]);
    let parts = [0.5, 0.9, 0.99, 1.0];
    distributed("off, of the narrowest link", &mut off_of_link, parts, [0.005, 0.02, 0.066, 0.3]);
    distributed("unused", &mut unused, parts, [0.005, 0.02, 0.054, 0.12]);
}
