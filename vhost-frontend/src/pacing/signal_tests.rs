//! Capacities that follow from made-up signals of congestion, over all of a round: looked at, published, agreed on, held to.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mem_channel::{DevLoad, ElementId};
use pod_protocol::objects::{FabricObject, Signal};

use super::round::{Exchange, Exchanges as _};
use super::signal::{LoadSignal, Probe, Signals};
use super::tests::{ALL, CAPACITY, Pod, Vm, endpoint, fabric};

const IDLE_NS: u64 = 300;
/// What an element carries at least is taken for, in parts of what it carries at most.
const FLOOR: f64 = 0.5;

/// How long a load takes, by frontend.
type Loads = Vec<Arc<AtomicU64>>;

/// A pod whose frontends look at their element by this signal.
fn looking(seed: u64, signal: Signal, vms: Vec<Vm>) -> (Pod, Loads) {
    const FRONTENDS: usize = 4;
    let mut pod = Pod::new(seed, FRONTENDS, vms);
    let loads: Loads = (0..FRONTENDS).map(|_| Arc::new(AtomicU64::new(IDLE_NS))).collect();
    for (number, frontend) in pod.frontends.iter_mut().enumerate() {
        frontend.becomes(with_signal(number, FRONTENDS, signal));
        let probe = |took: &Arc<AtomicU64>| -> Box<dyn LoadSignal> {
            let took = Arc::clone(took);
            Box::new(Probe::new(move || Some(Duration::from_nanos(took.load(Ordering::Relaxed)))))
        };
        // It is asked for none but the one that was chosen.
        let (chosen, other) = (probe(&loads[number]), probe(&Arc::new(AtomicU64::new(IDLE_NS))));
        let signals = match signal {
            Signal::Device => Signals { probe: other, device: chosen },
            Signal::Off | Signal::Probe => Signals { probe: chosen, device: other },
        };
        let memory = pod.pool.host(endpoint(number).host);
        frontend.exchange = Exchange::with_signals(memory, &frontend.plan, signals);
    }
    (pod, loads)
}

fn with_signal(frontend: usize, count: usize, signal: Signal) -> FabricObject {
    let mut fabric = fabric(frontend, count);
    fabric.elements[0].signal = signal;
    fabric
}

fn set(loads: &Loads, ns: u64) {
    for load in loads {
        load.store(ns, Ordering::Relaxed);
    }
}

/// What each frontend takes the element to carry, in parts of what it carries at most.
fn capacities(pod: &Pod) -> Vec<f64> {
    let of = |host: &mem_channel::Host| host.capacity(ElementId(7)).unwrap() / super::as_f64(CAPACITY);
    pod.frontends.iter().map(|frontend| of(&frontend.plan.host)).collect()
}

/// Two hungry VMs on hosts of their own, at the first and the third frontend.
fn two() -> Vec<Vm> {
    vec![Vm::new(0, 1, 1, ALL), Vm::new(2, 2, 1, ALL)]
}

#[test]
fn capacity_falls_while_the_fabric_is_overloaded_and_grows_back_by_and_by() {
    for signal in [Signal::Probe, Signal::Device] {
        let (mut pod, loads) = looking(23, signal, two());
        pod.run(50);
        assert!(capacities(&pod).iter().all(|part| (part - 1.0).abs() < 1e-9), "{:?}", capacities(&pod));
        // Severe overload at less than the element is said to carry.
        set(&loads, 5 * IDLE_NS);
        let mut last = 1.0_f64;
        for _ in 0..300 {
            pod.run(1);
            for part in [capacities(&pod)[0], capacities(&pod)[2]] {
                assert!((FLOOR - 1e-9..=1.0 + 1e-9).contains(&part), "{part}");
            }
            last = last.min(capacities(&pod)[0]);
        }
        assert!(last < 0.6, "{last}");
        let found = capacities(&pod);
        assert!((found[0] - found[2]).abs() < 0.02, "all hosts agree: {found:?}");
        assert_eq!(pod.frontends[0].exchange.level(7), Some(DevLoad::Severe));
        let rates = pod.rates(50);
        assert!(
            rates.iter().sum::<f64>() <= 1.02 * found[0] && rates.iter().all(|rate| *rate > 0.2),
            "{rates:?}"
        );
        // The overload ends. λ·(δ − l)·K is 10 % of the element in each K at most, and there is no end to that but what it carries.
        set(&loads, IDLE_NS);
        let mut before = capacities(&pod)[0];
        let mut steps = 0;
        while before < 1.0 - 1e-9 {
            pod.run(1);
            let now = capacities(&pod)[0];
            assert!(now <= before + 0.1 + 1e-6 && now <= 1.0 + 1e-9, "from {before} to {now} in one K");
            (before, steps) = (now, steps + 1);
            assert!(steps < 200, "it stays at {now}");
        }
        assert!(steps >= 4, "it was back after {steps} K");
        assert_eq!(pod.frontends[0].exchange.level(7), Some(DevLoad::Light));
    }
}

#[test]
fn moderate_overload_counts_and_optimal_load_does_not() {
    for (ratio, level, falls) in [(1.5, DevLoad::Optimal, false), (2.5, DevLoad::Moderate, true)] {
        let (mut pod, loads) = looking(29, Signal::Probe, two());
        pod.run(50);
        set(&loads, super::whole(ratio * super::as_f64(IDLE_NS)));
        pod.run(100);
        assert_eq!(pod.frontends[0].exchange.level(7), Some(level));
        assert_eq!(capacities(&pod)[0] < 0.9, falls, "{:?}", capacities(&pod));
    }
}

#[test]
fn what_one_host_alone_sees_all_of_them_hold_to_and_none_starves() {
    let (mut pod, loads) = looking(31, Signal::Probe, two());
    pod.run(50);
    loads[0].store(5 * IDLE_NS, Ordering::Relaxed);
    pod.run(200);
    let found = capacities(&pod);
    assert!(found[2] < 0.9 && (found[0] - found[2]).abs() < 0.05, "{found:?}");
    let rates = pod.rates(100);
    assert!(rates.iter().all(|rate| *rate > 0.2) && (rates[0] - rates[1]).abs() < 0.05, "{rates:?}");
}

#[test]
fn without_a_signal_an_element_carries_what_the_operator_says() {
    let (mut pod, loads) = looking(37, Signal::Off, two());
    set(&loads, 5 * IDLE_NS);
    pod.run(100);
    assert!(capacities(&pod).iter().all(|part| (part - 1.0).abs() < 1e-9), "{:?}", capacities(&pod));
    assert_eq!(pod.frontends[0].exchange.level(7), None);
    // One that is not looked at any more is congested no more.
    let (mut pod, loads) = looking(37, Signal::Probe, two());
    pod.run(50);
    set(&loads, 5 * IDLE_NS);
    pod.run(100);
    assert!(capacities(&pod)[0] < 0.9);
    for (number, frontend) in pod.frontends.iter_mut().enumerate() {
        frontend.becomes(with_signal(number, 4, Signal::Off));
    }
    pod.run(20);
    assert!(capacities(&pod).iter().all(|part| (part - 1.0).abs() < 1e-9), "{:?}", capacities(&pod));
}
