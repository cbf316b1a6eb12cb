//! Volumes that no instance uses are copied where they have to be, and are there for whoever wants them.

use std::time::Duration;

use cxl_pool::Role;
use pod_api::client::Client;
use pod_api::{CreateVolume, Instance};

use crate::support::replicas::Replicas;
use crate::support::{Pod, ssd, until, vm};

const PATIENCE: Duration = Duration::from_secs(30);

/// A pod with a volume on h2 that nobody uses, and an SSD on h3.
fn pod(mut pod: Pod) -> Pod {
    pod.join(3, Role::BlkBackend, vec![ssd("ssd0")]);
    let wanted = CreateVolume {
        device: Some("h2/ssd0".to_owned()),
        ..CreateVolume::new("unused", "16M".parse().expect("a size"))
    };
    until("the SSDs", || pod.client().device("h3", "ssd0").ok());
    pod.client().create_volume(&wanted).expect("there is room");
    pod
}

fn copiers(instances: Vec<Instance>) -> Vec<Instance> {
    instances.into_iter().filter(|it| it.copies.is_some()).collect()
}

#[test]
fn what_nobody_uses_is_copied_until_somebody_does() {
    let pod = pod(Pod::demo());
    let client = pod.client();
    client.drain_device("h2", "ssd0", true).expect("it is there");
    let copier = || copiers(client.instances().ok()?).pop();
    let found = until("a copier", copier);
    assert_eq!((found.host.as_str(), found.copies.as_deref()), ("h1", Some("unused")), "{found:?}");
    until("the volume to be on its way", || {
        (client.volume("unused").ok()?.replicas.len() == 2).then_some(())
    });
    client.create_instance(&vm("vm1", &["unused"]), PATIENCE).expect("nobody stands in its way");
    assert!(copier().is_none(), "it gave way");
    client.delete_instance("vm1").expect("it is there");
    until("another copier", copier);
    client.delete_volume("unused").expect("nobody stands in its way");
    assert!(copier().is_none(), "there is nothing to copy");
}

#[test]
fn whoever_leads_goes_on_with_copiers() {
    let mut pod = pod(Pod::demo_with_slots(3));
    pod.stop_controller();
    let mut replicas = Replicas::new(pod.directory.path());
    replicas.start_first(3);
    let leader = replicas.leader(&[0, 1, 2]);
    replicas.client(leader).drain_device("h2", "ssd0", true).expect("it is there");
    let copiers = |client: Client| Some(copiers(client.instances().ok()?));
    let first = until("a copier", || copiers(replicas.client(leader))?.pop());
    replicas.kill(leader);
    let other = (leader + 1) % 3;
    until("another leader", || {
        replicas.controllers(other)?.iter().any(|it| it.leads && it.replica != leader).then_some(())
    });
    assert_eq!(copiers(replicas.client(other)).expect("it answers").pop().map(|it| it.id), Some(first.id));
    until("it to be called off", || replicas.client(other).drain_device("h2", "ssd0", false).ok());
    let volume = replicas.client(other).volume("unused").expect("it is there");
    let to = volume.replicas.last().expect("it is moving").device.clone();
    let (host, ssd) = to.split_once('/').expect("an SSD's name");
    replicas.client(other).remove_replica("unused", host, ssd).expect("it is there");
    until("no copier any more", || copiers(replicas.client(other))?.is_empty().then_some(()));
}
