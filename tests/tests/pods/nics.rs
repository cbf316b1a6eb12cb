//! NICs of other shapes than the usual one: several queues, and another driver.

use guest_images::{Guest, Silent};
use pod_api::{CreateInstance, NicRequest};
use wadi_tests::iperf::{self, Way};
use wadi_tests::pod::{CLIENT_ADDRESS, HostPlan, NicDriver, PodBuilder, VmShape};

fn two_nics() -> PodBuilder {
    PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0"))
        .host(HostPlan::new("h3").backup_nic("nic1"))
}

#[test]
fn two_pairs_of_queues_carry_streams_through_a_failover() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = two_nics().start().unwrap();
    let request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        nics: vec![NicRequest { queue_pairs: Some(2), ..NicRequest::default() }],
        volumes: Vec::new(),
        ..CreateInstance::default()
    };
    let instance = pod.create_instance_as(&request).unwrap();
    assert_eq!(instance.nics[0].queue_pairs, 2);
    let vm = pod.boot(&instance, &guest, VmShape::default()).unwrap();
    let server = iperf::Server::start(&pod).unwrap();

    vm.exec("ethtool -L eth0 combined 2").unwrap();
    assert_eq!(vm.exec("ls -d /sys/class/net/eth0/queues/tx-* | wc -l").unwrap().trim(), "2");
    for way in [Way::Out, Way::In] {
        let output = vm.exec(&format!("{} --parallel 4", iperf::command(way, 2))).unwrap();
        iperf::Report::parse(&output).unwrap();
    }
    // Down to one and up again while the device is in use.
    vm.exec("ethtool -L eth0 combined 1 && ethtool -L eth0 combined 2").unwrap();

    let stream = iperf::Stream::begin_parallel(&vm, Way::Out, 4, 4).unwrap();
    pod.pull_cable("h2", "nic0").unwrap();
    pod.wait_for_nic("vm1", "h3/nic1").unwrap();
    stream.finish().unwrap();
    let output = vm.exec(&format!("{} --parallel 4", iperf::command(Way::In, 1))).unwrap();
    iperf::Report::parse(&output).unwrap();
    drop(server);
}

#[test]
fn af_xdp_carries_streams_through_a_failover() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = two_nics().nic_driver(NicDriver::AfXdp).start().unwrap();
    let instance = pod.create_instance("vm1", "h1", &[]).unwrap();
    let vm = pod.boot(&instance, &guest, VmShape::default()).unwrap();
    let server = iperf::Server::start(&pod).unwrap();

    let said = vm.exec(&format!("ping -c 10 -i 0.1 -q {CLIENT_ADDRESS}")).unwrap();
    assert!(said.contains("10 packets received, 0% packet loss"), "{said}");
    let said = vm.exec(&format!("ping -c 5 -i 0.1 -s 1472 -q {CLIENT_ADDRESS}")).unwrap();
    assert!(said.contains("5 packets received, 0% packet loss"), "{said}");
    for way in [Way::Out, Way::In] {
        iperf::run(&vm, way, 2).unwrap();
    }

    let stream = iperf::Stream::begin(&vm, Way::Out, 4).unwrap();
    pod.pull_cable("h2", "nic0").unwrap();
    pod.wait_for_nic("vm1", "h3/nic1").unwrap();
    stream.finish().unwrap();
    iperf::run(&vm, Way::In, 1).unwrap();
    drop(server);
}

#[test]
fn a_stream_goes_on_over_a_backup_that_can_do_less() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0"))
        .host(HostPlan::new("h3").backup_nic("nic1").driven_by(NicDriver::AfXdp))
        .start()
        .unwrap();
    let instance = pod.create_instance("vm1", "h1", &[]).unwrap();
    let vm = pod.boot(&instance, &guest, VmShape::default()).unwrap();
    let server = iperf::Server::start(&pod).unwrap();
    let offloads = vm.exec("ethtool -k eth0").unwrap();
    assert!(offloads.contains("tcp-segmentation-offload: on"), "{offloads}");

    let stream = iperf::Stream::begin(&vm, Way::Out, 4).unwrap();
    pod.pull_cable("h2", "nic0").unwrap();
    pod.wait_for_nic("vm1", "h3/nic1").unwrap();
    stream.finish().unwrap();
    // The guest still leaves checksums and segmentation to a NIC that does neither.
    for way in [Way::Out, Way::In] {
        iperf::run(&vm, way, 2).unwrap();
    }
    drop(server);
}
