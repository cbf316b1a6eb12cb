//! Doing in software what was left to the NIC or to the receiving guest and they cannot do: a lease keeps what it
//! offered to its guest when it moves to a NIC that can do less, and guests on one NIC may accept different things.

use cxl_pool::{ByteOffset, Memory};

use super::Backend;
use super::receive_buffers::BUFFER_BYTES;
use super::registration::RegistrationIndex;
use super::share::Reach;
use super::wire::Outgoing;
use crate::counters::DropReason;
use crate::finish::{Finish, FinishFault, HEADERS_BYTES_MAX};
use crate::message::MAX_PACKET_BYTES;
use crate::nic::{NicError, Piece, Taken};
use crate::offloads::Offloads;
use crate::vlan::{TAG_BYTES, insert_tag};
use crate::vnet_header::{HEADER_BYTES, HEADER_BYTES_U32, VnetHeader};

/// Where frames are put together: in memory of our own, since the original's buffer belongs to others.
pub(super) struct Workbench(pub(super) Vec<u8>);

impl Workbench {
    pub(super) fn new() -> Self {
        Self(vec![0; usize::try_from(MAX_PACKET_BYTES).expect("64 KiB and headers")])
    }
}

/// So many frames of a packet are sent at a time, while all others wait.
const FRAMES_AT_ONCE: u32 = 256;

/// How far sending a packet in parts has come.
pub(super) enum Progress {
    /// All of its frames are sent.
    Whole,
    /// The NIC found fault with one of them: the rest is not sent.
    Refused,
    /// It goes on behind this many frames: the NIC is full, or failed then, or others have their turn.
    Until(u32),
}

impl<M: Memory> Backend<M> {
    /// Plans for a packet. Its header is checked here, for it may come from the wire.
    fn plan(&self, pieces: &[Piece], header: VnetHeader) -> Result<Finish, FinishFault> {
        let bytes: u32 = pieces.iter().map(|piece| piece.bytes).sum();
        let frame_bytes = bytes - HEADER_BYTES_U32;
        let header = header.check(frame_bytes, u16::MAX, Offloads::ALL).map_err(|_| FinishFault::Headers)?;
        let mut front = [0; HEADERS_BYTES_MAX];
        let front = &mut front[..HEADERS_BYTES_MAX.min(frame_bytes as usize)];
        read_frame(&self.memory, pieces, 0, front);
        Finish::plan(header, front, frame_bytes)
    }

    /// Delivers a packet to receivers that do not accept it as it is.
    pub(super) fn deliver_finished(
        &mut self,
        place: usize,
        source: &[Piece],
        header: VnetHeader,
        (receivers, reach): (&[RegistrationIndex], Reach),
    ) {
        let Ok(finish) = self.plan(source, header) else {
            self.drop_for(place, receivers, DropReason::BadHeader);
            return;
        };
        let mut bench = std::mem::replace(&mut self.workbench, Workbench(Vec::new()));
        let mut pieces = std::mem::take(&mut self.pieces);
        for index in 0..finish.frames() {
            let read = |at, to: &mut [u8]| read_frame(&self.memory, source, at, to);
            let frame = finish.build(index, &mut bench.0[HEADER_BYTES..], read);
            let bytes = HEADER_BYTES + frame.len();
            bench.0[..HEADER_BYTES].copy_from_slice(&VnetHeader::default().to_bytes());
            if !self.put_into_receive_buffers(place, &bench.0[..bytes], &mut pieces) {
                self.drop_for(place, receivers, DropReason::NoReceiveBuffers);
                break;
            }
            if !self.deliver(place, &pieces, VnetHeader::default(), (receivers, reach)) {
                // Nor would anybody have room for the rest of it.
                break;
            }
        }
        self.workbench = bench;
        self.pieces = pieces;
    }

    /// Writes a packet into receive buffers; false if too few are free.
    pub(super) fn put_into_receive_buffers(
        &mut self,
        place: usize,
        packet: &[u8],
        pieces: &mut Vec<Piece>,
    ) -> bool {
        let bytes = u32::try_from(packet.len()).unwrap_or(u32::MAX);
        if !self.ports[place].take_buffers(bytes, pieces) {
            return false;
        }
        self.take_over(place, pieces);
        let mut rest = packet;
        for piece in pieces.iter() {
            let (now, later) = rest.split_at(rest.len().min(BUFFER_BYTES as usize));
            self.memory.write(piece.at, now);
            rest = later;
        }
        self.write_back(pieces);
        true
    }

    pub(super) fn drop_for(&mut self, place: usize, receivers: &[RegistrationIndex], reason: DropReason) {
        for index in receivers {
            if let Some(registration) = &self.ports[place].registrations[index.get()] {
                registration.counters.count_drop(reason);
            }
        }
    }

    /// Sends a packet as frames that the NIC can send, from the first one that is not sent yet.
    pub(super) fn send_finished(
        &mut self,
        place: usize,
        packet: &Outgoing,
        source: &[Piece],
    ) -> Result<Result<Progress, FinishFault>, NicError> {
        self.bring_in(place, source);
        let finish = match self.plan(source, packet.header) {
            Ok(finish) => finish,
            Err(fault) => return Ok(Err(fault)),
        };
        let port = &mut self.ports[place];
        for index in packet.frames_sent..finish.frames() {
            if index - packet.frames_sent == FRAMES_AT_ONCE {
                return Ok(Ok(Progress::Until(index)));
            }
            let read = |at, to: &mut [u8]| read_frame(&self.memory, source, at, to);
            let bench = &mut self.workbench.0;
            let frame = match packet.vlan {
                None => finish.build(index, bench, read),
                Some(vlan) => {
                    let bytes = finish.build(index, &mut bench[TAG_BYTES..], read).len();
                    insert_tag(bench, bytes, vlan)
                }
            };
            match port.nic.transmit_frame(frame) {
                Ok(Taken::Whole) => {}
                Ok(Taken::Refused) => return Ok(Ok(Progress::Refused)),
                // What went out must not go out again: the next call tells of the error.
                Err(_) if index > packet.frames_sent => return Ok(Ok(Progress::Until(index))),
                Ok(Taken::NoRoom) => return Ok(Ok(Progress::Until(index))),
                Err(error) => return Err(error),
            }
            port.counters.tx_packets.add(1);
            port.counters.tx_bytes.add(frame.len() as u64);
        }
        Ok(Ok(Progress::Whole))
    }
}

/// Copies bytes of the frame in `pieces`, behind its virtio-net header, from position `at` on.
fn read_frame<M: Memory>(memory: &M, pieces: &[Piece], at: u32, to: &mut [u8]) {
    read_packet(memory, pieces, u64::from(at) + HEADER_BYTES as u64, to);
}

/// Copies bytes of the packet in `pieces`, header and all, from position `skip` on.
pub(super) fn read_packet<M: Memory>(memory: &M, pieces: &[Piece], mut skip: u64, to: &mut [u8]) {
    let mut rest = to;
    for piece in pieces {
        if rest.is_empty() {
            return;
        }
        let bytes = u64::from(piece.bytes);
        if skip >= bytes {
            skip -= bytes;
            continue;
        }
        let here = usize::try_from(bytes - skip).unwrap_or(usize::MAX).min(rest.len());
        let (now, later) = rest.split_at_mut(here);
        let from: ByteOffset = piece.at.saturating_add(skip);
        memory.read(from, now);
        rest = later;
        skip = 0;
    }
}
