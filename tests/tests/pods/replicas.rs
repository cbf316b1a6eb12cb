//! Three controllers over real engines and a guest: grown from a single one while the guest works, and the leader is killed
//! when a cable is pulled.

use std::time::{Duration, Instant};

use pod_api::DeviceHealth;
use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::iperf::{self, Way};
use wadi_tests::replicas::Replicas;
use wadi_tests::stage::{Stage, rounds};
use wadi_tests::waiting::until;

#[test]
fn leader_dies_while_a_cable_is_pulled_and_the_guest_goes_on() {
    let mut stage = Stage::set_up().unwrap();
    let engines = stage.pod.engines();
    let job =
        |offset_mib, pattern| Job { disk: "vda".into(), offset_mib, size_mib: 128, pattern, flush_every: 64 };
    let disk = stage.vm.start(&job(0, Pattern::Random4K).command()).unwrap();
    let mut replicas = Replicas::instead_of_the_controller(&mut stage.pod).unwrap();
    Report::parse(&disk.finish(Duration::from_mins(2)).unwrap()).unwrap();

    let nics = [("h2", "nic0"), ("h3", "nic1")];
    for round in 0..=rounds() {
        let (from, to) =
            (nics[usize::try_from(round).unwrap() % 2], nics[usize::try_from(round + 1).unwrap() % 2]);
        let disk = stage.vm.start(&job(128, Pattern::Random4K).command()).unwrap();
        let stream = stage.vm.start(&iperf::command(Way::Out, 4)).unwrap();
        stage.vm.wait_for_stream().unwrap();
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
        iperf::Report::parse(&stream.finish(Duration::from_mins(1)).unwrap()).unwrap();
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
