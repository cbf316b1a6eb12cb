//! Hears when a TAP device that was full takes packets again. It is one descriptor that becomes readable when another one is to be written.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

/// Watches a device for room, each time it is asked to.
#[derive(Debug)]
pub(super) struct RoomWatch(OwnedFd);

impl RoomWatch {
    /// Will watch this device.
    pub(super) fn new(device: impl AsFd) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, device, EventData::new_u64(0), EventFlags::ONESHOT)?;
        Ok(Self(epoll))
    }

    /// Becomes readable as soon as the device has room, if it has any at once, and says no more of it afterwards.
    pub(super) fn watch(&self, device: impl AsFd) -> bool {
        epoll::modify(&self.0, device, EventData::new_u64(0), EventFlags::OUT | EventFlags::ONESHOT).is_ok()
    }

    /// Does not say anything any more.
    pub(super) fn forget(&self, device: impl AsFd) {
        // It was watched.
        let _ = epoll::modify(&self.0, device, EventData::new_u64(0), EventFlags::ONESHOT);
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
