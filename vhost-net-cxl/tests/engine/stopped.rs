//! A backend that stands still in the middle of a turn, and may not act any more when it goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pod_protocol::objects::RegistrationState;
use vhost_net_cxl::message::{Opcode, Run, Status};

use crate::strangers::{from, registered, scene};

#[test]
fn who_may_not_act_any_more_sends_announces_and_delivers_nothing() {
    let mut scene = scene();
    let may_act = Arc::new(AtomicBool::new(true));
    let asked = Arc::clone(&may_act);
    scene.backend.task.set_guard(Box::new(move || asked.load(Ordering::Relaxed)));
    scene.register(registered(1, 1, 5, RegistrationState::Active));
    assert_eq!(scene.answers(0), []);
    assert_eq!(scene.sent(), (1, vec![]));
    // It holds three packets when its link goes, has seen nothing of three more when it comes back, nor of what its NIC received.
    scene.set_room(0);
    (0..3).for_each(|number| scene.send(0, 1, 5, number));
    assert_eq!(scene.answers(0), []);
    scene.backend.link.set(false);
    assert_eq!(scene.answers(0), []);
    scene.set_room(usize::MAX);
    may_act.store(false, Ordering::Relaxed);
    scene.backend.link.set(true);
    (3..6).for_each(|number| scene.send(0, 1, 5, number));
    scene.arrive(1, 2);
    assert_eq!(scene.heard(0), []);
    assert_eq!(scene.sent(), (0, vec![]));

    // It was somebody else who stood still. What waited for the link is asked for again, and what was sent behind it.
    may_act.store(true, Ordering::Relaxed);
    let heard = scene.heard(0);
    let received = heard.iter().filter(|message| message.opcode == Opcode::Receive).count();
    assert_eq!(received, 2);
    let ended = heard.iter().filter(|message| message.opcode == Opcode::TransmitDone);
    let runs: Vec<Run> = ended.map(|message| Run::from_code(message.bytes)).collect();
    assert!(runs.iter().all(|run| run.status == Status::NotYet), "{runs:?}");
    assert_eq!(runs.iter().map(|run| run.packets).sum::<u16>(), 6);
    (0..6).for_each(|number| scene.send(0, 1, 5, number));
    assert_eq!(scene.answers(0), (0..6).map(|number| (number, Status::Sent)).collect::<Vec<_>>());
    assert_eq!(scene.sent(), (1, (0..6).map(|number| from(1, number)).collect()));
}

#[test]
fn nor_does_it_send_what_it_takes_in_that_turn() {
    let mut scene = scene();
    let may_act = Arc::new(AtomicBool::new(true));
    let asked = Arc::clone(&may_act);
    scene.backend.task.set_guard(Box::new(move || asked.load(Ordering::Relaxed)));
    scene.register(registered(1, 1, 5, RegistrationState::Active));
    assert_eq!(scene.answers(0), []);
    assert_eq!(scene.sent(), (1, vec![]));
    may_act.store(false, Ordering::Relaxed);
    (0..3).for_each(|number| scene.send(0, 1, 5, number));
    assert_eq!(scene.answers(0), []);
    assert_eq!(scene.sent(), (0, vec![]));
    may_act.store(true, Ordering::Relaxed);
    assert_eq!(scene.answers(0), (0..3).map(|number| (number, Status::Sent)).collect::<Vec<_>>());
    assert_eq!(scene.sent(), (0, (0..3).map(|number| from(1, number)).collect()));
}

/// It asks, is stopped right then, and its NIC receives meanwhile what arrives at its successor's, too.
#[test]
fn nor_does_it_deliver_what_its_nic_received_since_it_asked() {
    let mut scene = scene();
    let answers = Arc::new(AtomicUsize::new(usize::MAX));
    let asked = Arc::clone(&answers);
    let one_less = |left: usize| left.checked_sub(1);
    scene.backend.task.set_guard(Box::new(move || {
        asked.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
    }));
    scene.register(registered(1, 1, 5, RegistrationState::Active));
    assert_eq!(scene.answers(0), []);
    assert_eq!(scene.sent(), (1, vec![]));
    // More often than it has buffers: none is lost with what is forgotten.
    for _ in 0..100 {
        scene.arrive(1, 3);
        answers.store(1, Ordering::Relaxed);
        assert_eq!(scene.heard(0), []);
    }
    assert_eq!(scene.backend.counters.rx_packets.get(), 0);
    assert_eq!(scene.backend.counters.dropped(), [("stood-still".to_owned(), 300)].into());
    answers.store(usize::MAX, Ordering::Relaxed);
    scene.arrive(1, 2);
    assert_eq!(scene.heard(0).len(), 2);
}
