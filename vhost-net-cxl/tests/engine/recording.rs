//! A NIC that writes down what it sends.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use cxl_pool::{Area, Memory};
use vhost_net_cxl::backend::receive_buffers::{BUFFER_BYTES, ReceiveBuffers};
use vhost_net_cxl::nic::{
    Batch, Driver, Flow, Identity, LinkState, Nic, NicError, OnLinkChange, Piece, Taken,
};
use vhost_net_cxl::offloads::Offloads;

use crate::pod::{NIC, TestBackend};

/// What was sent, and how much more may be before the NIC is full.
#[derive(Debug, Default)]
pub(crate) struct Wire {
    pub(crate) frames: Vec<Vec<u8>>,
    /// Frames with their virtio-net headers, where the driver left them to the NIC.
    pub(crate) unfinished: Vec<Vec<u8>>,
    pub(crate) room: usize,
    /// Packets with their virtio-net headers that it is about to receive.
    pub(crate) arriving: VecDeque<Vec<u8>>,
    /// What it was told that its receivers accept.
    pub(crate) told: Option<Offloads>,
    /// How often.
    pub(crate) tellings: u32,
    /// How many flows it was told of last, and how often it was.
    pub(crate) flows: usize,
    pub(crate) flow_tellings: u32,
    /// So many receive buffers it takes when it is started.
    pub(crate) hoards: usize,
    /// How much has gone wrong for the device since it was opened.
    pub(crate) errors: u64,
    /// It finds fault with frames of these numbers.
    pub(crate) faulty: Vec<u32>,
    /// It finds fault with frames that were cut, once so many are out.
    pub(crate) refuses_from: Option<usize>,
    /// Once it is full it fails.
    pub(crate) fails_when_full: bool,
    /// It fails when it is looked at next.
    pub(crate) broken: bool,
    /// Of each packet that was sent as it was, where its pieces lay.
    pub(crate) pieces: Vec<Vec<Piece>>,
}

/// A backend with such a NIC.
pub(crate) fn recording_backend<M: Memory>(
    memory: &M,
    offloads: Offloads,
    room: usize,
    receive_area: Area,
) -> (TestBackend<M>, Arc<Mutex<Wire>>) {
    let (nic, wire) = RecordingNic::new(memory, offloads, room);
    (TestBackend::with_nic(memory, Box::new(nic), receive_area), wire)
}

pub(crate) struct RecordingNic<M: Memory> {
    identity: Identity,
    link: LinkState,
    memory: M,
    wire: Arc<Mutex<Wire>>,
    refused: Vec<usize>,
}

impl<M: Memory> RecordingNic<M> {
    pub(crate) fn new(memory: &M, offloads: Offloads, room: usize) -> (Self, Arc<Mutex<Wire>>) {
        let identity = Identity {
            name: NIC.into(),
            driver: Driver::Null,
            mac: None,
            mtu: 1500,
            speed_mbps: 10_000,
            backup: false,
            lag: None,
            offloads,
            cache_bypassing: false,
        };
        let wire = Arc::new(Mutex::new(Wire { room, ..Wire::default() }));
        let nic = Self {
            identity,
            link: LinkState::new(true),
            memory: memory.clone(),
            wire: Arc::clone(&wire),
            refused: Vec::new(),
        };
        (nic, wire)
    }

    fn outcome(&self, wire: &Wire) -> Result<(), NicError> {
        let nic = self.identity.name.clone();
        let problem = "it is broken".to_owned();
        let fails = wire.broken || wire.fails_when_full && wire.room == 0;
        if fails { Err(NicError::Config { nic, problem }) } else { Ok(()) }
    }
}

impl<M: Memory> Nic for RecordingNic<M> {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn link(&self) -> &LinkState {
        &self.link
    }

    fn watch_link(&mut self, _on_change: OnLinkChange) -> Result<(), NicError> {
        Ok(())
    }

    fn start(&mut self, buffers: &mut ReceiveBuffers) -> Result<(), NicError> {
        let wire = self.wire.lock().expect("unpoisoned");
        for _ in 0..wire.hoards {
            buffers.take().expect("a free buffer");
        }
        self.outcome(&wire)
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn set_receiver_offloads(&mut self, offloads: Offloads) -> Result<(), NicError> {
        let mut wire = self.wire.lock().expect("unpoisoned");
        wire.told = Some(offloads);
        wire.tellings += 1;
        Ok(())
    }

    fn receive(&mut self, buffers: &mut ReceiveBuffers, batch: &mut Batch) -> Result<(), NicError> {
        let mut wire = self.wire.lock().expect("unpoisoned");
        self.outcome(&wire)?;
        while !batch.is_full()
            && let Some(packet) = wire.arriving.pop_front()
        {
            for part in packet.chunks(BUFFER_BYTES as usize) {
                let buffer = buffers.take().expect("a free buffer");
                let at = buffers.offset(buffer);
                self.memory.write(at, part);
                batch.push_piece(Piece { at, bytes: u32::try_from(part.len()).expect("short") });
            }
            batch.end_frame();
        }
        Ok(())
    }

    fn set_flows(&mut self, flows: &[Flow]) {
        let mut wire = self.wire.lock().expect("unpoisoned");
        wire.flows = flows.len();
        wire.flow_tellings += 1;
    }

    fn transmit(&mut self, packets: &Batch) -> Result<usize, NicError> {
        let mut wire = self.wire.lock().expect("unpoisoned");
        let count = packets.len().min(wire.room);
        self.refused.clear();
        for (position, packet) in packets.frames().take(count).enumerate() {
            wire.pieces.push(packet.to_vec());
            let mut bytes = Vec::new();
            for piece in packet {
                let mut part = vec![0; piece.bytes as usize];
                self.memory.read(piece.at, &mut part);
                bytes.extend(part);
            }
            let number = bytes.get(26..30).map(|it| u32::from_le_bytes(it.try_into().expect("four bytes")));
            if number.is_some_and(|number| wire.faulty.contains(&number)) {
                self.refused.push(position);
            } else if bytes[..12] == [0; 12] {
                wire.frames.push(bytes.split_off(12));
            } else {
                wire.unfinished.push(bytes);
            }
        }
        wire.room -= count;
        Ok(count)
    }

    fn refused(&self) -> &[usize] {
        &self.refused
    }

    fn transmit_frame(&mut self, frame: &[u8]) -> Result<Taken, NicError> {
        let mut wire = self.wire.lock().expect("unpoisoned");
        if wire.room == 0 {
            return self.outcome(&wire).map(|()| Taken::NoRoom);
        }
        wire.room -= 1;
        if wire.refuses_from.is_some_and(|sent| wire.frames.len() >= sent) {
            return Ok(Taken::Refused);
        }
        wire.frames.push(frame.to_vec());
        Ok(Taken::Whole)
    }

    fn errors(&self) -> u64 {
        self.wire.lock().expect("unpoisoned").errors
    }
}
