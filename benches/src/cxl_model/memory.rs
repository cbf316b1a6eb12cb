//! The modelled memory as channels know it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cxl_pool::{ByteOffset, LINE_BYTES, Memory};
use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use super::world::{Words, World};

/// The modelled hosts. Their code runs on two threads, of which one goes on at a time, until it would look at what the
/// other one has yet to do: so a run is the same each time.
#[derive(Default)]
struct Turns {
    changed: Condvar,
}

/// One host's memory.
#[derive(Clone)]
pub(crate) struct ModelledMemory {
    world: Arc<Mutex<World>>,
    turns: Arc<Turns>,
    host: usize,
}

impl ModelledMemory {
    /// Both hosts' memory. The first one begins.
    pub(crate) fn pair(world: World) -> [Self; 2] {
        let (world, turns) = (Arc::new(Mutex::new(world)), Arc::<Turns>::default());
        [0, 1].map(|host| Self { world: Arc::clone(&world), turns: Arc::clone(&turns), host })
    }

    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What time it is at this host, in ns.
    pub(crate) fn now(&self) -> f64 {
        self.world().now(self.host)
    }

    /// Lets time pass at this host.
    pub(crate) fn pass(&self, time: f64) {
        self.world().pass(self.host, time);
    }

    /// Lets time pass at this host until then.
    pub(crate) fn wait_until(&self, time: f64) {
        self.world().wait_until(self.host, time);
    }

    /// Waits for this host's first turn.
    pub(crate) fn begin(&self) {
        drop(self.await_turn(self.world()));
    }

    /// This host does nothing any more.
    pub(crate) fn finish(&self) {
        let mut world = self.world();
        world.finish(self.host);
        world.turn = 1 - self.host;
        self.turns.changed.notify_all();
    }

    fn await_turn<'a>(&self, mut world: MutexGuard<'a, World>) -> MutexGuard<'a, World> {
        while world.turn != self.host {
            world = self.turns.changed.wait(world).unwrap_or_else(PoisonError::into_inner);
        }
        world
    }

    /// Before this host fetches a line, the other one must have come as far.
    fn synchronise(&self, line: usize) -> MutexGuard<'_, World> {
        let mut world = self.world();
        while world.must_wait(self.host, line) {
            world.turn = 1 - self.host;
            self.turns.changed.notify_all();
            world = self.await_turn(world);
        }
        world
    }

    fn load_line(&self, line: usize) -> Words {
        *self.synchronise(line).load(self.host, line)
    }

    fn each_line(&self, at: ByteOffset, bytes: u64, run: fn(&mut World, usize, usize)) {
        let (first, last) = (place(at).0, place(at.saturating_add(bytes.max(1) - 1)).0);
        let mut world = self.world();
        (first..=last).for_each(|line| run(&mut world, self.host, line));
    }
}

#[allow(clippy::cast_possible_truncation, reason = "usize has 64 bits here")]
fn place(at: ByteOffset) -> (usize, usize) {
    let at = at.get() as usize;
    (at / LINE_BYTES, at % LINE_BYTES / 8)
}

impl Memory for ModelledMemory {
    const COHERENT: bool = false;

    fn size_bytes(&self) -> u64 {
        (self.world().lines() * LINE_BYTES) as u64
    }

    fn load(&self, at: ByteOffset) -> u64 {
        let (line, word) = place(at);
        self.load_line(line)[word]
    }

    fn load_words<const N: usize>(&self, at: ByteOffset) -> [u64; N] {
        let (line, word) = place(at);
        let words = self.load_line(line);
        std::array::from_fn(|index| words[word + index])
    }

    fn store(&self, at: ByteOffset, value: u64) {
        self.store_words(at, [value]);
    }

    fn store_words<const N: usize>(&self, at: ByteOffset, words: [u64; N]) {
        let (line, word) = place(at);
        self.world().store(self.host, line, word, &words);
    }

    fn write_back(&self, at: ByteOffset, bytes: u64) {
        self.each_line(at, bytes, World::write_back);
    }

    fn invalidate(&self, at: ByteOffset, bytes: u64) {
        self.each_line(at, bytes, World::invalidate);
    }

    fn flush(&self, at: ByteOffset, bytes: u64) {
        self.each_line(at, bytes, |world, host, line| {
            world.write_back(host, line);
            world.invalidate(host, line);
        });
    }

    fn prefetch(&self, at: ByteOffset) {
        let line = place(at).0;
        self.synchronise(line).prefetch(self.host, line);
    }

    fn store_fence(&self) {
        self.full_fence();
    }

    fn full_fence(&self) {
        self.world().full_fence(self.host);
    }

    fn read(&self, _: ByteOffset, _: &mut [u8]) {
        unreachable!("channels work in words");
    }

    fn write(&self, _: ByteOffset, _: &[u8]) {
        unreachable!("channels work in words");
    }

    fn zero(&self, _: ByteOffset, _: u64) {
        unreachable!("channels work in words");
    }

    fn copy_to<B: BitmapSlice>(&self, _: ByteOffset, _: &VolatileSlice<'_, B>) {
        unreachable!("channels work in words");
    }

    fn copy_from<B: BitmapSlice>(&self, _: ByteOffset, _: &VolatileSlice<'_, B>) {
        unreachable!("channels work in words");
    }

    fn write_streaming(&self, _: ByteOffset, _: &[u8]) {
        unreachable!("channels work in words");
    }
}
