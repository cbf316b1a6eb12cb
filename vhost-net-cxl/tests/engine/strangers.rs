//! Frontends that speak of what is not theirs, and what became of an instance that has moved away.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cxl_pool::simulated::{SimulatedMemory, SimulatedPool};
use cxl_pool::{HostId, LineOffset, Memory};
use pod_protocol::ids::{ChannelId, LeaseGeneration};
use pod_protocol::objects::{NicPolicy, Object, ObjectId, RateLimit, RegistrationObject, RegistrationState};
use vhost_net_cxl::channel_counters::ChannelBook;
use vhost_net_cxl::channel_end::{ChannelEnd, MESSAGES_PER_LOOK};
use vhost_net_cxl::message::{NetMessage, Opcode, REOPENS, Run, Status};
use vhost_net_cxl::offloads::Offloads;

use crate::echo::frame;
use crate::finishing::{large, payload};
use crate::pod::{NIC, POOL_BYTES, TestBackend, Turn, area, channel, lease, mac, open, registration};
use crate::recording::{Wire, recording_backend};
use RegistrationState::{Active, Standby};

const SLOTS: u32 = 2048;
const QUOTA: usize = 16;
const PATIENCE: Duration = Duration::from_secs(20);

/// A backend with a NIC of a megabyte of receive buffers, and two frontends of our own making.
pub(crate) struct Scene {
    memory: SimulatedMemory,
    ends: [ChannelEnd<SimulatedMemory>; 2],
    pub(crate) backend: TestBackend<SimulatedMemory>,
    wire: Arc<Mutex<Wire>>,
}

pub(crate) fn scene() -> Scene {
    let pool = SimulatedPool::new(11, POOL_BYTES);
    let [here, there, elsewhere] = [1, 2, 3].map(|host| pool.host(HostId::new(host)));
    let (mut backend, wire) = recording_backend(&there, Offloads::ALL, usize::MAX, area(32, 1));
    for number in [1, 2] {
        backend.apply(Object::Channel(channel(number, 1, SLOTS, false)));
    }
    let end = |memory, number| {
        open(memory, &ChannelBook::default())(&channel(number, 1, SLOTS, true)).expect("a channel")
    };
    let mut ends = [end(&here, 1), end(&elsewhere, 2)];
    while !ends.iter_mut().all(ChannelEnd::ready) {
        backend.turn_once();
    }
    Scene { memory: here, ends, backend, wire }
}

pub(crate) fn registered(
    number: u32,
    channel: u32,
    generation: u16,
    state: RegistrationState,
) -> RegistrationObject {
    let quota = u32::try_from(QUOTA).expect("small");
    let transmit_area = area(8 + u64::from(number), 1);
    RegistrationObject {
        rx_quota_buffers: quota,
        ..registration(number, channel, generation, state, transmit_area)
    }
}

/// Packet `number` of an instance to an address outside.
pub(crate) fn from(instance: u8, number: u32) -> Vec<u8> {
    let mut frame = frame(number, 100);
    frame[6..12].copy_from_slice(&mac(instance).bytes());
    frame
}

impl Scene {
    pub(crate) fn register(&mut self, object: RegistrationObject) {
        self.backend.apply(Object::Registration(object));
    }

    /// Writes packet `number` of an instance into its area, and announces it over a channel.
    pub(crate) fn send(&mut self, end: usize, instance: u8, generation: u16, number: u16) {
        let start = area(8 + u64::from(instance), 1).start.get() + 4 * u64::from(number);
        let line = LineOffset::new(start);
        let packet = [&[0; 12][..], &from(instance, number.into())].concat();
        self.memory.write(line.bytes(), &packet);
        self.memory.write_back(line.bytes(), packet.len() as u64);
        self.memory.store_fence();
        let message = NetMessage {
            opcode: Opcode::Transmit,
            lease: lease(instance.into()),
            generation: LeaseGeneration::new(generation),
            sequence: number,
            line,
            bytes: u32::try_from(packet.len()).expect("short"),
            more: false,
        };
        assert!(self.ends[end].request(&message));
        self.ends[end].publish();
    }

    /// What a frontend hears while the backend has a few turns.
    pub(crate) fn heard(&mut self, end: usize) -> Vec<NetMessage> {
        let mut heard = Vec::new();
        for _ in 0..50 {
            self.backend.turn_once();
            let mut inbox = [[0; 2]; MESSAGES_PER_LOOK];
            let count = self.ends[end].receive(&mut inbox);
            heard.extend(inbox[..count].iter().map(|words| NetMessage::decode(*words).expect("a message")));
        }
        heard
    }

    /// How transmissions ended: numbers and statuses.
    pub(crate) fn answers(&mut self, end: usize) -> Vec<(u16, Status)> {
        let mut answers = Vec::new();
        for message in self.heard(end).into_iter().filter(|it| it.opcode == Opcode::TransmitDone) {
            let run = Run::from_code(message.bytes);
            answers.extend((0..run.packets).map(|after| (message.sequence + after, run.status)));
        }
        answers.sort_unstable_by_key(|(number, _)| *number);
        answers
    }

    /// A frontend says that it knows of everything of an instance that it was given back.
    pub(crate) fn reopen(&mut self, end: usize, instance: u32, generation: u16) {
        let message = NetMessage {
            lease: lease(instance),
            generation: LeaseGeneration::new(generation),
            sequence: REOPENS,
            ..says(Offloads::NONE)
        };
        assert!(self.ends[end].send(&message));
        self.ends[end].publish();
        self.backend.turn_once();
    }

    /// A frontend begins anew.
    pub(crate) fn renew(&mut self, end: usize) {
        let number = u32::try_from(end).expect("two") + 1;
        self.backend.apply(Object::Channel(channel(number, 2, SLOTS, false)));
        let object = channel(number, 2, SLOTS, true);
        self.ends[end] = open(&self.memory, &ChannelBook::default())(&object).expect("a channel");
        while !self.ends[end].ready() {
            self.backend.turn_once();
        }
    }

    /// So many frames arrive for an instance.
    pub(crate) fn arrive(&self, instance: u8, count: u32) {
        let mut wire = self.wire.lock().expect("unpoisoned");
        for number in 0..count {
            let mut frame = frame(number, 100);
            frame[..6].copy_from_slice(&mac(instance).bytes());
            frame[6..12].copy_from_slice(&mac(99).bytes());
            wire.arriving.push_back([&[0; 12][..], &frame].concat());
        }
    }

    fn received(&mut self, end: usize) -> Vec<NetMessage> {
        let mut heard = self.heard(end);
        heard.retain(|message| message.opcode == Opcode::Receive);
        heard
    }

    fn give_back(&mut self, end: usize, message: NetMessage) {
        self.ends[end].complete(NetMessage { opcode: Opcode::ReceiveDone, ..message }, Status::Sent);
        self.ends[end].publish();
    }

    /// What was sent since the last look: announcements, and other frames.
    pub(crate) fn sent(&self) -> (usize, Vec<Vec<u8>>) {
        let frames = std::mem::take(&mut self.wire.lock().expect("unpoisoned").frames);
        let (announcements, others): (Vec<_>, Vec<_>) =
            frames.into_iter().partition(|frame| frame[12..14] == [0x80, 0x35]);
        (announcements.len(), others)
    }

    pub(crate) fn set_room(&self, room: usize) {
        self.wire.lock().expect("unpoisoned").room = room;
    }

    fn depth(&self, channel: u32) -> u64 {
        let all = self.backend.channels.telemetry();
        all.iter().find(|it| it.channel == ChannelId::new(channel)).expect("a channel").depth
    }
}

#[test]
fn a_frontend_speaks_for_the_instances_of_its_own_host_alone() {
    let mut scene = scene();
    scene.register(registered(1, 1, 5, Active));
    scene.send(1, 1, 5, 0);
    assert_eq!(scene.answers(1), [(0, Status::Dropped)]);
    assert_eq!(scene.backend.lease(1).drops, [].into(), "it is no fault of the instance");
    let strays = scene.backend.channels.telemetry().into_iter().map(|it| (it.channel.get(), it.strays));
    assert_eq!(strays.collect::<Vec<_>>(), [(1, 0), (2, 1)]);
    assert!(scene.sent().1.is_empty());
    scene.send(0, 1, 5, 1);
    assert_eq!(scene.answers(0), [(1, Status::Sent)]);

    // Nor does it give back what others hold.
    scene.arrive(1, 20);
    let held = scene.received(0);
    assert_eq!(held.len(), QUOTA);
    for message in &held {
        scene.give_back(1, *message);
    }
    scene.arrive(1, 20);
    assert!(scene.received(0).is_empty(), "nothing of it was given back");
    scene.give_back(0, held[0]);
    scene.received(0);
    scene.arrive(1, 20);
    assert_eq!(scene.received(0).len(), 1);
    // What it gives back a second time it does not hold.
    assert_eq!(scene.backend.lease(1).drops.get("bad-message"), None);
    scene.give_back(0, held[0]);
    scene.received(0);
    assert_eq!(scene.backend.lease(1).drops["bad-message"], 1);
}

/// What the driver of instance 1 accepts.
fn says(accepts: Offloads) -> NetMessage {
    NetMessage {
        opcode: Opcode::Offloads,
        lease: lease(1),
        generation: LeaseGeneration::new(5),
        sequence: 0,
        line: LineOffset::new(0),
        bytes: accepts.bits(),
        more: false,
    }
}

#[test]
fn a_frontend_that_changes_its_mind_all_the_time_keeps_no_nic_busy() {
    let mut scene = scene();
    scene.register(registered(1, 1, 5, Active));
    scene.heard(0);
    let look = |scene: &Scene| {
        let wire = scene.wire.lock().expect("unpoisoned");
        (wire.tellings, wire.told)
    };
    let say = |scene: &mut Scene, accepts: Offloads| {
        assert!(scene.ends[0].send(&says(accepts)));
        scene.ends[0].publish();
    };
    let (before, _) = look(&scene);
    for _ in 0..MESSAGES_PER_LOOK / 2 {
        say(&mut scene, Offloads::NONE);
        say(&mut scene, Offloads::CHECKSUM);
    }
    scene.backend.turn_once();
    assert_eq!(look(&scene), (before + 1, Some(Offloads::CHECKSUM)));
    // Nor does it by saying it turn after turn. What it says last holds soon.
    let began = Instant::now();
    for _ in 0..100 {
        for accepts in [Offloads::ALL, Offloads::NONE, Offloads::ALL] {
            say(&mut scene, accepts);
            scene.backend.turn_once();
        }
    }
    while look(&scene).1 != Some(Offloads::ALL) && began.elapsed() < PATIENCE {
        scene.backend.turn_once();
    }
    let (tellings, told) = look(&scene);
    assert_eq!(told, Some(Offloads::ALL));
    let most = 2 + began.elapsed().as_millis() / 10;
    assert!(u128::from(tellings - before - 1) <= most, "{tellings} times where {most} would do");
    // What changes nothing is not passed on.
    say(&mut scene, Offloads::ALL);
    scene.heard(0);
    assert_eq!(look(&scene).0, tellings);
}

#[test]
fn what_a_driver_accepts_is_said_by_its_own_frontend() {
    let mut scene = scene();
    scene.register(registered(1, 1, 5, Active));
    assert!(scene.ends[0].send(&says(Offloads::ALL)));
    scene.ends[0].publish();
    scene.heard(0);
    assert!(scene.ends[1].send(&says(Offloads::NONE)));
    scene.ends[1].publish();
    scene.heard(1);
    let (header, frame) = large(mac(9), mac(1), &payload(5000));
    scene.wire.lock().expect("unpoisoned").arriving.push_back([&header[..], &frame].concat());
    let packets = scene.received(0).iter().filter(|message| !message.more).count();
    assert_eq!(packets, 1, "whole");
    // What a NIC is told is what those accept who use it, and not those who may have to.
    assert_eq!(scene.wire.lock().expect("unpoisoned").told, Some(Offloads::ALL));
    assert!(scene.ends[1].send(&NetMessage { lease: lease(2), ..says(Offloads::NONE) }));
    scene.ends[1].publish();
    scene.heard(1);
    scene.register(registered(2, 2, 5, Standby));
    scene.backend.turn_once();
    assert_eq!(scene.wire.lock().expect("unpoisoned").told, Some(Offloads::ALL));
    scene.register(registered(2, 2, 5, Active));
    scene.backend.turn_once();
    assert_eq!(scene.wire.lock().expect("unpoisoned").told, Some(Offloads::NONE));
}

#[test]
fn who_stands_by_sends_nothing_yet() {
    let mut scene = scene();
    scene.register(registered(1, 1, 5, Standby));
    scene.send(0, 1, 5, 0);
    assert_eq!(scene.answers(0), [(0, Status::NotYet)], "it may be about to become active");
    assert_eq!(scene.sent(), (0, vec![]));
    scene.register(registered(1, 1, 5, Active));
    scene.send(0, 1, 5, 0);
    assert_eq!(scene.answers(0), [(0, Status::Sent)]);
    assert_eq!(scene.sent(), (1, vec![from(1, 0)]));
    // A new holder is announced as well: the switches may have learnt otherwise meanwhile.
    scene.register(registered(1, 2, 6, Active));
    scene.heard(0);
    assert_eq!(scene.sent(), (1, vec![]));
}

#[test]
fn what_a_frontend_held_is_free_once_its_instance_is_elsewhere() {
    let mut scene = scene();
    scene.register(registered(1, 1, 5, Active));
    scene.arrive(1, 20);
    assert_eq!((scene.received(0).len(), scene.depth(1)), (QUOTA, QUOTA as u64));
    scene.register(registered(1, 2, 6, Active));
    scene.arrive(1, 20);
    assert_eq!(scene.received(1).len(), QUOTA, "the old frontend holds nothing of it");
    assert_eq!((scene.depth(1), scene.depth(2)), (0, QUOTA as u64), "nor does its channel");
    scene.backend.task.remove(&ObjectId::Registration { lease: lease(1), nic: NIC.into() });
    scene.heard(1);
    assert_eq!(scene.depth(2), 0);
}

#[test]
fn what_waits_for_a_nic_is_not_sent_once_its_instance_has_moved() {
    let mut scene = scene();
    scene.register(registered(1, 1, 5, Active));
    scene.register(registered(2, 1, 5, Active));
    scene.heard(0);
    scene.sent();
    scene.set_room(0);
    scene.send(0, 1, 5, 0);
    scene.send(0, 2, 5, 1);
    scene.send(0, 2, 5, 2);
    assert!(scene.answers(0).is_empty());
    scene.register(registered(2, 2, 6, Active));
    scene.set_room(usize::MAX);
    let answers = scene.answers(0);
    assert_eq!(answers, [(0, Status::Sent), (1, Status::Stale), (2, Status::Stale)]);
    assert_eq!(scene.sent().1, [from(1, 0)]);
    // Nor is it sent as somebody else's, who takes its place.
    scene.set_room(0);
    scene.send(0, 1, 5, 3);
    assert!(scene.answers(0).is_empty());
    scene.backend.task.remove(&ObjectId::Registration { lease: lease(1), nic: NIC.into() });
    scene.register(registered(3, 1, 5, Active));
    scene.set_room(usize::MAX);
    assert_eq!(scene.answers(0), [(3, Status::Stale)]);
    assert!(scene.sent().1.is_empty());
}

#[test]
fn whoever_leaves_a_nic_takes_no_room_of_the_channel_along() {
    const PACKETS: u16 = 100;
    let mut scene = scene();
    scene.register(registered(2, 1, 5, Active));
    scene.heard(0);
    let room = scene.ends[0].room();
    let mut lost = 0;
    while lost <= 2 * room {
        scene.set_room(0);
        scene.register(registered(1, 1, 5, Active));
        for number in 0..PACKETS {
            scene.send(0, 1, 5, number);
        }
        assert!(scene.answers(0).is_empty(), "they wait for the NIC");
        scene.backend.task.remove(&ObjectId::Registration { lease: lease(1), nic: NIC.into() });
        let answers = scene.answers(0);
        scene.ends[0].completed(answers.len());
        assert_eq!(scene.ends[0].room(), room, "after {lost}");
        assert_eq!(answers, (0..PACKETS).map(|number| (number, Status::Stale)).collect::<Vec<_>>());
        lost += u32::from(PACKETS);
    }
    scene.set_room(usize::MAX);
    scene.send(0, 2, 5, 0);
    assert_eq!(scene.answers(0), [(0, Status::Sent)]);
    assert_eq!(scene.sent().1, [from(2, 0)]);
}

#[test]
fn packets_wait_for_a_link_each_time_that_it_goes_down() {
    let mut scene = scene();
    scene.register(registered(1, 1, 5, Active));
    scene.heard(0);
    scene.backend.link.set(false);
    scene.send(0, 1, 5, 0);
    let began = Instant::now();
    let answers = loop {
        let answers = scene.answers(0);
        if !answers.is_empty() || began.elapsed() > PATIENCE {
            break answers;
        }
    };
    assert_eq!(answers, [(0, Status::Dropped)]);
    assert_eq!(scene.backend.lease(1).drops, [("link-down".to_owned(), 1)].into());
    scene.backend.link.set(true);
    scene.heard(0);
    scene.backend.link.set(false);
    scene.send(0, 1, 5, 1);
    assert!(scene.answers(0).is_empty(), "it may come back");
    scene.backend.link.set(true);
    assert_eq!(scene.answers(0), [(1, Status::NotYet)], "its frontend may have sent it elsewhere meanwhile");
    scene.send(0, 1, 5, 1);
    assert_eq!(scene.answers(0), [(1, Status::Sent)]);
}

#[test]
fn receive_buffers_are_kept_for_who_is_below_its_promise() {
    let mut scene = scene();
    scene.register(RegistrationObject { rx_quota_buffers: 512, ..registered(1, 1, 5, Active) });
    let receive = RateLimit { minimum_bytes_per_second: Some(1 << 50), ..RateLimit::default() };
    let policy = NicPolicy { receive, ..NicPolicy::default() };
    scene.register(RegistrationObject { policy, rx_quota_buffers: 512, ..registered(2, 2, 5, Active) });
    // Nobody gives anything back. Who is promised something has half of the buffers and more, which is more than its share.
    scene.arrive(2, 150);
    assert_eq!(scene.received(1).len(), 150);
    // The other one gets less than half of the rest: a quarter of all is kept.
    scene.arrive(1, 100);
    let held = scene.received(0).len();
    assert_eq!(scene.backend.lease(1).drops, [("kept-for-minimum".to_owned(), 100 - held as u64)].into());
    assert!((30..45).contains(&held), "{held}");
    scene.arrive(2, 10);
    assert_eq!(scene.received(1).len(), 10);
}
