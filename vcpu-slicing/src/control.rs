//! The file that an agent and the shim in a QEMU share: one page cache, so what one writes the other sees.
//!
//! ```text
//!      0  magic  process  signal  failure  taken          the shim's, but for the magic
//!     64  begun  run  window  until  ended                the agent's order
//!    128  asked[256]                                      the agent's: threads that it knows to be vCPUs
//!   1152  slots[256], 128 bytes each                      the shim's: one for each vCPU thread that it slices
//! ```
//! Native byte order and alignment: both are on one host, and of one version ([`MAGIC`]).

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use crate::Duty;

/// How many vCPUs of one QEMU can be sliced.
pub const SLOTS: usize = 256;

/// The first word: which file this is, and the version of its layout.
pub const MAGIC: u64 = u64::from_le_bytes(*b"wadiCPU\x01");

/// Why the shim cannot slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Failure {
    /// Its signal has a handler already.
    SignalTaken = 1,
    /// Changes of the file cannot be watched (`fs.inotify.max_user_instances`).
    NoWatch = 2,
    /// A timer cannot be made (`RLIMIT_SIGPENDING`).
    NoTimer = 3,
    /// There are more vCPUs than slots.
    TooManyThreads = 4,
    /// The thread that takes orders cannot be started.
    NoThread = 5,
}

impl Failure {
    /// What the code in the file says.
    pub fn from_code(code: u32) -> Option<Self> {
        [Self::SignalTaken, Self::NoWatch, Self::NoTimer, Self::TooManyThreads, Self::NoThread]
            .into_iter()
            .find(|failure| *failure as u32 == code)
    }

    /// For people.
    pub fn describe(self) -> &'static str {
        match self {
            Self::SignalTaken => "its real-time signal is used by QEMU or another library",
            Self::NoWatch => "it cannot watch its file: raise fs.inotify.max_user_instances",
            Self::NoTimer => "it cannot make a timer: raise the limit of pending signals (ulimit -i)",
            Self::TooManyThreads => "QEMU has more than 256 vCPUs",
            Self::NoThread => "QEMU may start no more threads",
        }
    }
}

/// The agent's order.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Order {
    /// Which version of the order is being written.
    pub begun: AtomicU64,
    /// T_R, in ns.
    pub run_ns: AtomicU64,
    /// T_W, in ns.
    pub window_ns: AtomicU64,
    /// Until when it holds, in ns of `CLOCK_MONOTONIC`: an agent that lives writes it again before, by itself where nothing else
    /// changes. Who reads half of that, if there is such a thing, is told of the rest by the very write.
    pub until_ns: AtomicU64,
    /// Which version has been written.
    pub ended: AtomicU64,
}

/// An order as it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command {
    /// Its version; there is none before 1.
    pub version: u64,
    /// Which part of its time a vCPU may run.
    pub duty: Duty,
    /// Until when it holds, in ns of `CLOCK_MONOTONIC`.
    pub until_ns: u64,
}

impl Command {
    /// Whether threads are to be sliced now. Without an agent that lives they run freely.
    pub fn slices(&self, now_ns: u64) -> bool {
        !self.duty.is_full() && now_ns < self.until_ns
    }
}

impl Order {
    /// The order, unless it is being written now.
    pub fn read(&self) -> Option<Command> {
        let version = self.ended.load(Ordering::Acquire);
        let duty = Duty {
            run_ns: self.run_ns.load(Ordering::Acquire),
            window_ns: self.window_ns.load(Ordering::Acquire),
        };
        let until_ns = self.until_ns.load(Ordering::Acquire);
        (self.begun.load(Ordering::Acquire) == version).then_some(Command { version, duty, until_ns })
    }
}

/// A vCPU thread that is sliced. It counts what passes before what it ran, and that before what it slept: who reads the other way round sees
/// no more than there was time for. Times count while it is, and go on from one order to the next.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Slot {
    /// The thread's id; 0 where the slot is free.
    pub thread: AtomicU32,
    /// Explicit padding.
    pub reserved: AtomicU32,
    /// For how long it has been sliced, in ns.
    pub elapsed_ns: AtomicU64,
    /// How much of that it ran, in ns of processor time.
    pub ran_ns: AtomicU64,
    /// How much of that it was put to sleep, in ns.
    pub slept_ns: AtomicU64,
    /// How often it was put to sleep.
    pub sleeps: AtomicU64,
    /// How often the timer fired.
    pub ticks: AtomicU64,
    /// How often the thread could not be put to sleep where it was, and was tried again.
    pub retries: AtomicU64,
    /// How often that was given up until the next window.
    pub missed: AtomicU64,
    /// Run time that is left from earlier windows, in ns; below 0 what it ran too long.
    pub carry_ns: AtomicI64,
    /// What it ran too long and is not carried, because that would be more than a window, in ns.
    pub forgiven_ns: AtomicU64,
    /// How many windows there were: from one wake-up to the next.
    pub windows: AtomicU64,
    /// The sum over windows of the squared difference between obtained and requested share, in parts per million.
    pub squares: AtomicU64,
}

/// All of the file.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Control {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// The process whose threads are sliced; 0 until the first of them shows itself.
    pub process: AtomicU32,
    /// The signal that the timers send.
    pub signal: AtomicU32,
    /// Why it cannot be done, see [`Failure`]; 0 if it can.
    pub failure: AtomicU32,
    /// Explicit padding.
    pub reserved: AtomicU32,
    /// The version of the order that was taken up last.
    pub taken: AtomicU64,
    /// The agent's order.
    pub order: Order,
    /// Threads that the agent knows to be vCPUs; 0 ends them.
    pub asked: [AtomicU32; SLOTS],
    /// Threads that are sliced.
    pub slots: [Slot; SLOTS],
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(offset_of!(Control, order) == 64);
    assert!(offset_of!(Control, asked) == 128);
    assert!(offset_of!(Control, slots) == 1152);
    assert!(size_of::<Slot>() == 128);
    assert!(size_of::<Control>() == 1152 + SLOTS * 128);
};

#[cfg(test)]
mod tests {
    use super::*;

    fn order(begun: u64, ended: u64) -> Order {
        Order {
            begun: AtomicU64::new(begun),
            run_ns: AtomicU64::new(1),
            window_ns: AtomicU64::new(4),
            until_ns: AtomicU64::new(100),
            ended: AtomicU64::new(ended),
        }
    }

    #[test]
    fn half_an_order_is_none() {
        assert_eq!(order(2, 1).read(), None);
        assert_eq!(order(2, 2).read().map(|command| command.version), Some(2));
    }

    #[test]
    fn an_order_holds_while_its_agent_lives() {
        let command = order(1, 1).read().unwrap();
        assert!(command.slices(99));
        assert!(!command.slices(100));
        let full = Command { duty: Duty { run_ns: 4, window_ns: 4 }, ..command };
        assert!(!full.slices(0), "full duty");
        let none = Command { duty: Duty { run_ns: 0, window_ns: 0 }, ..command };
        assert!(!none.slices(0), "no order yet");
    }

    #[test]
    fn codes_name_failures() {
        assert_eq!(Failure::from_code(Failure::NoThread as u32), Some(Failure::NoThread));
        assert_eq!(Failure::from_code(0), None);
        assert_eq!(Failure::from_code(99), None);
    }
}
