//! Seeing through non-coherent memory whether somebody lives, and saying that one does.
//!
//! A slot of the pool is one process's, on whatever host: its hello says whose, and its heartbeat that it lives. Nothing in the pool can
//! be claimed, so whoever comes [watches the heartbeat](predecessor) first, and whoever is there [looks at its hello](usurper) again and
//! again: where it stood still when the other one watched, or both came at the same moment, the one whose hello is in the slot has it.

use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

pub(crate) use cxl_pool::read_beat;
use cxl_pool::{
    ByteOffset, ControllerHello, Found, Hello, LineCount, LineOffset, Memory, Record, ReplicaHello,
};

/// How long a slot is watched before it is taken from a predecessor that did not leave. A living one beats at least
/// [`BEATS_OF_THE_LIVING`] times meanwhile. A dead one's last beat may still leave its cache: that is one.
const WATCH_FOR: Duration = Duration::from_millis(200);
const BEATS_OF_THE_LIVING: u32 = 2;
/// How often it is looked meanwhile: oftener than anybody beats.
const WATCH_EVERY: Duration = Duration::from_millis(4);

/// Says whose a slot is.
pub(crate) trait Announcement: Record {
    /// Which life of its writer this is; never 0.
    fn incarnation(&self) -> u64;

    /// Its writer's process, as seen on its host.
    fn pid(&self) -> u32;
}

macro_rules! announcements {
    ($($record:ty),*) => {
        $(impl Announcement for $record {
            fn incarnation(&self) -> u64 {
                self.incarnation
            }

            fn pid(&self) -> u32 {
                self.pid
            }
        })*
    };
}

announcements!(Hello, ControllerHello, ReplicaHello);

/// Somebody has a slot, and lives: this process on its host, unless its hello cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Alive {
    pub(crate) pid: Option<u32>,
}

/// As what somebody lives elsewhere, for messages.
pub(crate) fn as_process(pid: Option<u32>) -> String {
    pid.map_or_else(
        || "as a process there whose hello in the pool cannot be read".to_owned(),
        |pid| format!("as process {pid} there"),
    )
}

/// What is in the slot of somebody who looks, in place of its own hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usurper {
    /// Another life, which is this process on its host.
    Process(u32),
    /// Nothing that can be read: another life has come and gone, or the line was damaged.
    Nobody,
}

impl fmt::Display for Usurper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(pid) => write!(
                f,
                "process {pid} of another host took its slot of the pool while it stood still, or started at the same moment"
            ),
            Self::Nobody => f.write_str(
                "its hello is not in the pool any more; either another process of another host had its slot meanwhile, or \
                 something else wrote over it",
            ),
        }
    }
}

/// A random number that is not 0: one life of a daemon or controller.
pub(crate) fn new_incarnation() -> u64 {
    uuid::Uuid::new_v4().as_u64_pair().0.max(1)
}

/// The value of a heartbeat that this host itself writes, or that a host with the same id does. A dead predecessor may
/// have left its last beat in our cache, and invalidating what was not written back is for other hosts' lines only.
pub(crate) fn read_own_beat<M: Memory>(memory: &M, at: ByteOffset) -> u64 {
    memory.flush(at, 8);
    memory.full_fence();
    memory.load(at)
}

/// Makes a heartbeat visible.
pub(crate) fn write_beat<M: Memory>(memory: &M, at: ByteOffset, beat: u64) {
    memory.store(at, beat);
    memory.write_back(at, 8);
    memory.store_fence();
}

/// A record that this host itself writes; as [`read_own_beat`].
pub(crate) fn look_own<R: Record, M: Memory>(memory: &M, at: LineOffset) -> Option<R> {
    match find_own(memory, at) {
        Found::Record(record) => Some(record),
        Found::Nothing | Found::Unreadable => None,
    }
}

/// As [`look_own`], for who has to tell nothing from what cannot be read.
fn find_own<R: Record, M: Memory>(memory: &M, at: LineOffset) -> Found<R> {
    memory.flush(at.bytes(), LineCount::new(R::LINES).bytes());
    memory.full_fence();
    R::find(memory, at)
}

/// Who had the slot with this hello and this heartbeat before whoever asks, if it did not leave in order and can be read. The error: it
/// has it still. Takes a while unless it left. Damage to the hello says nothing of its writer, whose heartbeat is in another line.
pub(crate) fn predecessor<R: Announcement, M: Memory>(
    memory: &M,
    (hello, heartbeat): (LineOffset, ByteOffset),
) -> Result<Option<R>, Alive> {
    let before = match find_own::<R, M>(memory, hello) {
        Found::Nothing => return Ok(None),
        Found::Unreadable => None,
        Found::Record(hello) => Some(hello),
    };
    let began = Instant::now();
    let mut seen = read_own_beat(memory, heartbeat);
    let mut beats = 0;
    while began.elapsed() < WATCH_FOR {
        thread::sleep(WATCH_EVERY);
        let beat = read_own_beat(memory, heartbeat);
        beats += u32::from(beat != seen);
        seen = beat;
        if beats >= BEATS_OF_THE_LIVING {
            // It may have been writing its hello just then.
            return Err(Alive { pid: look_own::<R, M>(memory, hello).map(|hello| hello.pid()) });
        }
    }
    Ok(before)
}

/// Who has the slot with this hello, if it is not this life.
pub(crate) fn usurper<R: Announcement, M: Memory>(
    memory: &M,
    hello: LineOffset,
    incarnation: u64,
) -> Option<Usurper> {
    match look_own::<R, M>(memory, hello) {
        Some(hello) if hello.incarnation() == incarnation => None,
        Some(hello) => Some(Usurper::Process(hello.pid())),
        None => Some(Usurper::Nobody),
    }
}

/// Takes the hello of this life away, so that the next one need not watch. Another life's is not ours to take; one that cannot be read
/// is, since nobody could tell by it that we left.
pub(crate) fn leave<R: Announcement, M: Memory>(memory: &M, hello: LineOffset, incarnation: u64) {
    let ours = match find_own::<R, M>(memory, hello) {
        Found::Nothing => false,
        Found::Unreadable => true,
        Found::Record(hello) => hello.incarnation() == incarnation,
    };
    if ours {
        R::erase(memory, hello);
    }
    // The process may end here: nothing after this would push the line out.
    memory.full_fence();
}
