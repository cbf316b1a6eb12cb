//! The clocks of each host that only go on stand somewhere else: nothing in a pod compares those of two hosts, and nothing minds that one
//! has just begun. Leases hold, move and are fenced, disks are mirrored, and whoever is started again is in the pod again.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use pod_api::{ByteSize, CreateInstance, CreateVolume, EndpointHealth, EventKind, NicRequest, ReplicaState};
use wadi_tests::disk_guest::{Answers, BLOCKS, DiskGuest};
use wadi_tests::frame_guest::Talk;
use wadi_tests::pod::{HostPlan, Pod, PodBuilder, Role};
use wadi_tests::waiting::until;

/// A guest that works with its NIC and its disk.
struct Work {
    talk: Talk,
    disk: DiskGuest,
    version: u64,
}

impl Work {
    fn check(&mut self) {
        self.talk.check().unwrap();
        self.begin_to_write();
        self.finish();
        assert_eq!(self.disk.versions(), [self.version; BLOCKS]);
    }

    fn begin_to_write(&mut self) {
        self.version += 1;
        self.disk.begin_to_write(self.version);
    }

    fn finish(&mut self) {
        assert_eq!(self.disk.finish(), Answers { done: BLOCKS, failed: 0 });
    }
}

/// In which time a process lives, and whether its clocks stand where others' do.
fn time_of(pid: Option<u32>) -> (PathBuf, String) {
    let process = PathBuf::from("/proc").join(pid.unwrap().to_string());
    let offsets = fs::read_to_string(process.join("timens_offsets")).unwrap();
    (fs::read_link(process.join("ns/time")).unwrap(), offsets)
}

fn replica(pod: &Pod, device: &str) -> ReplicaState {
    let volume = pod.api().volume("vol0").unwrap();
    volume.replicas.iter().find(|it| it.device == device).unwrap().state
}

#[test]
fn nothing_compares_the_clocks_of_two_hosts() {
    let mut pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0").ssd("ssd0", "64M"))
        .host(HostPlan::new("h3").backup_nic("nic1").ssd("ssd1", "64M"))
        .far_clocks()
        .start()
        .unwrap();
    let one_of_each = [("h1", Role::NetFrontend), ("h2", Role::NetBackend), ("h3", Role::NetBackend)];
    let mut pids = one_of_each.map(|(host, role)| pod.daemon(host, role).unwrap().pid()).to_vec();
    pids.extend([pod.controller().unwrap().pid(), Some(std::process::id())]);
    let times: BTreeSet<_> = pids.iter().map(|pid| time_of(*pid)).collect();
    assert_eq!(times.iter().map(|(_, offsets)| offsets).collect::<BTreeSet<_>>().len(), 5, "{times:?}");

    pod.api()
        .create_volume(&CreateVolume { replicas: 2, ..CreateVolume::new("vol0", ByteSize::new(16 << 20)) })
        .unwrap();
    let instance = pod
        .create_instance_as(&CreateInstance {
            name: "vm1".to_owned(),
            host: "h1".to_owned(),
            nics: vec![NicRequest::default()],
            volumes: vec!["vol0".to_owned()],
            ..CreateInstance::default()
        })
        .unwrap();
    let talk = Talk::begin(&pod, &instance.nics[0]).unwrap();
    let mut work = Work { talk, disk: DiskGuest::connect(&instance.disks[0].socket), version: 0 };
    work.check();

    // Who stands still for too long is over, and others go on in its place.
    pod.daemon("h2", Role::NetBackend).unwrap().freeze().unwrap();
    pod.wait_for_health("h2", Role::NetBackend, EndpointHealth::Fenced);
    pod.wait_for_nic("vm1", "h3/nic1").unwrap();
    work.check();
    pod.wake_up_to_the_end("h2", Role::NetBackend).unwrap();
    work.check();
    pod.daemon("h3", Role::BlkBackend).unwrap().freeze().unwrap();
    work.begin_to_write();
    until("the replica to be dropped", || {
        (replica(&pod, "h3/ssd1") == ReplicaState::StaleAway).then_some(())
    });
    work.finish();
    work.check();
    pod.wake_up_to_the_end("h3", Role::BlkBackend).unwrap();
    // Who comes again does so on a host whose clocks went on; a controller on another one, whose clocks stand elsewhere.
    pod.controller().unwrap().kill().unwrap();
    work.check();
    pod.start_controller().unwrap();
    for (host, role) in [("h2", Role::NetBackend), ("h3", Role::BlkBackend)] {
        pod.start_daemon(host, role).unwrap();
    }
    pod.wait_until_joined().unwrap();
    until("both replicas", || (replica(&pod, "h3/ssd1") == ReplicaState::InSync).then_some(()));
    work.check();
    let engines = pod.engines();
    for role in [Role::NetFrontend, Role::BlkFrontend] {
        pod.daemon("h1", role).unwrap().freeze().unwrap();
        pod.wait_for_health("h1", role, EndpointHealth::Silent);
        pod.daemon("h1", role).unwrap().thaw().unwrap();
        pod.wait_for_health("h1", role, EndpointHealth::Joined);
        work.check();
    }
    assert_eq!(pod.engines(), engines);
    let events = pod.api().events(0).unwrap().events;
    let of =
        |kind| events.iter().filter(|it| it.kind == kind).map(|it| it.subject.as_str()).collect::<Vec<_>>();
    assert_eq!(of(EventKind::EndpointFenced), ["h2/net-backend", "h3/blk-backend"]);
    assert_eq!(of(EventKind::Failover), ["vm1"]);
    assert_eq!(of(EventKind::EndpointGone), <[&str; 0]>::default());
}
