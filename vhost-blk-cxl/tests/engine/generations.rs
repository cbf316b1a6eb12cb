//! Requests of a generation that is over: a frontend that stood still between its look at the fence and what it did then sends them
//! long after the lease has moved on. The test is that frontend. Each of them is answered, and none reaches the device.

use std::sync::Arc;
use std::time::Instant;

use cxl_pool::simulated::SimulatedMemory;
use cxl_pool::{Area, LineOffset, Memory};
use pod_protocol::data_channel::{BLK_WORDS, DataChannel};
use pod_protocol::endpoint::{Handler, Reporter};
use pod_protocol::ids::{ChannelId, LeaseGeneration, PlaceId, PlaceNumber, VolumeId};
use pod_protocol::objects::{Object, ObjectId, TableObject, VolumeObject};
use pod_protocol::reports::Report;
use pod_protocol::volume_table::{VolumeEntry, VolumeTable};
use vhost_blk_cxl::message::{Charge, Completion, Holder, Operation, Request, Status, Tag};
use vhost_blk_cxl::ssd::Label;

use crate::pod::ram::{Control, RamSsd, idle_pod};
use crate::pod::*;

const BYTES: usize = 4096;

/// A frontend's end of the channel that does what the test says.
pub(crate) struct Sleeper {
    memory: SimulatedMemory,
    channel: DataChannel<SimulatedMemory, BLK_WORDS>,
    tags: u32,
}

impl Sleeper {
    pub(crate) fn new(pod: &Pod<SimulatedMemory>) -> Self {
        let mut channel =
            DataChannel::open(&pod.frontend_memory, &pod.channel_at_frontend(), &pod.run).unwrap();
        eventually(|| channel.ready());
        Self { memory: pod.frontend_memory.clone(), channel, tags: 0 }
    }

    /// Sends a request for the volume's first bytes as the holder of the lease in this generation. What it writes, if it does, is the
    /// pattern of this seed.
    fn send(
        &mut self,
        pod: &Pod<SimulatedMemory>,
        generation: LeaseGeneration,
        operation: Operation,
        seed: u64,
    ) {
        self.send_to(pod, PlaceNumber::FIRST, (generation, operation, seed));
    }

    /// The same for one of the volume's places.
    fn send_to(
        &mut self,
        pod: &Pod<SimulatedMemory>,
        place: PlaceNumber,
        (generation, operation, seed): (LeaseGeneration, Operation, u64),
    ) {
        let holder = Holder { lease: pod.volume.lease, place, generation };
        let request = self.request(holder, (operation, Charge::Whole), pod.data);
        self.memory.write(request.data_start(), &pattern(seed, BYTES));
        self.memory.flush(request.data_start(), BYTES as u64);
        self.memory.store_fence();
        self.send_all([request]);
    }

    /// The next request, for the volume's first bytes, with a buffer of its own in this area.
    pub(crate) fn request(
        &mut self,
        holder: Holder,
        (operation, charge): (Operation, Charge),
        area: Area,
    ) -> Request {
        self.tags += 1;
        Request {
            holder,
            tag: Tag::new(self.tags),
            operation,
            force_unit_access: false,
            may_unmap: false,
            intent_log: false,
            marked: false,
            charge,
            offset_bytes: 0,
            length_bytes: if operation == Operation::Flush { 0 } else { BYTES as u64 },
            data: LineOffset::new(area.start.get() + u64::from(self.tags) * (BYTES / 64) as u64),
            segments: 0,
        }
    }

    /// Sends requests such that the backend sees all of them at once.
    pub(crate) fn send_all(&mut self, requests: impl IntoIterator<Item = Request>) {
        for request in requests {
            self.channel.send(request.encode()).unwrap();
        }
        self.channel.publish();
    }

    /// How its last request ended.
    fn answer(&mut self) -> Status {
        let (tag, status) = self.next_answer();
        assert_eq!(tag, self.tags);
        status
    }

    /// What is answered next: which request, counted from 1, and how it ended.
    fn next_answer(&mut self) -> (u32, Status) {
        let mut answer = None;
        eventually(|| {
            answer = self.channel.receive();
            answer.is_some()
        });
        let completion = Completion::decode(&answer.unwrap()).unwrap();
        (completion.tag.get(), completion.status)
    }
}

fn pod(seed: u64) -> (Pod<SimulatedMemory>, Arc<Control>) {
    let (mut pod, ssd, control) = idle_pod(seed);
    pod.start_backend(ssd);
    pod.next_channel();
    pod.apply_channel_at_backend().unwrap();
    (pod, control)
}

#[test]
fn what_an_older_generation_still_sends_is_refused() {
    let (mut pod, control) = pod(1);
    pod.apply_volume();
    let mut sleeper = Sleeper::new(&pod);
    let old = pod.volume.generation;
    sleeper.send(&pod, old, Operation::Write, 1);
    assert_eq!(sleeper.answer(), Status::Ok);
    assert_eq!(control.bytes(VOLUME_START, BYTES), pattern(1, BYTES));

    pod.new_lease_generation();
    pod.apply_volume();
    let before = control.log().len();
    let operations =
        [Operation::Write, Operation::Read, Operation::Flush, Operation::Discard, Operation::WriteZeroes];
    for operation in operations {
        sleeper.send(&pod, old, operation, 2);
        assert_eq!(sleeper.answer(), Status::Refused, "{operation:?}");
    }
    assert_eq!(control.log().len(), before, "the device has heard of it");
    assert_eq!(control.bytes(VOLUME_START, BYTES), pattern(1, BYTES));
    assert_eq!(pod.backend_lease().drops["stale"], operations.len() as u64);

    // It is nothing but the generation.
    sleeper.send(&pod, pod.volume.generation, Operation::Write, 3);
    assert_eq!(sleeper.answer(), Status::Ok);
    assert_eq!(control.bytes(VOLUME_START, BYTES), pattern(3, BYTES));
}

/// Where the channel begins before the volume, as after the backend's restart.
#[test]
fn what_waited_for_its_volume_is_refused_if_that_comes_in_a_newer_generation() {
    let (mut pod, control) = pod(2);
    let mut sleeper = Sleeper::new(&pod);
    let old = pod.volume.generation;
    sleeper.send(&pod, old, Operation::Write, 1);
    std::thread::sleep(QUIET);
    pod.new_lease_generation();
    pod.apply_volume();
    assert_eq!(sleeper.answer(), Status::Refused);
    assert_eq!(control.log(), []);
    sleeper.send(&pod, pod.volume.generation, Operation::Write, 2);
    assert_eq!(sleeper.answer(), Status::Ok);
    assert_eq!(control.bytes(VOLUME_START, BYTES), pattern(2, BYTES));
}

/// Waits at a device that is full, and the lease moves on before there is room.
#[test]
fn what_had_not_begun_is_refused_when_the_lease_moves_on() {
    let (mut pod, control) = pod(3);
    pod.apply_volume();
    let mut sleeper = Sleeper::new(&pod);
    control.set_depth(0);
    sleeper.send(&pod, pod.volume.generation, Operation::Write, 1);
    std::thread::sleep(QUIET);
    pod.new_lease_generation();
    pod.apply_volume();
    assert_eq!(sleeper.answer(), Status::Refused);
    control.set_depth(usize::MAX);
    sleeper.send(&pod, pod.volume.generation, Operation::Write, 2);
    assert_eq!(sleeper.answer(), Status::Ok);
    assert_eq!(control.log().len(), 1, "the older one began after all");
    assert_eq!(control.bytes(VOLUME_START, BYTES), pattern(2, BYTES));
}

/// As when an instance was moved by force away from a host that stood still.
#[test]
fn what_comes_over_the_channel_that_the_lease_has_left_is_refused() {
    let (mut pod, control) = pod(4);
    pod.apply_volume();
    let mut sleeper = Sleeper::new(&pod);
    let old = pod.volume.generation;
    pod.new_lease_generation();
    pod.volume.channel = ChannelId::new(2);
    pod.apply_volume();
    sleeper.send(&pod, old, Operation::Write, 1);
    assert_eq!(sleeper.answer(), Status::Refused);
    // Who knows the generation may be early, and waits until it is clear whether this channel becomes the lease's.
    sleeper.send(&pod, pod.volume.generation, Operation::Write, 2);
    std::thread::sleep(QUIET);
    assert_eq!(control.log(), []);
    // It comes back, and what was sent before is not taken for what is sent now.
    pod.new_lease_generation();
    pod.volume.channel = pod.disk.route.channel;
    pod.apply_volume();
    assert_eq!(sleeper.answer(), Status::Refused);
    sleeper.send(&pod, old, Operation::Write, 3);
    assert_eq!(sleeper.answer(), Status::Refused);
    assert_eq!(control.log(), []);
    sleeper.send(&pod, pod.volume.generation, Operation::Write, 4);
    assert_eq!(sleeper.answer(), Status::Ok);
    assert_eq!(control.bytes(VOLUME_START, BYTES), pattern(4, BYTES));
}

const FIRST: PlaceNumber = PlaceNumber::FIRST;
const SECOND: PlaceNumber = PlaceNumber::SECOND;

/// A volume that moves from one SSD of its host to the other: the backend serves both places.
fn pod_with_two_places(seed: u64) -> (Pod<SimulatedMemory>, [Arc<Control>; 2]) {
    with_two_places(idle_pod(seed), Vec::new())
}

fn with_two_places(
    (mut pod, ssd, control): (Pod<SimulatedMemory>, Box<RamSsd<SimulatedMemory>>, Arc<Control>),
    labels: Vec<(String, Label)>,
) -> (Pod<SimulatedMemory>, [Arc<Control>; 2]) {
    let other = Control::new();
    let there = RamSsd { memory: pod.backend_memory.clone(), control: Arc::clone(&other) };
    pod.start_backend_with(vec![OpenedSsd::new("ssd0", ssd), OpenedSsd::new("ssd1", Box::new(there))]);
    let tables = labels.iter().map(|(ssd, _)| table(ssd, false)).collect::<Vec<_>>();
    let backend = pod.backend.as_mut().unwrap();
    backend.keep_tables(labels);
    for table in tables {
        backend.apply(table).unwrap();
    }
    pod.next_channel();
    pod.apply_channel_at_backend().unwrap();
    pod.apply_volume();
    let second = VolumeObject { place: SECOND, ssd: "ssd1".to_owned(), ..pod.volume.clone() };
    pod.backend.as_mut().unwrap().apply(Object::Volume(second)).unwrap();
    (pod, [control, other])
}

/// The table of an SSD with a place of the volume, or with what that has left.
fn table(ssd: &str, deleted: bool) -> Object {
    let (start_bytes, size_bytes) = (VOLUME_START, VOLUME_BYTES);
    let (id, name) = (VolumeId::new(1), "vol0".to_owned());
    let entry = VolumeEntry { id, name, start_bytes, size_bytes, deleted, mirror: None, stripe: None };
    Object::Table(TableObject { ssd: ssd.to_owned(), table: VolumeTable { volumes: vec![entry] } })
}

/// The first place has gone: the second is the first now, in a new generation.
fn arrive(pod: &mut Pod<SimulatedMemory>) {
    pod.new_lease_generation();
    "ssd1".clone_into(&mut pod.volume.ssd);
    pod.apply_volume();
}

#[test]
fn what_still_comes_for_either_of_two_places_is_refused_when_one_has_gone() {
    let (mut pod, controls) = pod_with_two_places(5);
    let mut sleeper = Sleeper::new(&pod);
    let old = pod.volume.generation;
    for (place, seed) in [(FIRST, 1), (SECOND, 2)] {
        sleeper.send_to(&pod, place, (old, Operation::Write, seed));
        assert_eq!(sleeper.answer(), Status::Ok);
    }
    let held = |pod: &[Arc<Control>; 2]| [0, 1].map(|at| pod[at].bytes(VOLUME_START, BYTES));
    assert!(held(&controls) == [pattern(1, BYTES), pattern(2, BYTES)], "each went where it was to go");
    arrive(&mut pod);
    let given = [0, 1].map(|at| controls[at].log().len());
    for removed in [false, true] {
        if removed {
            let place = PlaceId { lease: pod.volume.lease, place: SECOND };
            pod.backend.as_mut().unwrap().remove(ObjectId::Volume(place)).unwrap();
        }
        for place in [FIRST, SECOND] {
            for operation in [Operation::Write, Operation::Read, Operation::Flush] {
                sleeper.send_to(&pod, place, (old, operation, 3));
                assert_eq!(sleeper.answer(), Status::Refused, "{place:?} {operation:?} {removed}");
            }
        }
    }
    assert_eq!([0, 1].map(|at| controls[at].log().len()), given, "a device has heard of it");
    sleeper.send_to(&pod, FIRST, (pod.volume.generation, Operation::Write, 4));
    assert_eq!(sleeper.answer(), Status::Ok);
    assert!(held(&controls) == [pattern(1, BYTES), pattern(4, BYTES)]);
}

#[test]
fn what_had_not_begun_at_a_place_is_refused_when_that_has_another_name() {
    let (mut pod, controls) = pod_with_two_places(6);
    let mut sleeper = Sleeper::new(&pod);
    let old = pod.volume.generation;
    for control in &controls {
        control.set_depth(0);
    }
    for place in [FIRST, SECOND] {
        sleeper.send_to(&pod, place, (old, Operation::Write, 1));
    }
    std::thread::sleep(QUIET);
    arrive(&mut pod);
    let mut answers = [(); 2].map(|()| sleeper.next_answer());
    answers.sort_unstable_by_key(|(tag, _)| *tag);
    assert_eq!(answers, [(1, Status::Refused), (2, Status::Refused)]);
    for control in &controls {
        control.set_depth(usize::MAX);
    }
    sleeper.send_to(&pod, FIRST, (pod.volume.generation, Operation::Write, 2));
    assert_eq!(sleeper.answer(), Status::Ok);
    assert_eq!([0, 1].map(|at| controls[at].log().len()), [0, 1], "the older ones began after all");
}

/// What the device got by the old name is over before it gets anything by the new one; for the other device nobody waits.
#[test]
fn a_place_with_another_name_waits_for_its_own_device_and_no_other() {
    let (mut pod, controls) = pod_with_two_places(7);
    let mut sleeper = Sleeper::new(&pod);
    let old = pod.volume.generation;
    for control in &controls {
        control.hold(true);
    }
    for place in [FIRST, SECOND, SECOND] {
        sleeper.send_to(&pod, place, (old, Operation::Write, 1));
    }
    eventually(|| controls[0].waiting() == 1 && controls[1].waiting() == 2);
    arrive(&mut pod);
    // There is nothing of that name, so that nobody waits for its end.
    let place = PlaceId { lease: pod.volume.lease, place: SECOND };
    pod.backend.as_mut().unwrap().remove(ObjectId::Volume(place)).unwrap();
    sleeper.send_to(&pod, FIRST, (pod.volume.generation, Operation::Write, 2));
    controls[1].let_pass(1);
    assert_eq!(sleeper.next_answer(), (2, Status::Ok));
    std::thread::sleep(QUIET);
    assert_eq!([0, 1].map(|at| controls[at].log().len()), [1, 2], "the older one could undo it");
    controls[1].hold(false);
    let answers = [(); 2].map(|()| sleeper.next_answer());
    assert_eq!(answers, [(3, Status::Ok), (4, Status::Ok)]);
    assert!(controls[1].bytes(VOLUME_START, BYTES) == pattern(2, BYTES));
    assert_eq!(controls[0].waiting(), 1, "it has it still");
    controls[0].hold(false);
    assert_eq!(sleeper.next_answer(), (1, Status::Ok), "of a generation that its frontend has left");
}

#[test]
fn a_place_is_let_go_of_whatever_the_other_device_has() {
    let (mut pod, controls) = pod_with_two_places(8);
    let mut sleeper = Sleeper::new(&pod);
    controls[0].hold(true);
    sleeper.send_to(&pod, FIRST, (pod.volume.generation, Operation::Write, 1));
    eventually(|| controls[0].waiting() == 1);
    let place = |place| ObjectId::Volume(PlaceId { lease: pod.volume.lease, place });
    let backend = pod.backend.as_mut().unwrap();
    backend.remove(place(SECOND)).unwrap();
    assert!(backend.remove(place(FIRST)).is_err(), "a write is under way there");
    controls[0].hold(false);
    eventually(|| backend.remove(place(FIRST)).is_ok());
}

#[test]
fn a_place_on_another_device_is_another_one_even_in_the_same_generation() {
    let (mut pod, controls) = pod_with_two_places(9);
    let mut sleeper = Sleeper::new(&pod);
    "ssd1".clone_into(&mut pod.volume.ssd);
    pod.apply_volume();
    sleeper.send_to(&pod, FIRST, (pod.volume.generation, Operation::Write, 1));
    assert_eq!(sleeper.answer(), Status::Ok);
    assert_eq!([0, 1].map(|at| controls[at].log().len()), [0, 1]);
}

#[test]
fn what_waits_for_a_place_is_refused_when_that_is_gone() {
    let (mut pod, controls) = pod_with_two_places(10);
    let mut sleeper = Sleeper::new(&pod);
    sleeper.send_to(&pod, SECOND, (pod.volume.generation.next(), Operation::Write, 1));
    std::thread::sleep(QUIET);
    let place = PlaceId { lease: pod.volume.lease, place: SECOND };
    pod.backend.as_mut().unwrap().remove(ObjectId::Volume(place)).unwrap();
    assert_eq!(sleeper.answer(), Status::Refused);
    assert_eq!(controls[1].log(), []);
}

#[test]
fn what_a_place_left_is_wiped_when_its_device_has_ended_everything() {
    let directory = tempfile::tempdir().unwrap();
    let label = |ssd: &str| {
        let path = directory.path().join(ssd);
        std::fs::File::create(&path).unwrap().set_len(VOLUME_START + VOLUME_BYTES).unwrap();
        (ssd.to_owned(), Label::open(&path).unwrap())
    };
    let mut idle = idle_pod(11);
    let reporter = Reporter::new().unwrap();
    idle.0.reporter = Some(reporter.clone());
    let (mut pod, controls) = with_two_places(idle, vec![label("ssd0"), label("ssd1")]);
    let mut sleeper = Sleeper::new(&pod);
    controls[0].hold(true);
    sleeper.send_to(&pod, FIRST, (pod.volume.generation, Operation::Write, 1));
    eventually(|| controls[0].waiting() == 1);
    arrive(&mut pod);
    let backend = pod.backend.as_mut().unwrap();
    backend.apply(table("ssd0", true)).unwrap();
    let mut reports = Vec::new();
    let began = Instant::now();
    while began.elapsed() < QUIET {
        backend.telemetry();
        reports.extend(reporter.take());
    }
    assert_eq!(reports, [], "a write is under way there");
    controls[0].hold(false);
    eventually(|| {
        backend.telemetry();
        reports.extend(reporter.take());
        !reports.is_empty()
    });
    assert_eq!(reports, [Report::VolumeWiped { device: "ssd0".to_owned(), volume: VolumeId::new(1) }]);
}
