//! Leaving something out on purpose, to see that it is noticed.

use std::collections::BTreeSet;
use std::panic::Location;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use super::SimulatedMemory;
use crate::{ByteOffset, Memory};

/// What code does for coherence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "named after the methods of `Memory`")]
pub enum Operation {
    WriteBack,
    Invalidate,
    Flush,
    StoreFence,
    FullFence,
}

impl Operation {
    pub(super) const fn method(self) -> &'static str {
        match self {
            Self::WriteBack => "write_back",
            Self::Invalidate => "invalidate",
            Self::Flush => "flush",
            Self::StoreFence => "store_fence",
            Self::FullFence => "full_fence",
        }
    }
}

/// A place in the source that does something for coherence.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Site {
    /// As the compiler names it: seen from the workspace's root.
    pub file: &'static str,
    /// Its line there.
    pub line: u32,
    /// What it does.
    pub operation: Operation,
}

impl Site {
    /// In words that only change when the code there does: the file, the function, the line; with its number, if the function
    /// has several such lines; and with what it does, if the line does not say it, as where it is that of a macro.
    pub fn name(&self, workspace: &Path) -> String {
        name(workspace, self.file, self.line, self.operation)
    }
}

/// As a [site](Site::name) is named.
pub(super) fn name(workspace: &Path, file: &str, line: u32, operation: Operation) -> String {
    let source = std::fs::read_to_string(workspace.join(file)).unwrap_or_default();
    let before: Vec<&str> = source.lines().take(line as usize).map(str::trim).collect();
    let begins = before.iter().rposition(|line| line.contains("fn ")).unwrap_or(0);
    let function = before.get(begins).and_then(|line| line.split_once("fn ")).map_or("", |found| found.1);
    let function = function.split(['(', '<']).next().unwrap_or_default();
    let code = before.last().copied().unwrap_or_default();
    let nth = before[begins..].iter().filter(|line| **line == code).count();
    let nth = if nth > 1 { format!(" ({nth})") } else { String::new() };
    let file = file.split_once("src/").map_or(file, |found| found.1);
    let code = code.trim_end_matches(';');
    let method = operation.method();
    let what = if code.contains(method) { String::new() } else { format!(" {method}") };
    format!("{file} {function}: {code}{what}{nth}")
}

/// A mutation: one site at which nothing is done. Without one, it finds out which sites there are.
#[derive(Clone, Default)]
pub struct Omission {
    omitted: Option<Site>,
    seen: Arc<Mutex<BTreeSet<Site>>>,
}

impl Omission {
    /// Leaves out what this site does.
    pub fn of(site: Site) -> Self {
        Self { omitted: Some(site), ..Self::default() }
    }

    /// The memory, with the omission.
    pub fn in_memory(&self, memory: SimulatedMemory) -> OmittingMemory {
        OmittingMemory { memory, omission: self.clone(), interruption: Interruption::default() }
    }

    /// The sites that were run into so far.
    pub fn seen(&self) -> BTreeSet<Site> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn applies(&self, operation: Operation, at: &'static Location<'static>) -> bool {
        let site = Site { file: at.file(), line: at.line(), operation };
        let applies = self.omitted.as_ref() == Some(&site);
        if self.omitted.is_none() {
            self.seen.lock().unwrap_or_else(PoisonError::into_inner).insert(site);
        }
        applies
    }
}

/// What else happens while a host is busy: after each of its stores of words, as to the slots of a channel. So that other hosts
/// can act where a test otherwise lets one finish before the next begins.
#[derive(Clone, Default)]
pub struct Interruption(Arc<Mutex<Option<Happening>>>);

type Happening = Box<dyn FnMut() + Send>;

impl Interruption {
    /// From here on this happens.
    pub fn set(&self, happens: impl FnMut() + Send + 'static) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(happens));
    }

    /// Nothing happens any more.
    pub fn clear(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn happen(&self) {
        // What happens is not itself interrupted by what it stores.
        if let Ok(mut happens) = self.0.try_lock()
            && let Some(happens) = happens.as_mut()
        {
            happens();
        }
    }
}

/// Simulated memory of a host whose code leaves something out.
#[derive(Clone)]
pub struct OmittingMemory {
    memory: SimulatedMemory,
    omission: Omission,
    interruption: Interruption,
}

impl OmittingMemory {
    /// What happens after each store of words through this memory and its clones.
    pub fn interruption(&self) -> &Interruption {
        &self.interruption
    }
}

impl Memory for OmittingMemory {
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

    fn load_words<const N: usize>(&self, at: ByteOffset) -> [u64; N] {
        self.memory.load_words(at)
    }

    fn store_words<const N: usize>(&self, at: ByteOffset, words: [u64; N]) {
        self.memory.store_words(at, words);
        self.interruption.happen();
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

    #[track_caller]
    fn stream_from<B: BitmapSlice>(&self, at: ByteOffset, from: &VolatileSlice<'_, B>) {
        self.copy_from(at, from);
        self.write_back(at, from.len() as u64);
    }

    #[track_caller]
    fn write_streaming(&self, at: ByteOffset, from: &[u8]) {
        // To leave it out is to leave the bytes in the cache.
        if self.omission.applies(Operation::WriteBack, Location::caller()) {
            self.memory.write(at, from);
        } else {
            self.memory.write_streaming(at, from);
        }
    }

    #[track_caller]
    fn write_back(&self, at: ByteOffset, bytes: u64) {
        if !self.omission.applies(Operation::WriteBack, Location::caller()) {
            self.memory.write_back(at, bytes);
        }
    }

    #[track_caller]
    fn invalidate(&self, at: ByteOffset, bytes: u64) {
        if !self.omission.applies(Operation::Invalidate, Location::caller()) {
            self.memory.invalidate(at, bytes);
        }
    }

    #[track_caller]
    fn flush(&self, at: ByteOffset, bytes: u64) {
        if !self.omission.applies(Operation::Flush, Location::caller()) {
            self.memory.flush(at, bytes);
        }
    }

    fn prefetch(&self, at: ByteOffset) {
        self.memory.prefetch(at);
    }

    #[track_caller]
    fn store_fence(&self) {
        if !self.omission.applies(Operation::StoreFence, Location::caller()) {
            self.memory.store_fence();
        }
    }

    #[track_caller]
    fn full_fence(&self) {
        if !self.omission.applies(Operation::FullFence, Location::caller()) {
            self.memory.full_fence();
        }
    }
}
