//! A device in memory, which holds commands back and finishes them in any order.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use cxl_pool::simulated::{SimulatedMemory, SimulatedPool};
use cxl_pool::{ByteOffset, HostId, LineOffset, Memory};
use rustix::event::{EventfdFlags, eventfd};
use vhost_blk_cxl::message::Operation;
use vhost_blk_cxl::segments::Segment;
use vhost_blk_cxl::ssd::{Command, Finished, Full, Geometry, Outcome, Ssd};

use super::{Pod, VOLUME_BYTES, VOLUME_START};

/// What the test may do to a device from outside.
pub struct Control {
    state: Mutex<State>,
    event: OwnedFd,
    broken: AtomicBool,
    writes_zeroes: AtomicBool,
    verifier: AtomicU64,
}

/// A command, and where its data lies if that is in several places.
#[derive(Debug, Clone)]
pub struct Given {
    pub command: Command,
    pub list: Vec<Segment>,
}

impl Given {
    /// Calls `each` for every piece of its data, with where that is on the device.
    fn pieces(&self, mut each: impl FnMut(ByteOffset, std::ops::Range<usize>)) {
        let at = self.command.offset_bytes as usize;
        if self.list.is_empty() {
            return each(self.command.data, at..at + self.command.length_bytes as usize);
        }
        let mut at = at;
        for Segment { start, bytes } in &self.list {
            each(*start, at..at + *bytes as usize);
            at += *bytes as usize;
        }
    }
}

#[expect(clippy::struct_excessive_bools, reason = "tests want one thing of a device, or another")]
struct State {
    bytes: Vec<u8>,
    /// How many commands are carried out before they are kept.
    passes: usize,
    fail: bool,
    fail_flushes: bool,
    waiting: VecDeque<Given>,
    log: Vec<Given>,
    depth: usize,
    in_order: bool,
    /// What is discarded stays as it is.
    keeps_discarded: bool,
    /// Writes, or reads, that begin at this offset are kept, whatever else is carried out.
    keeps: Option<(bool, u64)>,
}

impl State {
    fn is_kept(&self, given: &Given) -> bool {
        self.keeps == Some((given.command.operation.writes(), given.command.offset_bytes))
    }

    /// What is to be carried out now.
    fn next(&mut self) -> Option<Given> {
        let mut waiting = self.waiting.iter();
        let passes = |given: &Given| !self.is_kept(given);
        let next = if self.in_order { waiting.position(passes) } else { waiting.rposition(passes) };
        self.waiting.remove(next?)
    }
}

impl Control {
    pub fn new() -> Arc<Self> {
        let bytes = vec![0; (VOLUME_START + VOLUME_BYTES + (1 << 20)) as usize];
        let waiting = VecDeque::new();
        let state = State {
            bytes,
            passes: usize::MAX,
            fail: false,
            fail_flushes: false,
            waiting,
            log: Vec::new(),
            depth: usize::MAX,
            in_order: true,
            keeps_discarded: false,
            keeps: None,
        };
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Arc::new(Self {
            state: Mutex::new(state),
            event,
            broken: AtomicBool::new(false),
            writes_zeroes: AtomicBool::new(false),
            verifier: AtomicU64::new(0),
        })
    }

    pub fn hold(&self, held: bool) {
        self.let_pass(if held { 0 } else { usize::MAX });
    }

    /// Holds it back after so many more.
    pub fn let_pass(&self, commands: usize) {
        self.state.lock().unwrap().passes = commands;
        self.ring();
    }

    pub fn fail(&self, fail: bool) {
        self.state.lock().unwrap().fail = fail;
    }

    /// Reads and writes go on.
    pub fn fail_flushes(&self, fail: bool) {
        self.state.lock().unwrap().fail_flushes = fail;
    }

    /// From now on it says that it cannot be used any more.
    pub fn break_down(&self) {
        self.broken.store(true, Ordering::Relaxed);
        self.ring();
    }

    /// From now on it says that it writes zeroes as it does data.
    pub fn write_zeroes(&self) {
        self.writes_zeroes.store(true, Ordering::Relaxed);
    }

    /// It loses its power: what was not flushed is gone, here all of it.
    pub fn lose(&self) {
        self.verifier.fetch_add(1, Ordering::Relaxed);
        self.state.lock().unwrap().bytes.fill(0);
    }

    pub fn set_bytes(&self, at: u64, bytes: &[u8]) {
        self.state.lock().unwrap().bytes[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    /// Its backend died: of what it was doing, the device finishes what `finishes` says, and nobody hears of it.
    pub fn orphaned<M: Memory>(&self, memory: &M, mut finishes: impl FnMut() -> bool) {
        let mut state = self.state.lock().unwrap();
        while let Some(given) = state.waiting.pop_front() {
            if given.command.operation == Operation::Write && finishes() {
                given.pieces(|data, place| memory.read(data, &mut state.bytes[place]));
            }
        }
    }

    /// Its backend died, and the device goes on with what that had it do: the writes, as where they go and what is to be there.
    pub fn going_on<M: Memory>(&self, memory: &M) -> Vec<(u64, Vec<u8>)> {
        let mut state = self.state.lock().unwrap();
        let writes = state.waiting.drain(..).filter(|given| given.command.operation == Operation::Write);
        let mut late = Vec::new();
        for given in writes {
            given.pieces(|data, place| {
                let mut bytes = vec![0; place.len()];
                memory.read(data, &mut bytes);
                late.push((place.start as u64, bytes));
            });
        }
        late
    }

    pub fn set_depth(&self, depth: usize) {
        self.state.lock().unwrap().depth = depth;
    }

    /// What it does with a discard is up to it: this one does nothing.
    pub fn keep_discarded(&self) {
        self.state.lock().unwrap().keeps_discarded = true;
    }

    pub fn finish_backwards(&self) {
        self.state.lock().unwrap().in_order = false;
    }

    /// Keeps writes that begin there, and carries out all others.
    pub fn keep_writes_at(&self, offset_bytes: Option<u64>) {
        self.state.lock().unwrap().keeps = offset_bytes.map(|at| (true, at));
        self.ring();
    }

    /// The same of reads.
    pub fn keep_reads_at(&self, offset_bytes: Option<u64>) {
        self.state.lock().unwrap().keeps = offset_bytes.map(|at| (false, at));
        self.ring();
    }

    /// Whether it has such a request.
    pub fn keeps_any(&self) -> bool {
        let state = self.state.lock().unwrap();
        state.waiting.iter().any(|given| state.is_kept(given))
    }

    /// Commands that it holds now.
    pub fn waiting(&self) -> usize {
        self.state.lock().unwrap().waiting.len()
    }

    /// All commands that it ever got.
    pub fn log(&self) -> Vec<Command> {
        self.given().into_iter().map(|given| given.command).collect()
    }

    /// The same, with where their data was.
    pub fn given(&self) -> Vec<Given> {
        self.state.lock().unwrap().log.clone()
    }

    pub fn bytes(&self, at: u64, bytes: usize) -> Vec<u8> {
        self.state.lock().unwrap().bytes[at as usize..at as usize + bytes].to_vec()
    }

    fn ring(&self) {
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

/// The device.
pub struct RamSsd<M: Memory> {
    pub memory: M,
    pub control: Arc<Control>,
}

/// A pod in simulated memory of which nothing runs yet, and the device for its backend.
pub fn idle_pod(seed: u64) -> (Pod<SimulatedMemory>, Box<RamSsd<SimulatedMemory>>, Arc<Control>) {
    let pool = SimulatedPool::new(seed, 32 << 20);
    let host = |id| pool.host(HostId::new(id));
    let pod = Pod::new(host(1), host(2), LineOffset::new(4096));
    let control = Control::new();
    let ssd = RamSsd { memory: pod.backend_memory.clone(), control: Arc::clone(&control) };
    (pod, Box::new(ssd), control)
}

/// The same, and it runs.
pub fn pod(seed: u64) -> (Pod<SimulatedMemory>, Arc<Control>) {
    let (mut pod, ssd, control) = idle_pod(seed);
    pod.start(ssd);
    (pod, control)
}

impl<M: Memory> Ssd for RamSsd<M> {
    fn driver(&self) -> &'static str {
        "ram"
    }

    fn geometry(&self) -> Geometry {
        Geometry { size_bytes: self.control.state.lock().unwrap().bytes.len() as u64, block_bytes: 512 }
    }

    fn writes_zeroes(&self) -> bool {
        self.control.writes_zeroes.load(Ordering::Relaxed)
    }

    fn submit(&mut self, command: Command) -> Result<(), Full> {
        self.submit_list(command, &[])
    }

    fn submit_list(&mut self, command: Command, segments: &[Segment]) -> Result<(), Full> {
        let mut state = self.control.state.lock().unwrap();
        if state.waiting.len() >= state.depth {
            return Err(Full);
        }
        let given = Given { command, list: segments.to_vec() };
        state.waiting.push_back(given.clone());
        state.log.push(given);
        drop(state);
        self.control.ring();
        Ok(())
    }

    fn kick(&mut self) {}

    fn reap(&mut self, into: &mut Vec<Finished>) {
        let mut state = self.control.state.lock().unwrap();
        while state.passes > 0
            && let Some(given) = state.next()
        {
            if state.passes != usize::MAX {
                state.passes -= 1;
            }
            let command = given.command;
            let at = command.offset_bytes as usize;
            let end = at + command.length_bytes as usize;
            let fails = state.fail || state.fail_flushes && command.operation == Operation::Flush;
            let outcome = if fails { Outcome::Failed } else { Outcome::Done };
            if outcome == Outcome::Done {
                match command.operation {
                    Operation::Read => {
                        given.pieces(|data, place| self.memory.write(data, &state.bytes[place]));
                    }
                    Operation::Write => {
                        given.pieces(|data, place| self.memory.read(data, &mut state.bytes[place]));
                    }
                    Operation::Discard if state.keeps_discarded => {}
                    Operation::Discard | Operation::WriteZeroes => state.bytes[at..end].fill(0),
                    Operation::Flush => {}
                }
            }
            into.push(Finished { id: command.id, outcome });
        }
        // Level-triggered: quiet until the test lifts what holds it, or there is more.
        let _ = rustix::io::read(&self.control.event, &mut [0; 8]);
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        Some(self.control.event.as_fd())
    }

    fn write_verifier(&self) -> u64 {
        self.control.verifier.load(Ordering::Relaxed)
    }

    fn failure(&self) -> Option<&str> {
        self.control.broken.load(Ordering::Relaxed).then_some("it broke down")
    }
}
