//! Which threads are vCPUs, and the timer of each.

use std::cell::{Cell, UnsafeCell};
use std::ffi::{c_int, c_void};
use std::mem;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering, compiler_fence};
use std::sync::{Mutex, Once, PoisonError};

use vcpu_slicing::{Control, Failure, SLOTS};

use crate::tick::{self, Account};
use crate::{places, real, shared, watch};

/// A vCPU thread; its place in the table is that of its slot in the file.
pub(crate) struct Thread {
    /// Its id; 0 where there is none.
    pub(crate) id: AtomicU32,
    timer: AtomicPtr<c_void>,
    /// It is around `KVM_RUN`.
    pub(crate) in_run: AtomicBool,
    /// It was to sleep where it could not.
    pub(crate) owes: AtomicBool,
    /// It looks at its account.
    pub(crate) busy: AtomicBool,
    /// A signal came meanwhile.
    pub(crate) again: AtomicBool,
    /// Its timer is armed, or will be when it has looked.
    pub(crate) sliced: AtomicBool,
    /// Only for the thread itself, and while it is `busy`.
    pub(crate) account: UnsafeCell<Account>,
}

// SAFETY: all but the account are atomics, and the account is used by one thread, see there.
unsafe impl Sync for Thread {}

static THREADS: [Thread; SLOTS] = [const {
    Thread {
        id: AtomicU32::new(0),
        timer: AtomicPtr::new(ptr::null_mut()),
        in_run: AtomicBool::new(false),
        owes: AtomicBool::new(false),
        busy: AtomicBool::new(false),
        again: AtomicBool::new(false),
        sliced: AtomicBool::new(false),
        account: UnsafeCell::new(Account::new()),
    }
}; SLOTS];

/// Held while threads come and go, and while others than themselves arm their timers. Never in signal handlers.
static CHANGES: Mutex<()> = Mutex::new(());

thread_local! {
    /// The place of this thread in the table.
    static OWN: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Whether this is how QEMU names a thread that runs vCPUs.
pub(crate) fn is_vcpu(name: &[u8]) -> bool {
    let Some((who, how)) = name.iter().position(|byte| *byte == b'/').map(|at| name.split_at(at)) else {
        return false;
    };
    let number = who.strip_prefix(b"CPU ");
    let one = number.is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit));
    matches!(how, b"/KVM" | b"/TCG") && (one || who == b"ALL CPUs")
}

/// The thread in this place of the table.
pub(crate) fn at(index: usize) -> Option<&'static Thread> {
    THREADS.get(index)
}

/// The place of the calling thread.
pub(crate) fn own() -> Option<usize> {
    OWN.get()
}

/// The calling thread is about to run a vCPU in the kernel.
pub(crate) fn enter_run(index: usize) {
    if let Some(thread) = at(index) {
        thread.in_run.store(true, Ordering::Relaxed);
        // Only a handler on this thread looks at it.
        compiler_fence(Ordering::SeqCst);
    }
}

/// It has come back.
pub(crate) fn leave_run(index: usize) {
    if let Some(thread) = at(index) {
        compiler_fence(Ordering::SeqCst);
        thread.in_run.store(false, Ordering::Relaxed);
    }
}

/// The calling thread is a vCPU. Returns its place.
pub(crate) fn register_own() -> Option<usize> {
    let control = begin()?;
    let changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
    let index = claim(control, tick::thread_id())?;
    OWN.set(Some(index));
    // QEMU's threads start with all signals blocked.
    unblock();
    tick::sharpen_own_timers();
    places::refresh();
    drop(changes);
    remember_end(index);
    rouse(control);
    Some(index)
}

/// Takes up what the agent has written: threads that it knows, and its order.
pub(crate) fn take_up(control: &'static Control) {
    let changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
    for (index, thread) in THREADS.iter().enumerate() {
        let id = thread.id.load(Ordering::Acquire);
        if id != 0 && !exists(id) {
            release(control, index);
        }
    }
    for asked in &control.asked {
        match asked.load(Ordering::Acquire) {
            0 => break,
            id if exists(id) => drop(claim(control, id)),
            _ => {}
        }
    }
    places::refresh();
    drop(changes);
    rouse(control);
}

/// Lets threads look at their accounts that do not by themselves.
fn rouse(control: &'static Control) {
    let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(command) = control.order.read() else { return };
    control.taken.store(command.version, Ordering::Release);
    if command.slices(tick::now_ns()) {
        for thread in &THREADS {
            if thread.id.load(Ordering::Acquire) != 0 && !thread.sliced.load(Ordering::Acquire) {
                arm(thread, 1);
            }
        }
    }
}

/// Lets a thread's timer send its signal in so many ns.
pub(crate) fn arm(thread: &Thread, after_ns: u64) {
    // SAFETY: all zeros are a time.
    let mut when: libc::itimerspec = unsafe { mem::zeroed() };
    when.it_value = tick::timespec(after_ns.max(1));
    // SAFETY: the timer was made when the thread got its place, and is deleted by the thread itself or after its end.
    unsafe { libc::timer_settime(thread.timer.load(Ordering::Acquire), 0, &raw const when, ptr::null_mut()) };
}

/// What must be there before the first thread: the file, the handler of the signal, the thread that takes orders.
fn begin() -> Option<&'static Control> {
    static BEGUN: Once = Once::new();
    let shared = shared::shared()?;
    BEGUN.call_once(|| {
        if tick::install(shared.control) {
            watch::start(shared);
        }
    });
    (shared.control.failure.load(Ordering::Acquire) == 0).then_some(shared.control)
}

/// Gives a thread a place and a timer, unless it has them.
fn claim(control: &'static Control, id: u32) -> Option<usize> {
    if let Some(index) = THREADS.iter().position(|thread| thread.id.load(Ordering::Acquire) == id) {
        return Some(index);
    }
    let Some(index) = THREADS.iter().position(|thread| thread.id.load(Ordering::Acquire) == 0) else {
        shared::fail(control, Failure::TooManyThreads);
        return None;
    };
    let (thread, slot) = (THREADS.get(index)?, control.slots.get(index)?);
    let Some(timer) = make_timer(index, id) else {
        shared::fail(control, Failure::NoTimer);
        return None;
    };
    thread.timer.store(timer, Ordering::Release);
    for flag in [&thread.in_run, &thread.owes, &thread.busy, &thread.again, &thread.sliced] {
        flag.store(false, Ordering::Release);
    }
    // SAFETY: the timer is not armed, so the thread does not look at its account yet, and nobody else has the place.
    unsafe { *thread.account.get() = Account::new() };
    for time in [&slot.elapsed_ns, &slot.ran_ns, &slot.slept_ns, &slot.sleeps, &slot.ticks, &slot.windows] {
        time.store(0, Ordering::Release);
    }
    for count in [&slot.retries, &slot.missed, &slot.squares, &slot.forgiven_ns] {
        count.store(0, Ordering::Release);
    }
    slot.carry_ns.store(0, Ordering::Release);
    thread.id.store(id, Ordering::Release);
    slot.thread.store(id, Ordering::Release);
    Some(index)
}

/// A timer that sends the signal to the thread, with its place.
fn make_timer(index: usize, id: u32) -> Option<*mut c_void> {
    // SAFETY: all zeros are an event.
    let mut event: libc::sigevent = unsafe { mem::zeroed() };
    event.sigev_notify = libc::SIGEV_THREAD_ID;
    event.sigev_signo = tick::signal();
    event.sigev_value = libc::sigval { sival_ptr: ptr::without_provenance_mut(index) };
    event.sigev_notify_thread_id = c_int::try_from(id).ok()?;
    let mut timer: libc::timer_t = ptr::null_mut();
    // SAFETY: both can be used for the duration of the call.
    let made = unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
    (made == 0).then_some(timer)
}

/// Frees the place of a thread that has ended, or is ending.
fn release(control: &Control, index: usize) {
    let (Some(thread), Some(slot)) = (THREADS.get(index), control.slots.get(index)) else { return };
    slot.thread.store(0, Ordering::Release);
    // Who has no place ignores the signal.
    if thread.id.swap(0, Ordering::AcqRel) != 0 {
        // SAFETY: it was made with the place, which is freed once.
        unsafe { libc::timer_delete(thread.timer.load(Ordering::Acquire)) };
    }
}

fn exists(id: u32) -> bool {
    Path::new(&format!("/proc/self/task/{id}")).exists()
}

fn unblock() {
    // SAFETY: all zeros are a set, the signal is one, and the set can be read.
    unsafe {
        let mut set: libc::sigset_t = mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, tick::signal());
        real::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, ptr::null_mut());
    }
}

/// Has the calling thread's place freed when it ends, as that of an unplugged vCPU does.
fn remember_end(index: usize) {
    static KEY: Mutex<Option<libc::pthread_key_t>> = Mutex::new(None);
    extern "C" fn ended(value: *mut c_void) {
        OWN.set(None);
        let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(control) = shared::opened() {
            release(control, value.addr().saturating_sub(1));
        }
    }
    let mut key = KEY.lock().unwrap_or_else(PoisonError::into_inner);
    if key.is_none() {
        let mut made = 0;
        // SAFETY: the key can be written, and the function has the type that is asked for.
        if unsafe { libc::pthread_key_create(&raw mut made, Some(ended)) } == 0 {
            *key = Some(made);
        }
    }
    if let Some(key) = *key {
        // SAFETY: the key was made; the value is no address, and 0 would mean that there is none.
        unsafe { libc::pthread_setspecific(key, ptr::without_provenance(index + 1)) };
    }
}

#[cfg(test)]
mod tests {
    use super::is_vcpu;

    #[test]
    fn qemus_names() {
        for name in ["CPU 0/KVM", "CPU 17/TCG", "ALL CPUs/TCG"] {
            assert!(is_vcpu(name.as_bytes()), "{name}");
        }
        for name in
            ["", "CPU", "CPU /KVM", "CPU x/KVM", "CPU 0/HVF", "CPU 0", "IO iothread0", "qemu-system-x86/KVM"]
        {
            assert!(!is_vcpu(name.as_bytes()), "{name}");
        }
    }
}
