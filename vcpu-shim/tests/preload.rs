//! The library, loaded into a program whose threads are named, and behave, as those of a QEMU.

use std::ffi::{CStr, c_int, c_ulong};
use std::fs::{File, OpenOptions};
use std::io;
use std::mem::offset_of;
use std::os::unix::fs::FileExt as _;
use std::os::unix::thread::JoinHandleExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vcpu_slicing::{Control, MAGIC, Order, SLOTS, Slot};

const VARIABLE: &str = "WADI_VCPU_CONTROL";
const DEADLINE: Duration = Duration::from_mins(1);
const KVM_RUN: c_ulong = 0xae80;
const MS: u64 = 1_000_000;

/// Runs [`inside`] with the library before it, or without the file that it is told of.
fn run_inside(control: Option<&Path>) {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(&program);
    command.args(["--exact", "inside", "--ignored", "--nocapture"]);
    command.env("LD_PRELOAD", program.with_file_name("libvcpu_shim.so")).env_remove(VARIABLE);
    if let Some(path) = control {
        command.env(VARIABLE, path);
    }
    let mut child = command.spawn().unwrap();
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if began.elapsed() > 2 * DEADLINE {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("the program with the library does not end");
        }
        thread::sleep(Duration::from_millis(10));
    };
    assert!(status.success(), "{status}: what failed is above");
}

#[test]
fn threads_sleep_where_they_hold_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vcpus");
    let file = File::create(&path).unwrap();
    file.set_len(size_of::<Control>() as u64).unwrap();
    file.write_all_at(&MAGIC.to_ne_bytes(), 0).unwrap();
    run_inside(Some(&path));
}

#[test]
fn without_a_file_it_does_nothing() {
    run_inside(None);
}

#[test]
fn a_file_that_is_none_of_its_own_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vcpus");
    for bytes in [0, size_of::<Control>()] {
        let before = vec![7; bytes];
        std::fs::write(&path, &before).unwrap();
        run_inside(Some(&path));
        assert!(std::fs::read(&path).unwrap() == before, "it was written to");
    }
}

/// The agent's side.
struct Agent(File);

impl Agent {
    fn long(&self, offset: usize) -> u64 {
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, offset as u64).unwrap();
        u64::from_ne_bytes(bytes)
    }

    fn write(&self, bytes: &[u8], offset: usize) {
        self.0.write_all_at(bytes, offset as u64).unwrap();
    }

    /// The slot of a thread.
    fn slot(&self, id: u32) -> Option<usize> {
        (0..SLOTS).map(|index| offset_of!(Control, slots) + index * size_of::<Slot>()).find(|slot| {
            let mut bytes = [0; 4];
            self.0.read_exact_at(&mut bytes, (slot + offset_of!(Slot, thread)) as u64).unwrap();
            u32::from_ne_bytes(bytes) == id
        })
    }

    fn of(&self, id: u32, field: usize) -> u64 {
        self.slot(id).map_or(0, |slot| self.long(slot + field))
    }

    fn order(&self, run_ns: u64, window_ns: u64) {
        self.order_until(run_ns, window_ns, u64::MAX);
    }

    fn order_until(&self, run_ns: u64, window_ns: u64, until_ns: u64) {
        let order = offset_of!(Control, order);
        let version = self.long(order + offset_of!(Order, ended)) + 1;
        for (value, offset) in [
            (version, offset_of!(Order, begun)),
            (run_ns, offset_of!(Order, run_ns)),
            (window_ns, offset_of!(Order, window_ns)),
            (until_ns, offset_of!(Order, until_ns)),
            (version, offset_of!(Order, ended)),
        ] {
            self.write(&value.to_ne_bytes(), order + offset);
        }
    }
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < DEADLINE, "waited for {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn own_id() -> u32 {
    // SAFETY: it has no preconditions.
    u32::try_from(unsafe { libc::gettid() }).unwrap()
}

/// For how long a thread ran, and for how long it wanted to while others did.
fn schedstat_ns(id: u32) -> [u64; 2] {
    let text = std::fs::read_to_string(format!("/proc/self/task/{id}/schedstat")).unwrap();
    let mut numbers = text.split_whitespace().map(|number| number.parse().unwrap());
    [numbers.next().unwrap(), numbers.next().unwrap()]
}

fn waited_ns(id: u32) -> u64 {
    schedstat_ns(id)[1]
}

/// Waits until a thread that always works runs for the time of many windows without a look at its account.
fn wait_for_freedom(agent: &Agent, id: u32) {
    let state = || (agent.of(id, offset_of!(Slot, ticks)), schedstat_ns(id)[0]);
    let mut before = state();
    wait_for("the thread to run freely", || {
        let (ticks, ran) = state();
        if ticks != before.0 {
            before = (ticks, ran);
        }
        ran > before.1 + 50 * MS
    });
}

fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it can be written.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec).unwrap()
}

fn name(thread: &JoinHandle<()>, name: &CStr) {
    // SAFETY: the thread was not waited for, and the name ends with a zero.
    let named = unsafe { libc::pthread_setname_np(thread.as_pthread_t(), name.as_ptr()) };
    assert_eq!(named, 0);
}

/// A thread that works with something held, and now and then is in the kernel, as one that runs a vCPU with KVM is.
struct Vcpu {
    id: u32,
    over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Vcpu {
    fn start(name: &str, runs: bool) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let (send, receive) = std::sync::mpsc::channel();
        let stop = Arc::clone(&over);
        let body = move || {
            send.send(own_id()).unwrap();
            block_all_signals();
            let agent = std::env::var_os(VARIABLE)
                .and_then(|path| OpenOptions::new().read(true).open(path).ok())
                .filter(|file| file.metadata().unwrap().len() > 0)
                .map(Agent);
            let sleeps = || agent.as_ref().map_or(0, |agent| agent.of(own_id(), offset_of!(Slot, sleeps)));
            while !stop.load(Ordering::Acquire) {
                let before = sleeps();
                let began = Instant::now();
                while began.elapsed() < Duration::from_micros(200) {
                    std::hint::spin_loop();
                }
                assert_eq!(sleeps(), before, "it was put to sleep with something held");
                if runs {
                    run_vcpu();
                }
            }
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(body).unwrap();
        Self { id: receive.recv_timeout(DEADLINE).unwrap(), over, thread }
    }

    fn end(self) {
        self.over.store(true, Ordering::Release);
        wait_for("a thread to end", || self.thread.is_finished());
        self.thread.join().unwrap();
    }
}

/// As QEMU does when a vCPU begins.
fn block_all_signals() {
    // SAFETY: all zeros are a set that can be written and read.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
    }
}

/// Fails, as on no vCPU; what it says is kept, whether the thread was put to sleep or not.
fn run_vcpu() {
    // SAFETY: there is no such file.
    let result: c_int = unsafe { libc::ioctl(-1, KVM_RUN, 0) };
    let error = io::Error::last_os_error().raw_os_error();
    assert_eq!((result, error), (-1, Some(libc::EBADF)));
}

/// What a thread that is no vCPU may make of its number of the last error; no call fails like this.
const ERROR: c_int = 12_345;

fn last_error() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap()
}

/// Sends the calling thread this signal with a number, as a program does; the handler has run when it returns.
fn queue_to_self(signal: u64, number: usize) {
    let value = libc::sigval { sival_ptr: std::ptr::without_provenance_mut(number) };
    let signal = c_int::try_from(signal).unwrap();
    // SAFETY: the thread is there, for it is this one.
    let sent = unsafe { libc::pthread_sigqueue(libc::pthread_self(), signal, value) };
    assert_eq!(sent, 0);
}

/// Code of a translator that runs until the number that it gets is another one than 0.
#[cfg(target_arch = "x86_64")]
struct Generated(unsafe extern "C" fn(*const AtomicBool));

#[cfg(target_arch = "x86_64")]
impl Generated {
    fn new() -> Self {
        const BYTES: usize = 2 << 20;
        // again: movzx eax, byte [rdi]; test eax, eax; jz again; ret
        const CODE: [u8; 8] = [0x0f, 0xb6, 0x07, 0x85, 0xc0, 0x74, 0xf9, 0xc3];
        // SAFETY: a new mapping of the kernel's choice replaces none, and is longer than the code; what is there is a function of
        // this type, and is never unmapped.
        unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let place = libc::mmap(std::ptr::null_mut(), BYTES, rights, kind, -1, 0);
            assert_ne!(place, libc::MAP_FAILED);
            std::ptr::copy_nonoverlapping(CODE.as_ptr(), place.cast(), CODE.len());
            Self(std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn(*const AtomicBool)>(place))
        }
    }

    fn run(&self, over: &AtomicBool) {
        // SAFETY: it reads a byte until that is not 0.
        unsafe { (self.0)(over) }
    }
}

/// A sleep that another signal ends too early leaves a number of the last error. The code that was put to sleep sees none of it, in
/// generated code and around `KVM_RUN`, and signals that are no timer's make no difference.
#[cfg(target_arch = "x86_64")]
fn code_that_is_interrupted_sees_nothing_of_it(agent: &Agent) {
    extern "C" fn on_other(_: c_int) {
        OTHERS.fetch_add(1, Ordering::Relaxed);
    }
    static OTHERS: AtomicU64 = AtomicU64::new(0);
    let handler = on_other as extern "C" fn(c_int) as usize;
    // SAFETY: the handler has the type that the call asks for, and only counts.
    assert_ne!(unsafe { libc::signal(libc::SIGUSR1, handler) }, libc::SIG_ERR);
    let (generated, signal) = (Generated::new(), offset_of!(Control, signal));
    let [translated, over] = [AtomicBool::new(false), AtomicBool::new(false)];
    thread::scope(|scope| {
        let (send, receive) = std::sync::mpsc::channel();
        let (generated, translated, over) = (&generated, &translated, &over);
        let body = move || {
            let place = agent.slot(own_id()).expect("its name tells") - offset_of!(Control, slots);
            let ticks = || agent.of(own_id(), offset_of!(Slot, ticks));
            let before = ticks();
            queue_to_self(agent.long(signal) & u64::from(u32::MAX), place / size_of::<Slot>());
            assert_eq!(ticks(), before, "it was no timer");
            // SAFETY: it has no preconditions.
            send.send((own_id(), unsafe { libc::pthread_self() })).unwrap();
            // SAFETY: it points to this thread's.
            unsafe { *libc::__errno_location() = ERROR };
            generated.run(translated);
            assert_eq!(last_error(), ERROR, "in generated code");
            while !over.load(Ordering::Acquire) {
                let began = Instant::now();
                while began.elapsed() < Duration::from_micros(200) {
                    std::hint::spin_loop();
                }
                run_vcpu();
            }
        };
        let thread = thread::Builder::new().name("CPU 2/TCG".to_owned()).spawn_scoped(scope, body).unwrap();
        let (id, own) = receive.recv_timeout(DEADLINE).unwrap();
        agent.order(MS, 5 * MS);
        for leave in [translated, over] {
            let sleeps = || agent.of(id, offset_of!(Slot, sleeps));
            let before = (sleeps(), OTHERS.load(Ordering::Relaxed));
            // Four of five come while it sleeps.
            wait_for("it to sleep, and to be interrupted in that", || {
                // SAFETY: the thread was not waited for.
                let outcome = unsafe { libc::pthread_kill(own, libc::SIGUSR1) };
                outcome == 0 && sleeps() > before.0 + 20 && OTHERS.load(Ordering::Relaxed) > before.1 + 50
            });
            leave.store(true, Ordering::Release);
        }
        wait_for("it to end", || thread.is_finished());
        thread.join().unwrap();
    });
}

/// In the program with the library.
#[test]
#[ignore = "the others run it"]
fn inside() {
    let Some(path) = std::env::var_os(VARIABLE) else {
        let vcpu = Vcpu::start("CPU 0/KVM", true);
        thread::sleep(Duration::from_millis(50));
        return vcpu.end();
    };
    let agent = Agent(OpenOptions::new().read(true).write(true).open(path).unwrap());
    let (vcpu, other) = (Vcpu::start("CPU 0/KVM", true), Vcpu::start("worker", false));
    if agent.0.metadata().unwrap().len() == 0 || agent.long(0) != MAGIC {
        thread::sleep(Duration::from_millis(50));
        other.end();
        return vcpu.end();
    }
    wait_for("the vCPU to be known", || agent.slot(vcpu.id).is_some());
    assert_eq!(agent.of(vcpu.id, offset_of!(Slot, ticks)), 0, "nothing is armed without an order");
    // Nothing that it waits for while it is held is left out.
    let waited_before = waited_ns(vcpu.id);
    #[cfg(target_arch = "x86_64")]
    code_that_is_interrupted_sees_nothing_of_it(&agent);

    agent.order(MS, 5 * MS);
    let sleeps = |id: u32| agent.of(id, offset_of!(Slot, sleeps));
    wait_for("the vCPU to sleep", || sleeps(vcpu.id) > 50);
    // Long enough to tell its share from a tenth of that.
    wait_for("many windows", || agent.of(vcpu.id, offset_of!(Slot, elapsed_ns)) > 2000 * MS);
    // In this order, so that what passes in between does no harm.
    let [slept, ran, forgiven, elapsed] = [
        offset_of!(Slot, slept_ns),
        offset_of!(Slot, ran_ns),
        offset_of!(Slot, forgiven_ns),
        offset_of!(Slot, elapsed_ns),
    ]
    .map(|field| agent.of(vcpu.id, field));
    assert!(ran <= elapsed / 5 + 10 * MS + forgiven, "{ran} of {elapsed}, {forgiven} forgiven");
    // How long each sleep is depends on how late it began: windows end when they would have. But of the time for which it did not wait it ran for its share.
    assert!(slept > 0, "{slept} of {elapsed}");
    let waited = waited_ns(vcpu.id) - waited_before;
    let least = elapsed.saturating_sub(waited) / 5;
    assert!(ran + 10 * MS >= least, "{ran} of {elapsed}, and waited for {waited}");

    // One that comes later is held too, and what a thread leaves is free for the next.
    let slot = agent.slot(vcpu.id);
    vcpu.end();
    wait_for("the slot to be free", || agent.slot(0) == slot);
    let plugged = Vcpu::start("CPU 1/KVM", true);
    wait_for("the next to take it", || agent.slot(plugged.id) == slot);
    wait_for("the next to sleep", || sleeps(plugged.id) > 5);

    // One that is told to be a vCPU is tried, and never sleeps where it may hold something.
    assert_eq!(agent.slot(other.id), None);
    agent.write(&other.id.to_ne_bytes(), offset_of!(Control, asked));
    wait_for("the one that was told of", || agent.of(other.id, offset_of!(Slot, retries)) > 3);
    assert_eq!(sleeps(other.id), 0);

    // At full duty nothing is armed.
    agent.order(5 * MS, 5 * MS);
    wait_for_freedom(&agent, plugged.id);
    // And it begins again.
    agent.order(MS, 5 * MS);
    let before = sleeps(plugged.id);
    wait_for("it to be held again", || sleeps(plugged.id) > before + 5);
    // An order that nobody renews, for its agent is dead, comes to its end.
    agent.order_until(MS, 5 * MS, now_ns() + 100 * MS);
    wait_for_freedom(&agent, plugged.id);
    // Who names another thread is no vCPU for that.
    name(&other.thread, c"CPU 7/KVM");
    assert_eq!(agent.slot(own_id()), None);
    other.end();
    plugged.end();
}
