//! Discards on block devices.
//!
//! Of a file, a hole is made: `fallocate` does that, and io_uring has it done without us. On a block device that writes zeroes, and
//! makes nothing of what can only forget. What tells a device to forget is an ioctl, which returns when the device has; io_uring knows
//! it since Linux 6.12 only. So a thread of its own waits for it.
#![allow(unsafe_code)] // an ioctl that has no name in any crate that we use

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use rustix::event::{EventfdFlags, eventfd};

/// What tells a device to forget a range: `_IO(0x12, 119)`, with offset and length in bytes.
const BLKDISCARD: libc::Ioctl = 0x1277;

/// How the discards of a device are carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Its file system makes holes of whole blocks of so many bytes, 0 if it does not say. What is left of a range at both ends it only
    /// overwrites with zeros, which gives nothing back.
    Holes { block_bytes: u64 },
    /// It is a block device, and forgets whole units of so many bytes. What is left of a range at both ends it keeps.
    Forgets { granularity_bytes: u64 },
    /// It is a block device that cannot: nothing is done, for a discard is advice.
    Nothing,
}

impl Way {
    /// How it is with this file or device.
    pub(super) fn of(file: &File) -> Self {
        let Ok(metadata) = file.metadata() else { return Self::Holes { block_bytes: 0 } };
        if !metadata.file_type().is_block_device() {
            // Not `st_blksize`, which is how much is best read at once.
            let block_bytes = rustix::fs::fstatvfs(file).map_or(0, |it| it.f_bsize);
            return Self::Holes { block_bytes };
        }
        let number = metadata.rdev();
        let device = format!("/sys/dev/block/{}:{}", libc::major(number), libc::minor(number));
        // A partition's are those of the whole device, whose directory it lies in.
        let limit = |name: &str| {
            let of = |queue: &str| fs::read_to_string(format!("{device}/{queue}/{name}")).ok();
            of("queue").or_else(|| of("../queue"))?.trim().parse::<u64>().ok()
        };
        match limit("discard_max_bytes") {
            Some(0) => Self::Nothing,
            // Where nobody says, the device does.
            _ => Self::Forgets { granularity_bytes: limit("discard_granularity").unwrap_or(0) },
        }
    }

    /// Of how many bytes, from such a boundary on, a discard has to be to have any effect, where that is known.
    ///
    /// Where the device's own boundaries do not begin with its first byte (`discard_alignment`), a guest cannot be told: virtio has no
    /// field for that.
    pub(super) fn granularity_bytes(self) -> Option<u32> {
        let (Self::Holes { block_bytes: bytes } | Self::Forgets { granularity_bytes: bytes }) = self else {
            return None;
        };
        u32::try_from(bytes).ok().filter(|&bytes| bytes > 0)
    }
}

/// A discard that was asked for.
#[derive(Debug, Clone, Copy)]
struct Asked {
    id: u32,
    at: u64,
    bytes: u64,
}

/// The thread that has a device forget ranges, one after the other.
///
/// Dropping it waits for nothing: what it is about goes on, and what has not begun does not. The thread has the device open until then,
/// and with that its lock.
pub(super) struct Discards {
    asked: SyncSender<Asked>,
    ended: Receiver<(u32, i32)>,
    /// Readable when one has ended.
    event: OwnedFd,
    /// Somebody waits for that.
    is_listened_to: bool,
    is_over: Arc<AtomicBool>,
    under_way: u32,
    /// What the thread did not take.
    refused: Vec<u32>,
}

impl Discards {
    /// Begins a thread that has no more than `depth` of them at a time.
    pub(super) fn begin(file: &File, depth: u32) -> io::Result<Self> {
        let depth = depth as usize;
        let (file, event) = (file.try_clone()?, eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (asked, asks) = sync_channel::<Asked>(depth);
        let (tells, ended) = sync_channel(depth);
        let (bell, is_over) = (event.try_clone()?, Arc::new(AtomicBool::new(false)));
        let stop = Arc::clone(&is_over);
        std::thread::Builder::new().name("discard".to_owned()).spawn(move || {
            while let Ok(Asked { id, at, bytes }) = asks.recv() {
                if stop.load(Ordering::Relaxed) || tells.send((id, discard(&file, at, bytes))).is_err() {
                    return;
                }
                // It fails only when the counter is full, and then it is readable.
                let _ = rustix::io::write(&bell, &1_u64.to_ne_bytes());
            }
        })?;
        Ok(Self { asked, ended, event, is_listened_to: false, is_over, under_way: 0, refused: Vec::new() })
    }

    /// Has a range forgotten. Where that cannot be, because the thread is gone or has too many, it ends as failed.
    pub(super) fn ask(&mut self, id: u32, at: u64, bytes: u64) {
        match self.asked.try_send(Asked { id, at, bytes }) {
            Ok(()) => self.under_way += 1,
            Err(_) => self.refused.push(id),
        }
    }

    /// The next one that ended, with its result as system calls return it.
    pub(super) fn ended(&mut self) -> Option<(u32, i32)> {
        if let Some(id) = self.refused.pop() {
            return Some((id, -libc::EIO));
        }
        if self.under_way == 0 {
            return None;
        }
        let ended = self.ended.try_recv().ok()?;
        self.under_way -= 1;
        Some(ended)
    }

    /// What to wait for, until it is readable, to hear of the next one that ends; nothing if that is being done, or if there is none.
    pub(super) fn listen(&mut self) -> Option<RawFd> {
        let wanted = self.under_way > 0 && !self.is_listened_to;
        self.is_listened_to |= wanted;
        wanted.then(|| self.event.as_raw_fd())
    }

    /// It was readable. What has ended so far is about to be collected.
    pub(super) fn heard(&mut self) {
        self.is_listened_to = false;
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }
}

impl Drop for Discards {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

fn discard(file: &File, at: u64, bytes: u64) -> i32 {
    let range = [at, bytes];
    // SAFETY: the kernel reads the two numbers, which outlive the call, and touches no other memory of ours.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD, range.as_ptr()) };
    if result < 0 { -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) } else { 0 }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    #[test]
    fn a_granularity_is_said_where_there_is_one() {
        for (way, said) in [
            (Way::Holes { block_bytes: 1024 }, Some(1024)),
            (Way::Holes { block_bytes: 0 }, None),
            (Way::Forgets { granularity_bytes: 2 << 20 }, Some(2 << 20)),
            (Way::Forgets { granularity_bytes: 0 }, None),
            (Way::Forgets { granularity_bytes: 1 << 32 }, None),
            (Way::Nothing, None),
        ] {
            assert_eq!(way.granularity_bytes(), said, "{way:?}");
        }
    }

    #[test]
    fn what_is_no_block_device_makes_holes_and_refuses_the_ioctl() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 20).unwrap();
        assert_eq!(Way::of(&file), Way::Holes { block_bytes: 4096 });
        let mut discards = Discards::begin(&file, 2).unwrap();
        assert_eq!(discards.listen(), None, "there is nothing to hear");
        discards.ask(7, 0, 4096);
        assert!(discards.listen().is_some() && discards.listen().is_none(), "once");
        let mut told = [PollFd::new(&discards.event, PollFlags::IN)];
        assert_eq!(poll(&mut told, None), Ok(1));
        discards.heard();
        assert_eq!([discards.ended(), discards.ended()], [Some((7, -libc::ENOTTY)), None]);
        assert_eq!(discards.listen(), None);
    }
}
