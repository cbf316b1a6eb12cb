//! A TAP device that takes no more packets than it is allowed to have under way.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost_net_cxl::nic::tap::TapNic;
use vhost_net_cxl::nic::{Batch, Nic};

use super::{DEADLINE, Stage, config, frame, in_namespace, one, sh, veth};

/// Whether any of a NIC's descriptors becomes readable within `patience`.
fn wakes(nic: &TapNic, patience: Duration) -> bool {
    let descriptors = nic.descriptors();
    let mut watched: Vec<_> =
        descriptors.iter().map(|it: &BorrowedFd<'_>| PollFd::new(it, PollFlags::IN)).collect();
    let patience = Timespec::try_from(patience).expect("short");
    poll(&mut watched, Some(&patience)).expect("polled") > 0
}

#[test]
fn a_full_tap_tells_once_it_has_room_again() {
    in_namespace(|| {
        veth();
        let mut stage = Stage::new();
        let text = "name='nic0'\ndriver='tap'\ninterface='tap0'\nuplink='ours'\nsend-buffer-bytes=16384";
        let mut nic = TapNic::open(&config(text), &stage.pool).expect("opened");
        sh("ip link add bridge type bridge forward_delay 0");
        sh("ip link set tap0 master bridge && ip link set ours master bridge && ip link set bridge up");
        // The wire takes nearly nothing.
        sh("tc qdisc add dev ours root tbf rate 1kbit burst 2kb latency 10000s");
        // To one address: of what it floods a bridge sends copies, which count as nobody's.
        let mut frame = frame(1500, 7);
        frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, 99]);
        let packet = stage.packet([0; 12], &frame);
        assert!(!nic.tells_of_room(), "it is not full");
        let start = Instant::now();
        while nic.transmit(&one(packet)).expect("sent") == 1 {
            assert!(start.elapsed() < DEADLINE, "it is never full");
        }
        assert!(nic.tells_of_room());
        // What the interface says when it comes up, the host says over the device, too.
        let mut batch = Batch::new();
        while wakes(&nic, Duration::from_millis(200)) {
            nic.receive(&mut stage.buffers, &mut batch).expect("received");
            for piece in batch.pieces() {
                stage.buffers.give_back(stage.buffers.at(piece.at).expect("a receive buffer"));
            }
            batch.clear();
            assert_eq!(nic.transmit(&one(packet)).expect("no error"), 0, "it was woken for nothing");
            assert!(nic.tells_of_room());
        }
        sh("tc qdisc del dev ours root");
        assert!(wakes(&nic, DEADLINE), "it has room, and nobody is told");
        assert_eq!(nic.transmit(&one(packet)).expect("sent"), 1);
        assert!(!nic.tells_of_room());
    });
}

#[test]
fn a_packet_with_which_the_kernel_finds_fault_is_no_trouble_of_the_tap() {
    in_namespace(|| {
        let stage = Stage::new();
        let mut nic = TapNic::open(&config("name='nic0'\ndriver='tap'\ninterface='tap0'"), &stage.pool)
            .expect("opened");
        // No such kind of segments.
        let faulty = [0, 0x0e, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0];
        let packet = stage.packet(faulty, &frame(100, 7));
        let mut batch = one(packet);
        batch.push_frame(packet);
        assert_eq!(nic.transmit(&batch).expect("no error"), 2);
        assert_eq!(nic.refused(), [0, 1]);
        assert_eq!(nic.errors(), 0);
        let packet = stage.packet([0; 12], &frame(100, 7));
        assert_eq!(nic.transmit(&one(packet)).expect("sent"), 1);
        assert!(nic.refused().is_empty());
    });
}
