//! Requests of a generation that is over: a frontend that stood still between its look at the fence and what it did then sends them
//! long after the lease has moved on. The test is that frontend. Each of them is answered, and none reaches the device.

use std::sync::Arc;

use cxl_pool::Memory;
use cxl_pool::simulated::SimulatedMemory;
use pod_protocol::data_channel::{BLK_WORDS, DataChannel};
use pod_protocol::ids::{ChannelId, LeaseGeneration, PlaceNumber};
use vhost_blk_cxl::message::{Completion, Holder, Operation, Request, Status, Tag};

use crate::pod::ram::{Control, idle_pod};
use crate::pod::*;

const BYTES: usize = 4096;

/// A frontend's end of the channel that does what the test says.
struct Sleeper {
    memory: SimulatedMemory,
    channel: DataChannel<SimulatedMemory, BLK_WORDS>,
    tags: u32,
}

impl Sleeper {
    fn new(pod: &Pod<SimulatedMemory>) -> Self {
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
        self.tags += 1;
        let request = Request {
            holder: Holder { lease: pod.volume.lease, place: PlaceNumber::FIRST, generation },
            tag: Tag::new(self.tags),
            operation,
            force_unit_access: false,
            may_unmap: false,
            intent_log: false,
            marked: false,
            offset_bytes: 0,
            length_bytes: if operation == Operation::Flush { 0 } else { BYTES as u64 },
            data: pod.data.start,
            segments: 0,
        };
        self.memory.write(request.data_start(), &pattern(seed, BYTES));
        self.memory.flush(request.data_start(), BYTES as u64);
        self.memory.store_fence();
        self.channel.send(request.encode()).unwrap();
        self.channel.publish();
    }

    /// How its last request ended.
    fn answer(&mut self) -> Status {
        let mut answer = None;
        eventually(|| {
            answer = self.channel.receive();
            answer.is_some()
        });
        let completion = Completion::decode(&answer.unwrap()).unwrap();
        assert_eq!(completion.tag, Tag::new(self.tags));
        completion.status
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
