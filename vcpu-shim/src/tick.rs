//! What a vCPU thread does when its timer fires.

use std::ffi::{c_int, c_void};
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use vcpu_slicing::{Clocks, Command, Control, Duty, Failure, Phase, Slicer, Slot, Step};

use crate::threads::{self, Thread};
use crate::{places, shared};

/// Which real-time signal it is, from the first that programs may use. QEMU uses none of them.
const SIGNAL: c_int = 11;

/// A thread sleeps for no longer in one go, in ns: QEMU's other threads wait for each vCPU now and then, to come to an end of what it does.
const SLEEP_MAX_NS: u64 = 100_000_000;
/// How long it may run in between, in ns. What it runs is paid for.
const GAP_NS: u64 = 50_000;

/// The signal of the timers.
pub(crate) fn signal() -> c_int {
    libc::SIGRTMIN() + SIGNAL
}

/// What a thread may run, and what it did.
#[derive(Debug)]
pub(crate) struct Account {
    slicer: Slicer,
    /// The order that was in force at the last look.
    command: Command,
    /// What was forgiven under earlier orders.
    forgiven_before: u64,
    /// When it was looked at last.
    last: Clocks,
    /// When it woke up last.
    woken: Clocks,
    /// The kernel was told to be exact about this thread's sleeps.
    sharp: bool,
}

impl Account {
    pub(crate) const fn new() -> Self {
        const NEVER: Clocks = Clocks { wall_ns: 0, cpu_ns: 0 };
        const FULL: Duty = Duty { run_ns: 0, window_ns: 0 };
        Self {
            slicer: Slicer::new(),
            command: Command { version: 0, duty: FULL, until_ns: 0 },
            forgiven_before: 0,
            last: NEVER,
            woken: NEVER,
            sharp: false,
        }
    }

    /// Looks at the account, and sleeps if it is time and nothing is held. Returns after how many ns to look again, or nothing if the
    /// thread runs freely.
    fn look(
        &mut self,
        (thread, phase): (&Thread, Phase),
        control: &Control,
        slot: &Slot,
        holds_nothing: bool,
    ) -> Option<u64> {
        add(&slot.ticks, 1);
        if !self.sharp {
            sharpen_own_timers();
            self.sharp = true;
        }
        let mut asleep_ns = 0;
        loop {
            let now = clocks();
            // While one is written, and if its writer died at that, the last one holds.
            if let Some(command) = control.order.read() {
                self.command = command;
            }
            let duty = self.command.duty;
            if !self.command.slices(now.wall_ns) {
                thread.sliced.store(false, Ordering::Release);
                thread.owes.store(false, Ordering::Relaxed);
                return None;
            }
            if !thread.sliced.swap(true, Ordering::AcqRel) {
                self.slicer = Slicer::begin(now, duty, phase);
                self.forgiven_before = slot.forgiven_ns.load(Ordering::Relaxed);
                (self.last, self.woken) = (now, now);
            }
            let step = self.slicer.look(now, duty);
            self.count(slot, now);
            match step {
                Step::Look(after) => {
                    thread.owes.store(false, Ordering::Relaxed);
                    return Some(after);
                }
                Step::Sleep(ns) if !holds_nothing => {
                    let (after, missed) = self.slicer.refused(ns, duty);
                    add(&slot.retries, 1);
                    add(&slot.missed, u64::from(missed));
                    thread.owes.store(true, Ordering::Relaxed);
                    return Some(after);
                }
                Step::Sleep(_) if asleep_ns >= SLEEP_MAX_NS => {
                    thread.owes.store(false, Ordering::Relaxed);
                    return Some(GAP_NS);
                }
                Step::Sleep(ns) => {
                    // A window at most at a time: then the order is read again.
                    let most = duty.window_ns.min(SLEEP_MAX_NS - asleep_ns);
                    sleep_until(now.wall_ns.saturating_add(ns.min(most)));
                    let woken = clocks();
                    asleep_ns = asleep_ns.saturating_add(woken.wall_ns.saturating_sub(now.wall_ns));
                    self.slicer.slept(woken, duty);
                    self.count(slot, woken);
                    add(&slot.slept_ns, woken.wall_ns.saturating_sub(now.wall_ns));
                    add(&slot.sleeps, 1);
                    if ns <= most {
                        self.close_window(slot, woken, duty);
                    }
                }
            }
        }
    }

    /// Adds what passed since the last look.
    fn count(&mut self, slot: &Slot, now: Clocks) {
        let forgiven = self.forgiven_before.wrapping_add(self.slicer.forgiven_ns());
        slot.forgiven_ns.store(forgiven, Ordering::Release);
        add(&slot.elapsed_ns, now.wall_ns.saturating_sub(self.last.wall_ns));
        add(&slot.ran_ns, now.cpu_ns.saturating_sub(self.last.cpu_ns));
        slot.carry_ns.store(self.slicer.credit_ns(), Ordering::Release);
        self.last = now;
    }

    /// Compares what it got since it woke up the last time with what was asked for.
    fn close_window(&mut self, slot: &Slot, now: Clocks, duty: Duty) {
        let elapsed = now.wall_ns.saturating_sub(self.woken.wall_ns);
        let ran = now.cpu_ns.saturating_sub(self.woken.cpu_ns);
        self.woken = now;
        let share = per_mille(ran, elapsed);
        let wanted = per_mille(duty.run_ns, duty.window_ns);
        add(&slot.windows, 1);
        add(&slot.squares, share.abs_diff(wanted).saturating_pow(2));
    }
}

fn per_mille(part: u64, whole: u64) -> u64 {
    part.saturating_mul(1000).checked_div(whole).unwrap_or(0)
}

/// Only the thread itself adds.
fn add(sum: &AtomicU64, value: u64) {
    sum.store(sum.load(Ordering::Relaxed).wrapping_add(value), Ordering::Release);
}

/// Installs the handler, unless somebody else uses the signal. Returns whether it has.
pub(crate) fn install(control: &Control) -> bool {
    // SAFETY: all zeros are actions; both can be used for the duration of the calls, and the handler has the type that SA_SIGINFO
    // asks for.
    let installed = unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        let mut before: libc::sigaction = mem::zeroed();
        libc::sigaction(signal(), ptr::null(), &raw mut before);
        action.sa_sigaction = on_signal as *const () as usize;
        // System calls that can go on do.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        before.sa_sigaction == libc::SIG_DFL
            && libc::sigaction(signal(), &raw const action, ptr::null_mut()) == 0
    };
    if installed {
        control.signal.store(signal().unsigned_abs(), Ordering::Release);
    } else {
        shared::fail(control, Failure::SignalTaken);
    }
    installed
}

extern "C" fn on_signal(_: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel hands over both; it points to this thread's number of the last error, which the interrupted code may be
    // about to read.
    let (code, index, address, error) = unsafe {
        let index = (*info).si_value().sival_ptr.addr();
        ((*info).si_code, index, interrupted(context), *libc::__errno_location())
    };
    if code == libc::SI_TIMER
        && let Some(thread) = threads::at(index)
        && thread.id.load(Ordering::Acquire) == thread_id()
    {
        let holds_nothing = thread.in_run.load(Ordering::Relaxed) || places::generated(address);
        tick(index, thread, holds_nothing);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = error };
}

/// Sleeps what the calling thread, which is in this place of the table, could not sleep where it was. It holds nothing now.
pub(crate) fn pay(index: usize) {
    let Some(thread) = threads::at(index).filter(|thread| thread.owes.load(Ordering::Relaxed)) else {
        return;
    };
    // SAFETY: it points to this thread's number of the last error, which the caller has yet to read.
    let error = unsafe { *libc::__errno_location() };
    tick(index, thread, true);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = error };
}

/// Only on the thread itself.
fn tick(index: usize, thread: &Thread, holds_nothing: bool) {
    let Some(control) = shared::opened() else { return };
    let Some(slot) = control.slots.get(index) else { return };
    if thread.busy.load(Ordering::Relaxed) {
        // This is a handler that interrupted what follows.
        thread.again.store(true, Ordering::Relaxed);
        return;
    }
    loop {
        thread.busy.store(true, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        // SAFETY: only the thread itself comes here, and `busy` keeps its handler out.
        let account = unsafe { &mut *thread.account.get() };
        let phase = Phase::of(control.process.load(Ordering::Relaxed), index);
        let next = account.look((thread, phase), control, slot, holds_nothing);
        compiler_fence(Ordering::SeqCst);
        thread.busy.store(false, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        if let Some(after) = next {
            threads::arm(thread, after);
            thread.again.store(false, Ordering::Relaxed);
            return;
        }
        // A new order may have come since the last one was read.
        if !thread.again.swap(false, Ordering::Relaxed) {
            return;
        }
    }
}

/// Where the thread was when the signal came.
///
/// # Safety
/// `context` is what the kernel gave to a handler.
unsafe fn interrupted(context: *mut c_void) -> usize {
    // SAFETY: by the caller.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    #[cfg(target_arch = "x86_64")]
    let address = context.uc_mcontext.gregs[libc::REG_RIP as usize].cast_unsigned();
    #[cfg(target_arch = "aarch64")]
    let address = context.uc_mcontext.pc;
    usize::try_from(address).unwrap_or(0)
}

/// The kernel may wake up a thread 50 µs late, to wake several at once, unless it is told not to.
pub(crate) fn sharpen_own_timers() {
    // SAFETY: it has no preconditions.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_usize) };
}

/// The id of the calling thread.
pub(crate) fn thread_id() -> u32 {
    // SAFETY: it has no preconditions.
    unsafe { libc::gettid() }.unsigned_abs()
}

/// `CLOCK_MONOTONIC`.
pub(crate) fn now_ns() -> u64 {
    read_clock(libc::CLOCK_MONOTONIC)
}

fn clocks() -> Clocks {
    Clocks { wall_ns: now_ns(), cpu_ns: read_clock(libc::CLOCK_THREAD_CPUTIME_ID) }
}

fn read_clock(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it can be written.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec.cast_unsigned().wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec.cast_unsigned())
}

pub(crate) fn timespec(ns: u64) -> libc::timespec {
    let part = |ns: u64| libc::c_long::try_from(ns).unwrap_or(libc::c_long::MAX);
    libc::timespec { tv_sec: part(ns / 1_000_000_000), tv_nsec: part(ns % 1_000_000_000) }
}

fn sleep_until(ns: u64) {
    let until = timespec(ns);
    // SAFETY: the time can be read. By the system call itself: the C library's function is a place where threads may be cancelled.
    let sleep = || unsafe {
        libc::syscall(
            libc::SYS_clock_nanosleep,
            libc::CLOCK_MONOTONIC,
            libc::TIMER_ABSTIME,
            &raw const until,
            ptr::null_mut::<libc::timespec>(),
        )
    };
    // Other signals are handled meanwhile.
    while sleep() != 0 && now_ns() < ns {}
}
