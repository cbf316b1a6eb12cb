//! From a channel straight to a NIC that is not behind: packets of one sender go from its messages into what the NIC is given,
//! and wait in no queue. What the NIC does not take goes into its backlog, and so does all that follows.

use cxl_pool::Memory;
use pod_protocol::ids::{ChannelId, MacAddress};

use super::Backend;
use super::outgoing::{complete, gather, piece, transmit_done};
use super::port::Port;
use super::registration::{Registration, RegistrationIndex};
use super::wire::Outgoing;
use crate::channel_end::ChannelEnd;
use crate::counters::DropReason;
use crate::message::{NetMessage, Run, Status};
use crate::nic::{BATCH_FRAMES, Batch};
use crate::offloads::Offloads;
use crate::vnet_header::{HEADER_BYTES, VnetHeader};

/// What is about to be given to a NIC. Allocates nothing after [`Direct::new`].
#[derive(Debug)]
pub(super) struct Direct {
    /// The packets, for their completions.
    packets: Vec<(NetMessage, VnetHeader)>,
    outbox: Batch,
    /// Whose packets they are.
    sender: Sender,
}

/// Whose packets go straight to which NIC.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sender {
    /// The NIC's port.
    pub(super) place: usize,
    pub(super) registration: RegistrationIndex,
    /// Its channel.
    pub(super) end: usize,
    pub(super) channel: ChannelId,
    /// What the NIC can do.
    able: Offloads,
    /// The NIC works, packets need no tag, and none is behind others that were given back.
    open: bool,
    /// An address that is on the wire: the one that a packet was last sent to.
    destination: Option<MacAddress>,
}

impl Sender {
    /// A sender that is registered with this port.
    pub(super) fn new(
        (place, port): (usize, &Port),
        registration: RegistrationIndex,
        (end, channel): (usize, ChannelId),
        policy_vlan: Option<u16>,
    ) -> Self {
        let behind = port.registrations[registration.get()].as_ref().is_some_and(|it| it.given_back.is_any());
        let open = port.is_able() && policy_vlan.is_none() && !behind;
        let able = port.nic.identity().offloads;
        Self { place, registration, end, channel, able, open, destination: None }
    }

    /// Whether the switch need not be asked about this address again.
    #[inline]
    pub(super) fn is_on_wire(&self, destination: MacAddress) -> bool {
        self.destination == Some(destination)
    }

    /// Notes that packets to this address go out on the wire, and nowhere else.
    #[inline]
    pub(super) fn set_on_wire(&mut self, destination: MacAddress) {
        self.destination = Some(destination);
    }

    /// Whether a packet may go straight to the NIC.
    #[inline]
    pub(super) fn goes_directly(&self, port: &Port, header: VnetHeader) -> bool {
        self.open && port.backlog.is_empty() && self.able.contains(header.required())
    }
}

impl Direct {
    pub(super) fn new() -> Self {
        let sender = Sender {
            place: 0,
            registration: RegistrationIndex::FIRST,
            end: 0,
            channel: ChannelId::new(0),
            able: Offloads::NONE,
            open: false,
            destination: None,
        };
        Self { packets: Vec::with_capacity(BATCH_FRAMES), outbox: Batch::new(), sender }
    }

    /// Whether nothing is about to be given to a NIC.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.outbox.is_full()
    }

    /// Adds a packet; false if it does not lie where it may.
    #[inline]
    pub(super) fn push<M: Memory>(
        &mut self,
        memory: &M,
        registration: &Registration,
        sender: &Sender,
        message: NetMessage,
        header: VnetHeader,
    ) -> bool {
        if message.more {
            if !gather(memory, registration, &message, |it| self.outbox.push_piece(it)) {
                self.outbox.abandon_frame();
                return false;
            }
            self.outbox.end_frame();
        } else {
            self.outbox.push_frame(piece(&message));
        }
        if self.packets.is_empty() {
            self.sender = *sender;
        }
        self.packets.push((message, header));
        true
    }
}

// A batch is completed by one run at most.
const _: () = assert!(BATCH_FRAMES <= Run::MAX as usize);

impl<M: Memory> Backend<M> {
    /// Gives a NIC what was gathered for it. What it does not take is behind nothing else of its sender and goes into the
    /// backlog.
    #[inline]
    pub(super) fn send_directly(&mut self) {
        if self.direct.is_empty() {
            return;
        }
        let may_act = self.may_act();
        let Direct { packets, outbox, sender } = &mut self.direct;
        let port = &mut self.ports[sender.place];
        let end = &mut self.channels[sender.end];
        let sent = match if may_act { port.nic.transmit(outbox) } else { Ok(0) } {
            Ok(sent) => sent,
            Err(error) => {
                port.check(Err(error), &self.tell);
                0
            }
        };
        let (mut done, left) = packets.split_at(sent.min(packets.len()));
        // What it was given before this time says nothing of these.
        let refused = if done.is_empty() { &[] } else { port.nic.refused() };
        let (mut first, count) = (0, done.len());
        for position in refused.iter().copied().chain([count]) {
            let (taken, rest) = done.split_at(position - first);
            count_sent(port, sender.registration, taken);
            complete_sent(end, taken);
            let Some(((message, _), rest)) = rest.split_first() else { break };
            if let Some(registration) = &port.registrations[sender.registration.get()] {
                registration.counters.count_drop(DropReason::Refused);
            }
            complete(end, message, Status::Dropped);
            (done, first) = (rest, position + 1);
        }
        for (message, header) in left {
            let Sender { registration, channel, .. } = *sender;
            if port.backlog.has_room(registration) {
                let (message, header) = (*message, *header);
                let (vlan, flooded, frames_sent) = (None, false, 0);
                let packet = Outgoing { message, channel, registration, header, vlan, flooded, frames_sent };
                port.backlog.push(packet);
            } else {
                if let Some(registration) = &port.registrations[registration.get()] {
                    registration.counters.count_drop(DropReason::Backlog);
                }
                complete(end, message, Status::Dropped);
            }
        }
        packets.clear();
        outbox.clear();
    }
}

/// Counts packets of one sender that went out.
#[inline]
fn count_sent(port: &Port, sender: RegistrationIndex, sent: &[(NetMessage, VnetHeader)]) {
    let bytes: u64 = sent.iter().map(|(message, _)| u64::from(message.bytes)).sum();
    let (packets, bytes) = (sent.len() as u64, bytes - (sent.len() * HEADER_BYTES) as u64);
    port.counters.tx_packets.add(packets);
    port.counters.tx_bytes.add(bytes);
    if let Some(registration) = &port.registrations[sender.get()] {
        registration.count_sent(packets, bytes);
    }
}

/// Says that packets of one sender went out, those with consecutive numbers together.
#[inline]
fn complete_sent<M: Memory>(end: &mut ChannelEnd<M>, mut sent: &[(NetMessage, VnetHeader)]) {
    while let Some((first, _)) = sent.first() {
        let consecutive = |number: u16| first.sequence.wrapping_add(number);
        let numbered = (0..).zip(sent);
        let together = numbered.take_while(|(number, (it, _))| it.sequence == consecutive(*number)).count();
        let (run, rest) = sent.split_at(together);
        // At most as many as fit a batch.
        let packets = u16::try_from(run.len()).unwrap_or(Run::MAX);
        end.complete_run(transmit_done(first), Run { status: Status::Sent, packets });
        sent = rest;
    }
}
