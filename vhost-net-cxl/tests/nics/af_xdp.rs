//! AF_XDP sockets on one end of a veth pair.

use std::io::ErrorKind;
use std::time::Instant;

use cxl_pool::{Area, LineCount, LineOffset};
use vhost_net_cxl::backend::receive_buffers::{PIECES_MAX, ReceiveBuffers};
use vhost_net_cxl::nic::af_xdp::AfXdpNic;
use vhost_net_cxl::nic::statistics::{DriverTroubles, TroubleWatch};
use vhost_net_cxl::nic::{Batch, Nic, NicError};

use super::{
    DEADLINE, Stage, Wire, config, frame, has_carrier, in_namespace, link_changes, one, scattered, sh,
    sum_up_ipv4, until_counted, veth, veth_up,
};

#[test]
fn af_xdp_carries_frames_both_ways_and_starts_again() {
    in_namespace(|| {
        veth();
        // The second time right after the first: a queue stays busy for a moment.
        for round in 0..3 {
            let wire = Wire::open("peer");
            let mut stage = Stage::new();
            // What a veth cannot do is done without.
            let text = format!("name='nic0'\ndriver='af-xdp'\ninterface='ours'\nzero-copy={}", round == 1);
            let mut nic = AfXdpNic::open(&config(&text), &stage.pool).expect("opened");
            start(&mut nic, &mut stage);
            assert!(nic.link().is_up());
            carries_frames_both_ways(&mut nic, &mut stage, &wire);
        }
    });
}

/// Frames of several lengths, in one piece and in several, and far more of them than there are chunks for sending.
pub(crate) fn carries_frames_both_ways(nic: &mut AfXdpNic, stage: &mut Stage, wire: &Wire) {
    for (bytes, mark) in [(60, 1), (1514, 2), (777, 3)] {
        let packet = stage.packet([0; 12], &frame(bytes, mark));
        assert_eq!(nic.transmit(&one(packet)).expect("sent"), 1);
        nic.flush().expect("flushed");
        assert_eq!(wire.receive(), frame(bytes, mark));
        wire.send(&frame(bytes, mark + 100));
        let (header, got) = stage.receive(nic);
        assert_eq!(header, [0; 12]);
        assert_eq!(got, frame(bytes, mark + 100));
    }
    let packet = stage.packet([0; 12], &frame(1400, 4));
    let memory = stage.pool.hardware();
    assert_eq!(nic.transmit(&scattered(&memory, packet)).expect("sent"), 1);
    nic.flush().expect("flushed");
    assert_eq!(wire.receive(), frame(1400, 4), "in pieces");
    // Far more than there are chunks for sending: all of them come back. Not so many under way that the other end would lose some.
    let packet = stage.packet([0; 12], &frame(100, 7));
    let (mut sent, mut arrived) = (0, 0);
    let start = Instant::now();
    while arrived < 2000 {
        if sent < 2000 && sent < arrived + 64 {
            sent += nic.transmit(&one(packet)).expect("sent");
            nic.flush().expect("flushed");
            assert!(start.elapsed() < DEADLINE, "{sent} were sent");
        } else {
            assert_eq!(wire.receive(), frame(100, 7));
            arrived += 1;
        }
    }
}

/// Starts it, again and again for as long as its queues are busy, as a backend does: the kernel lets go of a socket's queue some time
/// after its descriptor is closed, when nobody else is changing interfaces.
pub(crate) fn start(nic: &mut AfXdpNic, stage: &mut Stage) {
    let give_up = Instant::now() + DEADLINE;
    loop {
        match nic.start(&mut stage.buffers) {
            Ok(()) => return,
            Err(NicError::System { source, .. })
                if source.kind() == ErrorKind::ResourceBusy && Instant::now() < give_up =>
            {
                stage.buffers.reclaim();
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A UDP frame of a flow of its own.
fn of_flow(flow: u8) -> Vec<u8> {
    let mut frame = frame(100, flow);
    frame[12..38].fill(0);
    frame[12..15].copy_from_slice(&[8, 0, 0x45]);
    frame[17] = 86;
    frame[22..24].copy_from_slice(&[64, 17]);
    frame[26..34].copy_from_slice(&[10, 9, 0, 1, 10, 9, 0, 2]);
    frame[34..40].copy_from_slice(&[0x10, flow, 0, 9, 0, 66]);
    // A bridge on the way may look at it.
    sum_up_ipv4(&mut frame);
    frame
}

/// Frames of many flows come from the wire, whatever queues they are put into, and their buffers are not lost.
pub(crate) fn all_flows_arrive(nic: &mut AfXdpNic, stage: &mut Stage, wire: &Wire) {
    const FLOWS: u8 = 64;
    let free = stage.buffers.free_count();
    // The kernel puts flows into queues by what their frames say.
    for _ in 0..20 {
        let mut arrived: Vec<u8> = (0..FLOWS)
            .map(|flow| {
                wire.send(&of_flow(flow));
                stage.receive(nic).1[35]
            })
            .collect();
        arrived.sort_unstable();
        assert_eq!(arrived, (0..FLOWS).collect::<Vec<_>>());
    }
    let left = stage.buffers.free_count();
    assert!(left + 64 >= free, "{left} of {free}");
}

#[test]
fn af_xdp_receives_from_all_queues_of_its_interface() {
    in_namespace(|| {
        sh(
            "ip link add ours numrxqueues 4 numtxqueues 4 type veth peer name peer numrxqueues 4 numtxqueues 4",
        );
        veth_up();
        let wire = Wire::open("peer");
        // Zero-copy is not to be had here, and asked for all the same.
        for zero_copy in [false, true] {
            let mut stage = Stage::new();
            let text = format!("name='nic0'\ndriver='af-xdp'\ninterface='ours'\nzero-copy={zero_copy}");
            let mut nic = AfXdpNic::open(&config(&text), &stage.pool).expect("opened");
            start(&mut nic, &mut stage);
            all_flows_arrive(&mut nic, &mut stage, &wire);
            let packet = stage.packet([0; 12], &frame(100, 1));
            assert_eq!(nic.transmit(&one(packet)).expect("sent"), 1);
            nic.flush().expect("flushed");
            assert_eq!(wire.receive(), frame(100, 1));
        }
    });
}

#[test]
fn af_xdp_has_its_interface_receive_what_is_for_instances() {
    in_namespace(|| {
        veth();
        let mut stage = Stage::new();
        let mut nic = AfXdpNic::open(&config("name='nic0'\ndriver='af-xdp'\ninterface='ours'"), &stage.pool)
            .expect("opened");
        start(&mut nic, &mut stage);
        // A veth passes everything on, a device drops what is not for it.
        sh("ip -d link show ours | grep -q 'promiscuity 1'");
        drop(nic);
        sh("ip -d link show ours | grep -q 'promiscuity 0'");
    });
}

#[test]
fn af_xdp_goes_on_when_its_interface_leaves_a_bridge() {
    in_namespace(|| {
        veth();
        sh("ip link add br0 type bridge && ip link set ours master br0");
        let mut stage = Stage::new();
        let mut nic = AfXdpNic::open(&config("name='nic0'\ndriver='af-xdp'\ninterface='ours'"), &stage.pool)
            .expect("opened");
        start(&mut nic, &mut stage);
        let told = link_changes(&mut nic);
        sh("ip link set ours nomaster");
        sh("ip link set peer down");
        let (up, reason) = told.recv_timeout(DEADLINE).expect("told");
        assert!(!up && reason.contains("carrier"), "{reason}");
        let mut batch = Batch::new();
        nic.receive(&mut stage.buffers, &mut batch).expect("the interface is there");
    });
}

#[test]
fn af_xdp_does_not_send_late_what_found_its_interface_down() {
    in_namespace(|| {
        veth();
        nothing_is_sent_late("ours", false, &Wire::open("peer"));
    });
}

/// What an interface is given while it is down is not what it sends first once it is up.
pub(crate) fn nothing_is_sent_late(interface: &str, zero_copy: bool, wire: &Wire) {
    let mut stage = Stage::new();
    let text = format!("name='nic0'\ndriver='af-xdp'\ninterface='{interface}'\nzero-copy={zero_copy}");
    let open = |stage: &mut Stage| {
        let mut nic = AfXdpNic::open(&config(&text), &stage.pool).expect("opened");
        stage.buffers.reclaim();
        start(&mut nic, stage);
        nic
    };
    let mut nic = open(&mut stage);
    sh(&format!("ip link set {interface} down"));
    has_carrier(interface, false);
    let packet = stage.packet([0; 12], &frame(100, 1));
    let mut failed = false;
    for _ in 0..100 {
        nic.transmit(&one(packet)).expect("taken, or not");
        failed = failed || nic.flush().is_err();
    }
    if failed {
        // As its backend does, which hears nothing of the link here.
        drop(nic);
        nic = open(&mut stage);
    }
    sh(&format!("ip link set {interface} up"));
    has_carrier(interface, true);
    let packet = stage.packet([0; 12], &frame(100, 2));
    assert_eq!(nic.transmit(&one(packet)).expect("sent"), 1);
    nic.flush().expect("flushed");
    assert_eq!(wire.receive(), frame(100, 2), "nothing of before");
}

#[test]
fn af_xdp_starts_once_what_was_in_its_way_is_gone() {
    in_namespace(|| {
        veth();
        let wire = Wire::open("peer");
        let text = "name='nic0'\ndriver='af-xdp'\ninterface='ours'";
        let (mut first, mut second) = (Stage::new(), Stage::new());
        let mut other = AfXdpNic::open(&config(text), &first.pool).expect("opened");
        start(&mut other, &mut first);
        let mut nic = AfXdpNic::open(&config(text), &second.pool).expect("opened");
        for _ in 0..2 {
            let message = nic.start(&mut second.buffers).expect_err("the queue is in use").to_string();
            assert!(message.contains("bind its socket"), "{message}");
            second.buffers.reclaim();
        }
        drop(other);
        start(&mut nic, &mut second);
        let packet = second.packet([0; 12], &frame(100, 1));
        assert_eq!(nic.transmit(&one(packet)).expect("sent"), 1);
        nic.flush().expect("flushed");
        assert_eq!(wire.receive(), frame(100, 1));
        wire.send(&frame(100, 2));
        assert_eq!(second.receive(&mut nic).1, frame(100, 2));
    });
}

/// A megabyte is the smallest area that a configuration may ask for.
fn small_stage() -> Stage {
    let mut stage = Stage::new();
    let area = Area::new(LineOffset::new((8 << 20) / 64), LineCount::new((1 << 20) / 64));
    stage.buffers = ReceiveBuffers::new(area);
    stage
}

#[test]
fn af_xdp_leaves_buffers_of_a_small_area_to_who_receives() {
    in_namespace(|| {
        veth();
        let wire = Wire::open("peer");
        let mut stage = small_stage();
        let mut nic = AfXdpNic::open(&config("name='nic0'\ndriver='af-xdp'\ninterface='ours'"), &stage.pool)
            .expect("opened");
        start(&mut nic, &mut stage);
        let free = stage.buffers.free_count();
        assert!(free >= PIECES_MAX, "{free}");
        // More frames than there are buffers: all of those come round.
        for number in 0..600 {
            wire.send(&frame(100, u8::try_from(number % 200).expect("small")));
            stage.receive(&mut nic);
        }
        let left = stage.buffers.free_count();
        assert!(left + 64 >= free, "{left} of {free}");
    });
}

#[test]
fn what_finds_no_buffer_of_an_af_xdp_socket_is_counted() {
    in_namespace(|| {
        veth();
        let wire = Wire::open("peer");
        let mut stage = small_stage();
        let text = "name='nic0'\ndriver='af-xdp'\ninterface='ours'";
        let mut nic = AfXdpNic::open(&config(text), &stage.pool).expect("opened");
        start(&mut nic, &mut stage);
        let driver = DriverTroubles::default();
        driver.set(nic.troubles());
        let mut watch = TroubleWatch::new(&config(text));
        assert_eq!(watch.counts(Instant::now(), &driver)["xdp-fill-ring-empty"], 0);
        // Half of the 256 buffers are with the kernel, and nobody takes what it filled.
        for number in 0..200 {
            wire.send(&frame(100, number));
        }
        let counted = until_counted(&mut watch, &driver, "xdp-fill-ring-empty");
        assert!(counted["xdp-rx-dropped"] >= 1, "{counted:?}");
        // Its queue is free once it is gone, whoever looks at it.
        drop(nic);
        let mut second = Stage::new();
        let mut nic = AfXdpNic::open(&config(text), &second.pool).expect("opened");
        start(&mut nic, &mut second);
    });
}

#[test]
fn af_xdp_sees_a_pulled_cable() {
    in_namespace(|| {
        veth();
        let mut stage = Stage::new();
        let text = "name='nic0'\ndriver='af-xdp'\ninterface='ours'";
        let mut nic = AfXdpNic::open(&config(text), &stage.pool).expect("opened");
        start(&mut nic, &mut stage);
        let told = link_changes(&mut nic);
        sh("ip link set peer down");
        assert!(!told.recv_timeout(DEADLINE).expect("told").0);
    });
}

#[test]
fn what_af_xdp_loses_without_a_carrier_is_counted() {
    const PACKETS: u64 = 40;
    in_namespace(|| {
        veth();
        let mut stage = Stage::new();
        let text = "name='nic0'\ndriver='af-xdp'\ninterface='ours'";
        let mut nic = AfXdpNic::open(&config(text), &stage.pool).expect("opened");
        start(&mut nic, &mut stage);
        sh("ip link set peer down");
        has_carrier("ours", false);
        let packet = stage.packet([0; 12], &frame(100, 1));
        for _ in 0..PACKETS {
            assert_eq!(nic.transmit(&one(packet)).expect("taken"), 1);
        }
        let begun = Instant::now();
        while nic.has_work() {
            nic.flush().expect("no error");
            assert!(begun.elapsed() < DEADLINE, "it tries for ever");
        }
        assert_eq!(nic.errors(), PACKETS);
        // The interface works again, and so does its socket.
        sh("ip link set peer up");
        has_carrier("ours", true);
        let wire = Wire::open("peer");
        let packet = stage.packet([0; 12], &frame(100, 2));
        assert_eq!(nic.transmit(&one(packet)).expect("sent"), 1);
        nic.flush().expect("flushed");
        assert_eq!(wire.receive(), frame(100, 2));
        assert_eq!(nic.errors(), PACKETS);
    });
}
