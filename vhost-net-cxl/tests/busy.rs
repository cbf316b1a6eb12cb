//! Once packets flow, neither side allocates or makes a system call.

#[path = "engine/guest.rs"]
#[allow(dead_code, reason = "shared with the engine's other tests")]
mod guest;
#[path = "engine/pod.rs"]
#[allow(dead_code, reason = "shared with the engine's other tests")]
mod pod;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::env;
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{self, Command};
use std::sync::atomic::{AtomicU64, Ordering};

use cxl_pool::{CoherenceMode, CreateOptions, HardwareMemory, Memory, Pool, SoftwareMemory};
use pod_protocol::objects::{
    NicPolicy, Object, PortObject, RateLimit, RegistrationObject, RegistrationState,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use crate::guest::Guest;
use crate::pod::{
    POOL_BYTES, TestBackend, TestFrontend, Turn, all_features, area, channel, lease, mac, port, registration,
    route, settle,
};

/// Counts the allocations of a thread while that tells it to.
struct Counting;

thread_local! {
    // Of a kind that needs no allocation itself.
    static COUNTS: Cell<bool> = const { Cell::new(false) };
}
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTS.get() {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const QUEUE_SIZE: u16 = 128;
const BUFFER_BYTES: u32 = 2048;

fn turn(side: &mut dyn Turn) {
    COUNTS.set(true);
    side.turn_once();
    COUNTS.set(false);
}

/// What is particular about a guest and its packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Usual,
    /// Two pairs of queues at work.
    TwoPairs,
    /// It is in a VLAN.
    Vlan,
    /// Its rates are limited, which it does not notice.
    Limited,
    /// It sends to another guest of the NIC.
    Neighbour,
}

const KINDS: [Kind; 5] = [Kind::Usual, Kind::TwoPairs, Kind::Vlan, Kind::Limited, Kind::Neighbour];

impl Kind {
    fn policy(self) -> NicPolicy {
        let limit = RateLimit {
            bytes_per_second: Some(1 << 40),
            packets_per_second: Some(1 << 30),
            burst_ms: 1000,
            minimum_bytes_per_second: None,
        };
        match self {
            Self::Vlan => NicPolicy { vlan: Some(10), ..NicPolicy::default() },
            Self::Limited => NicPolicy { transmit: limit, receive: limit, ..NicPolicy::default() },
            _ => NicPolicy::default(),
        }
    }

    /// Frame `number`; lengths differ, and flows.
    fn frame(self, number: u32) -> Vec<u8> {
        let mut frame = vec![0; 60 + (number as usize * 37) % 1400];
        let destination = if self == Self::Neighbour { mac(2) } else { mac(200) };
        frame[..6].copy_from_slice(&destination.bytes());
        frame[6..12].copy_from_slice(&mac(1).bytes());
        if self == Self::TwoPairs {
            // UDP, as far as anybody looks at it.
            frame[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
            frame[23] = 17;
            frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
            frame[34..38].copy_from_slice(&[0x10, number.to_le_bytes()[0], 0, 9]);
        }
        frame
    }
}

/// A guest whose frames an echoing NIC sends back, or that sends them to a neighbour.
struct Echo<M: Memory> {
    frontend: TestFrontend<M>,
    backend: TestBackend<M>,
    /// One for each pair of queues, or the neighbour behind the guest.
    guests: Vec<Guest>,
    kind: Kind,
}

impl<M: Memory> Echo<M> {
    fn start(memory: &M, guest: Guest, kind: Kind) -> Self {
        let ram_area = guest.pool_file.map(|_| guest::ram_area());
        let mut frontend = TestFrontend::new(memory).with_pool_file(guest.pool_file);
        let mut backend = TestBackend::new(memory, "mode = 'echo'", area(32, 16));
        backend.apply(Object::Channel(channel(1, 1, 512, false)));
        frontend.apply(Object::Channel(channel(1, 1, 512, true)));
        let mut guests = vec![guest];
        if matches!(kind, Kind::TwoPairs | Kind::Neighbour) {
            guests.push(Guest::new(QUEUE_SIZE));
        }
        let instances = if kind == Kind::Neighbour { 2 } else { 1 };
        for (instance, ram_area) in (1..=instances).zip([ram_area, None]) {
            let transmit_area = area(8 * u64::from(instance), 8);
            let registration = registration(instance, 1, 1, RegistrationState::Active, transmit_area);
            let policy = kind.policy();
            backend.apply(Object::Registration(RegistrationObject { ram_area, policy, ..registration }));
            let port = port(instance, transmit_area, route(1, 1), None);
            let queue_pairs = if kind == Kind::TwoPairs { 2 } else { 1 };
            let policy = kind.policy();
            frontend.apply(Object::Port(PortObject { ram_area, policy, queue_pairs, ..port }));
        }
        // The one whose memory may lie in the pool comes last: that is looked at then.
        for (number, guest) in guests.iter_mut().enumerate().rev() {
            let number = u32::try_from(number).expect("few");
            guest.post(QUEUE_SIZE, BUFFER_BYTES);
            let (instance, first) = if kind == Kind::Neighbour { (number + 1, 0) } else { (1, 2 * number) };
            let first = u16::try_from(first).expect("few");
            let receive = guest.receive.ring_as(first, all_features(), 0);
            let transmit = guest.transmit.ring_as(first + 1, all_features(), 0);
            frontend.task.start_ring(lease(instance), receive, None);
            frontend.task.start_ring(lease(instance), transmit, None);
        }
        settle(&mut [&mut frontend, &mut backend]);
        Self { frontend, backend, guests, kind }
    }

    /// Sends frames until `count` have arrived.
    fn echo(&mut self, count: u32) {
        let (mut sent, mut arrived) = (0, 0);
        let senders = if self.kind == Kind::TwoPairs { 2 } else { 1 };
        for _ in 0..1_000_000 {
            for guest in &mut self.guests[..senders] {
                if sent < count {
                    sent += u32::from(guest.send(&[0; 12], &self.kind.frame(sent)));
                }
            }
            turn(&mut self.frontend);
            turn(&mut self.backend);
            for guest in &mut self.guests {
                arrived += u32::try_from(guest.received(BUFFER_BYTES).len()).expect("few");
                guest.transmit.reclaim_pairs();
            }
            if arrived == count {
                return;
            }
        }
        panic!("{arrived} of {count} frames arrived");
    }
}

/// Runs this with each kind of pool, and with the guest's memory elsewhere and in the pool, for each kind of packets.
fn each_kind(
    hardware: impl Fn(Echo<HardwareMemory>, &str),
    software: impl Fn(Echo<SoftwareMemory>, &str),
    directory: &Path,
) {
    for mode in [CoherenceMode::Hardware, CoherenceMode::Software] {
        for kind in KINDS {
            let options =
                CreateOptions { size_bytes: Some(POOL_BYTES), mode, force: true, ..CreateOptions::default() };
            let path = directory.join("pool");
            let pool = Pool::create(&path, &options).expect("a pool");
            let file = File::options().read(true).write(true).open(&path).expect("the pool's file");
            for guest in [Guest::new(QUEUE_SIZE), Guest::in_pool_file(&file, QUEUE_SIZE)] {
                let name = format!("{mode:?}, {kind:?}, in the pool: {}", guest.pool_file.is_some());
                match mode {
                    CoherenceMode::Hardware => hardware(Echo::start(&pool.hardware(), guest, kind), &name),
                    CoherenceMode::Software => software(Echo::start(&pool.software(), guest, kind), &name),
                }
            }
        }
    }
}

fn expect_no_allocation<M: Memory>(mut pair: Echo<M>, kind: &str) {
    ALLOCATIONS.store(0, Ordering::Relaxed);
    pair.echo(5_000);
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), 0, "{kind}");
}

#[test]
fn no_packet_costs_an_allocation() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    each_kind(expect_no_allocation, expect_no_allocation, directory.path());
    // The count itself works.
    COUNTS.set(true);
    let boxed = std::hint::black_box(Box::new(1u64));
    COUNTS.set(false);
    assert_eq!((*boxed, ALLOCATIONS.load(Ordering::Relaxed)), (1, 1));
}

/// Which kind a process is to run that must make no system call, and whether it makes one all the same.
const CONFINED: &str = "WADI_TEST_CONFINED";
const CONTROL: &str = "WADI_TEST_CONFINED_CONTROL";

/// From here on the kernel kills the process for what it is asked, but to end it. Where the clock is no matter of the processor, reading
/// it is a system call, which is none of ours.
fn confine() {
    let ends = [libc::SYS_exit_group, libc::SYS_sigaltstack, libc::SYS_munmap];
    let allowed = ends.into_iter().chain([libc::SYS_clock_gettime]);
    let filter = SeccompFilter::new(
        allowed.map(|call| (call, Vec::new())).collect(),
        SeccompAction::KillProcess,
        SeccompAction::Allow,
        env::consts::ARCH.try_into().expect("an architecture that it knows"),
    );
    let program: BpfProgram = filter.and_then(TryInto::try_into).expect("a filter");
    seccompiler::apply_filter(&program).expect("a kernel with seccomp");
}

/// Lets packets flow, and ends the process.
fn echo_confined<M: Memory>(mut pair: Echo<M>, kind: &str) {
    if env::var(CONFINED).as_deref() != Ok(kind) {
        return;
    }
    // What is done once is done then.
    pair.echo(2_000);
    // The guest of the test allocates what it receives. There is room for more than that, as much as is kept when it is free.
    drop(std::hint::black_box(vec![1u8; 96 << 10]));
    let control = env::var_os(CONTROL).is_some();
    confine();
    if control {
        std::thread::yield_now();
    }
    pair.echo(5_000);
    process::exit(0);
}

#[test]
fn no_packet_costs_a_system_call() {
    if env::var_os(CONFINED).is_some() {
        let directory = env::current_dir().expect("the directory that the test made");
        each_kind(echo_confined, echo_confined, &directory);
        panic!("there is no such kind");
    }
    // Whoever is killed would leave one of its own.
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let kinds = RefCell::new(Vec::new());
    let note = |kind: &str| kinds.borrow_mut().push(kind.to_owned());
    each_kind(|_, kind| note(kind), |_, kind| note(kind), directory.path());
    let run = |kind: &str, control: bool| {
        let mut process = Command::new(env::current_exe().expect("this test"));
        process.args(["--exact", "no_packet_costs_a_system_call"]).env(CONFINED, kind);
        if control {
            process.env(CONTROL, "");
        }
        process.current_dir(directory.path()).output().expect("it runs").status
    };
    for kind in kinds.take() {
        let status = run(&kind, false);
        assert!(
            status.success(),
            "{kind}: {status}: a system call was made while packets flowed. Which one, `WADI_TEST_CONFINED='{kind}' strace -f` \
             on this test says"
        );
        assert_eq!(run(&kind, true).signal(), Some(libc::SIGSYS), "{kind}: nobody would notice one");
    }
}
