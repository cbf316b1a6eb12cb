//! A guest changes how many pairs of queues it uses, while traffic runs and while those who serve them are away.

use guest_images::{Guest, Silent};
use pod_api::{CreateInstance, NicRequest};
use wadi_tests::conversation::Conversation;
use wadi_tests::iperf::{self, Way};
use wadi_tests::pod::{HostPlan, PodBuilder, PodVm, Role, VmShape};
use wadi_tests::stage::rounds;

/// The guest uses so many of its pairs from now on.
fn use_pairs(vm: &PodVm, pairs: u32) {
    vm.exec(&format!("ethtool -L eth0 combined {pairs}")).unwrap();
    let said = vm.exec("ethtool -l eth0").unwrap();
    let now = said.lines().rfind(|line| line.starts_with("Combined:")).unwrap_or_default();
    assert_eq!(now.split_whitespace().last(), Some(pairs.to_string().as_str()), "{said}");
}

#[test]
fn a_guest_changes_its_queues_under_load_and_while_daemons_are_away() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    // With no backup: what is away is waited for.
    let mut pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0"))
        .start()
        .unwrap();
    let request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        nics: vec![NicRequest { queue_pairs: Some(2), ..NicRequest::default() }],
        ..CreateInstance::default()
    };
    let instance = pod.create_instance_as(&request).unwrap();
    let vm = pod.boot(&instance, &guest, VmShape::default()).unwrap();
    let _server = iperf::Server::start(&pod).unwrap();
    let conversation = Conversation::begin(&pod, &vm).unwrap();
    use_pairs(&vm, 2);
    for round in 0..rounds() {
        for way in [Way::Out, Way::In] {
            let stream = iperf::Stream::begin(&vm, way, 4).unwrap();
            for pairs in [1, 2, 1, 2] {
                use_pairs(&vm, pairs);
                conversation.check(&format!("round {round}, with {pairs} pairs")).unwrap();
            }
            stream.finish().unwrap();
        }
        for (host, role) in [("h2", Role::NetBackend), ("h1", Role::NetFrontend)] {
            for pairs in [1, 2] {
                let stream = iperf::Stream::begin(&vm, Way::Out, 4).unwrap();
                pod.daemon(host, role).unwrap().kill().unwrap();
                use_pairs(&vm, pairs);
                pod.start_daemon(host, role).unwrap();
                pod.wait_until_joined().unwrap();
                conversation
                    .check(&format!("round {round}, {host}/{role} back, with {pairs} pairs"))
                    .unwrap();
                stream.finish().unwrap();
            }
        }
    }
    for way in [Way::Out, Way::In] {
        iperf::run(&vm, way, 1).unwrap();
    }
}
