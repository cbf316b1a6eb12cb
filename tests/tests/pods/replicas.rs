//! Three controllers over real engines and a guest: grown from a single one while the guest works, the leader is killed when a cable is
//! pulled, and all of them are killed while the guest works.

use std::time::{Duration, Instant};

use pod_api::DeviceHealth;
use wadi_tests::conversation::Conversation;
use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::iperf::{self, Way};
use wadi_tests::pod::Role;
use wadi_tests::replicas::Replicas;
use wadi_tests::stage::{Stage, rounds};
use wadi_tests::waiting::until;

#[test]
fn leader_dies_while_a_cable_is_pulled_and_the_guest_goes_on() {
    let mut stage = Stage::set_up().unwrap();
    let engines = stage.pod.engines();
    let job =
        |offset_mib, pattern| Job { disk: "vda".into(), offset_mib, size_mib: 64, pattern, flush_every: 64 };
    let disk = stage.vm.start(&job(0, Pattern::Random4K).command()).unwrap();
    let mut replicas = Replicas::instead_of_the_controller(&mut stage.pod).unwrap();
    Report::parse(&disk.finish(Duration::from_mins(2)).unwrap()).unwrap();

    let nics = [("h2", "nic0"), ("h3", "nic1")];
    for round in 0..=rounds() {
        let (from, to) =
            (nics[usize::try_from(round).unwrap() % 2], nics[usize::try_from(round + 1).unwrap() % 2]);
        let disk = stage.vm.start(&job(128, Pattern::Random4K).command()).unwrap();
        let stream = iperf::Stream::begin(&stage.vm, Way::Out, 4).unwrap();
        let leader = replicas.leader(3);
        replicas.kill(leader).unwrap();
        stage.pod.pull_cable(from.0, from.1).unwrap();
        let killed = Instant::now();
        let other = replicas.client((leader + 1) % 3).unwrap();
        until("the failover", || {
            let instance = other.instance("vm1").ok()?;
            (instance.nics.first()?.nic == format!("{}/{}", to.0, to.1)).then_some(())
        });
        eprintln!("round {round}: moved {:?} after the leader's death", killed.elapsed());
        // Its traffic goes on, and every byte on the disk is what was written.
        stream.finish().unwrap();
        Report::parse(&disk.finish(Duration::from_mins(2)).unwrap()).unwrap();

        replicas.start_again(leader).unwrap();
        let next = replicas.leader(3);
        stage.pod.plug_cable(from.0, from.1).unwrap();
        until("the NIC", || {
            let device = replicas.client(next).unwrap().device(from.0, from.1).ok()?;
            (device.health == DeviceHealth::Up).then_some(())
        });
        iperf::run(&stage.vm, Way::In, 1).unwrap();
    }
    assert_eq!(stage.pod.engines(), engines, "engines were not disturbed");
}

/// While nothing fails nobody is missed; what fails then is failed over once they are back, as is what fails afterwards.
#[test]
fn a_guest_goes_on_without_any_of_three_controllers() {
    let mut stage = Stage::set_up().unwrap();
    let mut replicas = Replicas::instead_of_the_controller(&mut stage.pod).unwrap();
    let engines = stage.pod.engines();
    let conversation = Conversation::begin(&stage.pod, &stage.vm).unwrap();
    let job =
        Job { disk: "vda".into(), offset_mib: 0, size_mib: 32, pattern: Pattern::Random4K, flush_every: 64 };
    let nics = [("h2", "nic0"), ("h3", "nic1")];
    for round in 0..=rounds() {
        let (from, to) =
            (nics[usize::try_from(round).unwrap() % 2], nics[usize::try_from(round + 1).unwrap() % 2]);
        let before = stage.pod.api().instances().unwrap();
        let disk = stage.vm.start(&job.command()).unwrap();
        for replica in 0..3 {
            replicas.kill(replica).unwrap();
        }
        assert!((0..3).all(|replica| replicas.client(replica).unwrap().hosts().is_err()));
        Report::parse(&disk.finish(Duration::from_mins(2)).unwrap()).unwrap();
        for way in [Way::Out, Way::In] {
            iperf::run(&stage.vm, way, 1).unwrap();
        }
        conversation.check("while no controller runs").unwrap();
        assert_eq!(stage.pod.engines(), engines, "engines were not disturbed");

        // In one round something fails while nobody sees to it, in the next one just after that.
        let meanwhile = round % 2 == 1;
        if meanwhile {
            stage.pod.pull_cable(from.0, from.1).unwrap();
        }
        for replica in 0..3 {
            replicas.start_again(replica).unwrap();
        }
        replicas.leader(3);
        if !meanwhile {
            // Nothing was placed anew.
            until("all to be as it was", || (stage.pod.api().instances().ok()? == before).then_some(()));
            stage.pod.pull_cable(from.0, from.1).unwrap();
        }
        stage.pod.wait_for_nic("vm1", &format!("{}/{}", to.0, to.1)).unwrap();
        conversation.check("after the failover").unwrap();
        stage.pod.plug_cable(from.0, from.1).unwrap();
        until("the NIC", || {
            let device = stage.pod.api().device(from.0, from.1).ok()?;
            (device.health == DeviceHealth::Up).then_some(())
        });
    }
    assert_eq!(stage.pod.engines(), engines, "engines were not disturbed");

    // The backend of the guest's disk dies; it is heard of its successor because there are controllers again.
    let disk = stage.vm.start(&job.command()).unwrap();
    stage.pod.daemon("h2", Role::BlkBackend).unwrap().kill().unwrap();
    stage.pod.start_daemon("h2", Role::BlkBackend).unwrap();
    Report::parse(&disk.finish(Duration::from_mins(2)).unwrap()).unwrap();
}
