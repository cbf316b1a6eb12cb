//! What tells hosts how congested the fabric is, as the API, podctl and the metrics say it.

use std::time::Duration;

use pod_api::{CreateInstance, ElementLoad, Fabric, FabricSignal, LoadLevel, Mchannel};

use crate::live_migration::report;
use crate::podctl::said;
use crate::support::{Pod, until, vm};

#[test]
fn an_operator_chooses_what_tells_of_congestion_and_sees_what_it_says() {
    let pod = Pod::demo();
    let client = pod.client();
    said(&pod, "mchannel fabric --element link=1M --element port1=10G");
    let fabric = client.fabric().expect("an answer");
    assert!(
        fabric.signals.is_empty() && fabric.loads.is_empty(),
        "nothing does unless it is said: {fabric:?}"
    );
    said(&pod, "mchannel fabric --signal link=probe");
    let load = ElementLoad { level: Some(LoadLevel::Moderate), capacity: 900_000 };
    let fabric = until("what frontends see of it", || {
        let fabric = client.fabric().ok()?;
        (fabric.loads.get("link") == Some(&load)).then_some(fabric)
    });
    assert_eq!(fabric.signals, [("link".to_owned(), FabricSignal::Probe)].into());
    assert_eq!(fabric.loads.len(), 1, "nobody looks at the other one");
    let shown = said(&pod, "mchannel fabric");
    assert!(shown.contains("probe") && shown.contains("moderate overload"), "{shown}");
    let shown = said(&pod, "top --once");
    assert!(shown.contains("fabric: link carries 900.0 kB/s (moderate overload)"), "{shown}");
    let metrics = client.metrics().expect("metrics");
    for metric in [
        "wadi_fabric_load_level{element=\"link\"} 2",
        "wadi_fabric_estimated_bytes_per_second{element=\"link\"} 900000",
    ] {
        assert!(metrics.contains(metric), "there is no {metric}");
    }
    // What is shown of loads may come back as it is.
    client.set_fabric(&Fabric { sample_us: 20_000, ..fabric.clone() }).expect("it makes sense");
    let unknown = [("link7".to_owned(), FabricSignal::Device)].into();
    client
        .set_fabric(&Fabric { signals: unknown, ..client.fabric().expect("an answer") })
        .expect_err("no such element");
    said(&pod, "mchannel fabric --signal link=off");
    let fabric = client.fabric().expect("an answer");
    assert!(fabric.signals.is_empty() && fabric.loads.is_empty(), "{fabric:?}");
}

#[test]
fn a_fabric_as_large_as_can_be_is_set_and_changed() {
    let pod = Pod::demo();
    let client = pod.client();
    let name = |number: u32| format!("element-{number:024}");
    let elements = (0..1024).map(|number| (name(number), 123_456_789_012)).collect();
    let signals = (0..1024).map(|number| (name(number), FabricSignal::Device)).collect();
    let tenants = (0..63).map(|number| (format!("tenant-{number:025}"), 1000)).collect();
    let before = client.fabric().expect("an answer");
    let fabric = Fabric { elements, signals, tenants, ..before };
    client.set_fabric(&fabric).expect("it may be so large");
    // What is shown of all loads may come back, too.
    let load = ElementLoad { level: Some(LoadLevel::Moderate), capacity: 123_456_789_012 };
    let loads = (0..1024).map(|number| (name(number), load.clone())).collect();
    let shown = client.fabric().expect("an answer");
    client.set_fabric(&Fabric { sample_us: 20_000, loads, ..shown }).expect("what is shown may be sent back");
    said(&pod, &format!("mchannel fabric --element {}=1G", name(7)));
    let fabric = client.fabric().expect("an answer");
    assert_eq!((fabric.elements.len(), fabric.sample_us), (1024, 20_000));
    assert_eq!(fabric.elements[&name(7)], 1 << 30);
}

#[test]
fn mchannels_are_listed_by_tenant_and_by_host() {
    let pod = Pod::demo();
    said(&pod, "mchannel fabric --element pool=20G --tenant red=1 --tenant blue=2");
    for (name, tenant) in [("vm1", "red"), ("vm2", "blue")] {
        pod.client().create_instance(&vm(name, &[]), Duration::from_secs(30)).expect("created");
        said(&pod, &format!("mchannel set {name} --path pool --tenant {tenant}"));
    }
    for (asked, expected) in [
        ("", &["vm1", "vm2"][..]),
        ("--tenant red", &["vm1"]),
        ("--host h1", &["vm1", "vm2"]),
        ("--host h1 --tenant blue", &["vm2"]),
        ("--host h2", &[]),
    ] {
        let shown = said(&pod, &format!("mchannel list {asked} -o json"));
        let listed: Vec<Mchannel> = serde_json::from_str(&shown).expect("mchannels");
        let names: Vec<&str> = listed.iter().map(|it| it.instance.as_str()).collect();
        assert_eq!(names, expected, "{asked}");
    }
}

#[test]
fn memory_in_the_pool_whose_vcpus_nobody_counts_is_told_of() {
    let pod = Pod::demo();
    let client = pod.client();
    said(&pod, "mchannel fabric --element pool=20G");
    let create = |name: &str, ram_bytes| {
        let request = CreateInstance { ram_bytes, ..vm(name, &[]) };
        client.create_instance(&request, Duration::from_secs(30)).expect("created");
        said(&pod, &format!("mchannel set {name} --path pool"));
    };
    create("vm1", Some(2 << 20));
    create("vm2", Some(2 << 20));
    create("vm3", None);
    report(&pod, 1, true, true);
    // This one does not run.
    create("vm4", Some(2 << 20));
    // Of the first one a frontend tells what its vCPUs do.
    until("its vCPUs", || client.mchannel("vm1").ok()?.vcpus);
    until("who is not counted", || client.mchannel("vm2").ok()?.vcpus_uncounted.then_some(()));
    for (name, uncounted) in [("vm1", false), ("vm2", true), ("vm3", false), ("vm4", false)] {
        assert_eq!(client.mchannel(name).expect("it has one").vcpus_uncounted, uncounted, "{name}");
    }
    let shown = said(&pod, "mchannel list");
    assert!(shown.contains("not counted") && shown.trim_end().ends_with("wadi-slice@vm2"), "{shown}");
    let metrics = client.metrics().expect("metrics");
    for (name, value) in [("vm1", 0), ("vm2", 1), ("vm3", 0), ("vm4", 0)] {
        let metric =
            format!("wadi_mchannel_vcpus_uncounted{{instance=\"{name}\",tenant=\"default\"}} {value}");
        assert!(metrics.contains(&metric), "there is no {metric}");
    }
}
