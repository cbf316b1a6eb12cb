//! How much room a channel has, as its sender knows.

use std::path::Path;

use cxl_pool::HostId;
use cxl_pool::simulated::{Faults, SimulatedMemory, SimulatedPool, check_seeds};
use pod_protocol::config::Wakeup;
use pod_protocol::run_directory::RunDirectory;
use vhost_net_cxl::channel_counters::ChannelBook;
use vhost_net_cxl::channel_end::{ChannelEnd, MESSAGES_PER_LOOK};
use vhost_net_cxl::message::{NetMessage, Opcode, Run, Status};

use crate::pod::{POOL_BYTES, channel, lease, route};

const SLOTS: u32 = 512;

fn end(pool: &SimulatedPool, host: u16, frontend: bool, wakeup: Wakeup) -> ChannelEnd<SimulatedMemory> {
    let run = RunDirectory::new(Path::new("/nonexistent")).with_wakeup(wakeup);
    let (memory, object) = (pool.host(HostId::new(host)), channel(1, 1, SLOTS, frontend));
    ChannelEnd::open(&object, &memory, &run, &ChannelBook::default()).expect("a channel")
}

fn message(sequence: u16) -> NetMessage {
    NetMessage {
        opcode: Opcode::Receive,
        lease: lease(1),
        generation: route(1, 1).generation,
        sequence,
        line: cxl_pool::LineOffset::new(0),
        bytes: 100,
        more: false,
    }
}

/// Takes all that has arrived and completes it. Returns how many messages that was.
fn complete_all(end: &mut ChannelEnd<SimulatedMemory>) -> usize {
    let mut inbox = [[0; 2]; MESSAGES_PER_LOOK];
    let count = end.receive(&mut inbox);
    for words in &inbox[..count] {
        let done = NetMessage { opcode: Opcode::ReceiveDone, ..NetMessage::decode(*words).expect("ours") };
        end.complete(done, Status::Sent);
    }
    end.publish();
    count
}

/// A peer that takes everything at once leaves all the room there is, wherever in the ring its sender is, and whether or not that
/// looks at the receiver for another reason. Otherwise what arrives in bursts would be dropped now and then for want of room, and
/// who leaves a part of the room to others would find less than that part and wait for ever.
#[test]
fn a_channel_whose_peer_keeps_up_has_room_for_every_burst() {
    for wakeup in [Wakeup::Poll, Wakeup::Socket] {
        check_seeds("-p vhost-net-cxl --test engine", 8, |seed| {
            let pool = SimulatedPool::new(seed, POOL_BYTES);
            let mut sender = end(&pool, 2, false, wakeup);
            let mut receiver = end(&pool, 1, true, wakeup);
            for _ in 0..10_000 {
                if sender.ready() & receiver.ready() {
                    break;
                }
            }
            let mut next = 0_u16;
            for burst in 0..600_usize {
                let limit = sender.limit();
                assert_eq!(sender.room(), limit, "seed {seed}, burst {burst}: nothing is under way");
                let count = 1 + burst * 7 % MESSAGES_PER_LOOK.min(limit as usize);
                let number = |position: usize| next.wrapping_add(u16::try_from(position).expect("small"));
                let messages: Vec<_> = (0..count).map(|it| message(number(it)).encode()).collect();
                next = number(count);
                assert_eq!(sender.request_all(&messages), count, "seed {seed}, burst {burst}");
                sender.publish();
                let (mut taken, mut completed) = (0, 0);
                for _ in 0..10_000 {
                    taken += complete_all(&mut receiver);
                    let mut inbox = [[0; 2]; MESSAGES_PER_LOOK];
                    let answers = sender.receive(&mut inbox);
                    for words in &inbox[..answers] {
                        let run = Run::from_code(NetMessage::decode(*words).expect("theirs").bytes);
                        sender.completed(run.packets.into());
                        completed += usize::from(run.packets);
                    }
                    if completed == count {
                        break;
                    }
                }
                assert_eq!((taken, completed), (count, count), "seed {seed}, burst {burst}");
            }
            assert_eq!(pool.faults(), Faults::default());
            Ok(())
        });
    }
}
