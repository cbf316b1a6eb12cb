//! Instances of several hosts share a path of the fabric by their weights, judged by the bytes that they are let move.

use std::thread;
use std::time::Duration;

use pod_api::{CreateInstance, Fabric, Mchannel, MchannelSpec};
use wadi_tests::loads::{Appetite, Load, judge, most_within, near, until};
use wadi_tests::pod::{HostPlan, Pod, PodBuilder};
use wadi_tests::steady::undisturbed;

/// What the path carries, in bytes/s: little, so that a busy machine is no other bottleneck.
const CAPACITY: u64 = 24_000_000;

fn share(pod: &Pod, instance: &str, weight: u32) {
    let spec = MchannelSpec { weight, tenant: "default".to_owned(), path: vec!["pool".to_owned()] };
    pod.api().set_mchannel(instance, &spec).unwrap();
}

/// An instance with a disk, at work on it.
fn start(pod: &Pod, name: &str, host: &str) -> Load {
    let volume = format!("{name}-disk");
    let request = serde_json::json!({"name": volume, "size": 16 << 20});
    pod.api().create_volume(&serde_json::from_value(request).unwrap()).unwrap();
    let request =
        CreateInstance { name: name.into(), host: host.into(), volumes: vec![volume], ..Default::default() };
    Load::disk(&pod.create_instance_as(&request).unwrap().disks[0].socket)
}

fn held_ms(pod: &Pod, instance: &str) -> u64 {
    pod.api().mchannel(instance).unwrap().held_ms
}

#[test]
fn instances_share_a_path_by_weight_and_a_cheat_gains_nothing() {
    let pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").vms())
        .host(HostPlan::new("h3").ssd("ssd0", "256M"))
        .start()
        .unwrap();
    let vms = [("vm1", "h1", 1), ("vm2", "h2", 3), ("vm3", "h2", 1)];
    let elements = [("pool".to_owned(), CAPACITY)].into();
    let fabric = Fabric { window_us: 10_000, sample_us: 50_000, elements, ..Fabric::default() };
    pod.api().set_fabric(&fabric).unwrap();
    let loads = vms.map(|(name, host, weight)| {
        let load = start(&pod, name, host);
        share(&pod, name, weight);
        load
    });
    #[allow(clippy::cast_precision_loss)]
    let capacity = CAPACITY as f64;

    // One wants less than its share: it gets that and never waits. The others divide the rest by weight, over two hosts.
    loads[2].go_on(Appetite::Modest);
    let divided = |rates: &[f64]| {
        let rest = capacity - rates[2];
        vec![rest / 4.0, rest * 3.0 / 4.0, rates[2]]
    };
    until("the rest is divided 1:3", &loads, |rates| {
        rates[2] > 0.0 && rates.iter().zip(divided(rates)).all(|(rate, expected)| near(*rate, expected))
    });
    // Who stood still with the host for a while makes up for it at once, which is more than its share for that moment.
    let times_held = || {
        let before = held_ms(&pod, "vm3");
        judge("the rest is divided 1:3", &loads, capacity, divided);
        held_ms(&pod, "vm3") - before
    };
    undisturbed("below its share an instance is not held back", times_held, |held| *held == 0);
    assert!(held_ms(&pod, "vm1") > 0 && held_ms(&pod, "vm2") > 0);

    // It moves in bursts as long as a window. One of the same weight that is always hungry has no less.
    loads[2].go_on(Appetite::Bursts);
    let mean = judge("bursts gain nothing", &loads, capacity, divided);
    assert!(mean[2] <= 1.05 * mean[0], "{mean:?}");

    // What is said of weights and capacity holds at once, for guests that go on.
    loads[2].go_on(Appetite::Hungry);
    pod.podctl(&["mchannel", "set", "vm1", "--weight", "3", "--path", "pool"]).unwrap();
    pod.podctl(&["mchannel", "fabric", "--element", "pool=16M"]).unwrap();
    let capacity = f64::from(16 << 20);
    judge("3:3:1 of less", &loads, capacity, |_| {
        [3.0, 3.0, 1.0].map(|weight| capacity * weight / 7.0).to_vec()
    });

    // Throttling shows.
    let shown: Mchannel = pod.api().mchannel("vm3").unwrap();
    assert!(shown.share.is_some_and(|share| share < shown.demand) && shown.run_percent < 100, "{shown:?}");
    assert!(shown.bytes > 0 && shown.messages > 0 && shown.held_ms > 0, "{shown:?}");
    let list = pod.podctl(&["mchannel", "list"]).unwrap();
    assert!(vms.iter().all(|(name, ..)| list.contains(name)), "{list}");
    let top = pod.podctl(&["top", "--once"]).unwrap();
    assert!(top.contains("HELD BACK") && top.contains("vm3"), "{top}");
    let metrics = pod.api().metrics().unwrap();
    for name in ["mchannel_held_seconds_total", "mchannel_share_bytes_per_second", "mchannel_run_ratio"] {
        assert!(metrics.contains(&format!("wadi_{name}{{")), "{name}");
    }

    // Without shares nobody is held back any more.
    for (name, ..) in vms {
        pod.podctl(&["mchannel", "clear", name]).unwrap();
    }
    until("nobody is held back", &loads, |rates| rates.iter().sum::<f64>() > 1.5 * capacity);
    loads.into_iter().for_each(Load::stop);
}

/// §4.5 with K = 10 ms: in any interval of K an instance moves at most w·α·K·(1 + 2·T_W/K) bytes, whatever it does. Its w·α is never more
/// than what its own port carries.
#[test]
fn no_interval_of_10_ms_has_more_bytes_than_the_bound_allows() {
    /// T_W, and K and longer intervals, in ms.
    const WINDOW_MS: u64 = 1;
    const INTERVALS_MS: [u64; 3] = [10, 100, 1000];
    let pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").vms())
        .host(HostPlan::new("h3").ssd("ssd0", "256M"))
        .start()
        .unwrap();
    let vms = [("vm1", "h1", 16_000_000_u64), ("vm2", "h2", 32_000_000)];
    let mut elements: std::collections::BTreeMap<String, u64> =
        vms.iter().map(|(name, _, port)| (format!("{name}-port"), *port)).collect();
    elements.insert("pool".to_owned(), vms.iter().map(|(.., port)| port).sum());
    let fabric = Fabric { window_us: 1000, sample_us: 10_000, elements, ..Fabric::default() };
    pod.api().set_fabric(&fabric).unwrap();
    let loads = vms.map(|(name, host, _)| {
        let load = start(&pod, name, host);
        let path = vec![format!("{name}-port"), "pool".to_owned()];
        pod.api()
            .set_mchannel(name, &MchannelSpec { weight: 1, tenant: "default".to_owned(), path })
            .unwrap();
        load
    });
    // Until both are held to that, they move what they like.
    until("what the ports carry", &loads, |rates| {
        #[allow(clippy::cast_precision_loss)]
        let carries = |place: usize| vms[place].2 as f64;
        rates.iter().enumerate().all(|(place, rate)| *rate <= 1.05 * carries(place))
    });
    for appetites in [[Appetite::Hungry; 2], [Appetite::Bursts, Appetite::Hungry], [Appetite::Bursts; 2]] {
        for (load, appetite) in loads.iter().zip(appetites) {
            load.go_on(appetite);
        }
        let held = vms.map(|(name, ..)| held_ms(&pod, name));
        for load in &loads {
            load.each();
        }
        thread::sleep(Duration::from_secs(3));
        for ((load, (name, _, port)), held) in loads.iter().zip(vms).zip(held) {
            let moved = load.each();
            for ms in INTERVALS_MS {
                let (most, bound) =
                    (most_within(Duration::from_millis(ms), &moved), port * (ms + 2 * WINDOW_MS) / 1000);
                eprintln!("{name}, {appetites:?}: {most} of {bound} bytes in {ms} ms");
                assert!(most <= bound, "{name}: {most} bytes in {ms} ms, where {bound} may be");
            }
            let hungry = appetites.iter().all(|it| *it == Appetite::Hungry);
            assert!(!hungry || held_ms(&pod, name) > held, "{name} wants more than its port carries");
        }
    }
    loads.into_iter().for_each(Load::stop);
}
