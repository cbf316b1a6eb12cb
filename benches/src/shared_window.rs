//! Memory that two processes share, for a rival that knows nothing but the allocator.
#![allow(unsafe_code)] // the global allocator and fork cannot be had otherwise

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_parent_process_death_signal, waitpid};

/// What is allocated begins on a line of its own, as our rings do.
const ALIGNMENT: usize = 64;

/// Serves everything from the system's allocator, but what a thread allocates inside [`Window::allocate`].
struct Redirected;

#[global_allocator]
static ALLOCATOR: Redirected = Redirected;

thread_local! {
    /// Where this thread's allocations go on, and where their window ends; nothing if it is 0.
    static NEXT: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// The addresses of the one window there is.
static FROM: AtomicUsize = AtomicUsize::new(0);
static UNTIL: AtomicUsize = AtomicUsize::new(0);

fn in_window(address: usize) -> bool {
    address >= FROM.load(Ordering::Relaxed) && address < UNTIL.load(Ordering::Relaxed)
}

// SAFETY: either the system's allocator does all of it, or memory of the window is handed out once, aligned as asked, and
// stays valid: it is never given back.
unsafe impl GlobalAlloc for Redirected {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // While a thread ends it has no such value any more.
        let (next, until) = NEXT.try_with(Cell::get).unwrap_or_default();
        if next == 0 {
            // SAFETY: as the caller vouches.
            return unsafe { System.alloc(layout) };
        }
        let at = next.next_multiple_of(layout.align().max(ALIGNMENT));
        match at.checked_add(layout.size()).filter(|end| *end <= until) {
            Some(end) => {
                NEXT.set((end, until));
                ptr::with_exposed_provenance_mut(at)
            }
            None => ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if !in_window(pointer.addr()) {
            // SAFETY: as the caller vouches, and it did not come from the window.
            unsafe { System.dealloc(pointer, layout) }
        }
    }
}

/// A piece of a file, mapped where its other process will have it too, since that one is forked from this.
pub(crate) struct Window {
    base: *mut u8,
    bytes: usize,
}

impl Window {
    /// Maps a piece of a file. There can be one at a time.
    pub(crate) fn new(file: impl AsFd, offset: u64, bytes: usize) -> Result<Self> {
        ensure!(FROM.load(Ordering::Relaxed) == 0, "there is a window already");
        // SAFETY: a new mapping, at an address that the kernel chooses, overlaps nothing.
        let base = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, file, offset)
        };
        let base: *mut u8 = base.context("cannot map a piece of the pool")?.cast();
        FROM.store(base.expose_provenance(), Ordering::Relaxed);
        UNTIL.store(base.addr() + bytes, Ordering::Relaxed);
        Ok(Self { base, bytes })
    }

    /// Runs this, with what it allocates in the window, from its beginning on. What an earlier call allocated there must
    /// not be in use any more; what this one returns must be dropped before the window.
    pub(crate) fn allocate<T>(&mut self, run: impl FnOnce() -> T) -> T {
        // Nothing unwinds past this: an allocation that does not fit ends the process.
        NEXT.set((self.base.addr(), self.base.addr() + self.bytes));
        let result = run();
        NEXT.set((0, 0));
        result
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        FROM.store(0, Ordering::Relaxed);
        UNTIL.store(0, Ordering::Relaxed);
        // SAFETY: this is the mapping made in `new`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of a whole mapping fails only on a wrong address");
    }
}

/// A copy of this process that runs something else. Killed when dropped, if it has not ended.
pub(crate) struct Forked(Option<Pid>);

impl Forked {
    /// Forks. The copy has this thread only, so what it runs must not wait for others.
    pub(crate) fn run(work: impl FnOnce() -> Result<()>) -> Result<Self> {
        // SAFETY: the copy runs `work` and ends below. It may allocate: glibc keeps its allocator whole across a fork.
        let pid = unsafe { libc::fork() };
        ensure!(pid >= 0, "cannot fork: {}", io::Error::last_os_error());
        let Some(pid) = Pid::from_raw(pid) else {
            // What this copy inherited is the first process's to clean up: end without.
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                work()
            }));
            let status = match outcome {
                Ok(Ok(())) => 0,
                Ok(Err(error)) => {
                    eprintln!("error: {error:#}");
                    1
                }
                Err(_) => 2,
            };
            // SAFETY: ends this process, and touches nothing.
            unsafe { libc::_exit(status) }
        };
        Ok(Self(Some(pid)))
    }

    /// Waits for its end.
    pub(crate) fn wait(mut self) -> Result<()> {
        let pid = self.0.take().context("it is waited for once")?;
        let status = waitpid(Some(pid), WaitOptions::empty())?.context("no process to wait for")?.1;
        ensure!(status.exit_status() == Some(0), "the forked process failed: {status:?}");
        Ok(())
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        if let Some(pid) = self.0 {
            // It is a child that was not waited for, so the number is still its own.
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_allocated_in_the_window_carries_messages_between_processes() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 20).unwrap();
        let mut window = Window::new(&file, 0, 1 << 20).unwrap();
        let (mut producer, mut consumer) = window.allocate(|| rtrb::RingBuffer::<[u64; 2]>::new(8192));
        let outside = Box::new(7_u64);
        assert!(!in_window(ptr::from_ref(&*outside).addr()), "only what is asked for goes there");
        let forked = Forked::run(move || {
            let mut number = 0;
            while number < 100_000 {
                number += u64::from(producer.push([number, !number]).is_ok());
            }
            Ok(())
        })
        .unwrap();
        for number in 0..100_000 {
            let message = loop {
                match consumer.pop() {
                    Ok(message) => break message,
                    Err(_) => std::thread::yield_now(),
                }
            };
            assert_eq!(message, [number, !number]);
        }
        forked.wait().unwrap();
        drop(consumer);
        assert!(Forked::run(|| anyhow::bail!("on purpose")).unwrap().wait().is_err());
    }
}
