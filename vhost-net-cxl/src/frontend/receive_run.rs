//! Frames that arrive together for one guest, each in one piece, and fit one buffer of the guest each: nearly all frames. What is
//! the same for all of them is looked at once, and the guest's buffers are taken together.

use cxl_pool::Memory;
use vhost_frontend::Chain;
use vhost_frontend::pacing::{Pacer, Way};

use super::Frontend;
use super::delivering::{received_header, write_packet};
use super::origins::Origins;
use super::receive::{Ahead, CHAINS_MAX};
use crate::counters::DropReason;
use crate::message::{self, NetMessage, Opcode, Status};
use crate::vnet_header::{HEADER_BYTES, HEADER_BYTES_U32, VnetHeader};

impl<M: Memory> Frontend<M> {
    /// Delivers frames from message `next` on, and says how many were delivered or dropped. None if that message is anything but such
    /// a frame; it is then to be looked at by itself.
    #[inline]
    pub(super) fn receive_together(
        &mut self,
        place: usize,
        inbox: &[[u64; 2]],
        next: usize,
        ahead: &mut Ahead,
    ) -> usize {
        let messages = &inbox[next..];
        let Some(first) = messages.first().and_then(|words| NetMessage::decode(*words)) else { return 0 };
        if first.opcode != Opcode::Receive || first.more || !self.channels[place].pieces.is_empty() {
            return 0;
        }
        let Some(index) = self.by_lease.get(&first.lease).copied() else { return 0 };
        let id = self.channels[place].end.object().id;
        let port = &mut self.ports[index];
        // Where it is limited, each of them is judged by itself.
        let together = port.hears_of(id, first.generation) && port.receive_limit.is_none();
        let together = together && port.waiting.is_empty();
        let Some(queue) = port.only_queue().filter(|_| together) else { return 0 };
        let scratch = &mut self.receive_scratch;
        if scratch.dry == Some((index, queue)) || !port.walks.may_go_on(scratch.look) {
            return 0;
        }
        scratch.filled.show_unless(Some((index, queue)), &mut self.ports);
        let port = &mut self.ports[index];
        let Some(ring) = &mut port.rings[queue] else { return 0 };
        // Each chain that is looked at in vain is put back and looked at once more.
        let of_flow = messages
            .iter()
            .take(CHAINS_MAX)
            .take_while(|words| message::same_flow(words, &messages[0]) && !message::has_more(words));
        let wanted = of_flow.count();
        // A ring that was broken says so again when it is asked by itself.
        let Ok(taken) = ring.next_chains(&mut scratch.chains[..wanted]) else { return 0 };
        port.walks.note(&scratch.chains[..taken]);
        let generation = port.object.active.generation;
        let (mut delivered, mut packets, mut bytes, mut used_chains) = (0, 0, 0, 0);
        for words in &messages[..wanted] {
            let Some(chain) = scratch.chains[..taken].get(used_chains) else { break };
            let origins = &self.channels[place].origins;
            ahead.fetch((&self.memory, origins), &self.held, inbox, next + delivered);
            let Some(message) = NetMessage::decode(*words).filter(|it| self_contained(origins, it)) else {
                break;
            };
            let frame_bytes = message.bytes - HEADER_BYTES_U32;
            if !fits(chain, port.header_bytes, frame_bytes) {
                break;
            }
            let mut raw = [0; HEADER_BYTES];
            self.memory.read(message.line.bytes(), &mut raw);
            match received_header(raw, frame_bytes, port.accepts) {
                Ok(header) => {
                    if port.pacer.as_mut().is_some_and(|pacer| !admits(pacer, frame_bytes)) {
                        // It is asked again by itself, and waits.
                        break;
                    }
                    let header = VnetHeader { buffers: 1, ..header }.to_bytes();
                    let header = &header[..port.header_bytes];
                    let (chains, used) = (std::slice::from_ref(chain), &mut scratch.filled.used);
                    let arrived = (&message, frame_bytes);
                    if port.doubles.have_had(&self.memory, arrived, generation, &mut scratch.now) {
                        port.counters.count_drop(DropReason::Doubled);
                    } else if write_packet(&self.memory, ring, chains, used, header, &[message]) {
                        used_chains += 1;
                        packets += 1;
                        bytes += u64::from(frame_bytes);
                    } else {
                        used_chains += 1;
                        port.counters.count_drop(DropReason::BadChain);
                    }
                }
                Err(reason) => port.counters.count_drop(reason),
            }
            delivered += 1;
            let done = NetMessage { opcode: Opcode::ReceiveDone, ..message };
            self.channels[place].end.complete(done, Status::Sent);
        }
        for chain in scratch.chains[used_chains..taken].iter().rev() {
            ring.put_back(chain);
        }
        port.counters.rx_packets.add(packets);
        port.counters.rx_bytes.add(bytes);
        delivered
    }
}

/// Whether a message is a whole packet that lies where it may.
#[inline]
fn self_contained(origins: &Origins, message: &NetMessage) -> bool {
    !message.more && message.bytes > HEADER_BYTES_U32 && origins.check(message).is_ok()
}

/// Whether a frame may be copied now, as a whole.
#[inline]
fn admits(pacer: &mut Pacer, frame_bytes: u32) -> bool {
    u64::from(frame_bytes) <= pacer.at_once_bytes() && pacer.admit(Way::Unasked, frame_bytes.into())
}

#[inline]
fn fits(chain: &Chain, header_bytes: usize, frame_bytes: u32) -> bool {
    chain.fault().is_none() && chain.writable_bytes() >= header_bytes as u64 + u64::from(frame_bytes)
}
