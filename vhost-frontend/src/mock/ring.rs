//! The driver's side of a split ring.

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use virtio_bindings::bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Piece, RawDescriptor, Used};

/// The driver's side of a ring.
#[derive(Debug)]
pub struct MockRing {
    pub(super) size: u16,
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    pub(super) next_available: u16,
    pub(super) next_used: u16,
    pub(super) free: Vec<u16>,
    pub(super) indirect: bool,
    pub(super) event_index: bool,
    pub(super) kick: EventFd,
    pub(super) call: EventFd,
    pub(super) epoll: Epoll,
}

impl MockRing {
    pub(super) fn new(start: u64, size: u16) -> Self {
        let call = EventFd::new(EFD_NONBLOCK).unwrap();
        let epoll = Epoll::new().unwrap();
        epoll.ctl(ControlOperation::Add, call.as_raw_fd(), EpollEvent::new(EventSet::IN, 0)).unwrap();
        Self {
            size,
            descriptors: start,
            available: start + 0x4000,
            used: start + 0x5000,
            next_available: 0,
            next_used: 0,
            free: (0..size).rev().collect(),
            indirect: false,
            event_index: false,
            kick: EventFd::new(EFD_NONBLOCK).unwrap(),
            call,
            epoll,
        }
    }

    /// Descriptors that are free.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Where its descriptor table begins.
    pub fn descriptor_table(&self) -> u64 {
        self.descriptors
    }

    /// Where its available ring begins.
    pub fn available_ring(&self) -> u64 {
        self.available
    }

    /// Where its used ring begins.
    pub fn used_ring(&self) -> u64 {
        self.used
    }

    /// Writes a descriptor, whatever it is.
    pub fn write_descriptor(&self, memory: &GuestMemoryMmap<()>, index: u16, descriptor: RawDescriptor) {
        write_descriptor(memory, self.descriptors, index, descriptor);
    }

    /// Writes the pieces as descriptors; they stay unseen until [`MockRing::publish`].
    pub fn add(&mut self, memory: &GuestMemoryMmap<()>, pieces: &[Piece], table: Option<u64>) -> u16 {
        if let Some(table) = table.filter(|_| self.indirect) {
            let head = self.free.pop().expect("a free descriptor");
            let indices: Vec<u16> = (0..pieces.len() as u16).collect();
            write_chain(memory, table, &indices, pieces);
            let bytes = 16 * pieces.len() as u32;
            let flags = VRING_DESC_F_INDIRECT as u16;
            self.write_descriptor(memory, head, RawDescriptor { address: table, bytes, flags, next: 0 });
            return head;
        }
        let indices: Vec<u16> = pieces.iter().map(|_| self.free.pop().expect("a free descriptor")).collect();
        write_chain(memory, self.descriptors, &indices, pieces);
        indices[0]
    }

    /// Makes a head available.
    pub fn publish(&mut self, memory: &GuestMemoryMmap<()>, head: u16) {
        let slot = self.available + 4 + 2 * u64::from(self.next_available % self.size);
        memory.write_obj(head.to_le(), GuestAddress(slot)).unwrap();
        self.set_available_index(memory, self.next_available.wrapping_add(1));
    }

    /// Sets the available index to anything.
    pub fn set_available_index(&mut self, memory: &GuestMemoryMmap<()>, index: u16) {
        self.next_available = index;
        memory.store(index.to_le(), GuestAddress(self.available + 2), Ordering::SeqCst).unwrap();
    }

    /// Notifies the device, if it wants to be.
    pub fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    pub(super) fn used_index(&self, memory: &GuestMemoryMmap<()>) -> u16 {
        u16::from_le(memory.load(GuestAddress(self.used + 2), Ordering::Acquire).unwrap())
    }

    pub(super) fn used(&mut self, memory: &GuestMemoryMmap<()>) -> Option<Used> {
        if self.used_index(memory) == self.next_used {
            return None;
        }
        let slot = self.used + 4 + 8 * u64::from(self.next_used % self.size);
        let head = u32::from_le(memory.read_obj(GuestAddress(slot)).unwrap()) as u16;
        let written = u32::from_le(memory.read_obj(GuestAddress(slot + 4)).unwrap());
        self.next_used = self.next_used.wrapping_add(1);
        self.set_used_event(memory, self.next_used);
        self.release(memory, head);
        Some(Used { head, written })
    }

    /// Asks for a signal after the entry with this index.
    pub fn set_used_event(&self, memory: &GuestMemoryMmap<()>, index: u16) {
        let at = self.available + 4 + 2 * u64::from(self.size);
        memory.store(index.to_le(), GuestAddress(at), Ordering::SeqCst).unwrap();
    }

    /// Frees the descriptors of a chain.
    pub(super) fn release(&mut self, memory: &GuestMemoryMmap<()>, head: u16) {
        let mut index = head;
        for _ in 0..self.size {
            self.free.push(index);
            let at = self.descriptors + 16 * u64::from(index);
            let flags = u16::from_le(memory.read_obj(GuestAddress(at + 12)).unwrap());
            if u32::from(flags) & VRING_DESC_F_NEXT == 0 {
                return;
            }
            index = u16::from_le(memory.read_obj(GuestAddress(at + 14)).unwrap());
        }
    }

    pub(super) fn wait_used(&mut self, memory: &GuestMemoryMmap<()>, patience: Duration) -> Option<Used> {
        let began = Instant::now();
        loop {
            if let Some(used) = self.used(memory) {
                return Some(used);
            }
            let left = patience.checked_sub(began.elapsed())?;
            // The call, not the clock, wakes us: a lost signal is a failure.
            self.wait_call(left);
        }
    }

    pub(super) fn wait_call(&self, timeout: Duration) {
        let mut events = [EpollEvent::default()];
        let timeout_ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX).max(1);
        let _ = self.epoll.wait(timeout_ms, &mut events);
        let _ = self.call.read();
    }

    /// Whether the device signalled since the last look.
    pub fn signalled(&self) -> bool {
        self.call.read().is_ok()
    }
}

fn write_chain(memory: &GuestMemoryMmap<()>, table: u64, indices: &[u16], pieces: &[Piece]) {
    for (position, (piece, &index)) in pieces.iter().zip(indices).enumerate() {
        let next = indices.get(position + 1).copied();
        let flags =
            if piece.writable { VRING_DESC_F_WRITE } else { 0 } | next.map_or(0, |_| VRING_DESC_F_NEXT);
        let descriptor = RawDescriptor {
            address: piece.address,
            bytes: piece.bytes,
            flags: flags as u16,
            next: next.unwrap_or(0),
        };
        write_descriptor(memory, table, index, descriptor);
    }
}

fn write_descriptor(memory: &GuestMemoryMmap<()>, table: u64, index: u16, descriptor: RawDescriptor) {
    let at = table + 16 * u64::from(index);
    memory.write_obj(descriptor.address.to_le(), GuestAddress(at)).unwrap();
    memory.write_obj(descriptor.bytes.to_le(), GuestAddress(at + 8)).unwrap();
    memory.write_obj(descriptor.flags.to_le(), GuestAddress(at + 12)).unwrap();
    memory.write_obj(descriptor.next.to_le(), GuestAddress(at + 14)).unwrap();
}
