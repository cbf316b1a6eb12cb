//! What is done to the disk of another program, to which there is one connection only: the worker has it carry out commands.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use cxl_pool::ByteOffset;
use pod_protocol::worker::WorkerHandle;

use super::chores::Chore;
use super::task::Message;
use super::wiping::{Eraser, WIPE_STEP_BYTES};
use crate::message::Operation;
use crate::ssd::{Outcome, SCRATCH_BYTES, Scratch, Store};

/// How often a stop is noticed while a device is waited for.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A device of the worker, by its number there.
#[derive(Clone)]
pub(super) struct Commanded {
    pub(super) worker: WorkerHandle<Message>,
    pub(super) device: usize,
}

/// Makes zeros.
pub(super) struct CommandEraser(pub(super) Commanded);

/// Writes tables of volumes, through memory that the program shares.
pub(super) struct CommandStore {
    pub(super) device: Commanded,
    pub(super) scratch: Arc<Scratch>,
    pub(super) block_bytes: u32,
}

impl Commanded {
    /// Has a chore done, and returns when the device has. Only a stop leaves one behind, which the device ends before the next process has
    /// it; so does a worker that ends.
    fn does(
        &self,
        (operation, start_bytes, length_bytes): (Operation, u64, u64),
        data: ByteOffset,
        stop: &AtomicBool,
    ) -> io::Result<()> {
        let (done, answer) = sync_channel(1);
        let chore = Chore { device: self.device, operation, start_bytes, length_bytes, data, done };
        self.worker.send(Message::Chore(chore)).map_err(io::Error::other)?;
        loop {
            return match answer.recv_timeout(LOOK_EVERY) {
                Ok(Outcome::Done) => Ok(()),
                Ok(Outcome::Failed | Outcome::Unsupported) => Err(io::Error::other("the device failed it")),
                Err(RecvTimeoutError::Timeout) if !stop.load(Ordering::Relaxed) => continue,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    Err(io::ErrorKind::Interrupted.into())
                }
            };
        }
    }
}

impl Eraser for CommandEraser {
    fn wipe(&self, start: u64, end: u64, stop: &AtomicBool) -> io::Result<()> {
        let mut at = start;
        while at < end {
            if stop.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let bytes = WIPE_STEP_BYTES.min(end - at);
            self.0.does((Operation::WriteZeroes, at, bytes), ByteOffset::new(0), stop)?;
            at += bytes;
        }
        self.0.does((Operation::Flush, 0, 0), ByteOffset::new(0), stop)
    }
}

/// Whoever writes a table waits for its device, however long that takes.
static NEVER: AtomicBool = AtomicBool::new(false);

impl Store for CommandStore {
    fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let mut at = at;
        for piece in bytes.chunks(SCRATCH_BYTES) {
            self.scratch.write_out(piece, self.block_bytes, |length| {
                self.device.does((Operation::Write, at, length), Scratch::AT, &NEVER)
            })?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.device.does((Operation::Flush, 0, 0), ByteOffset::new(0), &NEVER)
    }
}

impl std::fmt::Debug for CommandStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommandStore").field("device", &self.device.device).finish_non_exhaustive()
    }
}
