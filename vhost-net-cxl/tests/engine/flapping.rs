//! Packets that a backend gives back for now, and what follows them: whatever comes back meanwhile, a flow stays in order.

use cxl_pool::HostId;
use cxl_pool::simulated::{Faults, SimulatedPool, check_seeds};
use pod_protocol::objects::{Object, RegistrationObject, RegistrationState};
use vhost_net_cxl::channel_counters::ChannelBook;
use vhost_net_cxl::message::{NetMessage, Opcode, Status};
use vhost_net_cxl::offloads::Offloads;

use crate::echo::{QUEUE_SIZE, frame};
use crate::guest::{Guest, ram_area};
use crate::pod::{
    POOL_BYTES, TestFrontend, Turn, all_features, area, channel, draws, mac, open, port, route,
};
use crate::strangers::{Scene, from, registered, scene};
use crate::zero_copy::{pod, transmissions};
use RegistrationState::{Active, Standby};

/// Sends packets of the first instance, and says how they ended if all of them ended alike.
fn send(scene: &mut Scene, generation: u16, numbers: std::ops::Range<u16>) -> Option<Status> {
    numbers.clone().for_each(|number| scene.send(0, 1, generation, number));
    let answers = scene.answers(0);
    let status = answers.first()?.1;
    (answers == numbers.map(|number| (number, status)).collect::<Vec<_>>()).then_some(status)
}

fn lent(generation: u16) -> RegistrationObject {
    RegistrationObject { ram_area: Some(ram_area()), ..registered(1, 1, generation, Active) }
}

/// What was given back up to the third packet goes out before what follows.
fn is_in_order(scene: &mut Scene, generation: u16) {
    assert_eq!(send(scene, generation, 3..6), Some(Status::NotYet), "they came before the frontend knew");
    assert_eq!(scene.sent().1, <[Vec<u8>; 0]>::default());
    assert_eq!(send(scene, generation, 0..6), Some(Status::Sent));
    assert_eq!(scene.sent().1, (0..6).map(|number| from(1, number)).collect::<Vec<_>>());
    assert_eq!(send(scene, generation, 6..9), Some(Status::Sent), "nothing is behind them any more");
    assert_eq!(scene.backend.lease(1).tx_packets, 9, "each counts once");
}

#[test]
fn what_follows_packets_that_a_link_gave_back_comes_after_them() {
    let mut scene = scene();
    scene.register(lent(5));
    scene.backend.link.set(false);
    assert_eq!(send(&mut scene, 5, 0..3), Some(Status::NotYet));
    scene.backend.link.set(true);
    is_in_order(&mut scene, 5);
}

#[test]
fn what_follows_packets_that_waited_for_a_nic_whose_link_goes_comes_after_them() {
    let mut scene = scene();
    scene.register(lent(5));
    scene.answers(0);
    scene.set_room(0);
    assert_eq!(send(&mut scene, 5, 0..3), None);
    scene.backend.link.set(false);
    assert_eq!(send(&mut scene, 5, 0..0), None);
    scene.set_room(usize::MAX);
    scene.backend.link.set(true);
    is_in_order(&mut scene, 5);
}

#[test]
fn what_follows_packets_that_were_too_early_comes_after_them() {
    let mut scene = scene();
    scene.register(registered(1, 1, 5, Standby));
    assert_eq!(send(&mut scene, 6, 0..3), Some(Status::NotYet));
    scene.register(registered(1, 1, 6, Active));
    is_in_order(&mut scene, 6);
}

/// The controller tells frontends and backends at the same time: a frontend may be first, with its first lease or a guest that comes from another host.
#[test]
fn what_follows_packets_that_came_before_their_lease_comes_after_them() {
    for known in [None, Some(registered(1, 2, 5, Active))] {
        let mut scene = scene();
        if let Some(elsewhere) = known {
            scene.register(elsewhere);
        }
        scene.answers(0);
        assert_eq!(send(&mut scene, 6, 0..3), Some(Status::NotYet));
        scene.register(registered(1, 1, 6, Active));
        is_in_order(&mut scene, 6);
    }
}

/// Of a frontend that has said that it knows of all of them, nothing has to come first.
#[test]
fn what_came_before_its_lease_is_forgotten_with_its_channel_or_once_that_reopens() {
    for renewed in [true, false] {
        let mut scene = scene();
        assert_eq!(send(&mut scene, 6, 0..3), Some(Status::NotYet));
        if renewed {
            scene.renew(0);
        } else {
            scene.reopen(0, 1, 6);
        }
        scene.register(registered(1, 1, 6, Active));
        assert_eq!(send(&mut scene, 6, 3..6), Some(Status::Sent));
    }
}

#[test]
fn what_follows_to_a_neighbour_comes_after_what_came_before_its_lease_too() {
    let mut scene = scene();
    scene.register(RegistrationObject { mac: mac(200), ..registered(2, 2, 1, Active) });
    assert_eq!(send(&mut scene, 6, 0..3), Some(Status::NotYet));
    scene.register(registered(1, 1, 6, Active));
    assert_eq!(send(&mut scene, 6, 3..6), Some(Status::NotYet));
    assert_eq!(send(&mut scene, 6, 0..6), Some(Status::Sent));
    assert_eq!(scene.backend.lease(2).rx_packets, 6, "each once");
    assert_eq!(send(&mut scene, 6, 6..9), Some(Status::Sent));
}

#[test]
fn what_a_link_gave_back_holds_up_nothing_that_goes_to_a_neighbour() {
    let mut scene = scene();
    scene.register(lent(5));
    scene.backend.link.set(false);
    assert_eq!(send(&mut scene, 5, 0..3), Some(Status::NotYet));
    scene.register(RegistrationObject { mac: mac(200), ..registered(2, 2, 1, Active) });
    assert_eq!(send(&mut scene, 5, 3..6), Some(Status::Sent));
}

/// The queue that they came from may have stopped: what is offered next is what follows them, and again as soon as it was given back.
#[test]
fn packets_that_never_come_again_hold_up_what_follows_once() {
    let mut scene = scene();
    scene.register(lent(5));
    scene.backend.link.set(false);
    assert_eq!(send(&mut scene, 5, 0..3), Some(Status::NotYet));
    scene.backend.link.set(true);
    for status in [Status::NotYet, Status::Sent] {
        assert_eq!(send(&mut scene, 5, 7..9), Some(status));
    }
    // Nor is anything held up over another route.
    scene.backend.link.set(false);
    assert_eq!(send(&mut scene, 5, 9..10), Some(Status::NotYet));
    scene.backend.link.set(true);
    scene.register(lent(6));
    assert_eq!(send(&mut scene, 6, 10..11), Some(Status::Sent));
}

#[test]
fn nothing_is_offered_again_before_all_that_followed_is_answered() {
    let pool = SimulatedPool::new(1, POOL_BYTES);
    let mut frontend = TestFrontend::new(&pool.host(HostId::new(1)));
    frontend.apply(Object::Channel(channel(1, 1, 512, true)));
    frontend.apply(Object::Port(port(1, area(8, 8), route(1, 1), None)));
    let mut guest = Guest::new(QUEUE_SIZE);
    frontend.start(1, &guest, all_features());
    let mut end = open(&pool.host(HostId::new(2)), &ChannelBook::default())(&channel(1, 1, 512, false))
        .expect("a channel");
    while !end.ready() {
        frontend.turn_once();
    }
    let mut announced = |answer: &[NetMessage]| {
        for message in answer {
            end.complete(NetMessage { opcode: Opcode::TransmitDone, ..*message }, Status::NotYet);
        }
        end.publish();
        let mut heard = Vec::new();
        for turn in 0..100 {
            frontend.turn_once();
            if turn == 50 {
                // Its timer, which nobody watches here, fires.
                frontend.task.retry();
            }
            heard.extend(transmissions(&mut end));
        }
        heard
    };
    (0..4).for_each(|number| assert!(guest.send(&[0; 12], &frame(number, 100))));
    let first = announced(&[]);
    assert_eq!(first.len(), 4);
    assert_eq!(announced(&first[..2]), [], "the others may be given back as well");
    (4..6).for_each(|number| assert!(guest.send(&[0; 12], &frame(number, 100))));
    let again = announced(&first[2..]);
    assert_eq!(again[..4], first);
    assert_eq!(again.len(), 6);
}

/// Whenever the link of its NIC goes and comes back.
#[test]
fn no_flap_loses_doubles_or_reorders_what_a_guest_in_the_pool_sends() {
    check_seeds("-p vhost-net-cxl --test engine no_flap", 24, |seed| {
        let mut pod = pod(seed, Offloads::ALL);
        let mut draw = draws(seed);
        let (mut offered, mut returned) = (0, 0);
        for _ in 0..800 {
            match draw(16) {
                0..4 => {
                    for _ in 0..=draw(6) {
                        // Every third one is copied.
                        let bytes = if offered % 3 == 0 { 100 } else { 1000 };
                        offered += u32::from(pod.guest.send(&[0; 12], &frame(offered, bytes)));
                    }
                }
                4..7 => _ = pod.frontend.turn_once(),
                7..11 => _ = pod.backend.turn_once(),
                11..14 => _ = pod.backend.link.set(draw(2) == 0),
                14 => {
                    let few = usize::try_from(draw(6)).expect("small");
                    pod.wire.lock().expect("unpoisoned").room = if draw(3) == 0 { usize::MAX } else { few };
                }
                _ => pod.frontend.task.retry(),
            }
            returned += pod.guest.transmit.reclaim_pairs().len();
        }
        pod.backend.link.set(true);
        pod.wire.lock().expect("unpoisoned").room = usize::MAX;
        for _ in 0..3 {
            pod.settle();
            pod.frontend.task.retry();
        }
        pod.settle();
        returned += pod.guest.transmit.reclaim_pairs().len();
        let mut sent = pod.sent();
        sent.retain(|frame| frame[12..14] == [0x88, 0xb5]);
        let numbers: Vec<u32> =
            sent.iter().map(|frame| u32::from_le_bytes(frame[14..18].try_into().expect("four"))).collect();
        // Unless this took longer than anything waits for a link.
        let lost = pod.backend.lease(1).drops.get("link-down").copied().unwrap_or(0);
        assert!(numbers.is_sorted_by(|one, next| one < next), "{numbers:?}, seed {seed}");
        assert_eq!(numbers.len() as u64 + lost, u64::from(offered), "seed {seed}");
        assert_eq!(returned, offered as usize, "every descriptor came back, seed {seed}");
        assert_eq!(pod.pool.faults(), Faults::default());
        Ok(())
    });
}
