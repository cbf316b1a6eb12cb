//! A backend that answers what another one was asked. The test is the backends.

use cxl_pool::EndpointId;
use cxl_pool::simulated::SimulatedMemory;
use pod_protocol::data_channel::{BLK_WORDS, DataChannel};
use pod_protocol::endpoint::Handler;
use pod_protocol::ids::ChannelId;
use pod_protocol::objects::{ChannelObject, Object};
use vhost_blk_cxl::message::{Request, Status};

use crate::pod::ram::idle_pod;
use crate::pod::*;

type Channel = DataChannel<SimulatedMemory, BLK_WORDS>;

/// A backend's end of what the frontend has as this.
fn other_end(pod: &Pod<SimulatedMemory>, peer: EndpointId, at_frontend: &ChannelObject) -> Channel {
    let (outgoing, incoming) = (at_frontend.incoming, at_frontend.outgoing);
    let object = ChannelObject { peer, outgoing, incoming, ..at_frontend.clone() };
    DataChannel::open(&pod.backend_memory, &object, &pod.run).unwrap()
}

fn send(channel: &mut Channel, message: [u64; BLK_WORDS]) {
    channel.send(message).unwrap();
    channel.publish();
}

#[test]
fn an_answer_of_a_backend_that_was_not_asked_is_not_believed() {
    let (mut pod, _, _) = idle_pod(71);
    pod.start_frontend();
    let frontend = endpoint(1, cxl_pool::Role::BlkFrontend);
    let mut ends = Vec::new();
    for id in [pod.disk.route.channel, ChannelId::new(2)] {
        pod.next_channel();
        let object = ChannelObject { id, ..pod.channel_at_frontend() };
        pod.frontend.as_mut().unwrap().apply(Object::Channel(object.clone())).unwrap();
        ends.push(other_end(&pod, frontend, &object));
    }
    eventually(|| ends.iter_mut().all(Channel::ready));
    let [mut asked, mut other] = <[Channel; 2]>::try_from(ends).ok().unwrap();
    pod.apply_disk();
    let mut driver = Driver::connected(&pod);
    driver.write(driver.place(0).data, &[0x55; 512]);
    let head = driver.offer(0, 0, T_IN, 0, 512);
    let mut request = None;
    eventually(|| {
        request = asked.receive();
        request.is_some()
    });
    let request = Request::decode(&request.unwrap()).unwrap();
    let answer = request.completion(Status::Ok, 512, 0).encode();
    send(&mut other, answer);
    assert!(driver.guest.wait_used(0, QUIET).is_none(), "somebody else was asked");
    eventually(|| pod.frontend_lease().drops.get("stale") == Some(&1));
    send(&mut asked, answer);
    assert_eq!(driver.answer(0, 0, head), (OK, 513));
    assert_eq!(pod.frontend_lease().drops.get("stale"), Some(&1));
}
