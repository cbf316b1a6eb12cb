//! Negative controls: a channel over memory that leaves out one of the things that coherence needs must fail the
//! same checks that the right one passes. Where it does not, the checks are worth nothing.

use std::panic::{self, AssertUnwindSafe};

use cxl_pool::simulated::SimulatedMemory;
use cxl_pool::{ByteOffset, HostId, Memory};
use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use crate::schedule::{RECEIVING, SENDING, Scenario, run, seeds};

/// What is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Omission {
    Nothing,
    WriteBack,
    Invalidate,
    Flush,
    FullFence,
}

/// Memory of a host that leaves something out.
#[derive(Clone)]
struct Broken {
    memory: SimulatedMemory,
    omission: Omission,
}

impl Memory for Broken {
    const COHERENT: bool = false;

    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }
    fn load(&self, at: ByteOffset) -> u64 {
        self.memory.load(at)
    }
    fn store(&self, at: ByteOffset, value: u64) {
        self.memory.store(at, value);
    }
    fn read(&self, at: ByteOffset, into: &mut [u8]) {
        self.memory.read(at, into);
    }
    fn write(&self, at: ByteOffset, from: &[u8]) {
        self.memory.write(at, from);
    }
    fn zero(&self, at: ByteOffset, bytes: u64) {
        self.memory.zero(at, bytes);
    }
    fn copy_to<B: BitmapSlice>(&self, at: ByteOffset, into: &VolatileSlice<'_, B>) {
        self.memory.copy_to(at, into);
    }
    fn copy_from<B: BitmapSlice>(&self, at: ByteOffset, from: &VolatileSlice<'_, B>) {
        self.memory.copy_from(at, from);
    }
    fn write_streaming(&self, at: ByteOffset, from: &[u8]) {
        self.memory.write_streaming(at, from);
    }
    fn write_back(&self, at: ByteOffset, bytes: u64) {
        if self.omission != Omission::WriteBack {
            self.memory.write_back(at, bytes);
        }
    }
    fn invalidate(&self, at: ByteOffset, bytes: u64) {
        if self.omission != Omission::Invalidate {
            self.memory.invalidate(at, bytes);
        }
    }
    fn flush(&self, at: ByteOffset, bytes: u64) {
        if self.omission != Omission::Flush {
            self.memory.flush(at, bytes);
        }
    }
    fn prefetch(&self, at: ByteOffset) {
        self.memory.prefetch(at);
    }
    fn store_fence(&self) {
        self.memory.store_fence();
    }
    fn full_fence(&self) {
        if self.omission != Omission::FullFence {
            self.memory.full_fence();
        }
    }
}

const SCENARIO: Scenario = Scenario { messages: 150, sleeps: true, restarts: 4 };

/// In how many of the first seeds the checks notice that this host leaves this out.
fn noticed<const WORDS: usize>(host: HostId, omission: Omission) -> usize {
    let fails = |seed: &u64| {
        let wrap = |at: HostId, memory| {
            let omission = if at == host { omission } else { Omission::Nothing };
            Broken { memory, omission }
        };
        let result = panic::catch_unwind(AssertUnwindSafe(|| run::<Broken, WORDS>(*seed, SCENARIO, wrap)));
        !matches!(result, Ok(Ok(())))
    };
    seeds(40).filter(fails).count()
}

fn must_be_noticed(host: HostId, omission: Omission) {
    assert!(noticed::<2>(host, omission) > 0, "16 B messages");
    assert!(noticed::<8>(host, omission) > 0, "64 B messages");
}

#[test]
fn the_checks_pass_if_nothing_is_left_out() {
    assert_eq!(noticed::<2>(SENDING, Omission::Nothing), 0);
}

#[test]
fn a_sender_that_never_writes_back_is_noticed() {
    must_be_noticed(SENDING, Omission::WriteBack);
}

#[test]
fn a_sender_that_never_invalidates_is_noticed() {
    must_be_noticed(SENDING, Omission::Invalidate);
}

#[test]
fn a_sender_that_does_not_flush_the_ring_when_a_generation_begins_is_noticed() {
    must_be_noticed(SENDING, Omission::Flush);
}

#[test]
fn a_sender_that_never_fences_is_noticed() {
    must_be_noticed(SENDING, Omission::FullFence);
}

#[test]
fn a_receiver_that_never_writes_back_is_noticed() {
    must_be_noticed(RECEIVING, Omission::WriteBack);
}

#[test]
fn a_receiver_that_never_invalidates_is_noticed() {
    must_be_noticed(RECEIVING, Omission::Invalidate);
}

#[test]
fn a_receiver_that_never_fences_is_noticed() {
    must_be_noticed(RECEIVING, Omission::FullFence);
}
