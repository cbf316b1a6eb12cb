//! What a peer may write into the rings between us.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use cxl_channel::{Exchange, Incoming, PAYLOAD_BYTES_LIMIT, Receiver, RingPlacement, Sender};
use cxl_pool::{Generation, LineCount, Memory};

use super::input::Input;
use super::pool::{layout, memory};

const SLOTS: u32 = 16;
const GENERATION: Generation = Generation::new(7);

/// An exchange with a peer of which every byte is an action: a message that goes the right way, a word anywhere in either
/// ring, or a turn of ours.
pub fn exchange(data: &[u8]) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);

    let memory = memory();
    let lines = RingPlacement::lines(SLOTS, 8);
    let outgoing = RingPlacement { start: layout().data().start, slots: SLOTS };
    let incoming = RingPlacement { start: outgoing.start.saturating_add(lines), slots: SLOTS };
    let both = LineCount::new(2 * lines.get()).bytes();
    memory.zero(outgoing.start.bytes(), both);
    // The peer's sender begins as it should; what comes later is up to it.
    let mut peer = Sender::<_, 8>::begin(memory.clone(), incoming, GENERATION);
    let mut peers_receiver = Receiver::<_, 8>::open(memory.clone(), outgoing, GENERATION);
    let sender = Sender::begin(memory.clone(), outgoing, GENERATION);
    let mut exchange = Exchange::new(sender, Receiver::open(memory.clone(), incoming, GENERATION));
    let now = Instant::now();
    let later = now + Duration::from_secs(1);
    let _ = (exchange.ready(), peers_receiver.ready(), peer.ready(), exchange.ready());

    let mut input = Input(data);
    let (mut asked, mut answered) = (0_u32, 0_u32);
    for _ in 0..2048 {
        if input.is_empty() {
            break;
        }
        match input.byte() % 8 {
            0 | 1 => {
                // A fragment: its payload matters little, its header much.
                let header = input.u64();
                let payload = input.byte().into();
                let _ = peer.send([payload, 0, 0, 0, 0, 0, 0, header & !(1 << 63)]);
                let _ = peer.publish();
            }
            2 => {
                let at = u64::from(input.u16()) * 8 % both;
                memory.store(outgoing.start.bytes().saturating_add(at), input.u64());
            }
            3 => {
                let bytes = input.u16().into();
                asked += u32::from(exchange.request(&vec![1; bytes], later).is_ok());
            }
            4 => {
                let _ = exchange.notify(input.some(64));
            }
            5 => {
                let _ = (peer.ready(), peers_receiver.ready());
                while peers_receiver.receive().is_some() {}
            }
            6 => {
                let _ = exchange.flush();
                let _ = (exchange.announce_sleep(), exchange.wake());
            }
            _ => {
                let _ = exchange.ready();
            }
        }
        for _ in 0..4 {
            match exchange.poll(now) {
                Some(Incoming::Request { id, payload }) => {
                    assert!(payload.len() <= PAYLOAD_BYTES_LIMIT);
                    let _ = exchange.respond(id, &payload);
                }
                Some(Incoming::Response { payload, .. }) => {
                    assert!(payload.len() <= PAYLOAD_BYTES_LIMIT);
                    answered += 1;
                }
                Some(Incoming::Notification { payload }) => assert!(payload.len() <= PAYLOAD_BYTES_LIMIT),
                Some(Incoming::Expired { .. }) => panic!("nothing expires before its deadline"),
                None => break,
            }
        }
    }
    while let Some(Incoming::Expired { .. }) = exchange.poll(later) {
        answered += 1;
    }
    // Whatever the peer does: every question has one answer, late ones their expiry.
    assert!(answered <= asked, "{answered} answers to {asked} requests");
}
